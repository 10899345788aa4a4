"""`pagelocks serve` as its clients see it: a real model, the OpenAI client, many at once, for a while, then SIGTERM."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagelocks.generate import Generation, generate
from pagelocks.prompts import NeedlePrompt, needle_prompt
from pagelocks.vllm.counters import directory, remove_stale

MODEL = "SmolLM2-135M-Instruct"
BUDGET, NEW, CLIENTS = 256, 8, 8
LENGTHS = [300 + round(1200 * client / (CLIENTS - 1)) for client in range(CLIENTS)]

pytestmark = [pytest.mark.model, pytest.mark.engine]


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    prompts: list[NeedlePrompt]
    reference: Generation

    @property
    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=300)

    def complete(self, ids: Any, tokens: int = NEW, **more: Any) -> Any:
        """A greedy completion of token ids: the choice, which holds its own token ids."""
        answer = self.client.completions.create(
            model=MODEL,
            prompt=list(ids),
            max_tokens=tokens,
            temperature=0,
            extra_body={"return_token_ids": True},
            **more,
        )
        return answer.choices[0]

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples that carry a label."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in samples)

    def assert_same(self, ids: Any, ours: list[int], theirs: list[int]) -> None:
        """Equal answers, or a first difference where the two best logits are within 0.1 of each other.

        The kernels add in another order when rows are batched otherwise, so an exact tie may fall either way.
        """
        if ours == theirs:
            return
        assert len(ours) == len(theirs), f"one answer goes on: {ours} and {theirs}"
        at = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
        choice = self.complete([*ids, *ours[:at]], 1, logprobs=2)
        best, second = sorted(choice.logprobs.top_logprobs[0].values(), reverse=True)[:2]
        assert best - second < 0.1, f"token {at}: {ours} and {theirs}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from transformers import AutoTokenizer

    from pagelocks.models import fetch

    folder = fetch(MODEL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # 400 MB: so few blocks that the warm-up of the memory test touches them all.
    words = [MODEL, "--budget", str(BUDGET), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    words += ["--max-model-len", "4096", "--kv-cache-memory-bytes", "400M"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagelocks", "serve", *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [needle_prompt(tokenizer, length, seed) for seed, length in enumerate(LENGTHS)]
        # While the server starts: what the same options answer without it.
        reference = generate(MODEL, prompts[-1].token_ids, {"budget": BUDGET}, max_tokens=NEW)
        one = Server(process, f"http://127.0.0.1:{port}", log, prompts, reference)
        for _ in range(300):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{one.address}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        else:
            pytest.fail(f"the server did not start: {log.read_text()[-4000:]}")
        yield one
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def test_the_model_has_its_name(server: Server) -> None:
    assert [model.id for model in server.client.models.list()] == [MODEL]


def test_completions_equal_generate(server: Server) -> None:
    prompt = server.prompts[-1]
    choice = server.complete(prompt.token_ids)
    assert prompt.answer in choice.text
    server.assert_same(prompt.token_ids, list(choice.token_ids), server.reference.token_ids)


def test_chat(server: Server) -> None:
    turns = [{"role": "user", "content": "What is the capital of France? " * 60}]
    answer = server.client.chat.completions.create(model=MODEL, messages=turns, max_tokens=NEW, temperature=0)
    assert answer.usage.prompt_tokens > BUDGET
    assert 0 < answer.usage.completion_tokens <= NEW
    assert answer.choices[0].message.content.strip()


def test_streaming(server: Server) -> None:
    prompt = server.prompts[1]
    chunks = server.client.completions.create(
        model=MODEL, prompt=list(prompt.token_ids), max_tokens=NEW, temperature=0, stream=True
    )
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(texts) > 2
    assert "".join(texts) == server.complete(prompt.token_ids).text


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt.token_ids), server.prompts))
    right = [prompt.answer in choice.text for prompt, choice in zip(server.prompts, together, strict=True)]
    assert sum(right) >= CLIENTS - 2, [choice.text for choice in together]
    for prompt, choice in zip(server.prompts, together, strict=True):
        alone = server.complete(prompt.token_ids)
        server.assert_same(prompt.token_ids, list(choice.token_ids), list(alone.token_ids))


def test_a_client_that_leaves_frees_its_request(server: Server) -> None:
    ids = list(server.prompts[2].token_ids)
    stream = server.client.completions.create(
        model=MODEL, prompt=ids, max_tokens=2000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.metric("vllm:num_requests_running") >= 1
    stream.close()
    for _ in range(60):
        if server.metric("vllm:num_requests_running") == 0:
            break
        time.sleep(0.5)
    else:
        pytest.fail("the request is still running")
    assert server.complete(ids, 2).token_ids


def test_metrics_say_that_locks_is_active(server: Server) -> None:
    server.complete(server.prompts[3].token_ids, 4)
    assert server.metric("pagelocks_rows_total", 'kind="sparse"') >= 3
    assert server.metric("pagelocks_rows_total", 'kind="dense"') >= 1
    read, skipped = (server.metric("pagelocks_pages_total", f'kind="{kind}"') for kind in ("read", "skipped"))
    assert skipped > read > 0
    assert server.metric("pagelocks_records_read_total") > 0
    assert server.metric("pagelocks_summaries_built_total") > 0


def test_memory_stays_flat(server: Server) -> None:
    """250 requests that share 256 cached tokens and end differently; every decode row is a sparse one."""
    import psutil

    shared = list(server.prompts[-1].token_ids[:256])

    def resident() -> int:
        tree = [psutil.Process(server.process.pid)]
        tree += tree[0].children(recursive=True)
        return sum(process.memory_info().rss for process in tree)

    def ask(number: int) -> None:
        server.complete([*shared, *range(1000 + number, 1020 + number)], 2, seed=number)

    before = server.metric("pagelocks_rows_total", 'kind="sparse"')
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(50)))
        first = resident()
        list(pool.map(ask, range(50, 250)))
        last = resident()
    assert server.metric("pagelocks_rows_total", 'kind="sparse"') > before
    assert last < first + 50e6, f"{first / 1e6:.0f} MB, then {last / 1e6:.0f} MB"


def test_sigterm_ends_it_cleanly(server: Server) -> None:
    """The last test of the file: no process is left, and no file of counters once the next engine has looked.

    A worker that vLLM has to kill leaves its file behind.
    """
    import psutil

    family = psutil.Process(server.process.pid).children(recursive=True)
    pids = {process.pid for process in family}
    assert any(int(file.name.split("-")[0]) in pids for file in directory().glob("*.counters"))
    server.process.terminate()
    assert server.process.wait(60) in (0, -15, 143)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    remove_stale()
    assert not [file for file in directory().glob("*.counters") if int(file.name.split("-")[0]) in pids]
