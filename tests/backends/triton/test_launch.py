"""What a launch does for its thread before a kernel runs. No GPU: what torch says of one is made up."""

from __future__ import annotations

import functools
import os
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from spec_ops.backends.triton.runtime import contexts, launch


def test_every_thread_has_a_context_of_every_device_that_it_launches_on(monkeypatch):
    current, made = [0], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: made.append((threading.get_ident(), current[0])))

    def visit() -> None:
        for device in (0, 0, 1, 0, 1):
            current[0] = device
            contexts.make_context()

    for _ in range(2):
        thread = threading.Thread(target=visit)
        thread.start()
        thread.join()
    assert [device for _, device in made] == [0, 1, 0, 1]


def test_a_context_is_made_once_cuda_is_there(monkeypatch):
    """A thread that launched on the CPU, through the interpreter, before anything used CUDA."""
    made = []
    monkeypatch.setattr(contexts, "_contexts", contexts._Contexts())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    contexts.make_context()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: made.append(0))
    contexts.make_context()
    assert made == [0]


@triton.jit
def nothing_kernel(PDL: triton.language.constexpr):
    pass


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing")
@pytest.mark.parametrize(("arch", "known"), [(80, False), (86, False), (89, False), (90, True), (100, True), (120, True)])
def test_kernels_may_be_early_from_sm_90_on(monkeypatch, arch, known):
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: GPUTarget("cuda", arch, 32))
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_has_pdl", functools.cache(launch._has_pdl.__wrapped__))
    for early in (False, True):
        given = launch.pdl_arguments(nothing_kernel, early)
        assert given == ({"PDL": True, "launch_pdl": early} if known else {"PDL": False})
