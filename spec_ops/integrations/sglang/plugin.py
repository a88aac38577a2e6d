"""The entry point that SGLang calls in each of its processes, before arguments are parsed."""

from __future__ import annotations

import logging
from typing import Any

from spec_ops.integrations.sglang.symbols import NAME, problems

logger = logging.getLogger(__name__)


def register() -> bool:
    """Offer `spec_ops` as an attention backend: a name in SGLang's registry and among its argument's choices, nothing else.

    Runs in every engine of whoever installed spec_ops. It raises nothing, and may be called again.

    Returns:
        Whether the name is offered; if not, one line of the log says why.
    """
    try:
        if found := problems():
            logger.warning("spec_ops does not offer --attention-backend %s: %s", NAME, "; ".join(found))
            return False
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

        if NAME in ATTENTION_BACKENDS:
            return True
        register_attention_backend(NAME)(_build)
        _add_choice()
    except Exception as error:  # an engine whose user did not ask for this backend must start all the same
        logger.warning("spec_ops does not offer --attention-backend %s: %s: %s", NAME, type(error).__name__, error)
        return False
    return True


def _add_choice() -> None:
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _build(runner: Any) -> Any:
    """What the registry calls where an engine was asked for the backend."""
    from spec_ops.integrations.sglang.backend import build

    return build(runner)
