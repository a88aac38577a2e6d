"""What values an integer tensor may hold: bounds that hold, and are as near as they can be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spec_ops.passes.analysis.ranges import ANYTHING, bounds

INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
X, MASK, REAL = torch.tensor([3, -7, 2**31 - 1], dtype=torch.int32), torch.tensor([True, False, True]), torch.rand(3)

CASES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], tuple[float, float]]] = {
    "an input": (lambda x, m, r: x.clone(), INT32),
    "widened": (lambda x, m, r: x.long(), INT32),
    "cut": (lambda x, m, r: (x.long() * 4).int(), INT32),
    "a sum that fits": (lambda x, m, r: x.long() + 1, (INT32[0] + 1, INT32[1] + 1)),
    "a sum that wraps": (lambda x, m, r: x + 1, INT32),
    "flags": (lambda x, m, r: m.int(), (0, 1)),
    "real numbers": (lambda x, m, r: r * 2, ANYTHING),
    "cut real numbers": (lambda x, m, r: (r * 9).int(), INT32),
    "counted": (lambda x, m, r: torch.arange(4), (0, 3)),
    "counted down": (lambda x, m, r: torch.arange(5, -3, -2), (-1, 5)),
    "counted, nothing": (lambda x, m, r: torch.arange(7, 7), (7, 7)),
    "counted in 8 bits": (lambda x, m, r: torch.arange(200).to(torch.int8).long(), (-128, 127)),
    "scaled": (lambda x, m, r: torch.arange(4) * -3 + 1, (-8, 1)),
    "clamped": (lambda x, m, r: x.clamp(-2, 5), (-2, 5)),
    "clamped below": (lambda x, m, r: x.clamp(min=4), (4, INT32[1])),
    "clamped again": (lambda x, m, r: torch.arange(10).clamp(max=4).clamp(min=6), (6, 6)),
    "limits that cross": (lambda x, m, r: x.clamp(5, 2), (2, 2)),
    "selected": (lambda x, m, r: torch.where(m, torch.arange(3), -4), (-4, 2)),
    "modulo": (lambda x, m, r: (x % 16)[:, None].expand(3, 2), (0, 15)),
    "modulo a negative": (lambda x, m, r: x % -16, INT32),
    "a part": (lambda x, m, r: x.clamp(0, 9)[1:].flip(0), (0, 9)),
    "gathered": (lambda x, m, r: x.clamp(0, 9).gather(0, torch.arange(2)), (0, 9)),
    "full": (lambda x, m, r: torch.full((2,), 7) - torch.arange(2), (6, 7)),
}


@pytest.mark.parametrize("case", CASES)
def test_bounds(case):
    program, want = CASES[case]
    module = make_fx(program, tracing_mode="fake")(X, MASK, REAL)
    (node,) = module.graph.output_node().args
    assert isinstance(node, fx.Node)
    found = bounds(node)
    assert found == want
    held = module(X, MASK, REAL)
    if held.numel():
        assert found[0] <= held.min().item() <= held.max().item() <= found[1]


def test_shared_values_do_not_multiply():
    """Forty sums of a value with itself: the walk is bounded, and so is what it finds."""

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x % 2
        for _ in range(40):
            x = x + x
        return x

    node = make_fx(program, tracing_mode="fake")(X.long()).graph.output_node().args[0]
    assert bounds(node) == INT64
    assert bounds(None) == ANYTHING == (-math.inf, math.inf)
