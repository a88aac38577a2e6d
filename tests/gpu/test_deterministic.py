"""Batch-invariant attention on a GPU, through the ops: the same bits from the tensor cores however a call is made.

`tests/interpreter/test_deterministic.py` has the logic, in float32. What only a GPU can show: that products, reductions and
exponentials do not depend on a row's place in a tile, on other rows, or on which of the compiled kernels runs them."""

from __future__ import annotations

import os
import random
import zlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

import spec_ops  # noqa: E402
from spec_ops.backends.call import AttentionCall  # noqa: E402
from spec_ops.backends.triton.attention.deterministic import launcher  # noqa: E402
from tests.helpers.attention_calls import FAMILIES, in_float32, random_call, static_call  # noqa: E402
from tests.helpers.chains import as_chains  # noqa: E402
from tests.helpers.dense_attention import PREFIX, mask_words  # noqa: E402
from tests.ops.test_attention import check, make_case  # noqa: E402

DEVICE = "cuda"
BF16, FP16, FP8, FP32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
PER_REQUEST = ("q", "block_tables", "seq_lens", "tree_mask")
# heads, KV heads (0: MLA), head_dim, v_dim, page_size, dtype, cache dtype, options
MODELS: dict[str, tuple[int, int, int, int, int, torch.dtype, torch.dtype, dict[str, Any]]] = {
    "GQA 128": (32, 8, 128, 128, 64, BF16, BF16, {}),
    "GQA 64, sinks and window": (16, 2, 64, 64, 64, BF16, BF16, {"window_left": 700, "sinks": True}),
    "GQA 128 fp8, small pages": (16, 4, 128, 128, 16, BF16, FP8, {}),
    "GQA 96, soft cap": (10, 2, 96, 96, 64, FP16, FP16, {"softcap": 20.0}),
    "MLA": (16, 0, 576, 512, 64, BF16, BF16, {}),
    "GQA 128, float32": (32, 8, 128, 128, 64, FP32, FP32, {}),
    "GQA 64, float32, sinks, window and cap": (
        6,
        2,
        64,
        64,
        16,
        FP32,
        FP32,
        {"window_left": 700, "sinks": True, "softcap": 20.0},
    ),
    "GQA 256, float32": (4, 2, 256, 256, 64, FP32, FP32, {}),
    "GQA 128, float32, fp8 cache": (8, 2, 128, 128, 64, FP32, FP8, {}),
    "MLA, float32": (16, 0, 576, 512, 64, FP32, FP32, {}),
}
LENGTHS = (1, 40, 511, 512, 513, 1100, 1600, 5000)


def made(model: str, bs: int, q_len: int, seed: int = 0) -> tuple[str, dict[str, Any]]:
    """`"mha"` or `"mla"` and the arguments of a call; pages of a request lie anywhere in one pool."""
    heads, kv_heads, dim, v_dim, page, dtype, kv_dtype, options = MODELS[model]
    g = torch.Generator(DEVICE).manual_seed(seed)
    pages, width = 400, -(-5016 // page) + 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE)

    pick = torch.Generator().manual_seed(seed)
    lens = torch.tensor(LENGTHS)[torch.randint(len(LENGTHS), (bs,), generator=pick)] + q_len - 1
    a: dict[str, Any] = {
        "q": normal(bs, q_len, heads, dim).to(dtype),
        "block_tables": torch.randint(pages, (bs, width), generator=g, device=DEVICE, dtype=torch.int32),
        "seq_lens": lens.to(torch.int32).to(DEVICE),
        "scale": 0.11,
        **options,
    }
    if "sinks" in options:
        a["sinks"] = normal(heads)
    if kv_heads:
        a |= {n: normal(pages, page, kv_heads, d).to(kv_dtype) for n, d in (("k_cache", dim), ("v_cache", v_dim))}
        a |= {"k_scale": 0.7, "v_scale": 1.3} if kv_dtype == FP8 else {}
    else:
        a |= {"kv_cache": normal(pages, page, dim).to(kv_dtype), "kv_lora_rank": v_dim}
    return "mha" if kv_heads else "mla", a


def run(kind: str, step: str, a: dict[str, Any]) -> torch.Tensor:
    return getattr(spec_ops, f"{kind}_{step}")(**a, deterministic=True)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Zeros of both signs are different bits."""
    return x.contiguous().view(torch.int16)


def rows(a: dict[str, Any], index: torch.Tensor) -> dict[str, Any]:
    return a | {name: a[name][index] for name in PER_REQUEST if a.get(name) is not None}


def chain_words(bs: int, q_len: int) -> torch.Tensor:
    return torch.tensor([[(1 << (i + 1)) - 1 for i in range(q_len)]] * bs, device=DEVICE)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("q_len", [1, 16])
def test_any_page_size(model, q_len):
    """The same keys in pages of half the tokens, and of 16, 8 and 1."""
    kind, a = made(model, 12, q_len)
    expected = bits(run(kind, "target_verify", a))
    page = MODELS[model][4]
    for size in {page // 2, 16, 8, 1} - {page}:
        parts = page // size
        tables = a["block_tables"][:, :, None] * parts + torch.arange(parts, dtype=torch.int32, device=DEVICE)
        smaller = a | {"block_tables": tables.flatten(1)}
        for name in ("k_cache", "v_cache", "kv_cache"):
            if name in a:
                smaller[name] = a[name].view(-1, size, *a[name].shape[2:])
        assert torch.equal(bits(run(kind, "target_verify", smaller)), expected), size


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("q_len", [1, 4])
def test_any_batch(model, q_len):
    """64 requests; each alone, and in random batches of 3 and of 40, where other requests are split than before."""
    kind, a = made(model, 64, q_len)
    expected = bits(run(kind, "target_verify", a))
    rng = torch.Generator().manual_seed(1)
    batches = [torch.tensor([b]) for b in range(64)]
    batches += [torch.randint(64, (size,), generator=rng) for size in (3,) * 30 + (40,) * 10]
    for index in batches:
        index = index.to(DEVICE)
        assert torch.equal(bits(run(kind, "target_verify", rows(a, index))), expected[index]), index.tolist()


@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_queries(model):
    """16 queries verified together, in parts down to one, as a ragged extend, and as a tree that is a chain."""
    kind, a = made(model, 24, 16)
    whole = run(kind, "target_verify", a)
    expected = bits(whole)
    assert torch.equal(bits(run(kind, "draft_extend", a | {"tree_mask": chain_words(24, 16)})), expected)
    for first, last in [(i, i + 1) for i in range(16)] + [(0, 4), (4, 8), (12, 16), (5, 14)]:
        part = {"q": a["q"][:, first:last], "seq_lens": a["seq_lens"] - (16 - last)}
        assert torch.equal(bits(run(kind, "draft_decode", a | part)), expected[:, first:last]), (first, last)
    given = torch.randint(17, (24,), generator=torch.Generator().manual_seed(0)).tolist()  # the last so many queries
    indptr = torch.tensor([0, *given]).cumsum(0).to(torch.int32).to(DEVICE)
    ragged = {"q": torch.cat([a["q"][b, 16 - n :] for b, n in enumerate(given)]), "q_indptr": indptr, "max_q_len": 16}
    picked = torch.cat([whole[b, 16 - n :] for b, n in enumerate(given)])
    assert torch.equal(bits(run(kind, "extend", a | ragged)), bits(picked))


@pytest.mark.parametrize("model", ["GQA 128", "GQA 96, soft cap", "MLA", "MLA, float32"])
def test_many_chunks(model):
    """Of two requests, computed by a program each and merged from memory; of an extend, walked by one program, in registers."""
    kind, a = made(model, 2, 4)
    page, lengths = MODELS[model][4], [33_000, 20_001]
    a["block_tables"] = torch.randint(400, (2, -(-max(lengths) // page)), device=DEVICE, dtype=torch.int32)
    a["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    indptr = torch.tensor([0, 4, 8], dtype=torch.int32, device=DEVICE)
    ragged = a | {"q": a["q"].flatten(0, 1), "q_indptr": indptr, "max_q_len": 4}
    expected = bits(run(kind, "extend", ragged)).view(2, 4, -1)
    assert torch.equal(bits(run(kind, "target_verify", a)).view_as(expected), expected)


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_of_few_rows(dim, dtype, page):
    """Queries alone and four together, in tiles of 16 rows on Hopper, beside a prompt's, in tiles of 64: results in float32,
    which show the last bit of every sum. Chunks have three lengths there (`deterministic/chunks.py`)."""
    heads, kv_heads, most, lens = 16, 4, 200, [5000, 10_000, 4096 + 100, 8192 + 3, 513, 700]
    g = torch.Generator(DEVICE).manual_seed(dim + page)
    k, v = (torch.randn(12_800 // page, page, kv_heads, dim, generator=g, device=DEVICE).to(dtype) for _ in range(2))
    q = torch.randn(len(lens), most, heads, dim, generator=g, device=DEVICE).to(dtype)
    width = -(-max(lens) // page)
    tables = torch.stack([torch.randperm(len(k), generator=g, device=DEVICE)[:width] for _ in lens]).to(torch.int32)

    def attend(step: str, q: torch.Tensor, lens: list[int], rows: int, **more: Any) -> torch.Tensor:
        out = torch.full(q.shape, float("nan"), dtype=FP32, device=DEVICE)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        call = AttentionCall(f"mha_{step}", q, k, v, None, tables[: len(lens)], seq_lens, scale=0.11, out=out, **more)
        if torch.cuda.get_device_capability() == (9, 0) and step == "target_verify":
            assert launcher.choose(90, False, dim, dim, 2, q.shape[1] * heads // kv_heads).block_m == rows
        return launcher.attention(call)

    indptr = torch.arange(len(lens) + 1, dtype=torch.int32, device=DEVICE) * most
    prompt = attend("extend", q.flatten(0, 1), lens, 64, q_indptr=indptr, max_q_len=most).view_as(q)
    for first, last in ((0, 1), (63, 67), (196, 200), (199, 200)):
        ends = [n - most + last for n in lens]
        few = attend("target_verify", q[:, first:last], ends, 16)
        assert torch.equal(few.view(torch.int32), prompt[:, first:last].contiguous().view(torch.int32)), (first, last)
        one = attend("target_verify", q[:1, first:last], ends[:1], 16)
        assert torch.equal(one.view(torch.int32), few[:1].contiguous().view(torch.int32)), (first, last)
    many = attend("target_verify", q[:, 184:], lens, 64)
    assert torch.equal(many.view(torch.int32), prompt[:, 184:].contiguous().view(torch.int32))


@pytest.mark.parametrize("model", MODELS)
def test_any_nodes_of_a_tree(model):
    kind, a = made(model, 9, 16)
    parents = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 6, 8, 9, 4, 12, 13, 2]
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    a |= {"tree_mask": torch.tensor([words] * 9, device=DEVICE), "mask_len": 16}
    expected = bits(run(kind, "target_verify", a))
    for nodes in ([0], [15], [5, 8, 11, 13], list(range(4, 16))):
        part = {"q": a["q"][:, nodes], "tree_mask": a["tree_mask"][:, nodes]}
        assert torch.equal(bits(run(kind, "target_verify", a | part)), expected[:, nodes]), nodes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("nodes", [6, 16, 64])
def test_paths_are_chains(model, nodes):
    """Random trees that begin around the ends of blocks and chunks: each node beside the others, and as a chain of its own."""
    rng = random.Random(nodes)
    kind, a = made(model, 12, nodes, nodes)
    prefixes = [0, 1, 63, 64, 65, 500, 511, 512, 513, 1000, 1023, 4900]
    a["seq_lens"] = torch.tensor([prefix + nodes for prefix in prefixes], dtype=torch.int32, device=DEVICE)
    trees = [[PREFIX, *(rng.randrange(max(0, node - 9), node) for node in range(1, nodes))] for _ in prefixes]
    words = [mask_words(parents, list(range(nodes))) for parents in trees]
    a |= {"tree_mask": torch.tensor(words, device=DEVICE), "mask_len": nodes}
    every = [(b, i) for b in range(12) for i in range(nodes)]
    expected = bits(run(kind, "draft_decode", as_chains(a, every))).view(12, nodes, -1)
    assert torch.equal(bits(run(kind, "target_verify", a)).view_as(expected), expected)
    some = sorted(rng.sample(range(nodes), 4))  # a step of a draft: the last level asks, in other tiles than before
    step = {"q": a["q"][:, some], "tree_mask": a["tree_mask"][:, some]}
    assert torch.equal(bits(run(kind, "draft_decode", a | step)).view(12, 4, -1), expected[:, some])
    for b in (0, 5, 11):
        one = rows(a, torch.tensor([b], device=DEVICE))
        assert torch.equal(bits(run(kind, "target_verify", one)).view(1, nodes, -1), expected[b : b + 1])


@pytest.mark.parametrize("model", MODELS)
def test_keys_that_are_not_seen(model):
    """Drafts after a query, of large values: a weight of 0 times those must not move how tensor cores align their sums."""
    kind, a = made(model, 12, 8)
    tables, page = a["block_tables"], MODELS[model][4]
    pages = a["k_cache" if kind == "mha" else "kv_cache"].shape[0]
    a["block_tables"] = torch.arange(pages, dtype=torch.int32, device=DEVICE).expand(12, -1)[:, : tables.shape[1]].contiguous()
    a["seq_lens"] = torch.tensor([8, 9, 70, 71, 72, 100, 127, 128, 511, 513, 600, 601], dtype=torch.int32, device=DEVICE)
    for b in range(12):
        one = rows(a, torch.tensor([b], device=DEVICE))
        last = int(one["seq_lens"])
        first_query = one | {"q": one["q"][:, :1], "seq_lens": one["seq_lens"] - 7}
        expected = bits(run(kind, "draft_decode", first_query))
        for name in ("k_cache", "v_cache", "kv_cache"):
            if name in one:
                one[name] = one[name].clone()
                flat = one[name].view(torch.uint8 if one[name].dtype == FP8 else one[name].dtype).flatten(0, 1)
                big = torch.full_like(one[name].flatten(0, 1)[:1], 200.0 if one[name].dtype == FP8 else 3e4)
                flat[last - 7 : last] = big.view(flat.dtype)
        assert page * tables.shape[1] >= last
        assert torch.equal(bits(run(kind, "target_verify", one)[:, :1]), expected), last


@pytest.mark.parametrize("family", FAMILIES)
def test_accuracy_and_batches_of_random_shapes(family):
    """The harness of the other kernels, with its bound; and the requests of each batch in another order."""
    f = FAMILIES[family]
    for seed in range(8):
        name, a = random_call(f, zlib.crc32(family.encode()) + seed)
        out = getattr(spec_ops, name)(**a, deterministic=True)
        expected, weighted = in_float32(name, a), in_float32(name, a, absolute_values=True)
        allowed = 1.05 * torch.finfo(f.dtype).eps / 2 * (weighted + expected.abs()) + 3e-4
        error = (out.float() - expected).abs()
        assert (error <= allowed).all(), f"shape {seed}: off by {error.max():.3g}; lengths {a['seq_lens'].tolist()}"
        if f.mode != "extend":
            order = torch.randperm(len(out), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
            assert torch.equal(bits(getattr(spec_ops, name)(**rows(a, order), deterministic=True)), bits(out[order]))


@pytest.mark.parametrize("kv_dtype", [FP32, FP8])
@pytest.mark.parametrize("mode", ["draft_chain", "verify_chain", "verify_tree", "extend"])
@pytest.mark.parametrize(("kind", "widths"), [("mha", (64, 64)), ("mha", (128, 128)), ("mha", (192, 128)), ("mla", (576, 512))])
def test_accuracy_of_float32(kind, widths, mode, kv_dtype):
    """Within the error of IEEE float32, beside float64: products in tf32 are off by a hundred times as much."""
    shape = {"head_dim": widths[0], "v_dim": widths[1], "kv_dtype": kv_dtype, "lens": [0, 1, 40, 600], "q_lens": [0, 1, 9, 30]}
    case = make_case(kind, mode, DEVICE, page_size=16, sinks=True, window_left=100, **shape)
    check(case, case.run(backend="auto", deterministic=True))


@pytest.mark.parametrize("family", ["chain of 4", "tree of 16", "MLA", "ragged"])
def test_graph_replays_and_launches(family):
    """One capture replayed over other lengths gives the bits of eager calls; two launches at most, no sync."""
    name, a, sets = static_call(family, 7, 1)
    op = getattr(spec_ops, name)
    expected = [op(**a | given, deterministic=True) for given in sets]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            op(**a, deterministic=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) <= 2, on_device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(**a, deterministic=True)
    for replay in range(30):
        i = (replay * 7) % 10
        for key, value in sets[i].items():
            a[key].copy_(value)
        graph.replay()
        assert torch.equal(bits(out), bits(expected[i])), f"replay {replay}"


def test_inside_a_compiled_graph():
    name, a, sets = static_call("chain of 4", 7, 4)
    torch._dynamo.reset()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def doubled(q, seq_lens, block_tables):
        given = a | {"q": q, "seq_lens": seq_lens, "block_tables": block_tables}
        return 2 * getattr(spec_ops, name)(**given, deterministic=True)

    for given in sets * 2:
        torch.compiler.cudagraph_mark_step_begin()
        eager = getattr(spec_ops, name)(**a | given, deterministic=True)
        assert torch.equal(doubled(a["q"], **given), 2 * eager)
