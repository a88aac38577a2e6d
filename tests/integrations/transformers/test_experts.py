"""`experts_implementation="spec_ops"`: mixtures give their own text, get their own experts back, and keep them where
`moe_experts` computes something else."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, TransformersModel, experts
from spec_ops.integrations.transformers.model import _check_experts
from spec_ops.integrations.transformers.probe import Argument
from tests.helpers.tiny_transformers import MIXTURES, batch, eager_tokens, make_model

NEW = {"max_new_tokens": 20, "eos_token_id": (), "return_dict_in_generate": True}
SIZES = {"max_batch_size": 3, "max_seq_len": 40, "page_size": 4}


class Calls(TorchDispatchMode):
    """Counts the calls of `moe_experts`, and keeps the size of the largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.spec_ops.moe_experts.default and args[0].shape[1] == 32  # the model's, not a probe's
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_text_is_that_of_generate(name):
    """Plain and speculative, on our op."""
    ids, mask = batch()
    target = make_model(name, "eager")
    own = target.config._experts_implementation
    for draft, config in ((None, None), (make_model(name, layers=1), SpeculationConfig(3))):
        with TransformersGenerator(target, draft, config, **SIZES) as generator:
            assert target.config._experts_implementation == "spec_ops" != own
            with Calls() as calls:
                result = generator.generate(ids, mask, **NEW)
            assert result.tokens == eager_tokens(name)
            assert calls.count >= 20
        assert target.config._experts_implementation == own
        assert draft is None or draft.config._experts_implementation == own
    assert result.stats.accept_length > 1.3


def test_no_weights_are_copied_in_a_prefill():
    """`batched_mm` makes one expert's weights for each token and each of its experts."""
    tokens = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    largest = {}
    for name in ("spec_ops", "batched_mm"):
        model = make_model("qwen3_moe", "eager")
        model.set_experts_implementation(name)
        with torch.no_grad(), Calls() as calls:
            model.model(tokens)
        largest[name] = calls.largest
    expert = model.model.layers[0].mlp.experts.gate_up_proj[0].numel()
    assert largest["batched_mm"] >= 60 * 3 * expert
    assert largest["spec_ops"] <= 60 * 60 * 4  # eager attention's scores


def test_two_generators_of_a_mixture():
    """The last one to be closed gives the experts back; the user's change in between does not stay."""
    ids, mask = batch()
    model = make_model("mixtral", "eager")
    model.set_experts_implementation("batched_mm")
    first = TransformersGenerator(model, **SIZES)
    model.set_experts_implementation("grouped_mm")
    second = TransformersGenerator(model, **SIZES)
    first.close()
    assert model.config._experts_implementation == "spec_ops"
    assert second.generate(ids, mask, **NEW).tokens == eager_tokens("mixtral")
    second.close()
    assert model.config._experts_implementation == "batched_mm"


def test_a_model_that_is_refused_gets_its_experts_back():
    model = make_model("mixtral", "eager")
    with pytest.raises(ValueError, match="`aux_layers`"):
        TransformersModel(model, aux_layers=(9,))
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("eager", "grouped_mm")


@pytest.fixture
def other_gate(monkeypatch):
    """Mixtral with an activation that clamps after it, as Step-3.7 does: no form of the op."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=0.2) * up

    monkeypatch.setattr(transformers.models.mixtral.modeling_mixtral.MixtralExperts, "_apply_gate", _apply_gate)


@pytest.mark.usefixtures("other_gate")
def test_experts_of_another_form_stay_the_models_own():
    ids, mask = batch()
    model = make_model("mixtral", "eager")
    with Calls() as calls:
        wanted = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
        with TransformersGenerator(model, **SIZES) as generator:
            assert model.config._experts_implementation == "grouped_mm"
            got = generator.generate(ids, mask, max_new_tokens=8, eos_token_id=())
    assert torch.equal(got, wanted)
    assert calls.count == 0
    model.set_experts_implementation("spec_ops")
    with pytest.raises(ValueError, match="MixtralExperts puts something between its products that `moe_experts` does not"):
        model(ids)


def test_what_is_refused_by_name():
    model = make_model("mixtral")
    module = model.model.layers[0].mlp.experts
    module.has_post_expert_norm = True
    with pytest.raises(ValueError, match="MixtralExperts norms what each expert gives"):
        experts.form_of(module)
    module = make_model("mixtral").double().model.layers[0].mlp.experts
    with pytest.raises(ValueError, match=r"MixtralExperts must have weights of float32.*, got Tensor of torch.float64"):
        experts.form_of(module)
    fresh = make_model("mixtral").model.layers[0].mlp.experts
    fresh.config._experts_implementation = "spec_ops"
    compiled = torch.compile(fresh, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="must run once before it is compiled"):
        compiled(torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))


FORMS = {
    "mixtral": experts.Form("silu", True, False, False, None, 1.0, 0.0),
    "gpt_oss": experts.Form("silu", True, True, True, 7.0, 1.702, 1.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_found(name):
    assert experts.form_of(make_model(name).model.layers[0].mlp.experts) == FORMS[name]


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations_are_found(activation):
    config = MIXTURES["qwen3_moe"]()
    config.hidden_act = activation
    module = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config)
    assert experts.form_of(module).activation == activation.replace("_pytorch", "")


def test_other_ranks_experts_are_left_out():
    """With expert parallelism their ids are `num_experts` and more."""
    module = make_model("mixtral").model.layers[0].mlp.experts
    g = torch.Generator().manual_seed(0)
    x, ids = torch.randn(5, 32, generator=g), torch.tensor([[0, 4], [4, 4], [2, 3], [5, 1], [1, 0]])
    weights = torch.rand(5, 2, generator=g)
    with torch.no_grad():
        wanted = experts.experts_forward(module, x, ids.clamp(max=3), weights.masked_fill(ids > 3, 0.0))
        module._is_expert_parallel = True
        got = experts.experts_forward(module, x, ids, weights)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_draft_of_the_dense_first_layers_needs_no_experts(monkeypatch):
    """A GPU refuses float32 experts of transformers' own; the first layer of DeepSeek-V3 has none."""
    draft = make_model("deepseek_v3", "eager", layers=1)
    monkeypatch.setattr(type(draft), "device", property(lambda _: torch.device("cuda")))
    assert draft.config._experts_implementation == "grouped_mm"
    _check_experts(draft, Argument("TransformersGenerator", "draft"))


@pytest.mark.usefixtures("other_gate")
def test_experts_that_sync_are_refused(monkeypatch):
    model = make_model("mixtral", "eager")
    monkeypatch.setattr(type(model), "device", property(lambda _: torch.device("cuda")))
    with pytest.raises(ValueError, match=r"must not have experts_implementation=.grouped_mm. in torch\.float32"):
        _check_experts(model, Argument("TransformersModel", "model"))
