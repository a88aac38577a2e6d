"""What `define_op` puts behind CUDA tensors: a kernel that is imported at its first call, and nothing else in its place."""

from __future__ import annotations

import sys

import pytest
import torch

from spec_ops.ops._library import imported_at_first_call


def test_imported_once_at_the_first_call(monkeypatch):
    calls = []
    module = type(sys)("a_kernel_module")
    module.run = lambda *args: calls.append(args) or len(calls)  # type: ignore[attr-defined]
    run = imported_at_first_call("some_op", "a_kernel_module:run")
    monkeypatch.setitem(sys.modules, "a_kernel_module", module)
    assert run(1, "two") == 1
    monkeypatch.delitem(sys.modules, "a_kernel_module")
    assert run(3) == 2
    assert calls == [(1, "two"), (3,)]


@pytest.fixture
def forget_kernels(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("spec_ops.backends.triton.")]:
        monkeypatch.delitem(sys.modules, name)


def test_missing_triton_says_what_to_install(monkeypatch, forget_kernels):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    run = imported_at_first_call("append_kv", "spec_ops.backends.triton.cache.append:append_kv")
    with pytest.raises(ImportError, match=r"append_kv: .*triton is not installed: `pip install triton`"):
        run()


def test_another_missing_module_is_not_blamed_on_triton():
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught:
        imported_at_first_call("append_kv", "no_such_module:append_kv")()
    assert "pip install" not in str(caught.value)


@pytest.mark.gpu
def test_cuda_ops_run_the_kernel():
    cache = torch.zeros(2, 2, 4, 1, 8, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.ops.spec_ops.append_kv(
            cache[0], cache[1], torch.ones(1, 1, 8, device="cuda"), torch.ones(1, 1, 8, device="cuda"),
            torch.tensor([3], device="cuda"), 1.0, 1.0,
        )  # fmt: skip
        torch.cuda.synchronize()
    assert any("append_kv_kernel" in event.name for event in profile.events())
