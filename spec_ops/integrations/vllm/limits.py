"""What the backend refuses by name when an engine starts, so that no token is wrong and no other kernel is used silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from spec_ops.backends.call import AttentionMeta
from spec_ops.backends.registry import REFERENCE, BackendError, device_arch, missing_backends, select_backend
from spec_ops.integrations.vllm.symbols import NAME, version

OTHER = "use another --attention-backend, TRITON_ATTN for example"
OTHER_MLA = "use another --attention-backend, TRITON_MLA for example"
BLOCK_SIZES = (16, 32, 64, 128)
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")


def refuse(what: str, instead: str = OTHER) -> NoReturn:
    raise ValueError(f"--attention-backend {NAME} (vLLM {version()}): {what}; {instead}")


def check_layer(
    *, alibi_slopes: Any, attn_type: Any, kv_cache_dtype: str, others: Mapping[str, Any], instead: str = OTHER
) -> None:
    """Raise ValueError for a layer, given as vLLM gives it to a backend, that our ops do not compute.

    Args:
        others: what only some layers are given.
    """
    kind = getattr(attn_type, "value", attn_type)
    if kind != "decoder":
        refuse(f"attention of type {kind} is not supported", instead)
    if alibi_slopes is not None:
        refuse("ALiBi is not supported", instead)
    if kv_cache_dtype not in CACHE_DTYPES:
        refuse(f"--kv-cache-dtype {kv_cache_dtype} is not supported", f"pass one of {', '.join(CACHE_DTYPES)}")
    if given := [name for name, value in others.items() if value not in (None, False, -1)]:
        refuse(f"layers with {', '.join(given)} are not supported", instead)


def check_engine(config: Any, spec: Any, instead: str = OTHER) -> None:
    """Raise ValueError for what is not supported of an engine's `VllmConfig`, or of the cache of some of its layers.

    Args:
        spec: vLLM's `AttentionSpec`, of `block_size` tokens a page.
    """
    if not 1 <= spec.block_size <= 128:
        refuse(f"pages of {spec.block_size} tokens are not supported", "pass --block-size 64 (16, 32, 64 or 128)")
    parallel = config.parallel_config
    for name, what in (("decode_context_parallel_size", "decode"), ("prefill_context_parallel_size", "prefill")):
        if getattr(parallel, name, 1) > 1:
            refuse(f"{what} context parallelism is not supported", f"leave out --{name.replace('_', '-')}, or {instead}")
    cache = config.cache_config
    if getattr(cache, "calculate_kv_scales", False) and str(cache.cache_dtype).startswith("fp8"):
        refuse("--calculate-kv-scales is not supported: a CUDA graph keeps the scale it recorded", "leave it out")


def cache_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """Of vLLM's `--kv-cache-dtype`."""
    return torch.float8_e4m3fn if name.startswith("fp8") else {"auto": model}.get(name) or getattr(torch, name)


def check_kernels(metas: list[AttentionMeta], device: torch.device, instead: str = OTHER) -> None:
    """Raise ValueError for a call that no kernel computes. On a GPU `reference` is none: right, and far too slow."""
    for meta in dict.fromkeys(metas):
        try:
            chosen = select_backend(meta, device_arch(device), missing=missing_backends())
        except BackendError as error:
            refuse(str(error), instead)
        if device.type == "cuda" and chosen.backend.name == REFERENCE:
            reasons = "; ".join(f"{name} {why}" for name, why in chosen.reasons.items())
            refuse(f"no kernel runs {meta.step} of this model: {reasons}", instead)


def metas_of_layer(impl: Any, dtype: torch.dtype, page_size: int, most: int) -> list[AttentionMeta]:
    """Every call that a layer makes, as far as kernels are selected by it.

    Args:
        impl: the layer's attention, ours. most: queries of a request that are decoded or verified.
    """
    shape = (
        dtype,
        cache_dtype(impl.kv_cache_dtype, dtype),
        impl.num_heads,
        impl.num_kv_heads,
        impl.head_size,
        impl.v_head_size,
    )
    features = (False, impl.window_left >= 0, impl.sinks is not None, impl.softcap > 0)
    steps = [("draft_decode", 1)] + [("target_verify", most)] * (most > 1) + [("extend", 1)] * (not impl.is_mla)
    kind = "mla" if impl.is_mla else "mha"
    return [AttentionMeta(f"{kind}_{step}", *shape, page_size, q_len, *features) for step, q_len in steps]
