"""`deterministic=True` as an argument: which backend it selects, what it refuses, and that passes keep it. What the kernels do
is in `tests/interpreter/test_deterministic.py` and `tests/gpu/test_deterministic.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import spec_ops
from spec_ops.backends import BackendError, available_backends, get_backend, select_backend
from spec_ops.backends.registry import attention_backend, invariant_backend
from spec_ops.ops._validate import Checker
from tests.backends.test_registry import META
from tests.helpers.wrong_calls import attention_call

NAME, ON_CPU, PIECES = "triton-deterministic", "reference-deterministic", "triton-mla-pieces"
STEPS = [f"{kind}_{step}" for kind in ("mha", "mla") for step in ("draft_decode", "target_verify", "draft_extend", "extend")]


def call(op: str, **changes: Any) -> torch.Tensor:
    return getattr(spec_ops, op)(**attention_call(*op.split("_", 1)), **changes)


@pytest.mark.parametrize("arch", [None, 80, 90, 100, 103, 120])
def test_auto_never_takes_it(arch):
    """Not even where nothing else is left but the reference."""
    selection = select_backend(META, arch)
    assert selection.backend.name not in (NAME, ON_CPU, PIECES)
    assert "deterministic=True" in selection.reasons[NAME if arch else ON_CPU]
    assert [name for name in available_backends() if get_backend(name).deterministic] == [PIECES, NAME, ON_CPU]


@pytest.mark.parametrize("op", STEPS)
def test_the_cpu_has_one_of_its_own(op):
    """Whose bits are others, so that nothing takes the place of a kernel that is named."""
    with pytest.raises(BackendError, match=f"{op}: `backend` '{NAME}' cannot run this call on CPU: {NAME} needs a CUDA device"):
        call(op, deterministic=True, backend=NAME)
    given, function = attention_call(*op.split("_", 1)), getattr(spec_ops, op)
    assert torch.equal(function(**given, deterministic=True), function(**given, backend=ON_CPU))


@pytest.mark.parametrize("op", STEPS)
@pytest.mark.parametrize("name", ["reference", "triton", "flashinfer-xqa"])
def test_another_backend_is_refused(op, name):
    known = rf"\['{PIECES}', '{NAME}', '{ON_CPU}'\]"
    message = f"{op}: `backend` must be 'auto' or one of {known} with `deterministic=True`, got '{name}'"
    with pytest.raises(ValueError, match=message):
        call(op, deterministic=True, backend=name)


@pytest.mark.parametrize("came", [1, None, "yes"])
def test_it_is_a_bool(came):
    with pytest.raises(TypeError, match=f"mha_extend: `deterministic` must be a bool, got {type(came).__name__}"):
        call("mha_extend", deterministic=came)


def test_dtypes_on_a_gpu():
    """Float32 too, with any cache; a cache in float32 is not rounded to queries of 16 bits."""
    for dtype, kv_dtype in [(torch.float32, kv) for kv in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)]:
        assert get_backend(NAME).refuse(dataclasses.replace(META, dtype=dtype, kv_dtype=kv_dtype), 90) is None
    mixed = dataclasses.replace(META, kv_dtype=torch.float32)
    message = f"{NAME} does not support float32 caches with queries in torch.bfloat16"
    with pytest.raises(BackendError, match=message):
        select_backend(mixed, 90, NAME)


def test_the_best_ranked_of_several():
    """One choice for every call, whatever it can run: results of two batch-invariant kernels differ."""
    spec_ops.register_backend(dataclasses.replace(get_backend(ON_CPU), name="better", rank=5, kernels={"mha_extend": "m:f"}))
    try:
        for op in ("mha_target_verify", "mla_draft_decode"):
            with pytest.raises(BackendError, match="`backend` 'better' cannot run this call"):
                call(op, deterministic=True)
    finally:
        spec_ops.backends.unregister_backend("better")


def test_a_backend_of_whole_caches_is_not_for_a_call():
    """Whatever its rank: only who knows every call on a cache takes it, and not if it refuses one of them."""
    for rank in (5, 500):
        spec_ops.register_backend(dataclasses.replace(get_backend(PIECES), name="better", rank=rank))
        try:
            chain = dataclasses.replace(
                META, step="mla_target_verify", num_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, tree_mask=False
            )
            tree, window = dataclasses.replace(chain, tree_mask=True), dataclasses.replace(chain, window=True)
            assert invariant_backend(90) == invariant_backend(90, [chain, window]) == invariant_backend(100, [chain]) == NAME
            assert invariant_backend(90, [chain, tree]) == ("better" if rank == 5 else PIECES)
            assert attention_backend(Checker("op"), "auto", True, torch.device("meta")) == NAME
            assert attention_backend(Checker("op"), "better", True, torch.device("meta")) == "better"
        finally:
            spec_ops.backends.unregister_backend("better")


def test_none_registered():
    declared = spec_ops.backends.unregister_backend(ON_CPU)
    try:
        with pytest.raises(BackendError, match=rf"no batch-invariant attention backend runs on CPU; there are \['{NAME}'\]"):
            call("mha_extend", deterministic=True)
    finally:
        spec_ops.register_backend(declared)


def test_passes_keep_it():
    """An extend that becomes a draft extend, of which one row is used: fewer queries, another op, the same backend."""
    head = torch.randn(64, 11).bfloat16()

    def fn(t: dict[str, torch.Tensor], deterministic: bool) -> torch.Tensor:
        indptr = torch.arange(0, 13, 4, dtype=torch.int32, device=t["q"].device)
        out = spec_ops.mha_extend(**t, q_indptr=indptr, max_q_len=4, deterministic=deterministic)
        return (out.view(3, 4, 64) @ head)[:, -1]

    t = {"q": torch.randn(12, 4, 16).bfloat16()}
    t |= {name: torch.randn(8, 16, 2, 16).bfloat16() for name in ("k_cache", "v_cache")}
    t |= {"block_tables": torch.zeros(3, 2, dtype=torch.int32), "seq_lens": torch.full((3,), 9, dtype=torch.int32)}
    for deterministic in (True, False):
        plan = str(spec_ops.explain(fn, t, deterministic, arch="sm90"))
        assert "mha_extend of 4 queries per request becomes mha_draft_extend" in plan
        assert "1 of 4 rows per request in 1 attention call" in plan
        assert (f"  {NAME}: mha_draft_extend" in plan) == deterministic
