"""Inductor's code for CUDA, generated on any machine, and run on CPU tensors by Triton's interpreter.

Nothing of a GPU is needed to generate the code but its properties: where there is no GPU, those of an H200 are pretended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config, scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _triton
from torch.utils._pytree import tree_map_only

from spec_ops.passes import PassManager
from spec_ops.passes.compile import with_own_code

CUDA = torch.device("cuda", 0)
ARCH = 90


def copied(args: Sequence[torch.Tensor], device: str = "cpu") -> list[torch.Tensor]:
    """`args` in new storages on `device`; those that were of one storage are so again."""
    wholes: dict[int, torch.Tensor] = {}
    for arg in args:
        storage = arg.untyped_storage()
        if storage._cdata not in wholes:
            flat = torch.empty(0, dtype=arg.dtype).set_(storage, 0, (storage.nbytes() // arg.element_size(),))
            wholes[storage._cdata] = flat.to(device, copy=True)
    return [wholes[arg.untyped_storage()._cdata].as_strided(arg.size(), arg.stride(), arg.storage_offset()) for arg in args]


def cuda_graph(fn: Callable, *args: torch.Tensor) -> fx.GraphModule:
    """The functional graph that passes see of `fn` on CUDA tensors like `args`, which lie on the CPU."""
    copies = copied(args)
    return _capture(fn, copies, copies)[0]


def _capture(fn: Callable, args: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> tuple[fx.GraphModule, list[int]]:
    """The graph of `fn(*args)`, which is called once, and which of `known` each of its inputs is."""
    graphs: list[fx.GraphModule] = []
    order: list[int] = []

    def compiler(module: fx.GraphModule, _: Sequence[Any]) -> Callable:
        graphs.append(module)
        return make_boxed_func(lambda *values: fx.Interpreter(module).run(*values))

    lower = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )

    def backend(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        order.extend(next(i for i, tensor in enumerate(known) if tensor is value) for value in inputs)
        return lower(module, inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    return _on_cuda(graphs[0]), order


def _on_cuda(module: fx.GraphModule) -> fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    storages: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        key, count = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes() // tensor.element_size()
        with mode:
            whole = storages.setdefault(key, torch.empty(count, dtype=tensor.dtype, device=CUDA))
            return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    inputs = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(fake(node.meta["val"]))
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda item: CUDA if isinstance(item, torch.device) else item
        )
        if "eager_input_vals" in node.meta:
            node.meta["eager_input_vals"] = tree_map_only(torch.Tensor, fake, node.meta["eager_input_vals"])
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
    module.recompile()
    return module


@contextlib.contextmanager
def _properties() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20, total_memory=141 << 30, gcnArchName="",
    )  # fmt: skip
    pretended: list[tuple[Any, str, Callable]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda _=None: properties),
        (torch.cuda, "get_device_capability", lambda _=None: divmod(ARCH, 10)),
        (CudaInterface, "get_device_properties", lambda _=None: properties),
        (CudaInterface, "get_compute_capability", lambda _=None: ARCH),
        (CudaInterface.Worker, "get_device_properties", lambda _=None: properties),
        (CudaInterface.Worker, "current_device", lambda: 0),
        (scheduler, "has_triton", lambda: True),
        (_triton, "has_triton", lambda: True),
        (_triton, "triton_hash_with_backend", lambda: "none"),
        (AsyncCompile, "triton", lambda *_: None),  # would start to compile the kernels
        # Its own fake copies, and a copy between fake CUDA tensors needs a torch with CUDA.
        (torch.ops.prims.inductor_force_stride_order.default, "prim_meta_impl", _strided_like),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, function in pretended:
            stack.enter_context(mock.patch.object(owner, name, staticmethod(function)))
        yield


def _strided_like(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)


class Generated(NamedTuple):
    """A Python module that Inductor wrote, and which of the function's arguments each of its inputs is."""

    code: str
    order: list[int]


def generate(fn: Callable, *args: torch.Tensor, passes: dict[str, bool] | None = None) -> Generated:
    """What Inductor generates, with our passes, for `fn` on CUDA tensors like `args`."""
    copies = copied(args)
    return _generated(*_capture(fn, copies, copies), passes)


def _generated(module: fx.GraphModule, order: list[int], passes: dict[str, bool] | None) -> Generated:
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    slot = config.patch(post_grad_custom_pre_pass=PassManager(passes, ARCH))
    with _properties(), V.set_debug_handler(DebugContext()), V.set_fake_mode(inputs[0].fake_mode), slot:
        view_to_reshape(module)
        with inputs[0].fake_mode:  # as Inductor runs them
            post_grad_passes(module, True)
        view_to_reshape(module)
        lowering = GraphLowering(module, example_inputs=inputs, is_inference=True)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
    return Generated(code.value, order)


def generate_round(module: torch.nn.Module, passes: dict[str, bool] | None = None) -> Generated:
    """`generate` for a round, a module without arguments, whose parameters and buffers are the inputs. It runs once.

    Dynamo interprets the module as it is. `torch.func.functional_call` around it was five sixths of what it interpreted.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return _generated(*_capture(with_own_code(module.forward), (), list(tensors.values())), passes)


def launches(code: str) -> list[str]:
    """What generated code launches, in order: `kernel_0`, `append_kv`, `mm`."""
    body = code[code.index("def call(") :]
    found = re.findall(r"triton_\w+?_(\d+)\.run\(|torch\.ops\.\w+\.(\w+)\.\w+\(|extern_kernels\.(\w+)\(", body)
    return [f"kernel_{number}" if number else op or product for number, op, product in found]


class _Interpreted:
    """A generated kernel, run by the interpreter in blocks that are smaller than the work."""

    def __init__(self, function: Callable, blocks: int) -> None:
        self.function, self.blocks = function, blocks

    def run(self, *args: Any, stream: Any) -> None:
        sizes = list(itertools.takewhile(lambda value: isinstance(value, int), reversed(args)))
        names = [name for name in ("XBLOCK", "YBLOCK") if name in self.function.arg_names]
        grid = [-(-size // self.blocks) for size in sizes[: len(names)]]
        self.function[tuple(grid)](*args, **dict.fromkeys(names, self.blocks))


_KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)", re.M | re.S)
_NOT_ON_CPU = re.compile(r"^ *(torch\.cuda\.set_device|assert_size_stride|assert_alignment|\w+ = get_raw_stream)\(.*$", re.M)


def run_interpreted(generated: Generated, args: Sequence[torch.Tensor], folder: Path, blocks: int = 64) -> tuple:
    """The generated code on CPU tensors, in a process with TRITON_INTERPRET=1: its outputs; it mutates what `fn` mutates.

    Only pointwise kernels. `folder` takes their sources, which the interpreter reads; `blocks` is every block size.
    """

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full_like(torch.empty_strided(size, stride, dtype=dtype), -1)

    names: dict[str, Any] = {"torch": torch, "empty_strided_cuda": empty, "reinterpret_tensor": torch.as_strided}
    for name, source in _KERNEL.findall(generated.code):
        names[name] = _Interpreted(_imported(name, source[source.index("@triton.jit") :], folder), blocks)
    body = generated.code[generated.code.index("def call(") : generated.code.index("runner = Runner")]
    body = re.sub(r"with torch\.cuda\._DeviceGuard\(0\)", "if True", _NOT_ON_CPU.sub("", body))
    exec(compile(re.sub(r"stream=\w+", "stream=None", body), "generated", "exec"), names)
    return names["call"](None, [args[i] for i in generated.order])


def _imported(name: str, source: str, folder: Path) -> Callable:
    path = folder / f"kernel_{name[-40:]}.py"
    path.write_text(
        "import triton\nimport triton.language as tl\nfrom torch._inductor.runtime import triton_helpers\n"
        "from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math\n\n" + source
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
