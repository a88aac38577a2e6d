"""The operators: schema, fake implementation, validation and public wrapper, one file per family."""

import spec_ops.ops.collectives
import spec_ops.ops.concatenate
import spec_ops.ops.invariant
import spec_ops.ops.linear
import spec_ops.ops.rounding  # noqa: F401  their ops have no public functions
from spec_ops.ops.accept import Accepted, accept_greedy, accept_sampled, accept_sampled_logits
from spec_ops.ops.attention import (
    mha_draft_decode,
    mha_draft_extend,
    mha_extend,
    mha_target_verify,
    mla_draft_decode,
    mla_draft_extend,
    mla_extend,
    mla_target_verify,
)
from spec_ops.ops.kv_cache import append_kv, append_mla_kv, move_kv
from spec_ops.ops.kv_indices import draft_kv_indices, draft_kv_indices_steps, kv_indices, page_table
from spec_ops.ops.lookup import lookup_drafts
from spec_ops.ops.moe import moe_experts, route_experts
from spec_ops.ops.rope import rope_append_kv
from spec_ops.ops.sampling import Sampled, sample_logits, sample_tokens, sampling_probs, sampling_support
from spec_ops.ops.topk import topk_logits
from spec_ops.ops.tree import (
    Tree,
    build_tree,
    full_mask_to_tree_mask,
    qlen_mask_to_tree_mask,
    select_draft_tokens,
    tree_mask_to_full_mask,
    tree_mask_to_qlen_mask,
)

__all__ = [
    "Accepted",
    "Sampled",
    "Tree",
    "accept_greedy",
    "accept_sampled",
    "accept_sampled_logits",
    "append_kv",
    "append_mla_kv",
    "build_tree",
    "draft_kv_indices",
    "draft_kv_indices_steps",
    "full_mask_to_tree_mask",
    "kv_indices",
    "lookup_drafts",
    "mha_draft_decode",
    "mha_draft_extend",
    "mha_extend",
    "mha_target_verify",
    "mla_draft_decode",
    "mla_draft_extend",
    "mla_extend",
    "mla_target_verify",
    "moe_experts",
    "move_kv",
    "page_table",
    "qlen_mask_to_tree_mask",
    "rope_append_kv",
    "route_experts",
    "sample_logits",
    "sample_tokens",
    "sampling_probs",
    "sampling_support",
    "select_draft_tokens",
    "topk_logits",
    "tree_mask_to_full_mask",
    "tree_mask_to_qlen_mask",
]
