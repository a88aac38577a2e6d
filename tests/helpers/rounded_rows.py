"""Graphs that round rows to float8 for a product, and what `float8_mm` in them computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spec_ops.backends.weight_format import dequantized
from spec_ops.models.stored_tensor import Inputs
from spec_ops.ops.linear import float8_mm_op
from tests.helpers.stored_weights import stored

M, N, K = 4, 320, 512
FP8 = torch.float8_e4m3fn
ROW, GROUP = Inputs("float8", float32_scales=True), Inputs("float8", 128, float32_scales=True)


def of(kind: str, seed: int = 0, m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Rows, and a weight with its scales."""
    g = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=g) for shape in ((m, k), (n, k)))
    return [x.to(dtype), *stored(weight, kind)[:2]]


def steps_of(x: torch.Tensor, group: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in groups of its columns, and their scales."""
    values = x.to(dtype).unflatten(-1, (-1, group))
    return values, values.abs().amax(-1, keepdim=True) / 448 + 1e-9


def linear(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(rows, dequantized(weight, scale).to(rows.dtype), bias)


def in_rows(x, weight, scale):
    _, steps = steps_of(x, x.shape[-1])
    numbers = (x.float() / steps.squeeze(-1)).to(FP8)
    return linear((numbers.float() * steps.squeeze(-1)).to(x.dtype), weight, scale)


def in_groups(x, weight, scale):
    values, steps = steps_of(x, 128)
    return linear(((values / steps).to(FP8).float() * steps).to(x.dtype).view(x.shape), weight, scale)


def only(module: torch.fx.GraphModule) -> torch.fx.Node:
    (node,) = (node for node in module.graph.nodes if node.target is float8_mm_op)
    return node


def run_to(node: torch.fx.Node, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What `node` is for the graph's inputs."""
    values: dict[torch.fx.Node, torch.Tensor] = dict(zip(node.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for other in node.graph.nodes:
        if other.op == "call_function":
            values[other] = other.target(*torch.fx.node.map_arg(other.args, values.get), **other.kwargs)
        if other is node:
            break
    return values[node]


def exact(node: torch.fx.Node, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The product `float8_mm` of its operands, in float64."""
    x, steps, weight, scale = (run_to(operand, inputs) for operand in node.args[:4])
    rows = x.double() * steps.double().repeat_interleave(x.shape[1] // steps.shape[1], 1)
    return rows @ dequantized(weight, scale).double().t()


def close(got: torch.Tensor, want: torch.Tensor, part: float = 2**-5) -> bool:
    """Whether all differences are within that part of the greatest magnitude. A number that rounds to the other one of float8
    is a 16th of itself off."""
    return bool((got - want).abs().max() <= part * want.abs().max())
