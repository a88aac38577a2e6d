"""Attention of one vLLM engine by our ops: what a batch attends, and the calls of its layers.

Knows the shapes of vLLM's `CommonAttentionMetadata`, caches and layers, and imports none of it: `backend.py` has the classes.
Everything fits as it is: `seq_lens` has the step's own tokens, block tables are int32, a padded slot is -1. So all tensors here
are views of the runner's buffers, and what a CUDA graph recorded stays right when these are written anew.

A batch has up to two parts. Its first requests, as far as they have one query length of at most `1 + draft tokens`, are decoded
or verified; the others are a ragged extend. A batch that a full CUDA graph records has the first part alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from spec_ops import ops
from spec_ops.backends.call import FP8_DTYPES
from spec_ops.integrations.vllm.limits import refuse

FP8 = torch.float8_e4m3fn


class Attended(NamedTuple):
    """What one part of a batch attends: the arguments that all layers' calls share.

    Attributes:
        step: `"draft_decode"`, `"target_verify"` or `"extend"`.
        tokens: rows of the batch.
        block_tables: `[bs, max_pages]` int32. seq_lens: `[bs]` int32.
        q_len: queries per request, the most of them if ragged.
        q_indptr: `[bs + 1]` int32 of ragged queries.
    """

    step: str
    tokens: slice
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    q_len: int
    q_indptr: torch.Tensor | None = None


@dataclass
class SpecOpsMetadata:
    """A batch's metadata: a dataclass, whose fields vLLM copies where layers share a cache."""

    num_actual_tokens: int
    parts: tuple[Attended, ...]


def uniform_requests(query_lens: list[int], most: int) -> int:
    """How many of the first requests have one query length, from 1 to `most`."""
    if not query_lens or not 1 <= query_lens[0] <= most:
        return 0
    return next((i for i, n in enumerate(query_lens) if n != query_lens[0]), len(query_lens))


def metadata_of(common: Any, most: int) -> SpecOpsMetadata:
    """Of vLLM's `CommonAttentionMetadata`, without a sync.

    Args:
        most: queries of a request that are decoded or verified.

    Raises:
        ValueError: attention that our ops do not compute.
    """
    if common.causal is not True:
        refuse(
            "attention that is not causal (parallel drafts, as DFlash's) is not supported", "let the draft use another backend"
        )
    for name, what in (("rswa_prefix_lens", "windows with a prefix (R-SWA)"), ("mm_req_doc_ranges", "prefix masks of images")):
        if getattr(common, name, None) is not None:
            refuse(f"{what} are not supported")
    starts: list[int] = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    lens = [end - start for start, end in itertools.pairwise(starts)]
    count, requests, parts = uniform_requests(lens, most), common.num_reqs, []
    tables, seq_lens, indptr = common.block_table_tensor, common.seq_lens, common.query_start_loc
    if count:
        step = "draft_decode" if lens[0] == 1 else "target_verify"
        parts.append(Attended(step, slice(0, starts[count]), tables[:count], seq_lens[:count], lens[0]))
    if starts[-1] > starts[count]:
        rows, span = slice(count, requests), max(lens[count:])
        indptr = indptr[count : requests + 1]
        if count:
            indptr = indptr - indptr[:1]
        parts.append(Attended("extend", slice(starts[count], starts[-1]), tables[rows], seq_lens[rows], span, indptr))
    return SpecOpsMetadata(common.num_actual_tokens, tuple(parts))


def check_recordable(common: Any, most: int) -> None:
    """Raise ValueError for a batch whose full CUDA graph would replay other queries than it recorded."""
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    lens = [end - start for start, end in itertools.pairwise(starts)]
    if uniform_requests(lens, most) != common.num_reqs:
        refuse(
            f"a full CUDA graph of requests of {min(lens)} to {max(lens)} tokens is not supported: all have one, up to {most}",
            'pass --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'',
        )


def pages(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[pages, page_size, heads, dim]` of keys and of values, views of vLLM's `[pages, heads, page_size, both]`, whatever its
    strides are."""
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(FP8)
    both = kv_cache.transpose(1, 2)
    return both[..., :head_size], both[..., head_size:]


def window_left(sliding_window: int | None) -> int:
    """vLLM counts the query's own position, and says None or a negative number for no window."""
    return -1 if sliding_window is None or sliding_window < 1 else sliding_window - 1


def attend(
    part: Attended, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, output: torch.Tensor, **options: Any
) -> None:
    """Write the rows of `part` in `output` `[tokens, heads, v_dim]`, of `query` `[tokens, heads, dim]`."""
    q, out, tables, lens = query[part.tokens], output[part.tokens], part.block_tables, part.seq_lens
    if part.q_indptr is not None:
        ops.mha_extend(q, k_cache, v_cache, tables, lens, part.q_indptr, part.q_len, out=out, **options)
        return
    call = ops.mha_draft_decode if part.step == "draft_decode" else ops.mha_target_verify
    shape = (-1, part.q_len)
    call(q.unflatten(0, shape), k_cache, v_cache, tables, lens, out=out.unflatten(0, shape), **options)


def query_length(starts: list[int]) -> int:
    """Of requests that all have as many queries, or none.

    Args:
        starts: where each request's queries begin, and the end of the last.

    Raises:
        ValueError: requests with other numbers of queries.
    """
    lens = {end - start for start, end in itertools.pairwise(starts)} - {0}
    if len(lens) > 1:
        refuse(f"requests of {min(lens)} to {max(lens)} tokens are decoded together, which must be alike", "report this engine")
    return next(iter(lens), 1)


def attend_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    tables: torch.Tensor,
    seq_lens: torch.Tensor,
    q_len: int,
    **options: Any,
) -> torch.Tensor:
    """Decode or verify with the latent cache.

    Args:
        q: `[tokens, heads, kv_lora_rank + rope_dim]`, `q_len` for each request.
        kv_cache: `[pages, page_size, kv_lora_rank + rope_dim]`.
        tables, seq_lens: of the requests; padded ones without a token may follow.

    Returns:
        `[tokens, heads, kv_lora_rank]`.
    """
    q = q.unflatten(0, (-1, q_len))
    call, rows = ops.mla_draft_decode if q_len == 1 else ops.mla_target_verify, slice(len(q))
    return call(q, kv_cache, kv_lora_rank, tables[rows], seq_lens[rows], **options).flatten(0, 1)


def scales(layer: Any, cache: torch.Tensor) -> dict[str, Any]:
    """Of keys and values in an fp8 cache, on the host."""
    return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float} if cache.dtype in FP8_DTYPES else {}


def write(
    layer: Any, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new keys and values `[tokens, heads, dim]`; tokens without a slot are padding."""
    count = min(len(slots), len(key))
    ops.append_kv(k_cache, v_cache, key[:count], value[:count], slots[:count], **scales(layer, k_cache))
