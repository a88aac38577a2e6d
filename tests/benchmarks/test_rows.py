"""What a file of figures says of where they came from."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import rows

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
