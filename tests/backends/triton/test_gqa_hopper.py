"""Which calls the Hopper GQA kernel serves; `tests/gpu/test_gqa_hopper.py` has what it computes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

import triton

from spec_ops.backends import AttentionCall
from spec_ops.backends.triton.attention import variants as attention_ahead
from spec_ops.backends.triton.attention.hopper import gqa as gqa_hopper
from spec_ops.backends.triton.attention.hopper.host import box_of, is_token_rows
from spec_ops.backends.triton.runtime import ahead

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def call_of(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **softmax: Any) -> AttentionCall:
    tables, lens = torch.empty(len(q), 16, dtype=torch.int32), torch.empty(len(q), dtype=torch.int32)
    return AttentionCall("mha_target_verify", q, k_cache, v_cache, None, tables, lens, **softmax)


def serves(
    arch: int = 90, heads: int = 64, kv_heads: int = 8, q_len: int = 16, head_dim: int = 64, v_dim: int = 64,
    page_size: int = 64, pages: int = 4, dtype: torch.dtype = BF16, kv_dtype: torch.dtype = BF16,
    window_left: int = -1, softcap: float = 0.0, bs: int = 2,
) -> bool:  # fmt: skip
    q = torch.empty(bs, q_len, heads, head_dim, dtype=dtype)
    k, v = (torch.empty(pages, page_size, kv_heads, d, dtype=kv_dtype) for d in (head_dim, v_dim))
    return gqa_hopper.supports(arch, call_of(q, k, v, window_left=window_left, softcap=softcap))


@pytest.mark.parametrize(
    "call",
    [
        {}, {"q_len": 9}, {"q_len": 40}, {"heads": 32, "q_len": 17}, {"heads": 64, "kv_heads": 1, "q_len": 2},
        {"page_size": 128}, {"page_size": 192}, {"page_size": 16}, {"page_size": 1}, {"dtype": FP16, "kv_dtype": FP16},
        {"bs": 2048}, {"head_dim": 128, "v_dim": 128}, {"heads": 32, "q_len": 24, "head_dim": 128, "v_dim": 128},
        *({"heads": 32, "q_len": q, "head_dim": 128, "v_dim": 128, "page_size": n} for q in (5, 16) for n in (1, 16, 96)),
    ],
    ids=str,
)  # fmt: skip
def test_serves(call: dict[str, Any]):
    assert serves(**call)


@pytest.mark.parametrize(
    "call",
    [
        {"arch": 80}, {"arch": 100}, {"q_len": 8}, {"heads": 32, "q_len": 16}, {"heads": 40}, {"heads": 128, "kv_heads": 1},
        {"heads": 32, "head_dim": 128, "v_dim": 128}, {"q_len": 8, "page_size": 16}, {"head_dim": 256, "v_dim": 256},
        {"v_dim": 128}, {"pages": 0},
        *({"heads": 32, "q_len": q, "head_dim": 128, "v_dim": 128, "page_size": n} for q, n in ((4, 16), (16, 64), (5, 128))),
        {"dtype": torch.float32, "kv_dtype": torch.float32}, {"kv_dtype": FP8}, {"kv_dtype": FP16}, {"window_left": 100},
        {"softcap": 30.0},
    ],
    ids=str,
)  # fmt: skip
def test_leaves_to_the_other_kernel(call: dict[str, Any]):
    assert not serves(**call)


def test_tiles_and_blocks_of_keys():
    """Where one tile has all rows, or one request all keys, more of them are asked for. Those of a block of 128 are in two
    pages at most."""
    assert gqa_hopper.tiling_of(64, 128, 8, 64) == gqa_hopper.tiling_of(64, 512, 1, 1) == (2, 128, 5)
    assert all(gqa_hopper.tiling_of(128, *one) == (2, 64, 4) for one in ((128, 8, 64), (256, 1, 64), (129, 2, 16)))
    assert all(gqa_hopper.tiling_of(128, 193, 2, page_size) == (2, 64, 4) for page_size in (72, 80, 96, 100))
    assert all(gqa_hopper.tiling_of(128, 193, 2, page_size) == (2, 128, 2) for page_size in (64, 128, 192))


def test_three_warpgroups_where_they_leave_fewer_rows_empty():
    """And where they were timed: several requests, pages of whole blocks."""

    def three(head_dim: int, bs: int = 8, page_size: int = 64) -> list[int]:
        return [n for n in range(65, 513) if gqa_hopper.tiling_of(head_dim, n, bs, page_size).warpgroups == 3]

    assert three(64) == three(64, 2, 128) == [*range(129, 193), *range(257, 385)]
    assert three(128) == [*range(129, 193)]
    assert three(64, bs=1) == three(64, page_size=16) == three(128, page_size=1) == []
    assert gqa_hopper.tiling_of(64, 129, 8, 64) == (3, 64, 8)
    assert gqa_hopper.tiling_of(128, 192, 8, 64) == (3, 64, 4)


def test_layouts_of_caches():
    q = torch.empty(2, 16, 64, 64, dtype=BF16)
    pool = torch.empty(3, 2, 4, 64, 8, 64, dtype=BF16)  # layers, keys and values
    assert gqa_hopper.supports(90, call_of(q, pool[1, 0], pool[1, 1]))
    by_page = torch.empty(4, 2, 64, 8, 64, dtype=BF16)  # keys and values in turn
    assert not gqa_hopper.supports(90, call_of(q, by_page[:, 0], by_page[:, 1]))
    heads_first = torch.empty(4, 8, 64, 64, dtype=BF16).transpose(1, 2)
    assert not gqa_hopper.supports(90, call_of(q, heads_first, heads_first))
    wide = torch.empty(4, 64, 1024, dtype=BF16)[..., :512].unflatten(2, (8, 64))
    assert gqa_hopper.supports(90, call_of(q, wide, wide))
    once = torch.empty(1, 1, 8, 64, dtype=BF16).expand(4, 64, 8, 64)  # the same token everywhere
    assert not gqa_hopper.supports(90, call_of(q, once, once))
    odd = torch.empty(4 * 64 * 512 + 4, dtype=BF16)[4:].view(4, 64, 8, 64)  # 8 bytes from a multiple of 16
    assert not gqa_hopper.supports(90, call_of(q, odd, odd))


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize(("head_dim", "numbers"), [(64, 64), (128, 32)])
def test_the_softmax_overlaps_with_products(head_dim: int, numbers: int, tmp_path: Path):
    """In both loops of both warpgroups the exponentials stand between the wait for logits and that for outputs.

    The assembler is free to move them behind both, and does so where nothing holds them back.
    """
    call = attention_ahead.call_of(attention_ahead.Shape("", 64, 8, head_dim, head_dim), 8, 16)
    (launch,) = attention_ahead.launches_of(lambda: gqa_hopper.mha(call))
    variant = attention_ahead.variant_of("softmax", launch, attention_ahead.HOPPER, (90,), hot=True)
    used = ahead.compile_ahead(variant, 90)
    assert used.spill_bytes == 0
    assert not used.serialized
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(ahead.compiled(variant, 90).asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    assembly = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    between = re.findall(r"DEPBAR\.LE gsb0, 0x1 ;(.*?)DEPBAR\.LE gsb0, 0x0 ;", assembly, re.DOTALL)
    assert [part.count("MUFU.EX2") for part in between] == [numbers + 2] * 4  # a thread's, and what two rows shrink by
    assert not any("HGMMA" in part for part in between)


ROWS = torch.zeros(8 * 64 * 160 + 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "readable"),
    [
        ((4, 64, 2, 64), (8192, 128, 64, 1), 0, True),
        ((4, 64, 2, 64), (8704, 136, 64, 1), 0, True),  # rows apart, at a multiple of 16 bytes
        ((4, 64, 128), (8192, 128, 1), 0, True),
        ((4, 64, 2, 64), (8448, 132, 64, 1), 0, False),  # steps of 8 bytes
        ((4, 64, 2, 64), (8192, 128, 64, 1), 4, False),  # begins between multiples of 16 bytes
        ((4, 64, 2, 64), (10240, 128, 64, 1), 0, False),  # pages apart
        ((4, 64, 2, 64), (9216, 144, 72, 1), 0, False),  # heads apart
        ((4, 64, 2, 64), (8192, 64, 4096, 1), 0, False),  # heads before tokens
        ((4, 64, 2, 64), (8192, 128, 1, 2), 0, False),
    ],
)
def test_what_a_descriptor_reads_as_rows_of_tokens(shape, strides, offset, readable):
    assert ROWS.data_ptr() % 16 == 0
    assert is_token_rows(ROWS.as_strided(shape, strides, offset)) == readable


@pytest.mark.parametrize(
    ("page_size", "box"), [(1, 1), (3, 1), (8, 1), (16, 16), (24, 1), (32, 32), (48, 16), (64, 64), (96, 32), (192, 64)]
)
def test_boxes_are_what_pages_hold_whole(page_size, box):
    assert box_of(torch.empty(2, page_size, 576, device="meta"), 64) == box
