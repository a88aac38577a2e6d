"""Kernels compiled on threads: the launch finds the binary, and no failure there reaches it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

from spec_ops.backends.triton.runtime import ahead, background, launch  # noqa: E402
from tests.helpers.triton_target import keys, pretended_gpu  # noqa: E402


@triton.jit
def scale_kernel(x, n, factor, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def wrong_kernel(x, BLOCK: tl.constexpr, PDL: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.no_such_function(x))  # what the compiler says when it gets here


@pytest.fixture(autouse=True)
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pretended_gpu(90):
        yield


def start(kernel, *args, **options) -> int:
    with launch.recorded() as launches:
        launch.launch(kernel, (1,), *args, **options)
    return launch.compile_in_background(launches, torch.device("cuda", 0))


def meta(n: int = 4096) -> torch.Tensor:
    return torch.empty(n, dtype=torch.bfloat16, device="meta")


def found(kernel, *args, **options) -> object:
    """The binary that a launch would run, which must be in memory."""
    with keys() as missed:
        binary = kernel.run(*args, grid=(1,), warmup=True, **options, **launch.pdl_arguments(kernel, False))
    assert missed == []
    return binary


def test_a_launch_finds_the_binary(tmp_path):
    """In memory, and another process on disk; it is the one that is compiled ahead of the same launch."""
    args, options = (meta(), 4096, 2.0), {"BLOCK": 128, "num_warps": 2}
    assert start(scale_kernel, *args, **options) == 1
    assert start(scale_kernel, *args, **options) == 0  # it is being compiled
    background.wait_for(scale_kernel)
    assert background.pending == {}
    real = torch.zeros(4096, dtype=torch.bfloat16)
    binary = found(scale_kernel, real, 4096, 2.0, **options)
    assert start(scale_kernel, *args, **options) == 0  # it is there
    with keys() as missed:
        assert start(scale_kernel, meta(), 4097, 2.0, **options) == 0
    assert len(missed) == 1  # another binary: 16 does not divide 4097

    scale_kernel.device_caches.clear()  # as in another process
    hits = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        again = scale_kernel.run(real, 4096, 2.0, grid=(1,), warmup=True, **options, PDL=True, launch_pdl=False)
    assert (hits, again.hash) == ([True], binary.hash)
    assert (tmp_path / triton.runtime.cache._base32(binary.hash)).is_dir()

    with launch.recorded() as launches:
        launch.launch(scale_kernel, (1,), *args, **options)
    variant = ahead.variant_of("scale", launches[0], options={"launch_pdl": False})
    assert ahead.compiled(variant, 90).asm["cubin"] == binary.asm["cubin"]


def test_the_launch_waits(monkeypatch):
    """Not for other kernels."""
    begin, order = threading.Event(), []
    compile = triton.compiler.compile

    def slowly(*args, **kwargs):
        begin.wait()
        order.append("compiled")
        return compile(*args, **kwargs)

    _ = scale_kernel.device_caches[0]  # which sets `compile`
    monkeypatch.setattr(scale_kernel, "compile", slowly)
    assert start(scale_kernel, meta(), 4096, 2.0, BLOCK=128) == 1
    background.wait_for(wrong_kernel)
    thread = threading.Thread(target=lambda: (background.wait_for(scale_kernel), order.append("launched")))
    thread.start()
    thread.join(0.05)
    assert order == []
    begin.set()
    thread.join()
    assert order == ["compiled", "launched"]


def test_a_failure_is_the_launchs_own(caplog):
    with caplog.at_level(logging.DEBUG, "spec_ops.backends"):
        assert start(wrong_kernel, meta(), BLOCK=128) == 1
        background.wait_for(wrong_kernel)
    (record,) = caplog.records
    assert record.getMessage().startswith("wrong_kernel was not compiled in the background: ")
    assert record.levelno == logging.DEBUG
    with pytest.raises(triton.CompilationError, match="no_such_function"):
        launch.launch(wrong_kernel, (1,), torch.zeros(128, dtype=torch.bfloat16), BLOCK=128)


def test_threads_end_with_the_work():
    for size in (64, 128, 256):
        start(scale_kernel, meta(), 4096, 2.0, BLOCK=size)
    background.wait_for(scale_kernel)
    for thread in threading.enumerate():
        if thread.name == "spec_ops compiles kernels":
            thread.join(10)
            assert not thread.is_alive()
    assert (background._threads, background._jobs, background.pending) == (0, {}, {})


def test_a_forked_child_waits_for_nobody(monkeypatch):
    begin = threading.Event()
    _ = scale_kernel.device_caches[0]
    monkeypatch.setattr(scale_kernel, "compile", lambda *args, **kwargs: begin.wait())
    start(scale_kernel, meta(), 4096, 2.0, BLOCK=128)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits
        background.wait_for(scale_kernel)
        os._exit(0 if background.pending == {} and background._threads == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    begin.set()
    background.wait_for(scale_kernel)


SCRIPT = """
import torch
from spec_ops.backends.triton.runtime import background
from tests.backends.triton.test_background import meta, scale_kernel, start
from tests.helpers.triton_target import pretended_gpu

with pretended_gpu(90):
    for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        start(scale_kernel, meta(), 4096, 2.0, BLOCK=size)
"""


@pytest.mark.slow
def test_a_process_ends_without_what_nobody_waits_for(tmp_path):
    """What has begun is finished, since a thread cannot be stopped inside of LLVM; the rest is left."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "other")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "other").rglob("*.cubin"))) < 8


def test_no_thread_can_be_started(monkeypatch):
    """A launch that waited for it would wait for good."""

    def start_thread(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start_thread)
    start(scale_kernel, meta(), 4096, 5.0, BLOCK=256, num_warps=2)
    assert (background.pending, background._jobs, background._threads) == ({}, {}, 0)
