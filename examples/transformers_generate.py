"""Hugging Face models decoded plainly on paged KV, then speculatively: in float32 the tokens are the same.

    python examples/transformers_generate.py                              # small random models, no download
    python examples/transformers_generate.py --model PATH --draft PATH    # local checkpoints; a draft or an EAGLE-3 head

Needs `pip install ".[transformers]"` in a checkout. See also `python -m spec_ops generate --model PATH --draft PATH`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import SpecCache, speculative_generate
from spec_ops.integrations.transformers.loading import load_checkpoints


def random_models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target of four layers, the last three of which change little, and a draft made of its first layer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "initializer_range": 0.2}
    target, draft = (LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=n)).eval() for n in (4, 1))
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.2
            layer.mlp.down_proj.weight *= 0.2
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in draft.state_dict()})
    return target, draft


def main(
    model: Annotated[Path | None, typer.Option(help="Folder of the target.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Folder of the draft.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    prompt: str = "def main():\n",
) -> None:
    if model is None:
        target, small = random_models()
        rows = [[5, 6, 7, 8, 9], [10, 11, 12]]
    else:
        adapter, small, tokenizer = load_checkpoints(model, draft, device="cpu", dtype=torch.float32)
        target, rows = adapter, [tokenizer.encode(prompt), tokenizer.encode("import os\n")]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])

    if model is None:  # plain decoding by transformers itself, on our paged cache and attention
        target.set_attn_implementation("spec_ops")
        cache = SpecCache(target, batch_size=2, max_seq_len=longest + new_tokens)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
        plain = target.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    else:
        plain = speculative_generate(target, None, ids, mask, max_new_tokens=new_tokens, eos_token_id=())

    for shape, config in {"chain": SpeculationConfig(3), "tree": SpeculationConfig(3, 4, 10)}.items():
        result = speculative_generate(
            target,
            small,
            ids,
            mask,
            config=config,
            max_new_tokens=new_tokens,
            eos_token_id=(),
            return_dict_in_generate=True,
        )
        assert torch.equal(result.sequences, plain), "speculation must not change greedy tokens"
        print(f"{shape}: the same tokens, {result.stats.accept_length:.2f} a round instead of 1")


if __name__ == "__main__":
    typer.run(main)
