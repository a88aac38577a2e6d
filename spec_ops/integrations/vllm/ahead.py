"""What a layer of vLLM will launch, for kernels that are compiled while the engine starts (`integrations/ahead.py`).

A layer says so when it is made, long before its weights are there and vLLM's compiler has run; and again with the page size of
its cache, once that is settled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from spec_ops.integrations import ahead
from spec_ops.integrations.ahead import Batches, Layer, Step
from spec_ops.integrations.vllm.limits import cache_dtype


def start(impl: Any, config: Any, page_size: int | None = None, device: torch.device | None = None) -> int:
    """Begin to compile. Returns how many binaries were begun.

    Args:
        impl: a layer's attention, ours. config: vLLM's `VllmConfig`; None outside of an engine.
        page_size: None: what the configuration has so far.
        device: None: the current one, if it is a GPU.
    """
    return 0 if config is None else ahead.start(lambda: needed(impl, config, page_size), device)


def needed(impl: Any, config: Any, page_size: int | None = None) -> Iterator[tuple[Layer, Batches]]:
    """Most batches have as many queries a request as drafts are verified, or one. A prompt of fewer tokens that a batch begins
    with is verified too. vLLM itself computes prompts of MLA, and writes its cache."""
    if not (page_size := page_size or config.cache_config.block_size):
        return
    dtype, scheduler, speculation = config.model_config.dtype, config.scheduler_config, config.speculative_config
    steps = [Step("draft_decode", 1)]
    few = []
    if drafts := speculation and speculation.num_speculative_tokens:
        steps.append(Step("target_verify", 1 + drafts))
        few = [Step("target_verify", queries) for queries in range(2, 1 + drafts)]
    yield (
        Layer(
            impl.is_mla, dtype, cache_dtype(impl.kv_cache_dtype, dtype), impl.num_heads, impl.num_kv_heads, impl.head_size,
            impl.v_head_size, impl.window_left, None if impl.sinks is None else impl.sinks.dtype, impl.softcap > 0, page_size,
            config.model_config.max_model_len, beside=True,
        ),
        Batches(
            tuple(steps), scheduler.max_num_seqs, 0 if impl.is_mla else scheduler.max_num_batched_tokens,
            appends=not impl.is_mla, few=tuple(few),
        ),
    )  # fmt: skip
