"""`pagelocks eval run --data`: public benchmarks from their files, in the run of all selectors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import row_of, written
from test_hf import make_model

from pagelocks.cli import main
from pagelocks.eval.datasets import load
from pagelocks.eval.prompt import encode_example, read_data

WORDS = "Ada keeps bees by the river. Bob does not, though he likes the honey. "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from pagelocks.eval.loading import load_tokenizer

    return load_tokenizer("SmolLM2-135M-Instruct")[1]


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with random weights, as a folder that the command takes."""
    path = tmp_path_factory.mktemp("tiny")
    make_model(vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.model
def test_a_prompt_is_cut_in_the_middle_until_the_answer_fits(tokenizer: Any, tmp_path: Path) -> None:
    path = written(tmp_path, row_of("longbench/hotpotqa", context="First. " + WORDS * 60 + "Last."))
    (example,) = load("longbench/hotpotqa", path)
    whole = encode_example(tokenizer, example, 4000, 32)
    assert whole.about["cut"] == 0 and example.prompt in tokenizer.decode(whole.token_ids)
    for context in (300, 301, 500):
        cut = encode_example(tokenizer, example, context, 32)
        assert context - 8 <= len(cut.token_ids) + 32 <= context and cut.about["cut"] > 0
        text = tokenizer.decode(cut.token_ids)
        assert "First." in text and "Last." in text and text.endswith("<|im_start|>assistant\n")
    with pytest.raises(ValueError, match=r"has about .* tokens around its context, which are never cut"):
        encode_example(tokenizer, example, 90, 32)
    with pytest.raises(ValueError, match="--context='40 for an answer of 32 tokens"):
        encode_example(tokenizer, example, 40, 32)
    (bare,) = load("longbench/trec", written(tmp_path, row_of("longbench/trec")))
    assert tokenizer.decode(encode_example(tokenizer, bare, 400, 64).token_ids) == bare.prompt


@pytest.mark.model
@pytest.mark.parametrize("name", ["longbench/narrativeqa", "infinitebench/passkey", "aime", "math500"])
def test_benchmarks_are_scored_by_their_own_metric(name: str, tokenizer: Any, tmp_path: Path) -> None:
    (data,) = read_data([f"{name.replace('/', ':')}={written(tmp_path, row_of(name))}"], 5)
    prompt = encode_example(tokenizer, data.examples[0], 600, 16)
    assert data.name == name and 20 < len(prompt.token_ids) <= 584 and prompt.carriers == ()
    right = data.examples[0].references[0]
    assert prompt.score(f"\\boxed{{{right}}}" if name in ("aime", "math500") else f" {right}") == pytest.approx(1)
    assert prompt.score("Zebra") == 0 and prompt.new_tokens == data.examples[0].new_tokens


@pytest.mark.model
def test_a_run_of_benchmarks(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Long and short prompts; gone on with, by the same file alone."""
    rows = [row_of("longbench/hotpotqa", context=WORDS * count) for count in (40, 2, 3)]
    path, problems = written(tmp_path, *rows), tmp_path / "math.json"
    problems.write_text(json.dumps([row_of("math500")]))
    given = ["--data", f"longbench:hotpotqa={path}", f"math500={problems}", "--records", "2", "--context", "500"]
    given += ["--selector", "locks", "h2o", "--budget", "208", "--new-tokens", "6", "--dtype", "float32"]
    command = ["eval", "run", "--model", folder, "--device", "cpu", "--json", "--output", str(tmp_path / "run.jsonl")]
    assert main([*command, *given]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]  # and nothing else
    assert {(cell["task"], cell["n"]) for cell in cells} == {("longbench/hotpotqa", 2), ("math500", 1)}
    shares = {(cell["task"], cell["selector"]): cell["sparse_share"] for cell in cells}
    assert shares["longbench/hotpotqa", "h2o"] == 0.5 and shares["longbench/hotpotqa", "dense"] is None
    header, *lines = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert header["calibration"] is None and len(lines) == 9
    long, short = (
        next(each for each in lines if (each["task"], each["index"], each["selector"]) == (*key, "locks"))
        for key in (("longbench/hotpotqa", 0), ("math500", 0))
    )
    assert long["cut"] > 0 and long["prompt_tokens"] <= 494 and long["sparse_share"] == 1 and long["links"]
    assert long["id"] == "f00d" and long["pages_skipped"] > 0
    # The prompt is shorter than the budget, and so is what follows.
    assert short["prompt_tokens"] + 6 < 208 and short["sparse_share"] == short["pages_skipped"] == 0
    assert short["links"] is None
    dense = next(each for each in lines if (each["task"], each["selector"]) == ("math500", "dense"))
    assert short["answer"] == dense["answer"]
    path.write_text(json.dumps(rows[1]) + "\n")
    assert main([*command, *given]) == 2
    assert "the file that longbench/hotpotqa was read from" in capsys.readouterr().err


def test_what_cannot_be_read_is_refused_before_a_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, row_of("longbench/narrativeqa"))
    aime = tmp_path / "aime.json"
    aime.write_text(json.dumps([row_of("aime")]))
    common = ["eval", "run", "--model", "none", "--output", str(tmp_path / "f")]
    for more, said in [
        ([f"longbench/narrativeqa:{path}"], "is not allowed: NAME=PATH, each name once"),
        ([f"longbench/narrativeqa={path}"] * 2, "is not allowed: NAME=PATH, each name once"),
        ([f"longbench/story={path}"], "dataset='longbench/story' is not allowed"),
        (["aime=/none.json"], "aime takes a file of JSON"),
        ([f"aime={path}"], "the field 'problem' is missing"),
        ([f"aime={aime}"], "--context=4096 is not allowed: 32832 or more: aime allows an answer 32768 tokens"),
    ]:
        assert main([*common, "--data", *more]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rouge", None)
    path = written(tmp_path, row_of("longbench/samsum"))
    assert main([*common, "--data", f"longbench/samsum={path}"]) == 2
    assert "scored with rouge: run pip install" in capsys.readouterr().err
