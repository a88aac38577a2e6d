"""Weights of 8 and 4 bits for any model of linear layers: the passes read them as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spec_ops._extras import install_hint
from spec_ops.backends.weight_format import BLOCK, E2M1_MAX, FLOAT4_GROUPS, GROUPS, e2m1, e8m0, packed, packed_e2m1
from spec_ops.models.layers import Mixture
from spec_ops.models.quantized_experts import EXPERT_KINDS, is_stored, mixtures, store_experts
from spec_ops.models.stored_tensor import Inputs, StoredTensor

KINDS = ("float8", "float8_block", "float8_tensor", "float8_dynamic", "float8_block_dynamic", "int8", "int4", "nvfp4", "mxfp4")
_DYNAMIC = "_dynamic"  # of a kind whose rows are rounded too
_COLUMNS = 2 * min(GROUPS)  # what the kernels need k to be a multiple of
_GROUP = 128  # columns that share a scale in 4 bits, where k is a multiple of it; torchao's default
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
_SCALES = [0.85 + 0.05 * i for i in range(14)]  # times the one with which 4-bit floats cover a group's range
_RANGES = [1 - 0.02 * i for i in range(16)]  # parts of a group's range that 4 bits may cover


def quantize(model: nn.Module, kind: str = "float8", *, lm_head: bool = True) -> nn.Module:
    """Store the weights of a model's linear layers in 8 or 4 bits, in place. Activations keep their dtype, and their values but
    for the kinds that end in `_dynamic`.

    The weights become torchao's `Float8Tensor` or `Int8Tensor`, but for kinds that become `StoredTensor`: `"float8_block"`,
    which torchao has for 8-bit activations alone; those that end in `_dynamic`; `"int4"`, in the layout of torchao's
    `Int4Tensor`, whose own kernels need a GPU and one more package; `"nvfp4"` and `"mxfp4"`, of which torchao has prototypes.
    Biases, embeddings, norms, routers and layers whose input is no multiple of 64 stay as they are, and so do layers that are
    quantized already, such as an LM head that a draft shares with its target. The experts of this package's mixtures are stored
    too where `moe_experts` reads the kind: those of float8, `"int4"` (without zero points), and `"mxfp4"`. Their rows are never
    rounded: `"float8_dynamic"` and `"float8_block_dynamic"` store experts as `"float8"` and `"float8_block"` do. Load weights
    of checkpoints first. The state dict of a quantized model has what is stored, of joined layers under their own names
    (`qkv_proj`), and goes to a model that is quantized alike, or with `assign=True` to any of its shape if no experts are
    stored.

    Args:
        model: of any kind; ours, or one of transformers.
        kind: `"float8"`: float8_e4m3fn with a float32 scale for each row (output channel). `"float8_block"`: with one for each
            block of 128 x 128, as in DeepSeek's and Qwen's checkpoints. `"float8_tensor"`: with one for each weight.
            `"float8_dynamic"`: as `"float8"`, and each row that meets a weight is rounded to float8 too, with a float32 scale
            of its own. `"float8_block_dynamic"`: as `"float8_block"`, and rows are rounded with a scale for 128 columns each
            (64 where 128 does not divide them), as DeepSeek's code does. `"int8"`: int8 with a scale for each row. `"int4"`: 4
            bits, a scale and a zero point for 128 columns of a row each (64 where 128 does not divide them). `"nvfp4"`: 4-bit
            floats, a scale of float8_e4m3fn for 16 columns of a row, and a float32 scale for each weight. `"mxfp4"`: 4-bit
            floats, a power of 2 for 32 columns of a row.
        lm_head: whether layers of that name are quantized too.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown `kind`; a model without a linear layer to quantize, or with none left.
        ImportError: torchao is not installed, which `"float8"`, `"float8_tensor"` and `"int8"` need.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: `model` must be a torch.nn.Module, got {type(model).__name__}")
    if kind not in KINDS:
        raise ValueError(f"quantize: `kind` must be one of {list(KINDS)}, got {kind!r}")
    layers = linear_layers(model, lm_head)
    if (of_experts := kind.removesuffix(_DYNAMIC)) in EXPERT_KINDS:
        for mixture in mixtures(model):
            store_experts(mixture, of_experts, STORED.get(of_experts, float8_tensor))
    if (store := STORED.get(kind)) is not None:
        for layer in layers:
            layer.weight = nn.Parameter(store(layer.weight), requires_grad=False)
        return model
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, PerRow, PerTensor, quantize_
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torchao":
            raise
        raise ImportError(f"quantize: needs torchao: {install_hint('quantize')}", name="torchao") from error
    # Inductor's settings stay the user's.
    config: Any
    if kind == "int8":
        config = Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False)
    else:
        granularity = PerRow() if kind == "float8" else PerTensor()
        config = Float8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
    chosen = {id(layer) for layer in layers}
    quantize_(model, config, filter_fn=lambda module, _: id(module) in chosen)
    return model


def linear_layers(model: nn.Module, lm_head: bool = True) -> list[nn.Linear]:
    """Those of `model` that `quantize` stores anew; raises as it does if there are none."""
    routers = {mixture.router for mixture in mixtures(model)}
    named = [(name, module) for name, module in model.named_modules() if module not in routers]
    found = [module for name, module in named if _is_linear(name, module, lm_head)]
    chosen: list[Any] = [module for module in found if not is_quantized(module)]
    if not chosen:
        got = "one that is quantized already" if found else type(model).__name__
        raise ValueError(f"quantize: `model` must have linear layers with an input of a multiple of {_COLUMNS}, got {got}")
    return chosen


@torch.no_grad()
def float8_tensor(weight: torch.Tensor, rows: int = BLOCK, columns: int = BLOCK) -> StoredTensor:
    """`weight [n, k]` in float8_e4m3fn, with a float32 scale for each `rows` x `columns` of it, whose greatest magnitude
    becomes the greatest number of float8.

    Args:
        weight: floating-point.
        rows, columns: 128 x 128, 1 x k, or n x k.
    """
    n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)) / _FLOAT8_MAX
    numbers = blocks / torch.where(scale == 0, 1, scale)[:, None, :, None]
    stored = numbers.view(padded.shape)[:n, :k].to(torch.float8_e4m3fn).contiguous()
    return StoredTensor(stored, scale, dtype=weight.dtype)


def float8_dynamic_tensor(weight: torch.Tensor) -> StoredTensor:
    """`weight [n, k]` in float8_e4m3fn with a scale for each row, for rows that are rounded with a scale each."""
    return _with_rounded_rows(float8_tensor(weight, 1, weight.shape[1]), 0)


def float8_block_dynamic_tensor(weight: torch.Tensor) -> StoredTensor:
    """`weight [n, k]` in float8_e4m3fn with a scale for each 128 x 128, for rows that are rounded with one for 128 columns, or
    for 64 where 128 does not divide k, a multiple of 64."""
    return _with_rounded_rows(float8_tensor(weight), BLOCK if weight.shape[1] % BLOCK == 0 else BLOCK // 2)


def _with_rounded_rows(weight: StoredTensor, group: int) -> StoredTensor:
    return StoredTensor(weight.data_, weight.scale, dtype=weight.dtype, inputs=Inputs("float8", group, float32_scales=True))


@torch.no_grad()
def int4_tensor(weight: torch.Tensor, group: int = _GROUP) -> StoredTensor:
    """`weight [n, k]` in 4 bits: the 16 numbers of a group are evenly spaced. Of several ranges, all around the middle of the
    group's values, each group has the one whose squared error is least.

    Args:
        weight: floating-point, k a multiple of 64.
        group: columns that share a scale; half of it where it does not divide k.
    """
    group = group if weight.shape[1] % group == 0 else group // 2
    values = weight.float().unflatten(1, (-1, group))
    low, high = values.aminmax(dim=2)
    middle, half = (low + high) / 2, (high - low) / 2
    least = torch.full_like(low, torch.inf)
    scale, zero = (torch.empty_like(low, dtype=weight.dtype) for _ in range(2))
    numbers = torch.empty_like(values, dtype=torch.int8)
    for part in _RANGES:
        # Rounded first, so that numbers are nearest to what is dequantized. A group of one value has the scale 0.
        s = (2 * part * half / 15).to(weight.dtype)
        z = (middle - part * half + 8 * s.float()).to(weight.dtype)
        wide, start = s.float()[..., None], z.float()[..., None]
        found = ((values - start) / torch.where(wide == 0, 1, wide)).round_().clamp_(-8, 7)
        error = (found * wide + start - values).square_().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
        numbers = torch.where(better[..., None], found.to(torch.int8), numbers)
    return StoredTensor(packed(numbers.flatten(1)), scale, zero, dtype=weight.dtype)


@torch.no_grad()
def nvfp4_tensor(weight: torch.Tensor) -> StoredTensor:
    """`weight [n, k]` in 4-bit floats. Of several scales, around the one that makes the greatest magnitude of a group 6, each
    group has the one whose squared error is least; the greatest of those is 448 times the weight's scale.

    Args:
        weight: floating-point, k a multiple of 16.
    """
    values = weight.float().unflatten(1, (-1, FLOAT4_GROUPS["nvfp4"]))
    greatest = values.abs().amax(2)
    whole = (greatest.amax() / (E2M1_MAX * _FLOAT8_MAX)).reshape(1)
    full = greatest / (E2M1_MAX * _divisor(whole))
    least, scale = torch.full_like(full, torch.inf), full.to(torch.float8_e4m3fn)
    data = weight.new_zeros(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
    for part in _SCALES:
        s = (part * full).clamp(max=_FLOAT8_MAX).to(torch.float8_e4m3fn)
        wide = (s.float() * whole)[..., None]
        found = packed_e2m1((values / _divisor(wide)).flatten(1))
        error = (e2m1(found).view(values.shape) * wide - values).square_().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, s.view(torch.uint8), scale.view(torch.uint8)).view(torch.float8_e4m3fn)
        data = torch.where(better.repeat_interleave(values.shape[2] // 2, 1), found, data)
    return StoredTensor(data, scale, tensor_scale=whole, dtype=weight.dtype)


@torch.no_grad()
def mxfp4_tensor(weight: torch.Tensor) -> StoredTensor:
    """`weight [n, k]` in 4-bit floats; of the two powers of 2 around a sixth of the greatest magnitude of a group, it has the
    one whose squared error is less. (The lesser one cuts magnitudes off that the greater one has only coarse numbers for.)

    Args:
        weight: floating-point, k a multiple of 32.
    """
    values = weight.float().unflatten(1, (-1, FLOAT4_GROUPS["mxfp4"]))
    greatest = values.abs().amax(2) / E2M1_MAX
    lesser = (_divisor(greatest).log2().floor() + 127).clamp(0, 253).to(torch.uint8)
    made = [
        StoredTensor(packed_e2m1((values / e8m0(scale)[..., None]).flatten(1)), scale, dtype=weight.dtype)
        for scale in (lesser, lesser + 1)
    ]
    errors = [(part.dequantize().view(values.shape) - values).square_().sum(2) for part in made]
    up = errors[1] < errors[0]
    data = torch.where(up.repeat_interleave(values.shape[2] // 2, 1), made[1].data_, made[0].data_)
    return StoredTensor(data, torch.where(up, made[1].scale, made[0].scale), dtype=weight.dtype)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """`scale`, and 1 where that is 0: what it divides is 0 too, or becomes 0 times it."""
    return torch.where(scale == 0, 1, scale)


STORED: dict[str, Callable[[torch.Tensor], StoredTensor]] = {
    "float8_block": float8_tensor,
    "float8_dynamic": float8_dynamic_tensor,
    "float8_block_dynamic": float8_block_dynamic_tensor,
    "int4": int4_tensor,
    "nvfp4": nvfp4_tensor,
    "mxfp4": mxfp4_tensor,
}


def is_quantized(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is stored in another form than a plain floating-point tensor."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and (type(weight.data) is not torch.Tensor or weight.element_size() < 2)


def check_plain(op: str, argument: str, model: nn.Module, shared: nn.Module | None = None) -> None:
    """Raises a ValueError of `op` that names a weight of `argument` which is quantized: state dicts do not hold such. Those of
    `shared` may be."""
    others = set() if shared is None else set(shared.modules())
    for name, module in model.named_modules():
        if module in others:
            continue
        experts = isinstance(module, Mixture) and is_stored(module)
        if experts or is_quantized(module):
            weight: Any = (module.gate_up_proj if experts else module.weight).data
            got = weight.dtype if type(weight) is torch.Tensor else type(weight).__name__
            last = "gate_up_proj" if experts else "weight"
            where = f"{name}.{last}" if name else last
            wanted = "have the weights that it had before `quantize`"
            raise ValueError(f"{op}: `{argument}` must {wanted}, got `{where}` as {got}")


def _is_linear(name: str, module: nn.Module, lm_head: bool) -> bool:
    if not isinstance(module, nn.Linear) or module.in_features % _COLUMNS or not module.weight.numel():
        return False
    return lm_head or name.rpartition(".")[2] != "lm_head"
