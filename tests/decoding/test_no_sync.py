"""No op's reference syncs with the device: neither by reading a value (meta tensors have none) nor inside a CUDA graph."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from spec_ops.backends.call import STEPS, AttentionCall
from spec_ops.backends.registry import run_attention
from spec_ops.ops.reference import (
    accept,
    attention,
    collectives,
    concatenate,
    invariant,
    kv_cache,
    kv_indices,
    linear,
    lookup,
    moe,
    rope,
    rounding,
    sampling,
    topk,
    tree,
)
from tests.helpers.op_samples import SAMPLES, SEEDS, WITH_FP8, overload, sample

MODULES: tuple[ModuleType, ...] = (
    kv_cache, kv_indices, tree, accept, sampling, rope, linear, rounding, concatenate, lookup, topk, moe, invariant, collectives
)  # fmt: skip
CASES = [(name, seed, fp8) for name in SAMPLES for seed in SEEDS for fp8 in {False, name in WITH_FP8}]

# References of mixtures visit the experts one by one, and those of collectives exchange; on a GPU their kernels run, which the
# second test captures.
LOOKS = {"moe_experts", "scaled_moe_experts", "add_moe_experts", "all_reduce", "all_reduce_add"}


def reference(name: str):
    """The reference implementation of an op, as a function of the op's arguments."""
    if name.endswith(".by"):
        return lambda *args: reference(name.removesuffix(".by"))(*args[:-1])  # without `backend`
    name = name.removesuffix(".host_plan").removesuffix("_lowered")
    if name in STEPS:
        return lambda *args: attention.attention(AttentionCall.of(name, args))
    if (step := name.removesuffix("_out")) in STEPS:
        return lambda *args: into(args[-1], AttentionCall.of(step, args[:-1]))
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def into(out: torch.Tensor, call: AttentionCall) -> None:
    """As an `_out` op runs on the reference: selection, kernel, and the copy to the caller's memory."""
    call.out = out
    assert run_attention(call) is out


@pytest.mark.parametrize(("name", "seed", "fp8"), [case for case in CASES if case[0] not in LOOKS])
def test_reference_reads_no_value_off_the_cpu(name, seed, fp8):
    """`.item()`, `nonzero`, a boolean-mask index or a 0-dim index raise on a meta tensor, which has no values: on a GPU each is
    a host sync. (Meta stands for CUDA here: the references look at values on CPU alone.)"""
    args = sample(name, seed, "cpu", fp8)
    reference(name)(
        *tree_map_only(torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), args)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "seed", "fp8"), CASES)
def test_op_can_be_captured_and_replayed(name, seed, fp8):
    op = overload(name)
    args = sample(name, seed, "cuda", fp8)
    inputs = [value for value in tree_flatten(args)[0] if isinstance(value, torch.Tensor)]
    saved = [value.clone() for value in inputs]

    def restore() -> None:
        for value, before in zip(inputs, saved, strict=True):
            value.copy_(before)

    def results(returned) -> list[torch.Tensor]:
        outputs = [value for value in tree_flatten(returned)[0] if isinstance(value, torch.Tensor)]
        return [value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value for value in [*outputs, *inputs]]

    expected = [value.clone() for value in results(op(*args))]
    restore()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*args)
    for _ in range(2):
        restore()
        graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(results(captured), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
