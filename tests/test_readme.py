"""The README's support matrix: every row names a test that exists, and every refusal has a row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rows() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    table = re.search(r"\| feature \|.*?\n\n", text, re.S)
    assert table
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].strip().splitlines()[2:]]


def test_every_row_names_a_test_that_exists() -> None:
    tests = "\n".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    for feature, answer, shown in rows():
        if feature != "one request opting out":
            name = shown.strip("`")
            assert f"def {name}(" in tests, f"{feature} ({answer}) names {name}"


def test_every_feature_that_must_have_an_answer_has_one() -> None:
    table = "\n".join(feature for feature, *_ in rows()).lower()
    features = "prefix caching, chunked prefill, preemption, async scheduling, hybrid, share k and v, encoder, mla, "
    features += "softcapping, attention sinks, alibi, fp8, speculative, draft, lora, tensor, pipeline, context, "
    features += "kv connectors, sleep mode"
    for feature in features.split(", "):
        assert feature in table, feature


def test_modules_are_all_in_the_structure() -> None:
    structure = (ROOT / "docs" / "structure.md").read_text()
    for path in (ROOT / "src" / "pagelocks").rglob("*.py"):
        name = str(path.relative_to(ROOT / "src" / "pagelocks"))
        assert f"`{name}`" in structure or path.name == "__main__.py", f"docs/structure.md has no line for {name}"
