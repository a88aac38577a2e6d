"""Weights that are tensor subclasses enter a graph as the tensors that they hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import spec_ops
from spec_ops.models.quantized import float8_tensor, int4_tensor
from spec_ops.models.stored_tensor import Inputs, StoredTensor
from spec_ops.passes import subclass_inputs
from spec_ops.passes.subclass_inputs import rebuilt, with_plain_inputs
from tests.helpers.forked import run_code


def model(store=int4_tensor, **changes) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 64))
    for layer in made:
        stored = store(layer.weight.detach())
        for name, value in changes.items():
            setattr(stored, name, value)
        layer.weight = nn.Parameter(stored, requires_grad=False)
    return made


class Spy:
    """A backend that keeps what it compiles and what it is called with."""

    def __init__(self) -> None:
        self.inputs: list = []
        self.graphs: list[torch.fx.GraphModule] = []
        self.calls: list[tuple] = []

    def __call__(self, graph_module, inputs):
        return with_plain_inputs(graph_module, inputs, self.compile)

    def compile(self, graph_module, inputs):
        self.graphs.append(graph_module)
        self.inputs += inputs

        def call(*args):
            self.calls.append(args)
            return graph_module(*args)

        return call


@torch.no_grad()
def test_a_graph_gets_what_parameters_hold():
    spy, made, x = Spy(), model(), torch.randn(3, 128)
    compiled = torch.compile(made, backend=spy)
    torch.testing.assert_close(compiled(x), made(x))
    for given in (spy.inputs, *spy.calls):
        assert len(given) == 2 + 2 * 3  # x, the bias, and data, scale and zero of both weights
        assert not any(map(is_traceable_wrapper_subclass, given))
    (graph,) = (g.graph for g in spy.graphs)
    assert len(graph.find_nodes(op="call_function", target=rebuilt)) == 2
    placeholders = graph.find_nodes(op="placeholder")
    static = [node for node in placeholders if node.meta["tensor_dict"].get("_dynamo_static_input_type")]
    assert len(static) == 7, "CUDA graphs would copy a weight that is not static"
    assert len({node._dynamo_source for node in placeholders}) == len(placeholders)
    assert all(type(node.meta["example_value"]) is type(placeholders[-1].meta["example_value"]) for node in static)


@torch.no_grad()
@pytest.mark.parametrize("how", ["in place", "a part", "the state"])
def test_what_parameters_hold_is_read_at_each_call(how):
    spy, made, x = Spy(), model(), torch.randn(3, 128)
    compiled = torch.compile(made, backend=spy)
    before = compiled(x)
    if how == "in place":
        made[0].weight.scale.mul_(2)
    elif how == "a part":
        made[0].weight.scale = made[0].weight.scale * 2
    else:
        other = model()
        other[0].weight.scale.mul_(2)
        made.load_state_dict(other.state_dict(), assign=True)
    got = compiled(x)
    torch.testing.assert_close(got, made(x))
    assert not torch.allclose(got, before)
    assert len(spy.graphs) == 1


@torch.no_grad()
def test_arguments_are_left():
    spy, weight, x = Spy(), int4_tensor(torch.randn(64, 128)), torch.randn(3, 128)
    compiled = torch.compile(lambda x, weight: torch.nn.functional.linear(x, weight), backend=spy)
    torch.testing.assert_close(compiled(x, weight), torch.nn.functional.linear(x, weight))
    assert any(isinstance(given, StoredTensor) for given in spy.calls[0])


class Doubled(torch.Tensor):
    """Of another package: a tensor, twice; without what a cache tells it apart by."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype, device=half.device)

    def __init__(self, half):
        self.half = half

    def __tensor_flatten__(self):
        return ["half"], None

    @staticmethod
    def __tensor_unflatten__(parts, rest, *_):
        return Doubled(parts["half"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Doubled(func(args[0].half))
        args = [2 * arg.half if isinstance(arg, Doubled) else arg for arg in args]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_subclass_of_another_package():
    """Its graphs are not cached: nobody knows what else they depend on."""
    x = torch.randn(3, 128)
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        made = nn.Linear(128, 64)
        made.weight = nn.Parameter(Doubled(torch.randn(64, 128)), requires_grad=False)
        spy = Spy()
        torch.testing.assert_close(torch.compile(made, backend=spy)(x), x @ (2 * made.weight.half).t() + made.bias)
        assert not any(map(is_traceable_wrapper_subclass, spy.inputs))
        got = spec_ops.compile(made, mode="default")(x)
        torch.testing.assert_close(got, x @ (2 * made.weight.half).t() + made.bias)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0


@torch.no_grad()
def test_a_subclass_that_holds_more_than_tensors_is_left():
    made = model()
    node = torch.fx.Graph().placeholder("weight")
    weight = made[0].weight
    node.meta = {"example_value": weight, "tensor_dict": {"_dynamo_static_input_type": "guarded"}}
    assert subclass_inputs._is_parameter(node, weight)
    weight.zero = made  # torch 2.13's DTensor names its mesh so
    assert not subclass_inputs._is_parameter(node, weight)


@torch.no_grad()
def test_a_parameter_whose_tensors_are_read_too_is_left():
    """AOTAutograd takes no two arguments of one source."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, x):
            return self.layers(x) + self.layers[0].weight.scale.sum()

    spy, made, x = Spy(), Read(), torch.randn(3, 128)
    torch.testing.assert_close(torch.compile(made, backend=spy)(x), made(x))
    assert sum(map(is_traceable_wrapper_subclass, spy.inputs)) == 1
    torch.testing.assert_close(spec_ops.compile(made, mode="default")(x), made(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [True, False])
def test_a_parameter_that_needs_a_gradient_is_left(grad):
    spy, made, x = Spy(), model(), torch.randn(3, 128)
    made[0].weight.requires_grad_()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(torch.compile(made, backend=spy)(x), made(x))
    assert sum(map(is_traceable_wrapper_subclass, spy.inputs)) == grad


SHARED_LAYERS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import spec_ops

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
made, x = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 64)), torch.randn(3, 128)
parallelize_module(made, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
compiled = spec_ops.compile(made, mode="default")
with torch.no_grad():
    torch.testing.assert_close(compiled(x), made(x))
found = []
for fn in (compiled, made):
    fn(x).square().sum().backward()
    found.append([parameter.grad.to_local() for parameter in made.parameters()])
    made.zero_grad()
torch.testing.assert_close(*found)
"""


@pytest.mark.slow
def test_shared_layers_and_their_gradients(tmp_path):
    """DTensors, which hold a mesh since torch 2.13. In another process: a group that ends takes all others along."""
    done = run_code(SHARED_LAYERS, tmp_path)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
def test_classes_of_one_name_are_told_apart():
    other = type("StoredTensor", (StoredTensor,), {"__module__": "other", "detach": lambda self: self})
    spy, held = Spy(), int4_tensor(torch.randn(128, 128))
    made = nn.Sequential(*[nn.Linear(128, 128) for _ in range(2)])
    for layer, cls in zip(made, (StoredTensor, other), strict=True):
        weight = cls(held.data_.clone(), held.scale.clone(), held.zero.clone(), dtype=held.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    torch.compile(made, backend=spy)(torch.randn(3, 128))
    (graph,) = (g.graph for g in spy.graphs)
    likes = [node.kwargs["like"] for node in graph.find_nodes(op="call_function", target=rebuilt)]
    assert len(set(likes)) == len(likes) == 2


@torch.no_grad()
def test_the_cache_tells_graphs_apart(tmp_path):
    """A second compilation of the same layers is a hit; one whose rows are rounded is none. Keys of the test's own instead of a
    folder: in another one torch's headers, which take most of the time, would be compiled again."""
    own_keys = torch.compiler.config.patch(cache_key_tag=str(tmp_path))
    x = torch.randn(3, 128)
    found = []
    for changes in ({}, {}, {"inputs": Inputs("int8")}):
        torch._dynamo.reset()
        counters.clear()
        made = model(lambda weight: float8_tensor(weight, 1, weight.shape[1]), **changes)
        with own_keys:
            got = spec_ops.compile(made, mode="default")(x)
        torch.testing.assert_close(got, made(x), rtol=1e-4, atol=1e-4)
        found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1, 0]
