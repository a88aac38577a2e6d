"""Start to compile the kernels of the graph's ops, while Inductor generates code for the rest.

The graph stays as it is. Without this pass Triton compiles the kernels one after another when the finished code first runs,
seconds after the passes knew them. Here each call's launcher runs on tensors of the meta device, which stand for those on the
GPU, and what it would launch is compiled in the background (`backends/triton/runtime/background.py`).

Nothing is compiled for a stated architecture, for a CPU, and of other packages. What cannot be foretold, such as a call of
dynamic sizes, is compiled when it first runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._inductor.lowering import fallbacks, lowerings
from torch._subclasses.fake_tensor import unset_fake_temporarily

from spec_ops.backends.registry import load_kernel
from spec_ops.ops.kernels import kernel_of
from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED, EAGER, op_of, value
from spec_ops.passes.base import GraphPass, PassContext, PassResult
from spec_ops.passes.write_in_place import written_views

if TYPE_CHECKING:  # Triton is not there on every platform
    from spec_ops.backends.triton.runtime.launch import Launch, Target

_OURS = "spec_ops.backends.triton."


class CompileKernels(GraphPass):
    name = "compile_kernels"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        if context.arch is not None:
            return
        seen: set[Any] = set()
        for node in graph.nodes:
            if (device := _device(node)) is None or (node.target in lowerings and node.target not in fallbacks):
                continue  # the latter: ops that Inductor generates code for
            try:
                args = arguments(node)
                if (call := (op_of(node), _facts(args))) in seen:
                    continue
                seen.add(call)
                from spec_ops.backends.triton.runtime.launch import Target, compile_in_background

                launches = launches_of(op_of(node), args, Target.of(device))
                started = compile_in_background(launches, device)
            except Exception as error:  # nothing of this may fail a compilation that would succeed without
                result.refuse(node, f"{op_of(node)}: {error}")
                continue
            if started:
                result.did(node, f"{op_of(node)}: {started} of its kernels")


def _device(node: fx.Node) -> torch.device | None:
    """The CUDA device that `node` calls an op of ours on."""
    if op_of(node) is None:
        return None
    fakes = (value(given) for given in node.all_input_nodes)
    return next((fake.device for fake in fakes if isinstance(fake, torch.Tensor) and fake.is_cuda), None)


def arguments(node: fx.Node) -> tuple:
    """What the op's kernel would be called with, its tensors on the meta device, at the same distance from a multiple of 16
    bytes.

    Raises:
        ValueError: a size or a number is not known while compiling.
    """
    op = op_of(node)
    names = [argument.name for argument in op._schema.arguments]
    functionalized = node.target is AUTO_FUNCTIONALIZED
    given = dict(node.kwargs) if functionalized else dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    eager_args, eager_kwargs = node.meta.get(EAGER, ((), {}))
    eager = dict(zip(names, eager_args, strict=False)) | dict(eager_kwargs)
    written: dict[str, list[torch.Tensor]] = {}
    if functionalized:
        bases: Any = node.kwargs["_all_bases"]
        for name, index, view in written_views(node):
            base = _on_meta(value(bases[index]))
            with unset_fake_temporarily():
                written.setdefault(name, []).append(base if view is None else view[0](base, *view[1]))
    args = []
    for argument in op._schema.arguments:
        if argument.name in written:
            tensors = written[argument.name]
            args.append(tensors[0] if f"_{argument.name}_base_index" in node.kwargs else tensors)
            continue
        here = fx.node.map_arg(given.get(argument.name, argument.default_value), value)
        args.append(_like(here, eager.get(argument.name)))
    return tuple(args)


def _like(here: Any, eager: Any) -> Any:
    """An argument on the meta device, with the strides that Inductor gives it: those of the user's call, where it is known."""
    if isinstance(here, (list, tuple)):
        known = eager if isinstance(eager, (list, tuple)) and len(eager) == len(here) else [None] * len(here)
        return [_like(part, other) for part, other in zip(here, known, strict=True)]
    if isinstance(here, torch.Tensor):
        return _on_meta(here, eager.stride() if isinstance(eager, torch.Tensor) and eager.shape == here.shape else None)
    if isinstance(here, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise ValueError(f"{here} is not known before it runs")
    return here


def _on_meta(fake: torch.Tensor, stride: tuple | None = None) -> torch.Tensor:
    """A tensor like `fake`; with other strides than it has, as a copy is, from the start of its storage."""
    offset = fake.storage_offset() if stride is None or stride == fake.stride() else 0
    size, stride = fake.shape, fake.stride() if stride is None else stride
    if not all(isinstance(n, int) for n in (*size, *stride, offset)):
        raise ValueError(f"sizes {tuple(size)}, strides {tuple(stride)} are not known before it runs")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if fake.numel() else offset
    with unset_fake_temporarily():
        return torch.empty(last + 1, dtype=fake.dtype, device="meta").as_strided(size, stride, offset)


def _facts(args: Any) -> Any:
    """What a launcher can depend on, to compare calls by."""
    if isinstance(args, (list, tuple)):
        return tuple(map(_facts, args))
    if isinstance(args, torch.Tensor):
        return args.dtype, tuple(args.shape), args.stride(), args.data_ptr() % 16
    return type(args), args


def launches_of(op: Any, args: tuple, target: Target) -> list[Launch]:
    """What a call of `op` would launch on `target`, of kernels of this package.

    Args:
        op: one of ours.
        args: by the schema, its tensors on the meta device (`arguments`).
        target: the GPU that these stand for.

    Raises:
        As the kernel's launcher, and BackendError if no backend can run the call.
    """
    from spec_ops.backends.triton.runtime.launch import recorded

    found = kernel_of(op, args, target.arch)
    if found is None or not found[0].startswith(_OURS):
        return []
    kernel, given = load_kernel(found[0]), found[1]
    with unset_fake_temporarily(), torch.no_grad(), recorded(target) as launches:
        kernel(*given)
    return launches
