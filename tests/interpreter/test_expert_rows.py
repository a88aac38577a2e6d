"""What `hopper_mxfp4.py` does beside its products, in Triton's interpreter; the products, which it cannot run, in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.expert_format import dequantized_expert, expert_format
from spec_ops.backends.squares import SUM_COLUMNS
from spec_ops.backends.triton.moe import expert_rows, hopper_mxfp4
from spec_ops.backends.triton.moe.few import Norms
from tests.helpers.mixtures import FORMS, PUBLISHED, exact, stored_call

BF16 = torch.bfloat16


def columns(k: int) -> torch.Tensor:
    """Which column comes where: of each 32 the even ones of all words of eight, then the odd ones."""
    return torch.cat(
        [torch.cat([torch.arange(start, start + 32, 2), torch.arange(start + 1, start + 32, 2)]) for start in range(0, k, 32)]
    )


def products(parts, scale, weight, weight_scale, offsets, block_m):
    """`hopper_mxfp4._products`; rows of no expert are NaN."""
    rows, stored = parts.shape[0] // 2, expert_format("test", "weight", weight, weight_scale)
    out = torch.full((rows, weight.shape[1]), float("nan"))
    both = parts[:rows].float() + parts[rows:].float()
    for e, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        wide = dequantized_expert(weight[e], weight_scale[e], stored)[:, columns(parts.shape[1])]
        out[first:last] = both[first:last] @ wide.t() * scale[first:last, None]
    return out


@pytest.fixture(autouse=True)
def _products_in_torch(monkeypatch):
    monkeypatch.setattr(hopper_mxfp4, "_products", products)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


FORMS_IN_ROWS = {"published": PUBLISHED, **{name: form for name, form in FORMS.items() if not form.transposed}}


@pytest.mark.parametrize("name", FORMS_IN_ROWS)
@pytest.mark.parametrize(("tokens", "experts"), [(9, 7), (40, 3)])
def test_rows_of_experts(name, tokens, experts):
    """Dropped ids, a hidden size that is no power of 2; more entries of offsets than pairs, or fewer."""
    args = stored_call(FORMS_IN_ROWS[name], "MXFP4", tokens, 2, experts, 192, 320, BF16, routing="zipf", dropped=0.2)
    (got,) = hopper_mxfp4.hopper_experts(*args)
    assert relative(got, exact(args)) < 6e-3  # the interpreter truncates to bfloat16


def test_norms_around_experts():
    args = stored_call(PUBLISHED, "MXFP4", 11, 2, 5, 1088, 64, BF16, dropped=0.2)
    g = torch.Generator().manual_seed(0)
    squares = args[0].float().unflatten(1, (-1, SUM_COLUMNS)).square().sum(2) * 4.0
    residual, weight = (torch.randn(shape, generator=g).to(BF16) for shape in ((11, 1088), (1088,)))
    normal = args[0].double() * torch.rsqrt(squares.double().sum(1, keepdim=True) / 1088 + 1e-6)
    y, z, sums = hopper_mxfp4.hopper_experts(*args, norms=Norms(squares, 1e-6, residual, weight))
    assert relative(y, exact((normal, *args[1:])) + residual.double()) < 6e-3
    assert relative(z, y.double() * weight.double()) < 6e-3
    torch.testing.assert_close(sums, y.float().unflatten(1, (-1, SUM_COLUMNS)).square().sum(2), rtol=1e-5, atol=0)
    (alone,) = hopper_mxfp4.hopper_experts(*args, norms=Norms(squares, 1e-6))
    assert relative(alone, exact((normal, *args[1:]))) < 6e-3


def test_tokens_that_go_nowhere_and_rows_that_are_no_numbers():
    args = stored_call(PUBLISHED, "MXFP4", 12, 2, 4, 64, 64, BF16)
    x, ids = args[0].clone(), args[1].clone()
    ids[::3], ids[1, 1] = -1, 99
    (wanted,) = hopper_mxfp4.hopper_experts(x, ids, *args[2:])
    assert (wanted[::3] == 0).all()
    x[::3], x[4] = float("nan"), float("inf")
    (got,) = hopper_mxfp4.hopper_experts(x, ids, *args[2:])
    others = torch.tensor([row for row in range(12) if row != 4])
    assert torch.equal(got[others], wanted[others])
    assert not got[4].isfinite().any()
    (nowhere,) = hopper_mxfp4.hopper_experts(x, torch.full_like(ids, -1), *args[2:])
    assert (nowhere == 0).all()


def test_ids_whose_last_32_bits_are_an_experts():
    """They are no expert's, with a bias too."""
    args = stored_call(PUBLISHED, "MXFP4", 8, 2, 4, 64, 64, BF16)
    ids = args[1].to(torch.int64)
    ids[:4, 1] = torch.tensor([-(2**63), -(2**32), 2**32 + 1, -(2**32) + 2])
    (got,) = hopper_mxfp4.hopper_experts(args[0], ids, *args[2:])
    (wanted,) = hopper_mxfp4.hopper_experts(args[0], torch.where((ids < 0) | (ids > 3), -1, ids), *args[2:])
    assert torch.equal(got, wanted)


def test_parts_are_the_row():
    """Exact for magnitudes from 2^-10 of the greatest on."""
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(6, 96, generator=g).clamp(0.01) * torch.tensor([1e-30, 1e-3, 1.0, 7.0, 1e4, 1e30])[:, None]).to(BF16)
    ids = torch.tensor([[1], [0], [1], [-1], [2], [0]])
    rows = expert_rows.sorted_rows(x, ids, 3)
    assert rows.offsets.tolist() == [0, 2, 4, 5]
    assert rows.place.tolist() == [2, 0, 3, -1, 4, 1]
    for pair, place in enumerate(rows.place.tolist()):
        if place >= 0:
            both = (rows.parts[place].double() + rows.parts[6 + place].double()) * rows.scale[place].double()
            assert torch.equal(both, x[pair, columns(96)].double())
