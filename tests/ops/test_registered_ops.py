"""`torch.library.opcheck` and fake-against-real metadata for every operator registered in the namespace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS

import spec_ops
from tests.helpers.op_samples import ALWAYS_FP8, SAMPLES, SEEDS, WITH_FP8, flat_tensors, overload, sample
from tests.helpers.sample_source import Source
from tests.helpers.wrong_calls import CALLS

TRACING = "test_aot_dispatch_dynamic"


def test_every_registered_op_has_samples():
    """The dispatcher's own list, so that an operator added anywhere in the package shows up here."""
    registered = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("spec_ops::")}
    assert {name.removesuffix(".default") for name in registered} == set(SAMPLES)


def utilities(*left_out: str) -> list[str]:
    """Opcheck's tests but these."""
    assert set(left_out) <= set(DEFAULT_TEST_UTILS)
    return [name for name in DEFAULT_TEST_UTILS if name not in left_out]


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name, seed, device):
    """To trace, forward and backward with sizes as symbols, is nearly all of the time: once an op."""
    left_out = () if seed == 0 else (TRACING,)
    left_out += ("test_schema",) if name in ALWAYS_FP8 else ()  # as in the next test
    torch.library.opcheck(overload(name), sample(name, seed, device, fp8=False), test_utils=utilities(*left_out))


@pytest.mark.parametrize("seed", SEEDS[2:3])
@pytest.mark.parametrize("name", WITH_FP8)
def test_opcheck_fp8(name, seed, device):
    """Without opcheck's `test_schema`, whose torch.allclose has no fp8 kernel; the next test does its work."""
    torch.library.opcheck(overload(name), sample(name, seed, device, fp8=True), test_utils=utilities("test_schema", TRACING))


def stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "fp8"), [*((name, False) for name in SAMPLES), *((name, True) for name in WITH_FP8)])
def test_schema_tells_what_is_written(name, fp8, seed, device):
    """Byte for byte: an argument changes only if the schema says so, and no output shares an input's memory."""
    args = sample(name, seed, device, fp8)
    schema = overload(name)._schema
    before = [[stored_bytes(t) for t in flat_tensors(arg)] for arg in args]
    outputs = flat_tensors(overload(name)(*args))
    for argument, arg, was in zip(schema.arguments, args, before, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor, bytes_before in zip(flat_tensors(arg), was, strict=True):
            assert written or torch.equal(stored_bytes(tensor), bytes_before), argument.name
            for out in outputs:
                shared = out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert not shared or out.untyped_storage().nbytes() == 0, argument.name


def metadata(result: Any) -> list[tuple[Any, ...]]:
    """Shape, dtype, device and the strides that mean something: a dimension of size 1 has none, nor has an empty tensor."""
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    return [
        (
            tuple(r.shape),
            r.dtype,
            r.device.type,
            [stride for size, stride in zip(r.shape, r.stride(), strict=True) if size > 1] if r.numel() else None,
        )
        for r in results
    ]


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_fake_agrees_with_real(name, data, device):
    """Inductor allocates and indexes by the fake's strides: a real result laid out otherwise would be read wrongly."""
    args = SAMPLES[name](Source(lambda low, high: data.draw(st.integers(low, high)), device))
    mode = FakeTensorMode()

    def fake(arg):
        if isinstance(arg, list):
            return [fake(item) for item in arg]
        return mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg

    faked = [fake(arg) for arg in args]
    real = overload(name)(*args)
    with mode:
        assert metadata(overload(name)(*faked)) == metadata(real)


# Converters from and to SGLang's FULL_MASK work on host lengths, and one looks at values: they are not for compiled code.
@pytest.mark.parametrize("name", [name for name in CALLS if "full_mask" not in name])
def test_public_functions_compile_with_dynamic_shapes(name):
    """Validation must not break the graph, nor reject or specialize wrongly when sizes are symbols; caches end up the same."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        call = CALLS[name]()
        function = getattr(spec_ops, name)
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        results.append([*flat_tensors(function(**call)), *(t for value in call.values() for t in flat_tensors(value))])
    assert len(results[0]) == len(results[1]) > 0
    for eager, got in zip(*results, strict=True):
        assert torch.equal(eager, got)
