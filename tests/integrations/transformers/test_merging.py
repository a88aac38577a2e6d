"""Weights of linear layers that read one value: side by side while a model is taken over, and as they were afterwards."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, TransformersModel
from spec_ops.integrations.transformers.merging import MergedLinears
from spec_ops.models import quantize
from tests.helpers.tiny_transformers import CONFIGS, batch, eager_tokens, make_model

NEW = {"max_new_tokens": 20, "eos_token_id": (), "return_dict_in_generate": True}
SIZES = {"max_batch_size": 3, "max_seq_len": 40, "page_size": 4}
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
GATE_UP = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]


def weights(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    return [model.get_parameter(f"{name}.weight") for name in names]


def side_by_side(parameters: list[nn.Parameter]) -> bool:
    """Whether they follow one another in one storage."""
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    return (
        ends[:-1] == [p.data_ptr() for p in parameters[1:]] and len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(2, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "deepseek_v3"])
def test_tokens_are_those_of_generate(name, config):
    with TransformersGenerator(make_model(name), make_model(name, layers=1), config, **SIZES) as generator:
        assert not generator.target.apart
        assert generator.generate(*batch(), **NEW).tokens == eager_tokens(name)


def test_parameters_become_views_and_get_storages_of_their_own_back():
    model = make_model("llama")
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    first, second = TransformersModel(model), TransformersModel(model, (1,))
    for names in (QKV, GATE_UP):
        assert side_by_side(weights(model, names))
    assert list(model.state_dict()) == keys
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert p.requires_grad
        assert torch.equal(p, before[name][1])
    # No second copy, and one tensor for both.
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in [*first.parameters(), *second.parameters()]
    }
    assert sum(storages.values()) == sum(p.numel() * p.element_size() for p in model.parameters())
    first.close()
    assert side_by_side(weights(model, QKV))
    second.close()
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        assert torch.equal(p, before[name][1])
    assert (
        sum(p.numel() for p in first.decoder.layers[0].self_attn.parameters())
        == first.decoder.layers[0].self_attn.o_proj.weight.numel()
    )


def test_a_model_that_was_dropped_without_close_is_taken_over_again_without_a_copy():
    model = make_model("llama")
    TransformersModel(model)
    places = [p.data_ptr() for p in weights(model, QKV)]
    adapter = TransformersModel(model)
    assert [p.data_ptr() for p in weights(model, QKV)] == places
    adapter.close()
    assert not side_by_side(weights(model, QKV))


def new_values(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1)


def moved(model: nn.Module) -> None:
    """To another dtype and back: parameters get storages of their own."""
    model.double().float()
    new_values(model)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: -value for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [new_values, moved, loaded, assigned])
def test_changed_parameters_are_seen(change):
    model, (ids, mask) = make_model("llama", "sdpa"), batch()
    with TransformersGenerator(model, **SIZES) as generator:
        before = generator.generate(ids, mask, **NEW).tokens
        change(model)
        after = generator.generate(ids, mask, **NEW).tokens
        assert side_by_side(weights(model, QKV))
    want = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert after == want[:, ids.shape[1] :].tolist() != before


def test_replaced_layers_are_refused():
    model, (ids, mask) = make_model("llama"), batch()
    with TransformersGenerator(model, **SIZES) as generator:
        attention = model.model.layers[1].self_attn
        own = attention.k_proj
        attention.k_proj = nn.Linear(32, 32, bias=False)
        with pytest.raises(ValueError, match=r"`target` must keep its layers.*layers\.1\.self_attn\.k_proj was replaced"):
            generator.generate(ids, mask, **NEW)
        attention.k_proj = own
        own.weight = nn.Parameter(own.weight.detach().half())
        with pytest.raises(ValueError, match=r"parameters of .*q_proj.* were replaced: their weights differ in dtype"):
            generator.generate(ids, mask, **NEW)


@pytest.mark.parametrize("name", ["lm_head", "model"])
def test_replaced_parts_around_the_layers_are_refused(name):
    model, (ids, mask) = make_model("llama"), batch()
    with TransformersGenerator(model, **SIZES) as generator:
        before = generator.generate(ids, mask, **NEW).tokens
        own = getattr(model, name)
        setattr(model, name, getattr(make_model("llama", layers=1), name))
        with pytest.raises(ValueError, match=rf"`target` must keep its layers while it is taken over: {name} was replaced"):
            generator.generate(ids, mask, **NEW)
        setattr(model, name, own)
        assert generator.generate(ids, mask, **NEW).tokens == before


@pytest.mark.parametrize("layers", ["all", "one of its siblings"])
@pytest.mark.parametrize("kind", ["float8_dynamic", "int4", "float8"])
def test_layers_that_were_quantized_meanwhile_are_refused_and_closing_restores_the_others(kind, layers):
    if kind == "float8":
        pytest.importorskip("torchao")
    config, (ids, mask) = CONFIGS["llama"](), batch()
    config.hidden_size = 64  # a multiple of which `quantize` wants
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    generator = TransformersGenerator(model, **SIZES)
    quantize(model if layers == "all" else nn.ModuleDict({"q": model.get_submodule(QKV[0])}), kind)
    with pytest.raises(ValueError, match=r"parameters of .*q_proj.* were replaced: a weight is no plain tensor"):
        generator.generate(ids, mask, **NEW)
    generator.close()
    assert model.config._attn_implementation == "sdpa"
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor:
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    with TransformersGenerator(model, **SIZES) as generator:
        generator.generate(ids, mask, **NEW)


def test_other_sizes_and_biases_are_refused():
    """Rounds were made of the layers as they were: they would miss the bias, and read other rows."""
    model, (ids, mask) = make_model("llama"), batch()
    gate, up = (model.get_submodule(name) for name in GATE_UP)
    with TransformersGenerator(model, **SIZES) as generator:
        gate.bias, up.bias = nn.Parameter(torch.ones(48)), nn.Parameter(torch.ones(48))
        with pytest.raises(ValueError, match=r"gate_proj.*were replaced: they have a bias now"):
            generator.generate(ids, mask, **NEW)
        gate.bias = up.bias = None
        gate.weight, up.weight = nn.Parameter(torch.randn(40, 32)), nn.Parameter(torch.randn(56, 32))
        with pytest.raises(ValueError, match=r"gate_proj.*were replaced: a weight is \[40, 32\] now, it was \[48, 32\]"):
            generator.generate(ids, mask, **NEW)
    model = make_model("gpt_oss")
    with TransformersGenerator(model, **SIZES) as generator:
        for name in QKV:
            model.get_submodule(name).bias = None
        with pytest.raises(ValueError, match=r"q_proj.*were replaced: they have no bias any more"):
            generator.generate(ids, mask, **NEW)


def test_parameters_given_back_in_inference_mode_can_be_trained():
    model, (ids, mask) = make_model("llama", "sdpa"), batch()
    with torch.inference_mode(), TransformersGenerator(model, **SIZES) as generator:
        generator.generate(ids, mask, **NEW)
    assert not any(p.is_inference() for p in model.parameters())
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_closed_model_is_refused_although_another_is_open():
    model, (ids, mask) = make_model("llama"), batch()
    old = TransformersGenerator(model, **SIZES)
    old.close()
    with TransformersGenerator(model, **SIZES) as new:
        with pytest.raises(ValueError, match=r"was given back by `close\(\)`"):
            old.generate(ids, mask, **NEW)
        assert new.generate(ids, mask, **NEW).tokens == eager_tokens("llama")


def test_checkpoints_are_the_same_while_it_is_open(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "before")
    adapter = TransformersModel(model)
    model.save_pretrained(tmp_path / "open")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    adapter.close()
    want = load_file(tmp_path / "before" / "model.safetensors")
    for got in (load_file(tmp_path / "open" / "model.safetensors"), torch.load(tmp_path / "state.pt")):
        assert {name for name in got if name != "lm_head.weight"} == {name for name in want if name != "lm_head.weight"}
        assert all(torch.equal(got[name], want[name]) for name in want)


def tied(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = a.weight


def shared(a: nn.Linear, b: nn.Linear) -> None:
    """Views of one storage with another tensor between them."""
    whole = torch.randn(3, *a.weight.shape)
    a.weight.data, b.weight.data = whole[0], whole[2]


def hooked(a: nn.Linear, b: nn.Linear) -> None:
    b.register_forward_hook(lambda *_: None)


def patched(a: nn.Linear, b: nn.Linear) -> None:
    b.forward = b.forward


def biased(a: nn.Linear, b: nn.Linear) -> None:
    b.bias = nn.Parameter(torch.zeros(b.out_features))


def other_dtype(a: nn.Linear, b: nn.Linear) -> None:
    b.half()


def of_8_bits(a: nn.Linear, b: nn.Linear) -> None:
    for linear in (a, b):
        linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


def on_meta(a: nn.Linear, b: nn.Linear) -> None:
    a.to("meta")
    b.to("meta")


class Wrapped(torch.Tensor):
    """A tensor of another class, as of quantized and of distributed parameters."""


def wrapped(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(b.weight.detach().as_subclass(Wrapped))


def transposed(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = b.weight.data.t().contiguous().t()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (tied, "tied to another layer"),
        (shared, "a weight shares its storage"),
        (hooked, "has hooks or a `forward`"),
        (patched, "has hooks or a `forward`"),
        (biased, "one has a bias, another has none"),
        (other_dtype, "differ in dtype"),
        (of_8_bits, "a weight is float8_e4m3fn"),
        (on_meta, "device meta"),
        (wrapped, "no plain tensor"),
        (transposed, "not contiguous"),
    ],
)
def test_what_is_left_apart(change, reason):
    model = nn.Module()
    model.decoder = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    change(model.decoder.a, model.decoder.b)
    before = [p.data for p in model.parameters()]
    merged = MergedLinears(model, [("decoder.a", "decoder.b")], "decoder")
    assert set(merged.apart) == {"decoder.a", "decoder.b"}
    assert all(reason in text for text in merged.apart.values())
    assert merged.decoder is model.decoder
    assert all(p.data.is_set_to(b) for p, b in zip(model.parameters(), before, strict=True) if p.device.type != "meta")


def test_a_layer_with_hooks_keeps_its_weight_and_the_hook_runs():
    model, (ids, mask), calls = make_model("llama"), batch(), []
    model.get_submodule(QKV[1]).register_forward_hook(lambda *_: calls.append(1))
    with TransformersGenerator(model, **SIZES) as generator:
        assert set(generator.target.apart) == set(QKV)
        calls.clear()
        assert generator.generate(ids, mask, **NEW).tokens == eager_tokens("llama")
    assert calls
