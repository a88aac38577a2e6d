"""What FlashInfer's kernels offer beyond the ops: as backends of their own, with a name.

An option is a fact of the backend, not of the call: the ops keep their schemas, a graph says by the backend's name what it
runs, compiled code is cached under it, and `"auto"`, which must not change results, never picks one.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from spec_ops.backends.call import AttentionMeta
from spec_ops.backends.registry import Backend, get_backend, register_backend

_FP8 = torch.float8_e4m3fn
_OFFERS = {
    "flashinfer-trtllm": ("skip_softmax_threshold_scale_factor", "out_dtype"),
    "flashinfer-xqa": ("out_dtype",),
}


def register_variant(
    base: str,
    name: str,
    *,
    skip_softmax_threshold_scale_factor: float | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: float = 1.0,
) -> Backend:
    """Register `base` with other options as the backend `name`, which is then passed as `backend=` and never picked by itself.

    Args:
        base: `"flashinfer-trtllm"` or `"flashinfer-xqa"`.
        name: new among the backends.
        skip_softmax_threshold_scale_factor: trtllm-gen leaves out blocks of keys whose largest weight is below this factor
            over the context's length, relative to the largest so far: faster on long contexts, and approximate, so speculation
            is no longer exact against another backend (arXiv:2512.12087). Positive.
        out_dtype: of the results, instead of the queries': float8_e4m3fn with fp8 caches; trtllm-gen also writes bfloat16 or
            float16 from fp8 caches. GQA only: no MLA kernel writes another dtype than bfloat16.
        out_scale: a float8 result is stored as `value / out_scale`.

    Returns:
        The declaration, as `get_backend(name)` gives it.

    Raises:
        ValueError: `base` offers no such option, no option is given, or a value is out of range; also as `register_backend`.

    Source: FlashInfer `trtllm_batch_decode_with_kv_cache`, `trtllm_batch_context_with_kv_cache`.
    """
    if base not in _OFFERS:
        raise ValueError(f"register_variant: `base` must be one of {sorted(_OFFERS)}, got {base!r}")
    given = {"skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor, "out_dtype": out_dtype}
    options = {option: value for option, value in given.items() if value is not None}
    if not options:
        raise ValueError(f"register_variant: one of {list(_OFFERS[base])} must be given for {base!r}, got none")
    for option in options:
        if option not in _OFFERS[base]:
            raise ValueError(f"register_variant: `{option}` must be None for {base!r}, whose kernels have no such option")
    factor = skip_softmax_threshold_scale_factor
    if factor is not None and not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"register_variant: `skip_softmax_threshold_scale_factor` must be positive and finite, got {factor}")
    allowed = (_FP8,) if base == "flashinfer-xqa" else (_FP8, torch.bfloat16, torch.float16)
    if out_dtype is not None and out_dtype not in allowed:
        raise ValueError(f"register_variant: `out_dtype` must be one of {list(allowed)} for {base!r}, got {out_dtype}")
    if not (math.isfinite(out_scale) and out_scale > 0) or (out_scale != 1.0 and out_dtype != _FP8):
        raise ValueError(f"register_variant: `out_scale` must be positive, and 1 unless `out_dtype` is {_FP8}, got {out_scale}")
    if out_scale != 1.0:
        options["out_scale"] = out_scale

    declared = get_backend(base)
    assert declared is not None

    def constraint(meta: AttentionMeta, arch: int | None) -> str | None:
        if out_dtype is not None and meta.step.startswith("mla_"):
            return f"writes bfloat16 for MLA, not {out_dtype}"
        if out_dtype is not None and meta.kv_dtype != _FP8:
            return f"writes {out_dtype} from fp8 caches only, not from {meta.kv_dtype}"
        return declared.constraint(meta, arch) if declared.constraint is not None else None

    why = "approximates" if factor is not None else f"writes {out_dtype}"
    variant = dataclasses.replace(declared, name=name, constraint=constraint, by_name=why, options=options)
    register_backend(variant)
    return variant
