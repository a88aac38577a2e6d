"""Experts of 8 and 4 bits in Triton's interpreter, against the dequantized weights in float64.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

import triton
import triton.language as tl

from spec_ops.backends.triton.moe import experts, few, grouped
from spec_ops.backends.triton.moe.stored import e8m0, int4_numbers, scaled_4_bits
from spec_ops.backends.triton.runtime.launch import Target, recorded
from spec_ops.backends.weight_format import unpacked
from tests.helpers.mixtures import FORMS, PUBLISHED, STORED, Form, exact, stored_call
from tests.helpers.pairs import pairwise

FP16 = torch.float16
GATELESS = Form("relu2", gated=False, biases=True)
LAYOUTS = {"gate and up": FORMS["Qwen3-MoE"], "interleaved": PUBLISHED, "no gate": GATELESS}


def check_close(got: torch.Tensor, args: tuple, rounding: float) -> None:
    assert got.dtype == args[0].dtype
    torch.testing.assert_close(got.double(), exact(args), rtol=rounding, atol=rounding)


@pairwise(layout=LAYOUTS, kind=STORED, tokens=[3, 13, 40])
def test_few_tokens(layout, kind, tokens):
    """Blocks of scales and of programs that sizes are no multiple of; experts that nobody goes to."""
    hidden, inner = (160, 192) if tokens == 13 else (320, 128)
    args = stored_call(LAYOUTS[layout], kind, tokens, 3, 6, hidden, inner, FP16, routing="zipf", dropped=0.2)
    assert few.supports(args[0], args[1], args[3], args[4], inner)
    check_close(few.few_experts(*args), args, 2e-3)


@pytest.mark.parametrize("kind", ["block", "MXFP4", "int4-64"])
def test_shares_of_the_inner_dimension(kind):
    """Shares that begin in the middle of an expert, and empty ones."""
    args = stored_call(FORMS["Qwen3-MoE"], kind, 5, 2, 3, 64, 640, FP16)
    sizes = few.Sizes(5, 2, 3, 64, 640, True, False, False, STORED[kind])
    first, second = few.choose(sizes, 4, 90)
    for splits in (2, 7):
        check_close(few.few_experts(*args, configs=(first, replace(second, splits=splits))), args, 2e-3)


@pairwise(layout=LAYOUTS, kind=STORED, dtype=[FP16, torch.float32])
def test_many_tokens(layout, kind, dtype):
    hidden, inner = (96, 160) if STORED[kind] == 4 else (100, 150)
    args = stored_call(LAYOUTS[layout], kind, 30, 2, 3, hidden, inner, dtype, dropped=0.2)
    check_close(grouped.grouped_experts(*args), args, 2e-3 if dtype == FP16 else 1e-5)


@pairwise(layout=LAYOUTS, tokens=[3, 13, 20, 40], sizes=[(320, 128), (192, 448), (256, 256)])
def test_numbers_scaled_in_pairs(layout, tokens, sizes):
    """As with bfloat16 on a GPU, whose scales float16 has room for here."""
    form, (hidden, inner) = LAYOUTS[layout], sizes
    args = stored_call(form, "MXFP4", tokens, 3, 6, hidden, inner, FP16, routing="zipf", dropped=0.2)
    of = few.Sizes(tokens, 3, 6, hidden, inner, form.gated, form.interleaved, False, 4, True)
    first, second = few.choose(of, 4, 90)
    assert (first.scaled, second.scaled) == (True, True)
    assert first.chunked == (tokens <= 32)
    check_close(few.few_experts(*args, configs=(first, replace(second, splits=3))), args, 2e-3)


@pairwise(layout=LAYOUTS, tokens=[1, 3, 8], sizes=[(320, 128), (192, 448), (256, 256)], programs=[6, 7, 40])
def test_ranges_of_tiles(layout, tokens, sizes, programs):
    """Ranges that begin in the middle of an expert or end in the next one, empty ones, and k that chunks do not divide."""
    form, (hidden, inner) = LAYOUTS[layout], sizes
    args = stored_call(form, "MXFP4", tokens, 3, 6, hidden, inner, FP16, routing="zipf", dropped=0.2 if tokens > 1 else 0.0)
    of = few.Sizes(tokens, 3, 6, hidden, inner, form.gated, form.interleaved, False, 4, True)
    first, second = few.choose(of, 4, 90)
    assert first.block_m == {1: 2, 3: 4, 8: 8}[tokens]
    assert first.ranges
    check_close(few.few_experts(*args, configs=(replace(first, ranges=programs), second)), args, 2e-3)
    alone = few.few_experts(*args, configs=(replace(first, ranges=0), second))
    assert torch.equal(few.few_experts(*args, configs=(first, second)), alone)


@pairwise(layout=LAYOUTS, tokens=[3, 13, 20], which=["gate and up", "down"])
def test_scales_too_great_for_one_factor(layout, tokens, which):
    """Such sums are no numbers, and are computed again; those of experts without any are not, nor with 17 tokens and more."""
    form = LAYOUTS[layout]
    args = list(stored_call(form, "MXFP4", tokens, 2, 4, 128, 192, FP16, routing="zipf"))
    if which != "down":
        args[0] = args[0] * 2.0**-8
    for at in (14, 15):
        if (which == "down") == (at == 15):
            args[at] = args[at].clone()
            args[at][0, ::3, 1] = 135  # 2^8, of the expert that most tokens go to
    of = few.Sizes(tokens, 2, 4, 128, 192, form.gated, form.interleaved, False, 4, True)
    configs = few.choose(of, 4, 90)
    assert [config.again for config in configs] == [tokens <= 16] * 2
    wanted = exact(tuple(args))
    assert wanted.isfinite().all()
    got = few.few_experts(*args, configs=configs)
    torch.testing.assert_close(got.double(), wanted, rtol=4e-3, atol=4e-3 * wanted.abs().max().item())


def test_when_numbers_are_scaled_in_pairs():
    """With bfloat16 alone; where scales lie so that two of a row are one number, and groups are even."""

    def scales_as(args: tuple, change) -> bool:
        call = (*args[:14], *(change(scale) for scale in args[14:]))
        with recorded() as launches:
            few.few_experts(*call)
        with recorded() as grouped_launches:
            grouped.grouped_experts(*call)
        launches += grouped_launches[1:3]
        assert len({launch.arguments["SCALED"] for launch in launches}) == 1
        return launches[0].arguments["SCALED"]

    def shifted(scale: torch.Tensor) -> torch.Tensor:
        return torch.zeros(scale.numel() + 1, dtype=torch.uint8)[1:].view(scale.shape).copy_(scale)

    def wider(scale: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*scale.shape[:2], scale.shape[2] + 1, dtype=torch.uint8)[..., :-1].copy_(scale)

    def columns_apart(scale: torch.Tensor) -> torch.Tensor:
        return scale.repeat_interleave(2, 2)[..., ::2]

    args = stored_call(PUBLISHED, "MXFP4", 3, 2, 4, 128, 128, torch.bfloat16)
    assert scales_as(args, lambda scale: scale)
    for change in (shifted, wider, columns_apart):
        assert not scales_as(args, change), change
    for hidden, inner, change in ((96, 128, torch.clone), (128, 96, torch.clone), (96, 96, wider)):
        assert not scales_as(stored_call(PUBLISHED, "MXFP4", 3, 2, 4, hidden, inner, torch.bfloat16), change)
    for kind, dtype in (("MXFP4", FP16), ("int4-32", torch.bfloat16), ("block", torch.bfloat16)):
        assert not scales_as(stored_call(PUBLISHED, kind, 3, 2, 4, 128, 128, dtype), lambda scale: scale), kind
    for target, invariant in ((89, False), (90, True)):
        with recorded(Target(target, 132)) as launches:
            grouped.grouped_experts(*args, invariant=invariant)
        assert not any(launch.arguments["SCALED"] for launch in launches[1:3])


@pairwise(layout=LAYOUTS, tokens=[5, 70, 200], sizes=[(320, 128), (192, 448), (64, 64)])
def test_numbers_scaled_in_pairs_for_many_tokens(layout, tokens, sizes, monkeypatch):
    """As with bfloat16 on a GPU: tiles of 16, 32 and 64 rows, full and not; blocks of k that sizes are no multiple of."""
    blocks = grouped.choose(3 * tokens, 12, torch.bfloat16, True)
    assert (blocks.block_m, blocks.scaled) == ({5: 16, 70: 32, 200: 64}[tokens], True)
    monkeypatch.setattr(grouped, "choose", lambda *_: blocks._replace(block_k=128) if tokens == 70 else blocks)
    args = stored_call(LAYOUTS[layout], "MXFP4", tokens, 3, 6, *sizes, FP16, routing="zipf", dropped=0.2)
    check_close(grouped.grouped_experts(*args), args, 2e-3)


def test_scaled_numbers_of_strided_weights(monkeypatch):
    """Experts and rows further apart than their sizes; bytes with others between them."""
    monkeypatch.setattr(grouped, "choose", lambda *_: grouped.Blocks(16, 64, 64, 4, 3, scaled=True))
    args = list(stored_call(PUBLISHED, "MXFP4", 9, 2, 3, 128, 64, FP16))
    for at, step in ((3, 1), (4, 2), (14, 1), (15, 1)):
        e, n, k = args[at].shape
        wider = torch.full((e, n + 1, step * k + 2), 0x77, dtype=torch.uint8)[:, :n, : step * k : step]
        args[at] = wider.copy_(args[at])
    check_close(grouped.grouped_experts(*args), tuple(args), 2e-3)


def test_tiles_of_scaled_numbers():
    """An expert's rows are one tile, also if they are half as many again. Other kinds have the tiles they had."""
    for rows, tile in ((1, 16), (11, 16), (12, 32), (16, 32), (21, 32), (22, 64), (43, 64), (127, 64)):
        assert grouped.choose(32 * rows, 32, torch.bfloat16, True).block_m == tile, rows
    assert not grouped.choose(32 * 128, 32, torch.bfloat16, True).scaled
    assert grouped.choose(32 * 16, 32, torch.bfloat16) == grouped.Blocks(16, 64, 64, 4, 4)


def test_scales_that_float16_has_no_room_for():
    """The sums of 32 numbers are scaled, in float32: weights of 2^-26 with rows of 2^12."""
    args = stored_call(Form(gated=False, activation="relu"), "MXFP4", 3, 2, 4, 128, 128, FP16)
    x, gate_up_scale = args[0] * 2.0**12, args[14] - 22
    args = (x, *args[1:14], gate_up_scale, args[15] + 10)
    got = few.few_experts(*args)
    wanted = exact(args)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=2e-3)


def test_tokens_without_experts():
    args = stored_call(PUBLISHED, "MXFP4", 6, 2, 4, 64, 64, FP16)
    ids = args[1].clone()
    ids[::2] = -1
    got = few.few_experts(args[0], ids, *args[2:])
    assert (got[::2] == 0).all()
    check_close(got, (args[0], ids, *args[2:]), 2e-3)
    assert (few.few_experts(args[0], torch.full_like(ids, 99), *args[2:]) == 0).all()


def test_which_kernels_take_a_call():
    for tokens, at, kernel in ((3, 0, "few_gate_up_kernel"), (65, 1, "grouped_gate_up_kernel")):
        args = stored_call(PUBLISHED, "MXFP4", tokens, 2, 4, 64, 64, FP16)
        with recorded() as launches:
            experts.moe_experts(*args)
        assert launches[at].kernel.__name__ == kernel
        assert (
            launches[at].arguments["weight" if tokens == 65 else "scale"] is args[3 if tokens == 65 else 14]
        )  # nothing is copied
    args = stored_call(FORMS["Qwen3-MoE"], "block", 3, 2, 4, 72, 72, FP16)
    assert not few.supports(args[0], args[1], args[3], args[4], 72)  # rows of 72 bytes
    check_close(experts.moe_experts(*args), args, 2e-3)


@triton.jit
def fp4_kernel(block, scale, out, DTYPE: tl.constexpr):
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    made = scaled_4_bits(tl.load(block + row * 16 + column), e8m0(tl.load(scale + row))[None, :, :], DTYPE, False)
    tl.store(out + row * 32 + tl.arange(0, 32)[None, :], made)


def test_every_number_of_mxfp4():
    """All 16 numbers with scales from 2^-10 to 2^5, exactly."""
    block = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.arange(117, 133, dtype=torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    wanted = values[torch.stack([block & 15, block >> 4], 2).long()] * 2.0 ** (scale.float() - 127)[:, None, None]
    for dtype, name in ((FP16, tl.float16), (torch.float32, tl.float32)):
        out = torch.empty(16, 16, 2, dtype=dtype)
        fp4_kernel[(1,)](block, scale, out, DTYPE=name)
        assert torch.equal(out.float(), wanted), dtype


@triton.jit
def int4_kernel(block, out, DTYPE: tl.constexpr):
    at = tl.arange(0, 256)
    made = int4_numbers(tl.load(block + at), DTYPE)
    tl.store(out + 2 * at[:, None] + tl.arange(0, 2)[None, :], made)


def test_every_number_of_int4():
    block = torch.arange(256, dtype=torch.uint8)
    for dtype, name in ((FP16, tl.float16), (torch.float32, tl.float32)):
        out = torch.empty(256, 2, dtype=dtype)
        int4_kernel[(1,)](block, out, DTYPE=name)
        assert torch.equal(out.flatten().to(torch.int8), unpacked(block[:, None]).flatten()), dtype
