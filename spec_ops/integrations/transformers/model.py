"""A transformers model as a target, or as a standalone draft, of our round."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from spec_ops.integrations.transformers.attention import NAME
from spec_ops.integrations.transformers.cache import CacheSpec, StepCache, probe
from spec_ops.models.config import KVRows
from spec_ops.models.target import Target, TargetOutput


@dataclass(frozen=True)
class TransformersSizes:
    """`ModelSizes` of a transformers model."""

    vocab_size: int
    hidden_size: int
    kv_rows: KVRows
    aux_layers: tuple[int, ...]


class TransformersModel(Target):
    """A causal language model of transformers behind the interface of `spec_ops.models.Target`.

    Its attention implementation is switched to `"spec_ops"` and it is put into evaluation mode, both for good.

    Args:
        model: with an attention that goes through transformers' attention interface, on one device.
        aux_layers: layers whose inputs an EAGLE-3 head reads; the number of layers stands for the last one's output.

    Raises:
        TypeError, ValueError: naming the argument and what of the model cannot run on these ops.
    """

    config: TransformersSizes

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise TypeError(f"TransformersModel: `model` must be a causal language model, got {type(model).__name__}")
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError("TransformersModel: `model` must be on one device, got a device map over several")
        _check_experts(model)
        model.eval()
        model.set_attn_implementation(NAME)
        self.spec: CacheSpec = probe(model)
        sizes, layers = model.config.get_text_config(), len(self.spec.kv_rows)
        if any(not 0 <= layer <= layers for layer in aux_layers):
            raise ValueError(f"TransformersModel: `aux_layers` must lie in [0, {layers}], got {aux_layers}")
        self.config = TransformersSizes(self.spec.logits_size, sizes.hidden_size, self.spec.kv_rows, tuple(aux_layers))
        self.embed = cast(nn.Embedding, model.get_input_embeddings())
        self.lm_head = cast(nn.Linear, model.get_output_embeddings())
        self.decoder, self.generation_config = model.base_model, model.generation_config
        self.head = _head(model)
        self._inputs: dict[int, torch.Tensor] | None = None  # hidden states a forward is to collect
        if aux_layers:
            self._watch_layers(layers)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention) -> TargetOutput:
        flat = tokens.dim() == 1  # a ragged extend: transformers wants a batch dimension
        if flat:
            tokens, positions = tokens[None], positions[None]
        self._inputs = {}
        # Unwrapped: transformers' decorator reads a registry of all models, and Dynamo would guard on how many there are.
        decode = inspect.unwrap(type(self.decoder).forward)
        hidden = decode(
            self.decoder,
            input_ids=tokens,
            position_ids=positions,
            past_key_values=StepCache(attention, self.spec.latent),
            use_cache=True,
        ).last_hidden_state
        aux = [self._inputs[layer] for layer in self.config.aux_layers]
        self._inputs = None
        features = torch.cat(aux, -1) if aux else None
        if flat:
            return TargetOutput(hidden[0], None if features is None else features[0])
        return TargetOutput(hidden, features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        return self.head(inputs_embeds=rows, use_cache=False).logits.view(*hidden.shape[:-1], -1)

    def _watch_layers(self, count: int) -> None:
        """Collect the input of every watched layer, and the last one's output as that of layer `count`."""
        stacks = [m for m in self.decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
        if len(stacks) != 1:
            raise ValueError(f"TransformersModel: `model` must have one list of {count} layers, found {len(stacks)}")

        def keep(layer: int, hidden) -> None:
            if self._inputs is not None:  # None: somebody else runs the model
                self._inputs[layer] = hidden[0] if isinstance(hidden, tuple) else hidden

        for layer in set(self.config.aux_layers) - {count}:
            stacks[0][layer].register_forward_pre_hook(lambda _module, args, layer=layer: keep(layer, args[0]))
        if count in self.config.aux_layers:
            stacks[0][-1].register_forward_hook(lambda _module, _args, output: keep(count, output))


class _Identity(nn.Module):
    """Stands where the decoder was: the hidden states are already there."""

    def forward(self, *_args, inputs_embeds: torch.Tensor, **_kwargs) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _check_experts(model: PreTrainedModel) -> None:
    """Refuse what cannot be captured: except in bfloat16, transformers' grouped experts read offsets on the host."""
    experts = {getattr(c, "_experts_implementation", None) for c in (model.config, model.config.get_text_config())}
    syncs = "grouped_mm" in experts and model.dtype != torch.bfloat16 and model._can_set_experts_implementation()
    if syncs and model.device.type == "cuda":
        raise ValueError(
            f'TransformersModel: `model` has experts_implementation="grouped_mm", which syncs with the host in {model.dtype} '
            'and fits in no CUDA graph; load it in bfloat16 or call model.set_experts_implementation("batched_mm")'
        )


def _head(model: PreTrainedModel) -> PreTrainedModel:
    """`model` sharing all weights, its decoder replaced by the identity: its own LM head and what its source does to logits
    after it (soft cap, scale)."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Identity()}
    return head
