"""The same round of a target of transformers: random weights of the same sizes, and the same head of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.round.shapes import Shape
from spec_ops.models import Draft, Eagle3Draft

if TYPE_CHECKING:
    from spec_ops.integrations.transformers import TransformersModel


def build_model(shape: Shape, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A causal language model of transformers with fresh weights.

    Raises:
        ValueError: the target of `shape` is a mixture.
    """
    from transformers import AutoModelForCausalLM

    from benchmarks.round.assisted import transformers_config

    with torch.device(device):
        return AutoModelForCausalLM.from_config(transformers_config(shape.target, shape.family), dtype=dtype).eval()


def taken_over(model: Any, shape: Shape) -> tuple[TransformersModel, Draft]:
    """`model` as the target of rounds, and its draft: as `load_eagle3` gives them, but with fresh weights.

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
    return target, draft.to(device=weight.device, dtype=weight.dtype).eval()
