"""`invariant=True` with models of transformers: in bfloat16 too, drafts do not change the text."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, speculative_generate

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
def test_drafts_do_not_change_the_text(family):
    config, model = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    sizes = SIZES | (EXPERTS if family.endswith("Moe") else {})
    target, draft = (model(config(num_hidden_layers=layers, **sizes)).to(torch.bfloat16).eval() for layers in (2, 1))
    ids, settings = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), {"max_new_tokens": 16, "do_sample": False}
    with TransformersGenerator(target, invariant=True, max_seq_len=32) as generator:
        want = generator.generate(ids, **settings)
    assert torch.equal(speculative_generate(target, draft, ids, invariant=True, **settings), want)
    alone = speculative_generate(target, draft, ids[1:], config=SpeculationConfig(2), invariant=True, **settings)
    assert torch.equal(alone, want[1:])
