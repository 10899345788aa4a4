"""Benchmarks from files: prompts, scores worked out by hand, cutting to a window, files that will not do."""

# ruff: noqa: RUF001 (Chinese has its own comma)

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagelocks.eval.datasets import DATASETS, Example, fit, load, score
from pagelocks.eval.datasets.aime import integer
from pagelocks.eval.datasets.boxed import last_boxed
from pagelocks.eval.datasets.infinitebench import KINDS as INFINITEBENCH
from pagelocks.eval.datasets.longbench import KINDS as LONGBENCH
from pagelocks.eval.datasets.math500 import equivalent

OPTIONS = ["the mill", "the barn", "B. the well", "the inn"]
CLASSES = ["City", "Other City", "State", "Plant"]
PROBLEM = "How many {apples} are left?"


def longbench(name: str, **changes: Any) -> dict[str, Any]:
    answers = {"passage_count": ["7"], "passage_retrieval_en": ["Paragraph 12"], "passage_retrieval_zh": ["段落12"]}
    row = {
        "input": "Which {one} is it?",
        "context": "Ada keeps {bees}.\nBob does not.",
        "answers": answers.get(name, ["Ada"]),
        "length": 9,
        "dataset": name,
        "language": "en",
        "all_classes": CLASSES if name in ("trec", "lsht") else None,
        "_id": "f00d",
    }
    return row | changes


def infinitebench(name: str, **changes: Any) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "passkey": ["71432"], "number_string": ["3000077442"], "math_find": [48.0], "math_calc": [[7, 3]],
        "code_run": [-4], "code_debug": ["the barn"], "longbook_choice_eng": ["the barn"],
    }  # fmt: skip
    row = {
        "id": 3,
        "context": "Ada keeps {bees}.\nBob does not.",
        "input": "What does func_12(-3) give?",
        "answer": answers.get(name, ["Ada"]),
        "options": OPTIONS if name in ("code_debug", "longbook_choice_eng") else [],
    }
    return row | changes


def row_of(name: str, **changes: Any) -> dict[str, Any]:
    """A row that is right for this task."""
    if name == "aime":
        return {"problem_idx": 5, "problem": PROBLEM, "answer": 42} | changes
    if name == "math500":
        known = {"solution": "So \\boxed{42}.", "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json"}
        return {"problem": PROBLEM, "answer": "42", **known} | changes
    family, task = name.split("/")
    return (longbench if family == "longbench" else infinitebench)(task, **changes)


def written(path: Path, *rows: Any) -> Path:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Example]:
    """Loads an example of a task from a file with one row."""

    def make(name: str, **changes: Any) -> Example:
        (example,) = load(name, written(tmp_path, row_of(name, **changes)))
        return example

    return make


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
