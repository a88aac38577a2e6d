"""Kernels that are launched while the one before them still runs (`launch.await_predecessors`), on a GPU: dense chains in a
CUDA graph, each kernel reading what the last one wrote, alone and beside another stream."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="sm_90 and newer have it"
    ),
]

import spec_ops  # noqa: E402
from spec_ops.ops.linear import add_skinny_mm_op, scaled_skinny_mm_op, skinny_mm_op  # noqa: E402

STEPS, CONTEXT, PAGE = 24, 300, 64
# Kernels of every kind: (query heads, KV heads or 0 for MLA, head_dim, q_len, whether batch-invariant).
KINDS = {
    "plain": (32, 8, 128, 1, False),
    "plain, 64 rows": (32, 8, 128, 16, False),
    "gqa_hopper": (64, 8, 64, 16, False),
    "mla_hopper": (128, 0, 576, 1, False),
    "mla_hopper_few": (16, 0, 576, 1, False),
    "deterministic": (32, 8, 128, 4, True),
}


class Chain(NamedTuple):
    """`STEPS` times: append the last result as keys and values, attend over all there are."""

    kind: str
    bs: int
    q: torch.Tensor
    caches: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    slots: torch.Tensor  # [STEPS, bs * q_len]
    lens: torch.Tensor  # [STEPS, bs]

    def forget(self) -> None:
        """What a step appends is NaN before: a kernel that does not wait for it reads that, or an earlier replay's."""
        for cache in self.caches:
            cache.view(-1, *cache.shape[2:])[self.slots.flatten()] = float("nan")

    def run(self, after_each=lambda: None) -> torch.Tensor:
        _, kv_heads, dim, _, deterministic = KINDS[self.kind]
        x = self.q
        for slots, lens in zip(self.slots, self.lens, strict=True):
            rows = x.flatten(0, 1)
            if kv_heads:
                keys = rows[:, :kv_heads]
                spec_ops.append_kv(*self.caches, keys, keys, slots, backend="triton")
                after_each()
                options = {"deterministic": True} if deterministic else {"backend": "triton"}
                x = spec_ops.mha_target_verify(x, *self.caches, self.tables, lens, scale=dim**-0.5, **options)
            else:
                q = torch.cat([x[..., :512], self.q[..., 512:]], -1)
                spec_ops.append_mla_kv(*self.caches, rows[:, 0, :512], rows[:, 1, :64], slots, backend="triton")
                after_each()
                x = spec_ops.mla_target_verify(q, *self.caches, 512, self.tables, lens, scale=dim**-0.5, backend="triton")
            after_each()
        return x


class Products(NamedTuple):
    """`STEPS` times the three products of `norm_linear.py` and `linear.py`, each of the last one's result."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    made: list[torch.Tensor]  # by the last `run`

    def forget(self) -> None:
        for result in self.made:
            result.fill_(float("nan"))

    def run(self, after_each=lambda: None) -> torch.Tensor:
        self.made.clear()
        x = y = self.x
        for _ in range(STEPS):
            y, z, squares = add_skinny_mm_op(x, self.weights[0], y, self.weights[3])
            after_each()
            scaled = scaled_skinny_mm_op(z, self.weights[1], None, squares, 1e-5)
            after_each()
            x = skinny_mm_op(scaled, self.weights[2], None)
            after_each()
            self.made.extend((y, z, squares, scaled, x))
        return x


def make_products(rows: int, seed: int) -> Products:
    rng = torch.Generator("cuda").manual_seed(seed)
    sizes = ((rows, 4096), (4096, 4096), (6144, 4096), (4096, 6144))
    x, *weights = (torch.randn(n, k, generator=rng, device="cuda").div_(k**0.5).bfloat16() for n, k in sizes)
    return Products(x, [*weights, torch.ones(4096, device="cuda", dtype=torch.bfloat16)], [])


def make_chain(kind: str, bs: int, seed: int) -> Chain | Products:
    if kind == "products":
        return make_products(4 * bs, seed)
    heads, kv_heads, dim, q_len, _ = KINDS[kind]
    rng = torch.Generator("cuda").manual_seed(seed)
    pages = -(-(CONTEXT + STEPS * q_len) // PAGE)
    shape = (bs * pages, PAGE, *((kv_heads, dim) if kv_heads else (dim,)))
    caches = tuple(torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16) for _ in range(2 if kv_heads else 1))
    tables = torch.randperm(bs * pages, generator=rng, device="cuda").view(bs, pages).int()
    places = CONTEXT + torch.arange(STEPS * q_len, device="cuda")
    slots = tables[:, places // PAGE].long() * PAGE + places % PAGE
    slots = slots.view(bs, STEPS, q_len).transpose(0, 1).reshape(STEPS, -1).contiguous()
    lens = CONTEXT + q_len * torch.arange(1, STEPS + 1, device="cuda", dtype=torch.int32)[:, None].repeat(1, bs)
    q = torch.randn(bs, q_len, heads, dim, generator=rng, device="cuda", dtype=torch.bfloat16)
    return Chain(kind, bs, q, caches, tables, slots, lens)


def captured(chain: Chain | Products, stream: torch.cuda.Stream | None = None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = chain.run()
    return graph, out


def expected(chain: Chain | Products) -> torch.Tensor:
    """One kernel at a time."""
    chain.forget()
    out = chain.run(after_each=torch.cuda.synchronize)
    assert out.isfinite().all()
    return out


@pytest.mark.parametrize("bs", [1, 8])
@pytest.mark.parametrize("kind", [*KINDS, "products"])
def test_each_kernel_sees_what_the_last_one_wrote(kind, bs):
    chain = make_chain(kind, bs, 1)
    want = expected(chain)
    graph, out = captured(chain)
    for _ in range(20):
        chain.forget()
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("captured_on", ["one stream", "two streams"])
@pytest.mark.parametrize("kind", [*KINDS, "products"])
def test_two_chains_at_once(kind, captured_on):
    """Programs of a kernel wait for one another, so all must be resident, whatever the other stream has on the GPU. And they
    count themselves: graphs have counters of their own, whatever stream they were captured on."""
    chains = [make_chain(kind, 8, seed) for seed in (1, 2)]
    wants = [expected(chain) for chain in chains]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    captures = streams if captured_on == "two streams" else [None, None]  # None: the one that torch keeps for captures
    graphs, outs = zip(*map(captured, chains, captures), strict=True)
    for _ in range(10):
        for chain in chains:
            chain.forget()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, want in zip(outs, wants, strict=True):
            assert torch.equal(out, want)
