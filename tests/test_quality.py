"""`pagelocks eval run`: many methods on the same records, a file that goes on where it left off, the table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_hf import make_model

from pagelocks.cli import main
from pagelocks.eval import calibration, quality, ruler, tables
from pagelocks.eval.loading import load_model
from pagelocks.eval.prompt import Prompt, alike, encode, lengthen
from pagelocks.eval.quality import read_lines
from pagelocks.eval.runner import Runner
from pagelocks.selectors import CALIBRATED_SELECTORS, REPEATING_SELECTORS, SELECTORS, SEQUENCE_SELECTORS

NOBODY = ruler.Record("niah_single_1", 1, 0, 0, "", "", "", ("x",), 1, (), (), False, {})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from pagelocks.models import fetch

    return AutoTokenizer.from_pretrained(fetch("SmolLM2-135M-Instruct"))


@pytest.mark.model
def test_prompts_hold_their_facts_where_they_say(tokenizer: Any) -> None:
    records = [ruler.task(name).make(tokenizer, 700, index=index) for index, name in enumerate(["niah_single_2", "vt"])]
    for record in records:
        prompt = encode(tokenizer, record)
        assert len(prompt.carriers) == len(record.facts)
        for (start, end), fact in zip(prompt.carriers, record.facts, strict=True):
            text = tokenizer.decode(prompt.token_ids[start:end])
            assert record.context[fact[0] : fact[1]] in text and len(text) < fact[1] - fact[0] + 12
        whole = tokenizer.decode(prompt.token_ids)
        assert whole.endswith(record.prefix) and "assistant" in whole
        assert len(prompt.token_ids) + record.max_new_tokens <= prompt.context


def test_only_prompts_of_one_length_share_a_batch() -> None:
    prompts = [Prompt(NOBODY, (1,) * tokens, ()) for tokens in (5, 5, 5, 4, 5, 5)]
    assert [[len(p.token_ids) for p in batch] for batch in alike(prompts, 2)] == [[5, 5], [5], [4], [5, 5]]


def arguments(path: Path, **changes: Any) -> argparse.Namespace:
    given = {"task": ["niah_single_1"], "context": [600], "records": 3, "selector": ["locks", "random"], "budget": [64]}
    given |= {"rule": ["share"], "seed": 7, "batch": 2, "new_tokens": 3, "link_steps": 1, "output": str(path)}
    given |= {"one_length": False, "link_records": None}
    return argparse.Namespace(**{**given, **changes})


HEADER = {
    "model": "tiny",
    "config": "0",
    "dtype": "float32",
    "seed": 7,
    "new_tokens": 3,
    "link_steps": 1,
    "commit": "abc",
}


@pytest.mark.model
def test_a_budget_that_covers_a_prompt_is_refused_before_anything_runs(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--budget=592 is not allowed: less than the prompts of niah_single_1"):
        quality.run(arguments(tmp_path / "run.jsonl", budget=[64, 592]), HEADER, make_model(), tokenizer)


@pytest.mark.model
def test_a_run_goes_on_where_it_left_off(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(vocab_size=len(tokenizer), max_position_embeddings=1024)
    path, ran = tmp_path / "run.jsonl", []
    whole = Runner.run

    def counted(self: Any, prompts: Any, tokens: int, probe: Any, methods: Any, **more: Any) -> Any:
        ran.append((len(prompts), [method.selector for method in methods]))
        assert tokens == 3
        return whole(self, prompts, tokens, probe, methods, **more)

    monkeypatch.setattr(Runner, "run", counted)
    first = quality.run(arguments(path), HEADER, model, tokenizer)
    # Records of one length came together, others by themselves.
    assert sum(count for count, _ in ran) == 3 and all(names == ["locks", "random"] for _, names in ran)
    assert len(first) == 9 and all(line["commit"] == "abc" for line in first)
    assert {line["page_bytes"] for line in first if line["selector"] != "random"} == {None, 352}  # head size 32
    calls = len(ran)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [HEADER, *first]
    assert quality.run(arguments(path), HEADER, model, tokenizer) == first and len(ran) == calls
    # Stopped in the middle of a line of the last batch.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:40])
    again = quality.run(arguments(path), HEADER, model, tokenizer)
    assert sorted(map(quality.key_of, again)) == sorted(map(quality.key_of, first)) and ran[calls:] == [(1, ["random"])]
    assert [line["answer"] for line in again if line["selector"] != "random"] == [
        line["answer"] for line in first if line["selector"] != "random"
    ]
    assert len(path.read_text().splitlines()) == 10
    before, calls = path.read_text(), len(ran)
    more = quality.run(arguments(path, selector=["quest"], records=4), {**HEADER, "commit": "def"}, model, tokenizer)
    assert sum(count for count, _ in ran[calls:]) == 4 and len(more) == 9 + 4 + 1
    assert path.read_text().startswith(before) and [line["commit"] for line in more[9:]] == ["def"] * 5


@pytest.mark.model
def test_a_run_that_is_stopped_keeps_the_methods_that_were_through(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(vocab_size=len(tokenizer), max_position_embeddings=1024)
    path, decoded, decode = tmp_path / "run.jsonl", [], Runner._decode

    def stopping(*given: Any) -> Any:
        decoded.append(1)
        if len(decoded) == 3:
            raise KeyboardInterrupt
        return decode(*given)

    monkeypatch.setattr(Runner, "_decode", stopping)
    some = arguments(path, records=1, selector=["locks", "exact", "quest"])
    with pytest.raises(KeyboardInterrupt):
        quality.run(some, HEADER, model, tokenizer)
    kept = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [line["selector"] for line in kept] == ["dense", "locks"] and kept[1]["links"]
    lines = quality.run(some, HEADER, model, tokenizer)
    assert lines[:2] == kept and [line["selector"] for line in lines] == ["dense", "locks", "exact", "quest"]


@pytest.mark.model
def test_line_breaks_make_prompts_as_long_as_each_other(tokenizer: Any) -> None:
    prompt = encode(tokenizer, ruler.task("niah_single_2").make(tokenizer, 700))
    longer = lengthen(tokenizer, prompt, len(prompt.token_ids) + 5)
    text, whole = tokenizer.decode(prompt.token_ids), tokenizer.decode(longer.token_ids)
    ahead = whole.index("\n" * 5)
    assert whole == text[:ahead] + "\n" * 5 + text[ahead:] and text[: ahead + 1].endswith("user\n")
    for (start, end), (first, after) in zip(prompt.carriers, longer.carriers, strict=True):
        assert prompt.token_ids[start:end] == longer.token_ids[first:after]
    assert lengthen(tokenizer, prompt, 10) is prompt


def test_line_breaks_come_after_the_token_that_a_tokenizer_begins_with() -> None:
    class Begins:
        chat_template = None

        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            return SimpleNamespace(input_ids=[0] * add_special_tokens + [ord(letter) for letter in text])

    prompt = Prompt(NOBODY, (0, 97, 98), ((1, 2),))
    longer = lengthen(Begins(), prompt, 6)
    assert longer.token_ids == (0, 10, 10, 10, 97, 98) and longer.carriers == ((4, 5),)


@pytest.mark.model
def test_of_one_length_all_records_share_a_batch_and_some_have_links(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(vocab_size=len(tokenizer), max_position_embeddings=1024)
    shapes = []
    whole = Runner.run
    monkeypatch.setattr(
        Runner, "run", lambda self, ids, *a, **k: shapes.append(tuple(ids.shape)) or whole(self, ids, *a, **k)
    )
    given = {"task": ["niah_single_2"], "batch": 8, "one_length": True, "link_records": 2, "records": 4}
    lines = quality.run(arguments(tmp_path / "run.jsonl", **given), HEADER, model, tokenizer)
    assert shapes == [(4, 600 - 128)]
    assert {each["index"] for each in lines if each["selector"] == "locks" and each["links"]} == {0, 1}
    # What a record is answered does not depend on the company it is in.
    alone = quality.run(arguments(tmp_path / "one.jsonl", **given | {"batch": 1}), HEADER, model, tokenizer)
    answers = [
        {quality.key_of(each): each["answer"] for each in run if each["selector"] != "random"} for run in (lines, alone)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 8


def test_a_file_of_another_run_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({**HEADER, "model": "other"}) + "\n")
    with pytest.raises(ValueError, match=r"it has model='other', and this run has 'tiny'. Write to another file"):
        read_lines(path, HEADER)
    path.write_text(json.dumps({**HEADER, "calibration": {"seed": 1, "digest": "a"}}) + "\n")
    with pytest.raises(
        ValueError, match=r"it has calibration=\{'seed': 1, 'digest': 'a'\}, and this run has \{'seed': 1, "
    ):
        read_lines(path, {**HEADER, "calibration": {"seed": 1, "digest": "b"}})
    path.write_text('{"my": "results"}')
    with pytest.raises(ValueError, match="a new file, or one that pagelocks eval run wrote"):
        read_lines(path, HEADER)
    assert path.read_text() == '{"my": "results"}'
    path.write_text(json.dumps(HEADER) + "\nnonsense\n{}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*'nonsense' is not allowed"):
        read_lines(path, HEADER)


def line(selector: str, index: int, score: float, **more: Any) -> dict[str, Any]:
    given = {"task": "vt", "context": 600, "index": index, "selector": selector, "rule": "share", "score": score}
    given |= {"budget": 0 if selector == "dense" else 64, "substitute": False, "pages_read": 1.0, "pages_skipped": 3.0}
    return given | {"links": None} | more


def test_summaries() -> None:
    scores = {"dense": [1, 1, 1, 0], "exact": [1, 1, 0, 0], "locks": [1, 0.5, 0, 0]}
    lines = [line(name, index, score) for name, row in scores.items() for index, score in enumerate(row)]
    lines[8]["links"] = {"coverage_ratio": 0.9, "retention": 0.5, "worst": 0.1, "p5": 0.2}
    lines[9]["links"] = {"coverage_ratio": 0.8, "worst": 0.3, "p5": 0.4}  # no carrier that the oracle kept
    dense, exact, locks = tables.summaries(lines)
    assert (dense["n"], dense["score"], exact["score"], locks["score"]) == (4, 75, 50, 37.5)
    assert dense["low"] == pytest.approx(30.06, abs=0.01) and dense["high"] == pytest.approx(95.44, abs=0.01)
    assert "against_dense" not in dense
    assert locks["against_dense"]["difference"] == -37.5 and locks["against_exact"]["difference"] == -12.5
    assert exact["against_dense"]["difference"] == -25 and exact["against_dense"]["p"] == 1
    assert locks["low"] <= 37.5 <= locks["high"]
    assert (locks["coverage_ratio"], locks["retention"], locks["worst"]) == (0.85, 0.5, 0.2)
    assert locks["pages_read_share"] == 0.25 and locks["scores"] == [1, 0.5, 0, 0]
    assert tables.summaries([lines[9], lines[11]])[0]["scores"] == [None, 0.5, None, 0]
    (one,) = tables.summaries(lines[9:10])
    assert (one["n"], one["low"], one["high"], one["against_dense"]) == (1, None, None, None)
    assert tables.summary_table(lines).row_count == 3


def test_a_line_tells_what_its_selector_was_calibrated_on(tmp_path: Path) -> None:
    path, text = tmp_path / "run.jsonl", calibration.Text((), {"digest": "b"})
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(line("loki", 0, 1, calibration="a")) + "\n")
    with pytest.raises(ValueError, match=r"calibration='b' is not allowed: the text of this file's loki, of digest a"):
        quality.run(arguments(path, selector=["loki"]), HEADER, None, None, text=text)


def test_a_model_of_windows_alone_is_refused(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MistralConfig(**sizes, num_key_value_heads=1, vocab_size=20, sliding_window=64)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a layer that attends everything; it has sliding attention alone"):
        load_model(tmp_path, "float32", "cpu")
    config.sliding_window = None
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    assert load_model(tmp_path, "float32", "cpu")[1]["model"] == tmp_path.name


def test_a_file_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = [json.dumps(line("locks", index, 1)) for index in range(3)]
    path.write_text("\n".join([json.dumps(HEADER), *whole[:2], whole[2][:30]]))
    header, lines = tables.read_run(path)
    assert header == HEADER and [each["index"] for each in lines] == [0, 1]
    path.write_text(json.dumps(HEADER) + "\n" + whole[0][:30])
    with pytest.raises(ValueError, match=r"--runs='.*' is not allowed: a header and lines of a run \(no line"):
        tables.read_run(path, "--runs")


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ["eval", "run", "--model", "SmolLM2-135M-Instruct", "--output", str(tmp_path / "f")]
    for more, said in [
        (["--budget", "4096"], "--budget=4096 is not allowed: less than --context, 4096"),
        (["--budget", "100"], "budget=100 is not allowed"),
        (["--records", "0"], "--records=0 is not allowed: 1 or more"),
        (["--new-tokens", "1"], "--new-tokens=1 is not allowed: 2 or more"),
        (["--context", "-5"], "--context=-5 is not allowed: 64 or more"),
    ]:
        assert main([*common, *more]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "f").write_text("{}\n")
    assert main(["eval", "table", str(tmp_path / "f")]) == 2
    assert "a header and lines of a run" in capsys.readouterr().err


@pytest.mark.model
def test_every_selector_and_task_on_a_real_model(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One record each; the needle is found by LOCKS, the oracle and dense attention, and not by random pages."""
    names = [*SELECTORS, *SEQUENCE_SELECTORS, *CALIBRATED_SELECTORS, *REPEATING_SELECTORS]
    path = tmp_path / "run.jsonl"
    common = ["--model", "SmolLM2-135M-Instruct", "--records", "1", "--budget", "128", "--device", "cpu", "--json"]
    common += ["--output", str(path), "--dtype", "float32"]
    assert main(["eval", "run", *common, "--context", "700", "--new-tokens", "9", "--selector", *names]) == 0
    cells = {cell["selector"]: cell for cell in json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]}
    assert set(cells) == {"dense", *names}
    assert [cells[name]["score"] for name in ("dense", "exact", "locks", "random")] == [100, 100, 100, 0]
    assert all(0 < cells[name]["pages_read_share"] < 0.25 for name in names)
    assert cells["locks"]["coverage_ratio"] > 0.98 > cells["random"]["coverage_ratio"]
    assert 0 < cells["locks"]["retrieval_heads"] < 0.5
    assert cells["locks"]["coverage_ratio_retrieval"] > 0.9 > cells["random"]["coverage_ratio_retrieval"]
    assert json.loads(path.read_text().splitlines()[0])["calibration"]["tokens"] > 5000
    tasks = [name for name in ruler.TASKS if name != "niah_single_1"]
    options = ["--task", *tasks, "--context", "1000", "--selector", "locks", "--link-steps", "0", "--new-tokens", "2"]
    common[common.index(str(path))] = str(tmp_path / "tasks.jsonl")
    assert main(["eval", "run", *common, *options]) == 0
    capsys.readouterr()
    lines = [json.loads(text) for text in (tmp_path / "tasks.jsonl").read_text().splitlines()[1:]]
    assert {(text["task"], text["selector"]) for text in lines} == {(t, s) for t in tasks for s in ("dense", "locks")}
    assert all(text["pages_skipped"] > 0 for text in lines if text["selector"] == "locks")
    assert main(["eval", "table", str(path), str(tmp_path / "tasks.jsonl"), "--output", str(tmp_path / "t.json")]) == 0
    assert len(json.loads((tmp_path / "t.json").read_text())) == len(names) + 1 + 2 * len(tasks)
