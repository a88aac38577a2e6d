"""Modes of torch around a generator: inference mode, a default device, autocast."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from spec_ops.integrations.transformers import SpecCache, TransformersGenerator
from tests.helpers.tiny_transformers import batch, eager_tokens, make_model

NEW = {"max_new_tokens": 20, "eos_token_id": (), "return_dict_in_generate": True}


def make_generator() -> TransformersGenerator:
    return TransformersGenerator(make_model("llama"), make_model("llama", layers=1), max_seq_len=40, page_size=4)


@contextmanager
def default_device(device: str):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)  # a device, the CPU too, would leave a mode behind that Dynamo cannot trace


@pytest.mark.slow
@pytest.mark.parametrize("made", [nullcontext, torch.inference_mode], ids=["made outside", "made inside"])
def test_a_generator_serves_inside_and_outside_inference_mode(made):
    """Tensors made in inference mode cannot be written outside it."""
    ids, mask = batch()
    with made():
        generator = make_generator()
    for surrounding in (torch.inference_mode, nullcontext, torch.inference_mode):
        with surrounding():
            assert generator.generate(ids, mask, **NEW).tokens == eager_tokens("llama")


@pytest.mark.parametrize("made", [nullcontext, torch.inference_mode], ids=["made outside", "made inside"])
def test_a_cache_serves_inside_and_outside_inference_mode(made):
    ids, mask = batch()
    model = make_model("llama")
    with made():
        cache = SpecCache(model, 3, 40, page_size=4)
    for surrounding in (nullcontext, torch.inference_mode, nullcontext):
        cache.reset()
        with surrounding():
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=20, do_sample=False, eos_token_id=None
            )
        assert out[:, ids.shape[1] :].tolist() == eager_tokens("llama")


@pytest.mark.slow
def test_a_default_device_is_not_the_models():
    """ "meta" holds no values: whatever is put there by mistake fails."""
    ids, mask = batch()
    rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    models = [make_model("llama"), make_model("llama", layers=1)]
    with default_device("meta"):
        generator = TransformersGenerator(*models, max_seq_len=40, page_size=4)
        for prompts in ((ids, mask), (rows,), (ids.tolist(), mask.tolist())):
            out = generator.generate(*prompts, **NEW)
            assert out.tokens == eager_tokens("llama")
            assert out.sequences.device.type == "cpu"
        assert len(generator.generate(rows, do_sample=True, **NEW).tokens) == 3


def test_autocast_is_refused():
    generator, model = make_generator(), make_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match=r"^generate: autocast is enabled for cpu, .*`model.to\(dtype\)`"):
            generator.generate(*batch(), **NEW)
        with pytest.raises(RuntimeError, match=r"^TransformersGenerator: autocast is enabled for cpu"):
            TransformersGenerator(model)
        with pytest.raises(RuntimeError, match=r"^SpecCache: autocast is enabled for cpu"):
            SpecCache(model, 1, 8)
    assert generator.generate(*batch(), **NEW).tokens == eager_tokens("llama")
