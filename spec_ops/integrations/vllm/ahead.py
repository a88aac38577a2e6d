"""Kernels that an engine is going to launch, compiled on threads while it starts.

Otherwise each is compiled where it is first launched: those of recorded batches one after another while CUDA graphs are
recorded, the others in somebody's first prompts. A layer says what it needs when it is made, long before its weights are there
and vLLM's compiler has run. The first launch of a kernel waits for what is being compiled of it.

Everything here is a guess: what it misses is compiled at its first launch, and nothing of it may fail a start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.registry import load_kernel, missing_backends, select_backend
from spec_ops.integrations.vllm.limits import cache_dtype

if TYPE_CHECKING:  # Triton is not there on every platform
    from spec_ops.backends.triton.runtime.launch import Launch, Target

logger = logging.getLogger(__name__)
OURS = "spec_ops.backends.triton."
APPEND = f"{OURS}cache.append:append_kv"


class Needed(NamedTuple):
    """What the launches of a layer depend on.

    Attributes:
        dtype: of queries. num_heads, num_kv_heads: of this rank.
        head_size, v_head_size: of MLA (`is_mla`) the width of a row of the cache, and of its latent part.
        window_left: -1 for none. sinks: their dtype.
        page_size: tokens. drafts: tokens that are proposed at once.
        requests, tokens, length: the most of them in a batch, and in a request.
    """

    is_mla: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    window_left: int
    sinks: torch.dtype | None
    softcap: bool
    page_size: int
    drafts: int
    requests: int
    tokens: int
    length: int


def needed(impl: Any, config: Any, page_size: int) -> Needed:
    """By a layer.

    Args:
        impl: its attention, ours. config: vLLM's `VllmConfig`. page_size: of its cache.
    """
    dtype, scheduler = config.model_config.dtype, config.scheduler_config
    speculation = config.speculative_config
    return Needed(
        impl.is_mla, dtype, cache_dtype(impl.kv_cache_dtype, dtype), impl.num_heads, impl.num_kv_heads, impl.head_size,
        impl.v_head_size, impl.window_left, None if impl.sinks is None else impl.sinks.dtype, impl.softcap > 0, page_size,
        0 if speculation is None else speculation.num_speculative_tokens or 0,
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens, config.model_config.max_model_len,
    )  # fmt: skip


def start(impl: Any, config: Any, page_size: int | None = None, device: torch.device | None = None) -> int:
    """Begin to compile what a layer will launch. The arguments are those of `needed`.

    Args:
        page_size: None: what the configuration has, if it is settled already.
        device: None: the current one, if it is a GPU.

    Returns:
        How many binaries were begun; 0 if they are there, or are being compiled.
    """
    try:
        if config is None:  # a layer outside of an engine
            return 0
        page_size = page_size or getattr(config.cache_config, "block_size", None)
        if device is None and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        if device is None or device.type != "cuda" or not page_size:
            return 0
        return _start(needed(impl, config, page_size), device)
    except Exception as error:
        logger.debug("kernels are not compiled ahead: %s", error, exc_info=True)
        return 0


@functools.cache  # layers are alike
def _start(what: Needed, device: torch.device) -> int:
    from spec_ops.backends.triton.runtime.launch import Target, compile_in_background

    return compile_in_background(launches(what, Target.of(device)), device)


def launches(what: Needed, target: Target) -> list[Launch]:
    """One for each binary, or more."""
    from spec_ops.backends.triton.runtime.launch import recorded

    with torch.inference_mode(), torch.device("meta"), recorded(target) as found:
        for call in calls(what):
            kernel = select_backend(call.meta(), target.arch, missing=missing_backends()).backend.kernels[call.step]
            if kernel.startswith(OURS):
                load_kernel(kernel)(call)
        if not what.is_mla:  # vLLM writes MLA's cache
            k_cache, v_cache = _caches(what)
            rows = torch.empty(2, what.num_kv_heads, what.head_size, dtype=what.dtype)
            load_kernel(APPEND)(k_cache, v_cache, rows, rows, torch.empty(2, dtype=torch.int64), 1.0, 1.0)
    return found


def calls(what: Needed) -> Iterator[AttentionCall]:
    """Decoding, verifying and prefilling batches of all sizes by which kernels are compiled: powers of two of requests, and of
    the queries of a prompt's chunk. Most batches have as many queries a request as drafts are verified, or one."""
    kind = "mla" if what.is_mla else "mha"
    for requests in _powers(what.requests):
        yield _call(what, f"{kind}_draft_decode", requests, 1)
        if what.drafts:
            yield _call(what, f"{kind}_target_verify", requests, 1 + what.drafts)
    if not what.is_mla:  # vLLM prefills
        for queries in _powers(what.tokens):
            yield _call(what, "mha_extend", 1, queries)


def _powers(most: int) -> list[int]:
    """Of two, up to the one that is at least `most`."""
    return [1 << i for i in range(max(most - 1, 0).bit_length() + 1)]


def _caches(what: Needed) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM has them: values beside keys. In the other layout, strides differ, and binaries do not."""
    if what.is_mla:
        cache = torch.empty(2, what.page_size, what.head_size, dtype=what.kv_dtype)
        return cache, cache
    both = torch.empty(2, what.page_size, what.num_kv_heads, what.head_size + what.v_head_size, dtype=what.kv_dtype)
    return both[..., : what.head_size], both[..., what.head_size :]


def _call(what: Needed, step: str, requests: int, queries: int) -> AttentionCall:
    ragged = step.endswith("_extend")
    rows = (queries,) if ragged else (requests, queries)
    k_cache, v_cache = _caches(what)
    call = AttentionCall(
        step,
        torch.empty(*rows, what.num_heads, what.head_size, dtype=what.dtype),
        k_cache,
        v_cache,
        what.v_head_size if what.is_mla else None,
        torch.empty(requests, -(-what.length // what.page_size), dtype=torch.int32),
        torch.empty(requests, dtype=torch.int32),
        window_left=what.window_left,
        sinks=None if what.sinks is None else torch.empty(what.num_heads, dtype=what.sinks),
        softcap=1.0 if what.softcap else 0.0,
    )
    if ragged:
        call.q_indptr, call.max_q_len = torch.empty(requests + 1, dtype=torch.int32), queries
    return call
