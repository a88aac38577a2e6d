"""The FlashInfer and TokenSpeed backends against stand-ins that bind each release's signatures (`provider_fakes.py`).

Kernels are called with float32 tensors, which no declaration offers, so that arguments show up as exact results. The results
are compared with the reference ops; 2e-6 is a few float32 roundings of values around 1 (the stand-ins compute in float64).
"""

from __future__ import annotations

import gc
import importlib.util
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spec_ops
from spec_ops.backends import AttentionCall, padding, registry, workspace
from spec_ops.backends.flashinfer import gqa, mla, planned, provider
from spec_ops.ops.reference import attention as reference
from tests.helpers import provider_fakes
from tests.helpers.provider_fakes import FLASHINFER, FP8, TOKENSPEED, Fakes

TOLERANCE = 2e-6
DECODE = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"
CONTEXT = "flashinfer.prefill:trtllm_batch_context_with_kv_cache"
MLA = "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla"
INSTALLED = [
    pytest.param(
        "installed",
        marks=pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
    )
]


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """Buffers and wrappers belong to one test."""
    provider_fakes.interpret_padding(monkeypatch)
    provider_fakes.own_scratch(monkeypatch)
    planned._wrappers.clear()
    yield
    planned._wrappers.clear()


@pytest.fixture(params=[*FLASHINFER, *INSTALLED])
def fakes(request, monkeypatch) -> Fakes:
    installed = request.param == "installed"
    return Fakes([FLASHINFER[-1] if installed else request.param], installed).install(monkeypatch)


def paged(lens: list[int], page_size: int, *widths: tuple[int, ...], dtype=torch.float32, seed: int = 0) -> dict[str, Any]:
    """Caches of the given trailing shapes and tables for requests of `lens`; page ids past a length are far out of range,
    unused pages and the tails of used ones are NaN."""
    g = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in lens]
    width = max(*pages, 1) + 1
    order = torch.randperm(sum(pages) + 2, generator=g)
    tables = torch.full((len(lens), width), 10**6, dtype=torch.int32)
    caches = [torch.full((len(order), page_size, *w), float("nan")) for w in widths]
    taken = 0
    for b, n in enumerate(lens):
        ids = order[taken : taken + pages[b]]
        tables[b, : pages[b]] = ids.int()
        taken += pages[b]
        for position in range(n):
            for cache in caches:
                row = torch.randn(cache.shape[2:], generator=g)
                cache[ids[position // page_size], position % page_size] = row
    caches = [c.to(dtype) for c in caches]
    return {"caches": caches, "tables": tables, "lens": torch.tensor(lens, dtype=torch.int32), "g": g}


def gqa_call(lens, q_len, *, page_size=16, heads=4, kv_heads=2, dim=32, kv_dtype=torch.float32, **options) -> AttentionCall:
    data = paged(lens, page_size, (kv_heads, dim), (kv_heads, dim), dtype=kv_dtype)
    q = torch.randn(len(lens), q_len, heads, dim, generator=data["g"])
    k_scale, v_scale = (0.5, 1.5) if kv_dtype == FP8 else (1.0, 1.0)
    return AttentionCall(
        "mha_target_verify", q, *data["caches"], None, data["tables"], data["lens"], k_scale=k_scale, v_scale=v_scale,
        **{"scale": 0.3, **options},
    )  # fmt: skip


def mla_call(lens, q_len, *, page_size=32, heads=2, rank=512, kv_dtype=torch.float32, **options) -> AttentionCall:
    data = paged(lens, page_size, (rank + 64,), dtype=kv_dtype)
    q = torch.randn(len(lens), q_len, heads, rank + 64, generator=data["g"])
    (cache,), scale = data["caches"], 0.5 if kv_dtype == FP8 else 1.0
    return AttentionCall(
        "mla_target_verify", q, cache, cache, rank, data["tables"], data["lens"], scale=0.05, k_scale=scale, v_scale=scale,
        **options,
    )  # fmt: skip


def ragged(call: AttentionCall, q_indptr: torch.Tensor | None = None, q: torch.Tensor | None = None, most: int = 1):
    """The same as an extend, by default of one query per request."""
    q_indptr = torch.arange(len(call.seq_lens) + 1, dtype=torch.int32) if q_indptr is None else q_indptr
    q = call.q.flatten(0, 1) if q is None else q
    return replace(call, step=call.step[:3] + "_extend", q=q, q_indptr=q_indptr, max_q_len=most)


def fp8_query(call: AttentionCall) -> AttentionCall:
    """The call with its queries rounded as Blackwell's kernels take them."""
    return replace(call, q=call.q.to(FP8).float())


def assert_same(out: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def chain_tree(mask_len: int, q_len: int, bs: int) -> torch.Tensor:
    """Random trees: the last `q_len` of `mask_len` nodes, each with its ancestors."""
    g = torch.Generator().manual_seed(1)
    words = []
    for _ in range(bs):
        word: list[int] = []
        for node in range(mask_len):
            parent = int(torch.randint(-1, node, (1,), generator=g)) if node else -1
            value = (1 << node) | (word[parent] if parent >= 0 else 0)
            word.append(value)
        words.append([w - (1 << 64) if w >= 1 << 63 else w for w in word[-q_len:]])
    return torch.tensor(words)


@pytest.mark.parametrize("kernel", ["trtllm", "xqa"])
@pytest.mark.parametrize("q_len", [1, 4, 33])
def test_gqa_chains(kernel, q_len, fakes):
    args = gqa_call([70, 0, q_len, 37 + q_len], q_len)
    assert_same(getattr(gqa, kernel)(args), reference.attention(args))


@pytest.mark.parametrize("kernel", ["trtllm", "xqa"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_gqa_options(kernel, page_size, fakes):
    """Window, sinks, another softmax scale than `1 / sqrt(head_dim)`, head groups: each changes the result."""
    base = gqa_call([70, 90], 1, page_size=page_size, heads=8)
    plain = reference.attention(base)
    for option in ({"window_left": 9}, {"sinks": torch.randn(8)}, {"scale": 0.7}):
        args = gqa_call([70, 90], 1, page_size=page_size, heads=8, **option)
        expected = reference.attention(args)
        assert (expected - plain).abs().max() > 100 * TOLERANCE
        assert_same(getattr(gqa, kernel)(args), expected)


def test_gqa_window_over_several_queries(fakes):
    args = gqa_call([70, 21], 4, window_left=9)
    expected = reference.attention(args)
    assert_same(gqa.trtllm(args), expected)
    if "q_cu_seq_lens" in fakes.signatures["flashinfer.decode:xqa_batch_decode_with_kv_cache"].parameters:
        assert_same(gqa.xqa(args), expected)
    else:
        with pytest.raises(RuntimeError, match=r"`window_left` with several queries per request needs flashinfer-python 0\.7"):
            gqa.xqa(args)


@pytest.mark.parametrize("q_len", [1, 3])
def test_gqa_fp8_caches(q_len, fakes):
    """Both scales reach the kernel; trtllm-gen gets e4m3 queries, XQA's stay as they are."""
    args = gqa_call([70, 90], q_len, kv_dtype=FP8)
    assert_same(gqa.trtllm(args), reference.attention(fp8_query(args)))
    if q_len == 1 or "q_cu_seq_lens" in fakes.signatures["flashinfer.decode:xqa_batch_decode_with_kv_cache"].parameters:
        assert_same(gqa.xqa(args), reference.attention(args))
    else:
        with pytest.raises(RuntimeError, match=r"an fp8 cache with several queries per request needs flashinfer-python 0\.7"):
            gqa.xqa(args)


def test_large_queries_saturate_for_fp8():
    q = torch.tensor([1e4, -1e4, 3.0])
    assert padding.queries_for(torch.zeros(1).to(FP8), q).float().tolist() == [448.0, -448.0, 3.0]


@pytest.mark.parametrize(("q_len", "mask_len"), [(5, 5), (4, 12), (12, 12), (40, 40), (64, 64), (1, 3), (1, 1)])
def test_xqa_trees(q_len, mask_len, fakes):
    """Also a draft step, which asks fewer queries than the mask has positions; padded rows; the sign bit of a word."""
    tree = chain_tree(mask_len, q_len, 3)
    args = gqa_call([mask_len, 0, 70 + mask_len], q_len, tree_mask=tree, mask_len=mask_len)
    expected = reference.attention(args)
    assert_same(gqa.xqa(args), expected)
    if mask_len > 3:
        causal = replace(args, tree_mask=None, mask_len=0)
        assert (expected - reference.attention(causal)).abs().max() > 0.01


def test_xqa_keeps_the_contract_for_short_requests(fakes):
    """A request with fewer keys than queries: the last queries see what is there, the others give zeros."""
    args = gqa_call([2, 1, 40], 4)
    args.k_cache.nan_to_num_(0.0)
    args.v_cache.nan_to_num_(0.0)  # the pages of a short request are padded with page 0
    expected = reference.attention(args)
    assert expected[0, 2:].abs().min() > 0
    assert not expected[0, :2].any()
    assert_same(gqa.xqa(args), expected)


def test_trtllm_treats_short_requests_as_padding(fakes):
    args = gqa_call([2, 40], 4)
    out = gqa.trtllm(args)
    assert not out[0].any()
    assert_same(out[1], reference.attention(args)[1])


def test_xqa_refuses_unequal_strides(fakes):
    args = gqa_call([20], 1)
    args.v_cache = args.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"flashinfer-xqa: `v_cache` must have the strides of `k_cache` \(1024, 64, 32, 1\)"):
        gqa.xqa(args)


def test_inputs_are_made_dense(fakes):
    """Nothing in XQA checks contiguity; queries and tables may come as views."""
    args = gqa_call([40, 23], 3)
    expected = reference.attention(args)
    args.q = args.q.transpose(1, 2).contiguous().transpose(1, 2)
    args.block_tables = args.block_tables.t().contiguous().t()
    args.seq_lens = torch.stack([args.seq_lens, args.seq_lens], 1)[:, 0]
    assert_same(gqa.xqa(args), expected)
    assert_same(gqa.trtllm(args), expected)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_trtllm_extend(kv_dtype, fakes):
    """Ragged queries: unequal counts, an empty request, padding rows at the end, a padded request, window and sinks."""
    q_indptr = torch.tensor([0, 7, 12, 12, 12], dtype=torch.int32)
    uniform = gqa_call([40, 5, 70, 0], 1, kv_dtype=kv_dtype, window_left=20, sinks=torch.randn(4))
    args = ragged(uniform, q_indptr, torch.randn(15, 4, 32), 8)
    expected = reference.attention(fp8_query(args) if kv_dtype == FP8 else args)
    out = gqa.trtllm_extend(args)
    assert_same(out, expected)
    assert not out[12:].any()
    short = replace(args, seq_lens=torch.tensor([40, 3, 70, 0], dtype=torch.int32))
    cut = gqa.trtllm_extend(short)
    assert not cut[7:12].any()
    assert torch.equal(cut[:7], out[:7])


@pytest.mark.parametrize("kernel", ["trtllm", "cute_dsl"])
@pytest.mark.parametrize(("rank", "q_len", "kv_dtype"), [(512, 1, torch.float32), (256, 4, torch.float32), (512, 4, FP8)])
def test_mla(kernel, rank, q_len, kv_dtype, fakes):
    args = mla_call([100, 0, 33], q_len, rank=rank, kv_dtype=kv_dtype)
    assert args.block_tables.shape[1] % 4  # a table that ends inside a tile of 128 keys
    expected = reference.attention(fp8_query(args) if kv_dtype == FP8 else args)
    assert_same(getattr(mla, kernel)(args), expected)
    assert fakes.last(MLA)["backend"] == {"trtllm": "trtllm-gen", "cute_dsl": "cute-dsl"}[kernel]


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_tokenspeed(kv_dtype, monkeypatch):
    fakes = Fakes(TOKENSPEED).install(monkeypatch)
    from spec_ops.backends.tokenspeed import decode

    args = mla_call([70, 0, 33], 4, page_size=64, kv_dtype=kv_dtype)
    expected = reference.attention(fp8_query(args) if kv_dtype == FP8 else args)
    assert_same(decode(args), expected)
    assert fakes.last("tokenspeed_mla:tokenspeed_mla_decode")["enable_pdl"]


@pytest.mark.parametrize("lens_on_host", [False, True])
@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_planned_gqa(kernel, lens_on_host, fakes):
    for option in ({}, {"window_left": 9}, {"softcap": 2.0}):
        args = gqa_call([70, 0, 33, 16], 4, **option)
        args.seq_lens_cpu = args.seq_lens.long() if lens_on_host else None
        assert_same(getattr(planned, kernel)(args), reference.attention(args))


@pytest.mark.parametrize(("q_len", "mask_len", "window_left"), [(5, 5, -1), (4, 12, -1), (12, 12, 6)])
def test_fa2_trees(q_len, mask_len, window_left, fakes):
    """Windows go by depth, so they are part of the mask."""
    tree = chain_tree(mask_len, q_len, 3)
    args = gqa_call([mask_len, 0, 70], q_len, tree_mask=tree, mask_len=mask_len, window_left=window_left)
    assert_same(planned.fa2(args), reference.attention(args))


def test_planned_fp8(fakes):
    args = gqa_call([70, 33], 2, kv_dtype=FP8)
    assert_same(planned.fa2(args), reference.attention(args))


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_planned_calls_run_without_planning(kind, fakes):
    """Each has a wrapper of its own, so that the second plan does not change the first call."""
    make = gqa_call if kind == "mha" else mla_call
    calls = [make(lens, 4) for lens in ([70, 5, 33], [9, 40, 130])]
    made = [planned.plan(call, "fa2") for call in calls]
    fakes.calls.clear()
    for _ in range(2):
        for plan, call in zip(made, calls, strict=True):
            plan.finish().fill_(float("nan"))
            plan.run()
            assert_same(plan.finish(), reference.attention(call))
    assert {path.rsplit(".", 1)[1] for path, _ in fakes.calls} == {"run"}
    assert not planned._wrappers


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_threads_do_not_plan_into_each_others_runs(kind, fakes, monkeypatch):
    """Two threads share a stream, and so a wrapper. The first waits after its plan for the second one's, in vain."""
    make, kernels = (gqa_call, provider_fakes.Prefill) if kind == "mha" else (mla_call, provider_fakes.PlannedMLA)
    calls = [make(lens, 4) for lens in ([70, 5, 33], [9, 40, 130])]
    plans, plan = [threading.Event(), threading.Event()], kernels.plan

    def planned_by(self, *args, **kwargs):
        plan(self, *args, **kwargs)
        turn = 0 if threading.current_thread().name == "first" else 1
        plans[turn].set()
        if turn == 0:
            plans[1].wait(timeout=1.0)

    results: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(kernels, "plan", planned_by)
    fakes.install(monkeypatch)
    first = threading.Thread(name="first", target=lambda: results.update(first=planned.fa2(calls[0])))
    second = threading.Thread(name="second", target=lambda: results.update(second=planned.fa2(calls[1])))
    first.start()
    assert plans[0].wait(timeout=30.0)
    second.start()
    first.join()
    second.join()
    for name, call in zip(("first", "second"), calls, strict=True):
        assert_same(results[name], reference.attention(call))


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_planned_mla(kernel, fakes):
    args = mla_call([70, 0, 33], 4)
    assert_same(getattr(planned, kernel)(args), reference.attention(args))


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_planned_extend(kind, kernel, fakes):
    q_indptr = torch.tensor([0, 7, 12, 12], dtype=torch.int32)
    uniform, q = (gqa_call, torch.randn(15, 4, 32)) if kind == "mha" else (mla_call, torch.randn(15, 2, 576))
    args = ragged(uniform([40, 5, 70], 1), q_indptr, q, 8)
    expected = reference.attention(args)
    assert_same(getattr(planned, kernel)(args), expected)


def test_a_wrapper_plans_anew_but_is_made_once(fakes):
    for lens in ([70, 33], [12, 90]):
        args = gqa_call(lens, 2)
        assert_same(planned.fa2(args), reference.attention(args))
    names = [path.rsplit(".", 1)[1] for path, _ in fakes.calls]
    assert names == ["__init__", "plan", "run", "plan", "run"]


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_plans_are_not_captured(kernel, fakes, monkeypatch):
    """Tensors without memory stand for those of a GPU."""
    asked = []
    monkeypatch.setattr(planned, "capture_of_current_stream", lambda index: asked.append(index) or 5)
    call = gqa_call([70, 33], 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        call = replace(call, q=torch.empty(call.q.shape, device="cuda:0"))
        with pytest.raises(RuntimeError, match=f"flashinfer-{kernel}: must be called outside of CUDA graph captures"):
            getattr(planned, kernel)(call)
    assert asked == [0]
    assert fakes.calls == []


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_released_workspaces_leave_no_wrapper(kind, fakes):
    """Each holds its scratch memory, 128 MiB, and buffers of its own."""
    args = (gqa_call if kind == "mha" else mla_call)([70, 5, 33], 2)
    expected = reference.attention(args)
    run = planned.fa2
    assert_same(run(args), expected)
    (wrapper,) = map(weakref.ref, planned._wrappers.values())
    fakes.calls.clear()
    workspace.release_workspaces()
    gc.collect()
    assert wrapper() is None
    assert_same(run(args), expected)  # made anew


@pytest.mark.parametrize("call", ["gqa", "mla", "extend"])
def test_buffers_are_ours_and_stay(call, fakes):
    """Scratch and semaphores are the same at each call, also of another size, so that nothing is allocated or zeroed per
    call."""

    def run(lens):
        if call == "gqa":
            gqa.trtllm(gqa_call(lens, 2))
            return fakes.last(DECODE)
        if call == "mla":
            mla.trtllm(mla_call(lens, 2))
            return fakes.last(MLA)
        gqa.trtllm_extend(ragged(gqa_call(lens, 1)))
        return fakes.last(CONTEXT)

    first, second = run([40]), run([20, 50, 33])
    for name in ("workspace_buffer", "multi_ctas_kv_counter_buffer"):
        if name in first or "0.6" not in fakes_version(fakes, call):
            assert first[name].data_ptr() == second[name].data_ptr()
    assert len(workspace._buffers) == (2 if "multi_ctas_kv_counter_buffer" in first else 1)


def test_more_heads_than_semaphores(fakes, monkeypatch):
    """trtllm-gen would write past the end of the buffer: it asks for one per request and query head."""
    for name in ("COUNTERS", "COUNTERS_IN_SCRATCH"):
        monkeypatch.setattr(provider, name, 7)
    args = gqa_call([20, 30], 1)
    for kernel, given in ((gqa.trtllm, args), (gqa.trtllm_extend, ragged(args)), (mla.trtllm, mla_call([20, 30], 1, heads=4))):
        with pytest.raises(ValueError, match=r"flashinfer-trtllm: `q` must have at most 7 requests x heads, got 2 x 4"):
            kernel(given)
    assert fakes.calls == []


def test_sinks_are_made_dense(fakes):
    sinks = torch.arange(8.0)[::2]
    for kernel in (gqa.trtllm, gqa.xqa):
        kernel(gqa_call([20], 1, sinks=sinks))
        assert torch.equal(fakes.last(DECODE)["sinks"], sinks)
        assert fakes.last(DECODE)["sinks"].is_contiguous()


def fakes_version(fakes: Fakes, call: str) -> str:
    path = {"gqa": DECODE, "mla": MLA, "extend": CONTEXT}[call]
    return "0.7" if "multi_ctas_kv_counter_buffer" in fakes.signatures[path].parameters else "0.6"


def test_kernels_that_use_scratch_differently_do_not_share_it(fakes):
    """XQA keeps semaphores where CuTe DSL writes partial results."""
    gqa.xqa(gqa_call([20], 1))
    xqa_buffer = fakes.last(DECODE)["workspace_buffer"]
    mla.cute_dsl(mla_call([20], 1))
    cute_buffer = fakes.last(MLA)["workspace_buffer"]
    mla.trtllm(mla_call([20], 1))
    assert len({b.data_ptr() for b in (xqa_buffer, cute_buffer, fakes.last(MLA)["workspace_buffer"])}) == 3


@pytest.mark.parametrize("kernel", [gqa.trtllm, mla.trtllm, mla.cute_dsl])
def test_masks_cannot_reach_a_kernel_that_drops_them(kernel, fakes):
    make = gqa_call if kernel is gqa.trtllm else mla_call
    args = make([20], 2, tree_mask=torch.ones(1, 2, dtype=torch.int64), mask_len=2)
    with pytest.raises(AssertionError, match="mask"):
        kernel(args)
    assert fakes.calls == []


@pytest.mark.parametrize("kernel", [gqa.trtllm, gqa.xqa, planned.fa2])
def test_empty_batches_call_nothing(kernel, fakes):
    args = gqa_call([20], 2)
    empty = replace(args, q=args.q[:0], block_tables=args.block_tables[:0], seq_lens=args.seq_lens[:0])
    assert kernel(empty).shape == (0, 2, 4, 32)
    assert fakes.calls == []


def test_a_renamed_argument_is_noticed(monkeypatch):
    """What these tests are for: a release that renames what we pass."""
    text = provider_fakes.RECORDED[FLASHINFER[-1]][DECODE].replace("q_len_per_req", "queries_per_request")
    monkeypatch.setitem(provider_fakes.RECORDED[FLASHINFER[-1]], DECODE, text)
    Fakes([FLASHINFER[-1]]).install(monkeypatch)
    with pytest.raises(TypeError, match="q_len_per_req"):
        gqa.trtllm(gqa_call([20], 1))


@pytest.mark.parametrize("path", sorted({path for package in FLASHINFER for path in provider_fakes.RECORDED[package]}))
def test_records_match_the_installed_release(path):
    """Where FlashInfer is installed in a recorded release, the records are what `inspect` finds there."""
    version = pytest.importorskip("flashinfer", reason="flashinfer is not installed").__version__
    package = f"flashinfer-python {version}"
    if package not in provider_fakes.RECORDED:
        pytest.skip(f"{package} is not recorded")
    real, recorded = provider_fakes.real_signature(path), provider_fakes.signature(package, path)
    assert [(p.name, p.kind) for p in real.parameters.values()] == [(p.name, p.kind) for p in recorded.parameters.values()]


def test_ops_reach_the_kernels(fakes, monkeypatch):
    """Through the public op: selection, loading and arguments fit together."""
    monkeypatch.setattr(registry, "device_arch", lambda device: 100)
    registry._forget()
    args = gqa_call([70, 33], 4, page_size=64, heads=2, kv_heads=1, dim=64)
    q, k, v = (t.nan_to_num(0.0).bfloat16() for t in (args.q, args.k_cache, args.v_cache))
    out = spec_ops.mha_target_verify(q, k, v, args.block_tables, args.seq_lens)
    assert fakes.last(DECODE)["backend"] == "trtllm-gen"
    expected = spec_ops.mha_target_verify(q, k, v, args.block_tables, args.seq_lens, backend="reference")
    torch.testing.assert_close(out, expected, atol=8e-3, rtol=8e-3)  # one bfloat16 rounding on each side
    registry._forget()
