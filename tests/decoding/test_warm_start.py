"""A second process takes a compiled function from Inductor's caches, unless something that decides on kernels changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime import compile_tasks

import spec_ops
from tests.helpers.forked import run_code

# A product, a cache write and an attention step. On CPU Inductor generates no kernel for them, so it needs no C++ compiler.
SCRIPT = """
import json, sys, threading
import torch
if sys.argv[1] == "cuda":
    import triton
import spec_ops
from torch._dynamo.utils import counters

device, *settings = sys.argv[1:]
compiled_kernels = []  # and the threads that did
if device == "cuda":
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled_kernels.append(
        (src.name, threading.current_thread().name)
    )
torch.set_default_device(device)
torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
k_cache, v_cache = torch.zeros(2, 3, 16, 2, 64)
tables, lens = torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)

def step(x, weight, rows, slots):
    spec_ops.append_kv(k_cache, v_cache, rows, rows, slots)
    q = torch.mm(x, weight).view(1, 1, 2, 64)
    if q.is_cuda:
        q = q.sin()
    return spec_ops.mha_draft_decode(q, k_cache, v_cache, tables, lens)

torch.manual_seed(0)
call = torch.randn(1, 16), torch.randn(16, 128), torch.randn(1, 2, 64), torch.tensor([4])

def compiled(passes):
    counters.clear()
    k_cache.zero_(), v_cache.zero_()
    with torch.no_grad():
        result = spec_ops.compile(step, passes=passes, mode="default")(*call)
    own = sorted({thread for kernel, thread in compiled_kernels if not kernel.startswith("triton_")})
    found = {name: sum(group[name] for group in counters.values()) for name in (
        "fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass",
        "autograd_cache_miss", "autograd_cache_hit", "autograd_cache_bypass",
    )}
    return {"result": result.flatten().tolist(), "threads": own, **{name: times for name, times in found.items() if times}}

print(json.dumps([compiled(json.loads(passes)) for passes in settings]))
"""


def process(folder: Path, seed: int, *passes: dict[str, bool], device: str = "cpu", **env: str) -> list[dict[str, Any]]:
    """What the caches in `folder` were asked by a process that compiles with each of `passes`, and the results."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONHASHSEED": str(seed)} | env
    env.pop("TRITON_CACHE_DIR", None)
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", SCRIPT, device, *map(json.dumps, passes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_second_process_hits_both_caches_and_other_passes_none(tmp_path):
    """The hash seeds differ: nothing of the key may depend on the order of a set. The first process is forked."""
    settings = f"import os, sys; os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r}; sys.argv[1:] = ['cpu', '{{}}']\n"
    done = run_code(settings + SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    (cold,) = json.loads(done.stdout.splitlines()[-1])
    warm, other = process(tmp_path, 2, {}, {"select_backends": False})
    result = cold.pop("result")
    assert [found.pop("threads") for found in (cold, warm, other)] == [[], [], []]
    assert cold == {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1}
    assert warm == {"result": result, "fxgraph_cache_hit": 1, "autograd_cache_hit": 1}
    assert other == {"result": result, "fxgraph_cache_miss": 1, "autograd_cache_miss": 1}


def test_ptxas_is_inductors_before_anything_is_compiled(tmp_path, monkeypatch):
    """It is part of Triton's cache key, and Inductor sets it only where its caches miss."""
    ours = [tmp_path / "bin" / "ptxas", tmp_path / "_inductor" / "bin" / "ptxas"]  # torch 2.13 looks in the second
    for ptxas in ours:
        ptxas.parent.mkdir(parents=True)
        ptxas.write_text("")
        ptxas.chmod(0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(tmp_path / "_inductor" / "runtime" / "compile_tasks.py"))
    for use in (lambda: spec_ops.install()(), lambda: spec_ops.compile(torch.sin)):
        monkeypatch.setenv("TRITON_PTXAS_PATH", "")
        monkeypatch.delenv("TRITON_PTXAS_PATH")
        getattr(compile_tasks._set_triton_ptxas_path, "cache_clear", lambda: None)()  # torch 2.13 asks once a process
        use()
        assert Path(os.environ["TRITON_PTXAS_PATH"]) in ours
    monkeypatch.setenv("TRITON_PTXAS_PATH", "the user's")
    spec_ops.compile(torch.sin)
    assert os.environ["TRITON_PTXAS_PATH"] == "the user's"


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "{cache}/triton/0"), ("the user's", "the user's")])
def test_triton_looks_where_inductor_does(set_by_user, expected, tmp_path, monkeypatch):
    """Inductor names the folder only where its caches miss. Nothing is set without a GPU."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    for available, wanted in ((False, set_by_user), (True, expected.format(cache=tmp_path))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        spec_ops.compile(torch.sin)
        assert os.environ.get("TRITON_CACHE_DIR") == wanted


@pytest.mark.gpu
def test_second_process_compiles_no_kernel(tmp_path):
    """Neither Inductor's nor ours: what Inductor sets must change neither the keys of Triton's cache, where ours are, nor its
    place. The first process compiles ours in the background, and no launch does."""
    cold = process(tmp_path, 1, {}, device="cuda", TRITON_HOME=str(tmp_path / "home"))[0]
    kernels = set(tmp_path.rglob("*.cubin"))
    warm = process(tmp_path, 2, {}, device="cuda", TRITON_HOME=str(tmp_path / "home"))[0]
    assert len(kernels) >= 3  # attention, the append, and Inductor's
    assert set(tmp_path.rglob("*.cubin")) == kernels
    assert warm["fxgraph_cache_hit"] == 1
    assert warm["result"] == cold["result"]
    assert (cold["threads"], warm["threads"]) == (["spec_ops compiles kernels"], [])
