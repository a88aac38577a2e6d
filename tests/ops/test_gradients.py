"""The ops are for inference: what gradients are asked of is refused, by every op and in every way to ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import spec_ops
from tests.helpers.op_samples import SAMPLES, flat_tensors, overload, sample

# These take integers alone, which have no gradients.
INTEGERS = (
    "page_table",
    "page_table_out",
    "full_mask_words",
    "kv_indices",
    "draft_kv_indices",
    "draft_kv_indices_steps",
    "accept_greedy",
    "build_tree",
    "lookup_drafts",
)


def requiring(value: Any) -> Any:
    if isinstance(value, list):
        return [requiring(part) for part in value]
    return value.detach().clone().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in INTEGERS])
def test_every_op_refuses_each_of_its_inputs(name, device):
    """Not only the first: any tensor, also one of a list, may be a parameter. Nothing is written before the refusal."""
    args = sample(name, 1, device, fp8=False)
    plain, refused = [part for arg in args for part in flat_tensors(arg)], 0
    before = [part.clone() for part in plain]
    for i, (argument, arg) in enumerate(zip(overload(name)._schema.arguments, args, strict=True)):
        if any(part.is_floating_point() for part in flat_tensors(arg)):
            asked = (*args[:i], requiring(arg), *args[i + 1 :])
            with pytest.raises(RuntimeError, match=f"^{name.split('.')[0]}: `{argument.name}` must not require gradients, got"):
                overload(name)(*asked)
            refused += 1
    assert refused
    assert all(torch.equal(part, was) for part, was in zip(plain, before, strict=True))


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_welcome_where_no_graph_is_recorded(name, mode, device):
    """A model's parameters require gradients unless someone says otherwise, and its caches may be made of anything."""
    args = sample(name, 1, device, fp8=False)
    with mode():
        asked = [requiring(arg) for arg in args]
        got = flat_tensors(overload(name)(*asked))
        expected = flat_tensors(overload(name)(*args))
        for result, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
            assert not result.requires_grad
        for arg, after in zip(args, asked, strict=True):
            for part, written in zip(flat_tensors(arg), flat_tensors(after), strict=True):
                torch.testing.assert_close(written, part, rtol=0, atol=0, equal_nan=True)


def rows(device) -> torch.Tensor:
    return torch.ones(1, 1, 8, device=device)


def appended(k: torch.Tensor) -> torch.Tensor:
    """Something a gradient could be asked of, if the append had one."""
    cache = torch.zeros(2, 2, 4, 1, 8, device=k.device)
    spec_ops.append_kv(cache[0], cache[1], k, k, torch.tensor([3], device=k.device))
    return cache.sum()


def dual(k: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level(), torch.no_grad():  # which switches off backward alone
        return appended(forward_ad.make_dual(k, k))


TRANSFORMS = {
    "grad": lambda k: torch.func.grad(appended)(k),
    "vjp": lambda k: torch.func.vjp(appended, k),
    "jvp": lambda k: torch.func.jvp(appended, (k,), (k,)),
    "dual": dual,
    "compiled": lambda k: torch.compile(appended, backend="aot_eager")(k.requires_grad_()),
    "compiled, a graph": lambda k: torch.compile(appended, backend="aot_eager", fullgraph=True)(k.requires_grad_()),
    "compiled grad": lambda k: torch.compile(torch.func.grad(appended), backend="aot_eager")(k),
    "autograd.grad": lambda k: torch.autograd.grad(appended(k.requires_grad_()), k),
}


@pytest.mark.parametrize("ask", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_way_to_ask_is_refused(ask, device):
    with pytest.raises(RuntimeError, match=r"append_kv: `k` must not (require gradients|carry a tangent), got .*inference"):
        ask(rows(device))


def test_a_transform_may_hold_a_call_that_it_does_not_differentiate(device):
    k = rows(device)
    got = torch.func.grad(lambda x: (x * x).sum() + appended(k))(k)
    assert torch.equal(got, 2 * k)
    _, tangent = torch.func.jvp(lambda x: (x * x).sum() + appended(k), (k,), (k,))
    assert tangent == 16


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_module_with_parameters_compiles_where_no_graph_is_recorded(mode, device):
    torch._dynamo.reset()
    model = torch.nn.Linear(8, 8, device=device)
    call = torch.compile(lambda k: appended(model(k)), backend="aot_eager", fullgraph=True)
    with mode():
        expected = appended(model(rows(device)))
        assert torch.equal(call(rows(device)), expected)
    with pytest.raises(RuntimeError, match="append_kv: `k` must not require gradients"):
        call(rows(device))  # with gradients on it is another graph


def test_a_cache_carries_no_graph(device):
    """A graph on a cache holds every token's activations, and grows with the next one."""
    cache = torch.zeros(2, 2, 4, 1, 8, device=device)
    slots = torch.tensor([3], device=device)
    k = rows(device).requires_grad_()
    with pytest.raises(RuntimeError, match="must not require gradients"):
        torch.ops.spec_ops.append_kv(cache[0], cache[1], k, k, slots, 1.0, 1.0)
    assert not cache.any()
    with torch.no_grad():
        spec_ops.append_kv(cache[0], cache[1], k, k, slots)
    assert cache.any()
    assert (cache.requires_grad, cache.grad_fn) == (False, None)
