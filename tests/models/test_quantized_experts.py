"""`quantize` on this package's mixtures: experts in 8 and 4 bits, and what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.round.measure import RoundCase, floor_bytes
from benchmarks.round.shapes import SHAPES, touched_experts
from benchmarks.round.stored import store
from spec_ops.backends.expert_format import dequantized_expert, expert_format
from spec_ops.decoding import Generator
from spec_ops.models import CausalLM, MixtureConfig, ModelConfig, MTPDraft, quantize, quantized, save_pair
from spec_ops.models.layers import Mixture
from spec_ops.models.quantized_experts import int4_without_zeros, is_stored, mixtures, store_experts
from spec_ops.models.stored_tensor import StoredTensor
from spec_ops.parallel import TensorParallel, shard
from spec_ops.parallel.fake import fake_group

KINDS = {"float8": quantized.float8_tensor, "float8_block": quantized.float8_tensor, "float8_tensor": quantized.float8_tensor}
KINDS |= {"mxfp4": quantized.mxfp4_tensor, "int4": None}
FOUR = ("mxfp4", "int4")  # bits
CONFIG = ModelConfig(
    vocab_size=96, hidden_size=192, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32,
    mixture=MixtureConfig(6, 2, intermediate_size=160, shared_intermediate_size=64, first_dense=1),
)  # fmt: skip


def made(config: ModelConfig = CONFIG) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(config).requires_grad_(False).eval()


def only(model: nn.Module) -> Mixture:
    (mixture,) = mixtures(model)
    return mixture


def with_stored_experts(model: CausalLM, kind: str) -> CausalLM:
    for mixture in mixtures(model):
        store_experts(mixture, kind, KINDS[kind])
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_the_dequantized_ones(kind):
    exact, model = made(), with_stored_experts(made(), kind)
    stored, plain = only(model), only(exact)
    bits = 4 if kind in FOUR else 8
    assert stored.gate_up_proj.nbytes * 8 == plain.gate_up_proj.numel() * bits
    for name, parts in (("gate_up", 2), ("down", 1)):
        stack, scale = getattr(stored, f"{name}_proj"), getattr(stored, f"{name}_scale")
        form = expert_format("test", name, stack, scale, parts)
        wide = torch.stack([dequantized_expert(w, s, form) for w, s in zip(stack, scale, strict=True)])
        was = getattr(plain, f"{name}_proj")
        assert 0 < (wide - was).norm() / was.norm() < (0.12 if bits == 4 else 0.03)
        was.copy_(wide)
    x = torch.randn(5, CONFIG.hidden_size)
    assert torch.equal(stored(x), plain(x))


@pytest.mark.parametrize("make", [quantize, store])
@pytest.mark.parametrize("kind", ["float8_dynamic", "float8_block_dynamic"])
def test_rows_of_experts_are_not_rounded(kind, make):
    """Their weights are stored as by the kind whose rows keep their values; other layers round theirs."""
    model, like = made(), with_stored_experts(made(), kind.removesuffix("_dynamic"))
    make(model, kind)
    for name in ("gate_up_proj", "gate_up_scale", "down_proj", "down_scale"):
        got, want = (getattr(only(m), name) for m in (model, like))
        assert got.dtype == want.dtype
        assert torch.equal(got.float(), want.float())
    layers = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and isinstance(m.weight.data, StoredTensor)]
    assert len(layers) > 4
    # 128 divides none of 64 and 192.
    groups = {w.inputs.group for w in layers if w.shape[1] % 128}
    assert groups == ({0} if kind == "float8_dynamic" else {64})
    assert all(w.inputs.float32_scales and w.inputs.kind == "float8" for w in layers)


def test_gate_and_up_projection_are_stored_apart():
    """Of 160 rows each: a block of 128 rows would be of both."""
    model = made()
    only(model).gate_up_proj[:, 160:] *= 100
    scale = only(with_stored_experts(model, "float8_block")).gate_up_scale
    assert scale.shape == (6, 4, 2)
    assert (scale[:, 2:] > 20 * scale[:, :2]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float8_block", "mxfp4", "int4"])
def test_text_of_a_quantized_mixture(kind):
    """Needs no torchao; plain and speculative."""
    target = made()
    draft = MTPDraft(replace(CONFIG, num_layers=1, mixture=replace(CONFIG.mixture, first_dense=0)), target).eval()
    limits = {"max_batch_size": 2, "max_seq_len": 64}
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    exact = Generator(target, None, **limits).generate(prompts, max_new_tokens=24)
    for model in (target, draft):
        assert quantize(model, kind) is model
    assert is_stored(only(target))
    assert is_stored(only(draft))
    plain = Generator(target, None, **limits).generate(prompts, max_new_tokens=24)
    fast = Generator(target, draft, **limits).generate(prompts, max_new_tokens=24)
    assert fast.tokens == plain.tokens
    assert plain.tokens != exact.tokens  # or nothing was quantized


def test_int4_loses_no_more_than_with_the_greatest_magnitude_as_its_range():
    weight = torch.randn(32, 384, generator=torch.Generator().manual_seed(0))
    weight[0, :128], weight[1, :128] = 0, 3.0
    made = int4_without_zeros(weight)
    assert (made.data_.dtype, made.scale.shape, made.zero) == (torch.uint8, (32, 3), None)
    groups = weight.unflatten(1, (3, 128))
    whole = groups.abs().amax(2, keepdim=True) / 7.5
    plain = (groups / torch.where(whole == 0, 1, whole)).round().clamp(-8, 7) * whole
    lost = [(w - weight).unflatten(1, (3, 128)).square().sum(2) for w in (made.dequantize(), plain.flatten(1))]
    assert (lost[0] <= lost[1] * 1.02).all()
    assert lost[0].sum() < 0.9 * lost[1].sum()
    assert not made.dequantize()[0, :128].any()
    assert [int4_without_zeros(weight[:, :k]).scale.shape[1] for k in (64, 192, 96)] == [1, 3, 3]


def test_what_stays():
    model = made()
    router, experts = only(model).router.weight.clone(), only(model).gate_up_proj.clone()
    quantize(model, "nvfp4")  # of which `moe_experts` has no format
    assert not is_stored(only(model))
    assert torch.equal(only(model).gate_up_proj, experts)
    assert type(only(model).router.weight.data) is torch.Tensor
    assert torch.equal(only(model).router.weight, router)
    assert type(only(model).shared.gate_up_proj.weight.data) is StoredTensor
    odd = made(replace(CONFIG, mixture=replace(CONFIG.mixture, intermediate_size=40)))
    for kind in FOUR:
        assert not is_stored(only(with_stored_experts(odd, kind)))  # no whole groups of 32
    assert is_stored(only(with_stored_experts(odd, "float8")))
    before = only(odd).gate_up_proj
    with_stored_experts(odd, "float8_block")
    assert only(odd).gate_up_proj is before


def test_what_needs_a_state_dict(tmp_path):
    model = with_stored_experts(made(), "mxfp4")
    message = "must have the weights that it had before `quantize`, got `layers.1.mlp.gate_up_proj` as torch.uint8"
    with pytest.raises(ValueError, match=f"shard: `model` {message}"):
        shard(model, TensorParallel(fake_group(2, 0)))
    with pytest.raises(ValueError, match=f"save_pair: `target` {message}"):
        save_pair(tmp_path, model, None, {})
    share = quantize(shard(made(), TensorParallel(fake_group(2, 0))), "float8_block")
    assert only(share).gate_up_proj.shape == (6, 160, 192)
    assert is_stored(only(share))


def test_a_change_of_dtype_is_noticed():
    """It would take the numbers for the weights, without their scales."""
    model = with_stored_experts(made(), "float8").bfloat16()
    with pytest.raises(ValueError, match="`gate_up_scale` must be None beside"):
        only(model)(torch.zeros(1, 192).bfloat16())


@pytest.mark.parametrize(("kind", "each"), [("float8_block", 1 + 4 / 128**2), ("mxfp4", 0.5 + 1 / 32)])
def test_floors_of_rounds(kind, each):
    """Of what a round of one token reads of its experts."""

    class Meta:
        target = SHAPES["gpt-oss-experts"].with_layers(1).build("meta", torch.bfloat16)[0]
        draft = None
        config = RoundCase("gpt-oss-experts", 1, (1024,)).config

    mixture = Meta.target.config.mixture
    numbers = 3 * mixture.num_experts * 2880**2
    before = floor_bytes(Meta, 1, 1024)[0]
    linears = sum(layer.weight.nbytes for layer in quantized.linear_layers(Meta.target))
    store(Meta.target, kind)
    stacks = [p for m in mixtures(Meta.target) for p in (m.gate_up_proj, m.down_proj, m.gate_up_scale, m.down_scale)]
    assert sum(stack.nbytes for stack in stacks) == pytest.approx(numbers * each, rel=0.01)
    touched = touched_experts(mixture, 1) / mixture.num_experts
    saved = (touched * numbers + linears / 2) * (2 - each)
    assert before - floor_bytes(Meta, 1, 1024)[0] == pytest.approx(saved, rel=0.01)
