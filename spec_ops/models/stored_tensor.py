"""A weight of 8 or 4 bits in the place of a linear layer's: the layer stays a `torch.nn.Linear`.

torchao's tensors are the model for it. This one holds any format of `spec_ops.backends.weight_format`, needs no kernel of
another package, and traces to a dequantization that the pass `lower_skinny_mm` knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from spec_ops.backends.weight_format import columns_of, dequantized, weight_format
from spec_ops.models.eager_products import eager_linear, is_eager
from spec_ops.models.inputs import Inputs

aten = torch.ops.aten
_PARTS = ("data_", "scale", "zero", "tensor_scale", "order", "input_scale")


class StoredTensor(torch.Tensor):
    """A weight `[n, k]` of a linear layer, stored in 8 or 4 bits. Rows meet the dequantized weight in their own dtype, unless
    they were rounded to float8 and `eager_products.py`, or a pass, multiplies them as they are.

    Other operations than `torch.nn.functional.linear`, copies and moves are refused. State dicts hold it as it is stored, and
    `torch.save` writes it.

    Args:
        data, scale, zero, tensor_scale: see `spec_ops.backends.weight_format`; not copied.
        dtype: what the tensor says its dtype is.
        order: `[k]` int64: column i of what is stored is column `order[i]` of the weight. None: they are in order.
        inputs: how rows are rounded before they meet the weight; None: not at all.
        input_scale: `[1]`: of all rows, for `inputs` without groups and for `"nvfp4"`. None: each row has its own.

    Raises:
        TypeError, ValueError: a weight of no known format; `order` or `input_scale` of another shape or dtype.
    """

    data_: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    tensor_scale: torch.Tensor | None
    order: torch.Tensor | None
    input_scale: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        data: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        inputs: Inputs | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> StoredTensor:
        shape = (data.shape[0], columns_of(data))
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)  # type: ignore[attr-defined]

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        inputs: Inputs | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> None:
        weight_format("StoredTensor", data, scale, zero, tensor_scale)
        if order is not None and (order.shape != self.shape[1:] or order.dtype != torch.int64):
            raise ValueError(
                f"StoredTensor: `order` must be [{self.shape[1]}] of torch.int64, got {order.dtype} of {list(order.shape)}"
            )
        shared = inputs is not None and (inputs.kind == "nvfp4" or not inputs.group)
        if input_scale is None and inputs is not None and inputs.kind == "nvfp4":
            raise ValueError("StoredTensor: `input_scale` must be given for `inputs` of nvfp4, got None")
        if input_scale is not None and not (shared and input_scale.numel() == 1):
            raise ValueError(f"StoredTensor: `input_scale` must be one number, for `inputs` without groups, got {inputs}")
        self.data_, self.scale, self.zero, self.tensor_scale = data, scale, zero, tensor_scale
        self.order, self.inputs, self.input_scale = order, inputs, input_scale

    def dequantize(self) -> torch.Tensor:
        """`[n, k]` in float32."""
        weight = dequantized(self.data_, self.scale, self.zero, self.tensor_scale)
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = weight_format("StoredTensor", self.data_, self.scale, self.zero, self.tensor_scale)
        return f"StoredTensor({list(self.shape)}, {kind}, dtype={self.dtype}, device={str(self.device)!r})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, Inputs | None]]:
        return [name for name in _PARTS if getattr(self, name) is not None], (self.dtype, self.inputs)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], rest: tuple[torch.dtype, Inputs | None], *_: Any
    ) -> StoredTensor:
        optional = {name: parts.get(name) for name in ("tensor_scale", "order", "input_scale")}
        return cls(parts["data_"], parts["scale"], parts.get("zero"), dtype=rest[0], inputs=rest[1], **optional)

    def _stable_hash_for_caching(self) -> str:
        """What torch's cache of compiled graphs tells these tensors apart by: everything but numbers."""
        parts = [(name, getattr(self, name)) for name in _PARTS if getattr(self, name) is not None]
        about = [(name, p.dtype, tuple(p.shape), p.stride(), p.storage_offset(), str(p.device)) for name, p in parts]
        return hashlib.blake2b(repr((about, self.dtype, self.inputs)).encode(), digest_size=16).hexdigest()

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> StoredTensor:
        """The tensor with its parts changed."""
        parts = {name: change(part) for name in _PARTS if (part := getattr(self, name)) is not None}
        return StoredTensor.__tensor_unflatten__(parts, (dtype or self.dtype, self.inputs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}), eager=True)
        if func is torch.Tensor.share_memory_:  # of memory that the tensor itself does not have
            for name in args[0].__tensor_flatten__()[0]:
                getattr(args[0], name).share_memory_()
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.linear.default:
            return _linear(*args, **kwargs)
        if func in (aten.detach.default, aten.alias.default):
            with torch.inference_mode(args[0].is_inference()):  # torch wants a view of a tensor to be of its kind
                return args[0]._each(func)
        if func is aten.clone.default:
            return args[0]._each(torch.clone)
        if func is aten.empty_like.default:  # `to_empty`, before a state dict
            return args[0]._each(lambda part: torch.empty_like(part, device=kwargs.get("device")), kwargs.get("dtype"))
        if func is aten._to_copy.default:
            device, blocking = kwargs.get("device"), not kwargs.get("non_blocking", False)
            return args[0]._each(lambda part: part.to(device, non_blocking=not blocking, copy=True), kwargs.get("dtype"))
        if func is aten.copy_.default:
            return _copy(*args[:2])
        raise NotImplementedError(f"StoredTensor: a weight of 8 or 4 bits is for `linear` alone, got {func}")


def _copy(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What `load_state_dict` does with the weights of two models."""
    stored = [_layout(t) if isinstance(t, StoredTensor) else None for t in (to, source)]
    if stored[0] is None or stored[0] != stored[1]:
        about = [repr(t) if isinstance(t, StoredTensor) else f"one of {t.dtype}" for t in (source, to)]
        raise ValueError(
            f"StoredTensor: `copy_` must be of a weight that is stored alike, got {about[0]} for {about[1]}; before "
            "`load_state_dict` quantize the model as the other one was, or pass assign=True"
        )
    for name, *_ in stored[0][0]:
        getattr(to, name).copy_(getattr(source, name))
    return to


def _layout(stored: StoredTensor) -> tuple[list[tuple[str, torch.Size, torch.dtype]], Inputs | None]:
    parts = [(name, getattr(stored, name)) for name in stored.__tensor_flatten__()[0]]
    return [(name, part.shape, part.dtype) for name, part in parts], stored.inputs


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eager: bool = False
) -> torch.Tensor:  # fmt: skip
    """`eager`: no dispatch mode that is left by now can have wanted to see what this is made of."""
    if not isinstance(weight, StoredTensor) or isinstance(input, StoredTensor):
        raise NotImplementedError("StoredTensor: `linear` takes one as `weight` alone")
    parts = weight.data_, weight.scale, weight.zero, weight.tensor_scale
    if eager and is_eager(input, bias, *parts):
        return eager_linear(input, *parts, bias, weight.inputs, weight.input_scale, weight.order)
    rows = input if weight.inputs is None else weight.inputs.rounded(input, weight.input_scale)
    rows = rows if weight.order is None else rows.index_select(-1, weight.order)
    return F.linear(rows, dequantized(*parts).to(input.dtype), bias)


torch.serialization.add_safe_globals([StoredTensor, Inputs])  # what `torch.load` takes with `weights_only`
