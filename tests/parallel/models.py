"""Models small enough for four processes, and what one process decodes with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from spec_ops.decoding import PromptLookup, SamplingParams, SpeculationConfig
from spec_ops.models import CausalLM, Draft, Eagle3Draft, MixtureConfig, ModelConfig, MTPDraft, StandaloneDraft

# Not from another test's module, whose imports (Inductor's among them) every process would pay for.
VOCAB = 97
BATCH = [[1, 2, 3, 4, 5], [7], list(range(20, 41))]
SIZES: dict[str, dict[str, Any]] = {
    "gqa": {"num_kv_heads": 4},
    "one layer": {"num_kv_heads": 4, "num_layers": 1, "aux_layers": (0, 0, 0)},
    "shared KV head": {"num_kv_heads": 1},
    "sinks": {"attention_sinks": True, "sliding_window": 6},
    "mla": {},
    "mixture": {"mixture": MixtureConfig(4, 2, 24, 16, 1, biases=True)},
    "sigmoid mixture": {"mixture": MixtureConfig(4, 2, 24, scoring="sigmoid", correction_bias=True)},
}


@dataclass
class Job:
    """A model, what drafts for it, and how."""

    kind: str
    draft: str | None = "eagle3"
    divided: bool = True
    expert_parallel: bool = False
    config: SpeculationConfig = field(default_factory=lambda: SpeculationConfig(3))
    sampling: SamplingParams | None = None


TREE = SpeculationConfig(3, 4, 10)
SAMPLED = SamplingParams(0.9, top_k=40, top_p=0.95, seed=7)
JOBS = {
    "plain": Job("gqa", None),
    "chain": Job("gqa"),
    "tree": Job("gqa", config=TREE),
    "every norm": Job("gqa", "eagle3.1"),
    "whole draft": Job("gqa", divided=False),
    "whole draft, tree": Job("gqa", divided=False, config=TREE),
    "sampled chain": Job("gqa", sampling=SAMPLED),
    "sampled tree, whole draft": Job("gqa", divided=False, config=TREE, sampling=SAMPLED),
    "sampled plain": Job("gqa", None, sampling=SAMPLED),
    "penalties": Job("gqa", sampling=SamplingParams(repetition_penalty=1.3)),
    "lengths": Job("gqa", config=SpeculationConfig.auto()),
    "lengths, whole draft": Job("gqa", divided=False, config=SpeculationConfig.auto()),
    "lookup": Job("gqa", "lookup"),
    "shared KV head": Job("shared KV head"),
    "sinks": Job("sinks", "standalone"),
    "mla": Job("mla", "mtp"),
    "mla, tree, whole draft": Job("mla", "mtp", divided=False, config=TREE),
    "mixture": Job("mixture", "mtp"),
    "sigmoid mixture": Job("sigmoid mixture", "standalone", divided=False),
    "whole experts": Job("mixture", "mtp", expert_parallel=True),
    "whole experts, tree": Job("sigmoid mixture", "standalone", expert_parallel=True, config=TREE),
}
NEW_TOKENS = 8
# What is compiled: a layer less than the others.
COMPILED = Job("one layer", config=SpeculationConfig(1))
# With four ranks, what is different there: shares of a head, of a short vocabulary, and of an expert.
OF_FOUR = ("whole draft, tree", "sampled chain", "shared KV head", "mla", "mixture", "whole experts")


def model_config(mla: bool, num_layers: int, **sizes: Any) -> ModelConfig:
    common = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_layers": num_layers, "num_heads": 4}
    if mla:
        attention = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    else:
        attention = {"num_kv_heads": 2, "head_dim": 16}
    return ModelConfig(**{**common, **attention, **sizes})


def make_target(kind: str) -> CausalLM:
    torch.manual_seed(1)
    sizes = {"aux_layers": (0, 1, 1), **SIZES[kind]}
    model = CausalLM(model_config(kind == "mla", sizes.pop("num_layers", 2), **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # zeros would hide a bias that is added on every rank
                parameter.normal_(std=0.5)
    return model


def draft_config(job: Job, layers: int) -> ModelConfig:
    sizes = dict(SIZES[job.kind])
    for of_the_target in ("mixture", "num_layers", "aux_layers"):
        sizes.pop(of_the_target, None)
    return model_config(job.kind == "mla", layers, **sizes)


def make_draft(job: Job, target: CausalLM) -> Draft | PromptLookup | None:
    """On top of any target of the configuration: a whole one, or a share."""
    torch.manual_seed(2)
    if job.draft is None:
        return None
    if job.draft == "lookup":
        return PromptLookup(min_ngram=1)
    if job.draft == "eagle3":
        return Eagle3Draft(draft_config(job, 1), target, torch.randperm(VOCAB)[:41].sort().values)
    if job.draft == "eagle3.1":
        norms = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), True)
        return Eagle3Draft(draft_config(job, 1), target, None, **norms)
    if job.draft == "mtp":
        return MTPDraft(draft_config(job, 1), target)
    return StandaloneDraft(CausalLM(draft_config(job, 1)))
