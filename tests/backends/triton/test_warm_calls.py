"""What a call with `out` asks of torch once it is warm: scratch memory and views. No fill, copy or conversion, each of which is
a launch beside the kernel's own, and no memory for a result."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.attention import launcher, variants
from spec_ops.backends.triton.attention.deterministic import launcher as deterministic
from spec_ops.backends.triton.attention.hopper import gqa, mla, mla_few
from spec_ops.backends.triton.cache import append, indices
from spec_ops.backends.triton.runtime import repeat

SCRATCH = {"aten.empty.memory_format"}


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    """Kept, as on a GPU; on the meta device they would be made anew."""
    made = torch.zeros(1 << 16, dtype=torch.int32, device="meta")
    monkeypatch.setattr(repeat, "arrival_counters", lambda device, count, kernel: made[:count])


class Asked(TorchDispatchMode):
    """Ops of torch that are called, less views."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def asked(call) -> tuple[int, Counter[str]]:
    variants.launches_of(call)  # warm: what is kept between calls is made
    with Asked() as warm:
        launches = variants.launches_of(call)
    return len(launches), warm.ops


def into_memory(call):
    return replace(call, out=torch.empty(*call.q.shape[:-1], call.v_head_dim, dtype=call.q.dtype, device="meta"))


@pytest.mark.parametrize("ragged", [0, 64])
@pytest.mark.parametrize("shape", [variants.GQA_128, variants.GQA_FP8, variants.MLA_16], ids=lambda shape: shape.label)
@pytest.mark.parametrize("family", [launcher, deterministic], ids=["split", "deterministic"])
def test_attention(family, shape, ragged):
    """The deterministic kernels combine parts in a second launch, and leave padding of ragged rows to a fill."""
    call = into_memory(variants.call_of(shape, 8, 4, ragged=ragged))
    launches, ops = asked(lambda: family.attention(call))
    if family is launcher:
        assert launches == 1
        assert set(ops) <= SCRATCH
    else:
        assert launches == (1 if ragged else 2)
        assert set(ops) == ({"aten.zero_.default"} if ragged else SCRATCH)
    without = asked(lambda: family.attention(replace(call, out=None)))[1]
    assert sum((without - ops).values()) == 1  # memory for the result


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [(gqa.mha, variants.GQA_128), (gqa.mha, variants.GQA_64), (mla.mla, variants.MLA_128), (mla_few.mla, variants.MLA_16)],
)
def test_attention_on_hopper(kernel, shape):
    call = into_memory(variants.call_of(shape, 8, 1))
    launches, ops = asked(lambda: kernel(call))
    assert launches == 1
    assert set(ops) <= SCRATCH


def test_tables_and_appends():
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, lens = empty(8, dtype=torch.int64), empty(8, dtype=torch.int32)
    table, pool = empty(8, 64, dtype=torch.int32), empty(32, 4096, dtype=torch.int32)
    cache, new, slots = empty(64, 64, 8, 128), empty(8, 8, 128), empty(8, dtype=torch.int64)
    latent = empty(64, 64, 576), empty(8, 512), empty(8, 64)
    for call in (
        lambda: indices.page_table_out(pool, rows, lens, 64, table),
        lambda: append.append_kv(cache, cache, new, new, slots, 1.0, 1.0),
        lambda: append.append_mla_kv(*latent, slots, 1.0),
    ):
        assert asked(call) == (1, Counter())
