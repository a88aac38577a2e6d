"""Models whose weights are stored in 8 bits: texts, accept length, and compiled rounds that read them as they are stored."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import spec_ops
from spec_ops.backends.weight_format import e8m0, packed_e2m1
from spec_ops.decoding import Generator
from spec_ops.models import CausalLM, ModelConfig, MTPDraft, load_pair, quantize, quantized, save_pair
from spec_ops.models.corpus import held_out_prompts
from spec_ops.models.stored_tensor import Inputs, StoredTensor
from spec_ops.parallel import TensorParallel, shard
from spec_ops.parallel.fake import fake_group
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


@pytest.mark.parametrize("shape", [(300, 192), (128, 256), (48, 64)])
def test_float8_in_blocks(shape):
    """Needs no torchao. Blocks at the edges are smaller; one of zeros stays zeros."""
    n, k = shape
    layer = nn.Linear(k, n)
    layer.weight.data[:128, :64] = 0 if k > 64 else 1
    exact = layer.weight.detach().clone()
    assert quantize(layer, "float8_block") is layer
    weight = layer.weight
    assert type(weight.data) is StoredTensor
    assert (weight.data_.dtype, weight.scale.shape) == (torch.float8_e4m3fn, (-(-n // 128), -(-k // 128)))
    got = weight.dequantize()
    for i in range(0, n, 128):
        for j in range(0, k, 128):
            block, want = got[i : i + 128, j : j + 128], exact[i : i + 128, j : j + 128]
            # Half a unit in the last of 4 binary digits, or of the least numbers.
            bound = want.abs() / 16 + want.abs().max() / 448 * 2**-10
            assert bool(((block - want).abs() <= bound).all())
            torch.testing.assert_close(block.abs().max(), want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "group"), [("float8_dynamic", 256), ("float8_block_dynamic", 128)])
def test_rows_of_8_bits(kind, group, dtype):
    """Rounded with scales in float32, by hand; rows of zeros and of the least numbers among them."""
    layer = quantize(nn.Linear(256, 160, dtype=dtype), kind)
    plain = quantized.float8_tensor(layer.weight.dequantize(), *((1, 256) if group == 256 else ()))
    weight = layer.weight
    assert type(weight.data) is StoredTensor
    assert (weight.data_.dtype, weight.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert weight.scale.shape == ((160, 1) if group == 256 else (2, 2)) == plain.scale.shape
    x = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[0, 1], x[0, 2, :128] = 0, torch.finfo(dtype).tiny * torch.randn(256), 0
    x[0, 3, 7] = torch.finfo(dtype).max
    rows = weight.inputs.rounded(x, None)
    assert rows.dtype == dtype
    for row, got in zip(x.view(15, -1, group).double().flatten(0, 1), rows.view(-1, group).double(), strict=True):
        step = max(row.abs().max().float() / 448, torch.tensor(torch.finfo(torch.float32).tiny))
        numbers = (row.float() / step).to(torch.float8_e4m3fn)
        torch.testing.assert_close(got, (numbers.float() * step).to(dtype).double(), rtol=0, atol=0)
        # Half a unit in the last of 4 binary digits, or of the least numbers; and the rounding to the rows' dtype.
        bound = row.abs() * (2**-4 + torch.finfo(dtype).eps) + step * 2**-10 + torch.finfo(dtype).tiny
        assert bool(((got - row).abs() <= bound).all())
    assert (rows != x).sum() > 100
    want = nn.functional.linear(rows, weight.dequantize().to(dtype), layer.bias)
    assert torch.equal(layer(x), want)


def test_rows_of_groups_of_64():
    """Where 128 does not divide the columns, as with int4."""
    weight = quantize(nn.Linear(192, 48), "float8_block_dynamic").weight
    assert weight.inputs == Inputs("float8", 64, float32_scales=True)
    x = torch.randn(2, 192)
    assert torch.equal(nn.functional.linear(x, weight), weight.inputs.rounded(x, None) @ weight.dequantize().t())


def test_scales_of_the_rows_dtype_differ():
    """`float32_scales` is one of what tensors are told apart by."""
    layer = quantize(nn.Linear(256, 48, bias=False), "float8_dynamic").bfloat16()
    weight, x = layer.weight, torch.randn(9, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    other = StoredTensor(weight.data_, weight.scale, dtype=torch.bfloat16, inputs=Inputs("float8"))
    assert weight._stable_hash_for_caching() != other._stable_hash_for_caching()
    assert not torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, other))


def test_weights_of_other_kinds(torchao):
    layer = nn.Linear(128, 48)
    exact = layer.weight.detach().clone()
    quantize(layer, "int8")
    assert isinstance(layer.weight.data, torchao.Int8Tensor)
    assert (layer.weight.dequantize() - exact).abs().max() <= exact.abs().max() / 250
    layers = nn.Sequential(nn.Linear(192, 48), nn.Linear(128, 48))
    layers[0].weight.data[:, :64] = 3.0  # a group of one value
    before = [layer.weight.detach().clone() for layer in layers]
    quantize(layers, "int4")
    for layer, was, groups in zip(layers, before, (3, 1), strict=True):
        assert type(layer.weight.data) is StoredTensor
        assert (layer.weight.data_.dtype, layer.weight.scale.shape) == (torch.uint8, (48, groups))
        values = was.unflatten(1, (groups, -1))
        step = (values.amax(2) - values.amin(2)) / 15
        lost = (layer.weight.dequantize() - was).unflatten(1, (groups, -1)).square().mean(2)
        # A uniform error within a step of the whole range, or less where a smaller one is better.
        assert bool((lost <= 1.3 * step.square() / 12 + 1e-12).all())
        assert lost.mean() < 0.98 * (step.square() / 12).mean()


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_4_bit_floats(kind):
    """Scales, what rounding loses, and groups of zeros, of one value and of very small ones."""
    layer = nn.Linear(192, 48)
    with torch.no_grad():
        layer.weight.normal_(generator=torch.Generator().manual_seed(0))
        layer.weight[0, :64], layer.weight[1, :64], layer.weight[2, :64] = 0, 3.0, 1e-9
    exact = layer.weight.detach().clone()
    assert quantize(layer, kind) is layer
    weight, group = layer.weight, 16 if kind == "nvfp4" else 32
    assert type(weight.data) is StoredTensor
    assert (weight.data_.dtype, weight.scale.shape) == (torch.uint8, (48, 192 // group))
    assert (weight.tensor_scale is not None) == (kind == "nvfp4")
    got, values = weight.dequantize(), exact.unflatten(1, (-1, group))
    # Numbers are nearest to the group's own: at most half of the step from 4 to 6 away, or beyond 6.
    scale = got.unflatten(1, (-1, group)).abs().amax(2) / 6
    assert torch.equal(got[0, :64], torch.zeros(64))
    assert (got[1, :64] - 3).abs().max() <= 3 / 16
    assert got[2, :64].abs().max() <= (2e-9 if kind == "mxfp4" else 0)
    lost = (got.unflatten(1, (-1, group)) - values).abs().amax(2)
    assert bool((lost[3:] <= 1.6 * values[3:].abs().amax(2) / 6).all())
    assert bool((scale[3:] > 0).all())
    if kind == "nvfp4":
        torch.testing.assert_close(weight.tensor_scale, exact.abs().amax().reshape(1) / (6 * 448))
        assert 384 <= weight.scale.float().amax() <= 448
        # By a tenth less than with scales that make each group's greatest magnitude 6.
        scales = (values.abs().amax(2) / 6 / weight.tensor_scale).to(torch.float8_e4m3fn)
        wide = torch.where(scales.float() == 0, 1, scales.float() * weight.tensor_scale)[..., None]
        plain = StoredTensor(
            packed_e2m1((values / wide).flatten(1)), scales, tensor_scale=weight.tensor_scale, dtype=exact.dtype
        )
        errors = [(w.dequantize() - exact)[3:].square().mean().sqrt() for w in (weight, plain)]
        assert 0 < errors[0] < 0.9 * errors[1]
    else:
        # Another power of 2 for each group would lose no less.
        for off in (-1, 1):
            other = StoredTensor(
                packed_e2m1((values / e8m0(weight.scale + off)[..., None]).flatten(1)), weight.scale + off, dtype=exact.dtype
            )
            worse = (other.dequantize() - exact).unflatten(1, (-1, group)).square().sum(2)
            assert bool((worse >= (got - exact).unflatten(1, (-1, group)).square().sum(2))[3:].all())


def test_a_stored_tensor_is_a_linear_layers_weight_alone():
    layer = quantize(nn.Linear(128, 48), "int4")
    x = torch.randn(2, 3, 128)
    want = nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
    assert torch.equal(layer(x), want)
    with torch.inference_mode():
        assert torch.equal(layer(x), want)
    moved = copy.deepcopy(layer).to(torch.bfloat16)
    assert type(moved.weight) is StoredTensor
    assert (moved.weight.dtype, moved.weight.data_.dtype, moved.weight.scale.dtype) == (
        torch.bfloat16,
        torch.uint8,
        torch.float32,
    )
    with pytest.raises(NotImplementedError, match=r"a weight of 8 or 4 bits is for `linear` alone, got aten.mul"):
        layer.weight * 2
    order = torch.randperm(128)
    weight = layer.weight
    ordered = StoredTensor(weight.data_, weight.scale, weight.zero, dtype=torch.float32, order=order)
    assert torch.equal(ordered.dequantize()[:, order], weight.dequantize())
    torch.testing.assert_close(nn.functional.linear(x, ordered), x @ ordered.dequantize().t())
    scales = torch.ones(48, 8).to(torch.float8_e4m3fn), torch.ones(1)
    scaled = StoredTensor(weight.data_, scales[0], tensor_scale=scales[1], dtype=torch.float32)
    assert torch.equal(copy.deepcopy(scaled).to(torch.bfloat16).tensor_scale, scales[1])
    hashes = {t._stable_hash_for_caching() for t in (weight, ordered, moved.weight, layer.weight.clone())}
    assert len(hashes) == 3
    with pytest.raises(ValueError, match=r"`order` must be \[128\] of torch.int64, got torch.int64 of \[64\]"):
        StoredTensor(weight.data_, weight.scale, dtype=torch.float32, order=order[:64])


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


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_what_needs_a_state_dict(kind, tmp_path):
    """Refuses a quantized model by the name of a weight; the share of a rank can be quantized."""
    target, draft, _ = load_pair()
    share = shard(target, TensorParallel(fake_group(2, 0)))
    assert type(quantize(share, kind).layers[0].attention.qkv_proj.weight.data) is StoredTensor
    quantize(draft, kind)
    got = "must have the weights that it had before `quantize`, got `fc.weight` as StoredTensor"
    with pytest.raises(ValueError, match=f"save_pair: `draft` {got}"):
        save_pair(tmp_path / "pair", target, draft, {})
    assert not (tmp_path / "pair").exists()
    with pytest.raises(ValueError, match=f"shard: `model` {got}"):
        shard(draft, TensorParallel(fake_group(2, 0)), target=share)


def test_layers_without_weights():
    """Of no inputs or no outputs: they stay."""
    layers = nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 64), nn.Linear(64, 8))
    for kind in ("nvfp4", "mxfp4", "int4", "float8_block", "float8_dynamic", "float8_block_dynamic"):
        model = quantize(copy.deepcopy(layers), kind)
        assert [type(layer.weight.data) is StoredTensor for layer in model] == [False, False, True]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("model",), TypeError, "`model` must be a torch.nn.Module, got str"),
        (
            (nn.Linear(64, 64), "int3"),
            ValueError,
            r"`kind` must be one of \['float8', .*, 'mxfp4'\], got 'int3'",
        ),
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "nvfp4", "float8_dynamic", "float8_block_dynamic"])
def test_text_of_a_quantized_target(torchao, kind):
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, 2, 32)
    limits = {"max_batch_size": 2, "max_seq_len": 48}
    for model in (target, draft):
        quantize(model, kind)
    plain = Generator(target, None, **limits).generate(prompts, max_new_tokens=16)
    fast = Generator(target, draft, **limits).generate(prompts, max_new_tokens=16)
    assert fast.tokens == plain.tokens
    assert fast.stats.accept_length > 2


@pytest.mark.slow
def test_batch_invariant_text_with_rows_of_8_bits():
    """In bfloat16 too: a row is rounded by itself."""
    target, draft, tokenizer = load_pair(dtype=torch.bfloat16)
    prompts = held_out_prompts(tokenizer, 2, 32)
    for model in (target, draft):
        quantize(model, "float8_block_dynamic")
    limits = {"max_seq_len": 64, "invariant": True}
    plain = Generator(target, None, max_batch_size=2, **limits).generate(prompts, max_new_tokens=20)
    fast = Generator(target, draft, max_batch_size=2, **limits).generate(prompts, max_new_tokens=20)
    alone = Generator(target, draft, max_batch_size=1, **limits).generate(prompts[1:], max_new_tokens=20)
    assert fast.tokens == plain.tokens
    assert alone.tokens == plain.tokens[1:]


@pytest.mark.slow
def test_speculation_gives_the_text_of_the_quantized_target(torchao):
    """And gains as many tokens a round, within 2%."""
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, 16, 128)
    limits = {"max_batch_size": 16, "max_seq_len": 160}
    exact = Generator(target, draft, **limits).generate(prompts, max_new_tokens=32)
    for model in (target, draft):
        quantize(model)
    plain = Generator(target, None, **limits).generate(prompts, max_new_tokens=32)
    fast = Generator(target, draft, **limits).generate(prompts, max_new_tokens=32)
    assert fast.tokens == plain.tokens
    assert fast.tokens != exact.tokens  # or nothing was quantized
    assert fast.stats.accept_length == pytest.approx(exact.stats.accept_length, rel=0.02)


# MiB of 1.25 Mi numbers: read, written in 16 bits and read again, or read once. Scales and zeros of 4 bits are 0.08.
@pytest.mark.parametrize(
    ("kind", "moved"), [("float8", (7, 2)), ("float8_block", (7, 2)), ("int8", (7, 2)), ("int4", (6, 1)), ("nvfp4", (6, 1))]
)
def test_a_compiled_model_reads_its_weights_as_they_are_stored(torchao, kind, moved):
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
    block = quantize(copy.deepcopy(exact), kind)
    caches = [torch.zeros(1, 4, 4, 64, dtype=torch.bfloat16) for _ in range(2)]
    args = [torch.randn(4, 512).bfloat16(), torch.randn(4, 512).bfloat16(), *caches, torch.arange(4)]
    want = block(*args)
    torch._dynamo.reset()
    compiled, reports = compile_interpreted(block, arch=90)
    got = compiled(*args)
    assert reports[0].matches("lower_skinny_mm") == 2
    assert reports[0].matches("fuse_norm_linear") == 1
    assert (reports[0].before[WEIGHTS], reports[0].after[WEIGHTS]) == moved
    assert "MiB moved for weights" in reports[0].text()
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2**-6, atol=2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["float8_dynamic", "float8_block_dynamic"])
@torch.no_grad()
def test_compiled_for_the_cpu_rows_are_rounded_as_by_eager(kind, dtype):
    """By Inductor. A quotient in the middle between two numbers may go either way."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = quantize(nn.Linear(256, 160), kind).to(dtype)
    x = torch.randn(3, 4, 256, dtype=dtype)
    x[0, 0], x[0, 1, :128] = 0, 0
    compiled = spec_ops.compile(lambda x: (layer(x), layer.weight.inputs.rounded(x, None)), mode="default")
    got, rows = compiled(x)
    eager = layer.weight.inputs.rounded(x, None)
    assert (rows != eager).double().mean() <= (0 if dtype == torch.float32 else 1e-2)
    assert torch.equal(rows[0, 0], eager[0, 0])
    torch.testing.assert_close(got, nn.functional.linear(rows, layer.weight.dequantize().to(dtype), layer.bias.to(dtype)))


def test_command_line():
    """Of one kind: what texts the others give is asked above."""
    result = run("generate", "--compare", "--quantize", "int4", "--max-new-tokens", "8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "float32, weights int4" in result.output
    assert "texts are equal" in result.output


def test_command_line_refuses_other_kinds():
    assert "`kind` must be one of" in refusal(run("generate", "--quantize", "int3", "--device", "cpu"), "--quantize")
