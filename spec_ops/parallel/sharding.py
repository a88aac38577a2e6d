"""Shares of our models: which part of every weight a rank holds, and models made of such parts.

Attention is divided by heads, an MLP by its width, and a mixture by the width of its experts or by expert. What each block
computes on a rank is a part of a sum, which the ranks add up: two sums a layer. A KV head that there are not enough of is held
by several ranks. The latent rows of MLA, the norms, the routers and the embedding are on every rank; the LM head is divided by
tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Draft, Eagle3Draft, MTPDraft, StandaloneDraft
from spec_ops.models.layers import GQA, MLA, MLP, Mixture
from spec_ops.models.quantized import check_plain
from spec_ops.models.target import CausalLM, Target
from spec_ops.parallel.group import TensorParallel
from spec_ops.parallel.layers import VocabParallelHead

_M = TypeVar("_M", bound="Target | Draft")


def shard_config(config: ModelConfig, size: int, *, expert_parallel: bool = False) -> ModelConfig:
    """The sizes of one rank's share, among `size` ranks. Residual stream, layers and vocabulary stay whole.

    Args:
        config: of the whole model.
        size: how many ranks there are.
        expert_parallel: as in `shard`.

    Raises:
        ValueError: naming the size that the ranks do not divide.
    """

    def share(name: str, value: int) -> int:
        if value % size:
            raise ValueError(f"shard: `{name}` must be a multiple of the {size} ranks, got {value}")
        return value // size

    sizes: dict[str, Any] = {
        "num_heads": share("num_heads", config.num_heads),
        "intermediate_size": share("intermediate_size", config.intermediate_size),
    }
    if not config.is_mla:
        heads = config.num_kv_heads
        if heads % size and size % heads:
            raise ValueError(f"shard: `num_kv_heads` must be a multiple or a divisor of the {size} ranks, got {heads}")
        sizes["num_kv_heads"] = max(1, heads // size)
    if (mixture := config.mixture) is not None:
        divided: dict[str, Any] = {
            "shared_intermediate_size": share("mixture.shared_intermediate_size", mixture.shared_intermediate_size)
        }
        if expert_parallel:
            divided["local_experts"] = share("mixture.num_experts", mixture.num_experts)
        else:
            divided["intermediate_size"] = share("mixture.intermediate_size", mixture.intermediate_size)
        sizes["mixture"] = replace(mixture, **divided)
    return replace(config, **sizes)


def shard(
    model: _M,
    ranks: TensorParallel,
    *,
    target: Target | None = None,
    tensors: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    expert_parallel: bool = False,
) -> _M:
    """This rank's share of a model.

    Args:
        model: a `CausalLM`, or a draft of this package. It may be on the meta device if there are `tensors`; it is left alone.
        ranks: who shares it.
        target: for an EAGLE-3 or MTP draft, the share of its target, whose embedding (and LM head) it uses. An EAGLE-3 head may
            have an embedding of its own, which stays whole; its target may be one that transformers has divided.
        tensors: the weights by the names of `state_dict` (for drafts of `own_state_dict`): tensors, or the slices that
            `open_tensors` gives, of which only this rank's parts are read. Default: the model's own.
        device, dtype: of the result; default those of the tensors.
        expert_parallel: a rank holds some of a mixture's experts, whole, instead of a part of each. Fewer and larger products;
            but a round lasts as long as that of the rank that most experts of its tokens are on.

    Returns:
        A model of the same class with the sizes of `shard_config`, whose `ranks` are these; in evaluation mode, and without
        gradients.

    Raises:
        ValueError: another kind of model, a size that the ranks do not divide, a quantized weight (`quantize` the shares
            instead), or a tensor that is missing or of another shape.
    """
    if isinstance(model, StandaloneDraft):
        if not isinstance(model.model, CausalLM):
            raise ValueError(f"shard: `model` must draft with a CausalLM, got {type(model.model).__name__}")
        inner = tensors if tensors is None else {name.removeprefix("model."): tensors[name] for name in tensors}
        options: dict[str, Any] = {"device": device, "dtype": dtype, "expert_parallel": expert_parallel}
        whole: Any = StandaloneDraft(shard(model.model, ranks, tensors=inner, **options))
        whole.ranks = ranks
        return whole.eval()
    if not isinstance(model, (CausalLM, Eagle3Draft, MTPDraft)):
        raise ValueError(f"shard: `model` must be a CausalLM or a draft of spec_ops.models, got {type(model).__name__}")
    if tensors is None:
        check_plain("shard", "model", model, shared=target)
        tensors = model.state_dict() if isinstance(model, CausalLM) else model.own_state_dict()
    config = shard_config(model.config, ranks.size, expert_parallel=expert_parallel)
    with torch.device("meta"):
        share: Any
        if isinstance(model, CausalLM):
            share = CausalLM(config)
        elif target is None:
            raise ValueError(f"shard: `target` must be the share of the target for a {type(model).__name__}, got None")
        elif isinstance(model, Eagle3Draft):
            places = model.draft_to_target
            meta = None if places is None else places.to("meta")
            share = Eagle3Draft(
                config,
                target,
                meta,
                norm_before_residual=model.norm_before_residual,
                norm_before_fc=model.input_norm is not None,
                fc_norm=model.fc_norm is not None,
                norm_output=model.norm_output,
            )
        else:
            share = MTPDraft(config, target)
    state: Mapping[str, Any]
    if target is not None and (isinstance(model, MTPDraft) or model.lm_head is target.lm_head):
        share.lm_head = target.lm_head
        state = {name: value for name, value in share.own_state_dict().items() if not name.startswith("lm_head.")}
    else:
        share.lm_head = VocabParallelHead(config.hidden_size, model.lm_head.out_features, ranks)
        state = share.state_dict() if isinstance(model, CausalLM) else share.own_state_dict()
    cuts = _cuts(share, model.config, ranks)
    loaded = {}
    for name, expected in state.items():
        if name not in tensors:
            raise ValueError(f"shard: `tensors` must have {name!r}, which is missing")
        part = cuts.get(name, Whole()).of(tensors[name])
        if part.shape != expected.shape:
            wanted = f"give a part of shape {list(expected.shape)} to rank {ranks.rank} of {ranks.size}"
            raise ValueError(f"shard: `tensors[{name!r}]` must {wanted}, got {list(part.shape)}")
        # A copy: a view would keep the whole tensor.
        kind = (dtype or part.dtype) if part.is_floating_point() else part.dtype
        loaded[name] = part.to(device or part.device, kind, copy=True, memory_format=torch.contiguous_format)
    share.load_state_dict(loaded, strict=isinstance(model, CausalLM), assign=True)
    if isinstance(share.lm_head, VocabParallelHead):
        share.lm_head.to(share.lm_head.weight.device)  # its buffers, which no checkpoint has
    if target is not None and _has_own_embedding(model, target):
        share.embed = copy.deepcopy(model.embed).to(device, dtype)
    for module in share.modules():
        if isinstance(module, Mixture) and module.first_expert is not None:
            first = module.mixture.local_experts * ranks.rank
            module.first_expert = torch.tensor(first, dtype=torch.int64, device=module.down_proj.device)
    _add_up(share, ranks)
    share.ranks = ranks
    theirs = () if target is None else {id(p) for p in target.parameters()}
    for parameter in share.parameters():
        if id(parameter) not in theirs:
            parameter.requires_grad_(False)
    return share.eval()


def _has_own_embedding(draft: Any, target: Target) -> bool:
    """Whether a draft has another embedding than its target: some checkpoints of EAGLE-3 heads do."""
    own, theirs = draft.embed.weight, target.embed.weight
    if draft.embed is target.embed or own.is_meta or theirs.is_meta:
        return False
    return type(own) is not type(theirs) or own.shape != theirs.shape or not torch.equal(own.to(theirs), theirs)


def _add_up(model: nn.Module, ranks: TensorParallel) -> None:
    """Attention, MLPs and mixtures compute parts of a sum; a mixture's part includes its shared expert."""
    shared = {module.shared for module in model.modules() if isinstance(module, Mixture)}
    for module in model.modules():
        if isinstance(module, (GQA, MLA, MLP, Mixture)) and module not in shared:
            module.register_forward_hook(lambda _module, _inputs, partial: ranks.all_reduce(partial))


@dataclass(frozen=True)
class Whole:
    """All of a tensor."""

    def of(self, tensor: Any) -> torch.Tensor:
        return tensor[:] if tensor_shape(tensor) else torch.as_tensor(tensor[...])


@dataclass(frozen=True)
class Part(Whole):
    """Part `index` of the `count` that dimension `dim` is divided into.

    Attributes:
        index, count: which part.
        dim: of the tensor.
        blocks: the dimension consists of so many tensors, each divided by itself (gate and up projection).
        padded: parts are of one size, the last ones filled up with zeros.
    """

    index: int
    count: int
    dim: int = 0
    blocks: int = 1
    padded: bool = False

    def of(self, tensor: Any) -> torch.Tensor:
        length = tensor_shape(tensor)[self.dim] // self.blocks
        size = -(-length // self.count) if self.padded else length // self.count
        before, found = (slice(None),) * self.dim, []
        for block in range(self.blocks):
            start, end = (min(self.index + more, self.count) * size for more in (0, 1))
            place = (*before, slice(block * length + min(start, length), block * length + min(end, length)))
            found.append(tensor[place])
        part = torch.cat(found, self.dim) if len(found) > 1 else found[0]
        if missing := size * self.blocks - part.shape[self.dim]:
            shape = list(part.shape)
            shape[self.dim] = missing
            part = torch.cat([part, part.new_zeros(shape)], self.dim)
        return part


@dataclass(frozen=True)
class OnFirst(Whole):
    """All of a tensor on rank 0, zeros elsewhere: what a sum over the ranks must add once."""

    rank: int

    def of(self, tensor: Any) -> torch.Tensor:
        whole = super().of(tensor)
        return whole if self.rank == 0 else torch.zeros_like(whole)


def tensor_shape(tensor: Any) -> list[int]:
    """Of a tensor, or of a slice of safetensors."""
    return list(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor.get_shape()


def _cuts(model: nn.Module, whole: ModelConfig, ranks: TensorParallel) -> dict[str, Whole]:
    """By the names of `state_dict`, what a rank holds of each tensor that is divided."""
    rank, size = ranks.rank, ranks.size
    rows, columns = Part(rank, size), Part(rank, size, 1)
    cuts: dict[str, Whole] = {}
    for path, module in model.named_modules():
        parts: dict[str, Whole] = {}
        if isinstance(module, GQA):
            count = min(whole.num_kv_heads, size)
            heads = Part(rank * count // size, count)
            parts = {
                "q_proj.weight": rows,
                "k_proj.weight": heads,
                "v_proj.weight": heads,
                "o_proj.weight": columns,
                "sinks": rows,
            }
        elif isinstance(module, MLA):
            query = "q_proj.weight" if whole.q_lora_rank is None else "q_proj.2.weight"
            parts = {query: rows, "w_uk": rows, "w_uv": rows, "o_proj.weight": columns}
        elif isinstance(module, MLP):
            parts = {"gate_proj.weight": rows, "up_proj.weight": rows, "down_proj.weight": columns}
        elif isinstance(module, Mixture):
            halves = Part(rank, size, 1, blocks=2)
            if module.first_expert is not None:
                parts = dict.fromkeys(("gate_up_proj", "gate_up_bias", "down_proj", "down_bias"), rows)
            else:
                parts = {
                    "gate_up_proj": halves,
                    "gate_up_bias": halves,
                    "down_proj": Part(rank, size, 2),
                    "down_bias": OnFirst(rank),
                }
        elif isinstance(module, VocabParallelHead):
            parts = {"weight": Part(rank, size, padded=True)}
        cuts.update({f"{path}.{name}": part for name, part in parts.items()})
    return cuts
