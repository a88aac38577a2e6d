"""What fits a target: the draft, and what batch-invariant rounds ask for. Errors name an argument of `Generator`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from spec_ops.backends import push
from spec_ops.backends.call import RAGGED, STEPS, AttentionMeta
from spec_ops.backends.registry import ANY_Q_LEN, device_arch, get_backend, invariant_backend
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.models.config import CacheSizes, LayerAttention
from spec_ops.models.drafts import Draft
from spec_ops.models.target import Target


def check_invariant(target: Target, drafts: bool, config: SpeculationConfig, backend: str, prefill_backend: str | None) -> None:
    """Refuse what is known not to be batch-invariant before anything is compiled."""
    weight = target.embed.weight
    for name, value in (("backend", backend), ("prefill_backend", prefill_backend)):
        known = None if value in (None, "auto") else get_backend(value)
        if known is not None and not known.deterministic:
            raise ValueError(f"Generator: `{name}` must be batch-invariant with `invariant=True`, got {value!r}")
        if known is not None and drafts and config.topk > 1 and not known.tree_paths:
            raise ValueError(
                f"Generator: `config.topk` must be 1 with `invariant=True` and the backend {value!r}, whose paths of trees are "
                f"not chains, got {config.topk}"
            )
    if target.ranks is not None:
        _check_shares(target, weight.device)


def cache_backend(
    sizes: CacheSizes,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    tokens: int,
    tree: bool,
) -> str:
    """The batch-invariant backend of all attention over a model's cache, decided once: two of them differ in their bits.

    Args:
        sizes: of the model. One without `attention`, which says what its layers attend with, gets the backend for every call.
        tokens: most queries of a request, but for prompts.
        tree: whether they may be those of a tree.
    """
    layers = getattr(sizes, "attention", None)
    calls = () if layers is None else _calls(sizes, layers, dtype, cache_dtype, page_size, tokens, tree)
    return invariant_backend(device_arch(device), tuple(dict.fromkeys(calls)))


def _calls(
    sizes: CacheSizes, layers: Sequence[LayerAttention], dtype: torch.dtype, cache_dtype: torch.dtype, page_size: int,
    tokens: int, tree: bool,
) -> Iterator[AttentionMeta]:  # fmt: skip
    """Every kind of call that rounds and prompts make."""
    for layer, rows in zip(layers, sizes.kv_rows, strict=True):
        latent = len(rows) == 1
        for step in (step for step in STEPS if step.startswith("mla_" if latent else "mha_")):
            masked = tree and step.endswith(("_draft_decode", "_target_verify"))
            yield AttentionMeta(
                step, dtype, cache_dtype, layer.num_heads, 1 if latent else rows[0][0], rows[0][-1], layer.v_head_dim,
                page_size, ANY_Q_LEN if step in RAGGED else tokens, masked, layer.window, layer.sinks, layer.softcap,
            )  # fmt: skip


def _check_shares(target: Target, device: torch.device) -> None:
    """Refuse ranks whose sums have no kernel that adds in one order, and models whose eager operations take DTensors."""
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in target.parameters()):
        raise ValueError(
            "Generator: `target` must be whole, or divided by `spec_ops.parallel`, with `invariant=True`, got one that "
            "transformers has divided"
        )
    name = getattr(target.ranks, "name", None)
    if device.type == "cuda" and (name, str(device)) not in push.connected():
        raise ValueError(
            "Generator: `target` must be shared by 2, 4 or 8 GPUs that can write to one another's memory with "
            "`invariant=True`, got ranks that cannot"
        )


def check_lookup(lookup: PromptLookup, config: SpeculationConfig, max_seq_len: int) -> None:
    """A lookup drafts chains, from text that a generator has room for."""
    if config.topk > 1:
        raise ValueError(f"Generator: `config.topk` must be 1 with a PromptLookup, which drafts chains, got {config.topk}")
    if lookup.min_ngram >= max_seq_len:
        raise ValueError(
            f"Generator: `draft.min_ngram` must be below max_seq_len={max_seq_len}, or nothing is ever found, "
            f"got {lookup.min_ngram}"
        )


def check_draft(draft: Draft, target: Target, config: SpeculationConfig) -> None:
    """A draft knows the target's tokens and reads what it gives, lies where it does, and is of its dtype."""
    device, dtype = target.embed.weight.device, target.embed.weight.dtype
    vocab = target.config.vocab_size
    if draft.config.vocab_size != vocab:
        raise ValueError(f"Generator: `draft` must know the target's {vocab} tokens, got {draft.config.vocab_size}")
    if draft.reads is not None:
        width, layers = draft.reads
        if width != target.config.hidden_size:
            raise ValueError(
                f"Generator: `draft` must be a head for the target's hidden size of {target.config.hidden_size}, got one for "
                f"{width}"
            )
        if layers not in (0, given := len(target.config.aux_layers)):
            raise ValueError(
                f"Generator: `draft` must read as many layers as the target's `aux_layers` name, {given}, got one that reads "
                f"{layers}"
            )
    if config.topk > draft.draft_vocab_size:
        raise ValueError(
            f"Generator: `config.topk` must be at most the draft's vocabulary of {draft.draft_vocab_size}, got {config.topk}"
        )
    shared = {id(parameter) for parameter in target.parameters()}
    sizes: Counter[torch.dtype] = Counter()  # of the draft's own parameters, without quantized weights
    for parameter in draft.parameters():
        if parameter.device != device:
            raise ValueError(f"Generator: `draft` must be on {device}, as the target is, got {parameter.device}")
        if parameter.is_floating_point() and parameter.itemsize > 1 and id(parameter) not in shared:
            sizes[parameter.dtype] += parameter.numel()
    # A few parameters may be of another type, such as a router in float32.
    for own, _ in sizes.most_common(1):
        if own != dtype:
            raise ValueError(f"Generator: `draft` must be {dtype}, as the target is, got {own}")
