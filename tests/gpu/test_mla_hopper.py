"""The Hopper MLA kernel on a GPU, called directly: every way of cutting and combining tiles, against float64."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from spec_ops.backends.triton.runtime import counters as workspace  # noqa: E402
from tests.gpu.test_attention import check_accuracy  # noqa: E402
from tests.helpers.attention_calls import BF16, DEVICE, FP16  # noqa: E402
from tests.ops.test_attention import Case, make_case, poison_unseen  # noqa: E402


@dataclasses.dataclass
class HopperCase(Case):
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, **changes: Any) -> torch.Tensor:
        from spec_ops.backends.triton.attention.hopper import mla as mla_hopper

        call = self.call(**changes)
        assert mla_hopper.supports(call)
        return mla_hopper.mla(call, **self.options)


def made(mode: str, options: dict[str, Any] | None = None, **wanted: Any) -> HopperCase:
    wanted = {"dtype": BF16, "head_dim": 576, "v_dim": 512, "page_size": 64, "heads": 16, **wanted}
    return HopperCase(**vars(make_case("mla", mode, DEVICE, **wanted)), options=options or {})


# Rows of a tile: 16, 128, 96 in two tiles, 80, 100, 1024. Each pair of mode and heads is a compilation of 15 seconds.
@pytest.mark.parametrize(
    ("mode", "heads"),
    [
        ("draft_chain", 16),
        ("draft_chain", 128),
        ("draft_tree", 32),
        ("verify_chain", 16),
        ("verify_chain", 20),
        ("verify_tree", 128),
    ],
)
def test_lengths_around_blocks(mode, heads):
    check_accuracy(made(mode, heads=heads, lens=[0, 1, 63, 64, 65, 0, 127, 129, 200]))


@pytest.mark.parametrize("wanted", [{"sinks": True, "page_size": 128}, {"dtype": FP16}], ids=str)
def test_features(wanted):
    check_accuracy(made("verify_tree", heads=128, lens=[300, 65, 0, 193], **wanted))


@pytest.mark.parametrize("page_size", [1, 16, 24, 32, 48])
@pytest.mark.parametrize("mode", ["verify_chain", "verify_tree"])
def test_pages_shorter_than_a_block(page_size, mode):
    check_accuracy(made(mode, heads=32, page_size=page_size, lens=[0, 1, 15, 16, 17, 63, 64, 65, 129, 500]))


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
@pytest.mark.parametrize(("width", "draft_steps"), [(4, 3), (8, 7)])
def test_slots_of_a_tree_that_no_query_sees(width, draft_steps, page_size):
    """The last level of a tree asks; dead branches hold NaN, in an even block, an odd one, or both. Their pages may be
    anywhere."""
    lens = [0, 40, 52, 60, 64, 70, 116, 122, 128, 200, 3000]
    case = made("draft_tree", heads=32, width=width, draft_steps=draft_steps, page_size=page_size, lens=lens)
    assert poison_unseen(case) > 0
    check_accuracy(case)


@pytest.mark.parametrize("offset", [1, 4])
def test_queries_at_any_address(offset):
    case = made("verify_chain", lens=[300, 65])
    q = case.arguments["q"]
    moved = q.new_empty(q.numel() + offset)[offset:].view(q.shape).copy_(q)
    assert moved.is_contiguous()
    assert moved.data_ptr() % 16 != 0
    expected = case.run()
    case.arguments["q"] = moved
    assert torch.equal(case.run(), expected)


# 2, 4, 16, 64 and more splits have each their way of combining; it also depends on the rows (16 or 80 here).
@pytest.mark.parametrize("mode", ["draft_chain", "verify_chain"])
@pytest.mark.parametrize("blocks", [2, 3, 9, 33, 64, 70])
def test_one_request_over_many_programs(blocks, mode):
    check_accuracy(made(mode, lens=[64 * blocks - 3]))


@pytest.mark.parametrize("options", [{}, {"min_blocks": 3}], ids=str)
def test_ranges_that_begin_and_end_inside_requests(options):
    """With 128 heads and 5 queries there are 13 ranges: several requests in one, or a piece, of odd and even counts."""
    check_accuracy(made("verify_chain", options, heads=128, lens=[300, 64, 700, 0, 130, 65, 1000, 320, 5, 640]))


@pytest.mark.parametrize("mode", ["verify_chain", "verify_tree"])
def test_tiles_in_two(mode):
    """What the next range wrote is added in registers; with sinks, for rows past the last one (80 of 128), and with bits that
    stay the same."""
    case = made(mode, {"ranges": 3}, heads=20, lens=[400, 700, 330], sinks=True)
    check_accuracy(case)
    expected = case.run()
    assert all(torch.equal(case.run(), expected) for _ in range(10))


def test_unused_rows_of_wide_caches():
    """A layer's view whose rows are wider than 576: other rows' NaN must not be read as part of a row."""
    check_accuracy(made("verify_tree", lens=[64, 129], layout="interleaved"))


def test_counters_are_left_at_zero_and_replays_agree():
    case = made("verify_chain", heads=128, lens=[300, 64, 700, 1000])
    expected = case.run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = case.run()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)  # partial results are combined in the order of the ranges
    torch.cuda.synchronize()
    used = [counters for (kernel, *_), counters in workspace._sets.items() if kernel == "mla_hopper"]
    assert len(used) > 1  # those of a stream, and the graph's
    assert not any(counters.any() for counters in used)


def test_what_is_not_supported():
    from spec_ops.backends.triton.attention.hopper import mla as mla_hopper

    call = made("draft_chain", lens=[640]).call()

    def supported(**changes: Any) -> bool:
        return mla_hopper.supports(dataclasses.replace(call, **changes))

    assert supported()
    assert supported(window_left=10**6)  # hides nothing
    assert not supported(window_left=100)
    assert not supported(softcap=30.0)
    assert not supported(kv_lora_rank=256)
    assert not supported(q=call.q.float(), k_cache=call.k_cache.float())
    assert not supported(k_cache=call.k_cache.to(torch.float8_e4m3fn))
    assert not supported(k_cache=call.k_cache[:, :60])  # pages apart
