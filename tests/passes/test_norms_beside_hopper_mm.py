"""fuse_norm_linear before products that Hopper's kernel for weights of 4 bits computes (`backends/triton/linear/hopper_mm.py`):
which norms are fused with them, and which are not because that kernel gains more than a norm costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from spec_ops.backends.weight_format import dequantized
from spec_ops.ops.linear import add_skinny_mm_op, scaled_skinny_mm_op, skinny_mm_op
from spec_ops.passes import fuse_norm_linear
from spec_ops.passes.fuse_norm_linear import HOPPER_COLUMNS, FuseNormLinear
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from tests.helpers.pass_harness import capture, run_pass, targets, texts
from tests.helpers.stored_weights import stored

BF16, FP32 = torch.bfloat16, torch.float32
E = 256  # hidden size: k of all products
QKV, GATE_UP = 6144, 28672  # columns, of Llama-3.1-8B


def weights(kind: str, *columns: int, scales: torch.dtype = BF16) -> list[tuple[torch.Tensor | None, ...]]:
    g = torch.Generator().manual_seed(0)
    made = [stored(torch.randn(n, E, generator=g), kind, scales) for n in (E, *columns)]
    return [(*parts, *[None] * (4 - len(parts))) for parts in made]


def graph(kind: str, m: int, *columns: int, arch: int = 90, scales: torch.dtype = BF16) -> torch.fx.GraphModule:
    """A product, the sum with a residual, its norm, and products with weights of so many columns, all of them stored."""
    before, *after = weights(kind, *columns, scales=scales)

    def fn(x, residual, g, *parts):
        def linear(rows: torch.Tensor) -> torch.Tensor:
            return F.linear(rows, dequantized(*(None if place is None else parts[place] for place in next(places))).to(BF16))

        places = iter(_places(before, *after))
        y = residual + linear(x)
        h = F.rms_norm(y, (E,), g, 1e-5)
        return y, *(linear(h) for _ in after)

    given = [part for parts in (before, *after) for part in parts if part is not None]
    rows = [torch.randn(m, E).to(BF16) for _ in range(2)]
    module, _ = capture(fn, *rows, torch.rand(E).to(BF16) + 0.5, *given)
    lowered = run_pass(LowerSkinnyMm(), module, arch)
    assert lowered.matches == 1 + len(columns), texts(lowered.refused)
    return module


def _places(*weights: tuple[torch.Tensor | None, ...]) -> Iterator[list[int | None]]:
    """Where each part of each weight is among those that there are."""
    taken = 0
    for parts in weights:
        places: list[int | None] = []
        for part in parts:
            places.append(None if part is None else taken)
            taken += part is not None
        yield places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "m", "columns"),
    [
        ("int4-128", 17, (GATE_UP,)),
        ("int4-128", 32, (GATE_UP,)),
        ("int4-256", 32, (GATE_UP,)),
        ("int4-32", 32, (GATE_UP,)),
        ("nvfp4", 32, (GATE_UP,)),
        ("mxfp4", 32, (GATE_UP,)),
        ("int4-128", 32, (HOPPER_COLUMNS,)),
        ("int4-128", 32, (GATE_UP // 2, GATE_UP // 2)),  # gate and up apart
        ("nvfp4", 32, (GATE_UP // 2, GATE_UP // 2)),
        ("int4-128", 32, (QKV, GATE_UP)),  # attention beside an MLP
    ],
)
def test_many_columns_keep_their_norm(kind, m, columns):
    module = graph(kind, m, *columns)
    before = str(module.graph)
    result = run_pass(FuseNormLinear(), module, 90)
    assert result.matches == 0
    assert str(module.graph) == before
    assert texts(result.refused) == (
        f"RMSNorm of {m} x {E}: Hopper's kernel for weights of 4 bits, which has no norm in it, "
        f"is faster for the {sum(columns)} columns after it"
    )


@pytest.mark.parametrize(
    ("kind", "m", "columns", "scales"),
    [
        ("int4-128", 32, (QKV,), BF16),  # the kernel gains less than a norm costs
        ("nvfp4", 32, (QKV,), BF16),
        ("int4-128", 32, (HOPPER_COLUMNS - 128,), BF16),
        ("int4-128", 16, (GATE_UP,), BF16),  # that kernel does not compute these:
        ("mxfp4", 16, (GATE_UP,), BF16),
        ("int4-128", 32, (GATE_UP,), FP32),
        ("row", 32, (GATE_UP,), FP32),
    ],
)
def test_others_are_fused(kind, m, columns, scales):
    module = graph(kind, m, *columns, scales=scales)
    result = run_pass(FuseNormLinear(), module, 90)
    assert result.matches == 1, texts(result.refused)
    found = targets(module)
    assert (found.count(add_skinny_mm_op), found.count(scaled_skinny_mm_op)) == (1, len(columns))
    assert skinny_mm_op not in found


def test_other_architectures_have_no_such_kernel(monkeypatch):
    monkeypatch.setattr(fuse_norm_linear, "MAX_ROWS", {90: 32, 100: 32})
    assert run_pass(FuseNormLinear(), graph("int4-128", 32, GATE_UP, arch=100), 100).matches == 1
