"""A transformers model as a target, or as a standalone draft, of our round."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from spec_ops.integrations.transformers import experts
from spec_ops.integrations.transformers.attention import NAME, attending
from spec_ops.integrations.transformers.fp8 import reading_as_stored
from spec_ops.integrations.transformers.merging import MergedLinears
from spec_ops.integrations.transformers.parts import (
    GivenHiddenStates,
    as_decoder,
    cache_argument,
    replaced,
    watched,
    with_fixed_rope,
)
from spec_ops.integrations.transformers.probe import (
    Argument,
    CacheSpec,
    Probed,
    StepCache,
    check_logits,
    extend_from_start,
    probe,
)
from spec_ops.integrations.transformers.sharing import HeadCalls, exchanged, ranks_of
from spec_ops.integrations.transformers.torchao_int4 import computing_int4
from spec_ops.integrations.transformers.torchao_rows import check_rows
from spec_ops.models.config import KVRows, LayerAttention
from spec_ops.models.layers import likeliest
from spec_ops.models.paged import PagedKVCache
from spec_ops.models.target import PositionLimit, Target, TargetOutput


@dataclass(frozen=True)
class TransformersSizes:
    """`ModelSizes` of a transformers model."""

    vocab_size: int
    hidden_size: int
    kv_rows: KVRows
    aux_layers: tuple[int, ...]
    attention: tuple[LayerAttention, ...]


class _Watched(threading.local):
    """The inputs of watched layers in this thread's forward. Generators of several threads may share a target."""

    inputs: dict[int, torch.Tensor] | None = None


_WATCHED = _Watched()


class TransformersModel(Target):
    """A causal language model of transformers as a `spec_ops.models.Target`.

    Its attention implementation is switched to `"spec_ops"`, its experts implementation too where `moe_experts` computes what
    its experts do, and it is put into evaluation mode. The weights of linear layers that read one value (queries, keys and
    values; gate and up) become views of one tensor, so that compiled rounds compute them in one product. `close()` undoes all
    of it, once everything that was made of the model is closed.

    Args:
        model: on one device, with an attention that goes through transformers' attention interface.
        aux_layers: layers whose inputs an EAGLE-3 head reads; the number of layers stands for the last layer's output.
        argument: what the caller calls `model`, for messages.

    Attributes:
        config: sizes, for caches and rounds.
        decoder: the part that turns tokens into hidden states.
        spec: what a token takes in a cache.
        generation_config: the model's own.
        ranks: the processes among which transformers has divided it (`DistributedConfig(tp_size=N)`); None for a whole model.
        apart: why linear layers that read one value keep weights of their own, a reason for each name.

    Raises:
        TypeError, ValueError: naming the argument, and what of the model cannot run on these ops.
    """

    config: TransformersSizes
    decoder: PreTrainedModel
    _chooses = False  # whether the LM head alone decides which token is the likeliest

    def __init__(
        self,
        model: PreTrainedModel,
        aux_layers: tuple[int, ...] = (),
        *,
        argument: Argument = Argument("TransformersModel", "model"),  # noqa: B008 (a tuple)
    ) -> None:
        super().__init__()
        self._argument = argument
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise TypeError(f"{argument} must be a causal language model of transformers, got {type(model).__name__}")
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError(f"{argument} must be on one device, got a device map over several")
        _check_experts(model, argument)
        self._bypassed: list[tuple[str, nn.Module, bool]] = [("", model, True)]
        self._check_bypassed()
        self._switched: _Switched | None = _switch(model, self)
        try:
            self._adopt(model, aux_layers)
        except BaseException:
            self.close()
            raise

    def _adopt(self, model: PreTrainedModel, aux_layers: tuple[int, ...]) -> None:
        assert self._switched is not None
        # Kernels of the Hub that compute experts of 8 bits round rows too: nothing to compare with.
        own_experts = None if experts.stored(model) else self._switched.own_experts
        found = probe(model, self._argument, own_experts)
        self.spec: CacheSpec = found.spec
        sizes, layers = model.config.get_text_config(), len(self.spec.kv_rows)
        if any(not 0 <= layer <= layers for layer in aux_layers):
            raise ValueError(f"{self._argument.where}: `aux_layers` must lie in [0, {layers}], got {aux_layers}")
        self.config = TransformersSizes(
            self.spec.logits_size, sizes.hidden_size, self.spec.kv_rows, tuple(aux_layers), found.attention
        )
        self.embed = cast(nn.Embedding, model.get_input_embeddings())
        self.lm_head = cast(nn.Linear, model.get_output_embeddings())
        self.generation_config = model.generation_config
        self.ranks = ranks_of(model)
        # Modules that are not called themselves. The decoder runs its hooks, but not a `forward` of its instance.
        parents = [found.decoder.rsplit(".", cut)[0] for cut in range(1, found.decoder.count(".") + 1)]
        self._bypassed = [(name, model.get_submodule(name), name != found.decoder) for name in ("", *parents, found.decoder)]
        self._check_bypassed()
        # Around the decoder: `head` has the LM head that is there now.
        self._children = [(name, module, dict(module._modules)) for name, module, _ in self._bypassed[:-1]]

        self._merged = self._switched.merge(model, found)
        decoder, self.position_limit = with_fixed_rope(self._merged.decoder)
        if found.table is not None and (self.position_limit is None or found.table < self.position_limit.count):
            self.position_limit = PositionLimit(found.table, "its table of position embeddings ends there")
        self.decoder = as_decoder(cast(PreTrainedModel, self._watch_layers(decoder, layers) if aux_layers else decoder))
        self._cache_argument = cache_argument(self.decoder)
        # The model's own LM head, and what its source does to logits after it (soft cap, scale).
        self.head = replaced(model, found.decoder, GivenHiddenStates(found.output))
        with torch.no_grad():
            pages = PagedKVCache(self.config, 1, len(found.tokens), dtype=self.embed.weight.dtype, device=found.tokens.device)
            step = extend_from_start(pages, len(found.tokens), backend="reference")
            positions = torch.arange(len(found.tokens), device=found.tokens.device)
            hidden = self(found.tokens, positions, step).hidden
            with HeadCalls(self.lm_head) as calls:
                logits = self.logits(hidden)
            check_logits(type(model).__name__, logits, found.logits, self._argument)
            if self.ranks is not None and (head := exchanged(self.lm_head, self.ranks, hidden)) is not None:
                self.lm_head, self._chooses = head, self.ranks.every(calls.alone(hidden, logits))

    @property
    def apart(self) -> dict[str, str]:
        return dict(self._merged.apart)

    def close(self) -> None:
        """Give the model its own attention and experts, its training mode and separate weights back. Calling it again does
        nothing.

        Other `TransformersModel`s of the same model go on working: the last one to be closed restores it.
        """
        switched, self._switched = self._switched, None
        if switched is not None:
            _release(switched, self)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attention) -> TargetOutput:
        return self._run("input_ids", tokens, positions, attention)

    def embedded(self, embeddings: torch.Tensor, positions: torch.Tensor, attention) -> TargetOutput:
        """`forward` with embeddings in the place of tokens.

        Args:
            embeddings: `[..., hidden_size]`.
            positions: as in `forward`.
            attention: as in `forward`.
        """
        return self._run("inputs_embeds", embeddings, positions, attention)

    def _run(self, name: str, inputs: torch.Tensor, positions: torch.Tensor, attention) -> TargetOutput:
        if not torch.compiler.is_compiling():  # the prompts' forward comes first, and is never compiled
            self._check_bypassed()
            self._check_attention()
            self._check_parameters()
        flat = positions.dim() == 1  # a ragged extend: transformers wants a batch dimension
        if flat:
            inputs, positions = inputs[None], positions[None]
        if self.position_limit is not None:
            positions = positions.clamp(max=self.position_limit.count - 1)
        _WATCHED.inputs = {}
        hidden = self.decoder(
            position_ids=positions,
            use_cache=True,
            **{name: inputs, self._cache_argument: StepCache(attention, self.spec.latent)},
        ).last_hidden_state
        aux = [_WATCHED.inputs[layer] for layer in self.config.aux_layers]
        _WATCHED.inputs = None
        features = torch.cat(aux, -1) if aux else None
        if flat:
            return TargetOutput(hidden[0], None if features is None else features[0])
        return TargetOutput(hidden, features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        return self.head(inputs_embeds=rows, use_cache=False).logits.view(*hidden.shape[:-1], -1)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return likeliest(self.lm_head, hidden) if self._chooses else super().argmax(hidden)

    def _check_attention(self) -> None:
        found = self.decoder.config.get_text_config()._attn_implementation
        if self._merged.closed or (found != NAME and self._switched is None):
            raise ValueError(
                f"{self._argument}: was given back by `close()`, or at the end of a `with` block; make a new generator"
            )
        if found != NAME:
            raise ValueError(
                f"{self._argument}: the attention implementation of {type(self.decoder).__name__} must stay {NAME!r}, got "
                f'{found!r}; call `model.set_attn_implementation("{NAME}")`, or make a new generator after `close()`'
            )

    def _check_parameters(self) -> None:
        around = (
            ".".join(filter(None, (name, child))) + " was replaced"
            for name, module, children in self._children
            for child in {**children, **module._modules}
            if children.get(child) is not module._modules.get(child)
        )
        if (problem := next(around, None) or self._merged.check()) is not None:
            raise ValueError(f"{self._argument} must keep its layers while it is taken over: {problem}; make a new generator")

    def _check_bypassed(self) -> None:
        """Refuse hooks and patched forwards that would never run. Those of all other modules do run."""
        for name, module, hooks in self._bypassed:
            where = f"{self._argument.part(name)} ({type(module).__name__})"
            if "forward" in vars(module):
                raise ValueError(
                    f"{where} must not have a `forward` of its own, which would never be called: remove it "
                    "(accelerate's: `accelerate.hooks.remove_hook_from_module`)"
                )
            if hasattr(module, "ct_decompress_hook"):
                raise ValueError(
                    f"{where} must not be compressed by compressed-tensors, whose hook decompresses it on its first forward: "
                    "load it with `read_as_stored(config)`, or call it once before"
                )
            if hooks and (module._forward_hooks or module._forward_pre_hooks):
                raise ValueError(
                    f"{where} must not have forward hooks, which would never be called: rounds call its decoder and its LM "
                    "head one by one; remove the hooks, or hook these two"
                )

    def _watch_layers(self, decoder: nn.Module, count: int) -> nn.Module:
        """`decoder` that collects the inputs of `aux_layers`. The last layer's output counts as the input of layer `count`."""
        stacks = [name for name, m in decoder.named_children() if isinstance(m, nn.ModuleList) and len(m) == count]
        if len(stacks) != 1:
            raise ValueError(f"{self._argument} must have one list of {count} layers, found {len(stacks)}")

        def keep(layer: int, hidden) -> None:
            assert _WATCHED.inputs is not None
            if layer in self.config.aux_layers:
                _WATCHED.inputs[layer] = hidden[0] if isinstance(hidden, tuple) else hidden

        for layer in {min(layer, count - 1) for layer in self.config.aux_layers}:
            name = f"{stacks[0]}.{layer}"
            before = partial(keep, layer)
            after = partial(keep, count) if layer == count - 1 else _ignore
            decoder = replaced(decoder, name, watched(decoder.get_submodule(name), before, after))
        return decoder


def _ignore(_hidden) -> None:
    """Ignores an output."""


@dataclass
class _Switched:
    """A model that attends through our ops.

    Attributes:
        restore: gives it its own attention and experts back.
        own_experts: its own experts implementations; None if it keeps them.
        merged: its linear layers whose weights were laid side by side; None before `merge`.
        holders: the `TransformersModel`s of it that are open. One that was dropped without `close()` does not count.
    """

    restore: Callable[[], None]
    own_experts: dict[str, str | None] | None
    merged: MergedLinears | None = None
    holders: weakref.WeakSet[TransformersModel] = field(default_factory=weakref.WeakSet)

    def merge(self, model: PreTrainedModel, found: Probed) -> MergedLinears:
        """The same for all holders."""
        with _switching:
            if self.merged is None:
                self.merged = MergedLinears(model, found.siblings, found.decoder, found.rowwise)
            return self.merged


# By the id of the model, which lives as long as its entry. Only the holders keep an entry alive, and so the model.
_switched: weakref.WeakValueDictionary[int, _Switched] = weakref.WeakValueDictionary()
_switching = threading.Lock()


def _switch(model: PreTrainedModel, holder: TransformersModel) -> _Switched:
    """Set our attention implementation and evaluation mode, for as long as the model has holders."""
    with _switching:
        switched = _switched.get(id(model))
        if switched is None:
            own_experts = experts.implementations(model) if experts.supported(model) else None
            _switched[id(model)] = switched = _Switched(
                _switch_first(model, own_experts is not None, holder._argument), own_experts
            )
        else:
            model.set_attn_implementation(NAME)  # the user may have changed it since
            if switched.own_experts is not None:
                model.set_experts_implementation(experts.NAME)
            model.eval()
        switched.holders.add(holder)
        return switched


def _release(switched: _Switched, holder: TransformersModel) -> None:
    with _switching:
        switched.holders.discard(holder)
        if not switched.holders:
            for key in [key for key, entry in _switched.items() if entry is switched]:
                del _switched[key]
            if switched.merged is not None:
                switched.merged.restore()
            switched.restore()


def _switch_first(model: PreTrainedModel, switch_experts: bool, argument: Argument) -> Callable[[], None]:
    training = [module for module in model.modules() if module.training]
    check_rows(model, argument)
    with ExitStack() as entered:
        entered.enter_context(attending(model, NAME))  # each may refuse; nothing has changed then
        entered.enter_context(reading_as_stored(model, argument))
        entered.enter_context(computing_int4(model, argument))
        if switch_experts:
            entered.enter_context(experts.using_experts(model, experts.NAME))
        made = entered.pop_all()
    model.eval()

    def restore() -> None:
        made.close()
        for module in training:
            module.training = True

    return restore


def _check_experts(model: PreTrainedModel, argument: Argument) -> None:
    """Refuse what no CUDA graph can capture: except in bfloat16, transformers' grouped experts read offsets on the host."""
    if model.device.type != "cuda" or not experts.present(model) or experts.supported(model):
        return
    own = {getattr(c, "_experts_implementation", None) for c in (model.config, model.config.get_text_config())}
    syncs = "grouped_mm" in own and model.dtype != torch.bfloat16 and model._can_set_experts_implementation()
    if syncs:
        raise ValueError(
            f'{argument} must not have experts_implementation="grouped_mm" in {model.dtype}, which syncs with the host and '
            'fits in no CUDA graph; load it in bfloat16 or call model.set_experts_implementation("batched_mm")'
        )
