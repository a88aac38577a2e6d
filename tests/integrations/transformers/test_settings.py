"""The table of `GenerationConfig`'s settings: none is missing, none is ignored where `generate` would not ignore it."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from spec_ops.integrations.transformers import settings as table
from spec_ops.integrations.transformers.settings import resolve_settings
from tests.helpers.tiny_transformers import VOCAB, batch, eager_model, make_model

PUBLIC = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
REFUSED = {**table.REFUSED, **table.REFUSED_IN_OUTPUT}
# What asks for each: a value that changes tokens, their distribution or what is returned.
ACTIVE = {
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": [object()],
    "force_words_ids": [[5]],
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "token_healing": True,
    "is_assistant": True,
    "assistant_early_exit": 2,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "use_mtp": True,
    "cache_implementation": "quantized",
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "output_logits"), True),
}
# What could seem to ask for something.
INERT = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "low_memory": True,
    "use_cache": False,
    "cache_config": {"max_cache_len": 64},
    "max_cache_len": 64,
    "prefill_chunk_size": 3,
    "disable_compile": True,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "renormalize_logits": True,
    "bos_token_id": 7,
    "decoder_start_token_id": 7,
    "transformers_version": "4.40.0",
}
BY_HAND = {"compile_config", "continuous_batching_config"}  # of the compiler and of another loop


def resolve(config: GenerationConfig | None = None, **overrides):
    return resolve_settings(config or GenerationConfig(), overrides, vocab_size=VOCAB)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_setting_of_generation_config_is_in_one_table(name):
    groups = (table.HONOURED, table.WITHOUT_EFFECT, table.REFUSED, table.REFUSED_IN_OUTPUT)
    assert sum(name in group for group in groups) == 1


def test_the_tables_here_are_complete():
    assert ACTIVE.keys() == REFUSED.keys()
    assert INERT.keys() == table.WITHOUT_EFFECT - BY_HAND


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_rounds_do_not_compute_is_refused_by_name(name):
    config = GenerationConfig(return_dict_in_generate=True, do_sample=True)
    setattr(config, name, ACTIVE[name])
    with pytest.raises(ValueError, match=rf"generate: `{name}` must be .*not supported, because"):
        resolve(config)
    for neutral in (None, *REFUSED[name][0]):  # as an argument it switches the checkpoint's setting off
        assert resolve(config, **{name: neutral}).sampling.temperature == 1
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        resolve(GenerationConfig(return_dict_in_generate=True, do_sample=True), **{name: ACTIVE[name]})


@pytest.mark.parametrize("name", table.REFUSED_IN_OUTPUT)
def test_outputs_mean_nothing_where_a_tensor_is_returned(name):
    assert not resolve(**{name: True}).return_dict


def test_what_has_no_effect_here_has_none_on_generate():
    ids, mask = batch()
    model = eager_model("llama")

    def tokens(**setting) -> torch.Tensor:
        return model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **setting)

    want, plain = tokens(), resolve()
    for name, value in INERT.items():
        assert resolve(**{name: value}) == plain, name
        assert torch.equal(tokens(**{name: value}), want), name


def test_a_setting_of_a_later_transformers_is_refused_unless_it_has_its_default(monkeypatch):
    init = GenerationConfig.__init__

    def later(self, **settings):
        init(self, **settings)
        self.surprise_penalty, self.calm = None, 3

    monkeypatch.setattr(GenerationConfig, "__init__", later)
    resolve()
    with pytest.raises(ValueError, match=r"`surprise_penalty` must be None, got 1.2: not supported, because this release"):
        resolve(surprise_penalty=1.2)
    config = GenerationConfig()
    config.calm = 4
    with pytest.raises(ValueError, match="`calm` must be 3, got 4"):
        resolve(config)
    resolve(config, calm=3)


def test_entries_that_transformers_does_not_know_are_ignored_as_generate_ignores_them():
    """Checkpoints have them: `chat_format`, `user_token_id`."""
    assert resolve(GenerationConfig(chat_format="chatml", user_token_id=195)) == resolve()


def test_arguments_come_before_the_models_settings_and_none_switches_off():
    config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.9, eos_token_id=[4, 5], max_time=3, stop_strings="x"
    )
    ours = resolve(config)
    assert (ours.sampling.temperature, ours.sampling.top_k, ours.sampling.top_p) == (0.6, 20, 0.9)
    assert (ours.stop_tokens, ours.max_time, ours.stop_strings) == ([4, 5], 3.0, ["x"])
    off = resolve(config, temperature=None, top_k=None, top_p=None, eos_token_id=None, max_time=None, stop_strings=None)
    assert (off.sampling.temperature, off.sampling.top_k, off.sampling.top_p) == (1.0, 0, 1.0)
    assert (off.stop_tokens, off.max_time, off.stop_strings) == ([], None, [])
    assert resolve(config, do_sample=None).sampling.temperature == 0
    assert resolve(config, eos_token_id=()).stop_tokens == []
    assert resolve(do_sample=True).sampling.top_k == 50


def test_the_models_configuration_is_not_changed():
    model = make_model("llama")
    before = model.generation_config.to_dict()
    resolve(model.generation_config, do_sample=True, temperature=0.5, max_new_tokens=[3, 4], eos_token_id=torch.tensor([4]))
    assert model.generation_config.to_dict() == before
