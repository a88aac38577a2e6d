"""The backend that `--attention-backend SPEC_OPS` means: one name, two kinds of attention.

vLLM asks the path under a name for its class whenever a layer is made, and refuses a class whose `is_mla` is not the layer's.
So this path answers by the model that is being made: `SpecOpsBackend` or `SpecOpsMLABackend`.
"""

from __future__ import annotations

from typing import Any

TARGET = "backbone"  # vLLM's tag while a target is made; of a draft "eagle_head", for example


def of_model(config: Any, tag: str) -> type:
    """The backend's class for the model that vLLM makes.

    Args:
        config: vLLM's `VllmConfig`; None outside of an engine.
        tag: vLLM's `model_tag`.
    """
    from spec_ops.integrations.vllm.backend import SpecOpsBackend
    from spec_ops.integrations.vllm.mla import SpecOpsMLABackend

    model: Any = getattr(config, "model_config", None)
    speculation: Any = getattr(config, "speculative_config", None)
    if tag != TARGET and getattr(speculation, "draft_model_config", None) is not None:
        model = speculation.draft_model_config
    return SpecOpsMLABackend if getattr(model, "use_mla", False) else SpecOpsBackend


def __getattr__(name: str) -> type:
    if name != "SpecOpsBackendOfModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.compilation import backends
    from vllm.config import get_current_vllm_config_or_none

    return of_model(get_current_vllm_config_or_none(), backends.model_tag)
