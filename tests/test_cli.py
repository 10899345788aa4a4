"""The command line, without vLLM: texts, exit statuses, what `serve` would run, what reaches standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from pagelocks import cli, models
from pagelocks import generate as generating
from pagelocks.generate import Comparison, EngineFailure, Generation, LayerReads, root_cause, share_read
from pagelocks.vllm.serve import KV_SPACE, BadFlag, server_command

ANSWER = Generation(
    model="/m",
    locks={"budget": 256},
    prompt_tokens=1000,
    token_ids=[5, 6, 7],
    text="forty [two]",
    finish_reason="stop",
    start_s=1.0,
    prefill_s=2.0,
    ms_per_token=3.0,
    page_bytes=4096,
    record_bytes=512,
    layers=[LayerReads("layers.0", 2, 1, 32, 96, 128, 0.375), LayerReads("layers.1", 2, 1, 32, 96, 128, 0.375)],
    vllm="0.32.0",
)
STOCK = Generation(**{**vars(ANSWER), "locks": None, "layers": [], "page_bytes": None, "record_bytes": None})


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    file = tmp_path / "prompt.txt"
    file.write_text("What is the answer?")
    return str(file)


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, so that nothing here depends on what this machine has fetched."""
    monkeypatch.setenv("PAGELOCKS_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", KV_SPACE):
        monkeypatch.delenv(name, raising=False)


def status(words: list[str]) -> int:
    """The exit status of a command."""
    try:
        return cli.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("words", [[], ["serve"], ["generate"], ["models"], ["models", "fetch"]], ids=" ".join)
def test_help_is_plain_and_the_first_fits_a_screen(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) <= (24 if not words else 40)


def test_python_m_pagelocks_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "pagelocks", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pagelocks 0.")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "required: COMMAND"),
        (["generate", "m"], "--prompt-file"),
        (["generate", "m", "--prompt-file", "P", "--bogus", "3"], "unrecognized arguments: --bogus 3"),
        (["generate", "m", "--prompt-file", "P", "--budget", "many"], "invalid int value"),
        (["generate", "m", "--prompt-file", "P", "--budget", "20"], "budget=20 is not allowed"),
        (["generate", "m", "--prompt-file", "P", "--rank", "16"], "rank=16 is not allowed"),
        (["generate", "m", "--prompt-file", "P", "--max-tokens", "0"], "max_tokens=0 is not allowed"),
        (["generate", "no-such-model", "--prompt-file", "P"], "neither an existing folder nor a known model"),
        (["generate", "/", "--prompt-file", "P"], "it has no config.json"),
        (["generate", "m", "--prompt-file", "/no/such/file"], "'/no/such/file' cannot be read"),
        (["generate", "m", "--prompt-file", "P", "--trace", "/no/such/folder/t"], "cannot be written"),
        (["generate", "m", "--prompt-file", "P", "--chat", "--raw"], "not allowed with argument"),
        (["models", "fetch", "no-such-model"], "unknown model 'no-such-model'"),
        (["serve", "m", "--json"], "--json needs --dry-run"),
        (["serve", "--port", "8000", "m"], "MODEL must come before"),
        (["serve", "m", "--budget", "8", "--dry-run"], "budget=8 is not allowed"),
        (["serve", "m", "--attention-backend", "FLASH_ATTN"], "LOCKS is the backend CUSTOM"),
        (["serve", "m", "--attention_backend=FLASH_ATTN"], "LOCKS is the backend CUSTOM"),
        (["serve", "m", "--attention-config", '{"backend": "FLASH_ATTN"}'], "LOCKS is the backend CUSTOM"),
        (["serve", "m", "--enforce-eager", "-ac", '{"backend": "FLASH_ATTN"}'], "LOCKS is the backend CUSTOM"),
        (["serve", "m", "--attention-config.backend", "FLASH_ATTN"], "LOCKS is the backend CUSTOM"),
        (["serve", "m", "--additional-config", "{"], "a JSON object is needed"),
        (["serve", "m", "--additional-config", '{"locks": {"bugdet": 5}}'], "'bugdet' is not allowed"),
        (["serve", "m", "--additional-config", '{"locks": 5}'], "an object of options"),
        (["serve", "m", "--additional-config.locks.budget", "256"], "as one JSON object"),
        (["serve", "m", "--model", "n"], "the model is the first argument"),
    ],
)
def test_bad_use_exits_with_2_and_says_why(
    words: list[str], text: str, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([prompt if word == "P" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


def test_a_file_of_flags_may_not_hide_what_locks_needs(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("port: 8000\n")
    assert "--config" in server_command("m", None, {}, ["--config", str(file)], {}, False).argv
    file.write_text("port: 8000\nadditional_config: {}\n")
    with pytest.raises(BadFlag, match="sets additional-config"):
        server_command("m", None, {}, ["--config", str(file)], {}, False)


def test_serve_merges_options_and_passes_the_rest_on() -> None:
    flags = [
        "--port",
        "8001",
        "--additional-config",
        '{"x": 1, "locks": {"rank": 4, "budget": 512}}',
        "-O3",
        "--foo=a b",
    ]
    command = server_command("hub/model", None, {"budget": 256}, flags, {}, cpu=False)
    assert command.argv[:6] == [
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "hub/model",
    ]
    assert command.argv[6:8] == ["--attention-backend", "CUSTOM"]
    assert command.argv[8] == "--additional-config"
    assert json.loads(command.argv[9]) == {"x": 1, "locks": {"rank": 4, "budget": 256}}
    assert command.argv[10:] == ["--port", "8001", "-O3", "--foo=a b"]
    assert command.env == {}


@pytest.mark.parametrize(
    "flags",
    [
        ["--attention-backend", "CUSTOM"],
        ["--attention-backend=custom"],
        ["--attention-config", '{"backend": "CUSTOM"}'],
        ["--attention-config.backend", "CUSTOM"],
        ["--attention-config", '{"other": 1}', "--attention-backend", "CUSTOM"],
        ["--enforce-eager", "-ac", '{"backend": "CUSTOM"}'],
    ],
)
def test_serve_asks_for_the_backend_once(flags: list[str]) -> None:
    argv = server_command("m", None, {}, flags, {}, cpu=False).argv
    assert sum("custom" in word.lower() for word in argv) == 1


def test_serve_sets_only_what_is_not_set(tmp_path: Path) -> None:
    def env(flags: list[str], environ: dict[str, str], model: str = str(tmp_path)) -> dict[str, str]:
        return server_command(model, None, {}, flags, environ, cpu=True).env

    assert env([], {}) == {"HF_HUB_OFFLINE": "1", KV_SPACE: "4"}
    assert env([], {}, "hub/model") == {KV_SPACE: "4"}
    assert env([], {"HF_HUB_OFFLINE": "0", KV_SPACE: "1"}) == {}
    assert env(["--kv-cache-memory-bytes", "1G"], {"HF_HUB_OFFLINE": "0"}) == {}


def test_serve_dry_run_of_a_known_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "smollm2-135m", "--budget", "256", "--port", "8001", "--dry-run"]
    assert status([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    command = json.loads(out)["command"]
    folder = str(models.cache_dir() / "models" / "SmolLM2-135M-Instruct")
    assert command[command.index("--model") + 1] == folder
    assert command[command.index("--served-model-name") + 1] == "SmolLM2-135M-Instruct"
    assert err == ""
    assert status([*words, "--served-model-name", "mine"]) == 0
    assert "--served-model-name mine" in capsys.readouterr().out


def test_models_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["models", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert [model["name"] for model in found] == list(models.MODELS)
    assert all(model["path"] is None for model in found)
    assert status(["models", "list"]) == 0
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().out


def test_a_model_that_cannot_be_fetched_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Path:
        raise models.ModelError("the disk is full")

    monkeypatch.setattr(models, "fetch", fail)
    assert status(["models", "fetch", "SmolLM2-135M-Instruct", "--json"]) == 1
    assert capsys.readouterr() == ("", "pagelocks models fetch: error: the disk is full\n")


@pytest.mark.parametrize("compared", [False, True])
def test_generate_prints_one_json_object(
    compared: bool, prompt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def stub(model: str, text: str, locks: Any, progress: Any, **more: Any) -> Any:
        asked.update(model=model, text=text, locks=locks, **more)
        progress("generating token 1 of at most 64")
        return Comparison(STOCK, ANSWER) if compared else ANSWER

    monkeypatch.setattr(cli, "compare" if compared else "generate", stub)
    words = ["generate", "m", "--prompt-file", prompt, "--budget", "256", "--raw", *["--compare"] * compared]
    assert status([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    locks = result["locks"] if compared else result
    assert locks["share"] == pytest.approx((64 * 4096 + 256 * 512) / (256 * 4096))
    assert locks["rows_sparse"] == 2
    assert "generating" in err
    assert asked["locks"] == {"budget": 256}
    assert asked["text"] == "What is the answer?"
    assert asked["chat"] is False
    assert status(words) == 0
    out = capsys.readouterr().out
    assert "forty [two]" in out
    assert "37.5%" in out
    assert ("The answers are the same." in out) == compared


def test_first_difference() -> None:
    def difference(dense: list[int], locks: list[int]) -> int | None:
        sides = (Generation(**{**vars(ANSWER), "token_ids": ids}) for ids in (dense, locks))
        return Comparison(*sides).first_difference

    assert difference([1, 2], [1, 2]) is None
    assert difference([1, 2, 3], [1, 5, 3]) == 1
    assert difference([1, 2, 3], [1, 2]) == 2


def test_share_read() -> None:
    assert share_read(0, 0, 0, 4096, 512) is None
    assert share_read(1, 3, 4, 4096, 512) == (4096 + 4 * 512) / (4 * 4096)
    assert share_read(4, 0, 0, 4096, 512) == 1.0


LOG = """\
INFO 11-30 01:58:13 [cpu.py:178] Starting.
(EngineCore pid=12) ERROR 11-30 01:58:13 [core.py:10] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-30 01:58:13 [core.py:10]   File "core.py", line 1, in <module>
(EngineCore pid=12) ERROR 11-30 01:58:13 [core.py:10]     start()
(EngineCore pid=12) ERROR 11-30 01:58:13 [core.py:10] pagelocks.vllm.support.Unsupported: LOCKS does not support X.
(EngineCore pid=12) Process EngineCore:
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "core.py", line 1, in <module>
(EngineCore pid=12) pagelocks.vllm.support.Unsupported: LOCKS does not support X.
(MainProcess pid=11) INFO: bye
Traceback (most recent call last):
  File "llm.py", line 1, in <module>
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_root_cause() -> None:
    assert root_cause(LOG.splitlines(), "?") == "Unsupported: LOCKS does not support X."
    assert root_cause(["INFO: nothing: here"], "?") == "?"


NOISY = """
import json, os, sys
BEGIN
job = json.load(sys.stdin)
os.write(1, b"noise on standard output\\n")
os.write(2, b"noise on standard error\\n")
with open(int(sys.argv[1]), "w") as events:
    for event in EVENTS:
        events.write(json.dumps(event) + "\\n")
    EXIT
"""


def child(monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]], end: str = "", begin: str = "") -> None:
    """Put a script in the place of the process that runs vLLM."""
    code = NOISY.replace("EVENTS", repr(events)).replace("EXIT", end).replace("BEGIN", begin)
    monkeypatch.setattr(generating, "_CHILD", (sys.executable, "-c", code))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_what_the_engine_prints_stays_off_standard_output(
    model: str, prompt: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    layers = [{key: value for key, value in vars(layer).items() if key != "share"} for layer in ANSWER.layers]
    child(monkeypatch, [{"event": "result", "result": {**vars(ANSWER), "layers": layers}}])
    assert status(["generate", model, "--prompt-file", prompt, "--json", "--verbose"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == ANSWER.to_dict()
    assert "noise on standard output" in err
    assert "noise on standard error" in err


def test_a_prompt_that_is_too_long_exits_with_2(
    model: str, prompt: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    child(monkeypatch, [{"event": "bad prompt", "text": "the prompt has too many tokens."}])
    assert status(["generate", model, "--prompt-file", prompt, "--json"]) == 2
    assert capfd.readouterr() == ("", "pagelocks generate: error: the prompt has too many tokens.\n")


def test_an_engine_that_fails_exits_with_1_and_one_line(
    model: str, prompt: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    child(monkeypatch, [], f"print({LOG!r}, flush=True); sys.exit(1)")
    assert status(["generate", model, "--prompt-file", prompt, "--json"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "pagelocks generate: error: the engine failed: Unsupported: LOCKS does not support X."
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RuntimeError: Engine core initialization failed. See above.", "Unsupported: LOCKS does not support X."),
        ("Value error, the context is too long", "Value error, the context is too long"),
    ],
)
def test_the_failure_that_is_told_is_the_cause(
    text: str, expected: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, [{"event": "failure", "text": text}], begin=f"print({LOG!r}, flush=True)")
    with pytest.raises(EngineFailure) as caught:
        generating.generate(model, "Hello")
    assert str(caught.value) == expected


def test_an_engine_that_dies_is_a_failure(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, [], "os.kill(os.getpid(), 9)")
    with pytest.raises(EngineFailure, match="ended without an answer") as caught:
        generating.generate(model, "Hello")
    assert "noise on standard error" in caught.value.log


def test_nothing_is_left_running(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grandchild that outlives its parent, as vLLM's workers may, is ended with it."""
    grandchild = tmp_path / "pid"
    end = f"import subprocess; open({str(grandchild)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    child(monkeypatch, [], end)
    events = generating._in_child({"locks": None}, deque(), None)
    assert list(events) == []
    pid = int(grandchild.read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the grandchild was still running")


def test_vllm_missing_exits_with_1(
    model: str, prompt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert status(["generate", model, "--prompt-file", prompt]) == 1
    assert status(["serve", model]) == 1
    assert capsys.readouterr().err.count("vLLM is not installed") == 2


@pytest.mark.parametrize("words", ["eval run --model {0} --output {1}", "eval drift --model {0} --output {1}"])
def test_only_the_work_itself_needs_transformers(words: str, tmp_path: Path) -> None:
    code = "import sys\nsys.modules['transformers'] = None\nfrom pagelocks.cli import main, parser\nparser()\n"
    code += "sys.exit(main(sys.argv[1:]))"
    given = words.format(tmp_path, tmp_path / "out").split()
    ran = subprocess.run([sys.executable, "-c", code, *given], check=False, capture_output=True, text=True)
    assert ran.returncode == 2, ran.stderr
    assert 'transformers is missing: pip install "pagelocks[models,eval]"' in ran.stderr
