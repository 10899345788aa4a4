"""`pagelocks eval figure NAME`: arguments, checks, the file and the picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...config import LocksConfig, reject
from ...console import table_console
from ...provenance import provenance
from .. import EvalFailure, ruler
from ..loading import check_output, device_of, load_model, load_tokenizer, stop_tokens
from ..prompt import encode, make_record
from . import bytes as bytes_figure
from . import score
from .means import Row, series

FLAGS = {
    "budgets": ("budget", "tokens that a KV head attends"),
    "ranks": ("rank", "columns of a page's basis"),
    "rank": ("rank", "columns of a page's basis"),
    "page_sizes": ("page-size", "tokens a page"),
    "factors": ("factor", "pages whose keys are looked at, in budgets; 1 for none"),
    "bits": ("bits", "bits of a basis entry: 16, 8, 4, 2"),
    "contexts": ("context", "tokens in context"),
    "head_dims": ("head-dim", "sizes of a key"),
}


def add_figure(commands: Any, **shape: Any) -> None:
    """Add `figure` to `pagelocks eval`."""
    from . import FIGURES

    figure = commands.add_parser("figure", help="a figure of the paper, measured here: JSON and a picture", **shape)
    names = figure.add_subparsers(title="figures", metavar="NAME", required=True)
    for name, about in FIGURES.items():
        parser = _parser(names, name, about.help, about.options, shape)
        parser.add_argument("--model", required=True, help="a known name, or a folder")
        parser.add_argument(
            "--task",
            nargs="+",
            default=["niah_single_1", "niah_multikey_2"],
            choices=list(ruler.TASKS),
            metavar="TASK",
            help="RULER tasks (niah_single_1 niah_multikey_2)",
        )
        parser.add_argument("--context", type=int, default=2048, help="tokens of prompt and answer (2048)")
        parser.add_argument("--records", type=int, default=2, help="records a task (2)")
        parser.add_argument("--steps", type=int, default=2, help="answer tokens whose queries are looked at (2)")
        parser.add_argument("--seed", type=int, default=42)
        if about.calibrated:
            text = "prompts of another seed, the tasks in turn, to calibrate shared bases on (2)"
            parser.add_argument("--calibration", type=int, default=2, help=text)
        parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU if there is one")
        parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
        parser.set_defaults(run=run_model_figure, name=name)
    text = "bytes that a step reads, by context, and the summaries' share of the cache; needs no model"
    options = {"contexts": bytes_figure.CONTEXTS, "budgets": bytes_figure.BUDGETS, "head_dims": bytes_figure.HEAD_DIMS}
    _parser(names, "bytes", text, options, shape).set_defaults(run=run_bytes)
    parser = _parser(names, "score", "task score against budget for every selector, from runs", {}, shape)
    parser.add_argument("--runs", nargs="+", type=Path, required=True, metavar="FILE", help="of eval run or eval table")
    parser.set_defaults(run=run_score)


def _parser(names: Any, name: str, text: str, options: dict[str, Any], shape: dict[str, Any]) -> Any:
    parser = names.add_parser(name, help=text, description=text, **shape)
    for key, default in options.items():
        flag, about = FLAGS[key]
        many = isinstance(default, list)
        shown = " ".join(map(str, default)) if many else default
        more = {"nargs": "+"} if many else {}
        parser.add_argument(f"--{flag}", type=int, dest=key, metavar="N", help=f"{about} ({shown})", **more)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a JSON file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG, SVG or PDF (--output's name, as PNG)")
    # Not False where it is not given: `pagelocks eval figure --json NAME` has it already.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the result as JSON")
    parser.set_defaults(prog=f"pagelocks eval figure {name}")
    return parser


def run_model_figure(arguments: argparse.Namespace) -> Any:
    """Check everything, load the model, capture, and make the figure."""
    from . import FIGURES

    figure = FIGURES[arguments.name]
    picture = _picture(arguments)
    options = _options(figure.options, arguments)
    device = device_of(arguments.device)
    folder, tokenizer = load_tokenizer(arguments.model)
    from ..capture import capture, captured_keys

    model, identity = load_model(folder, arguments.dtype, device)
    if arguments.context > (longest := model.config.max_position_embeddings):
        raise reject("--context", arguments.context, f"at most {longest} for {arguments.model}", "Use less.")
    prompts = prompts_of(tokenizer, arguments.task, arguments.context, arguments.records, arguments.seed)
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    if "budgets" in options and arguments.budgets is None:
        options["budgets"] = [budget for budget in options["budgets"] if budget < shortest]
    if (largest := max(options.get("budgets", [0]), default=shortest)) >= shortest:
        allowed = f"less than the prompts, of which one has {shortest} tokens"
        raise reject("--budget", largest, allowed, "Use less, or a longer --context.")
    stop = stop_tokens(model, tokenizer)
    about = {name: getattr(arguments, name) for name in ("task", "context", "records", "steps", "seed")}
    if figure.calibrated:
        each = -(-arguments.calibration // len(arguments.task))
        others = prompts_of(tokenizer, arguments.task, arguments.context, each, arguments.seed + 1)
        calibration = captured_keys(model, others[: arguments.calibration])
        rows = figure.rows(
            _shown(capture(model, prompts, arguments.steps, stop), len(prompts)), calibration=calibration, **options
        )
        about["calibration"] = arguments.calibration
    else:
        rows = figure.rows(_shown(capture(model, prompts, arguments.steps, stop), len(prompts)), **options)
    about["substitute"] = any(prompt.about["substitute"] for prompt in prompts)
    header = {"figure": arguments.name, **about, **options, **identity}
    return _written(arguments, header, rows, partial(_draw, figure.draw, rows, figure.size, picture))


def prompts_of(tokenizer: Any, tasks: Sequence[str], context: int, records: int, seed: int) -> list[Any]:
    """The first records of each task as `Prompt`s, the tasks in turn."""
    made = (make_record(tokenizer, name, context, seed, index) for index in range(records) for name in tasks)
    return [encode(tokenizer, record) for record in made]


def run_bytes(arguments: argparse.Namespace) -> Any:
    """Bytes need no model."""
    picture = _picture(arguments)
    defaults = {"contexts": bytes_figure.CONTEXTS, "budgets": bytes_figure.BUDGETS, "head_dims": bytes_figure.HEAD_DIMS}
    options: dict[str, Any] = {name: getattr(arguments, name) or default for name, default in defaults.items()}
    rows = bytes_figure.rows(**options)
    records = bytes_figure.summary_rows(options["head_dims"])
    header = {"figure": "bytes", **options, **provenance()}
    return _written(arguments, header, [*rows, *records], partial(_draw, bytes_figure.draw, rows, (9.0, 4.5), picture))


def run_score(arguments: argparse.Namespace) -> Any:
    """Scores come from files of runs."""
    picture = _picture(arguments)
    rows = score.rows(arguments.runs)
    panels = len({(row["task"], row["context"]) for row in rows})
    size = (4.0 * min(3, panels) + 1.0, 3.5 * -(-panels // 3))
    header = {"figure": "score", "model": rows[0]["model"], "runs": [path.name for path in arguments.runs]}
    return _written(arguments, header | provenance(), rows, partial(_draw, score.draw, rows, size, picture))


def _options(defaults: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, or the default, whose budgets are clipped to below the context; checked."""
    least = {"records": 1, "steps": 1, "context": 64, "calibration": 1}
    for name, value in ((name, getattr(arguments, name, None)) for name in least):
        if value is not None and value < least[name]:
            raise reject(f"--{name}", value, f"{least[name]} or more", f"Use {least[name]} or more.")
    options: dict[str, Any] = {}
    for name, default in defaults.items():
        given = getattr(arguments, name)
        options[name] = default if given is None else given
        if name == "budgets":
            options[name] = given or [budget for budget in default if budget < arguments.context]
            if not options[name] or max(options[name]) >= arguments.context:
                allowed = f"less than --context, {arguments.context}"
                raise reject("--budget", max(options[name] or default), allowed, "Use less, or a longer --context.")
    if set(options.get("bits", [])) - set(defaults.get("bits", [])):
        raise reject("--bits", options["bits"], "16, 8, 4 or 2", "Use 4.")
    sizes = options.get("page_sizes", [LocksConfig.page_size])
    for size in sizes:
        for budget in options.get("budgets", [3 * size]):
            LocksConfig(budget, 1, size)
    ranks = options["ranks"] if "ranks" in options else [options.get("rank", 1)]
    for rank in ranks:
        LocksConfig(3 * max(sizes), rank, max(sizes))
    return options


def _picture(arguments: argparse.Namespace) -> Path:
    """Where the picture goes; raises if it, or the file, could not be written."""
    picture: Path = arguments.picture or arguments.output.with_suffix(".png")
    if arguments.output.suffix != ".json":
        raise reject("--output", str(arguments.output), "a name that ends in .json", "Use figure.json.")
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise reject("--picture", str(picture), "a name that ends in .png, .svg or .pdf", "Use figure.png.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is missing: pip install 'pagelocks[plot]'")
    check_output(arguments.output)
    check_output(picture, "--picture")
    return picture


def _draw(draw: Any, rows: list[Row], size: tuple[float, float], path: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=size, layout="constrained")
    draw(rows, canvas)
    canvas.savefig(path, dpi=100)


def _written(
    arguments: argparse.Namespace, header: dict[str, Any], rows: list[Row], draw: Callable[[], None]
) -> dict[str, Any]:
    """Write the JSON, then draw, and print the rows; raises EvalFailure if a row tells of a broken bound."""
    result = header | {"rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    draw()
    if not arguments.json:
        console = table_console()
        for table in _tables(rows):
            console.print(table)
    if broken := [row for row in rows if row.get("violated")]:
        names = ", ".join(sorted({row["statement"] for row in broken}))
        count = sum(row["violated"] for row in broken)
        raise EvalFailure(f"{count} cases break {names}: {arguments.output} has them by rank and budget")
    return result


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One table for all rows with the same fields."""
    for names, alike in series([{"names": tuple(row), "row": row} for row in rows], "names").items():
        table = Table(box=None, header_style="bold")
        shown = [name for name in names if not isinstance(alike[0]["row"][name], (dict, list))]
        for name in shown:
            table.add_column(name.replace("_", " "))
        for each in alike:
            values = (each["row"][name] for name in shown)
            table.add_row(*("" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
        yield table


def _shown(records: Iterable[Any], prompts: int) -> Iterator[Any]:
    """The same records, with a bar of the prompts on standard error."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar, none = progress.add_task("prompts", total=prompts), True
        for record in records:
            none = False
            progress.update(bar, completed=record.prompt)
            yield record
        progress.update(bar, completed=prompts)
    if none:
        raise EvalFailure("nothing was recorded: answers end with their first token, or every layer has a window")
