"""gpt-oss in MXFP4, read as it is published.

transformers dequantizes such a checkpoint to 16 bits, four times the bytes, or hands its experts to a kernel of the Hub in a
layout of that kernel's own. Here the tensors of the files become parameters as they lie, and `moe_experts` computes with them.
It is one more quantizer of transformers, whose interface for these is public: `from_pretrained` loads, shards and places.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from spec_ops.backends.expert_format import MX_GROUP
from spec_ops.ops.moe import moe_experts

METHOD = "spec_ops_mxfp4"
_EXPERTS = "GptOssExperts"


def read_mxfp4_as_stored(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration that makes transformers load a gpt-oss checkpoint in MXFP4 with its experts as they are stored.

        config = read_mxfp4_as_stored(AutoConfig.from_pretrained(path))
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype="auto", device_map="cuda")

    Args:
        config: of a checkpoint whose `quantization_config` has the method `mxfp4`; not changed.

    Returns:
        A copy.

    Raises:
        ValueError: another method, or none.
    """
    values, method = quantization_of(config), quantization_method(config)
    if method != "mxfp4":
        raise ValueError(f"read_mxfp4_as_stored: `config` must have the quantization method 'mxfp4', got {method!r}")
    changed = copy.deepcopy(config)
    changed.quantization_config = {"quant_method": METHOD, "modules_to_not_convert": values.get("modules_to_not_convert")}
    return changed


def quantization_method(config: Any) -> str | None:
    """The name of a configuration's quantization method."""
    return quantization_of(config).get("quant_method")


def quantization_of(config: Any) -> dict[str, Any]:
    given = getattr(config, "quantization_config", None) or {}
    return given if isinstance(given, dict) else given.to_dict()


@register_quantization_config(METHOD)
class StoredMxfp4Config(QuantizationConfigMixin):
    """Attributes: `modules_to_not_convert`: names of modules that are not quantized."""

    def __init__(self, modules_to_not_convert: list[str] | None = None, **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.modules_to_not_convert = modules_to_not_convert


@register_quantizer(METHOD)
class StoredMxfp4Quantizer(HfQuantizer):
    """Puts `StoredMxfp4Experts` in the place of gpt-oss's experts before the weights are loaded."""

    quantization_config: StoredMxfp4Config
    requires_calibration = True  # only checkpoints that are quantized already

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        skipped = self.get_modules_to_not_convert(model, self.quantization_config.modules_to_not_convert)
        found = [name for name, module in model.named_modules() if type(module).__name__ == _EXPERTS]
        if not found:
            raise ValueError(f"{type(model).__name__} has no experts of gpt-oss: MXFP4 is read as stored in these alone")
        for name in found:
            if not any(name == part or name.startswith(f"{part}.") for part in skipped):
                with torch.device("meta"):
                    model.set_submodule(name, StoredMxfp4Experts(model.config.get_text_config()))

    def update_weight_conversions(self, weight_conversions: list, model: PreTrainedModel) -> list:
        return weight_conversions  # the files' names are the parameters'

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class StoredMxfp4Experts(nn.Module):
    """gpt-oss's experts; parameters have the names and shapes that the published files give them.

    `[E, rows, columns / 32, 16]` uint8 are blocks of 32 numbers, `[E, rows, columns / 32]` uint8 their scales.
    """

    gate_up_proj_blocks: nn.Parameter
    gate_up_proj_scales: nn.Parameter
    gate_up_proj_bias: nn.Parameter
    down_proj_blocks: nn.Parameter
    down_proj_scales: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(self, config: Any) -> None:
        super().__init__()
        experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.alpha, self.limit = 1.702, float(getattr(config, "swiglu_limit", 7.0))
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            if columns % MX_GROUP:
                raise ValueError(f"StoredMxfp4Experts: sizes must be multiples of {MX_GROUP}, got {columns}")
            groups = columns // MX_GROUP
            for kind, shape in (("blocks", (experts, rows, groups, MX_GROUP // 2)), ("scales", (experts, rows, groups))):
                empty = torch.empty(shape, dtype=torch.uint8)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(empty, requires_grad=False))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(experts, rows), requires_grad=False))

    def forward(self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Args: `[tokens, hidden]`, and ids and weights `[tokens, k]` of a token's experts. Returns `[tokens, hidden]`."""
        shape = hidden_states.shape
        out = moe_experts(
            hidden_states.reshape(-1, shape[-1]),
            router_indices,
            routing_weights,
            self.gate_up_proj_blocks.flatten(2),
            self.down_proj_blocks.flatten(2),
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            interleaved=True,
            limit=self.limit,
            alpha=self.alpha,
            beta=1.0,
            gate_up_scale=self.gate_up_proj_scales,
            down_scale=self.down_proj_scales,
        )
        return out.view(shape)
