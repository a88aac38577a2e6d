"""Argument checks of the attention steps: of tensors, by wrappers and fakes (`_library.py` says which when); of the rest."""

from __future__ import annotations

import torch

from spec_ops.backends.call import FP8_DTYPES, RAGGED, AttentionCall
from spec_ops.backends.registry import attention_backend, output_dtype
from spec_ops.ops._validate import FLOAT_DTYPES, INDEX_DTYPES, Checker
from spec_ops.ops.tree import MAX_TREE_TOKENS

MAX_PAGE_SIZE = 128
INT32_MAX = 2**31 - 1


def check_tensors(call: AttentionCall) -> None:
    """What the tensors of an attention step must be, and the width that MLA takes of one."""
    check = Checker(call.step)
    mla, ragged = call.step.startswith("mla_"), call.step in RAGGED
    q, cache, values, seq_lens = call.q, call.k_cache, call.v_cache, call.seq_lens
    check.tensor("q", q, rank=3 if ragged else 4, dtypes=FLOAT_DTYPES)
    heads, dim = q.shape[-2:]
    device = q.device
    name, widths = ("kv_cache", (None, None, dim)) if mla else ("k_cache", (None, None, None, dim))
    check.tensor(name, cache, shape=widths, dtypes=(q.dtype, *FP8_DTYPES), device=device)
    if cache.shape[0] < 1:
        check.fail(name, "of at least one page", f"shape {tuple(cache.shape)}")
    if not 1 <= cache.shape[1] <= MAX_PAGE_SIZE:
        check.fail(name, f"of page size (dimension 1) in [1, {MAX_PAGE_SIZE}]", cache.shape[1])
    if cache.stride(-1) != 1:
        check.fail(name, "contiguous in its last dimension", f"strides {cache.stride()}")
    if mla:
        check.integer("kv_lora_rank", call.kv_lora_rank, 1, dim)
    else:
        check.tensor("v_cache", values, shape=(*cache.shape[:3], None), dtypes=(cache.dtype,), device=device)
        if values.stride(-1) != 1:
            check.fail("v_cache", "contiguous in its last dimension", f"strides {values.stride()}")
        if cache.shape[2] < 1 or heads % cache.shape[2] != 0:
            layout = f"`k_cache` {tuple(cache.shape)}, which is read as [pages, page_size, heads, dim] (NHD)"
            check.fail("q", f"of a head count divisible by the {cache.shape[2]} KV heads of {layout}", f"{heads} heads")
    check.tensor("seq_lens", seq_lens, rank=1, dtypes=(torch.int32,), device=device)
    bs = seq_lens.shape[0]
    if not ragged and q.shape[0] != bs:
        requests = q.shape[0]
        check.fail("seq_lens", f"of shape [{requests}], as `q` holds {requests} requests", f"shape {tuple(seq_lens.shape)}")
    check.tensor("block_tables", call.block_tables, shape=(bs, None), dtypes=(torch.int32,), device=device)
    if ragged:
        check.tensor("q_indptr", call.q_indptr, shape=(bs + 1,), dtypes=(torch.int32,), device=device)
    else:
        check.optional_tensor("tree_mask", call.tree_mask, shape=tuple(q.shape[:2]), dtypes=(torch.int64,), device=device)
    check.optional_tensor("kv_indptr", call.kv_indptr, rank=1, dtypes=(torch.int32,), device=device)
    check.optional_tensor("kv_indices", call.kv_indices, rank=1, dtypes=INDEX_DTYPES, device=device)
    if (call.kv_indptr is None) != (call.kv_indices is None):
        check.fail("kv_indptr", "given together with `kv_indices`", "only one of the two")
    check.optional_tensor("seq_lens_cpu", call.seq_lens_cpu, shape=(bs,), dtypes=INDEX_DTYPES, device=torch.device("cpu"))
    check.optional_tensor("sinks", call.sinks, shape=(heads,), dtypes=FLOAT_DTYPES, device=device)


def check_out(call: AttentionCall, out: object) -> None:
    """What a caller's place for the result must be; the rest of `call` has been checked."""
    check, q = Checker(call.step), call.q
    dtype = output_dtype(call.backend, q.dtype)
    check.tensor("out", out, shape=(*q.shape[:-1], call.v_head_dim), dtypes=(dtype,), device=q.device)
    assert isinstance(out, torch.Tensor)
    if not out.is_contiguous():
        check.fail("out", "contiguous", f"strides {out.stride()}")


def check_apart(call: AttentionCall, out: torch.Tensor) -> None:
    """That `out` shares no memory with the queries or a cache, which kernels still read while they write. Not while tracing:
    fakes have no addresses, and there `out` is a copy of a result that was made elsewhere."""
    if type(out) is not torch.Tensor or out.is_meta:
        return
    check = Checker(call.step)
    caches = {"kv_cache": call.k_cache} if call.is_mla else {"k_cache": call.k_cache, "v_cache": call.v_cache}
    storage = _storage(out)
    for name, tensor in {"q": call.q, **caches}.items():
        if _meet(_storage(tensor), storage) and _meet(_extent(tensor), _extent(out)):
            check.fail("out", f"in other memory than `{name}`", "a tensor that overlaps it")


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the memory that a tensor is a part of."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first byte to past the last one that a tensor reaches; of an empty tensor, no byte."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_options(
    check: Checker, scale, window_left, softcap, max_seq_len, backend, deterministic, device: torch.device
) -> tuple[int, str]:
    """What the numbers and names of an attention step must be; the window (-1 if it is one that hides nothing) and the backend
    to select by."""
    check.number("scale", scale, low=0.0)
    if max_seq_len is not None:
        check.integer("max_seq_len", max_seq_len, 1)
    check.integer("window_left", window_left, -1)
    check.number("softcap", softcap, low=0.0, inclusive=True)
    # Lengths are int32, so that a window of this length, which some models' configurations say for "none", hides nothing.
    window_left = -1 if window_left >= INT32_MAX else window_left
    return window_left, attention_backend(check, backend, deterministic, device)


def check_mask_len(check: Checker, q_len, tree_mask, mask_len) -> int:
    """The length of the tree mask over `q_len` queries; 0: causal."""
    if tree_mask is None:
        if mask_len is not None:
            check.fail("mask_len", "None, since no `tree_mask` is given", mask_len)
        return 0
    mask_len = q_len if mask_len is None else mask_len
    check.integer("mask_len", mask_len, 1, MAX_TREE_TOKENS)
    if q_len > mask_len:
        check.fail("mask_len", f"at least the number of queries ({q_len})", mask_len)
    return mask_len
