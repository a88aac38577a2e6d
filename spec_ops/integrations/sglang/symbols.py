"""The symbols of SGLang that the plug-in uses, and whether an installed SGLang has them."""

from __future__ import annotations

from pathlib import Path

from spec_ops.integrations.engine_symbols import Engine, Symbol, find

NAME = "spec_ops"
VERIFY_MASK_FILE = "layers/attention/verify_mask.py"  # since some release between the two: backends declare their mask's layout
ENGINE = Engine("SGLang", "sglang/srt", ("sglang",), "0.5.14", "0.5.23", f"--attention-backend {NAME}")

_BACKEND = "layers/attention/base_attn_backend.py"
_FACTORY = "speculative/draft_utils.py"
COMMON = (
    Symbol("plugins/hook_registry.py", "HookRegistry.register", ("target", "hook", "hook_type")),
    Symbol("plugins/hook_registry.py", "HookRegistry.apply_hooks"),
    Symbol("plugins/hook_registry.py", "HookType", ("AROUND",)),
    Symbol("layers/attention/attention_registry.py", "register_attention_backend", ("name",)),
    Symbol("layers/attention/triton_backend.py", "TritonAttnBackend"),
    Symbol(_BACKEND, "AttentionBackend.init_forward_metadata", ("forward_batch",)),
    Symbol(_BACKEND, "AttentionBackend.init_forward_metadata_out_graph", ("forward_batch", "in_capture")),
    Symbol(_BACKEND, "AttentionBackend.init_forward_metadata_in_graph", ("forward_batch",)),
    Symbol(_BACKEND, "AttentionBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    Symbol(_BACKEND, "AttentionBackend.get_cuda_graph_seq_len_fill_value"),
    Symbol(_BACKEND, "AttentionBackend.update_verify_buffers_to_fill_after_draft", ("spec_info", "cuda_graph_bs")),
    Symbol(_BACKEND, "AttentionBackend.forward_decode", ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs")),
    Symbol(_BACKEND, "AttentionBackend.forward_extend", ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs")),
    Symbol(_BACKEND, "AttentionBackend", ("needs_cpu_seq_lens",)),
    Symbol(_FACTORY, "DraftBackendFactory.create_decode_backend"),
    Symbol(_FACTORY, "DraftBackendFactory.create_draft_extend_backend"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_decode_or_idle"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_target_verify"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_draft_extend_v2"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_extend", ("include_draft_extend_v2",)),
    Symbol("mem_cache/memory_pool.py", "KVWriteLoc", ("loc", "swa_loc")),
    Symbol("mem_cache/memory_pool.py", "MHATokenToKVPool.get_kv_buffer", ("layer_id",)),
    Symbol(
        "mem_cache/memory_pool.py",
        "MHATokenToKVPool.set_kv_buffer",
        ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
    ),
    Symbol("mem_cache/memory_pool.py", "MLATokenToKVPool.get_key_buffer", ("layer_id",)),
    Symbol("mem_cache/memory_pool.py", "MLATokenToKVPool.set_kv_buffer", ("layer", "loc_info", "cache_k", "cache_v")),
    Symbol("mem_cache/memory_pool.py", "MLATokenToKVPool.set_mla_kv_buffer", ("layer", "cache_k_nope", "cache_k_rope")),
    Symbol(
        "models/deepseek_common/attention_backend_handler.py",
        "AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
    ),
    Symbol("models/deepseek_common/attention_forward_methods/forward_methods.py", "AttnForwardMethod", ("MLA",)),
)
BEFORE_VERIFY_MASK = (
    Symbol("server_args.py", "add_attention_backend_choices", ("choices",)),
    Symbol("server_args.py", "ServerArgs.get_attention_backends"),
    Symbol(_BACKEND, "AttentionBackend.get_verify_buffers_to_fill_after_draft"),
    Symbol(_FACTORY, "DraftBackendFactory.__init__", ("server_args", "draft_model_runner", "topk", "speculative_num_steps")),
    Symbol(
        "speculative/eagle_utils.py", "build_tree_kernel_efficient", ("num_verify_tokens", "tree_mask_mode", "tree_mask_buf")
    ),
    Symbol("speculative/eagle_utils.py", "TreeMaskMode", ("QLEN_ONLY",)),
)
WITH_VERIFY_MASK = (
    Symbol("arg_groups/choices.py", "add_attention_backend_choices"),
    Symbol("runtime_context.py", "attention_backends"),
    Symbol("runtime_context.py", "get_spec"),
    Symbol(_BACKEND, "AttentionBackend.verify_mask"),
    Symbol(_FACTORY, "DraftBackendFactory.__init__", ("draft_model_runner", "topk", "speculative_num_steps")),
    Symbol(VERIFY_MASK_FILE, "VerifyMask", ("buffer", "mode", "max_bs", "is_read")),
    Symbol("speculative/eagle_utils.py", "TreeMaskMode"),
)
# What SGLang's pair of different backends for prefill and decode hands on to the two; before some release nothing of it.
_SPLIT = tuple(
    Symbol("layers/attention/hybrid_attn_backend.py", f"HybridAttnBackend.{name}")
    for name in ("init_forward_metadata_in_graph", "verify_mask")
)

root, version, in_range = ENGINE.root, ENGINE.version, ENGINE.in_range


def has_verify_mask(folder: Path) -> bool:
    return (folder / VERIFY_MASK_FILE).is_file()


def splits_hand_on() -> bool:
    """Whether verify may run in one of two backends: a graph's metadata and the mask reach it."""
    folder = root()
    if folder is None or not (folder / _SPLIT[0].file).is_file():
        return False
    return all(find(folder, symbol) is not None for symbol in _SPLIT)


def table(folder: Path) -> tuple[Symbol, ...]:
    """What the plug-in uses of the SGLang in `folder`."""
    return COMMON + (WITH_VERIFY_MASK if has_verify_mask(folder) else BEFORE_VERIFY_MASK)


def problems(folder: Path | None = None, release: str | None = None) -> list[str]:
    """Why the plug-in does not fit an SGLang: its version, or symbols of it that are missing or changed; empty if it fits.

    Args:
        folder: its `sglang/srt`; default: of the installed one, as `release` is.
        release: its version.
    """
    folder = root() if folder is None else folder
    release = version() if release is None else release
    return ENGINE.problems(folder, release, table(folder) if folder is not None else ())


def report() -> tuple[str, bool]:
    """What `python -m spec_ops check sglang` prints, and whether the plug-in fits."""
    folder = root()
    used = table(folder) if folder is not None else ()
    return ENGINE.report(problems(), version(), used, f"sglang serve ... --attention-backend {NAME} --page-size 64")
