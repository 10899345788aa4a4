"""Benchmarks from files: prompts, scores worked out by hand."""

# ruff: noqa: RUF001 (Chinese has its own comma)

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import PROBLEM, row_of

from pagelocks.eval.datasets import DATASETS, Example, load, score
from pagelocks.eval.datasets.aime import integer
from pagelocks.eval.datasets.boxed import last_boxed
from pagelocks.eval.datasets.infinitebench import KINDS as INFINITEBENCH
from pagelocks.eval.datasets.longbench import KINDS as LONGBENCH
from pagelocks.eval.datasets.math500 import equivalent


def test_all_tasks_are_there() -> None:
    assert len(LONGBENCH) == 21 and len(INFINITEBENCH) == 12
    names = {f"longbench/{name}" for name in LONGBENCH} | {f"infinitebench/{name}" for name in INFINITEBENCH}
    assert set(DATASETS) == names | {"aime", "math500"} and all(name == task.name for name, task in DATASETS.items())


WITHOUT_INPUT = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
WITHOUT_INPUT |= {"longbook_sum_eng", "longdialogue_qa_eng", "math_calc", "code_run", "code_debug"}


@pytest.mark.parametrize("name", DATASETS)
def test_a_prompt_holds_what_the_row_says_once(name: str, made: Callable[..., Example]) -> None:
    example, row = made(name), row_of(name)
    assert example.prompt == example.before + example.context + example.after
    assert example.task == name and example.index == 0 and example.cut == 0
    assert not re.search(r"\{(input|call|options)", example.prompt)
    if name in ("aime", "math500"):
        assert example.context == "" and example.prompt.count(PROBLEM) == 1 and "\\boxed{...}" in example.after
        return
    assert example.context == row["context"] and example.before.strip()
    assert example.prompt.count(row["input"]) == (0 if name.split("/")[1] in WITHOUT_INPUT else 1)
    assert example.id == ("f00d" if name.startswith("longbench") else "3")


def test_prompts_ask_for_what_the_scores_read(made: Callable[..., Example]) -> None:
    assert '"unanswerable"' in made("longbench/qasper").after
    assert '"Paragraph 3"' in made("longbench/passage_retrieval_en").after
    assert "段落3" in made("longbench/passage_retrieval_zh").after
    for name in ("trec", "lsht", "triviaqa", "samsum"):
        assert made(f"longbench/{name}", input="Dialogue: x\nSummary:").prompt.endswith("Summary:")
    assert made("longbench/repobench-p").prompt.endswith("Which {one} is it?The next line:\n")
    assert made("infinitebench/code_run").prompt.endswith("func_12(-3) returns")
    for name in ("code_debug", "longbook_choice_eng"):
        assert "A. the mill\nB. the barn\nC. B. the well\nD. the inn\n" in made(f"infinitebench/{name}").after


def test_answer_lengths_and_chat_templates_are_the_published_ones() -> None:
    lengths = {name: DATASETS[f"longbench/{name}"].new_tokens for name in LONGBENCH}
    assert {name for name, n in lengths.items() if n == 512} == {"gov_report", "qmsum", "multi_news", "vcsum"}
    assert {name for name, n in lengths.items() if n == 128} == {"narrativeqa", "qasper", "dureader", "samsum"}
    long = {"multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"}
    assert {name for name, n in lengths.items() if n == 64} == long
    assert sum(n == 32 for n in lengths.values()) == 7
    bare = {name for name, task in DATASETS.items() if not task.chat}
    assert bare == {f"longbench/{name}" for name in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")}
    new = {name: DATASETS[f"infinitebench/{name}"].new_tokens for name in INFINITEBENCH}
    assert (new["passkey"], new["number_string"], new["kv_retrieval"], new["longbook_sum_eng"]) == (6, 12, 50, 1200)
    assert (new["math_find"], new["math_calc"], new["code_run"], new["code_debug"]) == (3, 30_000, 5, 5)
    assert {new[name] for name in new if name[:4] == "long" and "sum" not in name} == {40}


F1_TASKS = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"]
ROUGE_TASKS = ["gov_report", "qmsum", "multi_news", "samsum"]


@pytest.mark.parametrize(
    ("name", "references", "answer", "expected"),
    [
        # red, old, house against red, house: 2 * 2 / (3 + 2).
        *((name, ["red house"], "The red, OLD house!", 0.8) for name in F1_TASKS),
        ("hotpotqa", ["a red house", "nothing"], "nothing", 1.0),
        ("hotpotqa", ["the Hebrides"], "", 0.0),
        ("hotpotqa", ["the"], "a", 0.0),  # nothing is left of either
        ("hotpotqa", ["no no yes"], "no yes", 0.8),  # each word as often as both have it
        # Only a few-shot task's answer ends with its first line.
        ("triviaqa", ["Rhine"], "\n\nRhine\nQuestion: and which lake?", 1.0),
        ("hotpotqa", ["Rhine"], "\n\nRhine\nElbe", 2 / 3),
        # 我, 在, 北京 against 北京; by characters it would be 2 / 3.
        ("multifieldqa_zh", ["北京"], "我在北京", 0.5),
        ("multifieldqa_zh", ["北京"], "，北京。", 1.0),
        ("multifieldqa_zh", ["北京"], "", 0.0),
        *((name, ["北京"], "我在北京", 0.5) for name in ("dureader", "vcsum")),
        *((name, ["北京"], "", 0.0) for name in ("dureader", "vcsum")),
        # The common subsequence b d: 2 of 4 and 2 of 3 words.
        *((name, ["b d e"], "a b c d", 4 / 7) for name in ROUGE_TASKS),
        # A sentence each: z and one of y x, together 2 of 3; as one sentence it would be 1 of 3.
        ("gov_report", ["x y z"], "z. y x", 2 / 3),
        ("gov_report", ["x"], "...", 0.0),
        ("gov_report", ["x"], "", 0.0),
        ("samsum", ["b d e"], "\na b c d\nDialogue: b d e", 4 / 7),
        ("qmsum", ["nothing here", "b d e"], "a b c d", 4 / 7),
        ("passage_count", ["7"], "7", 1.0),
        ("passage_count", ["7"], "7, or 8, or 7", 2 / 3),
        ("passage_count", ["7"], "17", 0.0),
        ("passage_count", ["7"], "seven", 0.0),
        ("passage_retrieval_en", ["Paragraph 12"], "Paragraph 12, not 1", 0.5),
        ("passage_retrieval_en", ["Paragraph 12"], "12", 1.0),
        ("passage_retrieval_en", ["Paragraph 12"], "", 0.0),
        ("passage_retrieval_zh", ["段落12"], "段落12", 1.0),
        ("passage_retrieval_zh", ["段落12"], "段落1", 0.0),
        *((name, ["State"], "State", 1.0) for name in ("trec", "lsht")),
        *((name, ["State"], "State\nPlant", 1.0) for name in ("trec", "lsht")),
        ("trec", ["State"], "State or Plant", 0.5),
        ("trec", ["Other City"], "Other City", 1.0),  # City is part of the right class
        ("trec", ["City"], "Other City", 0.5),  # the right class is part of another
        ("trec", ["State"], "city", 0.0),
        ("trec", ["State"], "", 0.0),
        *((name, ["return x"], "```python\n# so\n// so\nreturn x\nreturn y", 1.0) for name in ("lcc", "repobench-p")),
        # 7 of 8 characters in both: 87.5%, and whole per cents.
        *((name, ["return x"], "return y", 0.88) for name in ("lcc", "repobench-p")),
        ("lcc", ["return x"], "# nothing but this", 0.0),
        ("lcc", ["return x"], "", 0.0),
    ],
)  # fmt: skip
def test_longbench_scores(
    name: str, references: list[str], answer: str, expected: float, made: Callable[..., Example]
) -> None:
    example = made(f"longbench/{name}", answers=references)
    assert example.references == tuple(references)
    assert score(answer, example) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "reference", "answer", "expected"),
    [
        ("passkey", ["71432"], " 71432. Remember it.", 1.0),
        ("passkey", "71432", "It is 71432", 1.0),
        ("passkey", ["71432"], "1: 71432", 0.0),
        ("passkey", ["71432"], "714321", 0.0),
        ("passkey", ["71432"], "", 0.0),
        ("number_string", ["3000077442"], "3000077442", 1.0),
        ("number_string", ["3000077442"], "300007744", 0.0),
        ("kv_retrieval", "ab-12", '{"key": "ab-12"}', 1.0),
        ("kv_retrieval", ["ab-12"], "ab-123", 0.0),
        ("longbook_qa_eng", ["red house", "x"], "The red, old house", 0.8),
        ("longbook_qa_chn", ["北京"], "我在北京。", 2 / 3),  # by characters
        ("longbook_qa_chn", ["北京", "两 个"], "两个", 1.0),
        # Line by line: b d of the first, c of the second, 3 of 5 words against 3 of 4; the references' best.
        ("longbook_sum_eng", ["b d\nc e"], "a b d\nc f", 2 / 3),
        ("longbook_sum_eng", ["nothing", "b d\nc e"], "a b d\nc f", 2 / 3),
        ("longbook_sum_eng", ["b"], "", 0.0),
        ("longbook_sum_eng", ["the runs"], "run", 0.0),  # no stemming
        ("longdialogue_qa_eng", ["JOHN", "John Smith"], '"john": hello', 1.0),
        ("longdialogue_qa_eng", ["JOHN", "SMITH"], "Smith", 0.0),  # the first name alone counts
        ("longdialogue_qa_eng", ["JOHN"], "Johnny", 0.0),
        ("math_find", [88], "the number is 88, not 90", 1.0),
        ("math_find", 88, "88.5", 0.0),
        ("math_find", [48.0], "48", 1.0),
        ("math_find", ["47.5"], "47.5", 1.0),
        ("math_find", [88], "none", 0.0),
        ("math_calc", [[7, 3, 9, 1]], "[7, 3, 8, 1]", 0.5),
        ("math_calc", [7, 3, 9, 1], "7 3 9 1 5", 1.0),
        ("math_calc", ["7", "3"], "3, 7", 0.0),
        ("math_calc", [7, 3], "", 0.0),
        ("code_run", [-4], "so func_12(-3) returns `-4`.", 1.0),
        ("code_run", -4, "4", 0.0),
        ("code_run", ["-4"], "-4 it is", 0.0),
        ("code_run", [-4], "", 0.0),
        ("code_debug", ["the barn"], " B. the barn", 1.0),
        ("code_debug", ["the barn", "B"], "B: since", 1.0),
        ("code_debug", ["the barn"], "B", 0.0),  # as published
        ("code_debug", ["the barn"], "I think the answer is: the barn", 1.0),
        ("code_debug", ["the barn"], "The answer is: `B`", 1.0),
        ("code_debug", ["the barn"], "The answer is: A, that is: B", 0.0),
        ("code_debug", ["the barn"], "The function is: B", 1.0),
        ("code_debug", ["the barn"], "Answer: B", 0.0),
        ("code_debug", ["the barn"], "The answer: B", 1.0),
        ("code_debug", ["the barn"], "the answer is:", 0.0),
        ("code_debug", ["the barn"], "", 0.0),
        ("longbook_choice_eng", ["the barn"], "B", 1.0),
        ("longbook_choice_eng", ["the barn"], "C. B. the well", 0.0),
        ("longbook_choice_eng", ["the barn"], "Ada: B", 0.0),  # a first letter from A to D decides
        ("longbook_choice_eng", ["the barn"], "the barn", 1.0),
        ("longbook_choice_eng", ["the barn", "B"], "So the answer is B.", 1.0),
        ("longbook_choice_eng", ["the barn"], "So the answer is A or B.", 0.0),
        ("longbook_choice_eng", ["the barn"], "It must be (B), or rather B !", 1.0),
        ("longbook_choice_eng", ["the barn"], "It must be D !", 0.0),
        ("longbook_choice_eng", ["the barn"], " \n", 0.0),
    ],
)
def test_infinitebench_scores(
    name: str, reference: Any, answer: str, expected: float, made: Callable[..., Example]
) -> None:
    example = made(f"infinitebench/{name}", answer=reference)
    assert score(answer, example) == pytest.approx(expected)


def test_choices_get_their_letter(made: Callable[..., Example]) -> None:
    for answer in ("the barn", ["the barn"], ["the barn", "B"]):
        assert made("infinitebench/code_debug", answer=answer).references == ("the barn", "B")


def test_rouge_l_of_long_sentences(made: Callable[..., Example]) -> None:
    # The package recurses a level a word, here 2,400 of them; by default Python stops at 1,000.
    limit = sys.getrecursionlimit()
    words = [f"w{number}" for number in range(1200)]
    example = made("longbench/gov_report", answers=[" ".join(words)])
    assert score(" ".join(words[:600] + ["other"] * 600), example) == pytest.approx(600 * 2 / (1200 + 601), abs=1e-6)
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} then \\boxed{ \\frac{1}{2} } done", "\\frac{1}{2}"),
        ("\\fbox{7}", "7"),
        ("$\\boxed 5$", "5"),
        ("\\boxed{\\left\\{1, 2\\right.}", "\\left\\{1, 2\\right."),
        ("\\boxed{a_{b_{c}}^{d}} and }", "a_{b_{c}}^{d}"),
        ("\\boxed{x\n+ 1}", "x\n+ 1"),
        ("\\boxed{}", ""),
        ("\\boxed{1} but no: \\boxed{\\frac{1}{", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_box_holds_the_answer(text: str, held: str | None) -> None:
    assert last_boxed(text) == held


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("042", 42), ("0", 0), ("$42$", 42), ("m+n = 42", 42), ("336^\\circ", 336), ("336^{\\circ}", 336),
        ("42\\text{ apples}", 42), ("1{,}042", 1042), ("42.0", None), ("-42", None), ("4 or 2", None), ("x", None),
        ("", None), ("\\frac{84}{2}", None), ("٤٢", None),
    ],
)  # fmt: skip
def test_whole_numbers_of_aime(text: str, number: int | None) -> None:
    assert integer(text) == number


def test_aime(tmp_path: Path) -> None:
    rows = [
        {"problem_idx": 5, "problem": "P one", "answer": 33},
        {"ID": "2024-I-1", "Problem": "P two", "Answer": "033", "Solution": "so"},
        {"question": "P three", "answer": "33^\\circ"},
    ]
    for text in ("\n".join(map(json.dumps, rows)), "\n" + json.dumps(rows, indent=1), "\ufeff" + json.dumps(rows)):
        path = tmp_path / "aime.json"
        path.write_text(text, encoding="utf-8")
        examples = load("aime", path)
        assert [example.id for example in examples] == ["5", "2024-I-1", "2"]
        assert [example.index for example in examples] == [0, 1, 2]
        for example, problem in zip(examples, ("P one", "P two", "P three"), strict=True):
            assert problem in example.prompt and example.references == ("33",)
            assert [score(answer, example) for answer in ("\\boxed{033}", "\\boxed{33} \\boxed{34}", "33", "")] == [
                1.0, 0.0, 0.0, 0.0,
            ]  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "answer", "same"),
    [
        ("\\frac{1}{2}", "\\dfrac12", True),
        ("\\frac{1}{2}", "1/2", True),
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac{1}{2}", "\\frac{2}{1}", False),
        ("11\\sqrt2", "11\\sqrt{2}", True),
        ("2k+2", "2(k+1)", True),
        ("p - q", "q - p", False),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", True),
        ("(3,4)", "(4,3)", False),
        ("1,3,5", "5, 1, 3", True),
        ("1,3,5", "1,3", False),
        ("(-\\infty,2)\\cup(3,\\infty)", "(3,\\infty)\\cup(-\\infty,2)", True),
        ("[-2,7]", "(-2,7)", False),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}", False),
        ("\\text{Evelyn}", "Evelyn", True),
        ("\\text{Evelyn}", "\\text{Bob}", False),
        ("\\text{(C)}", "C", True),
        ("90^\\circ", "90", True),
        ("32,348", "\\$32,\\!348", True),
        ("y = 2x + 3", "2x+3", True),
        ("\\spadesuit & \\undefined{", "\\spadesuit&\\undefined{", True),  # the same text, whatever it means
        ("5", "", False),
        ("5", "\\frac{", False),
        ("5", "5 + 0" + " + 0" * 200, False),  # too long to be worth a look
    ],
)
def test_equivalence_of_mathematical_answers(reference: str, answer: str, same: bool) -> None:
    assert equivalent(answer, reference) is same


def test_math500(made: Callable[..., Example]) -> None:
    example = made("math500", answer="\\frac{1}{2}")
    assert example.id == "test/algebra/1.json" and example.meta["level"] == 2 and example.meta["subject"] == "Algebra"
    answers = {
        "a half, so \\boxed{0.5}": 1.0,
        "\\boxed{3}, no, \\boxed{\\frac12}": 1.0,
        "\\boxed{\\frac12}, no, \\boxed{3}": 0.0,
        "\\frac{1}{2}": 0.0,
        "\\boxed{}": 0.0,
        "": 0.0,
    }
    assert {answer: score(answer, example) for answer in answers} == answers
    # Outside the main thread no alarm can be set; the score is the same.
    found = list[float]()
    thread = threading.Thread(target=lambda: found.extend(score(answer, example) for answer in answers))
    thread.start()
    thread.join()
    assert found == list(answers.values())
