"""What is decoded: the shipped pair, and random models of transformers with many near ties."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spec_ops.decoding import PromptLookup
from spec_ops.models.config import ModelConfig
from spec_ops.models.corpus import held_out_prompts
from spec_ops.models.drafts import Draft, Eagle3Draft, StandaloneDraft
from spec_ops.models.pretrained import load_pair
from spec_ops.models.target import CausalLM, Target

LAYERS, SMALL_LAYERS = 8, 2
NEAR = 2**-8  # about the rounding of bfloat16: by how much the two rows of a near tie differ
LATER = 0.1  # what layers add to the hidden state where the small draft has none
# Sizes of Llama-3.2-1B and Qwen3-0.6B, with a smaller vocabulary; and of what a CPU can compute.
SIZES: dict[str, dict[str, int]] = {
    "llama": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64,
        "vocab_size": 32_000,
    },
    "qwen3": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
        "vocab_size": 32_000,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 96,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Models:
    """A target, what drafts for it by the names of `DRAFTS`, and prompts.

    `close` gives models of transformers their own attention back.
    """

    target: Target
    drafts: dict[str, Draft | PromptLookup]
    prompts: list[list[int]]
    close: Callable[[], None] = lambda: None


DRAFTS = ("EAGLE-3", "standalone", "lookup")


def pair(place: torch.device, count: int, longest: int) -> Models:
    """The shipped pair on held-out text. Its standalone draft is the target without its last layers."""
    target, head, tokenizer = load_pair(device=place, dtype=torch.bfloat16)
    layers = max(1, target.config.num_layers // 2)
    small = CausalLM(dataclasses.replace(target.config, num_layers=layers, aux_layers=())).to(place, torch.bfloat16)
    small.load_state_dict({name: weight for name, weight in target.state_dict().items() if name in small.state_dict()})
    # Some more than asked for: Python without its tests has room for about 1000 of 48 tokens.
    prompts = _that_begin_differently(held_out_prompts(tokenizer, count + count // 8, longest), count)
    return Models(target, _drafts(head, small), _of_several_lengths(prompts))


def of_transformers(family: str, place: torch.device, count: int, longest: int) -> Models:
    """Random weights. A quarter of the vocabulary are pairs of tokens whose rows of the LM head differ by `NEAR`, so that
    rounding decides between the two. The standalone draft is the target's first layers; the others add little, so that it often
    agrees."""
    import transformers

    from spec_ops.integrations.transformers import TransformersModel

    sizes = SIZES[family if place.type == "cuda" else "tiny"]
    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    kind = {"llama": "Llama", "qwen3": "Qwen3"}[family]

    def model(layers: int) -> Any:
        config = getattr(transformers, f"{kind}Config")(
            **{names.get(name, name): size for name, size in sizes.items()}, num_hidden_layers=layers,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        with place:
            return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()

    whole, first = model(LAYERS), model(SMALL_LAYERS)
    with torch.no_grad():
        head = whole.lm_head.weight
        eighth = len(head) // 8
        head[eighth : 2 * eighth] = head[:eighth] * (1 + NEAR * torch.randn_like(head[:eighth]))
        for layer in whole.model.layers[SMALL_LAYERS:]:
            layer.self_attn.o_proj.weight *= LATER
            layer.mlp.down_proj.weight *= LATER
        first.load_state_dict({name: weight for name, weight in whole.state_dict().items() if name in first.state_dict()})
    target = TransformersModel(whole, (0, LAYERS // 2, LAYERS - 1))
    torch.manual_seed(1)
    with place, torch.no_grad():
        eagle = Eagle3Draft(ModelConfig(num_layers=1, **sizes), target, None).to(torch.bfloat16)
    drawn = torch.randint(sizes["vocab_size"], (count, longest), generator=torch.Generator().manual_seed(2))
    small = TransformersModel(first)

    def close() -> None:
        target.close()
        small.close()

    return Models(target, _drafts(eagle, small), _of_several_lengths(drawn.tolist()), close)


MODELS: dict[str, Callable[[torch.device, int, int], Models]] = {
    "pair": pair,
    "llama": lambda *args: of_transformers("llama", *args),
    "qwen3": lambda *args: of_transformers("qwen3", *args),
}


def _drafts(eagle: Eagle3Draft, small: Target) -> dict[str, Draft | PromptLookup]:
    return {"EAGLE-3": eagle, "standalone": StandaloneDraft(small), "lookup": PromptLookup()}


def _that_begin_differently(prompts: list[list[int]], count: int) -> list[list[int]]:
    """The first `count` that differ in the part that `_of_several_lengths` leaves of all: files repeat themselves."""
    shortest = _shortest(len(prompts[0]))
    found = list({tuple(prompt[:shortest]): prompt for prompt in reversed(prompts)}.values())[::-1]
    if len(found) < count:
        raise ValueError(f"--prompts must be at most {len(found)} with prompts of {len(prompts[0])} tokens, got {count}")
    return found[:count]


def _shortest(longest: int) -> int:
    return max(1, 2 * longest // 3)


def _of_several_lengths(prompts: list[list[int]]) -> list[list[int]]:
    """Cut to two thirds of their length and up."""
    longest = len(prompts[0])
    shortest = _shortest(longest)
    return [prompt[: shortest + 5 * i % (longest - shortest + 1)] for i, prompt in enumerate(prompts)]
