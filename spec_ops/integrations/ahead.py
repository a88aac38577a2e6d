"""Kernels that an engine is going to launch, compiled on threads while it starts.

Otherwise each is compiled where it is first launched: those of recorded batches one after another while CUDA graphs are
recorded, the others in somebody's first prompts. The first launch of a kernel waits for what is being compiled of it.

Everything here is a guess: what it misses is compiled at its first launch, and nothing of it may fail a start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.registry import load_kernel, missing_backends, select_backend

if TYPE_CHECKING:  # Triton is not there on every platform
    from spec_ops.backends.triton.runtime.launch import Launch, Target

logger = logging.getLogger(__name__)
OURS = "spec_ops.backends.triton."
APPEND = f"{OURS}cache.append:append_kv"


class Layer(NamedTuple):
    """What the launches of a layer depend on.

    Attributes:
        dtype: of queries. num_heads, num_kv_heads: of this rank.
        head_size, v_head_size: of MLA (`is_mla`) the width of a row of the cache, and of its latent part.
        window_left: -1 for none. sinks: their dtype.
        page_size: tokens. length: of the longest text.
        beside: each value lies beside its key.
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
    length: int
    beside: bool


class Step(NamedTuple):
    """Batches in which each request has as many `queries`: the op of one, without `mha_` or `mla_`.

    Attributes:
        mask_len: of a tree's mask; 0 for a chain. one_mask: it is the same for all requests.
    """

    op: str
    queries: int
    mask_len: int = 0
    one_mask: bool = False


class Batches(NamedTuple):
    """What an engine computes.

    Attributes:
        requests: the most of them in a batch. prompt: tokens of the longest chunk of a prompt; 0: another package's kernels
            compute prompts.
        appends: rows are written by `append_kv`.
        few: steps that a request or two make at times; they come last.
    """

    steps: tuple[Step, ...]
    requests: int
    prompt: int
    appends: bool
    few: tuple[Step, ...] = ()


def start(guess: Callable[[], Iterable[tuple[Layer, Batches]]], device: torch.device | str | None = None) -> int:
    """Begin to compile what layers will launch.

    Args:
        guess: finds the layers; whatever it raises ends up in the log.
        device: None: the current one, if it is a GPU.

    Returns:
        How many binaries were begun: those that are neither there nor being compiled.
    """
    try:
        device = None if device is None else torch.device(device)
        if (device is None and not torch.cuda.is_initialized()) or (device is not None and device.type != "cuda"):
            return 0
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return sum(_start(layer, batches, device) for layer, batches in dict.fromkeys(guess()))
    except Exception as error:
        logger.debug("kernels are not compiled ahead: %s", error, exc_info=True)
        return 0


@functools.cache  # layers are alike
def _start(layer: Layer, batches: Batches, device: torch.device) -> int:
    from spec_ops.backends.triton.runtime.launch import Target, compile_in_background

    return compile_in_background(launches(layer, batches, Target.of(device)), device)


def launches(layer: Layer, batches: Batches, target: Target) -> list[Launch]:
    """One for each binary, or more."""
    from spec_ops.backends.triton.runtime.launch import recorded

    with torch.inference_mode(), torch.device("meta"), recorded(target) as found:
        for call in calls(layer, batches):
            kernel = select_backend(call.meta(), target.arch, missing=missing_backends()).backend.kernels[call.step]
            if kernel.startswith(OURS):
                load_kernel(kernel)(call)
        if batches.appends:
            rows = torch.empty(2, layer.num_kv_heads, layer.head_size, dtype=layer.dtype)
            load_kernel(APPEND)(*_caches(layer), rows, rows, torch.empty(2, dtype=torch.int64), 1.0, 1.0)
    return found


def calls(layer: Layer, batches: Batches) -> Iterator[AttentionCall]:
    """Batches of all sizes by which kernels are compiled: powers of two of requests, and of the queries of a prompt's chunk."""
    for step in batches.steps:
        for requests in powers(batches.requests):
            yield _step(layer, step, requests)
    for queries in powers(batches.prompt) if batches.prompt else ():
        call = _call(layer, "extend", 1, (queries,))
        call.q_indptr, call.max_q_len = torch.empty(2, dtype=torch.int32), queries
        yield call
    for step in batches.few:
        yield _step(layer, step, 1)


def powers(most: int) -> list[int]:
    """Of two, up to the one that is at least `most`."""
    return [1 << i for i in range(max(most - 1, 0).bit_length() + 1)]


def _caches(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Where engines have heads before tokens, strides differ, and binaries do not."""
    pages = (2, layer.page_size)
    if layer.is_mla:
        cache = torch.empty(*pages, layer.head_size, dtype=layer.kv_dtype)
        return cache, cache
    widths = layer.head_size, layer.v_head_size
    if layer.beside:
        return torch.empty(*pages, layer.num_kv_heads, sum(widths), dtype=layer.kv_dtype).split(widths, -1)  # type: ignore[return-value]
    keys, values = (torch.empty(*pages, layer.num_kv_heads, width, dtype=layer.kv_dtype) for width in widths)
    return keys, values


def _step(layer: Layer, step: Step, requests: int) -> AttentionCall:
    call = _call(layer, step.op, requests, (requests, step.queries))
    if step.mask_len:
        masks = torch.empty(1 if step.one_mask else requests, step.queries, dtype=torch.int64)
        call.tree_mask, call.mask_len = masks.expand(requests, -1), step.mask_len
    return call


def _call(layer: Layer, op: str, requests: int, rows: tuple[int, ...]) -> AttentionCall:
    return AttentionCall(
        f"{'mla' if layer.is_mla else 'mha'}_{op}",
        torch.empty(*rows, layer.num_heads, layer.head_size, dtype=layer.dtype),
        *_caches(layer),
        layer.v_head_size if layer.is_mla else None,
        torch.empty(requests, -(-layer.length // layer.page_size), dtype=torch.int32),
        torch.empty(requests, dtype=torch.int32),
        window_left=layer.window_left,
        sinks=None if layer.sinks is None else torch.empty(layer.num_heads, dtype=layer.sinks),
        softcap=1.0 if layer.softcap else 0.0,
    )
