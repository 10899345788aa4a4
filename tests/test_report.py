"""`pagelocks eval report`: the page says what the files say, holds all it shows, and takes no text for a tag."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from byte_tokenizer import Page

pytest.importorskip("matplotlib")
from pagelocks.cli import main
from pagelocks.eval.plots import score_plot
from pagelocks.eval.report import sections
from pagelocks.eval.tables import summaries

NAME = "<b>tiny</b></title><script>alert(1)</script>"


def header(**changes: Any) -> dict[str, Any]:
    given = {"model": NAME, "config": "0a", "dtype": "float32", "seed": 7, "new_tokens": None, "link_steps": 1}
    given |= {"versions": {"torch": "2.13.0", "python": "3.11"}, "commit": "0123456789abcdef", "device": "<i>chip</i>"}
    return given | changes


def lines(task: str, selectors: Sequence[str], budgets: Sequence[int], records: int = 12) -> list[dict[str, Any]]:
    """Fresh scores, the same records for all."""
    draw, found = random.Random(), list[dict[str, Any]]()
    for selector in ("dense", *selectors):
        for budget in [0] if selector == "dense" else budgets:
            for index in range(records):
                links = {"coverage_ratio": draw.random(), "worst": draw.random(), "p5": draw.random()}
                line = {"task": task, "context": 600, "index": index, "selector": selector, "budget": budget}
                line |= {"rule": "share", "score": draw.random(), "substitute": task == "qa_1", "page_bytes": 512}
                line |= {"links": None if selector == "dense" else links, "pages_read": 1.0, "pages_skipped": 3.0}
                found.append(line | {"commit": "0123456789abcdef"})
    return found


def written(path: Path, about: dict[str, Any], *parts: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in [about, *(line for part in parts for line in part)]))
    return path


def test_the_page_says_what_the_files_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    selectors, budgets, out = ["locks", "exact", "quest"], [64, 128], tmp_path / "deep" / "report.html"
    first, second = (lines(task, selectors, budgets) for task in ("vt", "qa_1"))
    other = lines("vt", ["locks"], [64])
    files = [
        written(tmp_path / "a.jsonl", header(), first),
        written(tmp_path / "b.jsonl", header(date="later", link_steps=1), second),
    ]
    files.append(written(tmp_path / "c.jsonl", header(model="second", seed=8), other))
    assert main(["eval", "report", *map(str, files), "--title", "<u>T", "--output", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["models"], said["cells"]) == (2, 2 * 7 + 2)  # a and b are one model's
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "u", "i", "link", "iframe"} & set(page.tags) and page.fetched() == []
    assert page.tags.count("b") == 3 and page.titles[0] == "<u>T"  # the three files' names
    for each in (NAME, "<i>chip</i>"):
        assert each.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text
    assert page.tags.count("svg") == 3 and text.count("generated text where the benchmark") == 1
    rows = [row for row in page.cells if len(row) > 15 and row[0] in ("dense", *selectors)]
    expected = [cell for part in (second, first, other) for cell in summaries(part)]  # by context, then task
    assert len(rows) == len(expected)
    for row, cell in zip(rows, expected, strict=True):
        assert row[0] == cell["selector"] and row[1] == str(cell["budget"] or "") and row[3] == "12"
        assert row[4] == f"{cell['score']:.1f}" and row[5] == f"{cell['low']:.1f} to {cell['high']:.1f}"
        for at, name in ((6, "against_dense"), (9, "against_exact")):
            test = None if cell["selector"] == name[8:] else cell.get(name)
            assert row[at] == ("" if test is None else f"{test['difference']:+.1f}")
            assert row[at + 2] in (("",) if test is None else (f"{test['p']:.4f}", "< 0.0001"))
        if cell["selector"] != "dense":
            assert row[12] == f"{cell['coverage_ratio']:.3f}" and row[13] == f"{cell['worst']:.3f}"
            assert row[19] == "25.0%" and row[20] == "" and row[21] == "512"
        assert row[22].strip() == "012345678"


def test_overviews_hold_all_tasks_and_a_mean_only_of_all() -> None:
    part = [*lines("vt", ["locks"], [64]), *lines("cwe", ["locks", "quest"], [64])]
    (model,) = sections([{"name": "f", "header": header(), "lines": part}])
    (view,) = model["overviews"]
    means = {(cell["selector"], cell["task"]): cell["score"] for cell in summaries(part)}
    by_name = {row["selector"]: row["scores"] for row in view["rows"]}
    both = [means["locks", "vt"], means["locks", "cwe"]]
    assert view["tasks"] == ["vt", "cwe"] and by_name["locks"] == [*both, pytest.approx(sum(both) / 2)]
    assert by_name["quest"] == [None, means["quest", "cwe"], None]


@pytest.mark.parametrize("budgets", [[64, 128, 256], [64]])
def test_a_plot_shows_the_scores_and_shares_no_id_with_another(budgets: list[int]) -> None:
    pictures = [score_plot(summaries(lines("vt", ["locks", "exact", "rkv"], budgets)), f"p{n}") for n in (0, 1)]
    ids = [set(re.findall(r'\bid="([^"]*)"', picture)) for picture in pictures]
    assert not ids[0] & ids[1] and len(ids[0]) > 10
    for picture, known in zip(pictures, ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', picture)) <= known
        words = " ".join(ElementTree.fromstring(picture).itertext())
        assert all(name in words for name in ("locks", "exact", "rkv", "dense"))
    cells = [c for c in summaries(lines("vt", ["locks"], budgets)) if c["selector"] == "locks"]
    tree = ElementTree.fromstring(score_plot(cells, "p"))
    if len(budgets) > 1:  # a marker for each budget; SVG's y goes down
        marks = [use for use in tree.iter("{http://www.w3.org/2000/svg}use") if "clip-path" in _around(tree, use)]
        heights = [float(use.get("y", 0)) for use in marks if float(use.get("x", 0)) and use.get("y")]
        scores = [cell["score"] for cell in cells]
        per_point = [heights[n : n + len(scores)] for n in range(0, len(heights), len(scores))]
        order = sorted(range(len(scores)), key=lambda n: scores[n])
        points = per_point[-1]  # behind both ends of their intervals
        assert len(per_point) == 3 and sorted(range(len(scores)), key=lambda n: -points[n]) == order


def _around(tree: ElementTree.Element, inner: ElementTree.Element) -> dict[str, str]:
    return next(dict(each.attrib) for each in tree.iter() if inner in list(each))


def test_figures_stand_beside_their_numbers(tmp_path: Path) -> None:
    picture, out = random.Random().randbytes(400), tmp_path / "r.html"
    (tmp_path / "drift.png").write_bytes(picture)
    rows = [{"budget": 64, "score": 0.123456, "who": "<em>"}, {"budget": 128, "more": [1, 2]}]
    rows = [row | {"alike": "<em>"} for row in rows]
    (tmp_path / "drift.json").write_text(json.dumps({"figure": "drift", "rows": rows, "versions": {"torch": "2.13"}}))
    (tmp_path / "list.json").write_text(json.dumps([{"a": 1}]))
    names = ["drift.png", "drift.json", "list.json"]
    assert main(["eval", "report", *(str(tmp_path / name) for name in names), "--output", str(out)]) == 0
    page = Page(out.read_text(encoding="utf-8"))
    assert page.tags.count("section") == 2 and page.fetched() == [] and "em" not in page.tags
    (address,) = (value for name, value in page.attributes if name == "src")
    assert base64.b64decode(address.removeprefix("data:image/png;base64,")) == picture
    heads = ["budget", "score", "who", "more"]
    assert page.cells == [heads, ["64", "0.1235", "<em>", ""], ["128", "", "", "1, 2"], ["a"], ["1"]]
    for said in ("versions: torch 2.13", "in all rows: alike: &lt;em&gt;"):
        assert said in out.read_text(encoding="utf-8")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--output", str(tmp_path / "r.html")]
    written(tmp_path / "none.jsonl", header())
    written(tmp_path / "odd.jsonl", header(), [{"task": "vt"}])
    (tmp_path / "bad.json").write_text("{")
    for name in ("none.jsonl", "odd.jsonl", "missing.jsonl", "bad.json", "missing.png"):
        assert main(["eval", "report", str(tmp_path / name), *out]) == 2
        said = capsys.readouterr().err
        assert f"FILE='{tmp_path / name}' is not allowed" in said and not (tmp_path / "r.html").exists()
    run = written(tmp_path / "run.jsonl", header(), lines("vt", ["locks"], [64]))
    before = run.read_text()
    assert main(["eval", "report", str(run), "--output", str(run)]) == 2 and run.read_text() == before
    assert "a file of its own to write" in capsys.readouterr().err


def test_answers_to_two_files_of_one_benchmark_are_not_one_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        given = [line | {"source": name * 16} for line in lines("longbench/hotpotqa", ["locks"], [64])]
        written(tmp_path / f"{name}.jsonl", header(), given)
    command = ["eval", "report", "--output", str(tmp_path / "page.html")]
    assert main([*command, str(tmp_path / "a.jsonl")]) == 0
    capsys.readouterr()
    assert main([*command, str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 2
    assert "one file of longbench/hotpotqa; they were read from files of digests" in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("score", "1"), ("pages_read", None), ("task", ["x"]), ("links", 3)])
def test_a_damaged_line_is_named(field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = lines("vt", ["locks"], [64])
    given[3][field] = value
    path = written(tmp_path / "run.jsonl", header(), given)
    for command in (["report", str(path), "--output", str(tmp_path / "page.html")], ["table", str(path)]):
        assert main(["eval", *command]) == 2
        assert f"line 5 has {field}={value!r}" in capsys.readouterr().err
