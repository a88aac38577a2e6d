"""Reference tree construction by comparing all pairs of nodes."""

from __future__ import annotations

import torch


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """`[..., n]` bool to int64 words, column `j` as bit `j` (bit 63 is the sign bit)."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return (mask.long() << columns).sum(-1)


def full_mask_words(mask, prefix_lens, num_tokens: int):
    columns = prefix_lens.long() + num_tokens  # of each request
    starts = torch.cumsum(num_tokens * columns, 0) - num_tokens * columns
    node = torch.arange(num_tokens, device=mask.device)
    at = (starts + prefix_lens)[:, None, None] + node[:, None] * columns[:, None, None] + node
    if mask.device.type == "cpu" and at.numel() and not 0 <= int(at.min()) <= int(at.max()) < mask.numel():
        raise IndexError(
            f"full_mask_to_tree_mask: `mask` must hold {int(at.max()) + 1} entries for `prefix_lens` {prefix_lens.tolist()}, "
            f"got {mask.numel()}"
        )
    return pack_bits(mask[at])


def select_draft_tokens(scores, tokens, num_tokens: int):
    # A stable sort, not topk: on a tie (child probability 1) the parent, which has the lower index, must come first.
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_tokens]
    selected = best.sort(dim=1).values
    return tokens.gather(1, selected).long().contiguous(), selected.contiguous()


def build_tree(parent_list, selected_index, seq_lens, topk: int):
    bs, drafts = selected_index.shape
    device = selected_index.device
    slot = selected_index // topk  # parent slot of each candidate; 0 is the root
    candidate = parent_list.gather(1, slot.clamp(0, parent_list.shape[1] - 1)) if parent_list.shape[1] else slot
    match = candidate[:, :, None] == selected_index[:, None, :]
    found = match.any(-1) & (slot < parent_list.shape[1])
    if device.type == "cpu" and bool((selected_index.diff(dim=1) <= 0).any()):
        raise ValueError("build_tree: `selected_index` must be strictly ascending, got another order")
    if device.type == "cpu" and bool(((slot > 0) & ~found).any()):
        raise ValueError("build_tree: `selected_index` must hold the parent of every selected candidate, got an orphan")
    parents = torch.where((slot > 0) & found, match.to(torch.int8).argmax(-1) + 1, 0)
    parents = torch.cat([parents.new_full((bs, 1), -1), parents], 1)

    node = torch.arange(drafts + 1, device=device)
    child_of = parents[:, None, :] == node[None, :, None]  # [bs, parent, child]
    reach = child_of.transpose(1, 2) | torch.eye(drafts + 1, dtype=torch.bool, device=device)
    for _ in range(drafts.bit_length()):  # transitive closure by squaring
        reach = torch.bmm(reach.float(), reach.float()) > 0
    depth = reach.sum(-1) - 1

    none = drafts + 1
    first = torch.where(child_of, node, none).amin(-1)
    sibling = (parents[:, :, None] == parents[:, None, :]) & (node[None, :] > node[:, None])
    following = torch.where(sibling, node, none).amin(-1)
    return (
        parents,
        seq_lens.long()[:, None] + depth,
        pack_bits(reach),
        torch.where(first < none, first, -1),
        torch.where(following < none, following, -1),
    )
