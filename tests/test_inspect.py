"""`pagelocks inspect`: the page shows the choices that were made, beside the oracle's, and no text becomes a tag."""

from __future__ import annotations

import argparse
import base64
import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import Page, byte_tokenizer

pytest.importorskip("transformers")
from test_hf import make_model

import pagelocks.hf as hf
from pagelocks.cli import main
from pagelocks.eval import choices, ruler
from pagelocks.eval.inspect import inspect
from pagelocks.eval.quality import encode
from pagelocks.eval.web import write_page

HOSTILE = "</script><b>bold</b><!-- {{ 7 * 7 }} & \u2028 'x' \"y\" <img src=x onerror=alert(1)>"


def hostile_text(draw: random.Random, characters: int) -> str:
    """Random characters of one to four bytes, with what could break out of a page in the middle."""
    parts = [draw.choice(["a", "b ", "<", "é", "漢", "😀", "\n", "&lt;"]) for _ in range(characters)]
    parts.insert(characters // 2, HOSTILE)
    return "x" + "".join(parts) + "y"


def arguments(path: Path, **changes: Any) -> argparse.Namespace:
    given = {"prompt": path, "task": None, "fact": [], "raw": False, "selector": "locks", "budget": 64}
    return argparse.Namespace(**{**given, "new_tokens": 5, "dtype": "float32", "context": 600, **changes})


@pytest.mark.parametrize("raw", [False, True])
def test_every_character_of_a_prompt_is_on_the_page_of_its_token(raw: bool) -> None:
    """Pages of 16 bytes cut characters in two: the text stays whole, and facts are marked where they stand."""
    draw = random.Random()
    text, tokenizer = "  " + hostile_text(draw, 150) + " ", byte_tokenizer()
    first = draw.randrange(10, 100)
    fact = (first, first + 30)
    reading = choices.read_prompt(tokenizer, text, "Say: ", [fact], raw)
    expected = text + "Say: " if raw else f"[user] {text.strip()}\n[assistant] Say: "
    assert reading.text == expected and bytes(reading.text, "utf-8") == bytes(expected, "utf-8")
    assert len(reading.token_ids) == len(expected.encode()) == len(reading.starts)
    owners = [n for n, letter in enumerate(expected) for _ in letter.encode()]  # of each byte, so of each token
    assert list(reading.starts) == owners
    (found,) = reading.facts
    assert expected[found[0] : found[1]] == text[fact[0] : fact[1]]
    assert set(reading.fact_tokens) == {n for n, owner in enumerate(owners) if found[0] <= owner < found[1]}


def test_pieces_of_an_answer_join_to_it() -> None:
    tokenizer, said = byte_tokenizer(), "né 漢😀 <b>!"
    parts = choices.pieces(tokenizer, tokenizer(said).input_ids)
    assert "".join(parts) == said and len(parts) == len(said.encode()) and parts[1:3] == ["", "é"]


def recorded(
    tmp_path: Path, selector: str = "locks"
) -> tuple[dict[str, Any], dict[str, Any], list[hf.SparseStep], str]:
    """A run on fresh text: result, the page's values, the steps themselves, the text."""
    draw, seen = random.Random(), list[hf.SparseStep]()
    text, tokenizer = hostile_text(draw, 120), byte_tokenizer()
    watch = choices.Choices.watch

    def kept(self: Any, method: Any, step: hf.SparseStep) -> None:
        seen.append(step)
        watch(self, method, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices.Choices, "watch", kept)
        path = tmp_path / "<b>.txt"
        given = arguments(path, fact=["bold</b>"], selector=selector)
        result, values = inspect(given, text, make_model(vocab_size=256), tokenizer, "<i>tiny</i>")
    return result, values, seen, text


@pytest.mark.parametrize("selector", ["locks", "quest", "exact"])
def test_choices_and_coverage_are_those_of_a_loop(tmp_path: Path, selector: str) -> None:
    result, values, seen, _ = recorded(tmp_path, selector)
    data = values["data"]
    steps, layers, heads, width = data["steps"], len(data["layers"]), data["heads"], data["width"]
    assert (steps, layers, heads) == (4, 3, 2) and len(seen) == steps * layers
    sides = [base64.b64decode(bits) for bits in data["chosen"]]
    assert all(len(side) == steps * layers * heads * width for side in sides)
    ratios = []
    for number, step in enumerate(seen):
        for head in range(heads):
            at = number * heads + head  # the order is that of the steps, and of the layers in each
            sets = [
                {p for p in range(8 * width) if side[at * width + p // 8] >> p % 8 & 1} for side in sides
            ]  # fmt: skip
            keys, query = step.keys[0, head].double(), step.query[0, head].double()
            tokens = keys.shape[0]
            weights = (query @ keys.T * step.scale).softmax(-1)  # (G, tokens)
            mass = [weights[:, p : p + 16].sum(-1).mean().item() for p in range(0, tokens, 16)]
            complete = tokens // 16
            in_pages = (query @ keys[: 16 * complete].T * step.scale).softmax(-1)
            share = in_pages.unflatten(-1, (complete, 16)).sum(-1).mean(0).tolist()
            always = {0, (tokens - 1) // 16}
            best = sorted(set(range(complete)) - always, key=lambda p: -share[p])[:2]
            assert sets[1] == always | set(best)
            assert sets[0] == set(step.pages[0, head].tolist()) and len(sets[0]) == 4
            held = [sum(mass[page] for page in pages) for pages in sets]
            assert [data["coverage"][side][at] for side in (0, 1)] == pytest.approx([1e4 * h for h in held], abs=1)
            ratios.append(held[0] / held[1])
    assert result["coverage_ratio"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-6)
    assert (result["coverage_ratio"] == 1) == (selector == "exact")
    assert result["pages_skipped"] > 0 and result["pages_read"] == len(seen) * heads * 4


def test_no_text_becomes_a_tag_and_nothing_is_fetched(tmp_path: Path) -> None:
    _, values, _, text = recorded(tmp_path)
    data = values["data"]
    write_page(tmp_path / "deep" / "page.html", "inspect.html", **values)
    written = (tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    page = Page(written)
    assert page.tags.count("script") == 2 and not {"b", "i", "img"} & set(page.tags) and page.fetched() == []
    assert page.titles == ["LOCKS on <i>tiny</i>: pages read"] and "http:" not in written and "https:" not in written
    assert json.loads(page.scripts[0]) == json.loads(json.dumps(data))
    prompt = f"[user] {text}\n[assistant] "
    assert "".join(data["pages"]) == prompt + "".join(data["tokens"][: data["steps"]])
    marked = ["".join(data["pages"][p][a:b] for p, a, b, kind in data["marks"] if kind == wanted) for wanted in (0, 1)]
    assert marked == ["bold</b>", "".join(data["tokens"][: data["steps"]])]
    at = len(prompt[: prompt.index("bold</b>")].encode())
    assert data["fact_pages"] == sorted({at // 16, (at + len("bold</b>") - 1) // 16})


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_what_was_chosen(tmp_path: Path) -> None:
    """One token, layer and head: the page's text, and on each row what chose it."""
    _, values, seen, _ = recorded(tmp_path)
    data, path = values["data"], tmp_path / "page.html"
    write_page(path, "inspect.html", **values)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    step = seen[2 * 3 + 1]  # the third step's second layer
    address = f"{path.as_uri()}#token=2&layer=1&head=1"
    shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True).stdout
    rows = re.findall(r'<div class="text"[^>]*>(.*?)</div><div class="count">(.*?)</div>', shown, re.DOTALL)
    texts = [html.unescape(re.sub(r"</?mark[^>]*>", "", text)) for text, _ in rows]
    assert texts == data["pages"]
    present = -(-step.keys.shape[2] // 16)
    ours = set(step.pages[0, 1].tolist())
    for page, (_, said) in enumerate(rows):
        assert (said in ("both", "LOCKS only")) == (page in ours) and (said == "not there yet") == (page >= present)


@pytest.mark.model
def test_the_command_answers_as_dense_attention_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    from pagelocks.models import fetch

    path = tmp_path / "page.html"
    common = ["inspect", "--model", "SmolLM2-135M-Instruct", "--context", "500", "--dtype", "float32"]
    common += ["--device", "cpu", "--task", "niah_single_1", "--index", "1", "--budget", "128"]
    assert main([*common, "--new-tokens", "10", "--output", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(fetch("SmolLM2-135M-Instruct"))
    record = ruler.task("niah_single_1").make(tokenizer, 500 - _template(tokenizer), index=1)
    prompt = encode(tokenizer, record)
    (needle,) = record.references
    assert all(needle in answer for answer in result["answers"].values()), result["answers"]
    assert result["prompt_tokens"] == len(prompt.token_ids) and 0.9 < result["coverage_ratio"] <= 1.001
    data = json.loads(Page(path.read_text(encoding="utf-8")).scripts[0])
    asked = [token // 16 for first, after in prompt.carriers for token in range(first, after)]
    assert data["fact_pages"] == sorted(set(asked)) and data["layers"] == list(range(30)) and data["heads"] == 3
    assert "".join(data["pages"]).startswith(tokenizer.decode(prompt.token_ids))
    assert needle in "".join(data["tokens"]) and data["answers"][-1] == ["asked for", needle]


def _template(tokenizer: Any) -> int:
    from pagelocks.eval.prompt import template_tokens

    return template_tokens(tokenizer)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("a prompt")
    (tmp_path / "q.txt").write_bytes(b"\xff\xfe")
    file, out = ["--prompt", str(tmp_path / "p.txt")], ["--output", str(tmp_path / "page.html")]
    for more, said in [
        ([*out, *file, "--budget", "100"], "budget=100 is not allowed"),
        ([*out, *file, "--new-tokens", "1"], "--new-tokens=1 is not allowed: 2 to 512"),
        ([*out, *file, "--fact", "none"], "--fact='none' is not allowed: a part of"),
        ([*out, "--task", "vt", "--fact", "x"], "--fact='x' is not allowed: a task knows"),
        ([*out, "--task", "vt", "--context", "5"], "--context=5 is not allowed"),
        ([*out, "--prompt", str(tmp_path / "none")], "a text file in UTF-8 (["),
        ([*out, "--prompt", str(tmp_path / "q.txt")], "a text file in UTF-8 ('utf-8'"),
        (["--output", str(tmp_path), *file], "a file, and this is a folder"),
    ]:
        assert main(["inspect", "--model", "SmolLM2-135M-Instruct", *more]) == 2
        assert said in capsys.readouterr().err
    tokenizer = byte_tokenizer()
    model = make_model(vocab_size=256)
    for text, changes, said in [
        ("x" * 60, {"budget": 128}, "--budget=128 is not allowed: less than the prompt"),
        ("x" * 3000, {}, "at most 2048 together for tiny"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            inspect(arguments(tmp_path / "p.txt", **changes), text, model, tokenizer, "tiny")
    with torch.inference_mode():
        ended = model(torch.tensor([choices.read_prompt(tokenizer, "x" * 90).token_ids])).logits[0, -1].argmax()
    model.generation_config.eos_token_id = int(ended)
    with pytest.raises(ValueError, match="this one it ends at once"):
        inspect(arguments(tmp_path / "p.txt"), "x" * 90, model, tokenizer, "tiny")
