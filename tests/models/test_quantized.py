"""Models whose weights are stored in 8 bits: texts, accept length, and compiled rounds that read them as they are stored."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import spec_ops
from spec_ops.decoding import Generator
from spec_ops.models import CausalLM, ModelConfig, MTPDraft, load_pair, quantize
from spec_ops.models.corpus import held_out_prompts
from spec_ops.passes.analysis.counts import WEIGHTS
from tests.helpers.command_line import refusal
from tests.helpers.command_line import run_spec_ops as run
from tests.helpers.pass_harness import compile_interpreted


@pytest.fixture(scope="module")
def torchao():
    return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


def test_weights_and_what_stays(torchao):
    model = nn.Sequential(nn.Linear(128, 48), nn.RMSNorm(48), nn.Linear(48, 96), nn.Embedding(5, 64))
    before = [p.detach().clone() for p in model.parameters()]
    settings = inductor_config.coordinate_descent_tuning
    assert quantize(model) is model
    weight = model[0].weight
    assert isinstance(weight.data, torchao.Float8Tensor)
    assert (weight.qdata.dtype, weight.scale.shape) == (torch.float8_e4m3fn, (48, 1))
    assert (weight.dequantize() - before[0]).abs().max() <= 2**-4 * before[0].abs().max()
    for kept, was in zip(list(model.parameters())[1:], before[1:], strict=True):
        assert type(kept.data) is torch.Tensor
        assert torch.equal(kept, was)
    assert inductor_config.coordinate_descent_tuning == settings
    one = quantize(nn.Linear(128, 48), "float8_tensor")
    assert one.weight.scale.numel() == 1


def test_layers_that_are_shared(torchao):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
    }
    target = CausalLM(ModelConfig(**sizes))
    draft = MTPDraft(ModelConfig(**sizes), target)
    quantize(target, lm_head=False)
    assert type(target.lm_head.weight.data) is torch.Tensor
    quantize(draft)
    assert isinstance(target.lm_head.weight.data, torchao.Float8Tensor)
    with pytest.raises(ValueError, match="got one that is quantized already"):
        quantize(draft)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("model",), TypeError, "`model` must be a torch.nn.Module, got str"),
        ((nn.Linear(64, 64), "int3"), ValueError, r"`kind` must be one of \['float8', 'float8_tensor'\], got 'int3'"),
        ((nn.Linear(63, 64),), ValueError, "`model` must have linear layers with an input of a multiple of 64, got Linear"),
    ],
)
def test_bad_input(args, error, message):
    with pytest.raises(error, match=f"quantize: {message}"):
        quantize(*args)


def test_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r"quantize: needs torchao: pip install \"\.\[quantize\]\""):
        quantize(nn.Linear(64, 64))


def test_speculation_gives_the_text_of_the_quantized_target(torchao):
    """And gains as many tokens a round, within 2%."""
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, 16, 128)
    limits = {"max_batch_size": 16, "max_seq_len": 192}
    exact = Generator(target, draft, **limits).generate(prompts, max_new_tokens=64)
    for model in (target, draft):
        quantize(model)
    plain = Generator(target, None, **limits).generate(prompts, max_new_tokens=64)
    fast = Generator(target, draft, **limits).generate(prompts, max_new_tokens=64)
    assert fast.tokens == plain.tokens
    assert fast.tokens != exact.tokens  # or nothing was quantized
    assert fast.stats.accept_length == pytest.approx(exact.stats.accept_length, rel=0.02)


def test_a_compiled_model_reads_its_weights_as_they_are_stored(torchao):
    """A layer of torchao's weights beside an op of ours: all products, the residual and the norm, in bfloat16."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o, self.norm, self.up = nn.Linear(512, 512, bias=False), nn.RMSNorm(512, eps=1e-5), nn.Linear(512, 2048)

        def forward(self, x, residual, cache_k, cache_v, slots):
            spec_ops.append_kv(cache_k, cache_v, *x.view(4, 2, 4, 64).unbind(1), slots)
            y = residual + self.o(x)
            return y, self.up(self.norm(y))

    torch.manual_seed(0)
    exact = Block().bfloat16().requires_grad_(False)
    block = quantize(copy.deepcopy(exact))
    caches = [torch.zeros(1, 4, 4, 64, dtype=torch.bfloat16) for _ in range(2)]
    args = [torch.randn(4, 512).bfloat16(), torch.randn(4, 512).bfloat16(), *caches, torch.arange(4)]
    want = block(*args)
    torch._dynamo.reset()
    compiled, reports = compile_interpreted(block, arch=90)
    got = compiled(*args)
    assert reports[0].matches("lower_skinny_mm") == 2
    assert reports[0].matches("fuse_norm_linear") == 1
    # 1.25 MiB of numbers: read, written in 16 bits and read again, or read once.
    assert (reports[0].before[WEIGHTS], reports[0].after[WEIGHTS]) == (7, 2)
    assert "MiB moved for weights" in reports[0].text()
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2**-6, atol=2**-5)


def test_command_line(torchao):
    result = run("generate", "--compare", "--quantize", "float8", "--max-new-tokens", "24", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "float32, weights float8" in result.output
    assert "texts are equal" in result.output


def test_command_line_refuses_other_kinds():
    assert "`kind` must be one of" in refusal(run("generate", "--quantize", "int3", "--device", "cpu"), "--quantize")
