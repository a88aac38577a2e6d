"""Page tables and CSR kv-indices from a token-level request-to-token table.

`req_to_token [num_request_slots, max_context] int32` holds, for each request slot, the KV slot of each token (SGLang's
`req_to_token_pool`). All outputs have static shapes: their sizes come from Python numbers, never from lengths on the device.
"""

from __future__ import annotations

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops._validate import INDEX_DTYPES, Checker
from spec_ops.ops.reference import kv_indices as reference

_SOURCE = "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens"


def _int32(like: torch.Tensor, *shape) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int32)


page_table_op = define_op(
    f"page_table({_SOURCE}, int page_size, SymInt max_pages) -> Tensor",
    reference.page_table,
    lambda req_to_token, req, lens, page_size, max_pages: _int32(lens, lens.shape[0], max_pages),
    cuda="spec_ops.backends.triton.cache.indices:page_table",
    invariant=True,
)
# An op of its own, and no overload, so that passes have one table to know: it is for callers outside of compiled functions.
page_table_out_op = define_op(
    f"page_table_out({_SOURCE}, int page_size, Tensor(a!) out) -> ()",
    reference.page_table_out,
    lambda *args: None,
    cuda="spec_ops.backends.triton.cache.indices:page_table_out",
    invariant=True,
)
kv_indices_op = define_op(
    f"kv_indices({_SOURCE}, SymInt capacity) -> (Tensor, Tensor)",
    reference.kv_indices,
    lambda req_to_token, req, lens, capacity: (_int32(lens, lens.shape[0] + 1), _int32(lens, capacity)),
    cuda="spec_ops.backends.triton.cache.indices:kv_indices",
    invariant=True,
)
draft_kv_indices_op = define_op(
    f"draft_kv_indices({_SOURCE}, int step, int num_steps, int topk, int page_size, SymInt capacity) -> (Tensor, Tensor)",
    reference.draft_kv_indices,
    lambda req_to_token, req, lens, step, num_steps, topk, page_size, capacity: (
        _int32(lens, lens.shape[0] * topk + 1),
        _int32(lens, capacity),
    ),
    cuda="spec_ops.backends.triton.cache.indices:draft_kv_indices",
    invariant=True,
)
draft_kv_indices_steps_op = define_op(
    f"draft_kv_indices_steps({_SOURCE}, int num_steps, int topk, int page_size, SymInt capacity, int rows) -> (Tensor, Tensor)",
    reference.draft_kv_indices_steps,
    lambda req_to_token, req, lens, num_steps, topk, page_size, capacity, rows: (
        _int32(lens, rows, lens.shape[0] * topk + 1),
        _int32(lens, rows, capacity),
    ),
    cuda="spec_ops.backends.triton.cache.indices:draft_kv_indices_steps",
    invariant=True,
)


def _check_source(check: Checker, req_to_token, req_pool_indices, seq_lens) -> None:
    check.tensor("req_to_token", req_to_token, rank=2, dtypes=(torch.int32,))
    if req_to_token.shape[1] < 1:
        check.fail("req_to_token", "at least one token wide", f"shape {tuple(req_to_token.shape)}")
    device = req_to_token.device
    check.tensor("req_pool_indices", req_pool_indices, rank=1, dtypes=INDEX_DTYPES, device=device)
    check.tensor("seq_lens", seq_lens, shape=(req_pool_indices.shape[0],), dtypes=INDEX_DTYPES, device=device)


def page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    max_pages: int | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Block table of each request: `table[b, p] = req_to_token[req_b, p * page_size] // page_size` for live pages, else 0.

    Args:
        req_to_token: `[num_request_slots, max_context]` int32; tokens of a page lie in consecutive slots from a page boundary.
        req_pool_indices: `[bs]` int32/int64, row of each request.
        seq_lens: `[bs]` int32/int64, KV tokens to cover.
        page_size: 1 to 128 tokens.
        max_pages: width of the table; default `ceil(max_context / page_size)`, or that of `out`.
        out: `[at least bs, max_pages]` int32, rows of any stride: its first `bs` rows are written (an engine's static buffer),
            and it is returned.

    Returns:
        `[bs, max_pages]` int32. Entries past the live prefix are 0, always a valid page id (kernels may prefetch them).

    Raises:
        TypeError, ValueError: naming the argument. IndexError on CPU for lengths or rows out of range.

    Source: SGLang `create_flashmla_kv_indices_triton` (which leaves the tail unwritten).
    """
    check = Checker("page_table")
    _check_source(check, req_to_token, req_pool_indices, seq_lens)
    check.integer("page_size", page_size, 1, 128)
    width = -(-req_to_token.shape[1] // page_size)
    if out is None:
        max_pages = width if max_pages is None else max_pages
        check.integer("max_pages", max_pages, 1, width)
        return page_table_op(req_to_token, req_pool_indices, seq_lens, page_size, max_pages)
    check.tensor("out", out, shape=(None, max_pages), dtypes=(torch.int32,), device=req_to_token.device)
    bs = seq_lens.shape[0]
    if out.shape[0] < bs or not 1 <= out.shape[1] <= width or out.stride(1) != 1:
        wanted = f"at least {bs} rows of 1 to {width} entries, each row contiguous"
        check.fail("out", wanted, f"shape {tuple(out.shape)}, strides {out.stride()}")
    if torch.compiler.is_compiling():  # the op that passes know; Inductor removes the copy where it can
        out[:bs].copy_(page_table_op(req_to_token, req_pool_indices, seq_lens, page_size, out.shape[1]))
    else:
        page_table_out_op(req_to_token, req_pool_indices, seq_lens, page_size, out)
    return out


def kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CSR list of each request's token slots.

    Args:
        capacity: length of the index list; default `bs * max_context`. It must hold `seq_lens.sum()`.

    Returns:
        `(kv_indptr [bs + 1] int32, kv_indices [capacity] int32)`; entries past `kv_indptr[-1]` are 0.

    Raises:
        TypeError, ValueError: naming the argument. IndexError on CPU for lengths or rows out of range or a
            `capacity` too small.

    Source: SGLang `create_flashinfer_kv_indices_triton`.
    """
    check = Checker("kv_indices")
    _check_source(check, req_to_token, req_pool_indices, seq_lens)
    capacity = seq_lens.shape[0] * req_to_token.shape[1] if capacity is None else capacity
    check.integer("capacity", capacity, 0)
    return kv_indices_op(req_to_token, req_pool_indices, seq_lens, capacity)


def _check_draft(check: Checker, req_to_token, req_pool_indices, seq_lens, num_steps, topk, page_size, capacity) -> int:
    _check_source(check, req_to_token, req_pool_indices, seq_lens)
    check.integer("num_steps", num_steps, 1)
    check.integer("topk", topk, 1)
    check.integer("page_size", page_size, 1, 128)
    capacity = seq_lens.shape[0] * topk * req_to_token.shape[1] if capacity is None else capacity
    check.integer("capacity", capacity, 0)
    return capacity


def draft_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    step: int,
    num_steps: int,
    topk: int = 1,
    page_size: int = 1,
    capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CSR token slots that draft step `step` (0-based) attends, one segment per request and branch.

    Segment `z = b * topk + t` is the committed prefix (`seq_lens[b]` slots) followed by the `step + 1` slots of branch `t`:
    `req_to_token[req_b, e : e + step + 1]`, where `e = L + t * num_steps` for page_size 1 or topk 1, and otherwise
    `e = floor(L / ps) * ps + t * n * ps + L % ps` with `n = ceil((L % ps + num_steps) / ps)` (each branch has its own pages,
    the prefix's partial page duplicated into them).

    Args:
        seq_lens: `[bs]`, committed lengths `L`, without any draft.
        capacity: length of the index list; default `bs * topk * max_context`.

    Returns:
        `(kv_indptr [bs * topk + 1] int32, kv_indices [capacity] int32)`; entries past the total are 0.

    Raises:
        TypeError, ValueError: as in `kv_indices`.
        IndexError: as there; on CPU also where `req_to_token` is too narrow for the drafts.

    Source: SGLang `generate_draft_decode_kv_indices`.
    """
    check = Checker("draft_kv_indices")
    capacity = _check_draft(check, req_to_token, req_pool_indices, seq_lens, num_steps, topk, page_size, capacity)
    check.integer("step", step, 0, num_steps - 1)
    return draft_kv_indices_op(req_to_token, req_pool_indices, seq_lens, step, num_steps, topk, page_size, capacity)


def draft_kv_indices_steps(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    num_steps: int,
    topk: int = 1,
    page_size: int = 1,
    capacity: int | None = None,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draft_kv_indices` of all steps in one launch: row `i` is step `i`.

    Args:
        rows: how many leading steps to compute (drafting often uses `num_steps - 1` of them); default all.
        Others: as in `draft_kv_indices`.

    Returns:
        `(kv_indptr [rows, bs * topk + 1] int32, kv_indices [rows, capacity] int32)`.

    Raises:
        TypeError, ValueError, IndexError: as in `draft_kv_indices`.

    Source: SGLang `generate_draft_decode_kv_indices`, which writes all steps at once.
    """
    check = Checker("draft_kv_indices_steps")
    capacity = _check_draft(check, req_to_token, req_pool_indices, seq_lens, num_steps, topk, page_size, capacity)
    rows = num_steps if rows is None else rows
    check.integer("rows", rows, 1, num_steps)
    return draft_kv_indices_steps_op(req_to_token, req_pool_indices, seq_lens, num_steps, topk, page_size, capacity, rows)
