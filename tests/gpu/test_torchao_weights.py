"""torchao's NVFP4 weights in CUDA graphs: the stored weight is read, and scales that change are seen."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from torch import nn

import spec_ops

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]


@torch.no_grad()
def test_nvfp4_in_a_cuda_graph():
    workflow = pytest.importorskip("torchao.prototype.mx_formats", reason="torchao has no NVFP4")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512)).cuda().bfloat16().requires_grad_(False)
    importlib.import_module("torchao.quantization").quantize_(model, workflow.NVFP4WeightOnlyConfig())
    compiled, x = spec_ops.compile(model, mode="reduce-overhead"), torch.randn(4, 512, device="cuda").bfloat16()
    for change in (None, "in place", "another tensor"):
        scale = model[1].weight.scale
        halved = (scale.float() / 2).to(torch.float8_e4m3fn)
        if change == "in place":
            scale.copy_(halved)
        elif change is not None:
            model[1].weight.scale = halved
        for _ in range(4):
            got = compiled(x).clone()
        torch.testing.assert_close(got, model(x), rtol=2**-6, atol=2**-5)
