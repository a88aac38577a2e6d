"""Prompt lookup by the arguments of `generate`: the text of transformers' own prompt lookup, and contradictions by name."""

from __future__ import annotations

import pytest
import torch

from spec_ops.decoding import PromptLookup, SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, speculative_generate
from tests.helpers.tiny_transformers import batch, eager_model, eager_tokens, make_model

NEW = {"max_new_tokens": 20, "eos_token_id": ()}
TEXT = torch.tensor([[7, 8, 9, 10, 11, 7, 8, 9, 12, 7, 8]])


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_text_equals_transformers_own_prompt_lookup(name):
    lookup = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
    theirs = eager_model(name).generate(TEXT, max_new_tokens=80, eos_token_id=None, **lookup)
    new = {"max_new_tokens": 80, "eos_token_id": (), "return_dict_in_generate": True}
    ours = speculative_generate(make_model(name), None, TEXT, **new, **lookup)
    assert torch.equal(ours.sequences, theirs)
    assert len(ours.stats.histogram) == 5
    assert ours.stats.accept_length > 1


@pytest.mark.parametrize(
    ("draft", "config", "settings", "steps"),
    [
        ("prompt-lookup", None, {}, 3),
        ("prompt-lookup", None, {"prompt_lookup_num_tokens": 2}, 2),
        ("prompt-lookup", SpeculationConfig(5), {"max_matching_ngram_size": 1}, 5),
        (PromptLookup(4), SpeculationConfig(2), {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 4}, 2),
        (None, SpeculationConfig(2), {"prompt_lookup_num_tokens": 2}, 2),
    ],
)
def test_ways_to_ask_for_it(draft, config, settings, steps):
    ids, mask = batch()
    result = speculative_generate(
        make_model("llama"), draft, ids, mask, config=config, return_dict_in_generate=True, **NEW, **settings
    )
    assert result.tokens == eager_tokens("llama")
    assert len(result.stats.histogram) == steps + 1
    assert result.stats.accept_length > 1


def test_a_generator_takes_the_settings_that_it_was_made_with():
    ids, mask = batch()
    with TransformersGenerator(
        make_model("llama"), "prompt-lookup", SpeculationConfig(4), max_batch_size=3, max_seq_len=40
    ) as generator:
        first = generator.generate(ids, mask, **NEW)
        assert torch.equal(generator.generate(ids, mask, prompt_lookup_num_tokens=4, **NEW), first)
        with pytest.raises(ValueError, match=r"`prompt_lookup_num_tokens` must be None, got 5: `config.num_steps` is 4"):
            generator.generate(ids, mask, prompt_lookup_num_tokens=5, **NEW)
        with pytest.raises(ValueError, match=r"`max_matching_ngram_size` must be None or 8, as .*, got 2"):
            generator.generate(ids, mask, prompt_lookup_num_tokens=4, max_matching_ngram_size=2, **NEW)
    with TransformersGenerator(make_model("llama"), max_batch_size=3, max_seq_len=40) as plain:
        with pytest.raises(ValueError, match="must be None, got 4: the generator was made with another `draft`"):
            plain.generate(ids, mask, prompt_lookup_num_tokens=4, **NEW)
        assert torch.equal(plain.generate(ids, mask, prompt_lookup_num_tokens=None, **NEW), first)


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ("lookup", {}, "`draft` must be a model, a PromptLookup, 'prompt-lookup' or None, got 'lookup'"),
        ("model", {"prompt_lookup_num_tokens": 4}, "`prompt_lookup_num_tokens` must be None, got 4: `draft` is a model"),
        (
            None,
            {"prompt_lookup_num_tokens": 4, "config": SpeculationConfig(3)},
            "`prompt_lookup_num_tokens` must be None, got 4: `config.num_steps` is 3",
        ),
        (None, {"prompt_lookup_num_tokens": 0}, r"`prompt_lookup_num_tokens` must be an int in \[1, 63\], got 0"),
        (None, {"prompt_lookup_num_tokens": 64}, r"`prompt_lookup_num_tokens` must be an int in \[1, 63\], got 64"),
        ("prompt-lookup", {"max_matching_ngram_size": 0}, r"`max_matching_ngram_size` must be an int in \[1, 64\], got 0"),
    ],
)
def test_contradictions_are_named(draft, options, message):
    model = make_model("llama", "eager")
    with pytest.raises(ValueError, match=message):
        speculative_generate(model, make_model("llama") if draft == "model" else draft, TEXT, **NEW, **options)
    assert model.config._attn_implementation == "eager"
