"""Attention steps of speculative decoding over a paged KV cache.

Eight ops: {draft_decode, target_verify, draft_extend, extend} for MHA/GQA (`mha_`) and for absorbed MLA (`mla_`). All are
pure. The first three take `q_len` queries per request, uniform over the batch; `extend` (prefill) takes ragged queries.

Common contract (FlashInfer's and TensorRT-LLM's conventions):

* `seq_lens[b]` is the KV length attended, **this step's own tokens included** (append first, then attend).
* Without a tree mask, queries are causal and aligned to the end: query `j` of `q_len` sees KV positions
  `<= seq_lens[b] - q_len + j`.
* With `tree_mask [bs, q_len] int64`, the last `mask_len` KV positions are draft positions: bit `j` of a query's word says
  that it sees draft position `j`; everything before is visible. A row must hold the query itself and all its ancestors
  (bits in topological order, as `build_tree` makes them), so no slot is unseen where there are as many queries as draft
  positions. Bits from `mask_len` on mean nothing.
* `window_left` (-1: none) hides keys more than that many positions before the query. Positions follow tree *depth*, not slot
  index: the depth of a draft key, seen from a query, is the number of that query's ancestors before it.
* `sinks [num_q_heads]` (any of the three float dtypes) are logits added to the softmax denominator alone (gpt-oss).
* `softcap` (0: none) replaces a logit `x` by `softcap * tanh(x / softcap)`.
* A query that sees nothing gives exact zeros, so padded rows are `seq_lens[b] == 0` (or 1).
* Keys and values that no query of their request sees influence no result, even if they are NaN: positions from `seq_lens[b]`
  on, those before every query's window, slots of a tree that are on no query's path. A page without a visible key may have any
  id; memory of other pages may be read, but is ignored. (This holds for `reference` and our own kernels. FlashInfer's follow
  every page up to the length.) A NaN or an infinity that one query sees may reach the other queries of its request: they share
  products, in which 0 times NaN is NaN.
* A `window_left` that no length reaches, 2^31 - 1 for example, means no window.
* `kv_indptr`/`kv_indices` (CSR of token slots), `seq_lens_cpu` and `max_seq_len` are read by some kernels only; every
  attention step accepts them so that naive code can pass all it has.
* `deterministic=True` is the batch-invariant mode: a query's result depends, to the last bit, on that query and on the keys it
  sees in their order, and on nothing else. Other requests, the number of queries, the step (a chain's verify, its decode and a
  ragged extend agree), pages and the slots of a tree do not matter: a node of a tree gets the bits that the chain along its
  path would get. The mode selects a backend that declares it, `triton-deterministic` (CUDA) or `reference-deterministic`
  (CPU). Passes keep that backend; those that change a call's number of queries change no bit. The mode covers attention alone;
  for everything else there is `spec_ops.compile(..., invariant=True)`. For MLA on Hopper `backend="triton-mla-pieces"` is
  as invariant and faster, with other bits: all calls on a cache must name it.
* `out` is a contiguous tensor of the result's shape and dtype, into which the result is written; it is returned too. It must
  not overlap the queries or a cache. Our own kernels write there directly; results of some other packages are copied. With
  `out`, `seq_lens`, `block_tables`, `tree_mask` and `q_indptr` may be longer than the batch (with ragged queries: than
  `seq_lens`), like the static buffers of engines; the rows past it are not read. In compiled code, `out` is a copy at the end,
  which Inductor removes where it can.

Semantics follow SGLang 0.5 EAGLE (`srt/speculative`), FlashInfer 0.7 `trtllm_batch_decode_with_kv_cache[_mla]`, and for the
absorbed MLA form DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from spec_ops.backends.call import RAGGED, AttentionCall
from spec_ops.backends.registry import output_dtype, plans_on_host, run_attention
from spec_ops.ops._attention_checks import check_apart, check_mask_len, check_options, check_out, check_tensors
from spec_ops.ops._library import define_op, fakes_check
from spec_ops.ops._passed import Passed
from spec_ops.ops._validate import Checker

_TABLES = "Tensor block_tables, Tensor seq_lens"
_OPTIONAL = "Tensor? kv_indptr, Tensor? kv_indices, Tensor? seq_lens_cpu"
_TREE = "Tensor? tree_mask, SymInt mask_len"
_RAGGED = "Tensor q_indptr, SymInt max_q_len"
_SOFTMAX = "float scale, int window_left, Tensor? sinks, float softcap"
_MHA_TAIL = "float k_scale, float v_scale, SymInt? max_seq_len, str backend"
_MLA_TAIL = "float kv_scale, SymInt? max_seq_len, str backend"
_MHA_HEAD = "Tensor q, Tensor k_cache, Tensor v_cache"
_MLA_HEAD = "Tensor q, Tensor kv_cache, int kv_lora_rank"

STEPS = ("draft_decode", "target_verify", "draft_extend", "extend")


def _schema(kind: str, step: str, suffix: str) -> tuple[str, str]:
    """The op's name, and its schema up to its result."""
    head, tail = (_MHA_HEAD, _MHA_TAIL) if kind == "mha" else (_MLA_HEAD, _MLA_TAIL)
    queries = _RAGGED if step == "extend" else _TREE
    name = f"{kind}_{step}"
    return name, f"{name}{suffix}({head}, {_TABLES}, {queries}, {_OPTIONAL}, {_SOFTMAX}, {tail}"


def _define(kind: str, step: str, overload: str = "", tags: tuple[torch.Tag, ...] = ()) -> torch._ops.OpOverload:
    name, schema = _schema(kind, step, overload)

    def impl(*args):
        return run_attention(AttentionCall.of(name, args))

    def fake(*args):
        call = AttentionCall.of(name, args)
        check_tensors(call)
        return call.q.new_empty(*call.q.shape[:-1], call.v_head_dim, dtype=output_dtype(call.backend, call.q.dtype))

    return define_op(f"{schema}) -> Tensor", impl, fake, tags=tags, invariant="backend")


def _define_out(kind: str, step: str) -> torch._ops.OpOverload:
    name, schema = _schema(kind, step, "_out")

    def impl(*args):
        call = AttentionCall.of(name, args[:-1])
        call.out = args[-1]
        run_attention(call)

    def fake(*args):
        call = AttentionCall.of(name, args[:-1])
        check_tensors(call)
        check_out(call, args[-1])

    return define_op(f"{schema}, Tensor(a!) out) -> ()", impl, fake, invariant="backend")


OPS = {f"{kind}_{step}": _define(kind, step) for kind in ("mha", "mla") for step in STEPS}
# The same ops for backends that plan on the host: Inductor keeps calls with this tag out of CUDA graphs.
HOST_PLAN_OPS = {
    f"{kind}_{step}": _define(kind, step, ".host_plan", (torch.Tag.cudagraph_unsafe,))
    for kind in ("mha", "mla")
    for step in STEPS
}


# What `out=` calls outside of a compiled function, where passes have nothing to find. Not overloads: where two overloads have
# one signature and there is a third, the process aborts when it ends (torch 2.13).
OUT_OPS = {f"{kind}_{step}": _define_out(kind, step) for kind in ("mha", "mla") for step in STEPS}


def _of_batch(name: str, args: tuple) -> tuple:
    """`args` with the rows of the batch alone, of tensors that may be an engine's buffers for the largest one."""
    q, cache, second, tables, lens, queries, *rest = args
    if name in RAGGED:
        queries = _rows(queries, _rows_of(lens, 0) + 1)
    else:
        lens, queries = _rows(lens, _rows_of(q, 0)), _rows(queries, _rows_of(q, 0))
    return (q, cache, second, _rows(tables, _rows_of(lens, 0)), lens, queries, *rest)


def _rows_of(value: object, default: int) -> int:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else default


def _rows(value: object, count: int) -> object:
    """What is no tensor stays as it is, for the checks to name."""
    return value[:count] if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > count else value


def _checked(name: str, deterministic: object, out: torch.Tensor | None, *args: Any) -> tuple:
    """Check a call. Returns what the op takes in place of numbers and names that the user gave: the span of queries or of the
    tree mask, the softmax scale, the window, the soft cap, the caches' scales, the longest length and the backend."""
    if not fakes_check():
        check_tensors(AttentionCall.of(name, args))
    if out is not None:
        check_out(AttentionCall.of(name, args), out)
    q, cache, second, _, _, queries, span, _, _, _, scale, window_left, _, softcap = args[:14]
    scales, max_seq_len, backend = args[14:-2], args[-2], args[-1]
    check = Checker(name)
    mha = name.startswith("mha_")
    if mha and scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    window_left, backend = check_options(check, scale, window_left, softcap, max_seq_len, backend, deterministic, q.device)
    if mha:
        k_scale = check.scale("k_scale", scales[0], "k_cache", cache.dtype)
        scales = (k_scale, check.scale("v_scale", scales[1], "v_cache", second.dtype))
    else:
        scales = (check.scale("kv_scale", scales[0], "kv_cache", cache.dtype),)
    if name in RAGGED:
        check.integer("max_q_len", span, 1)
    else:
        span = check_mask_len(check, q.shape[1], queries, span)
    return span, float(scale), window_left, float(softcap), *scales, max_seq_len, backend


_passed = Passed(_checked)


def _enter(name: str, args: tuple, deterministic: object, out: torch.Tensor | None) -> torch.Tensor:
    """Check a public call, and make it a call of the op.

    Dynamo traces this in every layer: hence a tuple, and an `AttentionCall` only where tensors are checked here.

    Args:
        args: in the order of the op's schema; None where the user left an argument to its default.
    """
    if out is not None:
        args = _of_batch(name, args)
    checked = (_checked if fakes_check() else _passed)(name, deterministic, out, *args)
    span, scale, window_left, softcap, *rest = checked
    queries, optional, sinks = args[5], args[7:10], args[12]
    checked = (*args[:5], queries, span, *optional, scale, window_left, sinks, softcap, *rest)
    if out is not None and not torch.compiler.is_compiling():
        check_apart(AttentionCall.of(name, checked), out)
        OUT_OPS[name](*checked, out)
        return out
    # A named backend that plans on the host must not end up inside a CUDA graph: it has an overload of its own.
    op = HOST_PLAN_OPS[name] if plans_on_host(rest[-1]) else OPS[name]
    result = op(*checked)
    return result if out is None else out.copy_(result)


def mha_draft_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    tree_mask: torch.Tensor | None = None,
    mask_len: int | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One draft step: `q_len` is 1 for a chain, the tree's width K for a tree (with `tree_mask`).

    Args:
        q: `[bs, q_len, num_q_heads, head_dim]` float32, bfloat16 or float16.
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, head_dim]` (`v_cache` may have its own last dimension), dtype
            of `q` or float8_e4m3fn; any strides whose last is 1; page_size 1 to 128.
        block_tables: `[bs, max_pages]` int32, page ids; entries of pages whose keys no query sees may be anything.
        seq_lens: `[bs]` int32, KV length attended, own tokens included.
        tree_mask, mask_len: `[bs, q_len]` int64 bit mask over the last `mask_len` (default `q_len`, at most 64) KV positions.
        kv_indptr, kv_indices: `[bs + 1]` int32 and `[n]`, the same KV as CSR token slots, for kernels that want that.
        seq_lens_cpu: `[bs]`, host copy of `seq_lens`, for kernels that plan on the host.
        scale: softmax scale; default `1 / sqrt(head_dim)`.
        window_left, sinks, softcap: see the module docstring.
        k_scale, v_scale: dequantization scales (real = stored * scale); required for fp8 caches, refused otherwise.
        max_seq_len: static bound of `seq_lens`; default the width of `block_tables`.
        backend: `"auto"` or a backend's name, which then never falls back.
        deterministic: see the module docstring; refused together with the name of a backend that is not batch-invariant.
        out: where to write the result, see the module docstring.

    Returns:
        `[bs, q_len, num_q_heads, v_head_dim]`, dtype of `q`.

    Raises:
        TypeError, ValueError: naming the argument. BackendError: the named backend cannot run this call.

    Source: SGLang EAGLE draft decode; FlashInfer `trtllm_batch_decode_with_kv_cache`.
    """
    return _enter(
        "mha_draft_decode",
        (q, k_cache, v_cache, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, k_scale, v_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip


def mha_target_verify(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    tree_mask: torch.Tensor | None = None,
    mask_len: int | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Target verification of `q_len = D` tokens per request, root included; a chain without, a tree with `tree_mask`.

    Arguments, result and errors as `mha_draft_decode`; `seq_lens` is `committed_lens + D`.
    Source: SGLang EAGLE target verify.
    """
    return _enter(
        "mha_target_verify",
        (q, k_cache, v_cache, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, k_scale, v_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip


def mha_draft_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    tree_mask: torch.Tensor | None = None,
    mask_len: int | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draft extend after acceptance: a uniform, short `q_len` per request on the draft's own cache.

    Rows past the accepted length are computed and ignored: the price of a static shape. Arguments, result and errors as
    `mha_draft_decode`. Source: SGLang "draft extend v2" (sglang#24566, sglang#25002).
    """
    return _enter(
        "mha_draft_extend",
        (q, k_cache, v_cache, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, k_scale, v_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip


def mha_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    max_q_len: int,
    *,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Ragged causal extend (prefill): request `b` owns query rows `q_indptr[b] : q_indptr[b + 1]`.

    Args:
        q: `[total_q, num_q_heads, head_dim]`; rows at or past `q_indptr[-1]` are padding and give zeros.
        q_indptr: `[bs + 1]` int32, non-decreasing, from 0.
        max_q_len: bound of every request's query count; a trace-time constant.
        Others: as in `mha_draft_decode`.

    Returns:
        `[total_q, num_q_heads, v_head_dim]`, dtype of `q`.

    Raises:
        TypeError, ValueError, BackendError: as in `mha_draft_decode`.

    Source: FlashInfer `trtllm_batch_context_with_kv_cache`.
    """
    return _enter(
        "mha_extend",
        (q, k_cache, v_cache, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, k_scale, v_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip


def mla_draft_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    mask_len: int | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    kv_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One draft step in absorbed MLA: keys are the whole cache row, values its first `kv_lora_rank` entries.

    Args:
        q: `[bs, q_len, num_heads, kv_lora_rank + rope_dim]`, the absorbed query (`q_nope @ W_UK` beside `q_rope`).
        kv_cache: `[num_pages, page_size, kv_lora_rank + rope_dim]`, dtype of `q` or float8_e4m3fn.
        kv_lora_rank: width of the latent part.
        scale: softmax scale, required: it is `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)` (times any RoPE scaling), which
            the absorbed shapes no longer show.
        kv_scale: dequantization scale of the cache; required for fp8, refused otherwise.
        Others: as in `mha_draft_decode`.

    Returns:
        `[bs, q_len, num_heads, kv_lora_rank]`, dtype of `q` (the caller applies `W_UV`).

    Raises:
        TypeError, ValueError, BackendError: as in `mha_draft_decode`.

    Source: DeepSeek-V2 (arXiv:2405.04434); FlashInfer `trtllm_batch_decode_with_kv_cache_mla`.
    """
    return _enter(
        "mla_draft_decode",
        (q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, kv_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip


def mla_target_verify(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    mask_len: int | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    kv_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Target verification in absorbed MLA; arguments, result, errors and source as `mla_draft_decode`."""
    return _enter(
        "mla_target_verify",
        (q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, kv_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip


def mla_draft_extend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    mask_len: int | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    kv_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draft extend in absorbed MLA; arguments, result, errors and source as `mla_draft_decode`."""
    return _enter(
        "mla_draft_extend",
        (q, kv_cache, kv_lora_rank, block_tables, seq_lens, tree_mask, mask_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, kv_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip


def mla_extend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    max_q_len: int,
    *,
    scale: float,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    seq_lens_cpu: torch.Tensor | None = None,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    kv_scale: float | None = None,
    max_seq_len: int | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Ragged causal extend (prefill) in absorbed MLA: `q [total_q, num_heads, kv_lora_rank + rope_dim]`.

    `q_indptr` and `max_q_len` as in `mha_extend`, others as in `mla_draft_decode`.
    Returns `[total_q, num_heads, kv_lora_rank]`; errors and source as `mla_draft_decode`.
    """
    return _enter(
        "mla_extend",
        (q, kv_cache, kv_lora_rank, block_tables, seq_lens, q_indptr, max_q_len, kv_indptr, kv_indices, seq_lens_cpu, scale,
         window_left, sinks, softcap, kv_scale, max_seq_len, backend),
        deterministic,
        out,
    )  # fmt: skip
