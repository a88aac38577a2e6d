"""What the backend refuses by name when an engine starts, so that no token is wrong and no other kernel is used silently."""

from __future__ import annotations

from typing import Any

import torch

from spec_ops.backends.call import AttentionMeta
from spec_ops.backends.registry import REFERENCE, BackendError, device_arch, missing_backends, select_backend
from spec_ops.integrations.sglang.symbols import NAME, splits_hand_on, version
from spec_ops.ops.tree import MAX_TREE_TOKENS

CAUSAL, BOTH_WAYS = "decoder", "decoder_bidirectional"  # kinds of attention, of SGLang's `AttentionType`
OTHER = "use another --attention-backend, triton for example"
ALGORITHMS = (None, "EAGLE", "EAGLE3", "NEXTN")
POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")


def refuse(what: str, instead: str) -> None:
    raise ValueError(f"--attention-backend {NAME} (SGLang {version()}): {what}; {instead}")


def check_runner(runner: Any) -> None:
    """Raise ValueError for what is not supported of an engine's `ModelRunner`, a target's or a draft's."""
    args, pool, page_size = runner.server_args, runner.token_to_kv_pool, runner.page_size
    if not 1 <= page_size <= 128:
        refuse(f"pages of {page_size} tokens are not supported", "pass --page-size 64 (1 to 128)")
    if getattr(runner.model_config, "is_encoder_decoder", False):
        refuse("cross attention is not supported", OTHER)
    if type(pool).__name__ not in POOLS:
        hybrid = ", or --disable-hybrid-swa-memory where layers have sliding windows" if "SWA" in type(pool).__name__ else ""
        refuse(f"the KV pool {type(pool).__name__} is not supported", OTHER + hybrid)
    for flag, what in (
        ("enable_two_batch_overlap", "two-batch overlap"),
        ("enable_multi_layer_eagle", "multi-layer EAGLE"),
        ("enable_deterministic_inference", "deterministic inference"),
        ("enable_pdmux", "PD multiplexing"),
    ):
        if getattr(args, flag, False):
            refuse(f"{what} is not supported", f"start without --{flag.replace('_', '-')}, or {OTHER}")
    if max(getattr(args, "attn_cp_size", 1) or 1, getattr(args, "dcp_size", 1) or 1) > 1:
        refuse("context parallelism is not supported", OTHER)
    _check_speculation(args, page_size)
    _check_split(args)
    for layer in attention_layers(runner):
        check_layer(layer, getattr(runner.model_config, "hf_text_config", None))
        if not runner.use_mla_backend:
            _check_widths(layer, pool)
    _check_kernels(runner)


def _check_speculation(args: Any, page_size: int) -> None:
    algorithm = args.speculative_algorithm
    if algorithm not in ALGORITHMS:
        refuse(f"speculation by {algorithm} is not supported", f"use one of {', '.join(filter(None, ALGORITHMS))}, or {OTHER}")
    if algorithm is None:
        return
    nodes, topk, steps = args.speculative_num_draft_tokens, args.speculative_eagle_topk, args.speculative_num_steps
    if nodes > MAX_TREE_TOKENS:
        refuse(f"{nodes} draft tokens are not supported", f"pass --speculative-num-draft-tokens {MAX_TREE_TOKENS} or less")
    if topk > 1 and topk * steps > MAX_TREE_TOKENS:
        refuse(
            f"trees of {topk} branches and {steps} steps are not supported",
            f"branches times steps must be at most {MAX_TREE_TOKENS}",
        )
    if topk > 1 and page_size > 1:
        refuse(f"trees with pages of {page_size} tokens are not supported", "pass --page-size 1, or --speculative-eagle-topk 1")


def _check_split(args: Any) -> None:
    """SGLang's pair of backends (`HybridAttnBackend`) must hand verify's tables and masks on to ours."""
    if args.speculative_algorithm is None or splits_hand_on():
        return
    prefill, decode = args.get_attention_backends()
    if prefill != decode and (decode if args.speculative_attention_mode == "decode" else prefill) == NAME:
        refuse(
            f"speculation whose verify runs here, with {prefill} for prefill and {decode} for decode, is not supported",
            f"pass --attention-backend {NAME} alone, or use a newer SGLang",
        )


def _check_kernels(runner: Any) -> None:
    """On a GPU each step must have a kernel: `reference` is right, and far too slow for an engine."""
    device = torch.device(runner.device)
    pool, config, args = runner.token_to_kv_pool, runner.model_config, runner.server_args
    mla = runner.use_mla_backend
    if mla:
        heads, kv_heads, dim = runner_heads(runner), 1, config.kv_lora_rank + config.qk_rope_head_dim
        v_dim = config.kv_lora_rank
    else:
        heads, kv_heads, dim = runner_heads(runner), pool.head_num, pool.head_dim
        v_dim = getattr(pool, "v_head_dim", dim) or dim
    nodes = args.speculative_num_draft_tokens if args.speculative_algorithm is not None else 1
    tree = args.speculative_algorithm is not None and args.speculative_eagle_topk > 1
    for step, q_len in (("draft_decode", 1), ("target_verify", nodes), ("draft_extend", nodes), ("extend", 1)):
        meta = AttentionMeta(
            f"{'mla' if mla else 'mha'}_{step}", runner.dtype, pool.dtype, heads, kv_heads, dim, v_dim, runner.page_size,
            q_len, tree and step in ("draft_decode", "target_verify"), False, False, False,
        )  # fmt: skip
        try:
            chosen = select_backend(meta, device_arch(device), missing=missing_backends())
        except BackendError as error:
            refuse(str(error), OTHER)
        if device.type == "cuda" and chosen.backend.name == REFERENCE:
            reasons = "; ".join(f"{name} {why}" for name, why in chosen.reasons.items())
            refuse(f"no kernel runs {meta.step} of this model: {reasons}", OTHER)


def attention_layers(runner: Any) -> list[Any]:
    """The model's layers of SGLang's class `RadixAttention`."""
    return [module for module in runner.model.modules() if hasattr(module, "tp_q_head_num")]


def _check_widths(layer: Any, pool: Any) -> None:
    """An ordinary pool has rows of one width. In some models layers with windows have more KV heads, as in MiMo-V2-Flash."""
    heads, dim, v_dim = pool.head_num, pool.head_dim, getattr(pool, "v_head_dim", None) or pool.head_dim
    if (layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim) != (heads, dim, v_dim):
        refuse(
            f"layer {layer.layer_id} has {layer.tp_k_head_num} KV heads with keys {layer.qk_head_dim} and values "
            f"{layer.v_head_dim} wide, where the KV pool holds {heads} with {dim} and {v_dim}",
            OTHER,
        )


def runner_heads(runner: Any) -> int:
    """Query heads of this rank."""
    from_pool = getattr(runner.token_to_kv_pool, "head_num", 1)
    heads, total = runner.model_config.num_attention_heads, runner.model_config.num_key_value_heads
    if runner.use_mla_backend or not total:
        return max(1, heads // max(1, getattr(runner, "tp_size", 1)))
    return from_pool * max(1, heads // total)


def check_layer(layer: Any, config: Any = None) -> None:
    """Raise ValueError for a layer (SGLang's `RadixAttention`) whose attention is another one than our ops compute.

    Args:
        config: the model's own, of its text. Before 0.5.23 all Gemma 3 are said to attend in both directions, which embedding
            models alone do, and images (`check_inputs`).
    """
    kind = kind_of(layer)
    causal = kind == CAUSAL or (kind == BOTH_WAYS and not getattr(config, "use_bidirectional_attention", False))
    if not causal or layer.is_cross_attention:
        refuse(f"layer {layer.layer_id} has attention of type {'cross' if layer.is_cross_attention else kind}", OTHER)
    if getattr(layer, "xai_temperature_len", -1) > 0:
        refuse(f"layer {layer.layer_id} scales logits by length (`xai_temperature_len`)", OTHER)
    method = getattr(layer, "logit_capping_method", "tanh")
    if layer.logit_cap and method != "tanh":
        refuse(f"layer {layer.layer_id} caps logits by {method}", OTHER)


def kind_of(layer: Any) -> str:
    """The name of a layer's attention."""
    return getattr(layer.attn_type, "value", layer.attn_type)


def check_inputs(layer: Any, fb: Any) -> None:
    """Raise ValueError for images in a batch whose tokens see each other in both directions."""
    images = [given for given in getattr(fb, "mm_inputs", None) or () if given is not None]
    if images and kind_of(layer) == BOTH_WAYS and any(given.contains_image_inputs() for given in images):
        refuse(f"layer {layer.layer_id} attends in both directions between the tokens of an image", OTHER)
