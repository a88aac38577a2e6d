"""What `import spec_ops` offers: its names and their types (`tests/test_imports.py`: how little it imports)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import spec_ops

ROOT = Path(__file__).resolve().parents[2]


def test_every_public_name_is_there():
    listed = dir(spec_ops)
    assert {"compile", "explain", "install", "passes", *spec_ops.__all__} <= set(listed)
    assert all(getattr(spec_ops, name) is not None for name in listed)
    assert not hasattr(spec_ops, "spec_ops")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = spec_ops.no_such_name


SNIPPET = """
import torch
import spec_ops

def step(x: torch.Tensor, n: int) -> torch.Tensor:
    return x

@spec_ops.compile
def decorated(x: torch.Tensor) -> int:
    return 1

@spec_ops.compile(mode="default")
def configured(x: torch.Tensor) -> int:
    return 1

reveal_type(spec_ops.compile(step))
reveal_type(spec_ops.compile(torch.nn.Linear(2, 2)))
reveal_type(decorated)
reveal_type(configured)
reveal_type(spec_ops.explain(step, torch.ones(1), 2))
reveal_type(spec_ops.install())
reveal_type(spec_ops.passes.pass_names())
reveal_type(spec_ops.mha_draft_decode)
spec_ops.no_such_name
"""

REVEALED = (
    "def (x: torch._tensor.Tensor, n: int) -> torch._tensor.Tensor",
    "torch.nn.modules.linear.Linear",
    "def (x: torch._tensor.Tensor) -> int",
    "def (x: torch._tensor.Tensor) -> int",
    "spec_ops.passes.report.GraphReport",
    "def ()",
    "tuple[str, ...]",
    "def (q: torch._tensor.Tensor, k_cache: torch._tensor.Tensor",
)


@pytest.mark.slow
def test_mypy_sees_types(tmp_path):
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    # With the project's settings, so that it finds torch in the cache of the project's own check.
    run = subprocess.run([sys.executable, "-m", "mypy", str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    revealed = [line.split('Revealed type is "')[1].rstrip('"') for line in lines if "Revealed type" in line]
    assert len(revealed) == len(REVEALED), "\n".join(lines)
    for got, wanted in zip(revealed, REVEALED, strict=True):
        assert got.removeprefix("builtins.").startswith(wanted)
    assert [line for line in lines if "error" in line and "no_such_name" in line]
