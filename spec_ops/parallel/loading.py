"""Checkpoints of which every rank reads its own parts only."""

from __future__ import annotations

from pathlib import Path

import torch

from spec_ops.models.checkpoint import open_tensors
from spec_ops.models.corpus import ByteTokenizer
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.pretrained import pair_on_meta
from spec_ops.models.target import CausalLM
from spec_ops.parallel.group import TensorParallel
from spec_ops.parallel.sharding import shard


def load_pair(
    ranks: TensorParallel,
    path: str | Path | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[CausalLM, Eagle3Draft, ByteTokenizer]:
    """This rank's share of a target and its EAGLE-3 head, and the tokenizer; see `spec_ops.models.load_pair`.

    Args:
        ranks: who shares them.
        path: folder that `save_pair` wrote; default: the pair that the package ships.
        device, dtype: of both models.

    Raises:
        CheckpointError: see `spec_ops.models.load_pair`.
        ValueError: a size that the ranks do not divide, or a tensor of another shape than the configuration says.
    """
    whole, whole_draft, (target_file, draft_file) = pair_on_meta(path)
    target = shard(whole, ranks, tensors=open_tensors(target_file), device=device, dtype=dtype)
    tensors = open_tensors(draft_file)
    return target, shard(whole_draft, ranks, target=target, tensors=tensors, device=device, dtype=dtype), ByteTokenizer()
