"""The backend as SGLang's class. Imported where an engine builds it."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from spec_ops.integrations.sglang import hooks
from spec_ops.integrations.sglang.attention import SpecOpsAttention
from spec_ops.integrations.sglang.drafting import SpecOpsDraftSteps
from spec_ops.integrations.sglang.limits import check_runner


class SpecOpsAttnBackend(SpecOpsAttention, AttentionBackend):
    """Target and draft, every forward but the steps of a draft. https://docs.sglang.io/advanced_features/attention_backend.html"""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner, KVWriteLoc)
        self._mask: Any = None
        if self.verify_mask_buffer is not None:
            setattr(self.verify_mask_buffer, hooks.MASK_MARK, True)
        if hooks.knows_verify_masks() and self.verify_mask_buffer is not None:
            from sglang.srt.layers.attention.verify_mask import VerifyMask
            from sglang.srt.speculative.eagle_utils import TreeMaskMode

            self._mask = VerifyMask(self.verify_mask_buffer, TreeMaskMode.QLEN_ONLY, self.verify_mask_rows, self.is_tree)

    @property
    def verify_mask(self) -> Any:
        """From SGLang 0.5.23 on."""
        return self._mask


def build(runner: Any) -> SpecOpsAttnBackend:
    """The backend of a `ModelRunner`, with what SGLang needs to draft with it hooked in.

    Raises:
        ValueError: what is not supported, and what to use instead.
    """
    check_runner(runner)
    hooks.install(SpecOpsAttnBackend, draft_steps, uses_mla=runner.use_mla_backend)
    return SpecOpsAttnBackend(runner)


def draft_steps(runner: Any, topk: int, num_steps: int) -> SpecOpsDraftSteps:
    return SpecOpsDraftSteps(runner, topk, num_steps, SpecOpsAttnBackend)
