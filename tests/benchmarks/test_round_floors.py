"""The least that a round of `python -m benchmarks round` reads, against figures by hand, and the shapes of its models."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from benchmarks.round.measure import RoundCase, floor_bytes
from benchmarks.round.shapes import GPT_OSS, LLAMA_8B, LLAMA_70B, MLA_STACK, SHAPES, touched_experts
from benchmarks.round.stored import store


@pytest.mark.slow
def test_floors_of_weights_of_fewer_bits():
    """Of Llama-3.1-8B in GB, by hand: 0.2181e9 weights a layer, here of two, its head of 0.5253e9, and a draft of 0.425e9 three
    times; scales of 4 bytes for a row, for 128 x 128 and, with a zero point, for 128; of one byte for 16 and for 32."""
    numbers = 2 * 0.2181 + 0.5253 + 3 * 0.425
    bytes_each = {"float8": 1 + 4 / 4096, "float8_block": 1 + 4 / 128**2, "int4": 0.5 + 4 / 128}
    for weights, each in (bytes_each | {"nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}).items():

        class Meta:
            target, draft = SHAPES["llama-8b"].with_layers(2).build("meta", torch.bfloat16)
            config = RoundCase("llama-8b", 1, (1024,)).config

        store(Meta.target, weights)
        store(Meta.draft, weights)
        assert floor_bytes(Meta, 1, 1024)[0] / 1e9 == pytest.approx(numbers * each, rel=0.002)


@pytest.mark.slow
def test_floors_of_stored_experts():
    """By hand, in GB, for the 4 and 32 tokens that a round verifies of 1 and 8 requests. gpt-oss as published, a layer of two:
    53.1e6 bytes of attention in 16 bits, and of experts with 24.88e6 weights each those that are touched; a head of 1.158 and a
    draft of 0.366 three times. DeepSeek-V3 in blocks of fp8, a layer of one: 187.1e6 weights of attention, 44.0e6 of the shared
    expert, 44.04e6 for each that is touched, a router of 3.7e6 bytes; a head of 0.9267. Its draft, of such a layer and 102.8e6
    weights more, reads 8 experts a request and the same head, three times."""

    @functools.cache
    def made(model: str, weights: str, layers: int) -> tuple[nn.Module, nn.Module]:
        target, draft = SHAPES[model].with_layers(layers).build("meta", torch.bfloat16)
        store(target, weights)
        store(draft, weights)
        assert target.layers[0].mlp.down_proj.element_size() == 1
        return target, draft

    def gigabytes(model: str, weights: str, layers: int, batch_size: int) -> float:
        class Meta:
            target, draft = made(model, weights, layers)
            config = RoundCase(model, batch_size, (1024,)).config

        return floor_bytes(Meta, batch_size, 1024)[0] / 1e9

    for batch_size in (1, 8):
        verified = touched_experts(SHAPES["gpt-oss-experts"].target.mixture, 4 * batch_size)
        assert verified == pytest.approx({1: 13.24, 8: 31.55}[batch_size], abs=0.01)
        layer = 0.0531 + verified * 0.02488 * (0.5 + 1 / 32)
        assert gigabytes("gpt-oss-experts", "mxfp4_experts", 2, batch_size) == pytest.approx(
            2 * layer + 1.158 + 3 * 0.366, rel=0.01
        )
        mixture = SHAPES["mla-experts"].target.mixture
        target, draft = (0.1871 + 0.0440 + 0.0037 + touched_experts(mixture, n) * 0.04404 for n in (4 * batch_size, batch_size))
        found = gigabytes("mla-experts", "float8_block", 1, batch_size)
        assert found == pytest.approx(target + 0.9267 + 3 * (draft + 0.1028 + 0.9267), rel=0.01)


def test_floors_against_the_figures_of_the_models():
    """By hand: GB of weights per round, KB of KV per token, windows of 128 in every second layer of gpt-oss."""

    def floors(model: str, context: int) -> tuple[float, float]:
        class Meta:
            """What `floor_bytes` reads of a generator."""

            target, draft = SHAPES[model].with_layers(None).build("meta", torch.bfloat16)
            config = RoundCase(model, 1, (context,)).config

        weights, kv = floor_bytes(Meta, 1, context)
        return weights / 1e9, kv

    # 8.03e9 parameters without the 0.53e9 of the embedding; a head of 0.43e9, three times.
    assert floors("llama-8b", 1024)[0] == pytest.approx(2 * (7.505 + 3 * 0.425), rel=0.01)
    assert floors("llama-8b", 1024)[1] == 1024 * 2 * 8 * 128 * 2 * (32 + 3)
    weights, kv = floors("mla-stack", 1024)
    assert weights == pytest.approx(16.2, rel=0.01)  # 3.8 ms at 4.3 TB/s
    assert kv == 1024 * 576 * 2 * (4 + 3)
    assert floors("gpt-oss", 32768)[1] == 2 * 8 * 64 * 2 * (12 * 128 + 12 * 32768 + 3 * 32768)
    assert floors("gpt-oss", 64)[1] == 2 * 8 * 64 * 2 * 64 * (24 + 3)


def test_floors_of_mixtures():
    """By hand: a token of Qwen3-30B-A3B reads 3.35e9 parameters with both embeddings of 0.31e9, one of gpt-oss-20b 3.6e9 with
    the LM head alone."""
    mixture = SHAPES["qwen3-30b-a3b"].target.mixture
    assert touched_experts(mixture, 1) == pytest.approx(8)
    assert touched_experts(mixture, 32) == pytest.approx(128 * (1 - (15 / 16) ** 32))

    def floor(model: str, batch_size: int, round: str) -> float:
        case = RoundCase(model, batch_size, (1024,), round=round)

        class Meta:
            target, built = case.shape.build("meta", torch.bfloat16)
            draft = None if round == "plain" else built
            config = case.config

        return floor_bytes(Meta, batch_size, 1024)[0] / 1e9

    assert floor("qwen3-30b-a3b", 1, "plain") == pytest.approx(2 * (3.35 - 0.31), rel=0.02)
    assert floor("qwen3-30b-a3b", 1000, "plain") == pytest.approx(2 * (30.5 - 0.31), rel=0.02)
    assert floor("gpt-oss-experts", 1, "plain") == pytest.approx(2 * 3.6, rel=0.02)
    # Of DeepSeek-V3's layers 4 drafted tokens go to 4 x 8 experts but for those that meet, the draft's one to 8. The rest in
    # GB: LM head four times 7.4, attention of 7 layers 2.6, shared experts 0.6, the draft's inputs 0.6.
    layers = 4 * touched_experts(SHAPES["mla-experts"].target.mixture, 4) + 3 * 8
    assert floor("mla-experts", 1, "speculative") == pytest.approx(2 * layers * 3 * 7168 * 2048 / 1e9 + 11.2, rel=0.03)


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_70B, MLA_STACK, GPT_OSS], ids=lambda shape: shape.label)
def test_shapes_scale_in_layers(shape):
    for layers in (1, 3, None):
        scaled = shape.with_layers(layers)
        target, draft = scaled.build("meta", torch.bfloat16)
        assert target.config.num_layers == (layers or shape.target.num_layers)
        assert len(target.config.aux_layers) == (0 if shape.draft == "nextn" else 3)
        assert draft.config.num_layers == 1
        assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}


def test_memory_of_the_largest_case_that_should_fit():
    """Weights of 16.9 GB, and 32 x 24576 tokens of 132 KiB, and some: on a device of 139 GiB."""
    need = RoundCase("llama-8b", 32, (1024, 24576)).memory_bytes()
    assert 16.9e9 + 32 * 24576 * (32 + 1) * 4096 < need < 0.95 * 139 * 2**30
    assert RoundCase("llama-8b", 32, (32768,)).memory_bytes() > 0.95 * 139 * 2**30
