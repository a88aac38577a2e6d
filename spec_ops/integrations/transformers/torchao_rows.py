"""torchao's weights whose rows are rounded to 8 or 4 bits with one scale for a whole batch: refused by name.

Such a scale makes what a row gives depend on the rows beside it, so speculative text would not be plain text.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def check_rows(model: PreTrainedModel, argument: Any) -> None:
    """Refuse activations with a scale for a whole batch.

    Raises:
        ValueError: naming a layer.
    """
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(weight, torch.Tensor) and (instead := _of_batch(weight.data)) is not None:
            kind = type(weight.data).__name__
            raise ValueError(
                f"{argument} must round each row with a scale of its own, since one for all rows of a batch lets a text depend "
                f"on the others: {name} has a {kind} of activations with one; quantize with {instead}"
            )


def _of_batch(weight: Any) -> str | None:
    """With what else a weight of torchao would have scales for rows; None if it has them, or if rows are not rounded."""
    how = getattr(weight, "act_quant_kwargs", None)
    if how is None or not type(weight).__module__.startswith("torchao."):
        return None
    if getattr(how, "use_dynamic_per_tensor_scale", False):
        return "a scale that was measured before (step='prepare', then 'convert')"
    measured = getattr(weight, "act_quant_scale", None) is not None
    return "granularity=PerRow()" if type(getattr(how, "granularity", None)).__name__ == "PerTensor" and not measured else None
