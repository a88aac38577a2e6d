"""FlashInfer's kernels on a GPU against float64: XQA, fa2 and fa3 as ops, replayed in a CUDA graph, and in whole compiled
rounds.

A kernel's largest error must stay below three times that of a plain evaluation which rounds where flash kernels round (queries
and probabilities in the kernel's format, result in bfloat16): the same errors in other places, so their maxima over thousands
of values differ by little.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import spec_ops
from spec_ops.backends import registry, unregister_backend
from spec_ops.backends.flashinfer import page, register_variant
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models import CausalLM, ModelConfig, MTPDraft, PagedAttention, PagedKVCache
from spec_ops.models.pretrained import load_pair
from spec_ops.ops.reference.rope import rotate
from tests.gpu.test_cuda_graphs import recorded_graphs
from tests.helpers.dense_attention import PREFIX, attend, causal_keys, contiguous_rows, mask_words, tree_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()


def run(function, *args, **kwargs):
    """The call; skips the test if its kernel was to be built ahead (FLASHINFER_DISABLE_JIT) and was not."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if os.environ.get("FLASHINFER_DISABLE_JIT") and "MissingJITCache" in f"{type(error).__name__} {error}":
            pytest.skip(f"this variant was not built ahead: {str(error).splitlines()[0]}")
        raise


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def needs(low: int, high: int) -> None:
    if not low <= capability() <= high:
        pytest.skip(f"needs sm_{low} to sm_{high}, this is sm_{capability()}")


def pools(lens: list[int], page_size: int, tail: tuple[int, ...], count: int, kv_dtype: torch.dtype, seed: int = 0):
    """`count` caches on the GPU and tables; page ids past a request's length are out of range."""
    g = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(pages) + 3, generator=g)
    tables = torch.full((len(lens), max(pages) + 2), 2**30, dtype=torch.int32)
    start = 0
    for b, n in enumerate(pages):
        tables[b, :n] = order[start : start + n].int()
        start += n
    caches = [torch.randn(len(order), page_size, *tail, generator=g).to(kv_dtype).cuda() for _ in range(count)]
    return caches, tables.cuda(), g


def random_tree(nodes: int, g: torch.Generator) -> list[int]:
    return [PREFIX, *(int(torch.randint(-1, i, (1,), generator=g)) for i in range(1, nodes))]


def rounded(q, keys, values, seen, scale: float, fmt: torch.dtype) -> torch.Tensor:
    """`attend` with queries and probabilities rounded to `fmt` and the result to bfloat16."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    out = torch.zeros(*q.shape[:2], values.shape[-1], dtype=torch.float64)
    for i, visible in enumerate(seen):
        if not visible:
            continue
        rows = torch.tensor(visible)
        logits = torch.einsum("hd,khd->hk", q[i].to(fmt).double(), keys[rows]) * scale
        weights = torch.exp(logits - logits.amax(1, keepdim=True))
        out[i] = torch.einsum("hk,khd->hd", weights.to(fmt).double(), values[rows]) / weights.sum(1)[:, None]
    return out.to(BF16).double()


def check(out, q, caches, tables, lens, scales, seen, scale, fmt=BF16, mla_rank: int | None = None) -> None:
    """Every request of `out [bs, q_len, heads, *]` against float64; rows that see nothing are exactly zero."""
    worst, allowed = 0.0, 0.0
    tables, page_size = tables.cpu(), caches[0].shape[1]
    for b, n in enumerate(lens):
        ids = tables[b, : -(-n // page_size)].tolist()
        keys = contiguous_rows(caches[0], ids, n, scales[0])
        if mla_rank is None:
            values = contiguous_rows(caches[1], ids, n, scales[1])
        else:
            keys = keys[:, None]
            values = keys[..., :mla_rank]
        exact = attend(q[b], keys, values, seen[b], scale=scale).out
        worst = max(worst, float((out[b].cpu().double() - exact).abs().max()))
        plain = rounded(q[b].cpu(), keys, values, seen[b], scale, fmt)
        allowed = max(allowed, float((plain - exact).abs().max()))
        for i, visible in enumerate(seen[b]):
            if not visible:
                assert not out[b, i].any()
    assert worst <= 3 * allowed, (worst, allowed)


def gqa_case(q_len: int, *, tree: bool, page_size: int, group: int, kv_dtype, dim: int = 128, nodes: int | None = None):
    """`(arguments of the op, what each query sees, lens)`; one padded request."""
    kv_heads = 2
    nodes = q_len if nodes is None else nodes
    lens = [300, nodes, 0, 77 + nodes]
    caches, tables, g = pools(lens, page_size, (kv_heads, dim), 2, kv_dtype)
    q = torch.randn(len(lens), q_len, group * kv_heads, dim, generator=g).to(BF16).cuda()
    call: dict[str, Any] = {"block_tables": tables, "seq_lens": torch.tensor(lens, dtype=torch.int32).cuda()}
    if kv_dtype == FP8:
        call |= {"k_scale": 0.5, "v_scale": 1.5}
    if tree:
        parents = [random_tree(nodes, g) for _ in lens]
        asked = list(range(nodes - q_len, nodes))
        call["tree_mask"] = torch.tensor([mask_words(p, asked) for p in parents]).cuda()
        call["mask_len"] = nodes
        seen = [tree_keys(n, p, asked, -1) if n else [[]] * q_len for n, p in zip(lens, parents, strict=True)]
    else:
        seen = [causal_keys(n, q_len, -1) for n in lens]
    return q, caches, call, seen, lens


def check_gqa(out, q, caches, call, seen, lens, fmt=BF16) -> None:
    scales = (call.get("k_scale", 1.0), call.get("v_scale", 1.0))
    check(out, q, caches, call["block_tables"], lens, scales, seen, q.shape[-1] ** -0.5, fmt)


XQA_CASES = [
    pytest.param(
        q_len, tree, page_size, group, kv_dtype, id=f"q{q_len}-{'tree' if tree else 'chain'}-p{page_size}-g{group}-{name}"
    )
    for kv_dtype, name in ((BF16, "bf16"), (FP8, "fp8"))
    for group in (4, 8)
    for page_size in (16, 64)
    for q_len, tree in ((1, False), (4, False), (4, True), (16, False), (16, True))
]


@pytest.mark.parametrize(("q_len", "tree", "page_size", "group", "kv_dtype"), XQA_CASES)
def test_xqa(q_len, tree, page_size, group, kv_dtype):
    needs(90, 121)
    """Called as it is, and compiled into a CUDA graph."""
    q, caches, call, seen, lens = gqa_case(q_len, tree=tree, page_size=page_size, group=group, kv_dtype=kv_dtype)
    counters.clear()
    for tensor in (q, *caches, *(t for t in call.values() if isinstance(t, torch.Tensor))):
        torch._dynamo.mark_static_address(tensor)

    def verify():
        return spec_ops.mha_target_verify(q, *caches, **call, backend="flashinfer-xqa") + 0

    compiled = spec_ops.compile(verify)
    for step in (verify, compiled, compiled, compiled):  # the compiled one warms up, records and replays
        torch.compiler.cudagraph_mark_step_begin()
        # With an fp8 cache Hopper's kernel multiplies in e4m3, queries and probabilities included.
        check_gqa(run(step).clone(), q, caches, call, seen, lens, FP8 if kv_dtype == FP8 else BF16)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_xqa_in_two_graphs_that_are_replayed_at_the_same_time():
    """Both were captured on one stream."""
    needs(90, 121)
    cases = [gqa_case(4, tree=False, page_size=64, group=4, kv_dtype=BF16) for _ in range(2)]
    cases[1][0].mul_(0.5)  # other queries
    calls = [functools.partial(spec_ops.mha_target_verify, q, *caches, **call, backend="flashinfer-xqa")
             for q, caches, call, *_ in cases]  # fmt: skip
    for call in calls:
        run(call)
    capturing, graphs, outs = torch.cuda.Stream(), [torch.cuda.CUDAGraph() for _ in calls], []
    for graph, call in zip(graphs, calls, strict=True):
        with torch.cuda.graph(graph, stream=capturing):
            outs.append(call())
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for out, case in zip(outs, cases, strict=True):
        check_gqa(out, *case)


@pytest.mark.parametrize("backend", ["flashinfer-fa2", "flashinfer-fa3"])
def test_planned_kernels_are_not_captured(backend):
    needs(90, 90)
    q, caches, call, *_ = gqa_case(4, tree=False, page_size=64, group=4, kv_dtype=BF16)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")  # an empty graph warns
        with pytest.raises(RuntimeError, match=f"{backend}: must be called outside of CUDA graph captures"):
            spec_ops.mha_target_verify(q, *caches, **call, backend=backend)


@pytest.mark.parametrize(("q_len", "nodes"), [(4, 12), (8, 40), (1, 7)])
def test_xqa_tree_draft_steps(q_len, nodes):
    """Fewer queries than tree positions, and more than 32 of those."""
    needs(90, 121)
    q, caches, call, seen, lens = gqa_case(q_len, tree=True, page_size=64, group=4, kv_dtype=BF16, nodes=nodes)
    out = run(spec_ops.mha_draft_decode, q, *caches, **call, backend="flashinfer-xqa")
    check_gqa(out, q, caches, call, seen, lens)


@pytest.mark.parametrize("q_len", [1, 4])
def test_xqa_window_and_short_requests(q_len):
    needs(90, 121)
    q, caches, call, _, lens = gqa_case(q_len, tree=False, page_size=64, group=4, kv_dtype=BF16)
    seen = [causal_keys(n, q_len, 40) for n in lens]
    out = run(spec_ops.mha_target_verify, q, *caches, **call, window_left=40, backend="flashinfer-xqa")
    check_gqa(out, q, caches, call, seen, lens)
    short = [max(1, q_len - 2), 1, 0, q_len]
    call["seq_lens"] = torch.tensor(short, dtype=torch.int32).cuda()
    out = run(spec_ops.mha_target_verify, q, *caches, **call, backend="flashinfer-xqa")
    check_gqa(out, q, caches, call, [causal_keys(n, q_len, -1) for n in short], short)


@pytest.mark.parametrize(("q_len", "tree"), [(1, False), (4, False), (16, True)])
def test_xqa_sinks(q_len, tree):
    needs(90, 121)
    q, caches, call, _, _ = gqa_case(q_len, tree=tree, page_size=64, group=4, kv_dtype=BF16)
    sinks = torch.randn(q.shape[2]).cuda()
    out = run(spec_ops.mha_target_verify, q, *caches, **call, sinks=sinks, backend="flashinfer-xqa")
    expected = spec_ops.mha_target_verify(q, *caches, **call, sinks=sinks, backend="reference")
    plain = spec_ops.mha_target_verify(q, *caches, **call, backend="reference")
    # The reference computes in float32: both differ from the truth by bfloat16's rounding of values below 4, the kernel by that
    # of its probabilities too.
    assert (out - expected).abs().max() <= 4 * 2**-8
    assert (plain - expected).abs().max() > 0.1


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", [1, 4, 16])
def test_fa2(q_len, dim, tree):
    q, caches, call, seen, lens = gqa_case(q_len, tree=tree, page_size=64, group=4, kv_dtype=BF16, dim=dim)
    out = run(spec_ops.mha_target_verify, q, *caches, **call, backend="flashinfer-fa2")
    check_gqa(out, q, caches, call, seen, lens)


def test_fa3():
    needs(90, 90)
    q, caches, call, seen, lens = gqa_case(4, tree=False, page_size=64, group=4, kv_dtype=BF16)
    out = run(spec_ops.mha_target_verify, q, *caches, **call, backend="flashinfer-fa3")
    check_gqa(out, q, caches, call, seen, lens)


@pytest.mark.parametrize("backend", ["flashinfer-fa2", "flashinfer-fa3"])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (16, 4), (128, 1), (128, 4)])
def test_planned_mla(backend, heads, q_len):
    needs(90, 90) if backend.endswith("fa3") else needs(80, 121)
    lens = [300, q_len, 0, 77 + q_len]
    caches, tables, g = pools(lens, 64, (576,), 1, BF16)
    q = torch.randn(len(lens), q_len, heads, 576, generator=g).to(BF16).cuda()
    seq_lens = torch.tensor(lens, dtype=torch.int32).cuda()
    out = run(spec_ops.mla_target_verify, q, *caches, 512, tables, seq_lens, scale=0.07, backend=backend)
    seen = [causal_keys(n, q_len, -1) for n in lens]
    check(out, q, caches, tables, lens, (1.0,), seen, 0.07, mla_rank=512)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_planned_extend(kind):
    """Ragged queries, with padding rows at the end."""
    lens, q_lens, heads = [300, 20, 77], [40, 20, 1], 8
    q_indptr = torch.tensor([0, 40, 60, 61], dtype=torch.int32).cuda()
    seq_lens = torch.tensor(lens, dtype=torch.int32).cuda()
    tail = (2, 128) if kind == "mha" else (576,)
    caches, tables, g = pools(lens, 64, tail, 2 if kind == "mha" else 1, BF16)
    q = torch.randn(64, heads, tail[-1], generator=g).to(BF16).cuda()
    common: dict[str, Any] = {"backend": "flashinfer-fa2"}
    if kind == "mha":
        out = run(spec_ops.mha_extend, q, *caches, tables, seq_lens, q_indptr, 40, **common)
    else:
        out = run(spec_ops.mla_extend, q, *caches, 512, tables, seq_lens, q_indptr, 40, scale=0.07, **common)
    assert not out[61:].any()
    for b, (n, rows) in enumerate(zip(lens, q_lens, strict=True)):
        part = slice(int(q_indptr[b]), int(q_indptr[b + 1]))
        seen, scale = [causal_keys(n, rows, -1)], 128**-0.5 if kind == "mha" else 0.07
        rank = None if kind == "mha" else 512
        check(out[None, part], q[None, part], caches, tables[b : b + 1], [n], (1.0, 1.0), seen, scale, mla_rank=rank)


@pytest.mark.parametrize(("q_len", "tree"), [(1, False), (4, False), (16, True)])
def test_xqa_replayed_in_a_cuda_graph(q_len, tree):
    """One graph; lengths, tables, queries and masks change in place between replays."""
    needs(90, 121)
    counters.clear()
    first = gqa_case(q_len, tree=tree, page_size=64, group=4, kv_dtype=BF16)
    q, caches, call, _, lens = first
    for tensor in (q, *caches, *(t for t in call.values() if isinstance(t, torch.Tensor))):
        torch._dynamo.mark_static_address(tensor)
    step = spec_ops.compile(lambda: spec_ops.mha_target_verify(q, *caches, **call, backend="flashinfer-xqa") + 0)
    for turn in range(5):
        lens = [150 + 31 * turn, q_len, 0, 77 + q_len - turn * (q_len < 16)]
        lens[3] = max(lens[3], q_len)
        call["seq_lens"].copy_(torch.tensor(lens, dtype=torch.int32))
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(turn)))
        parents = [random_tree(q_len, torch.Generator().manual_seed(10 * turn + b)) for b in range(len(lens))]
        if tree:
            call["tree_mask"].copy_(torch.tensor([mask_words(p, list(range(q_len))) for p in parents]))
            seen = [tree_keys(n, p, list(range(q_len)), -1) if n else [[]] * q_len for n, p in zip(lens, parents, strict=True)]
        else:
            seen = [causal_keys(n, q_len, -1) for n in lens]
        torch.compiler.cudagraph_mark_step_begin()
        out = run(step).clone()
        check_gqa(out, q, caches, call, seen, lens)
    assert counters["inductor"]["cudagraph_skips"] == 0


TEXTS = ["def add(a, b):\n", "class Node:\n    def __init__(self, value):\n", "import os\nimport sys\n\n\ndef main(argv):\n"]


def logits_of(target, tokens: list[int], cache_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`[n, vocab]` float32 logits of one sequence by the reference backend."""
    n, weight = len(tokens), target.embed.weight
    pages = -(-n // 64)
    cache = PagedKVCache(target.config, pages, 64, dtype=cache_dtype or weight.dtype, device="cuda")
    place = torch.arange(n, device="cuda")
    attention = PagedAttention(
        cache,
        "extend",
        torch.arange(pages, dtype=torch.int32, device="cuda")[None],
        torch.tensor([n], dtype=torch.int32, device="cuda"),
        place,
        q_indptr=torch.tensor([0, n], dtype=torch.int32, device="cuda"),
        max_q_len=n,
        backend="reference",
    )
    with torch.no_grad():
        return target.logits(target(torch.tensor(tokens, device="cuda"), place, attention).hidden).float()


def check_rounds(generator: Generator, exact, prompts: list[list[int]], count: int) -> Any:
    """Generate; every token must be the greedy one of the float32 model `exact`, up to what bfloat16 and the cache's
    dtype do to the logits."""
    result = run(generator.generate, prompts, max_new_tokens=count)
    cache_dtype = generator.target_cache.tensors()[0].dtype
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        assert len(tokens) == count
        sequence = [*prompt, *tokens]
        truth, short = logits_of(exact, sequence), logits_of(generator.target, sequence, cache_dtype)
        noise = (truth - short).abs().amax(-1)
        for i in range(len(prompt) - 1, len(sequence) - 1):
            gap = truth[i].max() - truth[i, sequence[i + 1]]
            # Both the token and its rival may be off by the noise, and other kernels round in other places.
            assert gap <= 4 * noise[i], (i, float(gap), float(noise[i]))
    return result


CHAIN, TREE = SpeculationConfig(3), SpeculationConfig(3, 4, 12)


@pytest.mark.parametrize(
    ("backend", "config", "cache_dtype"),
    [
        pytest.param(backend, config, dtype, id=f"{backend}-{'tree' if config is TREE else 'chain'}-{name}")
        for backend, configs, dtype, name in (
            ("flashinfer-xqa", (CHAIN, TREE), BF16, "bf16"),
            ("flashinfer-xqa", (CHAIN, TREE), FP8, "fp8"),
            ("flashinfer-fa2", (CHAIN, TREE), BF16, "bf16"),
            ("flashinfer-fa3", (CHAIN,), BF16, "bf16"),
        )
        for config in configs
    ],
)
def test_compiled_rounds(backend, config, cache_dtype):
    """The shipped pair: one CUDA graph with XQA; several, and the host's plans between them, with fa2 and fa3."""
    needs(90, 90 if backend.endswith("fa3") else 121)
    counters.clear()
    target, draft, tokenizer = load_pair(device="cuda", dtype=BF16)
    generator = Generator(
        target, draft, config, compile=True, max_batch_size=4, max_seq_len=256, page_size=64, backend=backend,
        prefill_backend="auto", cache_dtype=cache_dtype,
    )  # fmt: skip
    before = recorded_graphs()
    result = check_rounds(generator, load_pair(device="cuda")[0], [tokenizer.encode(text) for text in TEXTS], 64)
    assert result.stats.accept_length > 2.5
    if backend == "flashinfer-xqa":
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert recorded_graphs() - before == 1
    else:
        assert recorded_graphs() - before > 1


@pytest.mark.parametrize("backend", ["flashinfer-fa2", "flashinfer-fa3"])
def test_compiled_mla_rounds(backend):
    """An MLA target with random weights and its MTP layer, whose guesses are rarely right: verification is what is tested."""
    needs(90, 90) if backend.endswith("fa3") else needs(80, 121)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_heads": 16, "kv_lora_rank": 512}
    sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    exact = CausalLM(ModelConfig(num_layers=2, **sizes)).cuda().eval()
    target = copy.deepcopy(exact).to(BF16)
    draft = MTPDraft(ModelConfig(num_layers=1, **sizes), target).cuda().to(BF16)
    generator = Generator(
        target,
        draft,
        CHAIN,
        compile=True,
        max_batch_size=4,
        max_seq_len=256,
        page_size=64,
        backend=backend,
        prefill_backend="auto",
    )
    before = recorded_graphs()
    check_rounds(generator, exact, [[1, 2, 3, 4, 5], [9, 8, 7], [33]], 24)
    assert recorded_graphs() - before > 1


APPENDS = [pytest.param([5, -1, 0, 63, -1, 17], id="some"), pytest.param([-1, -1, 40, 41, -7, 2], id="first"),
           pytest.param([-1] * 6, id="all"), pytest.param([9, 8, 7, 6, 5, 4], id="none")]  # fmt: skip


@pytest.mark.parametrize("slots", APPENDS)
def test_page_append(slots):
    """Bit for bit as the reference, dropped rows included, in layers of one pool."""
    g = torch.Generator().manual_seed(0)
    where = torch.tensor(slots).cuda()
    for dim in (64, 128, 256):
        pools = [torch.randn(2, 2, 4, 16, 2, dim, generator=torch.Generator().manual_seed(1)).to(BF16).cuda() for _ in range(2)]
        k, v = (torch.randn(6, 2, dim, generator=g).to(BF16).cuda() for _ in range(2))
        for pool, backend in zip(pools, ("flashinfer-page", "reference"), strict=True):
            run(spec_ops.append_kv, pool[1, 0], pool[1, 1], k, v, where, backend=backend)
        assert torch.equal(*pools)
    caches = [torch.randn(2, 64, 576, generator=torch.Generator().manual_seed(2)).to(BF16).cuda() for _ in range(2)]
    rows = [torch.randn(6, width, generator=g).to(BF16).cuda() for width in (512, 64)]
    for cache, backend in zip(caches, ("flashinfer-page", "reference"), strict=True):
        run(spec_ops.append_mla_kv, cache, *rows, where, backend=backend)
    assert torch.equal(*caches)


def test_page_append_in_compiled_rounds(monkeypatch):
    """All cache writes of a round by FlashInfer: the models' fused RoPE and append taken apart. One graph, the same text."""
    needs(90, 121)
    counters.clear()
    calls = []

    def counted(*args):
        calls.append(args[4].shape)
        append_kv(*args)

    def rope_append_kv(q, k, v, cos, sin, k_cache, v_cache, slots, **scales):
        backend = "flashinfer-page" if k.dtype == BF16 else "auto"  # `check_rounds` also runs the pair in float32
        spec_ops.append_kv(k_cache, v_cache, rotate(k, cos, sin), v, slots, **scales, backend=backend)
        return rotate(q, cos, sin)

    append_kv = page.append_kv
    monkeypatch.setattr(page, "append_kv", counted)
    monkeypatch.setattr("spec_ops.ops.rope_append_kv", rope_append_kv)
    registry._load.cache_clear()
    target, draft, tokenizer = load_pair(device="cuda", dtype=BF16)
    generator = Generator(
        target, draft, TREE, compile=True, max_batch_size=4, max_seq_len=256, page_size=64, backend="flashinfer-xqa",
        prefill_backend="auto",
    )  # fmt: skip
    result = check_rounds(generator, load_pair(device="cuda")[0], [tokenizer.encode(text) for text in TEXTS], 64)
    registry._load.cache_clear()
    assert len(calls) > 8  # each layer's, where the round is warmed up and where it is recorded
    assert result.stats.accept_length > 2.5
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(("q_len", "tree"), [(1, False), (4, True), (16, False)])
def test_xqa_writes_fp8(q_len, tree):
    needs(90, 121)
    q, caches, call, _, _ = gqa_case(q_len, tree=tree, page_size=64, group=4, kv_dtype=FP8)
    register_variant("flashinfer-xqa", "xqa-fp8-out", out_dtype=FP8, out_scale=0.125)
    try:
        out = run(spec_ops.mha_target_verify, q, *caches, **call, backend="xqa-fp8-out")
    finally:
        unregister_backend("xqa-fp8-out")
    exact = run(spec_ops.mha_target_verify, q, *caches, **call, backend="flashinfer-xqa").float()
    assert out.dtype == FP8
    # The same kernel but for the last rounding: 4 bits of significand, or steps of 2^-9 below e4m3's smallest normal number.
    torch.testing.assert_close(out.float() * 0.125, exact, rtol=2**-4 + 2**-8, atol=0.125 * 2**-9)
    assert exact.abs().max() > 1


def test_a_host_plan_is_named_in_the_report():
    q, caches, call, _, _ = gqa_case(4, tree=False, page_size=64, group=4, kv_dtype=BF16)
    named = spec_ops.explain(lambda: spec_ops.mha_target_verify(q, *caches, **call, backend="flashinfer-fa2"))
    assert any("flashinfer-fa2" in line for line in named.kernels())
    assert "1 call plans on the host and runs outside CUDA graphs" in str(named)
    auto = spec_ops.explain(lambda: spec_ops.mha_target_verify(q, *caches, **call))
    assert "flashinfer-fa2 plans on the host" in auto.kernels()[0]
