"""Reference attention against `dense_attention`, for every step, layout, dtype and feature.

All caches are poisoned: every slot that no request owns holds NaN, page ids past a request's pages lie outside the pool, and
queries that see nothing are NaN. Whatever reads one of them fails the comparison.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spec_ops
from spec_ops.backends import AttentionCall
from tests.helpers.dense_attention import PREFIX, Attended, attend, causal_keys, contiguous_rows, mask_words, tree_keys

KINDS = ("mha", "mla")
TREE_MODES = ("draft_tree", "verify_tree", "draft_extend_tree")
MODES = ("draft_chain", "verify_chain", "draft_extend_chain", "extend", *TREE_MODES)
STEP_OF_MODE = {
    "draft_chain": "draft_decode",
    "draft_tree": "draft_decode",
    "verify_chain": "target_verify",
    "verify_tree": "target_verify",
    "draft_extend_chain": "draft_extend",
    "draft_extend_tree": "draft_extend",
    "extend": "extend",
}
FP8 = torch.float8_e4m3fn
OUTSIDE_POOL = (-1, -(2**31), 2**31 - 1)


def draft_tree(generator: torch.Generator, steps: int, width: int) -> list[int]:
    """Parents of a `steps`-step top-`width` draft, step-major: each step keeps the best children of the last."""
    scores = torch.rand(width, generator=generator)
    parents = [PREFIX] * width
    for step in range(1, steps):
        children = scores[:, None] * torch.rand(width, width, generator=generator)
        scores, best = children.flatten().topk(width)
        parents += [(step - 1) * width + int(child) // width for child in best]
    return parents


def verify_tree(generator: torch.Generator, nodes: int) -> list[int]:
    """Random parents of a tree with root 0: siblings leave gaps between a node's slot and its depth."""
    return [PREFIX, *(int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes))]


@dataclasses.dataclass
class Case:
    """One call of one attention op, and all that the dense computation needs to know about it."""

    kind: str
    step: str
    arguments: dict[str, Any]
    q_lens: list[int]
    trees: list[list[int]] | None  # parents per request
    nodes: list[int]  # draft positions of the queries, the same in each request

    def run(self, **changes: Any) -> torch.Tensor:
        return getattr(spec_ops, f"{self.kind}_{self.step}")(**{**self.arguments, **changes})

    def call(self, **changes: Any) -> AttentionCall:
        """What the op hands its kernel."""
        a = {"mask_len": None, "scale": None, **self.arguments, **changes}
        mha, ragged = self.kind == "mha", self.step == "extend"
        return AttentionCall(
            f"{self.kind}_{self.step}",
            a["q"],
            a["k_cache" if mha else "kv_cache"],
            a["v_cache" if mha else "kv_cache"],
            None if mha else a["kv_lora_rank"],
            a["block_tables"],
            a["seq_lens"],
            tree_mask=None if ragged else a.get("tree_mask"),
            mask_len=0 if ragged else a["mask_len"] or 0,
            q_indptr=a["q_indptr"] if ragged else None,
            max_q_len=a["max_q_len"] if ragged else 0,
            scale=1.0 / math.sqrt(a["q"].shape[-1]) if a["scale"] is None else a["scale"],
            window_left=a["window_left"],
            sinks=a["sinks"],
            softcap=a["softcap"],
            k_scale=a["k_scale" if mha else "kv_scale"] or 1.0,
            v_scale=a["v_scale" if mha else "kv_scale"] or 1.0,
        )

    def seen(self, request: int, window_by_slot: bool = False) -> list[list[int]]:
        length, window = int(self.arguments["seq_lens"][request]), self.arguments["window_left"]
        if self.trees is None:
            return causal_keys(length, self.q_lens[request], window)
        return tree_keys(length, self.trees[request], self.nodes, window, window_by_slot)

    def queries(self, tensor: torch.Tensor, request: int) -> torch.Tensor:
        if self.step != "extend":
            return tensor[request]
        start = sum(self.q_lens[:request])
        return tensor[start : start + self.q_lens[request]]

    def but(self, **changes: Any) -> Case:
        return dataclasses.replace(self, arguments={**self.arguments, **changes})

    def expected(self, request: int, window_by_slot: bool = False) -> Attended:
        a = self.arguments
        length, pages = int(a["seq_lens"][request]), a["block_tables"][request].tolist()
        if self.kind == "mha":
            keys = contiguous_rows(a["k_cache"], pages, length, a["k_scale"] or 1.0)
            values = contiguous_rows(a["v_cache"], pages, length, a["v_scale"] or 1.0)
        else:
            keys = contiguous_rows(a["kv_cache"], pages, length, a["kv_scale"] or 1.0)[:, None]
            values = keys[..., : a["kv_lora_rank"]]
        scale = 1.0 / math.sqrt(a["q"].shape[-1]) if a.get("scale") is None else a["scale"]
        return attend(
            self.queries(a["q"], request), keys, values, self.seen(request, window_by_slot),
            scale=scale, sinks=a["sinks"], softcap=a["softcap"],
        )  # fmt: skip


def paged_pool(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str, views: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pool full of NaN and `views` caches of `shape` in it."""
    pages, page_size, *row = shape
    if layout == "separate":
        pool = torch.full((views, *shape), float("nan"))
    elif layout == "layers":  # a layer's view of [layers, views, pages, page_size, ...]
        pool = torch.full((3, views, *shape), float("nan"))
    else:  # K and V interleaved per page, in rows that are wider than the cache
        pool = torch.full((pages, views, page_size, *row[:-1], row[-1] + 16), float("nan"))
    pool = pool.to(dtype).to(device)
    if layout == "separate":
        return pool, [pool[i] for i in range(views)]
    if layout == "layers":
        return pool, [pool[1, i] for i in range(views)]
    return pool, [pool[:, i, ..., : row[-1]] for i in range(views)]


def make_case(
    kind: str, mode: str, device: str, *, lens: list[int] | None = None, page_size: int = 16, heads: int = 4,
    kv_heads: int = 2, head_dim: int = 64, v_dim: int = 64, dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None, layout: str = "separate", window_left: int = -1, sinks: bool = False,
    softcap: float = 0.0, seed: int = 0, width: int = 3, draft_steps: int = 3, num_nodes: int = 8,
    q_lens: list[int] | None = None, slack: int = 0,
) -> Case:  # fmt: skip
    """Build a case; for MLA `head_dim` is the row's width and `v_dim` the latent's. `lens` exclude a tree's drafts."""
    g = torch.Generator().manual_seed(seed)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    lens = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 5] if lens is None else lens
    trees, nodes, q_len = None, [], {"draft_chain": 1, "verify_chain": 5, "draft_extend_chain": 4}.get(mode, 0)
    if mode in TREE_MODES:
        if mode == "draft_tree":
            trees = [draft_tree(g, draft_steps, width) for _ in lens]
            nodes = list(range((draft_steps - 1) * width, draft_steps * width))
        else:
            num_nodes = num_nodes if mode == "verify_tree" else 5
            trees, nodes = [verify_tree(g, num_nodes) for _ in lens], list(range(num_nodes))
        q_len = len(nodes)
        # After the live requests come padded ones: nothing cached, or less than the tree's own width.
        lens = [length + len(trees[0]) for length in lens] + [0, 1]
        trees += trees[-1:] * 2 if trees else []
    if mode != "extend":
        q_lens = [q_len] * len(lens)
    elif q_lens is None:
        q_lens = [(0, min(length, 3), length)[i % 3] for i, length in enumerate(lens)]

    live = [math.ceil(length / page_size) for length in lens]
    num_pages, table_width = sum(live) + 2, max(live) + 2
    ids = torch.randperm(num_pages, generator=g).tolist()
    tables = torch.tensor(
        [[OUTSIDE_POOL[(b + p) % 3] for p in range(table_width)] for b in range(len(lens))], dtype=torch.int32
    )
    rows = (kv_heads,) if kv_heads and kind == "mha" else ()
    widest = max(head_dim, v_dim)
    _, caches = paged_pool((num_pages, page_size, *rows, widest), layout, kv_dtype, device, 2 if kind == "mha" else 1)
    scales = [0.37, 1.9] if kv_dtype == FP8 else [None, None]
    for b, length in enumerate(lens):
        for p in range(live[b]):
            tables[b, p] = page = ids.pop()
            count = min(page_size, length - p * page_size)
            for cache, scale in zip(caches, scales, strict=False):
                values = torch.randn(count, *rows, widest, generator=g) / (scale or 1.0)
                cache.view(torch.uint8 if kv_dtype == FP8 else kv_dtype)[page, :count] = (
                    values.to(kv_dtype).view(torch.uint8 if kv_dtype == FP8 else kv_dtype).to(device)
                )

    total = sum(q_lens) + 3  # ragged queries end with padding
    q = torch.randn(*((total,) if mode == "extend" else (len(lens), q_len)), heads, head_dim, generator=g).to(dtype).to(device)
    arguments: dict[str, Any] = {
        "q": q,
        "block_tables": tables.to(device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "window_left": window_left,
        "sinks": torch.randn(heads, generator=g).to(device) if sinks else None,
        "softcap": softcap,
        "backend": "reference",
    }
    if kind == "mha":
        arguments |= {"k_cache": caches[0][..., :head_dim], "v_cache": caches[1][..., :v_dim]}
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}
    else:
        arguments |= {"kv_cache": caches[0][..., :head_dim], "kv_lora_rank": v_dim, "kv_scale": scales[0], "scale": 0.11}
    if mode == "extend":
        starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
        arguments |= {"q_indptr": starts.to(device), "max_q_len": max(1, *q_lens) + slack}
        q[sum(q_lens) :] = float("nan")
    if trees is not None:
        words = [mask_words(parents, nodes) for parents in trees]
        words = [row if length else [-1] * q_len for row, length in zip(words, lens, strict=True)]  # garbage in padded rows
        arguments |= {"tree_mask": torch.tensor(words, device=device), "mask_len": len(trees[0])}
    case = Case(kind, STEP_OF_MODE[mode], arguments, q_lens, trees, nodes)
    for b in range(len(lens)):
        for row, seen in zip(case.queries(q, b), case.seen(b), strict=True):
            if not seen:
                row.fill_(float("nan"))
    return case


def poison_unseen(case: Case) -> int:
    """Fills the keys and values that no query of their request sees with NaN, and has the table's entries of pages without any
    other keys point out of the pool. How many keys there were."""
    a, count = case.arguments, 0
    caches = [a[name] for name in ("k_cache", "v_cache", "kv_cache") if name in a]
    page_size = caches[0].shape[1]
    for b, length in enumerate(a["seq_lens"].tolist()):
        seen = {key for keys in case.seen(b) for key in keys}
        for key in set(range(length)) - seen:
            page = int(a["block_tables"][b, key // page_size])
            for cache in caches:
                cache[page, key % page_size] = torch.tensor(float("nan")).to(cache.dtype).to(cache.device)
            count += 1
        pages = {key // page_size for key in seen}
        for page in set(range(a["block_tables"].shape[1])) - pages:
            a["block_tables"][b, page] = OUTSIDE_POOL[(b + page) % 3]
    return count


def spread(x: torch.Tensor, dim: int, reach: int = 2**31) -> torch.Tensor:
    """A copy of `x` whose entries along `dim` reach over more than `reach` elements, between which nothing is initialized."""
    strides = list(x.contiguous().stride())
    strides[dim] = (reach // (x.shape[dim] - 1) // 16 + 1) * 16
    size = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) + 1
    wide = torch.empty(size, dtype=x.dtype, device=x.device).as_strided(x.shape, strides)
    assert (x.shape[dim] - 1) * wide.stride(dim) >= reach
    return wide.copy_(x)


# What no query sees: keys before a window; slots of a tree whose last level asks; both. With a window shorter than a tree is
# deep its first levels are among them.
UNSEEN = [("verify_chain", 9), ("verify_chain", 30), ("extend", 9), ("verify_tree", 9), ("draft_tree", -1), ("draft_tree", 9),
          ("draft_tree", 1)]  # fmt: skip


def tolerance(expected: Attended, dtype: torch.dtype) -> torch.Tensor:
    """Float32 arithmetic (see `attend`) and one rounding to `dtype`: at most eps / 2, or half a subnormal step."""
    info = torch.finfo(dtype)
    return expected.float32_error + info.eps / 2 * (expected.out.abs() + expected.float32_error) + info.tiny * info.eps / 2


def check(case: Case, out: torch.Tensor | None = None) -> None:
    out = case.run() if out is None else out
    q = case.arguments["q"]
    v_dim = case.arguments["v_cache"].shape[-1] if case.kind == "mha" else case.arguments["kv_lora_rank"]
    assert (out.shape, out.dtype, out.device) == ((*q.shape[:-1], v_dim), q.dtype, q.device)
    out = out.cpu()
    for b in range(len(case.q_lens)):
        got, expected = case.queries(out, b), case.expected(b)
        error = (got.double() - expected.out).abs()
        assert (error <= tolerance(expected, out.dtype)).all(), f"request {b}: off by up to {error.max():.3g}"
        for row, seen in zip(got, case.seen(b), strict=True):
            if not seen:
                assert torch.equal(row, torch.zeros_like(row)), f"request {b}: a query that sees nothing must give zeros"
    if case.step == "extend":
        padding = out[sum(case.q_lens) :]
        assert torch.equal(padding, torch.zeros_like(padding))


def differs(case: Case, other_case: Case, window_by_slot: bool = False) -> bool:
    """Whether the dense answers are farther apart than rounding could explain: that `check` would tell the two apart."""
    for b in range(len(case.q_lens)):
        expected, other = case.expected(b), other_case.expected(b, window_by_slot)
        if ((expected.out - other.out).abs() > 2 * tolerance(expected, case.arguments["q"].dtype)).any():
            return True
    return False


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_page_sizes_and_lengths_around_page_boundaries(kind, mode, page_size, device):
    check(make_case(kind, mode, device, page_size=page_size, v_dim=48, seed=page_size))


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("mode", MODES)
def test_grouped_heads(mode, kv_heads, device):
    check(make_case("mha", mode, device, heads=8, kv_heads=kv_heads, lens=[7, 20], q_lens=[7, 2]))


@pytest.mark.parametrize(("head_dim", "v_dim"), [(64, 64), (128, 128), (256, 256), (192, 128), (64, 128)])
@pytest.mark.parametrize("mode", MODES)
def test_mha_head_dims(mode, head_dim, v_dim, device):
    check(make_case("mha", mode, device, head_dim=head_dim, v_dim=v_dim, lens=[3, 40], q_lens=[3, 5]))


@pytest.mark.parametrize(("head_dim", "v_dim"), [(576, 512), (80, 64), (64, 64)])
@pytest.mark.parametrize("mode", MODES)
def test_mla_latent_widths(mode, head_dim, v_dim, device):
    check(make_case("mla", mode, device, head_dim=head_dim, v_dim=v_dim, lens=[3, 40], q_lens=[3, 5]))


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["same", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind, mode, dtype, kv_dtype, device):
    check(make_case(kind, mode, device, dtype=dtype, kv_dtype=kv_dtype, v_dim=48, page_size=8, lens=[0, 8, 21]))


@pytest.mark.parametrize("window_left", [0, 1, 5, 17])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_windows_follow_depth(kind, mode, window_left, device):
    case = make_case(kind, mode, device, window_left=window_left, v_dim=48, page_size=8, lens=[0, 6, 30], num_nodes=12)
    check(case)
    assert differs(case, case.but(window_left=-1))
    # A query always sees itself, so a window of 0 is the same over slots; wider ones must be able to show the mistake.
    if case.trees is not None and window_left > 0:
        assert differs(case, case, window_by_slot=True), "this tree cannot tell a window over depth from one over slots"


@pytest.mark.parametrize(("sinks", "softcap"), [(True, 0.0), (False, 2.0), (True, 30.0)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_and_soft_cap(kind, mode, sinks, softcap, device):
    case = make_case(kind, mode, device, sinks=sinks, softcap=softcap, window_left=9, v_dim=48, page_size=8, lens=[0, 1, 26])
    check(case)
    if sinks:
        assert differs(case, case.but(sinks=None))
    if softcap:
        assert differs(case, case.but(softcap=0.0))


def test_extreme_sinks(device):
    """A sink far above every logit takes all the weight, one of -inf takes none; neither may overflow."""
    case = make_case("mha", "verify_chain", device, lens=[0, 12])
    case.arguments["sinks"] = torch.tensor([1e4, float("-inf"), -1e4, 0.0], device=device)
    check(case)
    assert torch.equal(case.run()[1, :, 0].cpu(), torch.zeros(5, 64))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["layers", "interleaved"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_strided_caches(kind, mode, layout, kv_dtype, device):
    case = make_case(kind, mode, device, layout=layout, dtype=torch.bfloat16, kv_dtype=kv_dtype, v_dim=48, lens=[4, 19])
    assert layout == "layers" or not case.arguments["k_cache" if kind == "mha" else "kv_cache"].is_contiguous()
    check(case)


@pytest.mark.parametrize("window_left", [-1, 4])
@pytest.mark.parametrize("mode", ["verify_tree", "draft_tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_mask_of_full_width(kind, mode, window_left, device):
    """64 draft positions: bit 63 is the word's sign. As a verified tree, and as step 16 of a draft of width 4."""
    case = make_case(
        kind, mode, device, lens=[0, 9], heads=2, v_dim=48, num_nodes=64, width=4, draft_steps=16, window_left=window_left
    )
    assert case.arguments["mask_len"] == 64
    assert (case.arguments["tree_mask"][:2] < 0).any()
    check(case)


@pytest.mark.parametrize("kind", KINDS)
def test_mask_len_defaults_to_the_query_count(kind, device):
    case = make_case(kind, "verify_tree", device, lens=[2, 5], v_dim=48)
    check(case, case.run(mask_len=None))


@pytest.mark.parametrize("kind", KINDS)
def test_causal_mask_words_equal_no_mask(kind, device):
    """A chain given as a tree is the same computation, so the very same numbers."""
    case = make_case(kind, "verify_chain", device, v_dim=48, window_left=7)
    words = torch.tensor([[(1 << (i + 1)) - 1 for i in range(5)]] * len(case.q_lens), device=device)
    assert torch.equal(case.run(), case.run(tree_mask=words))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_max_seq_len_bounds_work_not_results(kind, mode, device):
    case = make_case(kind, mode, device, v_dim=48, page_size=8)
    longest = int(case.arguments["seq_lens"].max())
    for bound in (longest, longest + 1, 10_000):
        check(case, case.run(max_seq_len=bound))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_long_queries_are_done_in_parts(kind, mode, device, monkeypatch):
    case = make_case(kind, mode, device, v_dim=48, page_size=8, sinks=True, window_left=11)
    monkeypatch.setattr("spec_ops.ops.reference.attention.MAX_LOGITS", 1)
    check(case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_poison_does_not_change_a_bit(kind, mode, device):
    """The poisoned call and one with finite padding everywhere agree exactly, not only within the error bound."""
    case = make_case(kind, mode, device, v_dim=48, page_size=8, sinks=True, window_left=11)
    clean = {name: torch.nan_to_num(case.arguments[name], nan=1.0) for name in ("q", "k_cache", "v_cache", "kv_cache")
             if name in case.arguments}  # fmt: skip
    table = case.arguments["block_tables"]
    pages = (case.arguments["k_cache" if kind == "mha" else "kv_cache"]).shape[0]
    outside = (table < 0) | (table >= pages)
    assert outside.any()
    assert case.arguments["q"].isnan().any() or mode == "draft_chain"
    assert torch.equal(case.run(), case.run(**clean, block_tables=torch.where(outside, 0, table)))


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["same", "fp8"])
@pytest.mark.parametrize(("mode", "window_left"), UNSEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_no_query_sees(kind, mode, window_left, kv_dtype, device):
    wanted = {"page_size": 4, "v_dim": 48, "lens": [0, 3, 30, 61], "q_lens": [0, 1, 3, 17]}
    case = make_case(kind, mode, device, window_left=window_left, kv_dtype=kv_dtype, **wanted)
    assert poison_unseen(case) > 0
    check(case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_windows_that_hide_nothing(kind, mode, device):
    case = make_case(kind, mode, device, v_dim=48)
    for window_left in (2**31 - 1, 2**31 - 2, 2**40):
        assert torch.equal(case.run(window_left=window_left), case.run(window_left=-1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_for_other_kernels_are_not_read(kind, mode, device):
    """The reference declares `reads=()`: wrong CSR indices and host lengths must not matter, or passes could not drop them."""
    case = make_case(kind, mode, device, v_dim=48, lens=[3, 17], q_lens=[0, 4])
    requests = case.arguments["seq_lens"].shape[0]
    garbage = torch.full((requests + 1,), -5, dtype=torch.int32, device=device)
    lens_cpu = torch.full((requests,), 2**30)
    check(case, case.run(kv_indptr=garbage, kv_indices=garbage.long(), seq_lens_cpu=lens_cpu))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_attend(kind, mode, device):
    """An empty batch, a table without pages, and ragged queries that are all padding."""
    case = make_case(kind, mode, device, v_dim=48, lens=[4, 9])
    a = case.arguments
    requests = a["seq_lens"].shape[0]
    first = {name: a[name][:0] for name in ("q", "block_tables", "seq_lens", "tree_mask") if name in a and a[name] is not None}
    ragged = mode == "extend"
    out = case.run(**first, **({"q_indptr": a["q_indptr"][:1]} if ragged else {}))
    assert out.shape == (*first["q"].shape[:-1], 48)
    no_keys = {"seq_lens": torch.zeros_like(a["seq_lens"]), "block_tables": a["block_tables"][:, :0]}
    out = case.run(**no_keys)
    assert out.shape[:-1] == a["q"].shape[:-1]
    assert torch.equal(out, torch.zeros_like(out))
    if ragged:
        out = case.run(q_indptr=torch.zeros(requests + 1, dtype=torch.int32, device=device))
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_cases(data, device):
    """Everything at once: hypothesis picks the step, shapes, dtype, features and lengths, and shrinks what fails."""
    kind, mode = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(MODES))
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    head_dim = data.draw(st.integers(2, 40))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    lens = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    check(
        make_case(
            kind, mode, device,
            lens=lens,
            q_lens=[data.draw(st.integers(0, length + 2)) for length in lens],
            slack=data.draw(st.integers(0, 3)),
            page_size=data.draw(st.integers(1, 24)),
            heads=kv_heads * data.draw(st.sampled_from([1, 2, 5])),
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=data.draw(st.integers(1, head_dim if kind == "mla" else 40)),
            dtype=dtype,
            kv_dtype=data.draw(st.sampled_from([dtype, FP8])),
            layout=data.draw(st.sampled_from(["separate", "layers", "interleaved"])),
            window_left=data.draw(st.sampled_from([-1, 0, 1, 3, 10])),
            sinks=data.draw(st.booleans()),
            softcap=data.draw(st.sampled_from([0.0, 1.5, 20.0])),
            width=data.draw(st.integers(1, 4)),
            draft_steps=data.draw(st.integers(1, 5)),
            num_nodes=data.draw(st.integers(1, 20)),
            seed=data.draw(st.integers(0, 1000)),
        )
    )  # fmt: skip
