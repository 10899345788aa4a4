"""Benchmarks from files: cutting to a window, files that will not do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import OPTIONS, row_of, written

from pagelocks.eval.datasets import DATASETS, Example, fit, load, score


class Letters:
    """A tokenizer of single characters, but with a token of no width before a b after an a, and three for a W."""

    def __call__(self, text: str, add_special_tokens: bool, return_offsets_mapping: bool = False) -> dict[str, Any]:
        spans = [(0, 0)] if add_special_tokens else []
        for at, letter in enumerate(text):
            spans += [(at, at)] * (letter == "b" and text[at - 1 : at] == "a")
            spans += [(at, at + 1)] * (3 if letter == "W" else 1)
        return {"input_ids": list(range(len(spans)))} | ({"offset_mapping": spans} if return_offsets_mapping else {})


def parts(before: str, context: str, after: str) -> Example:
    return Example("longbench/hotpotqa", 0, "0", before, context, after, ("x",), 32)


def test_the_middle_of_the_context_is_cut() -> None:
    digits = "".join(str(number % 10) for number in range(100))
    example = parts("<<<", digits, ">>")
    assert fit(example, Letters(), 106) is example and fit(example, Letters(), 105, False) is example
    cut = fit(example, Letters(), 20, add_special_tokens=False)
    # The first and the last ten tokens of the prompt, as LongBench has it.
    assert cut.prompt == example.prompt[:10] + example.prompt[-10:] and cut.cut == 85
    assert (cut.before, cut.after, cut.references) == (example.before, example.after, example.references)
    assert fit(example, Letters(), 20).cut == 86
    assert fit(cut, Letters(), 18, add_special_tokens=False).cut == 87
    # An instruction of more than half the room stays whole; what is left goes to the end.
    long = fit(parts("<" * 15, digits, ">>"), Letters(), 20, add_special_tokens=False)
    assert long.prompt == "<" * 15 + digits[-3:] + ">>"
    long = fit(parts("<<<", digits, ">" * 15), Letters(), 20, add_special_tokens=False)
    assert long.prompt == "<<<" + digits[:2] + ">" * 15


def test_tokens_that_the_cut_brings_about_are_counted() -> None:
    example = parts("", "a" * 50 + "c" + "b" * 50, "")
    for tokens in (100, 40, 7):
        assert len(Letters()(fit(example, Letters(), tokens, False).prompt, False)["input_ids"]) == tokens
    # Of a character with three tokens, the first ends what stands before and the last begins what comes after.
    assert fit(parts("", "xWy", ""), Letters(), 4, False) == replace(parts("", "xW", ""), cut=1)


@pytest.mark.model
def test_cutting_with_a_real_tokenizer(made: Callable[..., Example]) -> None:
    from transformers import AutoTokenizer

    from pagelocks.models import fetch

    tokenizer = AutoTokenizer.from_pretrained(fetch("SmolLM2-135M-Instruct"))
    # Characters of several tokens each among the words.
    context = " ".join(f"Line {number}: 北京 🐝🐝 Ångström's hive;" for number in range(200))
    example = made("longbench/hotpotqa", context=context)
    around = len(tokenizer.encode(example.before + example.after))
    for tokens in [*range(around + 3, around + 60), 500, 2001]:
        cut = fit(example, tokenizer, tokens)
        used = len(tokenizer.encode(cut.prompt))
        assert tokens - 6 <= used <= tokens and cut.cut > 0
        kept = max(n for n in range(len(cut.context) + 1) if context.startswith(cut.context[:n]))
        assert context.endswith(cut.context[kept:])


def test_a_window_that_the_instructions_fill_is_refused(made: Callable[..., Example]) -> None:
    with pytest.raises(ValueError, match=r"tokens=5 is not allowed: longbench/hotpotqa has about 6 tokens around its"):
        fit(parts("<<<", "0123456789", ">>>"), Letters(), 5, add_special_tokens=False)
    with pytest.raises(ValueError, match=r"tokens=10 is not allowed: aime has about \d+ tokens"):
        fit(made("aime"), Letters(), 10)
    for tokens, why in ((0, "the least is 1"), (2.5, "a whole number"), (True, "a whole number")):
        with pytest.raises(ValueError, match=f"tokens={tokens} is not allowed: {why}"):
            fit(made("aime"), Letters(), tokens)  # type: ignore[arg-type]


def test_limit_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row_of("longbench/hotpotqa", _id=str(number))) for number in range(3)]
    path.write_text("\n" + "\n\n".join(lines) + "\n\n")
    assert [example.id for example in load("longbench/hotpotqa", path)] == ["0", "1", "2"]
    # What the limit leaves out is not read.
    path.write_text("\n".join([*lines[:2], "{"]))
    assert [example.index for example in load("longbench/hotpotqa", path, limit=2)] == [0, 1]
    with pytest.raises(
        ValueError, match=r"rows.jsonl, line 3' is not allowed: .*JSON is needed; it breaks at column 2"
    ):
        load("longbench/hotpotqa", path, limit=3)
    for limit, why in ((0, "the least is 1"), ("2", "a whole number")):
        with pytest.raises(ValueError, match=rf"limit={limit!r} is not allowed: {why}"):
            load("longbench/hotpotqa", path, limit=limit)  # type: ignore[arg-type]


def test_the_extended_files_of_longbench_are_read(made: Callable[..., Example]) -> None:
    assert made("longbench/2wikimqa", dataset="2wikimqa_e", length=5000).meta["length"] == 5000


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("longbench/hotpotqa", {"context": None}, "the field 'context' must be text, not None"),
        ("longbench/hotpotqa", {"context": " "}, "the field 'context' must be text"),
        ("longbench/hotpotqa", {"input": 3}, "the field 'input' must be text, not 3"),
        ("longbench/hotpotqa", {"answers": []}, r"the field 'answers' must be a list of text, not \[\]"),
        ("longbench/hotpotqa", {"answers": "Ada"}, "the field 'answers' must be a list of text, not 'Ada'"),
        ("longbench/hotpotqa", {"dataset": "musique"}, "rows of the dataset 'hotpotqa' are needed, not 'musique'"),
        ("longbench/trec", {"all_classes": None}, "the field 'all_classes' must be a list of text, not None"),
        ("longbench/passage_count", {"answers": ["many"]}, r"an answer must hold a number, unlike \('many',\)"),
        ("infinitebench/passkey", {"answer": "none"}, "the field 'answer' must be a number, not 'none'"),
        ("infinitebench/passkey", {"answer": []}, "the field 'answer' must be text, a number or a list"),
        ("infinitebench/kv_retrieval", {"answer": {"a": 1}}, "the field 'answer' must be text, a number or a list"),
        ("infinitebench/math_calc", {"answer": [[1, True]]}, "the field 'answer' must be text, a number or a list"),
        ("infinitebench/code_run", {"input": "func(3)"}, r"the field 'input' must name a call such as func_3\(-4\)"),
        ("infinitebench/code_debug", {"options": OPTIONS[:3]}, "four options are needed, 'the barn' among them"),
        ("infinitebench/code_debug", {"answer": "the sea"}, "four options are needed, 'the sea' among them"),
        (
            "infinitebench/code_debug",
            {"answer": ["the barn", "E"]},
            "the field 'answer' must be an option or an option and its letter",
        ),
        ("aime", {"answer": 1000}, "the answer must be a whole number from 0 to 999, not 1000"),
        ("aime", {"answer": "x"}, "the answer must be a whole number from 0 to 999, not 'x'"),
        ("aime", {"answer": True}, "the answer must be a whole number from 0 to 999, not True"),
        ("math500", {"answer": ""}, "the field 'answer' must be text, not ''"),
        ("math500", {"answer": 42}, "the field 'answer' must be text, not 42"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(name: str, changes: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    path = written(tmp_path, row_of(name), row_of(name, **changes))
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2' is not allowed: for {name}, {wrong}.*Give the file"):
        load(name, path)


@pytest.mark.parametrize("name", DATASETS)
def test_a_missing_field_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    row = row_of(name)
    needed = ["problem", "answer"] if name in ("aime", "math500") else ["context", "input"]
    needed += {"longbench": ["answers"], "infinitebench": ["answer"]}.get(name.split("/")[0], [])
    needed += [key for key in ("all_classes", "options") if row.get(key)]
    for key in needed:
        left = {other: value for other, value in row.items() if other != key}
        with pytest.raises(
            ValueError, match=rf"line 2' is not allowed: for {name}, the field '{key}' is missing \(there"
        ):
            load(name, written(tmp_path, row, left))
    # The rest may be missing.
    assert len(load(name, written(tmp_path, {key: row[key] for key in needed}))) == 1


def test_a_file_that_will_not_do(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for missing in (path, tmp_path):
        with pytest.raises(ValueError, match=r"path='.*' is not allowed: aime takes a file of JSON.*an existing file"):
            load("aime", missing)
    cases = {
        b"": "at least one object is needed",
        b"\n \n": "at least one object is needed",
        b"[]": "at least one object is needed",
        b"3": "an object is needed, not 3",
        b'{"problem": "P", "answer": 3}\n[1]': r"line 2' is not allowed: for aime, an object is needed, not \[1\]",
        b'[{"problem": "P", "answer": 3}, 4]': "object 2' is not allowed: for aime, an object is needed, not 4",
        b'[{"problem": "P"}]': "object 1' is not allowed: for aime, the field 'answer' is missing",
        b'[{"problem": "P",\n "answer" 3}]': "JSON is needed; it breaks at line 2, column 11",
        b'{"problem": "P", "answer": 3}\n{"problem"}': "line 2' is not allowed: for aime, JSON is needed; it breaks at",
        b'{"problem": "\xff"}': "text in UTF-8 is needed",
        b"{}": r"the field 'problem' is missing \(there are none\)",
    }
    for content, wrong in cases.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=wrong):
            load("aime", path)


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"dataset='longbench/hotpot' is not allowed: one of longbench/narrativeqa, .*"
    ):
        load("longbench/hotpot", tmp_path / "not looked for")
    with pytest.raises(ValueError, match=r"answer=None is not allowed: a string"):
        score(None, parts("", "", ""))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("longbench/multifieldqa_zh", "jieba", "jieba"),
        ("longbench/vcsum", "jieba", "jieba"),
        ("longbench/dureader", "rouge", "rouge"),
        ("longbench/samsum", "rouge", "rouge"),
        ("longbench/lcc", "rapidfuzz.fuzz", "rapidfuzz"),
        ("infinitebench/longbook_sum_eng", "rouge_score.rouge_scorer", "rouge-score"),
        ("math500", "math_verify", "math-verify"),
    ],
)
def test_a_missing_package_is_named_before_anything_runs(
    name: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, row_of(name))
    assert len(load(name, path)) == 1
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"scored with {package}: run pip install 'pagelocks\[eval\]'"):
        load(name, path)
