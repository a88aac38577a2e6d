"""RoPE of transformers' models in the launch that appends: tokens stay equal, and a layer launches what our own class launches.

Launches are those of generated CUDA code, which needs no GPU. Heads are as in the 8B models, so that attention, RoPE and
appends are what they are there. The widths are small: which products `skinny_mm` computes depends on their sizes alone
(`tests/passes/test_lower_skinny_mm.py`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import spec_ops.passes
import spec_ops.passes.fuse_router
from benchmarks.round.shapes import SHAPES, Shape
from benchmarks.round.through_transformers import build_model, taken_over
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator
from tests.helpers.inductor_cuda import generate_round, launches
from tests.helpers.pass_harness import compile_interpreted
from tests.helpers.tiny_transformers import batch, eager_tokens, make_model

LAYERS = 3
# Layers of the tiny models whose RoPE goes into the append; 0: Gemma-3 computes the weights of its norms of heads. And those
# whose router is fused.
FUSED = {"llama": 2, "qwen3": 2, "gemma3": 0, "gpt_oss": 2}
ROUTERS = {"gpt_oss": 2, "qwen3_moe": 2, "glm4_moe": 1}


def shape(name: str) -> Shape:
    whole = SHAPES[name].with_layers(LAYERS)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    return replace(whole, target=replace(whole.target, **sizes), draft_vocab=256)


def round_launches(name: str, path: str, steps: int, batch_size: int = 1) -> list[str]:
    """What a round launches, generated kernels by no number: those of equal layers may differ in how often they are used.
    `steps` of the draft; 0 for plain decoding."""
    torch.manual_seed(0)
    sizes = shape(name)
    if path == "own":
        target, draft = sizes.build("cpu", torch.bfloat16)
    else:
        target, draft = taken_over(build_model(sizes, "cpu", torch.bfloat16), sizes)
    generator = Generator(
        target, draft if steps else None, SpeculationConfig(max(steps, 1)), compile=False, max_batch_size=batch_size,
        max_seq_len=256, page_size=64, prefill_backend="reference",
    )  # fmt: skip
    found = launches(generate_round(generator.round(batch_size)).code)
    return ["kernel" if launch.startswith("kernel_") else launch for launch in found]


def layers(found: list[str], attention: str) -> list[list[str]]:
    """The launches of each layer that attends with `attention`: from its RoPE to the next layer's."""
    starts = [place for place, launch in enumerate(found) if launch == "rope_append_kv"]
    pieces = [found[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return [piece for piece in pieces if attention in piece]


# Append with RoPE, attention, output product, norm, gate and up, SiLU, down, norm, the next layer's product.
LAYER = ["rope_append_kv", "", "mm", "kernel", "mm", "kernel", "mm", "kernel", "mm"]


def layer(attention: str) -> list[str]:
    return [launch or attention for launch in LAYER]


@pytest.fixture(scope="module")
def own() -> list[str]:
    return round_launches("llama-8b", "own", 0)


@pytest.mark.slow
def test_our_own_class(own):
    assert layers(own, "mha_draft_decode")[1:-1] == [layer("mha_draft_decode")] * (LAYERS - 2)


@pytest.mark.slow
def test_plain_decoding_through_transformers(own):
    """Qwen3, whose heads have norms; the next test is of Llama."""
    found = round_launches("qwen3-8b", "transformers", 0)
    assert layers(found, "mha_draft_decode")[1:-1] == [layer("mha_draft_decode")] * (LAYERS - 2)
    assert len(found) <= len(own)


@pytest.mark.slow
def test_a_round_with_a_draft():
    """Through transformers; drafts are a head of ours in either case."""
    found = round_launches("llama-8b", "transformers", 1, batch_size=2)
    assert layers(found, "mha_target_verify")[1:-1] == [layer("mha_target_verify")] * (LAYERS - 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", {**FUSED, **ROUTERS})
def test_tokens_stay_those_of_generate(monkeypatch, name):
    """In float32 by the graph that the passes make, run node by node, and how often passes found something. As on a GPU, where
    routers are one launch; the op's reference computes it. One graph, though transformers counts the models that are made."""
    monkeypatch.setattr(spec_ops.passes.fuse_router, "device_arch", lambda device: 90)
    reports: list = []

    def compiled(module, **_options):
        fn, found = compile_interpreted(module)
        reports.append(found)
        return fn

    monkeypatch.setattr(spec_ops.passes, "compile", compiled)
    ids, mask = batch()
    with TransformersGenerator(make_model(name, layers=2), compile=True, max_seq_len=40, page_size=4) as generator:
        assert generator.generate(ids[:, 2:], mask[:, 2:], max_new_tokens=2, eos_token_id=()).shape == (3, 9)
        other = make_model("qwen3" if name == "llama" else "llama")
        tokens = generator.generate(ids, mask, max_new_tokens=20, eos_token_id=(), return_dict_in_generate=True).tokens
    assert tokens == eager_tokens(name, layers=2), other
    ((report,),) = reports
    for pass_name, matches in (("fuse_rope_append", FUSED), ("fuse_router", ROUTERS)):
        (result,) = (result for result in report.results if result.name == pass_name)
        assert result.matches == matches.get(name, result.matches), [note.text for note in result.refused]
