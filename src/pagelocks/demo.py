"""`python -m pagelocks.demo`: one fact in a long text, asked for with dense attention and with LOCKS at three budgets.

It prints what each read, and draws into `out/demo-pages.png` which pages every generated token read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import models
from .console import milliseconds, percent, reporter
from .generate import EngineFailure, Generation, generate
from .prompts import NeedlePrompt, needle_prompt

MODEL = "SmolLM2-135M-Instruct"
PAGE_SIZE = 16


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns 0, or 1 if any part of it failed.

    Raises
    ------
    SystemExit
        From argparse.
    """
    parser = argparse.ArgumentParser(prog="python -m pagelocks.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=6000, metavar="N", help="length of the prompt (6000)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512], metavar="N", help="(128 256 512)")
    parser.add_argument("--max-tokens", type=int, default=12, metavar="N", help="tokens to generate (12)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the fact and its place (0)")
    parser.add_argument("--out", type=Path, default=Path("out/demo-pages.png"), metavar="FILE", help="the picture")
    args = parser.parse_args(argv)
    try:
        return run(args.tokens, args.budgets, args.max_tokens, args.seed, args.out)
    except (EngineFailure, models.ModelError, ValueError, OSError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1


def run(tokens: int, budgets: list[int], max_tokens: int, seed: int, out: Path) -> int:
    """Ask, print, draw; the exit status.  Errors as for `pagelocks.generate.generate`."""
    console = Console()
    with reporter() as say, tempfile.TemporaryDirectory() as folder:
        model = models.fetch(MODEL, say)
        say("writing a prompt with one fact to find")
        tokenizer = load_tokenizer(model)
        prompt = needle_prompt(tokenizer, tokens, seed)
        say("dense: starting")
        sides: dict[int | None, Generation] = {None: ask(model, prompt, None, max_tokens, say, "dense")}
        traces: dict[int, list[dict[str, Any]]] = {}
        for budget in budgets:
            file = Path(folder, f"{budget}.jsonl")
            locks = {"budget": budget, "trace": str(file)}
            sides[budget] = ask(model, prompt, locks, max_tokens, say, f"LOCKS, budget {budget}")
            traces[budget] = read_trace(file, len(prompt.token_ids))
    console.print(table(prompt, sides))
    some = sides[budgets[0]]
    summaries = percent((some.record_bytes or 0) / (some.page_bytes or 1))
    console.print(
        f"A LOCKS step reads every page's summary too, {summaries} of this model's cache, which the bytes above count; "
        "the CPU backend shows what is read, not speed, and LOCKS' times include writing the trace."
    )
    failed = [budget for budget in budgets if not sides[budget].rows_sparse or not traces[budget]]
    if failed:
        print(f"The demo failed: LOCKS handled no decode row at budget {failed}.", file=sys.stderr)
        return 1
    draw(out, prompt, find_needle(tokenizer, prompt), traces, max_tokens)
    console.print(f"Which pages each token read: {out}")
    return 0


def load_tokenizer(model: Path) -> Any:
    """The model's tokenizer, from its folder alone."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


def ask(model: Path, prompt: NeedlePrompt, locks: Any, max_tokens: int, say: Any, name: str) -> Generation:
    """One side of the demo: one engine, one answer."""
    ids = prompt.token_ids
    return generate(model, ids, locks, max_tokens=max_tokens, progress=lambda line: say(f"{name}: {line}"))


def table(prompt: NeedlePrompt, sides: dict[int | None, Generation]) -> Table:
    """What each side answered and read; the number beside LOCKS is its budget in tokens."""
    title = f"{len(prompt.token_ids)} tokens; the fact to find: {prompt.key} is {prompt.answer}"
    result = Table("attention", "answer", "right", "pages read", "bytes read", "time a token", title=title)
    for budget, side in sides.items():
        read, skipped = side.total("pages_read"), side.total("pages_skipped")
        result.add_row(
            "dense" if budget is None else f"LOCKS {budget}",
            Text(" ".join(side.text.split())),
            "yes" if prompt.answer in side.text else "no",
            "all" if budget is None else percent(read / max(1, read + skipped)),
            "100%" if budget is None else percent(side.share),
            milliseconds(side.ms_per_token),
        )
    return result


def read_trace(file: Path, prompt_tokens: int) -> list[dict[str, Any]]:
    """The lines of a trace that belong to decode rows after the prompt."""
    if not file.is_file():
        return []
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["length"] > prompt_tokens]


def find_needle(tokenizer: Any, prompt: NeedlePrompt) -> list[int]:
    """The pages that hold the answer's tokens."""
    begin = prompt.text.index(prompt.answer)
    places = tokenizer(prompt.text, return_offsets_mapping=True)["offset_mapping"]
    inside = (at for at, (start, end) in enumerate(places) if start < begin + len(prompt.answer) and end > begin)
    return sorted({at // PAGE_SIZE for at in inside})


def count_reads(trace: list[dict[str, Any]], prompt_tokens: int, pages: int, tokens: int) -> Any:
    """How many layers and KV heads read a page for a token: int (pages, tokens).

    Column 0 is the second token generated: the first one comes from the prefill, which reads everything.
    """
    import numpy as np

    counts = np.zeros((pages, tokens), dtype=int)
    for line in trace:
        for head in line["pages"]:
            counts[head, line["length"] - prompt_tokens - 1] += 1
    return counts


def draw(
    out: Path, prompt: NeedlePrompt, needle: list[int], traces: dict[int, list[dict[str, Any]]], max_tokens: int
) -> None:
    """Write the picture: a panel for each budget; tokens to the right, pages of the context upwards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    ids = len(prompt.token_ids)
    pages, tokens = -(-(ids + max_tokens) // PAGE_SIZE), max_tokens - 1
    question = (ids - 1) // PAGE_SIZE
    every = max(
        sum(len(line["pages"]) for line in trace if line["length"] == trace[0]["length"]) for trace in traces.values()
    )
    figure, axes = pyplot.subplots(
        1, len(traces), figsize=(1.5 + 3.6 * len(traces), 7), sharey=True, squeeze=False, layout="constrained"
    )
    image: Any = None
    for panel, (budget, trace) in zip(axes[0], traces.items(), strict=True):
        counts = count_reads(trace, ids, pages, tokens)
        image = panel.imshow(
            counts.clip(min=0.5),  # a logarithm has no zero: pages that nobody read take the darkest colour
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            norm=LogNorm(0.5, every),
            cmap="magma",
            extent=(1.5, tokens + 1.5, -0.5, pages - 0.5),
        )
        panel.set_title(f"budget {budget} tokens = {budget // PAGE_SIZE} of {pages} pages")
        panel.set_xlabel("generated token")
        panel.xaxis.get_major_locator().set_params(integer=True)
        middle = sum(needle) / len(needle)
        for page, text, colour in ((middle, "needle", "cyan"), (question, "question", "lime")):
            panel.annotate(
                text,
                (1.5, page),
                xytext=(2.2, page + pages * (0.04 if page < pages / 2 else -0.05)),
                color=colour,
                arrowprops={"arrowstyle": "->", "color": colour},
            )
    axes[0][0].set_ylabel("page of the context")
    figure.colorbar(image, ax=axes, label=f"reads, of {every} layers x KV heads (logarithmic)")
    figure.suptitle("Pages that each generated token read")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
