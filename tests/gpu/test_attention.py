"""The attention kernels on a GPU, through the ops, in bfloat16 and float16: errors beside those of torch's own attention,
random shapes, CUDA graphs, streams. `tests/interpreter/test_attention.py` has the logic, in
float32."""

from __future__ import annotations

import math
import os
import zlib
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

import spec_ops  # noqa: E402
from benchmarks.kernels.accuracy import torch_attention  # noqa: E402
from spec_ops.backends.triton.runtime import counters as workspace  # noqa: E402
from tests.helpers.attention_calls import (  # noqa: E402
    BACKEND,
    BF16,
    DEVICE,
    FAMILIES,
    FP16,
    SERVED,
    SHAPES_PER_FAMILY,
    call,
    in_float32,
    random_call,
    static_call,
)
from tests.helpers.dense_attention import attend, contiguous_rows  # noqa: E402
from tests.ops.test_attention import (  # noqa: E402
    FP8,
    UNSEEN,
    Case,
    make_case,
    poison_unseen,
)

# ---- harness cases: the error of a whole case, and of each number ----


def eager_attention(q, k, v, visible, scale: float, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """`torch_attention` with a soft cap and sinks, each operation in the dtype of `q`."""
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = logits.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


def check_accuracy(case: Case, backend: str = BACKEND) -> None:
    """Against float64, number by number; then the whole case's error at most 1.5 times that of torch's own attention.

    Fp8 caches have the same bound: e4m3 values are exact in both dtypes, so torch gets them as they are stored, and both apply
    the scales outside. What one number may be off: weights are rounded once to the dtype (at most eps / 2 of each; in float16,
    which fp8 caches take too, half a subnormal step where they are tiny), and so is the result; float32 arithmetic as in
    `attend`, four times it because tensor cores truncate where `attend` assumes rounding.
    """
    a = case.arguments
    out = case.run(backend=backend)
    q, dtype, device = a["q"], a["q"].dtype, a["q"].device
    v_dim = a["v_cache"].shape[-1] if case.kind == "mha" else a["kv_lora_rank"]
    assert (out.shape, out.dtype) == ((*q.shape[:-1], v_dim), dtype)
    assert out.is_contiguous()
    scale = 1.0 / math.sqrt(q.shape[-1]) if a.get("scale") is None else a["scale"]
    k_scale, v_scale = (a["k_scale"], a["v_scale"]) if case.kind == "mha" else (a["kv_scale"],) * 2
    k_scale, v_scale = k_scale or 1.0, v_scale or 1.0
    eps, ours, theirs = torch.finfo(dtype).eps, 0.0, 0.0
    for b in range(len(case.q_lens)):
        got, mine, seen = case.queries(out, b), case.queries(q, b), case.seen(b)
        length, pages = int(a["seq_lens"][b]), a["block_tables"][b].tolist()
        live = [i for i, keys in enumerate(seen) if keys]
        blind = [i for i, keys in enumerate(seen) if not keys]
        assert torch.count_nonzero(got[blind]) == 0, f"request {b}: a query that sees nothing must give zeros"
        if not live:
            continue
        if case.kind == "mha":
            keys, values = (contiguous_rows(a[name], pages, length) for name in ("k_cache", "v_cache"))
        else:
            keys = contiguous_rows(a["kv_cache"], pages, length)[:, None]
            values = keys[..., :v_dim]
        hidden = torch.tensor(sorted(set(range(length)).difference(*seen)), dtype=torch.long)
        keys[hidden], values[hidden] = 0.0, 0.0  # may be NaN, which torch's attention would take into its sums
        how = {"scale": scale, "sinks": a["sinks"], "softcap": a["softcap"]}
        exact = attend(mine, keys * k_scale, values * v_scale, seen, **how)
        weighted = attend(mine, keys * k_scale, (values * v_scale).abs(), seen, **how).out
        error = (got.cpu().double() - exact.out).abs()
        in_half = dtype == FP16 or any(x.dtype == FP8 for name, x in a.items() if name.endswith("cache"))
        tiny = length * 2.0**-25 * float(values.abs().max()) * v_scale if in_half else 0.0
        allowed = 1.01 * eps / 2 * (weighted + exact.out.abs()) + 4 * exact.float32_error + tiny
        assert (error <= allowed).all(), f"request {b}: off by up to {error.max():.3g}"

        visible = torch.zeros(len(seen), length, dtype=torch.bool)
        for row, keys_seen in zip(visible, seen, strict=True):
            row[keys_seen] = True
        dense = mine[live], keys.to(dtype).to(device), values.to(dtype).to(device), visible[live].to(device)
        if a["softcap"] > 0 or a["sinks"] is not None:
            peer = eager_attention(*dense, scale * k_scale, a["softcap"], a["sinks"])
        else:
            peer = torch_attention(*dense, scale * k_scale)
        peer = (peer.float() * v_scale).to(dtype).cpu().double()
        ours += float(error[live].square().sum())
        theirs += float((peer - exact.out[live]).square().sum())
    if case.step == "extend":
        assert torch.count_nonzero(out[sum(case.q_lens) :]) == 0
    assert math.sqrt(ours) <= 1.5 * math.sqrt(theirs), f"{math.sqrt(ours / theirs):.2f} times the error of torch's attention"


def made(kind: str, mode: str, **wanted: Any) -> Case:
    widths = {"head_dim": 128, "v_dim": 128} if kind == "mha" else {"head_dim": 576, "v_dim": 512}
    return make_case(kind, mode, DEVICE, **{"dtype": BF16, **widths, **wanted})


MODES = ("draft_chain", "draft_tree", "verify_chain", "verify_tree", "extend")  # the others are the same to a kernel


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mode", MODES)
def test_mha_pages_and_lengths_around_their_boundaries(mode, page_size):
    check_accuracy(made("mha", mode, page_size=page_size, head_dim=64, v_dim=64))


@pytest.mark.parametrize("window_left", [-1, 40])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mode", ["draft_chain", "draft_tree", "verify_chain", "verify_tree"])
def test_boxes(mode, head_dim, page_size, window_left):
    """Up to 16 rows, whose blocks of keys lie in several pages on Hopper; their values may be NaN."""
    wanted = {"head_dim": head_dim, "v_dim": head_dim, "kv_heads": 4, "dtype": BF16, "lens": [0, 15, 33, 100, 700, 3000]}
    case = made("mha", mode, page_size=page_size, window_left=window_left, **wanted)
    check_accuracy(case)
    poison_unseen(case)
    check_accuracy(case)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mode", ["draft_chain", "verify_tree", "extend"])
def test_mla_pages_and_lengths_around_their_boundaries(mode, page_size):
    check_accuracy(made("mla", mode, page_size=page_size, heads=16))


@pytest.mark.parametrize(("head_dim", "v_dim"), [(128, 128), (256, 256), (192, 128), (96, 96), (80, 80)], ids=str)
def test_mha_head_dims(head_dim, v_dim):
    check_accuracy(made("mha", "verify_tree", head_dim=head_dim, v_dim=v_dim, page_size=32, heads=8, dtype=FP16))
    check_accuracy(made("mha", "extend", head_dim=head_dim, v_dim=v_dim, page_size=128, heads=8))


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_mla_heads(heads):
    check_accuracy(made("mla", "verify_chain", page_size=64, heads=heads, lens=[5, 64, 200]))
    check_accuracy(
        made("mla", "verify_chain", head_dim=320, v_dim=256, page_size=64, heads=heads, lens=[5, 64, 200], dtype=FP16)
    )


@pytest.mark.parametrize("mode", ["verify_tree", "extend"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_fp8_caches(kind, dtype, mode):
    check_accuracy(made(kind, mode, dtype=dtype, kv_dtype=FP8, page_size=64, heads=8))


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_queries_that_float16_cannot_hold(kind):
    """With fp8 caches products are in float16: beyond its range queries count as its largest number, and nothing overflows."""
    case = made(kind, "verify_chain", kv_dtype=FP8, page_size=64, heads=8, lens=[5, 200])
    case.arguments["q"] = torch.where(case.arguments["q"] > 0, 3e38, 0.0).to(BF16)
    out = case.run(backend=BACKEND)
    assert out.isfinite().all()
    largest = case.arguments["q"].float().clamp(max=torch.finfo(FP16).max).to(FP16)
    torch.testing.assert_close(out.float(), case.but(q=largest).run(backend=BACKEND).float(), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("mode", ["draft_tree", "verify_tree", "extend"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_windows_sinks_and_soft_cap(kind, mode):
    check_accuracy(made(kind, mode, page_size=64, window_left=17, sinks=True, num_nodes=12, lens=[0, 30, 150], dtype=FP16))
    check_accuracy(made(kind, mode, page_size=64, window_left=5, softcap=3.0, num_nodes=12, lens=[0, 30, 150], dtype=FP16))


@pytest.mark.parametrize("layout", ["layers", "interleaved", "heads first"])
@pytest.mark.parametrize("mode", ["verify_chain", "extend"])
def test_strided_caches(mode, layout):
    case = made("mha", mode, page_size=64, layout="separate" if layout == "heads first" else layout, lens=[4, 70, 150])
    if layout == "heads first":
        swapped = {name: case.arguments[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
        case = case.but(**swapped)
    check_accuracy(case)


# By pointers and descriptors, of a block's pages and more; by small and large products.
@pytest.mark.parametrize("wanted", [{"page_size": 16}, {"page_size": 64}, {"page_size": 64, "heads": 32, "width": 8}], ids=str)
@pytest.mark.parametrize(("mode", "window_left"), UNSEEN)
@pytest.mark.parametrize("backend", ["triton", "triton-deterministic"])
def test_keys_that_no_query_sees(mode, window_left, wanted, backend):
    case = made("mha", mode, window_left=window_left, lens=[0, 3, 70, 200], q_lens=[0, 1, 3, 40], **wanted)
    assert poison_unseen(case) > 0
    check_accuracy(case, backend)


@pytest.mark.parametrize("wanted", [{"page_size": 16}, {"page_size": 64}, {"page_size": 64, "heads": 32}], ids=str)
@pytest.mark.parametrize(("mode", "window_left"), [("verify_chain", 9), ("extend", 9), ("draft_tree", -1), ("draft_tree", 9)])
@pytest.mark.parametrize("backend", ["triton", "triton-deterministic"])
def test_keys_of_mla_that_no_query_sees(mode, window_left, wanted, backend):
    case = made("mla", mode, window_left=window_left, lens=[0, 3, 70, 200], q_lens=[0, 1, 3, 40], **{"heads": 4, **wanted})
    assert poison_unseen(case) > 0
    check_accuracy(case, backend)


def test_keys_of_fp8_that_no_query_sees():
    for mode, window_left, heads in (("verify_chain", 9, 4), ("draft_tree", 9, 4), ("verify_tree", 9, 32)):
        case = made("mha", mode, window_left=window_left, lens=[3, 200], page_size=64, kv_dtype=FP8, heads=heads)
        assert poison_unseen(case) > 0
        check_accuracy(case)


@pytest.mark.parametrize("backend", ["triton", "triton-deterministic"])
@pytest.mark.parametrize("mode", ["draft_chain", "verify_chain", "verify_tree", "extend"])
def test_windows_that_hide_nothing(mode, backend):
    """Beside padded requests, whose lengths are below the number of queries."""
    case = made("mha", mode, lens=[0, 1, 3, 200], q_lens=[2, 1, 9, 40])
    for window_left in (2**31 - 1, 2**31 - 2, 100_000):
        assert torch.equal(case.run(backend=backend, window_left=window_left), case.run(backend=backend))


def test_strided_sinks():
    case = made("mha", "verify_chain", lens=[3, 200], sinks=True)
    strided = case.arguments["sinks"].repeat_interleave(3)[::3]
    assert torch.equal(case.run(backend=BACKEND, sinks=strided), case.run(backend=BACKEND))


@pytest.mark.parametrize("heads", [32, 64])
def test_many_tiles(heads):
    """1,025 requests of 32 KV heads are 32,800 tiles; of a few tokens each, and one that is cut into many pieces."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    bs, pages = 1025, 400
    lens = torch.randint(0, 100, (bs,), generator=rng, device=DEVICE, dtype=torch.int32)
    lens[500] = 10_000
    k, v = (torch.randn(pages, 64, 32, 64, generator=rng, device=DEVICE).bfloat16() for _ in range(2))
    q = torch.randn(bs, 1, heads, 64, generator=rng, device=DEVICE).bfloat16()
    tables = torch.randint(0, pages, (bs, 160), generator=rng, device=DEVICE, dtype=torch.int32)
    a = {"q": q, "k_cache": k, "v_cache": v, "block_tables": tables, "seq_lens": lens}
    name = "mha_draft_decode"
    # The reference gathers as many pages for every request as its table is wide.
    rows = [(slice(0, 500), 2), (slice(500, 501), 160), (slice(501, bs), 2)]
    parts = [a | {"q": q[r], "seq_lens": lens[r], "block_tables": tables[r, :width].contiguous()} for r, width in rows]
    out = call(name, a).float()
    expected, weighted = (torch.cat([in_float32(name, part, absolute) for part in parts]) for absolute in (False, True))
    assert ((out - expected).abs() <= 1.05 * torch.finfo(BF16).eps / 2 * (weighted + expected.abs()) + 3e-4).all()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_mask_of_full_width(kind):
    check_accuracy(made(kind, "verify_tree", page_size=64, num_nodes=64, lens=[0, 9, 80], heads=2, window_left=9))


def test_infinite_sinks():
    case = made("mha", "verify_chain", page_size=64, lens=[0, 2, 200])
    case.arguments["sinks"] = torch.tensor([1e4, float("-inf"), -1e4, 0.0], device=DEVICE)
    out = case.run(backend=BACKEND)
    assert out.isfinite().all()
    assert torch.count_nonzero(out[:, :, 0]) == 0  # it takes all the weight
    case.arguments["sinks"] = torch.full((4,), float("-inf"), device=DEVICE)
    assert torch.equal(case.run(backend=BACKEND), case.but(sinks=None).run(backend=BACKEND))


# ---- random shapes: a few dozen kernels, many batches each ----


@pytest.mark.parametrize("family", FAMILIES)
def test_random_shapes(family):
    """2,000 in all. What one number may be off: see `check_accuracy`; float32 arithmetic and float16's subnormal weights stay
    below 3e-4 for 700 keys of these widths."""
    f = FAMILIES[family]
    for seed in range(SHAPES_PER_FAMILY):
        name, a = random_call(f, zlib.crc32(family.encode()) + seed)
        out = getattr(spec_ops, name)(**a, backend=BACKEND).float()
        expected, weighted = in_float32(name, a), in_float32(name, a, absolute_values=True)
        allowed = 1.05 * torch.finfo(f.dtype).eps / 2 * (weighted + expected.abs()) + 3e-4
        error = (out - expected).abs()
        assert (error <= allowed).all(), f"{family}, shape {seed}: off by {error.max():.3g}; lengths {a['seq_lens'].tolist()}"


# ---- what a server does with them ----


@pytest.mark.parametrize("family", SERVED)
def test_replays_equal_eager_calls(family):
    """One capture, 100 replays over other lengths and tables: the bits of eager calls, every time."""
    name, a, sets = static_call(family, 7, 1)
    expected = [call(name, a | given) for given in sets]
    call(name, a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(name, a)
    for replay in range(100):
        i = (replay * 7 + replay // 10) % 10
        for key, value in sets[i].items():
            a[key].copy_(value)
        graph.replay()
        assert torch.equal(out, expected[i]), f"replay {replay}"


@pytest.mark.parametrize("family", SERVED)
def test_two_streams_at_once(family):
    """Each has its own partial results and counters: kernels of both may run at the same time."""
    name, a, sets = static_call(family, 7, 2)
    expected = [call(name, a | given) for given in sets]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs: list[list[tuple[int, torch.Tensor]]] = [[], []]
    for turn in range(50):
        for which, stream in enumerate(streams):
            i = (3 * turn + 5 * which) % 10
            with torch.cuda.stream(stream):
                outs[which].append((i, call(name, a | sets[i])))
    torch.cuda.synchronize()
    for i, out in outs[0] + outs[1]:
        assert torch.equal(out, expected[i])


@pytest.mark.parametrize("family", SERVED)
def test_one_launch_and_no_sync(family):
    name, a, _ = static_call(family, 7, 3)
    call(name, a)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call(name, a)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1, on_device


@pytest.mark.parametrize("family", SERVED)
def test_inside_a_compiled_graph(family, monkeypatch):
    """The op's very first call on the device, and its others, inside `torch.compile(mode="reduce-overhead")`."""
    name, a, sets = static_call(family, 7, 4)
    expected = [call(name, a | given) for given in sets]
    monkeypatch.setattr(workspace, "_sets", {})
    monkeypatch.setattr(workspace, "_room", {})
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def doubled(q, seq_lens, block_tables):
        return 2 * call(name, a | {"q": q, "seq_lens": seq_lens, "block_tables": block_tables})

    for _ in range(3):
        for given, eager in zip(sets, expected, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(doubled(a["q"], **given), 2 * eager)  # doubling rounds nothing
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("family", ["chain of 4", "MLA 128 heads"])
def test_unequal_lengths(family):
    """One request of 60,000 tokens among short ones: in hundreds of pieces, beside requests of one piece."""
    name, a, _ = static_call(family, 6, 5)
    a["seq_lens"] = torch.tensor([0, 60_000, 1, 65, 0, 900], dtype=torch.int32, device=DEVICE)
    a["block_tables"] = torch.randint(
        0, 64, (6, 941), device=DEVICE, dtype=torch.int32, generator=torch.Generator(DEVICE).manual_seed(0)
    )
    out = call(name, a)
    expected, weighted = in_float32(name, a), in_float32(name, a, absolute_values=True)
    eps = torch.finfo(a["q"].dtype).eps
    # Rounding errors of the weights add up as a random walk over the keys, so each request's root mean square is bounded, too.
    assert ((out - expected).abs() <= 1.05 * eps / 2 * (weighted + expected.abs()) + 3e-4).all()
    for b in (1, 2, 3, 5):
        error, norm = (out[b].float() - expected[b]).norm(), expected[b].norm()
        assert error <= eps / 2 * norm, f"request {b}"
    assert torch.count_nonzero(out[[0, 4]]) == 0
