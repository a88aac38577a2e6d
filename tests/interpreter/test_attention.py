"""The attention kernels in Triton's interpreter, in float32, against dense float64: what `tests/ops/test_attention.py` asks of
the reference, over the ways of cutting the work that a GPU chooses from."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
import triton.language as tl  # noqa: E402

from spec_ops.backends.triton.attention import launcher as steps  # noqa: E402
from spec_ops.backends.triton.attention import mask as visibility  # noqa: E402
from spec_ops.backends.triton.attention import schedule  # noqa: E402
from spec_ops.backends.triton.attention.deterministic import launcher as deterministic  # noqa: E402
from spec_ops.backends.triton.attention.operands import kernel_keys  # noqa: E402
from spec_ops.backends.triton.attention.tile_boxes import box_pages  # noqa: E402
from spec_ops.backends.triton.attention.tuning import Config  # noqa: E402
from tests.helpers.pairs import pairwise  # noqa: E402
from tests.ops.test_attention import FP8, KINDS, UNSEEN, Case, check, differs, make_case, poison_unseen, spread  # noqa: E402

# (block_m, block_n, multiprocessors, min_blocks, tma, clear). With one program on each of so many multiprocessors: one range of
# keys or many, ranges of several blocks, tiles of fewer rows than a request has and of more. A program takes 25 ms.
CUTS = {
    "one range": (16, 16, 1, 1, True, False),
    "few ranges": (16, 16, 3, 1, True, True),
    "many ranges": (16, 16, 9, 1, True, True),
    "pointers": (16, 16, 5, 1, False, True),
    "short ranges joined": (32, 16, 12, 3, True, True),
    "wide blocks": (64, 64, 4, 1, True, False),
    "blocks wider than pages": (32, 32, 7, 1, False, False),
}
Cut = str | tuple[int, int, int, int, bool, bool]
KERNEL_MODES = ("draft_chain", "draft_tree", "verify_chain", "verify_tree", "extend")  # the others are the same to a kernel


def rotated(*seen: Any) -> str:
    """One of `CUTS`, by the test's parameters: all of them come up, without a product of everything with everything."""
    return list(CUTS)[sum(map(ord, str(seen))) % len(CUTS)]


def run(case: Case, cut: Cut, **changes: Any) -> torch.Tensor:
    """The kernel's launch function with the arguments that the op would hand it."""
    block_m, block_n, sms, min_blocks, tma, clear = CUTS[cut] if isinstance(cut, str) else cut
    clear &= case.kind == "mha"  # as `tuning.fitted` has it
    config = Config(block_m, block_n, num_warps=4, num_stages=2, programs=1, min_blocks=min_blocks, tma=tma, clear=clear)
    with mock.patch.object(steps, "num_sms", return_value=sms):
        return steps.attention(case.call(**changes), config)


def made(kind: str, mode: str, **wanted: Any) -> Case:
    """A case of widths that the kernels take: values of MLA are the first power of two of a row."""
    widths = {"head_dim": 32, "v_dim": 32} if kind == "mha" else {"head_dim": 48, "v_dim": 32}
    return make_case(kind, mode, "cpu", **{"heads": 2, "kv_heads": 1, "num_nodes": 6, **widths, **wanted})


@pairwise(kind=KINDS, mode=KERNEL_MODES, page_size=[1, 3, 16, 32, 64, 128])
def test_page_sizes_and_lengths_around_page_boundaries(kind, mode, page_size):
    case = made(kind, mode, page_size=page_size, seed=page_size)
    check(case, run(case, rotated(kind, mode, page_size) if page_size < 64 else "wide blocks"))


@pairwise(kind=KINDS, mode=["draft_chain", "verify_tree", "extend"], cut=CUTS)
def test_every_cut(kind, mode, cut):
    """Lengths at the edges of blocks of 16, 32 and 64 keys, on pages that tensor descriptors can read."""
    case = made(kind, mode, page_size=64, lens=[16, 26, 69], heads=4, kv_heads=2, q_lens=[0, 9, 5])
    check(case, run(case, cut))


@triton.jit
def _box_pages(table, out, key, last_key, seq_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    pages = box_pages(table, key, last_key, seq_len, PAGE, BLOCK_N)
    for i in tl.static_range(BLOCK_N // PAGE):
        tl.store(out + i, pages[i])


@pytest.mark.parametrize(
    ("key", "last_key", "seq_len", "expected"),
    [(0, 128, 100, [9, 8, 7, 6]), (64, 128, 100, [5, 4, 3, 0]), (64, 128, 97, [5, 4, 3, 0]), (64, 128, 96, [5, 4, 0, 0]),
     (64, 64, 100, [0] * 4), (128, 128, 300, [0] * 4)],
)  # fmt: skip
def test_no_page_from_the_end_on_is_looked_up(key, last_key, seq_len, expected):
    """A table may be no wider than its longest request."""
    table, out = torch.arange(9, 0, -1, dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32)
    _box_pages[(1,)](table, out, key, last_key, seq_len, 16, 64)
    assert out.tolist() == expected


@pytest.mark.parametrize("mode", ["draft_chain", "draft_tree", "verify_chain", "verify_tree"])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("window", [-1, 20])
def test_boxes(mode, page_size, window):
    """Blocks of 64 keys in two or four pages, each read through a descriptor."""
    wanted = {"heads": 4, "kv_heads": 2, "page_size": page_size, "window_left": window}
    config = Config(16, 64, num_warps=1, num_stages=2, programs=1, boxes=True)
    for sms, lens in ((1, [0, 26, 69, 60]), (3, [124, 1, 64]), (9, [33, 16, 129])):
        stored = {"kv_dtype": torch.bfloat16} if sms == 9 else {}
        case = made("mha", mode, lens=lens, seed=sms, sinks=sms == 3, softcap=3.0 if sms == 1 else 0.0, **stored, **wanted)
        poison_unseen(case)
        with mock.patch.object(steps, "num_sms", return_value=sms):
            check(case, steps.attention(case.call(), config))


@pytest.mark.parametrize(
    "wanted", [{"head_dim": 96, "v_dim": 64}, {"kv_dtype": FP8}, {"page_size": 8}, {"page_size": 48}], ids=str
)
def test_what_boxes_do_not_serve(wanted):
    """Keys in two parts, pairs of e4m3, and pages that are no whole part of a block are read by pointers."""
    case = made("mha", "verify_tree", **{"heads": 4, "kv_heads": 2, "page_size": 16, "lens": [26, 69], **wanted})
    check(case, steps.attention(case.call(), Config(16, 64, num_warps=1, num_stages=2, programs=1, boxes=True)))


@pytest.mark.parametrize(
    ("head_dim", "v_dim"), [(16, 16), (32, 64), (48, 48), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("mode", ["verify_tree", "extend"])
def test_mha_head_dims(mode, head_dim, v_dim):
    case = made("mha", mode, head_dim=head_dim, v_dim=v_dim, kv_heads=2, lens=[3, 40], q_lens=[3, 5])
    for cut in ("few ranges", "pointers"):
        check(case, run(case, cut))


@pytest.mark.parametrize(("head_dim", "v_dim"), [(24, 16), (80, 64), (64, 64), (320, 256), (576, 512)], ids=str)
@pytest.mark.parametrize("mode", ["verify_tree", "extend"])
def test_mla_latent_widths(mode, head_dim, v_dim):
    case = made("mla", mode, head_dim=head_dim, v_dim=v_dim, lens=[3, 40], q_lens=[3, 5])
    for cut in ("few ranges", "pointers"):
        check(case, run(case, cut))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (6, 2), (5, 1), (40, 1)])
@pytest.mark.parametrize("mode", ["draft_tree", "draft_extend_chain", "extend"])
def test_grouped_heads(mode, heads, kv_heads):
    """Groups that do not divide a tile's rows, and one that is larger than a tile."""
    case = made("mha", mode, heads=heads, kv_heads=kv_heads, lens=[7, 20], q_lens=[7, 2])
    check(case, run(case, (16, 16, 24, 1, True, heads % 2 == 1)))


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_caches(kind, mode):
    case = made(kind, mode, kv_dtype=FP8, lens=[0, 8, 21])
    for cut in ("few ranges", "pointers"):
        check(case, run(case, cut))


@pairwise(
    as_pairs=[True, False],
    mode=["draft_chain", "verify_tree", "extend"],
    widths=[("mha", 64, 64), ("mha", 112, 48), ("mla", 96, 64)],
)
def test_fp8_caches_of_even_and_odd_rows(widths, mode, as_pairs):
    """Rows that begin at even bytes are read two numbers at a time by small tiles. Widths of 112 and 48 are padded."""
    kind, head_dim, v_dim = widths
    heads = {"heads": 4, "kv_heads": 2} if kind == "mha" else {}
    wanted = {"lens": [0, 8, 21, 70], "q_lens": [0, 2, 5, 9], "page_size": 32, "head_dim": head_dim, "v_dim": v_dim, **heads}
    case = made(kind, mode, kv_dtype=FP8, **wanted)
    names = [name for name in ("k_cache", "v_cache", "kv_cache") if name in case.arguments]
    if not as_pairs:
        for name in names:
            cache = case.arguments[name]
            wide = cache.new_zeros(*cache.shape[:-1], cache.shape[-1] + 1)
            wide[..., 1:] = cache
            case.arguments[name] = wide[..., 1:]
    caches = [case.arguments[name] for name in (names[0], names[-1])]
    keys = kernel_keys(case.arguments["q"], *caches, v_dim, kind == "mla", Config(16, 16, 4, 2, 1, tma=False))
    assert keys.tensors[0].dtype == keys.tensors[2].dtype == (torch.int16 if as_pairs else FP8)
    for cut in ("few ranges" if as_pairs else "many ranges", "pointers", "wide blocks"):
        check(case, run(case, cut))


@pairwise(kind=KINDS, mode=["draft_tree", "verify_chain", "verify_tree", "extend"], window_left=[0, 1, 5, 17])
def test_windows_follow_depth(kind, mode, window_left):
    # With the 9 drafts of a `draft_tree`, first keys of the four windows lie just before the edge of a block of 16.
    case = made(kind, mode, window_left=window_left, page_size=16, lens=[0, 28, 32, 44], num_nodes=8)
    check(case, run(case, "pointers" if mode == "draft_tree" else rotated(kind, mode, window_left)))
    if case.trees is not None and window_left > 0:
        assert differs(case, case, window_by_slot=True), "this tree cannot tell a window over depth from one over slots"


@pytest.mark.parametrize(("sinks", "softcap"), [(True, 0.0), (False, 2.0), (True, 30.0)])
@pytest.mark.parametrize("mode", ["draft_tree", "verify_chain", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_and_soft_cap(kind, mode, sinks, softcap):
    case = made(kind, mode, sinks=sinks, softcap=softcap, window_left=9, page_size=16, lens=[0, 1, 40])
    check(case, run(case, rotated(kind, mode, sinks, softcap)))


@pytest.mark.parametrize("mode", ["verify_chain", "extend"])
@pytest.mark.parametrize("cut", ["one range", "many ranges"])
def test_extreme_sinks(mode, cut):
    """A sink far above every logit takes all the weight, one of -inf none, also where a query sees nothing."""
    case = made("mha", mode, lens=[0, 2, 40, 0], q_lens=[1, 4, 5, 0], page_size=16)
    case.arguments["sinks"] = torch.tensor([1e4, float("-inf"), -1e4, 0.0])
    check(case, run(case, cut))


@pairwise(kind=KINDS, mode=["verify_tree", "extend"], layout=["layers", "interleaved", "heads first", "one head"])
def test_strided_caches(kind, mode, layout):
    case = made(
        kind, mode, layout="separate" if "head" in layout else layout, lens=[4, 19, 33], page_size=16,
        head_dim=40 if kind == "mha" else 48, kv_heads=1 if layout == "one head" else 2,
    )  # fmt: skip
    if "head" in layout and kind == "mha":  # values as [pages, heads, page_size, dim] in memory
        case = case.but(v_cache=case.arguments["v_cache"].transpose(1, 2).contiguous().transpose(1, 2))
    check(case, run(case, "many ranges"))


@pytest.mark.parametrize("mode", ["verify_tree", "draft_extend_chain", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_strided_queries_tables_and_lengths(kind, mode):
    """Views into wider tensors, whose other elements are poison, with rows and last dimensions of any stride."""

    def spread(tensor: torch.Tensor, last: int) -> torch.Tensor:
        poison = float("nan") if tensor.is_floating_point() else 2**31 - 1
        wide = torch.full((2 * tensor.shape[0], *tensor.shape[1:-1], last * tensor.shape[-1] + 3), poison, dtype=tensor.dtype)
        view = wide[1::2, ..., : last * tensor.shape[-1] : last]
        view.copy_(tensor)
        return view

    case = made(kind, mode, lens=[0, 4, 19, 33], page_size=16, sinks=True)
    expected = run(case, "few ranges")
    check(case, expected)
    for last in (1, 2):
        views = {name: spread(case.arguments[name], last) for name in ("q", "block_tables", "tree_mask")
                 if case.arguments.get(name) is not None}  # fmt: skip
        for name in ("seq_lens", "q_indptr"):
            if name in case.arguments:
                views[name] = spread(case.arguments[name][:, None], 1)[:, 0]
        assert torch.equal(run(case, "few ranges", **views), expected)


@pairwise(kind=KINDS, mode=["verify_tree", "draft_tree"], window_left=[-1, 4])
def test_mask_of_full_width(kind, mode, window_left):
    """64 draft positions: bit 63 is the word's sign. As a verified tree, and as step 16 of a draft of width 4."""
    case = made(
        kind, mode, lens=[0, 40], num_nodes=64, width=4, draft_steps=16, window_left=window_left
    )  # fmt: skip
    assert (case.arguments["tree_mask"][:2] < 0).any()
    check(case, run(case, "wide blocks"))


@pytest.mark.parametrize("window_left", [-1, 2])
@pytest.mark.parametrize("mode", ["verify_tree", "draft_tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_past_the_draft_positions_mean_nothing(kind, mode, window_left):
    """A window counts the bits of a word: those from `mask_len` on are no ancestors."""
    case = made(kind, mode, window_left=window_left, lens=[0, 5, 40])
    words = case.arguments["tree_mask"]
    for cut in ("few ranges", "pointers"):
        expected = run(case, cut)
        check(case, expected)
        assert torch.equal(run(case, cut, tree_mask=words | (-1 << case.arguments["mask_len"])), expected)


@pairwise(kind=KINDS, q_len=[1, 2, 3, 5, 7, 8, 64], tma=[True, False])
def test_chains_of_every_length(kind, q_len, tma):
    """Also longer than what is cached: the first queries then see nothing."""
    case = made(kind, "verify_tree", num_nodes=q_len, lens=[0, 1, 30], page_size=16)
    lens = [q_len, q_len + 1, q_len + 30, max(q_len - 3, 0), 1]
    case = case.but(tree_mask=None, mask_len=None, seq_lens=torch.tensor(lens, dtype=torch.int32))
    case.trees = None
    case.arguments["q"] = torch.nan_to_num(case.arguments["q"])
    tables = case.arguments["block_tables"]
    tables[3:] = tables[2]  # the padded requests have keys here: those of another
    check(case, run(case, (64, 16, 4, 1, tma, False)))


@pairwise(
    kind=KINDS,
    live=["0", "1", "01", "10", "010", "101", "0000", "0011010", "10000001", "001111100"],
    cut=["one range", "few ranges"],
)
def test_empty_requests_anywhere(kind, live, cut):
    """Requests without keys before, between and after others, and a batch of nothing else; 1 to 9 requests."""
    lens = [(15 + 9 * b) * int(c) for b, c in enumerate(live)]
    case = made(kind, "verify_chain", lens=lens, sinks=kind == "mla")
    check(case, run(case, cut))


@pytest.mark.parametrize(
    ("kind", "head_dim", "v_dim", "ranges"),
    [
        ("mha", 32, 32, 4),
        ("mha", 32, 32, 5),
        ("mha", 32, 32, 18),
        ("mha", 32, 32, 70),
        ("mha", 256, 256, 17),
        ("mla", 576, 512, 34),
    ],
    ids=str,
)
def test_combining_any_number_of_splits(kind, head_dim, v_dim, ranges):
    """One long request in many pieces beside one that ends inside a range; 3 ways of combining them, up to 4, 16 and more."""
    lens = [16 * ranges + 3, 20]
    case = made(kind, "verify_chain", lens=lens, head_dim=head_dim, v_dim=v_dim, sinks=ranges % 2 == 1)
    check(case, run(case, (16, 16, ranges, 1, True, True)))


@pytest.mark.parametrize("min_blocks", [1, 2, 100])
@pytest.mark.parametrize("ranges", [2, 5, 24])
def test_ranges_of_any_size(ranges, min_blocks):
    """More ranges than blocks and fewer; ranges that begin and end inside requests, and hold several whole ones."""
    case = made("mha", "draft_chain", lens=[33, 5, 16, 90, 1, 48])
    check(case, run(case, (16, 16, ranges, min_blocks, True, ranges == 5)))


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_attend(kind, mode):
    """Tables without pages, an empty batch, ragged queries that are all padding."""
    case = made(kind, mode, lens=[4, 9])
    a = case.arguments
    no_keys = {"seq_lens": torch.zeros_like(a["seq_lens"]), "block_tables": a["block_tables"][:, :0]}
    for cut in ("few ranges", "pointers"):
        out = run(case, cut, **no_keys)
        assert torch.equal(out, torch.zeros_like(out))
        if mode == "extend":
            out = run(case, cut, q_indptr=torch.zeros_like(a["q_indptr"]))
            assert torch.equal(out, torch.zeros_like(out))
    first = {name: a[name][:0] for name in ("q", "block_tables", "seq_lens", "tree_mask") if a.get(name) is not None}
    ragged = {"q_indptr": a["q_indptr"][:1]} if mode == "extend" else {}
    assert run(case, "few ranges", **first, **ragged).shape == (*first["q"].shape[:-1], 32)


@pytest.mark.parametrize("padding", [0, 1, 16, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_padding_of_any_length(kind, padding):
    """More padded rows than the programs for one request's queries cover in one iteration; none at all."""
    case = made(kind, "extend", lens=[9, 33, 0], q_lens=[3, 9, 2], slack=5)
    q = case.arguments["q"][:14]
    case = case.but(q=torch.cat([q, q.new_full((padding, *q.shape[1:]), float("nan"))]))
    check(case, run(case, "few ranges"))


@pairwise(kind=KINDS, masked=UNSEEN, cut=["few ranges", "pointers", "wide blocks", "blocks wider than pages"])
def test_keys_that_no_query_sees(kind, masked, cut):
    mode, window_left = masked
    for page_size in (1, 8) if cut == "blocks wider than pages" else (64,):  # of 1: pages of dead branches are anywhere
        case = made(kind, mode, window_left=window_left, page_size=page_size, lens=[0, 3, 30, 150], q_lens=[0, 1, 3, 40])
        assert poison_unseen(case) > 0
        check(case, run(case, cut))


@pytest.mark.parametrize("cut", ["few ranges", "pointers"])
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_fp8_that_no_query_sees(kind, cut):
    for mode, window_left in (("verify_chain", 9), ("draft_tree", 9)):
        case = made(kind, mode, window_left=window_left, kv_dtype=FP8, page_size=64, lens=[3, 70], head_dim=96, v_dim=64)
        assert poison_unseen(case) > 0
        check(case, run(case, cut))


@pytest.mark.parametrize("mode", ["verify_chain", "verify_tree", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_that_hide_nothing(kind, mode):
    """Among them lengths that are subtracted in int32, of requests that have fewer keys than queries."""
    case = made(kind, mode, lens=[0, 3, 30], q_lens=[2, 9, 3])
    for window_left in (2**31 - 1, 2**31 - 2, 200):
        check(case, run(case, "few ranges", window_left=window_left))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_of_16_bits_are_read_as_they_are(dtype):
    """Engines hold them in the model's dtype; numbers that both dtypes hold give the same bits."""
    case = made("mha", "verify_chain", heads=4, sinks=True, lens=[3, 40])
    case.arguments["sinks"] = case.arguments["sinks"].to(dtype).float()
    assert torch.equal(run(case, "few ranges", sinks=case.arguments["sinks"].to(dtype)), run(case, "few ranges"))


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("mode", ["verify_chain", "extend"])
@pytest.mark.parametrize("kernel", [steps.attention, deterministic.attention], ids=["split", "deterministic"])
def test_writes_into_the_callers_memory(kind, mode, kernel):
    """Every number of it, padding too."""
    case = made(kind, mode, lens=[0, 3, 40])
    call = case.call()
    expected = kernel(call)
    call.out = torch.full_like(expected, torch.nan)
    assert kernel(call) is call.out
    assert torch.equal(call.out, expected)


def test_strided_sinks():
    case = made("mha", "verify_chain", heads=4, sinks=True, lens=[3, 40])
    strided = case.arguments["sinks"].repeat_interleave(3)[::3]
    check(case, run(case, "few ranges", sinks=strided))


@pytest.mark.parametrize("mode", ["verify_tree", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_strides_past_2_31_elements(kind, mode):
    """Of pages, of a page's tokens and of KV heads; of requests, of queries and of heads. Memory that nobody touches costs
    nothing; an address that wraps lies outside of it."""
    heads = {"heads": 6, "kv_heads": 3} if kind == "mha" else {"heads": 3}
    case = made(kind, mode, kv_dtype=FP8, lens=[3, 40], q_lens=[2, 9], **heads)
    names = ("k_cache", "v_cache") if kind == "mha" else ("kv_cache",)
    for dim in range(len(names) + 1):
        check(case, run(case, "wide blocks", **{name: spread(case.arguments[name], dim) for name in names}))
    case = case.but(q=case.arguments["q"].half())
    expected = run(case, "wide blocks")
    reach = 2**32 if mode == "extend" else 2**31  # the last rows of a ragged call are padding
    for dim in range(case.arguments["q"].dim() - 1):
        assert torch.equal(run(case, "wide blocks", q=spread(case.arguments["q"], dim, reach)), expected)


def test_more_tiles_than_counters(monkeypatch):
    """A range has a counter, not a tile: 12 tiles, of which two are in pieces."""
    asked = []
    monkeypatch.setattr(
        steps, "counted", lambda device, count, kernel: asked.append(count) or torch.zeros(6, dtype=torch.int32)
    )
    case = made("mha", "draft_chain", lens=[5, 90, 3, 0, 120, 7], heads=2, kv_heads=2)
    check(case, run(case, (16, 16, 6, 1, True, True)))
    assert asked == [6]


def test_counters_open_a_new_generation(monkeypatch):
    """Counters are never cleared: each launch leaves their low half at zero and adds one to the high half of those it used."""
    kept = torch.full((64,), -2 << 16, dtype=torch.int32)  # the high half goes through all ones
    monkeypatch.setattr(steps, "counted", lambda device, count, kernel: kept[:count])
    split = made("mha", "draft_chain", lens=[120, 5, 90], kv_heads=2)
    whole = made("mha", "draft_chain", lens=[5, 5], kv_heads=2, seed=1)
    for launch in range(1, 4):
        check(split, run(split, (16, 16, 8, 1, True, True)))
        assert not (kept & 0xFFFF).any()
        assert (kept[[0, 1, 4, 5]] >> 16).tolist() == [launch - 2] * 4
        check(whole, run(whole, "one range"))
    assert (kept[[2, 3]] >> 16).tolist() == [-2, -2]  # a tile that one range holds counts nothing


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_cases(data):
    """Everything at once: hypothesis picks the step, shapes, features, lengths and the cut, and shrinks what fails."""
    kind, mode = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(KERNEL_MODES))
    kv_heads = data.draw(st.sampled_from([1, 1, 2]))
    lens = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=5))
    cut = (
        data.draw(st.sampled_from([16, 32])), data.draw(st.sampled_from([16, 32])), data.draw(st.integers(1, 9)),
        data.draw(st.sampled_from([1, 1, 2, 3])), data.draw(st.booleans()), data.draw(st.booleans()),
    )  # fmt: skip
    mla = data.draw(st.sampled_from([(24, 16), (48, 32), (32, 32)]))
    case = make_case(
        kind, mode, "cpu",
        lens=lens,
        q_lens=[data.draw(st.integers(0, length + 2)) for length in lens],
        slack=data.draw(st.integers(0, 3)),
        page_size=data.draw(st.sampled_from([1, 2, 16, 16, 24, 32, 64])),
        heads=kv_heads * data.draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        head_dim=mla[0] if kind == "mla" else data.draw(st.integers(16, 50)),
        v_dim=mla[1] if kind == "mla" else data.draw(st.integers(1, 40)),
        kv_dtype=data.draw(st.sampled_from([torch.float32, FP8])),
        layout=data.draw(st.sampled_from(["separate", "layers", "interleaved"])),
        window_left=data.draw(st.sampled_from([-1, 0, 1, 3, 10])),
        sinks=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([0.0, 1.5, 20.0])),
        width=data.draw(st.integers(1, 4)),
        draft_steps=data.draw(st.integers(1, 5)),
        num_nodes=data.draw(st.integers(1, 20)),
        seed=data.draw(st.integers(0, 1000)),
    )  # fmt: skip
    check(case, run(case, cut))


@triton.jit
def ranges_of_blocks(starts, owners, total, ranges, ends, length, SIZE: tl.constexpr):
    at = tl.load(ends + tl.arange(0, SIZE))
    for i in range(ranges + 1):
        tl.store(starts + i, schedule.range_start(i, total, ranges, at, length))
    for i in range(total):
        tl.store(owners + i, schedule.range_of(i, total, ranges, at, length))


@pytest.mark.parametrize(
    ("counts", "ranges"),
    [
        ((1,), 1),
        ((5,), 3),
        ((0, 9, 0), 9),
        ((20, 0, 1, 44), 7),
        ((17, 2, 14), 4),
        ((30, 3, 31, 2), 2),
        ((23, 25), 3),
        ((50, 14), 5),
    ],
    ids=str,
)
def test_every_block_has_one_range(counts, ranges):
    """Ranges are never empty, differ by few blocks, and `range_of` is where `range_start` puts a block."""
    total, ends = sum(counts), torch.tensor([*counts, 0, 0, 0, 0][:4]).cumsum(0).to(torch.int32)
    starts, owners = torch.zeros(ranges + 1, dtype=torch.int32), torch.zeros(total, dtype=torch.int32)
    ranges_of_blocks[(1,)](starts, owners, total, ranges, ends, 0, SIZE=4)
    edges = starts.tolist()
    assert (edges[0], edges[-1]) == (0, total)
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1 + 2 * min(total // ranges // 8, 4)
    assert owners.tolist() == [r for r, size in enumerate(sizes) for _ in range(size)]


@triton.jit
def length_of_ranges(counts, out, total, ranges, SIZE: tl.constexpr):
    length, needed = schedule.whole_ranges(tl.load(counts + tl.arange(0, SIZE)), total, ranges)
    tl.store(out, length)
    tl.store(out + 1 + tl.arange(0, SIZE), needed)


@pytest.mark.parametrize(
    ("counts", "ranges", "length", "needed"),
    [
        ((17,), 33, 1, [17]),
        ((17, 17, 17, 17), 16, 5, [4, 4, 4, 4]),  # 4.25 blocks each: 5, 5, 5 and 2
        ((128, 128), 33, 8, [16, 16]),
        ((9, 0, 9), 4, 5, [2, 0, 2]),
        ((10, 11), 4, 6, [2, 2]),
        ((21, 8), 5, 7, [3, 2]),  # equal shares would be 6, which takes 6 ranges
        ((33, 1), 4, 0, None),  # 10 blocks each instead of 9 would still take 5 ranges
        ((30, 30, 30), 2, 0, None),  # more requests than ranges
        ((0, 0), 3, 1, [0, 0]),
    ],
    ids=str,
)
def test_whole_ranges(counts, ranges, length, needed):
    """Every request takes whole ranges if that costs the longest range no more than a block."""
    out = torch.zeros(5, dtype=torch.int32)
    padded = torch.tensor([*counts, 0, 0, 0, 0][:4], dtype=torch.int32)
    length_of_ranges[(1,)](padded, out, sum(counts), ranges, SIZE=4)
    assert out[0] == length
    if length:
        assert out[1 : 1 + len(counts)].tolist() == needed
        assert sum(needed) <= ranges


@triton.jit
def count_bits(words, counts, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(counts + at, visibility.popcount(tl.load(words + at)))


def test_popcount_of_signed_words():
    words = torch.randint(-(2**63), 2**63 - 1, (64,), generator=torch.Generator().manual_seed(0))
    words[:4] = torch.tensor([0, -1, -(2**63), 2**63 - 1])
    counts = torch.zeros(64, dtype=torch.int32)
    count_bits[(1,)](words, counts, BLOCK=64)
    assert counts.tolist() == [(word & (2**64 - 1)).bit_count() for word in words.tolist()]
