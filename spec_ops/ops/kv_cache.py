"""Writes to paged KV caches.

A token's slot is `page_id * page_size + offset`; a negative slot drops the row (padding). These ops mutate their caches and
return nothing. None of them takes a read-only tensor that may be a copy of the cache it mutates: `op(x.clone(), x)` is
silently rewritten to `op(x, x)` by torch.compile (pytorch#198031), which is why `move_kv` has cache arguments only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from spec_ops.backends.call import FP8_DTYPES
from spec_ops.backends.registry import run_append, validate_backend_name
from spec_ops.ops._library import define_op, fakes_check
from spec_ops.ops._passed import Passed
from spec_ops.ops._validate import FLOAT_DTYPES, INDEX_DTYPES, Checker
from spec_ops.ops.reference import kv_cache as reference

_CACHE_DTYPES = FLOAT_DTYPES + FP8_DTYPES


def check_cache(check: Checker, arg: str, cache, rank: int) -> None:
    check.tensor(arg, cache, rank=rank, dtypes=_CACHE_DTYPES)
    if cache.shape[0] < 1 or not 1 <= cache.shape[1] <= 128:
        check.fail(arg, "of at least one page and page size (dimension 1) in [1, 128]", f"shape {tuple(cache.shape)}")
    if cache.stride(-1) != 1:
        check.fail(arg, "contiguous in its last dimension", f"strides {cache.stride()}")
    for size, stride in zip(cache.shape, cache.stride(), strict=True):
        if stride == 0 and size > 1:
            check.fail(arg, "writable: not an expanded tensor", f"strides {cache.stride()}")


def check_layout(check: Checker, k, k_cache) -> None:
    """`k [tokens, heads, dim]` whose heads are where the pages' tokens should be: the cache of another package."""
    if isinstance(k, torch.Tensor) and k.dim() == 3 and k.shape[1] == k_cache.shape[1] != k_cache.shape[2]:
        check.fail("k_cache", f"[pages, page_size, {k.shape[1]} heads, dim] (NHD)", f"shape {tuple(k_cache.shape)}")


def check_place(op: str, **caches) -> None:
    """For fakes: Inductor forgets a symbolic offset of a tensor that an op mutates, which then writes at 0 (2.11 to 2.15)."""
    for arg, cache in caches.items():
        if isinstance(offset := cache.storage_offset(), torch.SymInt):
            cure = "torch._dynamo.mark_static(pool), dynamic=False, or a storage of its own"
            Checker(op).fail(arg, f"at a place of its storage that is known while compiling ({cure})", f"offset {offset}")


def _check_append_kv(k_cache, v_cache, k, v, slots) -> None:
    check = Checker("append_kv")
    check_cache(check, "k_cache", k_cache, 4)
    check_cache(check, "v_cache", v_cache, 4)
    check.tensor("v_cache", v_cache, shape=(*k_cache.shape[:3], None), dtypes=(k_cache.dtype,), device=k_cache.device)
    if v_cache is k_cache:
        check.fail("v_cache", "another tensor than `k_cache`", "the same one")
    values = FLOAT_DTYPES if k_cache.dtype in FP8_DTYPES else (k_cache.dtype,)
    check_layout(check, k, k_cache)
    check.tensor("k", k, shape=(None, *k_cache.shape[2:]), dtypes=values, device=k_cache.device)
    check.tensor("v", v, shape=(k.shape[0], *v_cache.shape[2:]), dtypes=values, device=k_cache.device)
    check.tensor("slots", slots, shape=(k.shape[0],), dtypes=INDEX_DTYPES, device=k_cache.device)


def _append_kv_fake(k_cache, v_cache, k, v, slots, *_others) -> None:
    _check_append_kv(k_cache, v_cache, k, v, slots)
    check_place("append_kv", k_cache=k_cache, v_cache=v_cache)


def _check_append_mla_kv(kv_cache, c_kv, k_rope, slots) -> None:
    check = Checker("append_mla_kv")
    check_cache(check, "kv_cache", kv_cache, 3)
    values = FLOAT_DTYPES if kv_cache.dtype in FP8_DTYPES else (kv_cache.dtype,)
    check.tensor("c_kv", c_kv, rank=2, dtypes=values, device=kv_cache.device)
    rope_dim = kv_cache.shape[2] - c_kv.shape[1]
    if rope_dim < 0:
        check.fail("c_kv", f"at most {kv_cache.shape[2]} wide, as `kv_cache` is", f"shape {tuple(c_kv.shape)}")
    check.tensor("k_rope", k_rope, shape=(c_kv.shape[0], rope_dim), dtypes=(c_kv.dtype,), device=kv_cache.device)
    check.tensor("slots", slots, shape=(c_kv.shape[0],), dtypes=INDEX_DTYPES, device=kv_cache.device)


def _append_mla_kv_fake(kv_cache, c_kv, k_rope, slots, *_others) -> None:
    _check_append_mla_kv(kv_cache, c_kv, k_rope, slots)
    check_place("append_mla_kv", kv_cache=kv_cache)


def _move_kv_fake(caches, *_slots) -> None:
    check_place("move_kv", **{f"caches[{i}]": cache for i, cache in enumerate(caches)})


def _no_output(*_args) -> None:
    return None


def _run_by(op: str, *args) -> None:
    run_append(op, args)


_APPEND_KV = "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, float k_scale, float v_scale"
_APPEND_MLA_KV = "Tensor(a!) kv_cache, Tensor c_kv, Tensor k_rope, Tensor slots, float kv_scale"

append_kv_op = define_op(
    f"append_kv({_APPEND_KV}) -> ()",
    reference.append_kv,
    _append_kv_fake,
    cuda="spec_ops.backends.triton.cache.append:append_kv",
    invariant=True,
)
append_mla_kv_op = define_op(
    f"append_mla_kv({_APPEND_MLA_KV}) -> ()",
    reference.append_mla_kv,
    _append_mla_kv_fake,
    cuda="spec_ops.backends.triton.cache.append:append_mla_kv",
    invariant=True,
)
# What the pass `lower_kv_append` puts in place of the ops above: Inductor generates code for these. Tagged pointwise, which
# each is to its rows, so that Inductor computes a `cat` in place. Not overloads: where two overloads have one signature and
# there is a third, the process aborts when it ends (torch 2.13).
append_kv_lowered = define_op(
    f"append_kv_lowered({_APPEND_KV}) -> ()",
    reference.append_kv,
    _no_output,
    cuda="spec_ops.backends.triton.cache.append:append_kv",
    tags=(torch.Tag.pointwise,),
    invariant=True,
)
append_mla_kv_lowered = define_op(
    f"append_mla_kv_lowered({_APPEND_MLA_KV}) -> ()",
    reference.append_mla_kv,
    _no_output,
    cuda="spec_ops.backends.triton.cache.append:append_mla_kv",
    tags=(torch.Tag.pointwise,),
    invariant=True,
)
# For a named backend: the ops above are what every pass and model uses, and need no choice at run time.
append_kv_by_op = define_op(
    f"append_kv.by({_APPEND_KV}, str backend) -> ()",
    functools.partial(_run_by, "append_kv"),
    _append_kv_fake,
    invariant=True,
)
append_mla_kv_by_op = define_op(
    f"append_mla_kv.by({_APPEND_MLA_KV}, str backend) -> ()",
    functools.partial(_run_by, "append_mla_kv"),
    _append_mla_kv_fake,
    invariant=True,
)
move_kv_op = define_op(
    "move_kv(Tensor(a!)[] caches, Tensor src_slots, Tensor dst_slots) -> ()",
    reference.move_kv,
    _move_kv_fake,
    cuda="spec_ops.backends.triton.cache.append:move_kv",
    invariant=True,
)


def _append_factors(k_cache, v_cache, k, v, slots, k_scale, v_scale, backend) -> tuple[float, float]:
    """Check a call of `append_kv`; returns the factors of its caches."""
    if not fakes_check():
        _check_append_kv(k_cache, v_cache, k, v, slots)
    check = Checker("append_kv")
    k_factor = check.scale("k_scale", k_scale, "k_cache", k_cache.dtype)
    v_factor = check.scale("v_scale", v_scale, "v_cache", v_cache.dtype)
    validate_backend_name(check, backend)
    return k_factor, v_factor


_passed_append = Passed(_append_factors)


def _append_mla_factor(kv_cache, c_kv, k_rope, slots, kv_scale, backend) -> float:
    """Check a call of `append_mla_kv`; returns the factor of its cache."""
    if not fakes_check():
        _check_append_mla_kv(kv_cache, c_kv, k_rope, slots)
    check = Checker("append_mla_kv")
    factor = check.scale("kv_scale", kv_scale, "kv_cache", kv_cache.dtype)
    validate_backend_name(check, backend)
    return factor


_passed_append_mla = Passed(_append_mla_factor)


def append_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
    backend: str = "auto",
) -> None:
    """Write new keys and values into paged caches, in place.

    Args:
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, head_dim]`, float32/bfloat16/float16/float8_e4m3fn, any strides
            whose last is 1 (layer views of a pool are fine). Mutated.
            They must not overlap (the same tensor twice is refused; other overlaps cannot be seen while tracing).
        k, v: `[n, num_kv_heads, head_dim]`, dtype of the caches, or any of the three float dtypes for fp8 caches.
        slots: `[n]` int32 or int64; negative: the row is dropped. Valid slots must differ from one another.
        k_scale, v_scale: required for fp8 caches: stored = round_to_e4m3(clamp(value / scale, -448, 448)).
        backend: `"auto"` is our own kernel (the reference on CPU); a named one, such as `"flashinfer-page"`, is used or raises.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written; compiled, also for a view of a cache whose place
            in its storage is symbolic, see `check_place`. IndexError on CPU for a slot past the end.
        BackendError: the named backend cannot write this.

    Source: FlashInfer `append_paged_kv_cache`, SGLang `set_kv_buffer`.
    """
    factors = _append_factors if fakes_check() else _passed_append
    k_factor, v_factor = factors(k_cache, v_cache, k, v, slots, k_scale, v_scale, backend)
    if backend == "auto":
        append_kv_op(k_cache, v_cache, k, v, slots, k_factor, v_factor)
    else:
        append_kv_by_op(k_cache, v_cache, k, v, slots, k_factor, v_factor, backend)


def append_mla_kv(
    kv_cache: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scale: float | None = None,
    backend: str = "auto",
) -> None:
    """Write new MLA rows (latent beside rotary key) into a paged cache, in place.

    Args:
        kv_cache: `[num_pages, page_size, kv_lora_rank + rope_dim]`. Mutated.
        c_kv: `[n, kv_lora_rank]`; k_rope: `[n, rope_dim]`, after RoPE.
        slots, kv_scale, backend: as in `append_kv`.

    Raises:
        TypeError, ValueError, IndexError: as in `append_kv`.

    Source: FlashInfer `append_paged_mla_kv_cache`.
    """
    factor_of = _append_mla_factor if fakes_check() else _passed_append_mla
    factor = factor_of(kv_cache, c_kv, k_rope, slots, kv_scale, backend)
    if backend == "auto":
        append_mla_kv_op(kv_cache, c_kv, k_rope, slots, factor)
    else:
        append_mla_kv_by_op(kv_cache, c_kv, k_rope, slots, factor, backend)


def move_kv(caches: torch.Tensor | Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """Copy rows between slots of the same cache, in place: `cache[dst[i]] = cache[src[i]]` for every cache given.

    All rows are read before any is written, so overlapping source and destination are safe. Used to compact the accepted
    path of a tree.

    Args:
        caches: one cache or several (all layers, K and V), each `[num_pages, page_size, ...]` with the same number of slots.
            No two may overlap.
        src_slots, dst_slots: `[n]` int32 or int64; a row is dropped where either is negative; valid destinations differ.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written. IndexError on CPU for a slot past the end.

    Source: SGLang `move_kv_cache`.
    """
    check = Checker("move_kv")
    if not isinstance(caches, (torch.Tensor, Sequence)):
        check.fail("caches", "a tensor or a sequence of tensors", type(caches).__name__, TypeError)
    caches = [caches] if isinstance(caches, torch.Tensor) else list(caches)
    if not caches:
        check.fail("caches", "at least one tensor", "an empty sequence")
    for i, cache in enumerate(caches):
        check.tensor(f"caches[{i}]", cache)
        check_cache(check, f"caches[{i}]", cache, max(cache.dim(), 3))
        check.tensor(f"caches[{i}]", cache, device=caches[0].device)
        if cache.shape[0] * cache.shape[1] != caches[0].shape[0] * caches[0].shape[1]:
            slots = caches[0].shape[0] * caches[0].shape[1]
            check.fail(f"caches[{i}]", f"of {slots} slots, as caches[0] has", f"shape {tuple(cache.shape)}")
        if any(cache is other for other in caches[:i]):
            check.fail(f"caches[{i}]", "a cache of its own", "one that is already in the list")
    check.tensor("src_slots", src_slots, rank=1, dtypes=INDEX_DTYPES, device=caches[0].device)
    check.tensor("dst_slots", dst_slots, shape=(src_slots.shape[0],), dtypes=INDEX_DTYPES, device=caches[0].device)
    move_kv_op(caches, src_slots, dst_slots)
