"""lm-eval-harness through its Hugging Face model, as docs/lm-eval.md says, on a task and data made here."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from test_hf import make_model

import pagelocks.hf as hf
from pagelocks import LocksConfig

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
GENERATE = 'generation_kwargs: {until: ["never"], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]'
LIKELIHOOD = "metric_list: [{metric: perplexity}]"


def local_task(folder: Path, name: str, kind: str, more: str, rows: list[dict[str, str]]) -> TaskManager:
    """A task of lm-eval, its data in a file beside it."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, more=more))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(model: Any, tasks: TaskManager, name: str, batch: int) -> dict[str, Any]:
    lm = HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=batch, max_length=1024)
    found: dict[str, Any] = simple_evaluate(lm, tasks=[name], task_manager=tasks, log_samples=True, bootstrap_iters=0)
    return found


def said(found: dict[str, Any], name: str) -> list[str]:
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples]


@pytest.mark.parametrize("batch", [1, 3])
def test_its_answers_are_those_of_locks_and_pages_were_skipped(tmp_path: Path, batch: int) -> None:
    """Prompts of three lengths, so a batch is padded; the references are LOCKS' own answers, so all are right."""
    draw, tokenizer = random.Random(), byte_tokenizer()
    texts = ["".join(draw.choices("abcdefgh ,.", k=length)) for length in (150, 190, 260)]
    model, config = make_model(vocab_size=256, num_hidden_layers=2), LocksConfig(budget=64, dense_below=0)
    hf.attach(model, config)
    expected = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        expected.append(tokenizer.decode(tokens[0, ids.shape[1] :]))
    rows = [{"text": text, "answer": answer} for text, answer in zip(texts, expected, strict=True)]
    tasks = local_task(tmp_path, "said", "generate_until", GENERATE, rows)
    session = hf.attach(model, config)
    assert said(evaluate(model, tasks, "said", batch), "said") == expected
    counts = session.statistics()
    assert (counts.rows_dense, counts.rows_sparse) == (0, 2 * 3 * 5)  # layers, prompts, steps after the first token
    assert counts.pages_read == counts.rows_sparse * 2 * 4 and counts.pages_skipped > counts.pages_read
    hf.detach(model)
    dense = said(evaluate(model, tasks, "said", batch), "said")
    assert dense != expected  # random weights and 64 of 150 tokens or more: LOCKS was not off


def test_a_task_of_likelihoods_takes_no_sparse_step(tmp_path: Path) -> None:
    """What docs/lm-eval.md warns of: such a task scores the prompt's own pass, which is dense."""
    rows = [{"text": "x" * 200, "answer": "yes"}]
    tasks = local_task(tmp_path, "likely", "loglikelihood", LIKELIHOOD, rows)
    model = make_model(vocab_size=256, num_hidden_layers=2)
    session = hf.attach(model, LocksConfig(budget=64, dense_below=0))
    evaluate(model, tasks, "likely", 1)
    assert session.statistics().rows_sparse == 0 == session.statistics().pages_skipped


def test_the_command_in_the_documents_is_read_as_meant() -> None:
    from lm_eval._cli.harness import HarnessCLI

    text = (Path(__file__).parents[1] / "docs" / "lm-eval.md").read_text()
    words = shlex.split(text.split("```\nlm-eval ")[1].split("```")[0].replace("\\\n", " "))
    given = HarnessCLI()._parser.parse_args(words)
    assert given.model == "vllm" and given.model_args["attention_backend"] == "CUSTOM"
    (options,) = given.model_args["additional_config"].values()
    assert LocksConfig(**options).budget == 2048
