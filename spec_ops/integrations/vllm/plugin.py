"""The entry point that vLLM calls in each of its processes, before arguments are parsed."""

from __future__ import annotations

import logging

from spec_ops.integrations.vllm.symbols import NAME, UNNAMED, problems

logger = logging.getLogger(__name__)
CHOICE = "spec_ops.integrations.vllm.choice.SpecOpsBackendOfModel"


def register() -> bool:
    """Offer `SPEC_OPS` as an attention backend: a name in vLLM's registry, nothing else. Before vLLM 0.32, which takes names,
    the one place `CUSTOM`, unless another package has it.

    Runs in every engine of whoever installed spec_ops. It raises nothing, and may be called again.

    Returns:
        Whether the name is offered; if not, one line of the log says why.
    """
    try:
        if found := problems():
            return _refuse("; ".join(found))
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if hasattr(AttentionBackendEnum, "register"):
            if NAME not in AttentionBackendEnum.__members__:
                register_backend(NAME, CHOICE)
            return True
        place = AttentionBackendEnum[UNNAMED]
        if place.is_overridden() and place.get_path() != CHOICE:
            return _refuse(f"{place.get_path()} is registered as {UNNAMED}; VLLM_PLUGINS says which plug-ins are loaded")
        register_backend(place, CHOICE)
    except Exception as error:  # an engine whose user did not ask for this backend must start all the same
        return _refuse(f"{type(error).__name__}: {error}")
    return True


def _refuse(why: str) -> bool:
    logger.warning("spec_ops does not offer --attention-backend %s: %s", NAME, why)
    return False
