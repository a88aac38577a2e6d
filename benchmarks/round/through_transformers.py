"""The same round of a target of transformers: random weights of the same sizes, and the same head of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.round.shapes import Shape
from spec_ops.models import Draft, Eagle3Draft
from spec_ops.parallel import TensorParallel, shard

EMBEDDING = "model.embed_tokens"

if TYPE_CHECKING:
    from spec_ops.integrations.transformers import TransformersModel


def build_model(shape: Shape, device: torch.device | str, dtype: torch.dtype, ranks: TensorParallel | None = None) -> Any:
    """A causal language model of transformers with fresh weights; with `ranks`, divided among them by transformers.

    Raises:
        ValueError: the target of `shape` is a mixture.
    """
    from transformers import AutoModelForCausalLM

    from benchmarks.round.assisted import transformers_config

    config = transformers_config(shape.target, shape.family)
    if ranks is None:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    # A checkpoint without tensors: every rank draws its own parts.
    options: dict[str, Any] = {"config": config, "state_dict": {}, "dtype": dtype}
    try:
        model = kind.from_pretrained(None, distributed_config=_plan(ranks.size, {EMBEDDING: "replicate"}), **options)
    except ValueError as error:
        if "replicate" not in str(error):
            raise
        # transformers 5.17 has no such style: a rank holds some tokens of the embedding, which is one sum more.
        model = kind.from_pretrained(None, distributed_config=_plan(ranks.size), **options)
    return model.eval()


def _plan(ranks: int, styles: dict[str, str] | None = None) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_size=ranks) if styles is None else DistributedConfig(tp_size=ranks, tp_plan=styles)


def taken_over(model: Any, shape: Shape) -> tuple[TransformersModel, Draft]:
    """`model` as the target of rounds, and its draft: as `load_eagle3` gives them, but with fresh weights. Ranks that share the
    model share the draft.

    Raises:
        ValueError: the draft of `shape` is no EAGLE-3 head.
    """
    from spec_ops.integrations.transformers import TransformersModel

    if shape.draft_vocab is None:
        raise ValueError(f"round: the draft of {shape.label} is no EAGLE-3 head, which a target of transformers takes")
    target = TransformersModel(model, shape.target.aux_layers)
    weight = target.embed.weight
    with torch.device(weight.device), torch.no_grad():
        draft = Eagle3Draft(shape.head(), target, torch.arange(shape.draft_vocab))
    draft.to(device=weight.device, dtype=weight.dtype)
    ranks = target.ranks
    return target, shard(draft, ranks, target=target) if isinstance(ranks, TensorParallel) else draft.eval()
