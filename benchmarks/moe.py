"""`python -m benchmarks moe`: `moe_experts` on models' layers, beside transformers' `grouped_mm` and the bytes floor.

Each call has a routing of its own, so that experts come from memory and not from L2. The floor counts the weights of the
experts that are touched, which differ with the routing: no figure means anything without them.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.rows import write_rows
from benchmarks.timing import measure_ceilings, time_calls
from spec_ops.cli.options import Device, console, parse_device, parse_dtype, writable_file
from spec_ops.ops.moe import moe_experts, route_experts

ROUTINGS = ("uniform", "zipf", "identical")
PASSES_OVER_L2 = 3  # of 50 MB
STORED = ("mxfp4", "float8_block")


@dataclass(frozen=True)
class Shape:
    """One layer's experts. `peer`: module and class of transformers' experts."""

    experts: int
    k: int
    hidden: int
    inner: int
    peer: tuple[str, str]
    router: dict[str, Any]
    oss: bool = False

    @property
    def expert_elements(self) -> int:
        return 3 * self.hidden * self.inner + (self.oss and 2 * self.inner + self.hidden)

    @property
    def form(self) -> dict[str, Any]:
        if not self.oss:
            return {}
        return {"interleaved": True, "transposed": True, "limit": 7.0, "alpha": 1.702, "beta": 1.0}


_GROUPS = {"scoring": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5}
_QWEN, _OSS = ("qwen3_moe", "Qwen3MoeExperts"), ("gpt_oss", "GptOssExperts")
SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, _QWEN, {}),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, _OSS, {}, oss=True),
    "deepseek-v3": Shape(256, 8, 7168, 2048, ("deepseek_v3", "DeepseekV3Experts"), _GROUPS),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336, ("mixtral", "MixtralExperts"), {}),
    "tiny": Shape(16, 4, 64, 32, _QWEN, {}),
    "tiny-oss": Shape(8, 2, 64, 32, _OSS, {}, oss=True),
}
DEFAULT = ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3")


def logits_of(routing: str, tokens: int, shape: Shape, seed: int) -> torch.Tensor:
    """`[tokens, E]` logits whose top k are routed so; on the CPU."""
    g = torch.Generator().manual_seed(seed)
    gumbel = -torch.empty(tokens, shape.experts).exponential_(generator=g).log()
    if routing == "identical":
        return gumbel[:1].expand(tokens, -1).contiguous()
    if routing == "zipf":  # which experts are the frequent ones differs from call to call
        return gumbel - torch.arange(1, shape.experts + 1).log()[torch.randperm(shape.experts, generator=g)]
    return gumbel


def stacks(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights by the names of transformers, of about the size that keeps rows what they are."""

    def normal(*sizes: int, inputs: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(std=inputs**-0.5)

    e, h, i = shape.experts, shape.hidden, shape.inner
    if not shape.oss:
        return {"gate_up_proj": normal(e, 2 * i, h, inputs=h), "down_proj": normal(e, h, i, inputs=i)}
    made = {"gate_up_proj": normal(e, h, 2 * i, inputs=h), "down_proj": normal(e, i, h, inputs=i)}
    return made | {"gate_up_proj_bias": normal(e, 2 * i, inputs=h), "down_proj_bias": normal(e, h, inputs=i)}


def stored_stacks(shape: Shape, kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights of 8 or 4 bits and their scales, by the names of `moe_experts`, and biases; in 4 bits laid out as published."""
    e, h, i = shape.experts, shape.hidden, shape.inner
    made: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("gate_up", 2 * i, h), ("down", h, i)):
        size = columns**-0.5
        if kind == "mxfp4":
            made[name] = torch.randint(256, (e, rows, columns // 2), dtype=torch.uint8, device=device)
            exponent = 127 + round(math.log2(size / 2.6))  # the numbers' root mean square
            made[f"{name}_scale"] = torch.randint(
                exponent - 1, exponent + 2, (e, rows, columns // 32), dtype=torch.uint8, device=device
            )
        else:
            made[name] = torch.empty(e, rows, columns, dtype=dtype, device=device).normal_().to(torch.float8_e4m3fn)
            blocks = (-(-rows // 128), -(-columns // 128))
            made[f"{name}_scale"] = torch.empty(e, *blocks, device=device).uniform_(size / 2, size)
    if shape.oss:
        made["gate_up_bias"], made["down_bias"] = (torch.randn(e, n, device=device).to(dtype) for n in (2 * i, h))
    return made


def peer(shape: Shape, weights: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor] | None:
    """transformers' `grouped_mm` on these weights; None without transformers."""
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
    except ImportError:
        return None
    module = __import__(f"transformers.models.{shape.peer[0]}.modeling_{shape.peer[0]}", fromlist=[shape.peer[1]])
    kind = {"has_gate": True, "has_bias": shape.oss, "is_transposed": shape.oss, "has_post_expert_norm": False}
    numbers = {"num_experts": shape.experts, "alpha": 1.702, "limit": 7.0, "act_fn": torch.nn.functional.silu}
    experts = types.SimpleNamespace(**weights, **kind, **numbers, _is_expert_parallel=False)
    experts._apply_gate = functools.partial(getattr(module, shape.peer[1])._apply_gate, experts)
    return functools.partial(grouped_mm_experts_forward, experts)


def measure(
    name: str, tokens: int, routing: str, weights: dict[str, torch.Tensor], copy_rate: float, min_ms: float, with_peer: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """A row: microseconds of the op, of the router, of the peer, and the floor. `dtype`: of rows."""
    shape, ours_by_name = SHAPES[name], {n.replace("_proj", ""): w for n, w in weights.items()}
    device = ours_by_name["gate_up"].device
    expert_bytes = sum(weight[0].numel() * weight.itemsize for weight in weights.values())
    touched_bytes = min(shape.experts, tokens * shape.k) * expert_bytes
    count = min(2 + PASSES_OVER_L2 * 50_000_000 // touched_bytes, 16) if device.type == "cuda" else 1
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, shape.hidden, generator=g).to(device, dtype)
    logits = [logits_of(routing, tokens, shape, seed).to(device) for seed in range(count)]
    bias = torch.zeros(shape.experts, device=device) if "groups" in shape.router else None
    route = functools.partial(route_experts, k=shape.k, bias=bias, **shape.router)
    routed = [route(row) for row in logits]
    touched = sum(ids.unique().numel() for ids, _ in routed) / count
    form = {n: value for n, value in shape.form.items() if n != "transposed" or "gate_up_proj" in weights}
    ours = functools.partial(moe_experts, **ours_by_name, **form)
    timing = time_calls([functools.partial(ours, x, *r) for r in routed], min_ms=min_ms)
    row = {"model": name, "tokens": tokens, "routing": routing, "touched_experts": round(touched, 2), "us": round(timing.us, 2)}
    moved = touched * expert_bytes + dtype.itemsize * 2 * tokens * shape.hidden
    row["floor_us"] = round(moved / copy_rate * 1e6, 2)
    row["route_us"] = round(time_calls([lambda r=r: route(r)[1] for r in logits], min_ms=min_ms).us, 2)
    forward = peer(shape, weights) if with_peer and "gate_up_proj" in weights else None
    if forward is not None:
        # Their weights have the dtype of x: so do those of their routers in 16 bits.
        theirs = time_calls([functools.partial(forward, x, ids, w.to(dtype)) for ids, w in routed], min_ms=min_ms)
        row["peer_us"] = round(theirs.us, 2)
        got, wanted = timing.output.double(), theirs.output.double()
        row["difference"] = float(f"{((got - wanted).norm() / wanted.norm()).item():.3g}")
    return row


def bench_moe(
    model: Annotated[list[str] | None, typer.Option(help=", ".join(SHAPES) + "; may be repeated.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated; default 1 to 64.")] = None,
    routing: Annotated[list[str] | None, typer.Option(help=", ".join(ROUTINGS) + "; may be repeated; default all.")] = None,
    dtype: str = "bfloat16",
    weights: Annotated[
        str | None,
        typer.Option(help="mxfp4 or float8_block: as stored in so many bits, without the peer; default: of --dtype."),
    ] = None,
    copy_rate: Annotated[float | None, typer.Option(min=1, help="Bytes a second of the floor; default measured.")] = None,
    min_ms: Annotated[float, typer.Option(min=0, help="Of each measurement.")] = 4.0,
    no_peer: Annotated[bool, typer.Option("--no-peer", help="Without transformers' grouped_mm.")] = False,
    device: Device = None,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Also write the figures, with machine, versions and commit.")
    ] = None,
) -> None:
    """Microseconds of a layer's experts at few tokens, beside transformers' grouped_mm and the floor of the touched experts.

    On a CPU, give --model tiny: its times mean nothing."""
    place, rows_dtype = parse_device(device), parse_dtype(dtype)
    names, routings = model or list(DEFAULT), routing or list(ROUTINGS)
    stored = [weights] if weights is not None else []
    for option, given, known in (
        ("--model", names, tuple(SHAPES)), ("--routing", routings, ROUTINGS), ("--weights", stored, STORED),
    ):  # fmt: skip
        if unknown := [value for value in given if value not in known]:
            raise typer.BadParameter(f"must be one of {', '.join(known)}, got {', '.join(unknown)}", param_hint=option)
    rate = measure_ceilings(place, copy_rate, matmul=1.0).copy
    rows, table = [], Table("model", "tokens", "routing", "touched", "us", "floor", "times floor", "grouped_mm", "router")
    for name in names:
        shape = SHAPES[name]
        made = stacks(shape, rows_dtype, place) if weights is None else stored_stacks(shape, weights, rows_dtype, place)
        for kind in routings:
            for count in tokens or (1, 4, 8, 16, 32, 64):
                row = measure(name, count, kind, made, rate, min_ms, not no_peer, rows_dtype)
                rows.append(row if weights is None else {"weights": weights, **row})
                cells = (row["touched_experts"], row["us"], row["floor_us"], f"{row['us'] / row['floor_us']:.2f}")
                table.add_row(name, str(count), kind, *map(str, cells), str(row.get("peer_us", "")), str(row["route_us"]))
        del made
    console.print(table)
    if json is not None:
        write_rows(json, rows, copy_rate=rate)
