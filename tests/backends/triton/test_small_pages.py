"""How the plain attention kernel is launched on sm_90 where pages hold less than a block of keys; `test_attention_ahead.py`
compiles it, `tests/interpreter/test_attention.py` and `tests/gpu/test_attention.py` have what it computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention import launcher, tuning, variants
from spec_ops.backends.triton.runtime.launch import Launch

GQA_96 = variants.Shape("", 32, 8, 96, 96)


def launched(call: AttentionCall) -> Launch:
    (launch,) = variants.launches_of(lambda: launcher.attention(call))
    return launch


@pytest.mark.parametrize(
    ("shape", "page_size", "expected"),  # TMA, BOXES, BLOCK_N, warps
    [
        (variants.GQA_128, 64, (True, False, 64, 2)),
        (variants.GQA_128, 32, (True, True, 64, 2)),
        (variants.GQA_128, 16, (True, True, 32, 1)),
        (variants.GQA_128, 1, (False, False, 64, 2)),
        (variants.GQA_64, 64, (True, False, 64, 1)),
        (variants.GQA_64, 32, (True, True, 64, 1)),
        (variants.GQA_64, 16, (False, False, 64, 2)),
        (variants.GQA_64, 1, (False, False, 64, 2)),
        (variants.GQA_64, 8, (False, False, 64, 1)),
        (GQA_96, 16, (False, False, 64, 2)),  # a descriptor cannot mask what a head is padded with
        (variants.Shape("", 32, 8, 96, 128), 16, (False, False, 64, 2)),  # keys in two parts
        (variants.GQA_FP8, 16, (False, False, 64, 2)),
    ],
)
def test_how_pages_are_read(shape, page_size, expected):
    launch = launched(variants.call_of(shape, 8, 1, page_size=page_size))
    found = launch.arguments["TMA"], launch.arguments["BOXES"], launch.arguments["BLOCK_N"], launch.options["num_warps"]
    assert found == expected


def test_pages_that_lie_apart_take_the_block_shape_of_any_pages():
    """Keys and values of a page side by side: no descriptor reads them as rows of tokens at one distance."""
    call = variants.call_of(variants.GQA_128, 8, 1, page_size=16)
    both = torch.empty(1024, 2, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    launch = launched(dataclasses.replace(call, k_cache=both[:, 0], v_cache=both[:, 1]))
    assert not launch.arguments["TMA"]
    assert not launch.arguments["BOXES"]
    assert (launch.arguments["BLOCK_N"], launch.options["num_warps"]) == (64, 2)


def test_boxes_are_whole_pages_of_a_block():
    """Elsewhere a config with `boxes` reads as one without them."""
    config = tuning.Config(16, 64, 1, 3, 2, boxes=True)
    for page_size, tma, boxes in (
        (16, True, True),
        (32, True, True),
        (64, True, False),
        (128, True, False),
        (48, False, False),
        (8, False, False),
    ):
        call = variants.call_of(variants.GQA_128, 8, 1, page_size=page_size)
        (launch,) = variants.launches_of(lambda call=call: launcher.attention(call, config))
        assert (launch.arguments["TMA"], launch.arguments["BOXES"]) == (tma, boxes), page_size


@pytest.mark.parametrize(
    ("shape", "q_len", "page_size", "early"),
    [
        (variants.GQA_128, 1, 1, False),  # three programs fit where two are launched
        (variants.GQA_128, 1, 16, True),
        (variants.GQA_128, 8, 1, True),
        (variants.GQA_64, 1, 32, True),
        (variants.GQA_64, 1, 16, True),
        (variants.GQA_64, 4, 1, True),
        (variants.GQA_256, 4, 1, False),
    ],
)
def test_launches_of_pointers_are_early_where_programs_fill_a_multiprocessor(shape, q_len, page_size, early):
    assert launched(variants.call_of(shape, 8, q_len, page_size=page_size)).early == early


def test_no_launch_of_pointers_is_early_where_nobody_compared_it_with_binaries(monkeypatch):
    from spec_ops.backends.triton.attention import operands

    call = variants.call_of(variants.GQA_64, 8, 4, page_size=1)
    assert launched(call).early
    monkeypatch.setattr(operands, "arch_of", lambda device: 100)
    assert not launched(call).early
