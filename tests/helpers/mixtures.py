"""Calls of `moe_experts` in the forms of models, and what is exact for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from spec_ops.backends.expert_format import dequantized_expert, expert_format
from spec_ops.backends.weight_format import packed
from spec_ops.ops.reference import moe as reference


class Form(NamedTuple):
    """What the op takes after its tensors, and whether there are biases."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    biases: bool = False


FORMS = {
    "Qwen3-MoE": Form(),
    "gpt-oss": Form(interleaved=True, transposed=True, limit=1.5, alpha=1.702, beta=1.0, biases=True),
    "DeepSeek-V4": Form(limit=1.0),
    "Nemotron-H": Form("relu2", gated=False, biases=True),
    "gelu, transposed": Form("gelu", transposed=True, biases=True),
    "gelu_tanh, interleaved": Form("gelu_tanh", interleaved=True, beta=0.5),
    "relu, plain and transposed": Form("relu", gated=False, transposed=True),
}


def routing_ids(kind: str, tokens: int, experts: int, k: int, g: torch.Generator) -> torch.Tensor:
    """`[tokens, k]`: every token the same experts, any, or some of them far more often than others."""
    if kind == "identical":
        return torch.randperm(experts, generator=g)[:k].expand(tokens, k).contiguous()
    odds = torch.ones(experts) if kind == "uniform" else 1 / torch.arange(1, experts + 1)
    return torch.multinomial(odds.expand(tokens, experts), k, generator=g) if tokens else torch.zeros(0, k, dtype=torch.int64)


def call(
    form: Form, tokens: int, k: int, experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32,
    routing: str = "uniform", dropped: float = 0.0, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """The op's arguments. Results are about 1 in size. A share of the ids is no expert's, and has NaN for a weight."""
    g = torch.Generator().manual_seed(seed + 1000 * tokens + experts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    rows = inner * (2 if form.gated else 1)
    gate_up, down = normal(experts, rows, hidden) * hidden**-0.5, normal(experts, hidden, inner) * inner**-0.5
    if form.transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (normal(experts, rows).to(dtype), normal(experts, hidden).to(dtype)) if form.biases else (None, None)
    ids, weights = routing_ids(routing, tokens, experts, k, g), torch.rand(tokens, k, generator=g) / k
    gone = torch.rand(ids.shape, generator=g) < dropped
    ids = torch.where(gone, torch.where(torch.rand(ids.shape, generator=g) < 0.5, -1, experts + 3), ids)
    weights = weights.masked_fill(gone, float("nan"))
    return normal(tokens, hidden).to(dtype), ids, weights, gate_up.to(dtype), down.to(dtype), *biases, *form[:-1]


STORED = {"block": 8, "row": 8, "expert": 8, "MXFP4": 4, "int4-32": 4, "int4-64": 4}  # kinds of scales, and bits
PUBLISHED = Form(interleaved=True, limit=1.5, alpha=1.702, beta=1.0, biases=True)  # gpt-oss's, as it lies in its files


def stored_stack(stack: torch.Tensor, kind: str, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """`stack [E, n, k]` in 8 or 4 bits and its scales; each of the `parts` of n on its own."""
    _, n, k = stack.shape
    if kind == "MXFP4":
        groups = stack.float().unflatten(2, (-1, 32))
        power = (groups.abs().amax(3) / 6).log2().ceil().clamp(-127, 127)
        scaled = groups / 2.0 ** power[..., None]
        steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        code = (scaled.abs()[..., None] - steps).abs().argmin(-1) + 8 * (scaled < 0)
        code = code.flatten(2).to(torch.uint8)
        return code[..., ::2] | (code[..., 1::2] << 4), (power + 127).to(torch.uint8)
    if kind.startswith("int4"):
        group = 32 if k % 64 else int(kind.removeprefix("int4-"))
        groups = stack.float().unflatten(2, (-1, group))
        scale = (groups.abs().amax(3) / 7.5).to(torch.float32 if kind == "int4-32" else torch.float16)
        numbers = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(2)
        return packed(numbers.flatten(0, 1)).view(*stack.shape[:2], -1), scale
    rows, columns = {"block": (128, 128), "row": (1, k), "expert": (n // parts, k)}[kind]
    data, scales = [], []
    for part in stack.float().chunk(parts, 1):
        padded = torch.nn.functional.pad(part, (0, -k % columns, 0, -part.shape[1] % rows))
        blocks = padded.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))
        scale = blocks.abs().amax((2, 4)) / 448
        whole = (blocks / scale[:, :, None, :, None]).flatten(1, 2).flatten(2)
        data.append(whole[:, : part.shape[1], :k].to(torch.float8_e4m3fn))
        scales.append(scale)
    return torch.cat(data, 1), torch.cat(scales, 1)


def stored_call(form: Form, kind: str, *sizes: Any, **options: Any) -> tuple[Any, ...]:
    """The arguments of `call`, with weights of 8 or 4 bits."""
    args = call(form, *sizes, **options)
    gate_up, gate_up_scale = stored_stack(args[3], kind, 2 if form.gated and not form.interleaved else 1)
    down, down_scale = stored_stack(args[4], kind)
    return *args[:3], gate_up, down, *args[5:], gate_up_scale, down_scale


def dequantized_call(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call whose weights are those of a `stored_call`, in float32."""
    if len(args) == 14 or args[14] is None:
        return args[:14]
    stacks = []
    for name, stack, scale, parts in (
        ("gate_up", args[3], args[14], 2 if args[8] and not args[9] else 1),
        ("down", args[4], args[15], 1),
    ):
        stored = expert_format("test", name, stack, scale, parts)
        stacks.append(torch.stack([dequantized_expert(w, s, stored) for w, s in zip(stack, scale, strict=True)]))
    return *args[:3], *stacks, *args[5:14]


def exact(args: tuple[Any, ...]) -> torch.Tensor:
    """The result in float64; ids of no expert are dropped, as on CUDA."""
    x, ids, weights, gate_up, down, *rest = dequantized_call(args)
    ids = torch.where(ids < gate_up.shape[0], ids, -1)
    wide = [t.double() if isinstance(t, torch.Tensor) else t for t in (x, weights, gate_up, down, *rest)]
    return reference.moe_experts(wide[0], ids, *wide[1:])


def check_sorted(got: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor, experts: int) -> None:
    """That `sorted_pairs` has the order of a stable sort, where experts are."""
    by_expert, wanted = ids.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device)
    order, offsets = got
    assert (order.dtype, offsets.dtype, order.shape) == (torch.int64, torch.int32, wanted.shape)
    assert torch.equal(offsets, torch.searchsorted(by_expert, bounds, out_int32=True))
    there = slice(int(offsets[0]), int(offsets[-1]))
    assert torch.equal(order[there], wanted[there])
