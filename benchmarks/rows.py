"""Measured figures on disk: rows with the command, machine, versions and commit that gave them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """What a figure depends on besides the code's arguments."""
    cuda = torch.cuda.is_available()
    return {
        "machine": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        **{name: version for name in ("triton", "flashinfer-python") if (version := _version(name))},
        "python": platform.python_version(),
        "commit": _commit(),
        "command": _command(),
    }


def _command() -> str:
    """The command that this process runs, from the root of the checkout: a module (`python -m`) or a file."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None:
        started = ["-m", main.name.removesuffix(".__main__")]
    else:
        file = Path(sys.argv[0]).resolve()
        started = [str(file.relative_to(_ROOT)) if _ROOT in file.parents else str(file)]
    return shlex.join(["python", *started, *sys.argv[1:]])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """Short hash of the checkout that is measured, marked if anything but results has changed; "unknown" without git."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(_ROOT), *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short=10", "HEAD") + ("-modified" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_rows(path: Path, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """JSON at `path`: `{"environment": ..., "rows": [...]}`, with whatever else is given between the two."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **more, "rows": list(rows)}, indent=2) + "\n", encoding="utf-8")
