"""The batch-invariant attention kernels in Triton's interpreter: right within float32's error, and equal to the last bit
however a call is made. `tests/gpu/test_deterministic.py` asks the same of the tensor cores, in bfloat16 and float16."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
from spec_ops.backends.triton.attention.deterministic import launcher as steps
from spec_ops.backends.triton.attention.tuning import Config
from spec_ops.backends.triton.runtime.launch import recorded
from tests.helpers.pairs import pairwise
from tests.ops.test_attention import FP8, KINDS, UNSEEN, Case, check, make_case, poison_unseen, spread

# (multiprocessors, bytes for partial results, tma): requests split and whole, side by side and all; tables read by descriptors
# and by pointers.
WAYS = {
    "whole": (1, 1 << 20, True),
    "mixed": (3, 1 << 20, True),
    "split": (12, 1 << 20, True),
    "split, pointers": (12, 1 << 20, False),
    "room for some": (12, 6000, False),
    "no room": (12, 0, True),
}
MODES = ("draft_chain", "draft_tree", "verify_chain", "verify_tree", "extend")  # the others are the same to a kernel
CHUNK = 32


def rotated(*seen: Any) -> str:
    return list(WAYS)[sum(map(ord, str(seen))) % len(WAYS)]


def run(case: Case, way: str = "split", block_m: int = 16, **changes: Any) -> torch.Tensor:
    """The launch function with the arguments that the op would hand it, chunks of 32 keys in blocks of 16."""
    ragged = changes.get("q", case.arguments["q"]).dim() == 3
    step = "extend" if ragged else "target_verify" if case.step == "extend" else case.step
    sms, room, tma = WAYS[way]
    config = Config(block_m, 16, num_warps=4, num_stages=2, programs=1, tma=tma, ordered="pairs")
    with (
        mock.patch.object(steps, "num_sms", return_value=sms),
        mock.patch.object(steps, "CHUNK", CHUNK),
        mock.patch.object(steps, "PARTIAL_BYTES", room),
    ):
        return steps.attention(dataclasses.replace(case, step=step).call(**changes), config)


def made(kind: str, mode: str, **wanted: Any) -> Case:
    widths = {"head_dim": 32, "v_dim": 32} if kind == "mha" else {"head_dim": 48, "v_dim": 32}
    shape = {"heads": 2, "kv_heads": 1, "num_nodes": 6, "lens": [0, 1, 32, 33, 69], "q_lens": [0, 1, 32, 3, 20]}
    return make_case(kind, mode, "cpu", **{**shape, **widths, **wanted})


def alone(case: Case, b: int, **changes: Any) -> dict[str, Any]:
    """Request `b` as a batch of its own, over the same cache."""
    per_request = {"q", "block_tables", "seq_lens", "tree_mask"} & {n for n, x in case.arguments.items() if x is not None}
    return {n: case.arguments[n][b : b + 1] for n in per_request} | changes


@pairwise(kind=KINDS, mode=MODES, way=WAYS)
def test_results(kind, mode, way):
    """Against dense float64; caches, tables and queries are poisoned where nobody may look."""
    case = made(kind, mode, page_size=16)
    check(case, run(case, way))


@pairwise(kind=KINDS, mode=MODES, options=[(True, 0.0, -1), (False, 2.0, 20), (True, 30.0, 0), (True, 0.0, 50)])
def test_results_with_every_option(kind, mode, options):
    sinks, softcap, window_left = options
    case = made(kind, mode, sinks=sinks, softcap=softcap, window_left=window_left, page_size=32)
    check(case, run(case, rotated(kind, mode, window_left)))


@pairwise(kind=KINDS, mode=["verify_tree", "extend"], page_size=[1, 24, 128])
def test_results_on_fp8_and_other_pages(kind, mode, page_size):
    case = made(kind, mode, page_size=page_size, kv_dtype=FP8)
    check(case, run(case, rotated(page_size)))


@pytest.mark.parametrize(("mode", "window_left"), UNSEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_no_query_sees(kind, mode, window_left):
    case = made(kind, mode, window_left=window_left, lens=[0, 3, 30, 150], q_lens=[0, 1, 3, 40], page_size=64)
    assert poison_unseen(case) > 0
    check(case, run(case, rotated(kind, mode, window_left)))


@pytest.mark.parametrize("mode", ["verify_chain", "verify_tree", "extend"])
def test_windows_that_hide_nothing(mode):
    case = made("mha", mode, lens=[0, 3, 30], q_lens=[2, 9, 3])
    check(case, run(case, window_left=2**31 - 1))


# What a model of that head size gets: chunks and tiles as they are.
@pytest.mark.parametrize("mode", ["verify_chain", "verify_tree", "extend"])
@pytest.mark.parametrize(
    ("kind", "widths", "block_m"), [("mha", (64, 64), 32), ("mha", (192, 128), 16), ("mla", (576, 512), 16)]
)
def test_the_tiles_of_float32(kind, widths, block_m, mode):
    shape = {"head_dim": widths[0], "v_dim": widths[1], "lens": [0, 33, 520], "q_lens": [0, 1, 5], "num_nodes": 5}
    case = make_case(kind, mode, "cpu", sinks=True, page_size=24, **shape)
    with recorded() as launches:
        steps.attention(case.call())
    assert {launch.arguments["BLOCK_M"] for launch in launches if "BLOCK_M" in launch.arguments} == {block_m}
    check(case, steps.attention(case.call()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`torch.equal` takes zeros of both signs for equal."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


OPTIONS = [{}, {"window_left": 37}, {"window_left": 3, "sinks": True}, {"softcap": 5.0, "sinks": True}]


@pairwise(kind=KINDS, mode=["draft_chain", "verify_chain", "verify_tree"], options=OPTIONS)
def test_other_requests_change_nothing(products_by_rows, kind, mode, options):
    """A request alone, in the batch, in the reversed batch and beside copies of itself; split and whole."""
    case = made(kind, mode, **options)
    batch = run(case, "mixed")
    reverse = {
        n: x.flip(0) for n, x in case.arguments.items() if n in ("q", "block_tables", "seq_lens", "tree_mask") and x is not None
    }
    assert same_bits(run(case, "split", **reverse).flip(0), batch)
    for b, way in ((1, "split"), (4, "split"), (4, "whole")):
        given = alone(case, b)
        assert same_bits(run(case, way, **given), batch[b : b + 1])
    copies = {n: x.expand(3, *x.shape[1:]) for n, x in given.items()}
    assert same_bits(run(case, "room for some", **copies), batch[b : b + 1].expand(3, *batch.shape[1:]))


# A kernel knows of windows, sinks and caps; of the attention kind, how it loads keys.
@pytest.mark.parametrize(("kind", "options"), [(KINDS[i % 2], options) for i, options in enumerate(OPTIONS)], ids=str)
def test_number_of_queries_changes_nothing(products_by_rows, kind, options):
    """Queries of a chain of 24, verified together, as a ragged extend, in parts and alone."""
    heads = {"heads": 6, "kv_heads": 2} if kind == "mha" else {"heads": 3}
    case = made(kind, "verify_chain", lens=[75, 12], page_size=16, **heads, **options)
    a, bs, most = case.arguments, 2, 24
    q = torch.randn(bs, most, *a["q"].shape[2:], generator=torch.Generator().manual_seed(0))
    verified = run(case, "mixed", q=q)
    indptr = torch.arange(bs + 1, dtype=torch.int32) * most
    ragged = {"q": q.flatten(0, 1), "q_indptr": indptr, "max_q_len": most}
    assert same_bits(run(case, "whole", **ragged).view_as(verified), verified)
    for first, last in ((0, 1), (7, 11), (9, 22), (23, 24)):
        part = {"q": q[:, first:last], "seq_lens": (a["seq_lens"] - (most - last)).clamp(min=0)}
        assert same_bits(run(case, "split" if first else "whole", **part), verified[:, first:last])


@pytest.mark.parametrize(("kind", "options"), [(KINDS[i % 2 - 1], options) for i, options in enumerate(OPTIONS)], ids=str)
def test_other_nodes_of_a_tree_change_nothing(products_by_rows, kind, options):
    """Some nodes of a tree as queries; and a chain given as a tree, which is the same as a chain."""
    case = made(kind, "verify_tree", lens=[3, 60], num_nodes=20, **options)
    a = case.arguments
    everything = run(case, "mixed")
    for some in ([0], [19], [2, 11, 12, 17]):
        part = {"q": a["q"][:, some], "tree_mask": a["tree_mask"][:, some], "mask_len": 20}
        assert same_bits(run(case, "split", **part), everything[:, some])
    words = torch.tensor([[(1 << (i + 1)) - 1 for i in range(20)]] * len(case.q_lens))
    full = {"q": torch.nan_to_num(a["q"]), "seq_lens": a["seq_lens"].where(a["seq_lens"] > 1, 0)}
    chain = run(case, "split", **full, tree_mask=None, mask_len=None)
    assert same_bits(run(case, "mixed", **full, tree_mask=words, mask_len=20), chain)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_of_the_cache_changes_nothing(products_by_rows, kind):
    """The same keys on pages of 1, 24 and 64 tokens, by pointers and descriptors."""
    case = made(kind, "verify_chain", lens=[100, 61], page_size=64)
    expected = run(case, "split")
    names = ("k_cache", "v_cache") if kind == "mha" else ("kv_cache",)
    for page_size in (1, 24):
        pages = -(-128 // page_size)
        tables = torch.arange(2 * pages, dtype=torch.int32).flip(0).view(2, pages)
        moved = {}
        for name in names:
            cache = case.arguments[name]
            moved[name] = torch.full((2 * pages, page_size, *cache.shape[2:]), float("nan"))
            for b, length in enumerate(case.arguments["seq_lens"].tolist()):
                at = torch.arange(length)
                old = case.arguments["block_tables"][b, at // 64].long() * 64 + at % 64
                new = tables[b, at // page_size].long() * page_size + at % page_size
                moved[name].flatten(0, 1)[new] = cache.flatten(0, 1)[old]
        assert same_bits(run(case, "split", block_tables=tables, **moved), expected)


@pytest.mark.parametrize("mode", ["verify_tree", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_strides_past_2_31_elements(kind, mode):
    """Of pages, of a page's tokens and of KV heads; of requests, of queries and of heads: no bit changes. Numbers of 8 bits
    are read in pairs, so that twice as many are needed."""
    heads = {"heads": 6, "kv_heads": 3} if kind == "mha" else {"heads": 3}
    case = made(kind, mode, kv_dtype=FP8, lens=[3, 42], q_lens=[2, 9], **heads)
    expected, names = run(case), ("k_cache", "v_cache") if kind == "mha" else ("kv_cache",)
    for dim in range(len(names) + 1):
        assert torch.equal(run(case, **{name: spread(case.arguments[name], dim, 2**32) for name in names}), expected)
    case = case.but(q=case.arguments["q"].half())
    expected = run(case)
    reach = 2**32 if mode == "extend" else 2**31  # the last rows of a ragged call are padding
    for dim in range(case.arguments["q"].dim() - 1):
        assert torch.equal(run(case, q=spread(case.arguments["q"], dim, reach)), expected)


def test_the_sign_of_a_zero(products_by_rows):
    """Sums that underflow from below, twice in one chunk: -0 in one program, +0 where chunks are merged from memory."""
    k, v = torch.zeros(4, 16, 1, 16), torch.full((4, 16, 1, 16), -1.0)
    k[3], v[3] = 10.0, -0.0
    a = {"q": torch.full((1, 1, 1, 16), 10.0), "k_cache": k, "v_cache": v}
    a |= {"block_tables": torch.arange(4, dtype=torch.int32)[None]}
    a |= {"seq_lens": torch.tensor([64], dtype=torch.int32), "window_left": -1, "sinks": None, "softcap": 0.0}
    case = Case("mha", "draft_decode", a | {"k_scale": None, "v_scale": None}, [1], None, [])
    for way in WAYS:
        assert same_bits(run(case, way), torch.zeros(1, 1, 1, 16))


@pytest.mark.parametrize("mode", ["verify_tree", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_attend(kind, mode):
    """Tables without pages, an empty batch, ragged queries that are all padding."""
    case = made(kind, mode, lens=[4, 9], q_lens=[1, 2])
    a = case.arguments
    out = run(case, seq_lens=torch.zeros_like(a["seq_lens"]), block_tables=a["block_tables"][:, :0])
    assert torch.equal(out, torch.zeros_like(out))
    first = {name: a[name][:0] for name in ("q", "block_tables", "seq_lens", "tree_mask") if a.get(name) is not None}
    ragged = {"q_indptr": a["q_indptr"][:1]} if mode == "extend" else {}
    assert run(case, **first, **ragged).shape == (*first["q"].shape[:-1], 32)
    if mode == "extend":
        out = run(case, q_indptr=torch.zeros_like(a["q_indptr"]))
        assert torch.equal(out, torch.zeros_like(out))
