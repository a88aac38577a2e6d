"""What a file of figures says of where they came from."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.__main__ import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("module", "started"),
    [
        ("benchmarks.__main__", "python -m benchmarks"),
        ("benchmarks.kv_append", "python -m benchmarks.kv_append"),
        (None, "python benchmarks/kv_append.py"),
    ],
)
def test_the_command_is_the_one_that_was_run(monkeypatch, module, started):
    main = types.ModuleType("__main__")
    main.__spec__ = None if module is None else types.SimpleNamespace(name=module)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "kv_append.py"), "--json", "a file.json"])
    assert rows.environment()["command"] == f"{started} --json 'a file.json'"


def test_a_changed_kernel_marks_the_commit_and_new_results_do_not(tmp_path, monkeypatch):
    def git(*args: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *args], check=True, capture_output=True)

    (tmp_path / "spec_ops").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    kernel, result = tmp_path / "spec_ops" / "kernel.py", tmp_path / "benchmarks" / "results" / "rows.json"
    for file in (kernel, result):
        file.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(rows, "_ROOT", tmp_path)
    result.write_text("2")
    clean = rows.environment()["commit"]
    assert len(clean) == 10
    kernel.write_text("2")
    assert rows.environment()["commit"] == f"{clean}-modified"


def test_the_readme_names_every_command():
    """And no other: each module that can be run, and each command of `python -m benchmarks`."""
    folder = ROOT / "benchmarks"
    text = (folder / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `python -m (benchmarks[\w. -]*?)(?: FILES)?` \|", text, re.M))
    commands = {f"benchmarks {command.name}" for command in app.registered_commands}
    assert {name for name in named if " " in name} == commands
    scripts = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    # The command line itself, processes of `round` and of engines, a part of `sanitize`, the picture of `kernels`, the
    # documents' numbers.
    beside = {"benchmarks", "benchmarks.round.worker"}
    beside |= {f"benchmarks.engines.{name}" for name in ("sglang_worker", "sglang_texts", "vllm_worker", "vllm_texts")}
    beside |= {"benchmarks.sanitize.kernels", "benchmarks.kernels.roofline"}
    assert {name for name in named if " " not in name} == scripts - beside - {"benchmarks.published"}
