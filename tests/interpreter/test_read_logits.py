"""The kernel that `python -m benchmarks sampling` measures reading with, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from benchmarks.sampling import read


@pytest.mark.parametrize(("shape", "programs"), [((1, 700), 1024), ((3, 1000), 2), ((2, 512), 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_stretch_is_read(shape, programs, dtype, monkeypatch):
    monkeypatch.setattr(read, "PROGRAMS", programs)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = read.largest_of_stretches(x)
    block = min(max(1 << (-(-x.numel() // programs) - 1).bit_length(), 512), 8192)
    wanted = [float(part.max()) for part in x.flatten().split(block)]
    assert got.tolist() == wanted
    assert len(wanted) > 1
