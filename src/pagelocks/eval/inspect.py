"""`pagelocks inspect`: a page for a browser, with a prompt's text and the pages that each generated token read.

    pagelocks inspect --model SmolLM2-135M-Instruct --task niah_single_1 --context 2048 --output page.html

Dense attention and the selector answer the prompt from one prefill, in Transformers.  At each of the selector's steps
the exact oracle chooses too, from the same query and keys, and nobody reads its choice.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ..config import LocksConfig, reject
from ..provenance import provenance
from ..selectors import SELECTORS, SEQUENCE_SELECTORS
from . import ruler
from .loading import check_output, device_of, load_model, load_tokenizer, stop_tokens

LONGEST_ANSWER = 512


def add_inspect(commands: Any, **shape: Any) -> None:
    """Add `inspect` to the command line."""
    parser = commands.add_parser(
        "inspect",
        help="a page for a browser: which pages each generated token read, against the oracle's choice",
        description="Answer one prompt in Transformers, and show which pages of its text each generated token read,\n"
        "by layer and KV head, beside those that the exact oracle would have read.",
        **shape,
    )
    parser.add_argument("--model", required=True, help="a known name, or a folder")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", type=Path, metavar="FILE", help="a text file in UTF-8: a user's turn")
    source.add_argument("--task", choices=list(ruler.TASKS), metavar="TASK", help="a RULER task")
    parser.add_argument("--context", type=int, default=2048, help="with --task: tokens of prompt and answer (2048)")
    parser.add_argument("--seed", type=int, default=42, help="with --task (42)")
    parser.add_argument("--index", type=int, default=0, help="with --task: which record (0)")
    parser.add_argument("--fact", nargs="+", default=[], metavar="TEXT", help="with --prompt: what the answer takes")
    parser.add_argument("--raw", action="store_true", help="leave out the model's chat template")
    parser.add_argument("--selector", default="locks", choices=[*SELECTORS, *SEQUENCE_SELECTORS], metavar="SELECTOR")
    parser.add_argument("--budget", type=int, default=256, help="tokens that a KV head attends (256)")
    parser.add_argument("--new-tokens", type=int, default=16, help="at most so many in the answer (16)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU if there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the page to write, HTML")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run_inspect, prog="pagelocks inspect")


def run_inspect(arguments: argparse.Namespace) -> Any:
    """Check everything, load the model, answer, write the page."""
    text, device = _check(arguments), device_of(arguments.device)
    folder, tokenizer = load_tokenizer(arguments.model)
    model, _ = load_model(folder, arguments.dtype, device)
    result, values = inspect(arguments, text, model, tokenizer, folder.name)

    from .web import write_page

    write_page(arguments.output, "inspect.html", **values)
    if not arguments.json:
        for name, answer in values["data"]["answers"]:
            print(f"{name}: {answer.strip()}")
        print(f"{result['steps']} steps, coverage {result['coverage_ratio']:.3f} of the oracle's: {arguments.output}")
    return {"output": str(arguments.output), **result}


def inspect(
    arguments: argparse.Namespace, text: str | None, model: Any, tokenizer: Any, name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answer the prompt, `text` or else the task's.

    Parameters
    ----------
    arguments : of the command
    model, tokenizer, name : of Transformers, and what the page calls them

    Returns
    -------
    what was found, in short; what the template asks for
    """
    from .choices import Choices, page_data, pieces, read_prompt
    from .prompt import LEAST_BUDGET, make_record
    from .runner import Method, Runner

    record = None
    if text is None:
        given = arguments.task, arguments.context, arguments.seed, arguments.index
        record = make_record(tokenizer, *given, template=not arguments.raw)
        chat = tokenizer.chat_template is not None and not arguments.raw
        prefix = record.prefix if chat else record.prompt[len(record.request) :]
        reading = read_prompt(tokenizer, record.request, prefix, record.facts, arguments.raw)
        about = f"{record.task}, record {record.index}, seed {record.seed}"
        about += ", in generated text where the benchmark takes a data set" * record.substitute
    else:
        facts = [(text.index(fact), text.index(fact) + len(fact)) for fact in arguments.fact]
        reading, about = read_prompt(tokenizer, text, "", facts, arguments.raw), arguments.prompt.name
    prompt, longest = len(reading.token_ids), model.config.max_position_embeddings
    if prompt + arguments.new_tokens > longest:
        found = f"{prompt} tokens and {arguments.new_tokens} of the answer"
        raise reject("prompt", found, f"at most {longest} together for {name}", "Shorten it, or take another model.")
    if prompt <= LEAST_BUDGET:
        raise reject("prompt", f"{prompt} tokens", f"more than {LEAST_BUDGET}, the least budget", "Give a longer one.")
    if arguments.budget >= prompt:
        raise reject("--budget", arguments.budget, f"less than the prompt, {prompt} tokens", "Use less.")
    method, choices = Method(arguments.selector, arguments.budget), Choices()
    ids = torch.tensor([reading.token_ids], device=model.device)
    answers = Runner(model, [method], stop_tokens(model, tokenizer)).run(ids, arguments.new_tokens, watch=choices.watch)
    if not choices.steps:
        allowed = "one that the model answers with a token or more; this one it ends at once"
        raise reject("prompt", about, allowed, "Ask it something, or try without --raw.")
    ours, dense = (answers[each].tokens[0] for each in (method, Method("dense")))
    label = "LOCKS" if method.selector == "locks" else method.selector
    said = [
        (side, tokenizer.decode(tokens, skip_special_tokens=True)) for side, tokens in ((label, ours), ("dense", dense))
    ]
    generated = pieces(tokenizer, ours)
    data = page_data(reading, generated, choices, method.config.page_size)
    data |= {"selector": label, "tokens": generated + ["(end)"] * (choices.steps == len(ours)), "answers": list(said)}
    if record is not None:
        data["answers"].append(("asked for", ", ".join(record.references)))
    held, best = choices.coverage(0), choices.coverage(1)
    result = {"model": name, "prompt": about, "prompt_tokens": prompt, "selector": method.selector}
    result |= {"budget": method.budget, "dtype": arguments.dtype, "steps": choices.steps, "answers": dict(said)}
    result |= {"coverage": float(held.mean()), "coverage_of_oracle": float(best.mean())}
    result["coverage_ratio"] = float(torch.where(best > 0, held / best, 1).mean())
    result["pages_read"], result["pages_skipped"] = answers[method].pages_read[0], answers[method].pages_skipped[0]
    result |= provenance(str(model.device))
    values = {
        "title": f"{label} on {name}: pages read",
        "about": f"{about}: {prompt:,} tokens in pages of {method.config.page_size}; a KV head reads "
        f"{method.budget} tokens ({method.config.budget_pages} pages) a step.  The first page and the last one are "
        "always read, by the oracle too.  The oracle chooses from the same query by every key; its choice is not read.",
        "provenance": json.dumps(result, indent=1),
        "data": data,
    }
    return result, values


def _check(arguments: argparse.Namespace) -> str | None:
    """The text of --prompt; raises for what is wrong whatever the model."""
    LocksConfig(budget=arguments.budget)
    if not 2 <= arguments.new_tokens <= LONGEST_ANSWER:
        raise reject("--new-tokens", arguments.new_tokens, f"2 to {LONGEST_ANSWER}", "Use 16.")
    if arguments.context < 64:
        raise reject("--context", arguments.context, "64 or more", "Use 2048.")
    check_output(arguments.output)
    if arguments.prompt is None:
        if arguments.fact:
            raise reject("--fact", arguments.fact[0], "a task knows its own facts", "Use it with --prompt.")
        return None
    try:
        text: str = arguments.prompt.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise reject("--prompt", str(arguments.prompt), f"a text file in UTF-8 ({error})", "Check the path.") from error
    for fact in arguments.fact:
        if not fact or fact not in text:
            raise reject("--fact", fact, f"a part of {arguments.prompt}, as it stands there", "Copy it from the file.")
    return text
