"""Eager calls that repeat, on a GPU: `tests/interpreter/test_repeat.py` says what is repeated and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops import ops
from spec_ops.backends.capture import current_context
from spec_ops.backends.triton.attention import launcher
from spec_ops.backends.triton.runtime import repeat

pytestmark = pytest.mark.gpu

REQUESTS, PAGES, PAGE, HEADS, KV_HEADS, DIM, RANK = 3, 24, 64, 32, 8, 128, 512


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    repeat._plans.clear()
    yield
    repeat._plans.clear()


class Inputs:
    """Drawn tensors of one call, the same sizes for each `seed`."""

    def __init__(self, kind: str, q_len: int, seed: int, page_size: int = PAGE) -> None:
        drawn = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=drawn, device="cuda").bfloat16()

        pages = PAGES * PAGE // page_size
        caches = (PAGES * PAGE // page_size, page_size)
        width = (DIM,) if kind == "mha" else (RANK + 64,)
        self.q = normal(REQUESTS, q_len, HEADS if kind == "mha" else 16, *width)
        self.caches = [normal(*caches, KV_HEADS, DIM) for _ in range(2)] if kind == "mha" else [normal(*caches, *width)]
        self.tables = torch.randperm(pages, generator=drawn, device="cuda").int().view(REQUESTS, -1)
        self.lens = torch.randint(q_len, PAGES * PAGE // REQUESTS, (REQUESTS,), generator=drawn, device="cuda").int()
        self.kind, self.q_len = kind, q_len

    def attend(self, backend: str = "triton", ragged: bool = False) -> torch.Tensor:
        scale = {"scale": 0.1} | ({} if self.kind == "mha" else {"kv_lora_rank": RANK})
        rest = {"block_tables": self.tables, "seq_lens": self.lens, "backend": backend, **scale}
        if not ragged:
            return getattr(ops, f"{self.kind}_target_verify")(self.q, *self.caches, **rest)
        indptr = torch.arange(0, REQUESTS + 1, device="cuda", dtype=torch.int32) * self.q_len
        q = self.q.flatten(0, 1)
        return getattr(ops, f"{self.kind}_extend")(q, *self.caches, q_indptr=indptr, max_q_len=self.q_len, **rest)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("q_len", [1, 4, 40])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_calls_of_the_same_sizes(kind: str, q_len: int, page_size: int, ragged: bool) -> None:
    calls = [Inputs(kind, q_len, seed, page_size) for seed in range(4)]
    first = calls[0].attend(ragged=ragged)
    with mock.patch.object(launcher, "run", side_effect=AssertionError("the launcher was asked again")):
        found = [first, *(call.attend(ragged=ragged) for call in calls[1:])]
    repeat._plans.clear()
    with mock.patch.object(launcher, "repeated", side_effect=lambda _what, _given, _device, run: run()):
        wanted = [call.attend(ragged=ragged) for call in calls]
    for call, one, other in zip(calls, found, wanted, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one.float(), call.attend("reference", ragged).float(), atol=0.03, rtol=0.03)


def test_a_cuda_graph_of_repeated_calls() -> None:
    first, second = (Inputs("mha", 4, seed) for seed in (1, 2))
    first.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = second.attend()
    graph.replay()
    assert torch.equal(result, second.attend())
    second.q.copy_(first.q)
    graph.replay()
    assert torch.equal(result, second.attend())


def test_streams_and_threads_count_their_own_arrivals() -> None:
    calls = [Inputs("mha", 4, seed) for seed in range(4)]
    wanted = [call.attend() for call in calls]
    torch.cuda.synchronize()

    def many(call: Inputs) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                result = call.attend()
            torch.cuda.current_stream().synchronize()
        return result

    with ThreadPoolExecutor(4) as threads:
        for found, other in zip(threads.map(many, calls), wanted, strict=True):
            assert torch.equal(found, other)


def test_a_thread_that_has_called_nothing_of_cuda() -> None:
    """It has no context, which Triton needs for descriptors of the caches. With `out` a repeated call allocates nothing."""
    call = Inputs("mha", 4, 1)
    indptr = torch.arange(0, REQUESTS + 1, device="cuda", dtype=torch.int32) * call.q_len
    q, out = call.q.flatten(0, 1), torch.zeros_like(call.q.flatten(0, 1))
    options = {"q_indptr": indptr, "max_q_len": call.q_len, "block_tables": call.tables, "seq_lens": call.lens, "scale": 0.1}
    contexts = []

    def attend() -> None:
        contexts.append(current_context())
        ops.mha_extend(q, *call.caches, **options, backend="triton", out=out)

    attend()
    wanted = out.clone()
    out.zero_()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(attend).result()
    assert torch.equal(out, wanted)
    assert contexts[1] == 0 != contexts[0]


def test_appends() -> None:
    for seed in range(3):
        drawn = torch.Generator("cuda").manual_seed(seed)
        caches = [torch.zeros(PAGES, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        rows = [torch.randn(9, KV_HEADS, DIM, generator=drawn, device="cuda").bfloat16() for _ in range(2)]
        slots = torch.randperm(PAGES * PAGE, generator=drawn, device="cuda")[:9]
        ops.append_kv(*caches, *rows, slots)
        for cache, row in zip(caches, rows, strict=True):
            assert torch.equal(cache.view(-1, KV_HEADS, DIM)[slots], row)
            assert cache.count_nonzero() == row.count_nonzero()
    assert len(repeat._plans) == 1
