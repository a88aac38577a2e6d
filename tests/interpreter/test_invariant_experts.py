"""Batch-invariant mixtures of experts in Triton's interpreter: a token's bits are those that it has alone, whatever the others
are and wherever they go. `tests/gpu/test_invariant.py` asks the same of the tensor cores, in bfloat16.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.moe import experts, few, grouped
from spec_ops.backends.triton.moe.shapes import meta_call
from spec_ops.backends.triton.runtime.launch import Target, recorded
from tests.helpers.mixtures import FORMS, PUBLISHED, STORED, call, exact, stored_call

FP16 = torch.float16
TOKENS = 70  # more than the kernels for few tokens take


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def invariant(args: tuple[Any, ...]) -> torch.Tensor:
    return experts.moe_experts(*args, invariant=True)


def of_rows(args: tuple[Any, ...], rows: Any) -> tuple[Any, ...]:
    return *(given[rows] for given in args[:3]), *args[3:]


def check_rows(args: tuple[Any, ...]) -> torch.Tensor:
    """Some of the tokens, in another order, and beside others whose rows are NaN and who all go to the same experts. Returns
    what all of them give."""
    tokens, out = args[0].shape[0], invariant(args)
    whole = bits(out)
    for rows in (slice(0, 1), slice(3, 7), torch.arange(5, tokens).flip(0)):
        assert torch.equal(bits(invariant(of_rows(args, rows))), whole[rows]), rows
    others = [args[0].clone(), args[1][:1].expand_as(args[1]).clone(), args[2].clone()]
    others[0][:-1], others[1][-1] = float("nan"), args[1][-1]
    assert torch.equal(bits(invariant((*others, *args[3:])))[-1], whole[-1])
    return out


@pytest.mark.parametrize("name", FORMS)
def test_any_number_of_tokens(products_by_rows, name):
    args = call(FORMS[name], TOKENS, 3, 7, 72, 40, FP16, routing="zipf", dropped=0.2)
    torch.testing.assert_close(check_rows(args).double(), exact(args), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", STORED)
def test_stored_weights(products_by_rows, kind):
    args = stored_call(PUBLISHED, kind, 20, 3, 6, 160, 64, dtype=FP16, dropped=0.2)
    torch.testing.assert_close(check_rows(args).double(), exact(args), rtol=2e-3, atol=2e-3)


def test_float32(products_by_rows):
    check_rows(call(FORMS["Qwen3-MoE"], TOKENS, 3, 7, 40, 24))


def staged(tokens: int) -> tuple[Any, ...]:
    """Rows and weights of four parts along k: large integers, small fractions, the negative of the first part, and small
    fractions. In float32 the fractions lose bits to the first part only if they are added to it before the third one is:
    results tell the order."""
    args = list(call(FORMS["relu, plain and transposed"], tokens, 2, 2, 256, 16, FP16, routing="identical"))
    g = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        large, small, last = torch.randint(-8, 8, (3, 64, *shape), generator=g).half().unbind()
        return torch.cat([large, small * 2**-9, large, last * 2**-9])

    args[0], args[3] = numbers(tokens).t().contiguous(), numbers(2, 16).transpose(0, 1).contiguous()
    args[3][:, 128:192] *= -1
    return tuple(args)


def test_tiles_of_128_rows():
    args = staged(260)
    assert grouped.invariant_blocks(520, 2, FP16, 90).block_m == 128
    check_rows(args)


@pytest.mark.parametrize("dtype", [FP16, torch.float32])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.transposed])
def test_rows_side_by_side(products_by_rows, name, dtype):
    """Tiles of 64 rows and of 128, and several blocks of columns, the last of them odd."""
    args = call(FORMS[name], 260, 2, 2, 72, 67, dtype, routing="identical", dropped=0.1)
    whole = bits(invariant(args))
    for rows in (slice(0, 1), slice(3, 74), torch.arange(100, 170).flip(0)):
        assert torch.equal(bits(invariant(of_rows(args, rows))), whole[rows]), rows


def test_tokens_at_a_time(products_by_rows, monkeypatch):
    """So many that what lies between the products would not fit: 64 of them, then the others."""
    args = call(FORMS["gpt-oss"], TOKENS, 2, 4, 24, 16, FP16)
    whole = bits(invariant(args))
    monkeypatch.setattr(grouped, "TEMPORARY", 1)
    with recorded() as launches:
        invariant(args)
    assert len(launches) == 8
    assert torch.equal(bits(invariant(args)), whole)


def test_sums_that_the_others_divide_are_noticed(products_by_rows):
    """The kernels for few tokens share the inner dimensions of all experts that any token goes to."""
    args = call(FORMS["gelu, transposed"], 12, 2, 6, 64, 320, FP16)
    assert few.supports(*(args[i] for i in (0, 1, 3, 4)), 320)
    alone = of_rows(args, slice(4, 5))
    assert not torch.equal(bits(few.few_experts(*alone)), bits(few.few_experts(*args))[4:5])
    assert torch.equal(bits(invariant(alone)), bits(invariant(args))[4:5])


def test_a_tile_follows_the_tokens_only_where_the_instruction_is_one():
    for arch, dtype in itertools.product((80, 90, 100, 103, 120), (torch.bfloat16, torch.float32)):
        tiles = set()
        for tokens in (1, 8, 65, 1000, 10_000):
            with recorded(Target(arch, 132)) as launches:
                invariant(meta_call(tokens, 8, 2, 128, 64, dtype=dtype))
            for made in launches[1:3]:
                assert made.options["enable_fp_fusion"] is False
                tile = [made.arguments[name] for name in ("BLOCK_N", "BLOCK_K", "BLOCK_M")]
                tiles.add((*tile[:2], tile[2] // made.options["num_warps"], tile[2]))
        assert len({tile[:3] for tile in tiles}) == 1, "other rows of a warp, or another k, are another instruction"
        assert len(tiles) == 1 + (dtype != torch.float32 and not 100 <= arch < 120)
