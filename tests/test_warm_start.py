"""A second process takes a compiled function from Inductor's caches, unless something that decides on kernels changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# No kernel is generated for this, so that no C++ compiler is needed: a product, a cache write and an attention step.
SCRIPT = """
import json, sys
import torch
import spec_ops
from torch._dynamo.utils import counters

k_cache, v_cache = torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16)
tables, lens = torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)

def step(x, weight, rows, slots):
    spec_ops.append_kv(k_cache, v_cache, rows, rows, slots)
    q = torch.mm(x, weight).view(1, 1, 2, 16)
    return spec_ops.mha_draft_decode(q, k_cache, v_cache, tables, lens)

torch.manual_seed(0)
call = torch.randn(1, 8), torch.randn(8, 32), torch.randn(1, 2, 16), torch.tensor([8])

def compiled(passes):
    counters.clear()
    k_cache.zero_(), v_cache.zero_()
    with torch.no_grad():
        result = spec_ops.compile(step, passes=passes, mode="default")(*call)
    found = {name: sum(group[name] for group in counters.values()) for name in (
        "fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass",
        "autograd_cache_miss", "autograd_cache_hit", "autograd_cache_bypass",
    )}
    return {"result": result.flatten().tolist(), **{name: times for name, times in found.items() if times}}

settings = [json.loads(text) for text in sys.argv[1:]]
print(json.dumps([compiled(passes) for passes in settings]))
"""


def process(folder: Path, seed: int, *passes: dict[str, bool]) -> list[dict[str, Any]]:
    """What the caches in `folder` were asked by a process that compiles with each of `passes`, and the results."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONHASHSEED": str(seed), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", SCRIPT, *map(json.dumps, passes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_second_process_hits_both_caches_and_other_passes_none(tmp_path):
    """The hash seeds differ: nothing of the key may depend on the order of a set."""
    (cold,) = process(tmp_path, 1, {})
    warm, other = process(tmp_path, 2, {}, {"select_backends": False})
    result = cold.pop("result")
    assert cold == {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1}
    assert warm == {"result": result, "fxgraph_cache_hit": 1, "autograd_cache_hit": 1}
    assert other == {"result": result, "fxgraph_cache_miss": 1, "autograd_cache_miss": 1}
