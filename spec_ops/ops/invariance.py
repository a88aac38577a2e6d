"""Which operations are batch-invariant, and what stands in for those that are not.

A computation is batch-invariant if the bits of a row of its results (a request, a token) depend on that row's own inputs alone:
not on how many other rows there are, nor on what they hold, nor on its place among them. `judge` says of one operation whether
it is, what to compute in its place, or why it must be refused. The pass `require_invariance` asks it about the nodes of a
graph, and `BatchInvariant` about eager calls: both replace the same things.

* What moves values, and what takes each by itself, is invariant. So is what finds extrema, and sums of integers: their order
  does not matter.
* Sums of floats are replaced where they are over the last dimensions, which a row has for itself, and refused where they are
  over the first one, which is that of the rows. Extrema of floats over the first one are refused too.
* Products are replaced by ones whose order along k depends on the weight alone.
* Sums over ranks are replaced by ours, which add in the order of the ranks. In NCCL's, the order follows the place of a number.
  What ranks copy, and maxima of integers, stand.
* Our own ops declare it (`define_op`). Where an argument decides, it is set.
* Everything else is refused, by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from spec_ops.backends import push
from spec_ops.backends.registry import BackendError, device_arch, get_backend, invariant_backend
from spec_ops.ops._library import INVARIANCE, NAMESPACE
from spec_ops.ops.collectives import all_reduce_op
from spec_ops.ops.invariant import batched_mm_op, row_sum_op
from spec_ops.ops.linear import invariant_weight, skinny_mm_op

aten, prims = torch.ops.aten, torch.ops.prims

# Names without the underscore of an operation in place. What makes values, moves or compares them.
_MOVES = frozenset({
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_local_scalar_dense", "_reshape_alias", "_to_copy",
    "_unsafe_index", "_unsafe_masked_index", "_unsafe_view", "type_as", "arange", "argsort", "bucketize", "cat", "clone",
    "constant_pad_nd", "convert_element_type", "copy", "embedding", "empty", "empty_like", "empty_permuted", "empty_strided",
    "equal", "fill", "flip", "floor_divide", "full", "full_like", "gather", "index", "index_copy", "index_fill", "index_put",
    "index_select", "inductor_force_stride_order", "iota", "isin", "item", "kthvalue", "lift_fresh", "lift_fresh_copy",
    "masked_fill", "masked_select", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero", "ones",
    "ones_like", "repeat", "repeat_interleave", "roll", "scalar_tensor", "scatter", "searchsorted", "select_scatter",
    "slice_scatter", "sort", "squeeze", "stack", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride", "t", "topk",
    "transpose", "tril", "triu", "unsqueeze", "where", "zero", "zeros", "zeros_like",
})  # fmt: skip
_EXTREMA = frozenset({
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "cummax", "cummin", "max", "median", "min", "mode",
})  # fmt: skip
_SUMS = frozenset(["sum", "mean", "var", "var_mean"])
# Exact on integers, whose addition has no order.
_OF_INTEGERS = frozenset({
    "bincount", "cumprod", "cumsum", "index_add", "prod", "scatter_add", "scatter_reduce", "sum",
})  # fmt: skip
# Namespaces whose operations are compared with the names above.
_KNOWN = ("aten", "prims", "inductor")


class NotInvariantError(RuntimeError):
    """An operation that has no batch-invariant form, where invariance is asked for."""


class Emitter(Protocol):
    """Where a replacement is computed: at once, or as nodes of a graph."""

    def value(self, operand: Any) -> Any:
        """The tensor, or the fake one, that `operand` stands for."""

    def call(self, op: Any, *args: Any) -> Any:
        """The result of an operation."""


class Verdict(NamedTuple):
    """Of one operation: batch-invariant as it is if both are None.

    Attributes:
        refused: why it cannot be.
        replace: computes it so, with an emitter, its arguments in the order of its schema; None for no replacement.
        text: what is computed in its place.
    """

    refused: str | None = None
    replace: Callable[[Emitter, Sequence[Any]], Any] | None = None
    text: str = ""


KEPT = Verdict()


@functools.cache
def base_name(target: Any) -> str:
    """`"index_put"` of `aten.index_put_.default`."""
    name = target._schema.name.split("::")[1]
    return name if name.startswith("__") else name.rstrip("_")


def named_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the schema, defaults included."""
    schema = target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return {argument.name: argument.default_value for argument in schema} | given | dict(kwargs)


@functools.cache
def is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


@functools.cache
def always_stands(target: Any) -> bool:
    """Whether a call is batch-invariant as it is, whatever its arguments. Eager calls are judged each time, and most stand."""
    if target.namespace == NAMESPACE:
        return INVARIANCE.get(target, False) is True
    if target.namespace not in _KNOWN or base_name(target) in ("index_put", "scatter"):
        return False
    return target.is_view or base_name(target) in _MOVES or is_pointwise(target)


def judge(
    target: Any,
    arguments: Mapping[str, Any],
    value: Callable[[Any], Any],
    arch: Callable[[torch.device], int | None] = device_arch,
) -> Verdict:
    """What is to become of a call.

    Args:
        target: an `OpOverload`.
        arguments: all of them, by name (`named_arguments`).
        value: the tensor or fake that an argument stands for.
        arch: of a device (None: the CPU).
    """
    if always_stands(target):
        return KEPT
    if target.namespace == NAMESPACE:
        return _of_ours(target, arguments, value, arch)
    name = base_name(target)
    if target.namespace == "_c10d_functional":
        return _of_ranks(target, name, arguments, value, arch)
    if target.namespace not in _KNOWN:
        return Verdict(f"{target} is not known to be batch-invariant")
    if name in ("index_put", "scatter"):
        adds = arguments.get("accumulate") or arguments.get("reduce") is not None
        return _of_integers(target, arguments, value) if adds else KEPT
    if name in _PRODUCTS:
        return _product(target, name, arguments, value, arch)
    if name in _OF_INTEGERS and not _is_float(value, arguments):
        return KEPT
    if name in _EXTREMA:
        return _reduction(target, arguments, value, None)
    if name in _SUMS:
        return _reduction(target, arguments, value, name)
    return Verdict(f"{target} is not known to be batch-invariant")


def _is_float(value: Callable[[Any], Any], arguments: Mapping[str, Any]) -> bool:
    x = value(next(iter(arguments.values())))
    dtype = arguments.get("dtype") or x.dtype
    return x.dtype.is_floating_point or dtype.is_floating_point


def _of_integers(target: Any, arguments: Mapping[str, Any], value: Callable[[Any], Any]) -> Verdict:
    return Verdict(f"{target} adds floats in any order") if _is_float(value, arguments) else KEPT


def _reduced(arguments: Mapping[str, Any], rank: int) -> list[int]:
    """The dimensions that a reduction is over, all of them if it names none."""
    dim = arguments.get("dim", arguments.get("dims"))
    if dim is None or dim == []:
        return list(range(rank))
    return sorted(d % rank for d in (dim if isinstance(dim, (list, tuple)) else (dim,))) if rank else []


def _reduction(target: Any, arguments: Mapping[str, Any], value: Callable[[Any], Any], name: str | None) -> Verdict:
    if not _is_float(value, arguments):
        return KEPT
    x = value(next(iter(arguments.values())))
    if isinstance(value(arguments.get("other")), torch.Tensor):
        return KEPT  # `max` of two tensors
    rank, dims = x.dim(), _reduced(arguments, x.dim())
    if rank == 0:
        return KEPT
    if dims != list(range(rank - len(dims), rank)) or len(dims) == rank:
        return Verdict(f"{target} is over dimension {dims[0]} of {list(x.shape)}, so that it mixes rows")
    if name is None:
        return KEPT
    return Verdict(None, lambda emitter, args: _sum_of_rows(emitter, target, name, args), "row_sum")


def _sum_of_rows(emitter: Emitter, target: Any, name: str, args: Sequence[Any]) -> Any:
    arguments = named_arguments(target, args, {})
    source = next(iter(arguments.values()))
    x = emitter.value(source)
    dims = _reduced(arguments, x.dim())
    outer, inner = list(x.shape[: x.dim() - len(dims)]), math.prod(x.shape[x.dim() - len(dims) :])
    dtype = arguments.get("dtype") or x.dtype
    if not x.dtype.is_floating_point:
        source = emitter.call(prims.convert_element_type.default, source, dtype)
    rows = emitter.call(aten.reshape.default, source, [math.prod(outer), inner])

    def shaped(result: Any) -> Any:
        result = emitter.call(aten.reshape.default, result, outer + [1] * (len(dims) if arguments.get("keepdim") else 0))
        return (
            emitter.call(prims.convert_element_type.default, result, dtype) if emitter.value(result).dtype != dtype else result
        )

    total = emitter.call(row_sum_op, rows)
    if name == "sum":
        return shaped(total)
    mean = emitter.call(aten.div.Tensor, total, inner)
    if name == "mean":
        return shaped(mean)
    correction = arguments.get("correction", arguments.get("unbiased"))
    correction = 1 if correction is None else int(correction)
    exact = emitter.call(prims.convert_element_type.default, rows, emitter.value(mean).dtype)
    gap = emitter.call(aten.sub.Tensor, exact, emitter.call(aten.unsqueeze.default, mean, -1))
    squares = emitter.call(row_sum_op, emitter.call(aten.mul.Tensor, gap, gap))
    variance = shaped(emitter.call(aten.div.Tensor, squares, max(inner - correction, 0)))
    return variance if name == "var" else (variance, shaped(mean))


_PRODUCTS = {"mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2")}


def _product(target: Any, name: str, arguments: Mapping[str, Any], value: Callable[[Any], Any], arch: Any) -> Verdict:
    left, right = (value(arguments[side]) for side in _PRODUCTS[name])
    if not left.dtype.is_floating_point or left.dtype.itemsize < 2:
        return Verdict(f"{target} of {left.dtype} has no batch-invariant kernel")
    if left.dtype != right.dtype or "out_dtype" in arguments:
        return Verdict(f"{target} of {left.dtype} and {right.dtype} has no batch-invariant kernel")
    if name.startswith(("add", "badd")) and (arguments["beta"], arguments["alpha"]) != (1, 1):
        return Verdict(f"{target} with `beta` or `alpha` has no batch-invariant kernel")
    skinny = "bmm" not in name and invariant_weight(right, arch(right.device))
    return Verdict(
        None, lambda emitter, args: _product_of_rows(emitter, name, args, skinny), "skinny_mm" if skinny else "batched_mm"
    )


def _product_of_rows(emitter: Emitter, name: str, args: Sequence[Any], skinny: bool) -> Any:
    added, left, right = (None, *args[:2]) if name in ("mm", "bmm") else args[:3]
    # `[1, n]` may be one row of a residual: it is added as that of more rows is, after the product was rounded.
    is_bias = added is not None and emitter.value(added).shape == emitter.value(right).shape[-1:] and "bmm" not in name
    bias = added if is_bias else None
    if skinny:
        weight = emitter.call(aten.permute.default, right, [1, 0])
        out = emitter.call(skinny_mm_op, *_set(skinny_mm_op, (left, weight, bias), "invariant", True))
    elif "bmm" in name:
        out = emitter.call(batched_mm_op, left, right, None)
    else:
        stack = (emitter.call(aten.unsqueeze.default, side, 0) for side in (left, right))
        out = emitter.call(aten.squeeze.dim, emitter.call(batched_mm_op, *stack, bias), 0)
    return out if added is None or is_bias else emitter.call(aten.add.Tensor, out, added)


def _of_ranks(target: Any, name: str, arguments: Mapping[str, Any], value: Callable[[Any], Any], arch: Any) -> Verdict:
    """Of a collective of torch. Its arguments have other names in other releases."""
    x, *rest = arguments.values()
    if name in ("wait_tensor", "broadcast", "all_gather_into_tensor"):
        return KEPT
    if name != "all_reduce":
        return Verdict(f"{target} is not known to be batch-invariant")
    x, (reduce, group) = value(x), rest
    if not x.dtype.is_floating_point or reduce in ("max", "min"):
        return KEPT
    if reduce != "sum":
        return Verdict(f"{target} with {reduce!r} has no batch-invariant kernel")
    chip = arch(x.device)
    if chip is None:
        return Verdict(None, lambda emitter, args: emitter.call(all_reduce_op, *args), "all_reduce")
    ranks = torch.distributed.distributed_c10d._resolve_process_group(group).size()
    most, count = push.most_bytes(ranks), x.numel()
    if most is None or chip < push.LEAST_ARCH:
        return Verdict(f"{target} over {ranks} ranks on sm_{chip} has no batch-invariant kernel")
    if not isinstance(count, int):
        return Verdict(f"{target} of a size that is not known while compiling")
    num_bytes = count * x.dtype.itemsize
    if reason := push.refusal(x.dtype, reduce, num_bytes if num_bytes <= most else most - 16 + num_bytes % 16, most):
        return Verdict(f"{target}: `x` {reason}")
    return Verdict(None, lambda emitter, args: _sum_over_ranks(emitter, args, most), "all_reduce")


def _sum_over_ranks(emitter: Emitter, args: Sequence[Any], most: int) -> Any:
    """As many numbers at a time as our kernel has room for."""
    x, reduce, group = args
    like = emitter.value(x)
    count, step = like.numel(), most // like.dtype.itemsize
    if count <= step:
        return emitter.call(all_reduce_op, x, reduce, group)
    flat = emitter.call(aten.reshape.default, x, [-1])
    parts = [emitter.call(aten.slice.Tensor, flat, 0, first, min(first + step, count)) for first in range(0, count, step)]
    sums = [emitter.call(all_reduce_op, part, reduce, group) for part in parts]
    return emitter.call(aten.reshape.default, emitter.call(aten.cat.default, sums, 0), list(like.shape))


def _of_ours(op: Any, arguments: Mapping[str, Any], value: Callable[[Any], Any], arch: Any) -> Verdict:
    declared, name = INVARIANCE.get(op, False), op._schema.name.split("::")[1]
    if declared == "backend":
        return _attention(op, name, arguments, value, arch)
    if declared == "invariant":
        if arguments["invariant"]:
            return KEPT
        return Verdict(None, lambda emitter, args: emitter.call(op, *_set(op, args, "invariant", True)), f"{name}, invariant")
    return Verdict(f"{name} is not batch-invariant")


def _set(op: Any, args: Sequence[Any], name: str, new: Any) -> list[Any]:
    arguments = named_arguments(op, args, {})
    return list((arguments | {name: new}).values())


def _attention(op: Any, name: str, arguments: Mapping[str, Any], value: Callable[[Any], Any], arch: Any) -> Verdict:
    chosen = arguments["backend"]
    if chosen == "auto":
        try:
            backend = invariant_backend(arch(value(arguments["q"]).device))
        except BackendError as error:
            return Verdict(str(error))
    else:
        backend = chosen
    known = get_backend(backend)
    if known is None or not known.deterministic:
        return Verdict(f"{name} by the backend {chosen!r} is not batch-invariant")
    if arguments.get("tree_mask") is not None and not known.tree_paths:
        return Verdict(f"{name} by {backend}: with a tree mask, the slots of a path decide its bits, and a chain has others")
    if chosen != "auto":
        return KEPT
    return Verdict(None, lambda emitter, args: emitter.call(op, *_set(op, args, "backend", backend)), backend)
