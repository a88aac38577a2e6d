"""`attn_implementation="spec_ops"`: the attention and the mask function that transformers calls.

A layer of a transformers model calls `past_key_values.update(k, v, layer_idx)` and then the attention function, which is not
given the cache. Here `update` leaves a note for the attention function of the same layer, and returns the new rows unchanged:
models project only these further (DeepSeek-V3 expands latents into heads after `update`). The attention function appends them
to the paged cache and attends there. Reading the note removes it, so a call without an `update` before it (no cache, another
kind of cache, a layer that borrows another layer's KV) is an error and never reads a stale cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, or_masks

from spec_ops.integrations.transformers.experts import register_experts
from spec_ops.models.paged import PagedAttention

NAME = "spec_ops"
# Tensors that every attention function gets through `**kwargs`, and that no attention kernel needs.
_HARMLESS_TENSORS = {"position_ids", "cache_position"}


class LayerCall(NamedTuple):
    """One layer's attention, as transformers describes it.

    Attributes:
        module: the attention module.
        layer: its index.
        query, key, value: `[bs, heads, q_len, dim]` of the new tokens.
        states: what the cache's `update` was given: keys and values, or in an MLA layer latent rows and rotated keys.
        columns: `[bs, q_len]` int32, the KV position of each new token, -1 for padding; None if there is no padding.
        options: `scale`, `window_left`, `sinks`, `softcap` of the attention ops.
    """

    module: nn.Module
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]
    columns: torch.Tensor | None
    options: dict[str, Any]


class Attends(Protocol):
    """A cache that the attention function can hand a layer's call to."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Append, attend, and return `[bs, q_len, heads, v_dim]`."""


class _Note(threading.local):
    """What `update` leaves for the attention call that follows it on the same thread."""

    content: tuple[Attends, int, torch.Tensor, torch.Tensor] | None = None


_NOTE = _Note()


class NoUpdate(RuntimeError):
    """A layer attends without having handed its keys and values to a `SpecCache` just before.

    Attributes:
        layer: its class, with its index if it has one.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"spec_ops attention: {layer} attends without a `SpecCache`; pass `past_key_values=SpecCache(model, ...)` with "
            '`use_cache=True`, or give the model its own attention back: `model.set_attn_implementation("sdpa")`, or '
            "`close()` of the `TransformersGenerator` that holds it"
        )
        self.layer = layer


def leave_note(cache: Attends, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Called by a cache's `update`: the next attention call of this thread belongs to `layer` of `cache`."""
    _NOTE.content = (cache, layer, key, value)


def register() -> None:
    """Make `attn_implementation="spec_ops"` and `experts_implementation="spec_ops"` known to transformers.

    Importing this package calls it; again does no harm.

    Models that are loaded with it, or switched by `model.set_attn_implementation("spec_ops")`, need
    `past_key_values=SpecCache(model, ...)` in `model(...)` and `model.generate(...)`.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, key_positions)
    register_experts()


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let `model` and its parts attend with the implementation `name`; afterwards everything is as before."""
    nested = {key: getattr(model.config, key) for key in model.config.sub_configs}
    before = {"": model.config._attn_implementation}
    before |= {key: config._attn_implementation for key, config in nested.items() if config is not None}
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of `attn_implementation="spec_ops"`, with the signature of transformers' attention interface.

    Args:
        module: the attention module.
        query, key, value: `[bs, heads, q_len, dim]` of the new tokens only.
        attention_mask: what `key_positions` made.
        dropout: must be 0.
        scaling: softmax scale.
        sliding_window: keys that a query sees, its own included; None for all.
        s_aux: `[heads]`, attention sinks.
        softcap: soft cap of the scores.
        is_causal: must not be False.

    Returns:
        `[bs, q_len, heads, v_dim]`, and None for the attention weights, which are never computed.

    Raises:
        ValueError: what these ops do not compute (dropout, attention weights, a bias, a bidirectional or ready-made mask).
        NoUpdate: no `SpecCache` was passed.
    """
    note, _NOTE.content = _NOTE.content, None
    index = getattr(module, "layer_idx", None)  # not every attention module has one
    if note is None or note[1] != index:
        raise NoUpdate(type(module).__name__ if index is None else f"{type(module).__name__} {index}")
    if dropout:
        raise ValueError(f"spec_ops attention: `dropout` must be 0 (call `model.eval()`), got {dropout}")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ValueError(f"spec_ops attention: {type(module).__name__} is not causal")
    if kwargs.get("output_attentions"):
        raise ValueError("spec_ops attention: `output_attentions` must be False: the weights are never computed")
    for name, unknown in kwargs.items():
        if isinstance(unknown, torch.Tensor) and name not in _HARMLESS_TENSORS:
            raise ValueError(f"spec_ops attention: `{name}` is not understood, got a tensor of shape {tuple(unknown.shape)}")
    options = {
        "scale": scaling,
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "sinks": None if s_aux is None else s_aux.float(),
        "softcap": softcap or 0.0,
    }
    cache, layer, *states = note
    columns = _columns(attention_mask, query)
    return cache.attend(LayerCall(module, layer, query, key, value, (states[0], states[1]), columns, options)), None


def _columns(attention_mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    if attention_mask is None:
        return None
    expected = (query.shape[0], 1, 1, query.shape[2])
    if attention_mask.dtype != torch.int32 or attention_mask.shape != expected:
        raise ValueError(
            "spec_ops attention: `attention_mask` must be 2-D, one entry per cached and new token, got "
            f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}: ready-made 4-D masks are not supported"
        )
    return attention_mask[:, 0, 0]


def key_positions(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_unused: Any,
) -> torch.Tensor | None:
    """The mask function of `attn_implementation="spec_ops"`, with the signature of transformers' mask interface.

    Args:
        attention_mask: `[bs, past + q_length]`, non-zero for real tokens, or None.

    Returns:
        `[bs, 1, 1, q_length]` int32 (four dimensions are what transformers hands on untouched): the KV position of each new
        token, counted over the row's real tokens, and -1 for padding. None without a padding mask.

    Raises:
        ValueError: a mask that is neither causal nor a causal sliding window, or `attention_mask` is too short.
    """
    # `probe` has made sure that a local mask is a sliding window: the configuration names the layers' types.
    custom = use_vmap or mask_function.__code__ is _OR_CODE
    if custom or (local_size is None and mask_function is not causal_mask_function):
        raise ValueError(
            "spec_ops attention: masks must be causal, full or sliding, got a mask function of the model or the caller"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape[0] != batch_size or attention_mask.shape[1] < q_length:
        raise ValueError(
            f"spec_ops attention: `attention_mask` must be of shape [{batch_size}, past + {q_length}], "
            f"got {tuple(attention_mask.shape)}"
        )
    real = attention_mask.bool()
    position = torch.where(real, real.cumsum(-1) - 1, -1)
    return position[:, -q_length:].to(torch.int32)[:, None, None]


_OR_CODE = or_masks(causal_mask_function, causal_mask_function).__code__


def append_and_attend(attention: PagedAttention, call: LayerCall, latent: bool) -> torch.Tensor:
    """Run `call` as a layer of the step `attention`. `latent` says that its cache holds MLA latents.

    Returns:
        `[bs, q_len, heads, v_dim]`.
    """
    query = call.query.transpose(1, 2)
    ragged = attention.step == "extend"  # the ops want ragged tokens flat: [total, heads, dim]
    if not latent:
        rows = (query, call.key.transpose(1, 2), call.value.transpose(1, 2))
        q, k, v = (x.flatten(0, 1) for x in rows) if ragged else rows
        out = attention.mha(call.layer, q, k, v, **call.options)
        return out.view(*query.shape[:3], -1)
    w_uk, w_uv = _absorbed_weights(call)
    nope = w_uk.shape[1]
    q = torch.cat([torch.einsum("bqhn,hnr->bqhr", query[..., :nope], w_uk), query[..., nope:]], -1)
    c_kv, k_rope = (states[:, 0] for states in call.states)
    if ragged:
        q, c_kv, k_rope = (x.flatten(0, 1) for x in (q, c_kv, k_rope))
    out = attention.mla(call.layer, q, c_kv, k_rope, **call.options)
    return torch.einsum("bqhr,hvr->bqhv", out.view(*query.shape[:3], -1), w_uv)


def _absorbed_weights(call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`W_UK [heads, nope, rank]` and `W_UV [heads, v_dim, rank]` of an MLA layer (DeepSeek-V2, arXiv:2405.04434)."""
    rank, v_dim = call.states[0].shape[-1], call.value.shape[-1]
    weight = call.module.get_parameter("kv_b_proj.weight").view(call.query.shape[1], -1, rank)
    return weight.split([weight.shape[1] - v_dim, v_dim], 1)


def is_latent(call: LayerCall) -> bool:
    """Whether the layer is MLA, caches latents, and has the keys and values that the absorbed form gives."""
    projection = getattr(call.module, "kv_b_proj", None)
    latent, rope = call.states
    if type(projection) is not nn.Linear or latent.shape[1] != 1 or rope.shape[1] != 1:
        return False
    heads, rank = call.query.shape[1], latent.shape[-1]
    nope = projection.out_features // heads - call.value.shape[-1]
    if projection.in_features != rank or nope < 1 or nope + rope.shape[-1] != call.query.shape[-1]:
        return False
    w_uk, w_uv = _absorbed_weights(call)
    key = torch.cat([torch.einsum("btr,hnr->bhtn", latent[:, 0], w_uk), rope.expand(-1, heads, -1, -1)], -1)
    value = torch.einsum("btr,hvr->bhtv", latent[:, 0], w_uv)
    tolerance = 16 * torch.finfo(key.dtype).eps * max(float(key.abs().max()), float(value.abs().max()))
    return bool((key - call.key).abs().max() <= tolerance and (value - call.value).abs().max() <= tolerance)
