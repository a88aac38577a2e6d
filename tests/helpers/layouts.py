"""Weights in the layouts that checkpoints have, packed number by number as their formats are documented, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

GROUP = 64
STATIC_SCALE = 0.02  # of activations: those of a norm are within 448 of it
GLOBAL_SCALE = 300.0  # of activations in 4 bits: e4m3 has room for the scales of those up to 9
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Part = dict[str, torch.Tensor]


def _words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned numbers `[r, c]` in int32 `[r, c * bits / 32]`: number `order[i]` of a word in its bits from `i * bits` on."""
    per = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per, dtype=torch.int64)
    for i, place in enumerate(order or range(per)):
        words |= numbers[:, place::per].long() << (bits * i)
    return words.to(torch.int64).where(words < 2**31, words - 2**32).to(torch.int32)


def _quantized(weight: torch.Tensor, bits: int, symmetric: bool, index: torch.Tensor, groups: int, dtype: torch.dtype) -> tuple:
    """Unsigned numbers `[n, k]`, zero points and scales `[n, groups]`, and the exact weight that they mean, of float64."""
    scale, zero = torch.empty(len(weight), groups, dtype=dtype), torch.empty(len(weight), groups, dtype=torch.int64)
    numbers, top = torch.empty(weight.shape, dtype=torch.int64), 2**bits - 1
    for group in range(groups):
        values = weight[:, index == group].float()
        low, high = values.aminmax(dim=1)
        if symmetric:
            scale[:, group] = (values.abs().amax(1) / (top // 2)).to(dtype)
            zero[:, group] = 2 ** (bits - 1)
        else:
            scale[:, group] = ((high - low) / top).to(dtype)
            zero[:, group] = (-low / scale[:, group].float()).round().long().clamp(1, top)
        q = (values / scale[:, group].float()[:, None]).round().long() + zero[:, group, None]
        numbers[:, index == group] = q.clamp(0, top)
    exact = (numbers - zero[:, index]).double() * scale[:, index].double()
    return numbers, zero, scale, exact


def gptq(weight: torch.Tensor, bits: int = 4, symmetric: bool = False, act_order: bool = False, less: int = 1) -> tuple:
    """The tensors of a layer, its `quantization_config` and its exact weight."""
    k = weight.shape[1]
    index = torch.arange(k) // GROUP
    index = index[torch.randperm(k, generator=torch.Generator().manual_seed(1))] if act_order else index
    numbers, zero, scale, exact = _quantized(weight, bits, symmetric, index, k // GROUP, torch.float16)
    tensors: Part = {
        "qweight": _words(numbers, bits).t().contiguous(),
        "qzeros": _words(zero.t() - less, bits),
        "scales": scale.t().contiguous(),
        "g_idx": index.to(torch.int32),
    }
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": act_order,
        "sym": symmetric,
    }
    return tensors, config | {"checkpoint_format": "gptq" if less else "gptq_v2"}, exact


def awq(weight: torch.Tensor) -> tuple:
    k = weight.shape[1]
    numbers, zero, scale, exact = _quantized(weight, 4, False, torch.arange(k) // GROUP, k // GROUP, torch.float16)
    tensors: Part = {
        "qweight": _words(numbers.t(), 4, AWQ_ORDER),
        "qzeros": _words(zero.t(), 4, AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }
    return tensors, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, exact


def _scheme(form: str, kind: str, bits: int, strategy: str, symmetric: bool = True, inputs: str | None = None) -> dict:
    """A `quantization_config` of compressed-tensors. `inputs`: the strategy of activations in 8 bits."""
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": symmetric, "dynamic": False}
    if strategy == "group":
        weights["group_size"] = GROUP
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    if inputs is not None:
        group["input_activations"] = {"type": kind, "num_bits": 8, "symmetric": True, "dynamic": inputs != "tensor"}
        group["input_activations"] |= {"strategy": inputs, "group_size": GROUP if inputs == "group" else None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed(weight: torch.Tensor, bits: int = 4, symmetric: bool = True, strategy: str = "group") -> tuple:
    n, k = weight.shape
    groups = k // GROUP if strategy == "group" else 1
    index = torch.arange(k) // (k // groups)
    numbers, zero, scale, exact = _quantized(weight, bits, symmetric, index, groups, torch.bfloat16)
    tensors: Part = {"weight_packed": _words(numbers, bits), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    if not symmetric:
        tensors["weight_zero_point"] = _words(zero.t(), bits).t().contiguous()
    return tensors, _scheme("pack-quantized", "int", bits, strategy, symmetric), exact


def float8(weight: torch.Tensor, strategy: str = "channel", inputs: str | None = "token") -> tuple:
    rows = weight.float().abs().amax(1, keepdim=True) if strategy == "channel" else weight.float().abs().amax().reshape(1)
    scale = (rows / 448).bfloat16()
    data = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors: Part = {"weight": data, "weight_scale": scale}
    if inputs == "tensor":
        tensors["input_scale"] = torch.tensor([STATIC_SCALE])
    return tensors, _scheme("float-quantized", "float", 8, strategy, inputs=inputs), data.double() * scale.double()


def int8(weight: torch.Tensor) -> tuple:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    data = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    config = _scheme("int-quantized", "int", 8, "channel", inputs="token")
    return {"weight": data, "weight_scale": scale}, config, data.double() * scale.double()


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """The place in `E2M1` of what is nearest to each magnitude."""
    return (values.abs()[..., None].double() - torch.tensor(E2M1).double()).abs().argmin(-1)


def float4(weight: torch.Tensor, kind: str = "nvfp4", inputs: bool = False) -> tuple:
    """NVFP4 or MXFP4; `inputs`: rows in 4 bits too."""
    group, groups = (16, "tensor_group") if kind == "nvfp4" else (32, "group")
    values = weight.float().unflatten(1, (-1, group))
    greatest = values.abs().amax(2, keepdim=True)
    tensors: Part = {}
    if kind == "nvfp4":
        whole = (448 * 6 / weight.float().abs().amax()).reshape(1)
        scale = (whole * (greatest / 6)).to(torch.float8_e4m3fn)
        tensors = {"weight_global_scale": whole, "weight_scale": scale.flatten(1)}
        wide = scale.float() / whole
    else:
        exponent = (greatest / 6).log2().ceil()
        wide, tensors = exponent.exp2(), {"weight_scale": (exponent.flatten(1) + 127).to(torch.uint8)}
    place, signs = _nearest(values / wide), values < 0
    numbers = (place + 8 * signs).to(torch.uint8).flatten(1)
    tensors["weight_packed"] = numbers[:, 0::2] + 16 * numbers[:, 1::2]
    exact = torch.tensor(E2M1).double()[place] * torch.where(signs, -1, 1) * wide.double()
    config = _scheme(f"{kind}-pack-quantized", "float", 4, groups)
    chosen = config["config_groups"]["group_0"]
    dtype = "torch.float8_e4m3fn" if kind == "nvfp4" else "torch.uint8"
    chosen["weights"] |= {"group_size": group, "scale_dtype": dtype}
    if inputs:
        tensors["input_global_scale"] = torch.tensor([GLOBAL_SCALE])
        chosen["input_activations"] = chosen["weights"] | {"dynamic": "local"}
    return tensors, config, exact.flatten(1)


def rounding(config: dict) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the layers of a `quantization_config` do to their rows, row by row; None if nothing."""
    groups = config.get("config_groups") or {"": {}}
    if (inputs := groups.get("group_0", {}).get("input_activations")) is None:
        return None

    def rounded(x: torch.Tensor) -> torch.Tensor:
        rows = [_rounded_row(row, inputs) for row in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).view(x.shape)

    return rounded


def _rounded_row(row: torch.Tensor, inputs: dict) -> torch.Tensor:
    parts = row.split(inputs.get("group_size") or len(row))
    out = []
    for part in parts:
        if inputs["num_bits"] == 4:
            scale = (GLOBAL_SCALE * (part.abs().max() / 6)).to(torch.float8_e4m3fn).float()
            step = (scale if scale > 0 else torch.tensor(0.125)) / GLOBAL_SCALE
            out.append(torch.tensor(E2M1)[_nearest(part / step)] * part.sign() * step)
            continue
        range_ = 448 if inputs["type"] == "float" else 127.5
        step = part.abs().max() / range_ if inputs["dynamic"] else torch.tensor(STATIC_SCALE)
        if inputs["type"] == "float":
            numbers = (part / step).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        else:
            numbers = (part / step).round().clamp(-128, 127)
        out.append(numbers * step)
    return torch.cat(out)


LAYOUTS: dict[str, Any] = {
    "gptq": gptq,
    "gptq symmetric": lambda w: gptq(w, symmetric=True),
    "gptq v2": lambda w: gptq(w, less=0),
    "gptq in the order of activations": lambda w: gptq(w, act_order=True),
    "gptq of 8 bits": lambda w: gptq(w, 8, symmetric=True),
    "awq": awq,
    "packed": packed,
    "packed with zero points": lambda w: packed(w, symmetric=False),
    "packed rows": lambda w: packed(w, strategy="channel"),
    "packed of 8 bits": lambda w: packed(w, 8),
    "float8": float8,
    "float8 without inputs": lambda w: float8(w, inputs=None),
    "float8 with groups of inputs": lambda w: float8(w, inputs="group"),
    "float8 of one scale, static inputs": lambda w: float8(w, "tensor", "tensor"),
    "int8": int8,
    "nvfp4": float4,
    "nvfp4 with inputs of 4 bits": lambda w: float4(w, inputs=True),
    "mxfp4": lambda w: float4(w, "mxfp4"),
}
