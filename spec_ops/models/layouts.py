"""Layouts in which checkpoints store linear layers of 8 and 4 bits, and what they become: `StoredTensor`s.

| method | tensors of a layer | numbers |
|---|---|---|
| GPTQ | `qweight` int32 `[k / 8, n]`, `qzeros` int32 `[k / group, n / 8]`, `scales` `[k / group, n]`, `g_idx` | 4 or 8 bits |
| AWQ (gemm) | `qweight` int32 `[k, n / 8]`, `qzeros` int32 `[k / group, n / 8]`, `scales` `[k / group, n]` | 4 bits |
| compressed-tensors | `weight_packed` int32 `[n, k / 8]`, `weight_scale`, `weight_zero_point`, `weight_shape` | 4 or 8 bits |
| compressed-tensors | `weight` float8_e4m3fn or int8 `[n, k]`, `weight_scale` | 8 bits |
| compressed-tensors | `weight_packed` uint8 `[n, k / 2]`, `weight_scale` float8_e4m3fn, `weight_global_scale` `[1]` | NVFP4 |
| compressed-tensors | `weight_packed` uint8 `[n, k / 2]`, `weight_scale` uint8 | MXFP4 |

8 numbers of 4 bits are in an int32, 4 of 8 bits, the first in the lowest bits; AWQ has them in the order 0 2 4 6 1 3 5 7. All
integers but `weight` are unsigned, with zero points; GPTQ stores zero points less 1 (`checkpoint_format` "gptq_v2" does not).
NVFP4 is divided by `weight_global_scale`. A layer becomes what `spec_ops.backends.weight_format` describes, without another
rounding; the inverse of that one scale is rounded to float32.

Sources: GPTQModel's and AutoAWQ's formats, compressed-tensors' `pack_quantized`, `naive_quantized`, `nvfp4`, `mxfp4`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

from spec_ops.backends.weight_format import FLOAT4, FLOAT4_GROUPS, GROUPS, SCALE_DTYPES, packed
from spec_ops.models.stored_tensor import Inputs, StoredTensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOAT4_FORMATS = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", *_FLOAT4_FORMATS)
_PACKED = ("weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_PLAIN = ("weight", "weight_scale", "weight_zero_point")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")

Tensors = Mapping[str, torch.Tensor]


class Layout(NamedTuple):
    """How a checkpoint stores linear layers.

    Attributes:
        marks: names of tensors that only a quantized layer has.
        names: of all tensors of a layer but its bias; not every layer has each.
        stored: the weight of tensors by name, of `n` rows and `k` columns, as a tensor of a dtype.
    """

    marks: tuple[str, ...]
    names: tuple[str, ...]
    stored: Callable[[Tensors, int, int, torch.dtype], StoredTensor]


def layout_of(quantization: Mapping[str, Any]) -> Layout:
    """The layout that a checkpoint's `quantization_config` names.

    Raises:
        ValueError: naming the field whose value is of a layout that is not known.
    """
    method = quantization.get("quant_method")
    if method == "gptq":
        bits, form = cast(int, quantization.get("bits")), quantization.get("checkpoint_format") or "gptq"
        _expect("bits", bits, (4, 8))
        _expect("checkpoint_format", form, ("gptq", "gptq_v2"))

        def gptq(tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> StoredTensor:
            return _gptq(tensors, n, k, dtype, bits, 1 if form == "gptq" else 0)

        return Layout(("qweight",), ("qweight", "qzeros", "scales", "g_idx"), gptq)
    if method == "awq":
        _expect("bits", quantization.get("bits", quantization.get("w_bit")), (4,))
        _expect("version", str(quantization.get("version", quantization.get("format", "gemm"))).lower(), ("gemm",))
        return Layout(("qweight",), ("qweight", "qzeros", "scales"), _awq)
    if method == "compressed-tensors":
        found = {
            name: _inputs_of_group(name, group, quantization.get("format"))
            for name, group in (quantization.get("config_groups") or {}).items()
        }
        if len(set(found.values())) > 1:
            raise ValueError(f"`config_groups` must have the same `input_activations`, got {found}")
        for name in ("kv_cache_scheme", "transform_config"):
            _expect(name, quantization.get(name) or None, (None,))
        sparsity = (quantization.get("sparsity_config") or {}).get("format") or "dense"
        _expect("sparsity_config.format", sparsity, ("dense",))
        names = tuple(dict.fromkeys((*_PACKED, *_PLAIN, *_ACTIVATIONS)))
        inputs = next(iter(found.values()), None)
        groups = (quantization.get("config_groups") or {}).values()
        floats = {_FLOAT4_FORMATS.get(str(group.get("format") or quantization.get("format"))) for group in groups}

        def compressed(tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> StoredTensor:
            if (words := tensors.get("weight_packed")) is not None and words.dtype == torch.uint8:
                return _with_inputs(_float4(tensors, n, k, dtype, floats), inputs, tensors)
            return _with_inputs(_compressed(tensors, n, k, dtype), inputs, tensors)

        return Layout(("weight_packed", "weight_scale"), names, compressed)
    raise ValueError(f"`quant_method` must be one of ['gptq', 'awq', 'compressed-tensors'], got {method!r}")


def _expect(field: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        wanted = f"one of {list(known)}" if len(known) > 1 else str(known[0])
        raise ValueError(f"`{field}` must be {wanted}, got {value!r}")


def _inputs_of_group(name: str, group: Mapping[str, Any], default: Any) -> tuple[Inputs, bool] | None:
    """How layers of one of compressed-tensors' `config_groups` round their rows, and whether with scales of their own; None if
    they do not."""
    form, weights = group.get("format") or default, group.get("weights")
    _expect(f"config_groups.{name}.format", form, _FORMATS)
    if not weights:
        raise ValueError(f"`config_groups.{name}.weights` must be given, got {weights!r}")
    kind = (weights.get("type") or "int", weights.get("num_bits"))
    if (float4 := _FLOAT4_FORMATS.get(form)) is not None:
        for field, known in (("type", "float"), ("num_bits", 4), ("group_size", FLOAT4_GROUPS[float4])):
            _expect(f"config_groups.{name}.weights.{field}", weights.get(field), (known,))
        _expect(f"config_groups.{name}.weights.symmetric", weights.get("symmetric", True), (True,))
    elif kind not in (("int", 4), ("int", 8), ("float", 8)):
        raise ValueError(f"`config_groups.{name}.weights` must be int of 4 or 8 bits or float of 8, got {kind[0]} of {kind[1]}")
    _expect(f"config_groups.{name}.output_activations", group.get("output_activations"), (None,))
    if not (rows := group.get("input_activations")):
        return None
    where = f"config_groups.{name}.input_activations"
    if float4 == "nvfp4" and rows.get("num_bits") == 4:
        given = {"type": "float", "strategy": "tensor_group", "dynamic": "local"}
        for field, wanted in given.items():
            _expect(f"{where}.{field}", rows.get(field), (wanted,))
        _expect(f"{where}.group_size", rows.get("group_size"), (FLOAT4_GROUPS[float4],))
        _expect(f"{where}.symmetric", rows.get("symmetric", True), (True,))
        # Checkpoints of earlier releases do not say it.
        _expect(f"{where}.scale_dtype", rows.get("scale_dtype") or "torch.float8_e4m3fn", ("torch.float8_e4m3fn",))
        return Inputs("nvfp4", FLOAT4_GROUPS[float4]), False
    _expect(f"{where}.num_bits", rows.get("num_bits"), (8,))
    _expect(f"{where}.symmetric", rows.get("symmetric", True), (True,))
    # Dynamic scales of whole batches would let a row's tokens depend on its neighbours.
    dynamic = bool(rows.get("dynamic"))
    _expect(f"{where}.strategy", rows.get("strategy") or "tensor", ("token", "group") if dynamic else ("tensor",))
    size = rows.get("group_size") or 0 if rows.get("strategy") == "group" else 0
    return Inputs("float8" if rows.get("type") == "float" else "int8", size), dynamic


def _with_inputs(weight: StoredTensor, found: tuple[Inputs, bool] | None, tensors: Tensors) -> StoredTensor:
    """`weight` of a layer that rounds its rows."""
    if found is None:
        return weight
    inputs, dynamic = found
    name = "input_global_scale" if inputs.kind == "nvfp4" else "input_scale"
    scale = tensors.get(name)
    if not dynamic and (scale is None or scale.numel() != 1):
        raise ValueError(f"`{name}` must be one number, got {None if scale is None else list(scale.shape)}")
    if scale is not None:  # of 8 bits in the dtype in which rows meet it, so that no kernel converts it in each round
        scale = _global_scale(tensors, name) if inputs.kind == "nvfp4" else scale.to(weight.dtype)
    if inputs.group and weight.shape[1] % inputs.group:
        raise ValueError(f"groups of activations must divide {weight.shape[1]} columns, got {inputs.group}")
    parts = {"tensor_scale": weight.tensor_scale, "order": weight.order, "input_scale": None if dynamic else scale}
    return StoredTensor(weight.data_, weight.scale, weight.zero, dtype=weight.dtype, inputs=inputs, **parts)


def _gptq(tensors: Tensors, n: int, k: int, dtype: torch.dtype, bits: int, less: int) -> StoredTensor:
    groups = _scales(tensors, "scales").shape[0]
    per = 32 // bits
    _check(tensors, qweight=(k // per, n), qzeros=(groups, n // per), scales=(groups, n))
    numbers = _unpacked(tensors["qweight"].t(), bits)
    zeros = (_unpacked(tensors["qzeros"], bits) + less) & (2**bits - 1) if less else _unpacked(tensors["qzeros"], bits)
    order = None
    if (index := tensors.get("g_idx")) is not None:
        _check(tensors, g_idx=(k,))
        order = _order(index.long(), k // groups, "g_idx")
    return _affine(numbers, tensors["scales"].t(), zeros.t(), bits, dtype, order)


def _awq(tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> StoredTensor:
    groups = _scales(tensors, "scales").shape[0]
    _check(tensors, qweight=(k, n // 8), qzeros=(groups, n // 8), scales=(groups, n))
    place = torch.tensor(_AWQ_ORDER).argsort()  # of column i among the 8 in an int32
    numbers, zeros = (
        _unpacked(tensors[name], 4).unflatten(1, (-1, 8))[:, :, place].flatten(1).t() for name in ("qweight", "qzeros")
    )
    return _affine(numbers, tensors["scales"].t(), zeros, 4, dtype, None)


def _compressed(tensors: Tensors, n: int, k: int, dtype: torch.dtype) -> StoredTensor:
    scale = _scales(tensors, "weight_scale")
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    if "weight_packed" not in tensors:
        _check(tensors, weight=(n, k))
        if (zero := tensors.get("weight_zero_point")) is not None and bool(zero.float().any()):
            raise ValueError("`weight_zero_point` must be 0 with 8 bits")
        return StoredTensor(tensors["weight"], _regrouped(scale, k) if scale.shape[1] > 1 else scale, dtype=dtype)
    words = tensors["weight_packed"]
    _check_weight_shape(tensors, n, k)
    bits = 32 * words.shape[-1] // k
    if bits not in (4, 8) or tuple(words.shape) != (n, k * bits // 32):
        raise ValueError(f"`weight_packed` must be [{n}, {k // 8}] or [{n}, {k // 4}], got {list(words.shape)}")
    scale = scale.expand(n, -1)
    zeros, order = None, None
    if (zero := tensors.get("weight_zero_point")) is not None:
        _check(tensors, weight_zero_point=(n * bits // 32, scale.shape[1]))
        zeros = _unpacked(zero.t(), bits).t()
    if (index := tensors.get("weight_g_idx")) is not None:
        _check(tensors, weight_g_idx=(k,))
        order = _order(index.long(), k // scale.shape[1], "weight_g_idx")
    return _affine(_unpacked(words, bits), scale, zeros, bits, dtype, order)


def _float4(tensors: Tensors, n: int, k: int, dtype: torch.dtype, formats: set[str | None]) -> StoredTensor:
    """`formats`: those of `FLOAT4` that the checkpoint says it has."""
    scale = tensors.get("weight_scale")
    kind = None if scale is None else FLOAT4.get(scale.dtype)
    if scale is None or kind is None or kind not in formats:
        wanted = " or ".join(f"{dtype}" for dtype, name in FLOAT4.items() if name in formats) or "beside another `format`"
        raise ValueError(f"`weight_scale` must be {wanted}, got {None if scale is None else scale.dtype}")
    size = FLOAT4_GROUPS[kind]
    _check(tensors, weight_packed=(n, k // 2), weight_scale=(n, k // size))
    _check_weight_shape(tensors, n, k)
    if (zero := tensors.get("weight_zero_point")) is not None and bool(zero.float().any()):
        raise ValueError("`weight_zero_point` must be 0 with 4-bit floats")
    if (index := tensors.get("weight_g_idx")) is not None and _order(index.long(), size, "weight_g_idx") is not None:
        raise ValueError("`weight_g_idx` must have the columns of 4-bit floats in order")
    if kind == "mxfp4":
        if "weight_global_scale" in tensors:
            raise ValueError("`weight_global_scale` must not be given beside scales of e8m0")
        if bool((scale == 255).any()):
            raise ValueError("`weight_scale` must be of numbers, got 255, which is NaN")
        return StoredTensor(tensors["weight_packed"], scale, dtype=dtype)
    if bool(scale.float().isnan().any()):
        raise ValueError("`weight_scale` must be of numbers, got NaN")
    whole = _global_scale(tensors, "weight_global_scale").reciprocal()
    return StoredTensor(tensors["weight_packed"], scale, tensor_scale=whole, dtype=dtype)


def _check_weight_shape(tensors: Tensors, n: int, k: int) -> None:
    if (given := tensors.get("weight_shape")) is not None and given.tolist() != [n, k]:
        raise ValueError(f"`weight_shape` must be {[n, k]}, got {given.tolist()}")


def _global_scale(tensors: Tensors, name: str) -> torch.Tensor:
    """What scales of e4m3 are divided by, `[1]` float32."""
    scale = tensors.get(name)
    if scale is None or scale.numel() != 1 or not 0 < float(scale) < torch.inf:
        got = None if scale is None else scale.tolist()
        raise ValueError(f"`{name}` must be one positive number, got {got}")
    if not scale.float().reciprocal().isfinite():
        raise ValueError(f"`{name}` must have an inverse in float32, got {scale.tolist()}")
    return scale.float().reshape(1)


def _scales(tensors: Tensors, name: str) -> torch.Tensor:
    if (scale := tensors.get(name)) is None or scale.dim() > 2 or scale.dtype not in SCALE_DTYPES:
        got = None if scale is None else f"{scale.dtype} of {list(scale.shape)}"
        raise ValueError(f"`{name}` must be of float32, bfloat16 or float16 and of two dimensions, got {got}")
    return scale if scale.dim() == 2 else scale.view(-1, 1)


def _check(tensors: Tensors, **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        if (tensor := tensors.get(name)) is None or tuple(tensor.shape) != shape:
            raise ValueError(f"`{name}` must be {list(shape)}, got {None if tensor is None else list(tensor.shape)}")


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned numbers in int32 `[r, c]`, `[r, c * 32 / bits]`."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed numbers must be int32, got {words.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)


def _order(index: torch.Tensor, size: int, name: str) -> torch.Tensor | None:
    """The columns by their groups, of which `index` has a number each; None if they are in order."""
    if bool((index < 0).all()):  # compressed-tensors: not set
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], torch.arange(len(index), device=index.device) // size):
        raise ValueError(f"`{name}` must have {size} columns for each group")
    return None if torch.equal(order, torch.arange(len(index), device=index.device)) else order


def _affine(
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
    order: torch.Tensor | None,
) -> StoredTensor:
    """Unsigned `numbers [n, k]` in the order of their groups if `order` is None, `scale [n, groups]`, zero points alike."""
    k, middle = numbers.shape[1], 2 ** (bits - 1)
    if order is not None:
        numbers = numbers[:, order]
    signed = (numbers - middle).to(torch.int8)
    shift = None if zeros is None or bool((zeros == middle).all()) else middle - zeros
    scale = scale.contiguous()
    if bits == 8:
        if shift is not None:
            raise ValueError(f"zero points of 8 bits must be {middle}, the middle, got others")
        return StoredTensor(
            signed.contiguous(), scale if scale.shape[1] == 1 else _regrouped(scale, k), dtype=dtype, order=order
        )
    # In float32 the products of a scale of 16 bits with a zero point are exact.
    zero = None if shift is None else _regrouped(shift * scale.float(), k)
    scale = _regrouped(scale if zero is None else scale.float(), k)
    return StoredTensor(packed(signed), scale, zero, dtype=dtype, order=order)


def _regrouped(scale: torch.Tensor, k: int) -> torch.Tensor:
    """`scale [n, groups]`, repeated where the groups of k columns are larger than kernels take."""
    size = k // scale.shape[1]
    known = next((group for group in reversed(GROUPS) if size % group == 0), None)
    if known is None or size * scale.shape[1] != k:
        raise ValueError(f"groups must be multiples of {GROUPS[0]} columns, got {scale.shape[1]} for {k} columns")
    return scale if size in GROUPS else scale.repeat_interleave(size // known, 1)
