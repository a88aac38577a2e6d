"""What the ranks of `test_sharing.py` do with models that transformers has divided among them."""

from __future__ import annotations

import tempfile
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from spec_ops.decoding import SamplingParams, SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, TransformersModel
from spec_ops.parallel import TensorParallel
from tests.helpers.tiny_transformers import make_model

FAMILIES = ("llama", "qwen3")
BATCH = [[3, 4, 5, 6, 7], [9], list(range(20, 41))]
SAMPLED = SamplingParams(0.9, top_k=40, top_p=0.95, seed=7)
JOBS: dict[str, tuple[bool, SpeculationConfig | None, SamplingParams | None]] = {
    "plain": (False, None, None),
    "chain": (True, SpeculationConfig(3), None),
    "tree": (True, SpeculationConfig(3, 4, 10), None),
    "sampled chain": (True, SpeculationConfig(3), SAMPLED),
}


def decoded(target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, list[list[int]]]:
    found = {}
    for name, (drafts, config, sampling) in JOBS.items():
        with TransformersGenerator(target, draft if drafts else None, config, compile=False, max_seq_len=64) as made:
            found[name] = made.generator.generate(BATCH, max_new_tokens=12, sampling=sampling).tokens
    return found


def divided(model: PreTrainedModel, ranks: TensorParallel) -> PreTrainedModel:
    """As a user reads it. In a world transformers writes files on rank 0 only."""
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plan = DistributedConfig(tp_size=ranks.size)
        read = AutoModelForCausalLM.from_pretrained(ranks.first(folder), distributed_config=plan)
        ranks.first(None)  # all have read it
    return read.eval()


def case_tokens(ranks: TensorParallel) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family in FAMILIES:
        whole = make_model(family, "eager")
        found[family] = decoded(divided(whole, ranks), make_model(family, "eager", 2))
    return found


def case_both_divided(ranks: TensorParallel) -> dict[str, Any]:
    whole = make_model("llama", "eager")
    return {"tokens": decoded(divided(whole, ranks), divided(make_model("llama", "eager", 2), ranks))}


def case_ranks(ranks: TensorParallel) -> dict[str, Any]:
    """They are found, once for a group; of a whole model there are none."""
    whole = make_model("llama", "eager")
    model = divided(whole, ranks)
    first, second, alone = TransformersModel(model), TransformersModel(model), TransformersModel(whole)
    heads = [rows[0][0] for rows in first.spec.kv_rows]
    return {
        "size": first.ranks.size, "same": first.ranks is second.ranks, "whole": alone.ranks is None, "kv_heads": heads,
        "name": first.ranks.name == ranks.name,
    }  # fmt: skip
