"""RULER's tasks from files: essays, SQuAD v2, HotpotQA; what is said of a file that will not do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_ruler import ESSAYS, NEEDLE, Words

from pagelocks.eval.ruler import TASKS, Record
from pagelocks.eval.ruler.needles import read_sentences


@pytest.mark.parametrize("name", ESSAYS)
def test_essays_come_from_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "essay.txt"
    path.write_text(
        "It rained.  Was it\ncold? No! " + "and so on " * 30 + "to the end.\n\nThe third part, e.g. this one."
    )
    pieces = read_sentences(path)
    assert pieces[:3] == ("It rained.", "Was it cold?", "No!") and max(len(piece.split()) for piece in pieces) == 40
    record = TASKS[name].make(Words(), 1000, 0, 0, path)
    assert not record.substitute
    body = re.sub(r"\s+", " ", NEEDLE.sub("", record.context.split("\n\n")[1])).strip()
    assert (" ".join(pieces * 20)).startswith(body) and len(body) > 1000  # again from the start when it ends
    assert all(record.prompt.count(reference) == 1 for reference in record.references)
    path.write_text("A special magic number for x is 1234567.")
    with pytest.raises(ValueError, match=r"must not speak of special magic things, as needles do"):
        TASKS[name].make(Words(), 1000, 0, 0, path)
    path.write_text(" \n")
    with pytest.raises(ValueError, match="a file with text in it"):
        TASKS[name].make(Words(), 1000, 0, 0, path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="a text file in UTF-8"):
        TASKS[name].make(Words(), 1000, 0, 0, path)


def answer(text: str) -> dict[str, Any]:
    return {"text": text, "answer_start": 0}


def squad() -> dict[str, Any]:
    asked = [
        {
            "id": "1",
            "question": "Who built it?",
            "is_impossible": False,
            "answers": [answer("Ada"), answer("Ada"), answer("A. L.")],
        },
        {
            "id": "2",
            "question": "Who paid?",
            "is_impossible": True,
            "answers": [],
            "plausible_answers": [answer("Bob")],
        },
    ]
    bridge = {"title": "Bridge", "paragraphs": [{"context": "Ada (A. L.) built the bridge.", "qas": asked}]}
    bridge["paragraphs"] += [{"context": f"The bridge has arch {n}.", "qas": []} for n in ("one", "two")]
    other = [{"context": f"Hill number {n} is bare.", "qas": []} for n in ("a", "b", "c", "d")]
    other.append(
        {
            "context": "Hill e has a hut.",
            "qas": [{"id": "3", "question": "What is on e?", "answers": [answer("a hut")]}],
        }
    )
    return {"version": "v2.0", "data": [bridge, {"title": "Hills", "paragraphs": other}]}


def hotpot() -> list[dict[str, Any]]:
    context = [
        ["Ada", ["Ada is tall.", " She knows Bob."]],
        ["Bob", ["Bob lives in Rome."]],
        ["Cat", ["A cat is small."]],
    ]
    first = {
        "_id": "1",
        "question": "Where lives whom Ada knows?",
        "answer": "Rome",
        "type": "bridge",
        "context": context,
    }
    first["supporting_facts"] = [["Ada", 1], ["Bob", 0], ["Ada", 0]]
    second = {"_id": "2", "question": "Is Eve old?", "answer": "yes", "context": [["Eve", ["Eve is old."]], context[2]]}
    return [first, {**second, "supporting_facts": [["Eve", 0]]}]


def filled(name: str, path: Path, index: int, length: int = 5000) -> Record:
    """The record with every passage of the file in it."""
    with pytest.raises(ValueError, match=r"passages and \d+ more fill (\d+) tokens\. Ask for (\d+) or less") as caught:
        TASKS[name].make(Words(), length, 0, index, path)
    return TASKS[name].make(Words(), int(re.search(r"Ask for (\d+)", str(caught.value))[1]), 0, index, path)  # type: ignore[index]


def test_qa_1_reads_squad(tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(squad()))
    records = {record.question: record for record in (filled("qa_1", path, index) for index in (0, 1))}
    assert set(records) == {"Question: Who built it?", "Question: What is on e?"}
    record = records["Question: Who built it?"]
    assert record.references == ("Ada", "A. L.") and record.meta["size"] == 7 and not record.substitute
    (span,) = record.facts
    assert re.fullmatch(r"Passage \d:\nAda \(A\. L\.\) built the bridge\.", record.context[slice(*span)])
    # The article's own passages come before those of others.
    index = next(index for index in (0, 1) if filled("qa_1", path, index).question == record.question)
    shorter = [TASKS["qa_1"].make(Words(), length, 0, index, path) for length in range(80, 110, 5)]
    assert all("Hill" not in short.context for short in shorter if short.meta["size"] <= 2)
    assert {short.meta["size"] for short in shorter} > {1, 2}
    with pytest.raises(ValueError, match=r"index=2 is not allowed: .* has 2 questions with an answer. Use 0 to 1"):
        TASKS["qa_1"].make(Words(), 100, 0, 2, path)


def test_qa_2_reads_hotpotqa(tmp_path: Path) -> None:
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(hotpot()))
    records = {record.question: record for record in (filled("qa_2", path, index) for index in (0, 1))}
    record = records["Question: Where lives whom Ada knows?"]
    assert record.references == ("Rome",) and record.meta["size"] == 2 and not record.substitute
    right = {re.sub(r"Passage \d:\n", "", record.context[a:b]) for a, b in record.facts}
    assert right == {"Ada\nAda is tall. She knows Bob.", "Bob\nBob lives in Rome."}
    assert record.context.count("A cat is small.") == 1
    assert records["Question: Is Eve old?"].references == ("yes",)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_another_format_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    wrong = hotpot() if name == "qa_1" else squad()
    cases: list[Any] = [
        json.dumps(wrong),
        "{",
        '"text"',
        "3",
        "null",
        '{"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}',
    ]
    cases += ['[{"question": "Q", "answer": "A", "context": [["T", ["S."]]], "supporting_facts": [["U", 0]]}]']
    for number, case in enumerate(cases):
        path = tmp_path / f"{number}.json"
        path.write_text(case)
        with pytest.raises(ValueError, match=rf"source='.*' is not allowed: {name} takes a JSON file of .* published"):
            TASKS[name].make(Words(), 1000, 0, 0, path)
    path.write_text('{"data": []}' if name == "qa_1" else "[]")
    with pytest.raises(ValueError, match="a file with a question that has an answer"):
        TASKS[name].make(Words(), 1000, 0, 0, path)
