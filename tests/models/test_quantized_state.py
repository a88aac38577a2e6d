"""State dicts of quantized models: of what is stored, for models that are quantized alike."""

from __future__ import annotations

import enum
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_ops.models import CausalLM, Eagle3Draft, MixtureConfig, ModelConfig, quantize
from spec_ops.models.quantized import KINDS
from spec_ops.models.stored_tensor import StoredTensor

CONFIG = ModelConfig(
    vocab_size=70, hidden_size=128, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    aux_layers=(0, 1), mixture=MixtureConfig(num_experts=4, experts_per_token=2, intermediate_size=64, first_dense=1),
)  # fmt: skip


class Answer(enum.Enum):
    YES = 1


OF_TORCHAO = ("float8", "float8_tensor", "int8")


def made(kind: str | None = None) -> CausalLM:
    model = CausalLM(CONFIG).requires_grad_(False)
    return model if kind is None else quantize(model, kind)


def products(model: CausalLM) -> list[torch.Tensor]:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    return [model.layers[0].attention.qkv_proj(x), model.layers[0].mlp(x), model.layers[1].mlp(x), model.lm_head(x)]


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """By way of a file, which `torch.load` reads without running what is in it.

    Not where Python pickles the enums of torchao's tensors by `getattr` (3.11.0 to 3.11.3), which `torch.load` refuses to run.
    """
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    by_name = Answer.YES.__reduce_ex__(2)[0] is getattr
    return torch.load(file, weights_only=not by_name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_comes_back(kind):
    """Copied to where compiled rounds read it."""
    if kind in OF_TORCHAO:
        pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, copied, read = (made(kind) for _ in range(3))
    expected = products(model)
    assert not torch.equal(products(copied)[3], expected[3])
    weights = list(copied.parameters())
    numbers = [w.data_.data_ptr() for w in weights if isinstance(w.data, StoredTensor)]
    assert copied.load_state_dict(model.state_dict()).missing_keys == []
    read.load_state_dict(saved(model.state_dict()))
    for other in (copied, read):
        assert all(torch.equal(a, b) for a, b in zip(products(other), expected, strict=True))
    assert all(a is b for a, b in zip(weights, copied.parameters(), strict=True))
    assert numbers == [w.data_.data_ptr() for w in weights if isinstance(w.data, StoredTensor)]
    assert bool(numbers) == (kind not in OF_TORCHAO)


@pytest.mark.parametrize("kind", ["int4", "nvfp4", "float8_dynamic"])
def test_assigned_to_a_model_of_16_bits(kind):
    dense = replace(CONFIG, mixture=None)
    model, other = quantize(CausalLM(dense), kind), CausalLM(dense)
    other.load_state_dict(model.state_dict(), assign=True)
    assert all(torch.equal(a, b) for a, b in zip(products(other), products(model), strict=True))


OURS = [kind for kind in KINDS if kind not in OF_TORCHAO]


@pytest.mark.parametrize("kind", OURS)
def test_under_inference_mode(kind):
    """Of tensors that were made outside, and inside."""
    model, other = made(kind), made(kind)
    with torch.inference_mode():
        other.load_state_dict(model.state_dict())
        inside = made(kind)
        inside.load_state_dict(model.state_dict())
    for loaded, is_inference in ((other, False), (inside, True)):
        weight = loaded.lm_head.weight
        assert weight.is_inference() == weight.detach().is_inference() == is_inference
    outside = made(kind)
    outside.load_state_dict(inside.state_dict())
    for loaded in (other, inside, outside):
        assert all(torch.equal(a, b) for a, b in zip(products(loaded), products(model), strict=True))


@pytest.mark.parametrize("kind", OURS)
def test_into_memory_that_is_empty(kind):
    model, other = made(kind), made(kind).to("meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(products(other), products(model), strict=True))


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_memory_that_processes_share(kind):
    model = made(kind)
    expected = products(model)
    assert model.share_memory() is model
    weight = model.lm_head.weight
    assert all(getattr(weight, name).is_shared() for name in weight.__tensor_flatten__()[0])
    assert all(torch.equal(a, b) for a, b in zip(products(model), expected, strict=True))


def test_names():
    """Layers that are joined have the names of checkpoints as long as they are not stored."""
    plain, stored = (set(made(kind).state_dict()) for kind in (None, "nvfp4"))  # which has no experts
    joined = {f"layers.{i}.attention.qkv_proj.weight" for i in range(2)} | {"layers.0.mlp.gate_up_proj.weight"}
    assert stored - plain == joined
    assert plain - stored == {
        *(f"layers.{i}.attention.{name}_proj.weight" for i in range(2) for name in "qkv"),
        *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")),
    }
    target = CausalLM(replace(CONFIG, mixture=None))
    draft = quantize(Eagle3Draft(replace(CONFIG, mixture=None, num_layers=1, aux_layers=()), target, None), "int4")
    (packed,) = (value for name, value in draft.own_state_dict().items() if name.endswith("qkv_proj.weight"))
    assert type(packed) is StoredTensor


@pytest.mark.parametrize(
    ("given", "wanted", "told"),
    [
        (
            "nvfp4",
            None,
            r"got StoredTensor\(\[128, 128\], .*nvfp4.* for one of torch.float32; before `load_state_dict`",
        ),
        (None, "nvfp4", r"got one of torch.float32 for StoredTensor\(\[128, 128\], .*nvfp4"),
        ("float8_block", "int4", "must be of a weight that is stored alike, got StoredTensor"),
        ("float8_block_dynamic", "float8_block", "must be of a weight that is stored alike, got StoredTensor"),
    ],
)
def test_another_format_is_refused(given, wanted, told):
    dense = replace(CONFIG, mixture=None)
    model, other = (CausalLM(dense) if kind is None else quantize(CausalLM(dense), kind) for kind in (given, wanted))
    with pytest.raises(RuntimeError, match=told) as error:
        other.load_state_dict(model.state_dict())
    assert '"layers.0.attention.o_proj.weight"' in str(error.value)
