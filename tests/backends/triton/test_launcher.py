"""What every launch of an attention call goes through: limits of a grid, and grids that CUDA refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.attention import launcher, variants
from spec_ops.backends.triton.attention.deterministic import launcher as deterministic
from spec_ops.backends.triton.attention.hopper import gqa, mla, mla_few
from spec_ops.backends.triton.runtime import cooperative
from spec_ops.backends.triton.runtime.cooperative import resident_or_none
from spec_ops.backends.triton.runtime.launch import Target, recorded


@pytest.mark.parametrize(("family", "uniform", "ragged"), [(launcher, None, 65_534), (deterministic, 65_535, 65_535)])
def test_more_requests_than_a_grid_holds(family, uniform, ragged):
    """The third dimension of a grid ends at 65,535; the split kernel counts requests in the first."""
    for most, rows in ((uniform, 0), (ragged, 1024)):
        call = variants.call_of(variants.GQA_64, most or 70_000, 4, ragged=rows, pages=1)
        launches = variants.launches_of(lambda call=call: family.attention(call))
        assert launches
        if most is None:
            continue
        wide = replace(call, seq_lens=torch.empty(most + 1, dtype=torch.int32, device="meta"))
        with pytest.raises(ValueError, match=rf"^{call.step}: `seq_lens` must hold at most {most} requests, got {most + 1}: "):
            family.attention(wide)


class Refusing:
    """A launch that CUDA refuses, or that fails otherwise."""

    def __init__(self, message: str = "Triton Error [CUDA]: too many blocks in cooperative launch") -> None:
        self.message, self.tried = message, 0

    def __call__(self) -> torch.Tensor:
        self.tried += 1
        raise RuntimeError(self.message)


@pytest.fixture
def contexts(monkeypatch):
    """The handle of the current CUDA context, as a test sets it."""
    current = [1]
    monkeypatch.setattr(cooperative, "_refused", set())
    monkeypatch.setattr(cooperative, "current_context", lambda: current[0])
    return current


def test_a_refused_grid_is_not_tried_again(contexts):
    """By context: another one, green or not, may have the multiprocessors."""
    start = Refusing()
    for _ in range(3):
        assert resident_or_none(("kernel", 132), start) is None
    assert start.tried == 1
    assert resident_or_none(("kernel", 66), lambda: "launched") == "launched"
    contexts[0] = 2
    assert resident_or_none(("kernel", 132), lambda: "launched") == "launched"
    contexts[0] = 1
    assert resident_or_none(("kernel", 132), start) is None
    assert start.tried == 1


@pytest.mark.parametrize("arch", [86, 90, 100])
@pytest.mark.parametrize(
    ("shape", "q_len"),
    [(variants.GQA_64, 16), (variants.MLA_16, 1), (variants.MLA_128, 1)],
    ids=lambda part: getattr(part, "label", part),
)
def test_a_grid_that_is_too_large_is_launched_otherwise(contexts, monkeypatch, shape, q_len, arch):
    """Whatever waits for other programs is refused, on Hopper its own kernels too: what does not wait is left."""
    refused, launched = [], []

    def launch(kernel, grid, *args, **options):
        if not options.get("launch_cooperative_grid"):
            launched.append(options["COOPERATIVE"])
            return
        refused.append(kernel.__name__)
        raise RuntimeError(Refusing().message)

    for module in (launcher, gqa, mla, mla_few):
        monkeypatch.setattr(module, "launch", launch)
    call = variants.call_of(shape, 8, q_len)
    with recorded(Target(arch, 132)):
        for calls in (1, 2):
            assert launcher.attention(call).shape == (8, q_len, shape.heads, shape.v_dim)
            assert launched == [False] * calls
    assert refused[-1] == "split_kv_attention_kernel"
    assert len(refused) == (2 if arch == 90 else 1)


def test_other_failures_are_raised_each_time(contexts):
    start = Refusing("Triton Error [CUDA]: out of memory")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            resident_or_none(("kernel", 132), start)
    assert start.tried == 2
