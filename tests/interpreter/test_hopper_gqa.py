"""The Hopper GQA kernel on a CPU, in numpy: who waits for whom, and what is computed; `tests/gpu/test_gqa_hopper.py` has what
tensor cores compute."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention.hopper import combine, gqa, gqa_softmax, mask, pages, program
from spec_ops.ops.reference.attention import attention as reference
from tests.helpers.gluon_in_numpy import Machine, in_numpy, value

SMS = 9  # programs at once


class Runs:
    """What `gqa.mha` launches."""

    def __init__(self, monkeypatch) -> None:
        self.machine = Machine()
        self.kernel = gqa.gqa_hopper_attention.fn
        monkeypatch.setattr(gqa, "launch", self.launch)
        monkeypatch.setattr(gqa, "num_sms", lambda device: SMS)
        self.machine.into(monkeypatch, gqa, gqa_softmax, combine, mask, pages, program)
        for name in ("KEYS", "VALUES"):
            monkeypatch.setattr(gqa, name, getattr(gqa, name).value)
        step = program.next_stage
        monkeypatch.setattr(gqa, "next_stage", lambda stage, phase, stages: step(value(stage), value(phase), stages))

    def launch(self, kernel, grid, *args, **kwargs) -> None:
        for name in ("num_warps", "launch_cooperative_grid", "early"):
            kwargs.pop(name)
        self.machine.run(self.kernel, grid[0], *map(in_numpy, args), **{n: in_numpy(x) for n, x in kwargs.items()}, PDL=False)


@pytest.fixture
def runs(monkeypatch) -> Iterator[Runs]:
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    yield Runs(monkeypatch)
    torch.use_deterministic_algorithms(False)


def call_of(rng: random.Random, dim: int, group: int, q_len: int, lens: list[int], page_size: int, tree: bool) -> AttentionCall:
    """Results in float32. Keys that no query sees are NaN."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    kv_heads, bs = rng.choice([1, 2]), len(lens)
    each = max(1, -(-max(lens) // page_size))
    tables = torch.randperm(bs * each, generator=g).view(bs, each).to(torch.int32)
    k, v = (torch.randn(bs * each, page_size, kv_heads, dim, generator=g).half() for _ in range(2))
    mask_len = q_len + rng.choice([0, 0, 3]) if tree else 0
    words = [[(rng.getrandbits(mask_len) & rng.getrandbits(mask_len)) | 1 << i for i in range(q_len)] for _ in lens]
    for b, length in enumerate(lens):
        seen = 0
        for word in words[b]:
            seen |= word
        for position in range(each * page_size):
            bit = position - (length - mask_len)
            if position >= length or (tree and bit >= 0 and not seen >> bit & 1):
                k[tables[b, position // page_size], position % page_size] = float("nan")
                v[tables[b, position // page_size], position % page_size] = float("nan")
    return AttentionCall(
        "mha_target_verify", torch.randn(bs, q_len, kv_heads * group, dim, generator=g).half(), k, v, None, tables,
        torch.tensor(lens, dtype=torch.int32), torch.tensor(words) if tree else None, mask_len, scale=0.05, v_scale=0.8,
        sinks=torch.randn(kv_heads * group, generator=g) if rng.random() < 0.3 else None,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
def test_right_and_over(runs, seed):
    """Nobody waits in vain, whatever the number of warpgroups, and the result is the reference's."""
    rng = random.Random(seed)
    warpgroups = [2, 3][seed % 2]
    dim, group = rng.choice([64, 128]), rng.choice([4, 8, 64])
    rows = rng.choice([65, 96, 128, 150, 192, 193, 300])
    q_len = min(-(-rows // group), 48)
    lens = [rng.choice([0, 1, 63, 64, 65, 127, 128, 130, 200, 256, 330, 500]) for _ in range(rng.choice([1, 2, 3, 5]))]
    if rng.random() < 0.3:
        lens = [rng.choice([128, 256])] * 3
    lens = [max(n, q_len + 3) if n else 0 for n in lens]
    call = call_of(rng, dim, group, q_len, lens, rng.choice([1, 16, 64, 128]), rng.random() < 0.6)
    out = torch.full(call.q.shape, float("nan"))
    tiling = gqa.Tiling(warpgroups, *rng.choice([(64, 2), (64, 4)] + ([(128, 2)] if warpgroups == 2 else [])))
    gqa.mha(dataclasses.replace(call, out=out), tiling, rng.choice([1, 2]))
    exact = {name: torch.nan_to_num(getattr(call, name).double()) for name in ("q", "k_cache", "v_cache")}
    torch.testing.assert_close(out.double(), reference(dataclasses.replace(call, **exact)), rtol=1e-2, atol=1e-2)
