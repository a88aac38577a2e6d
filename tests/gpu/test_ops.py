"""Every Triton kernel but attention's on a GPU, through the ops: the CPU reference's bits, in one launch, without a sync."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from tests.helpers import far_appends  # noqa: E402
from tests.helpers.op_cases import CASES, OPS, Copy, Rng, check, compare, reference, sampled  # noqa: E402
from tests.helpers.op_samples import overload  # noqa: E402

ALL_OPS = pytest.mark.parametrize("op", OPS)


@ALL_OPS
def test_random_layouts(op):
    for seed in range(60):
        check(op, sampled(op, seed, fp8=None), "cuda", overload(op))


@ALL_OPS
def test_random_cases(op):
    for seed in range(150):
        check(op, CASES[op](Rng(f"{op}{seed}"), False), "cuda", overload(op))


def large(op: str) -> tuple:
    """Sizes of a real batch: many programs, vocabularies and contexts of several blocks."""
    rng = Rng(op)
    bs, vocab = 64, 129_280
    table, lens = rng.ints(2**31 - 1, bs + 3, 20_000).to(torch.int32), rng.ints(16_000, bs)
    rows = rng.distinct(bs + 3, bs)
    if op in ("append_kv", "append_mla_kv", "move_kv"):
        pool = torch.zeros(64, 64, 2, 8, 128, dtype=torch.bfloat16)
        slots = torch.where(rng.ints(9, 1024) == 0, -1, rng.distinct(4096, 1024))
        if op == "append_kv":
            values = rng.tensor(2, 1024, 8, 128).bfloat16()
            return pool[:, :, 0], pool[:, :, 1], values[0], values[1], slots, 1.0, 1.0
        if op == "append_mla_kv":
            rows = rng.tensor(1024, 576).bfloat16()
            return torch.zeros(64, 64, 576, dtype=torch.bfloat16), rows[:, :512], rows[:, 512:], slots, 1.0
        caches = [rng.tensor(64, 64, 8, 16).bfloat16() for _ in range(40)] + [
            rng.tensor(64, 64, 96).bfloat16() for _ in range(3)
        ]
        return caches, slots, slots.roll(1)
    if op in ("page_table", "kv_indices"):
        return (table, rows, lens, 64, 300) if op == "page_table" else (table, rows, lens, int(lens.sum()) + 5000)
    if op == "draft_kv_indices":
        return table, rows, lens, 2, 4, 8, 64, 8 * int(lens.sum()) + 64 * 8 * 4
    if op == "draft_kv_indices_steps":
        return table, rows, lens, 4, 1, 1, int(lens.sum()) + 64 * 4, 3
    if op == "sample_tokens":
        return torch.softmax(rng.tensor(8, vocab) * 3, -1), torch.rand(8)
    if op == "accept_sampled":
        probs = torch.softmax(rng.tensor(8, 4, vocab) * 4, -1)
        candidates = torch.cat([probs[:, :1].argmax(-1), probs[:, :-1].argmax(-1)], 1)
        ids = rng.distinct(vocab, 32_000)
        ids[:10] = candidates[:, 1:].flatten()[:10]
        draft = torch.softmax(rng.tensor(8, 3, 32_000) * 4, -1)
        return candidates, probs, torch.rand(8, 4), torch.rand(8), None, draft, ids.unique(), 4, 1.0, 1.0
    return CASES[op](rng, False)


@ALL_OPS
def test_large_sizes(op):
    args = large(op)
    if op == "accept_sampled":
        args = (*args[:5], args[5][..., : len(args[6])], *args[6:])
    check(op, args, "cuda", overload(op))


@ALL_OPS
def test_one_launch_and_no_sync(op):
    given = Copy(large(op) if op != "accept_sampled" else CASES[op](Rng(3), False), "cuda")
    run = overload(op)
    run(*given.args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(*given.args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1, on_device


@ALL_OPS
@pytest.mark.parametrize("seed", range(4))
def test_capture_and_replay(op, seed):
    args = CASES[op](Rng(f"{op}{seed}"), False)
    expected, given = Copy(args, "cpu"), Copy(args, "cuda")
    wanted = reference(op)(*expected.args)
    before = {key: raw.clone() for key, raw in given.storages.items()}
    run = overload(op)
    run(*given.args)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*given.args)
    for _ in range(2):
        for key, raw in given.storages.items():
            raw.copy_(before[key])
        graph.replay()
    compare(wanted, got, (op, args))
    for a, b in zip(expected.bytes(), given.bytes(), strict=True):
        assert torch.equal(a, b)


def kernels_compiled(run: Callable[[], object]) -> list[str]:
    compiled: list[str] = []
    saved = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, fn, **__: compiled.append(fn.name)
    try:
        run()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = saved
    return compiled


def test_other_batch_sizes_and_lengths_compile_nothing_new():
    """One kernel for every batch size, length and capacity; `move_kv` has one for each of five numbers of rows."""
    rng = Rng(0)

    def run(bs: int) -> None:
        table, rows = rng.ints(1000, 64, 4096).to(torch.int32).cuda(), rng.distinct(64, bs).cuda()
        lens = rng.ints(3000, bs).to(torch.int32).cuda()
        overload("page_table")(table, rows, lens, 64, 64)
        overload("kv_indices")(table, rows, lens, 64 * 4096 + bs)
        overload("draft_kv_indices_steps")(table, rows, lens, 3, 1, 1, 64 * 4096 + bs, 2)
        cache = torch.zeros(2, 64, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
        values = torch.zeros(2, bs, 8, 128, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(bs, device="cuda")
        overload("append_kv")(cache[0], cache[1], values[0], values[1], slots, 1.0, 1.0)
        overload("move_kv")([cache[0], cache[1]], slots, slots)
        tokens = rng.ints(5, bs, 4).cuda()
        overload("accept_greedy")(tokens, tokens, None, 4)
        probs = torch.full((bs, 4, 512), 1 / 512, device="cuda")
        coins = torch.rand(bs, 4, device="cuda")
        overload("accept_sampled")(tokens, probs, coins, coins[:, 0].contiguous(), None, None, None, 4, 1.0, 1.0)
        overload("sample_tokens")(probs, coins)

    run(5)
    assert kernels_compiled(lambda: [run(bs) for bs in (1, 2, 3, 7, 8, 16)]) == []
    assert kernels_compiled(lambda: [run(bs) for bs in (17, 18, 32, 64)]) == ["move_kv_kernel"]


def test_addresses_past_2_31_elements():
    pages = 2**31 // (64 * 1024) + 2
    k_cache, v_cache = (torch.zeros(pages, 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    last = pages * 64 - 1
    k = torch.ones(2, 8, 128, dtype=torch.bfloat16, device="cuda")
    overload("append_kv")(k_cache, v_cache, k, 2 * k, torch.tensor([last, 3], dtype=torch.int32, device="cuda"), 1.0, 1.0)
    overload("move_kv")([k_cache, v_cache], *(torch.tensor(slots, device="cuda") for slots in ([last, 3, 0], [9, 5, last - 1])))
    for cache, value in ((k_cache, 1), (v_cache, 2)):
        rows = cache.flatten(0, 1)
        assert [rows[slot].unique().tolist() for slot in (last, 3, 9, 5, last - 1)] == [[value]] * 4 + [[0]]
        assert torch.count_nonzero(rows).item() == 4 * 1024  # and nothing else was written
        del rows


@pytest.mark.parametrize("op", far_appends.STRIDED)
def test_strides_of_appends_past_2_31_elements(op):
    far_appends.check(op, overload(op), "cuda")


@pytest.mark.parametrize("rows", [16, 64, 256, 1024, 4096, 5000])
def test_move_kv_cycles_of_every_size(rows):
    """Each row takes another's place; beyond 4096 rows they pass through memory."""
    slots = Rng(rows).distinct(6400, rows)
    caches = [Rng(i).tensor(100, 64, 2, 40).bfloat16() for i in range(3)]
    check("move_kv", (caches, slots, slots.roll(1)), "cuda", overload("move_kv"))


def test_current_device_need_not_be_the_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for op in OPS:
        check(op, CASES[op](Rng(op), False), "cuda:1", overload(op))
