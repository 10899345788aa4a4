"""One-shot generation on a real model: through the command line, and the prompts it refuses before an engine starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagelocks.prompts import needle_prompt
from pagelocks.vllm.serve import _token_ids

MODEL = "SmolLM2-135M-Instruct"
BUDGET, NEW = 256, 8

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model, fetched once."""
    from pagelocks.models import fetch

    return fetch(MODEL)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.engine
def test_compare_on_the_command_line(tokenizer: Any, tmp_path: Path) -> None:
    prompt = needle_prompt(tokenizer, 1500, seed=0)
    file = tmp_path / "prompt.txt"
    file.write_text(prompt.text)
    words = [MODEL, "--prompt-file", str(file), "--raw", "--budget", str(BUDGET), "--max-tokens", str(NEW)]
    done = subprocess.run(
        [sys.executable, "-m", "pagelocks", "generate", *words, "--compare", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "dense: generating" in done.stderr
    dense, locks = result["dense"], result["locks"]
    length = len(prompt.token_ids)
    for side in (dense, locks):
        assert side["prompt_tokens"] == length
        assert 0 < len(side["token_ids"]) <= NEW
        assert side["text"] == tokenizer.decode(side["token_ids"], skip_special_tokens=True)
        assert side["start_s"] > 0
        assert side["prefill_s"] > 0
        assert side["ms_per_token"] > 0
    assert prompt.answer in dense["text"]
    assert prompt.answer in locks["text"]
    same = dense["token_ids"] == locks["token_ids"]
    assert (result["first_difference"] is None) == same
    assert (dense["locks"], dense["layers"], dense["share"]) == (None, [], None)

    # What the counters must say, from the lengths alone: the prefill is one dense row, each token after the first is
    # one sparse row, which reads the budget and every complete page's record.  SmolLM2 has 30 layers and 3 KV heads.
    assert locks["locks"] == {"budget": BUDGET}
    assert len(locks["layers"]) == 30
    lengths = range(length + 1, length + len(locks["token_ids"]))
    pages = 3 * sum(-(-one // 16) for one in lengths)
    read, records = 3 * len(lengths) * BUDGET // 16, 3 * sum(one // 16 for one in lengths)
    share = (read * locks["page_bytes"] + records * locks["record_bytes"]) / (pages * locks["page_bytes"])
    for layer in locks["layers"]:
        assert (layer["rows_sparse"], layer["rows_dense"]) == (len(lengths), 1)
        assert (layer["pages_read"], layer["pages_skipped"], layer["records_read"]) == (read, pages - read, records)
        assert layer["share"] == pytest.approx(share)
    assert locks["share"] == pytest.approx(share)
    assert share < 0.35


def job(folder: Path, prompt: str | list[int], **more: Any) -> dict[str, Any]:
    return {"model": str(folder), "prompt": prompt, "chat": None, "max_tokens": 8, "engine": {}, **more}


def test_text_becomes_a_turn_of_the_chat_template(folder: Path, tokenizer: Any) -> None:
    chat, raw = _token_ids(job(folder, "Hello")), _token_ids(job(folder, "Hello", chat=False))
    assert tokenizer.decode(chat).endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert raw == tokenizer.encode("Hello")
    assert _token_ids(job(folder, [5, 6])) == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "more", "reason"),
    [
        ("", {}, "the prompt is empty"),
        (" \n", {"chat": False}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5] * 8185, {}, "8185 tokens, which with 8 to generate is more than the 8192"),
        ([5] * 100, {"engine": {"max_model_len": 64}}, "more than the 64"),
    ],
)
def test_prompts_that_cannot_be_asked(folder: Path, prompt: Any, more: dict[str, Any], reason: str) -> None:
    assert reason in _token_ids(job(folder, prompt, **more))
