"""Draft trees: choosing the best candidates, building the tree, and converting its mask.

A tree of `D` tokens has node 0 as root (the last committed token) and parents before children. Its attention mask is one
int64 word per node: bit `j` of node `i` says that `i` sees node `j` (itself and its ancestors). Hence `D <= 64`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops._validate import INDEX_DTYPES, Checker
from spec_ops.ops.reference import tree as reference

MAX_TREE_TOKENS = 64


class Tree(NamedTuple):
    """A batch of draft trees; every field is `[bs, D]` int64.

    Attributes:
        parents: parent of each node, -1 for the root.
        positions: committed length + depth: the RoPE position of each node.
        tree_mask: bit mask of visible nodes (itself and its ancestors).
        first_child: lowest child of each node, -1 for none.
        next_sibling: next node with the same parent, -1 for none.
    """

    parents: torch.Tensor
    positions: torch.Tensor
    tree_mask: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor


select_draft_tokens_op = define_op(
    "select_draft_tokens(Tensor scores, Tensor tokens, int num_tokens) -> (Tensor, Tensor)",
    reference.select_draft_tokens,
    lambda scores, tokens, num_tokens: (
        tokens.new_empty(scores.shape[0], num_tokens, dtype=torch.int64),
        tokens.new_empty(scores.shape[0], num_tokens, dtype=torch.int64),
    ),
    cuda="spec_ops.backends.triton.tree.build:select_draft_tokens",
    invariant=True,
)


def _build_tree_fake(parent_list, selected_index, seq_lens, topk):
    shape = (selected_index.shape[0], selected_index.shape[1] + 1)
    return tuple(selected_index.new_empty(shape, dtype=torch.int64) for _ in Tree._fields)


build_tree_op = define_op(
    "build_tree(Tensor parent_list, Tensor selected_index, Tensor seq_lens, int topk) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference.build_tree,
    _build_tree_fake,
    cuda="spec_ops.backends.triton.tree.build:build_tree",
    invariant=True,
)


full_mask_words_op = define_op(
    "full_mask_words(Tensor mask, Tensor prefix_lens, int num_tokens) -> Tensor",
    reference.full_mask_words,
    lambda mask, prefix_lens, num_tokens: prefix_lens.new_empty(prefix_lens.shape[0], num_tokens, dtype=torch.int64),
    cuda="spec_ops.backends.triton.tree.full_mask:full_mask_words",
    invariant=True,
)


def select_draft_tokens(scores: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num_tokens` best-scored candidates of a draft, in candidate order (parents before children).

    Candidates are numbered as SGLang does: the K tokens of step 0, then K * K per later step (branch-major). A child's score
    must not exceed its parent's (cumulative probabilities or log-probabilities); ties go to the lower index, so a selected
    node's parent is always selected.

    Args:
        scores: `[bs, N]` float32. tokens: `[bs, N]` int32/int64. num_tokens: 1 to min(N, 63).

    Returns:
        `(draft_tokens [bs, num_tokens] int64, selected_index [bs, num_tokens] int64, ascending)`.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: SGLang `organize_draft_results`; EAGLE-2 (arXiv:2406.16858).
    """
    check = Checker("select_draft_tokens")
    check.tensor("scores", scores, rank=2, dtypes=(torch.float32,))
    check.tensor("tokens", tokens, shape=tuple(scores.shape), dtypes=INDEX_DTYPES, device=scores.device)
    check.integer("num_tokens", num_tokens, 1, min(int(scores.shape[1]), MAX_TREE_TOKENS - 1))
    return select_draft_tokens_op(scores, tokens, num_tokens)


def build_tree(parent_list: torch.Tensor, selected_index: torch.Tensor, seq_lens: torch.Tensor, topk: int) -> Tree:
    """Trees from the selected candidates of a top-k draft.

    Args:
        parent_list: `[bs, topk * (S - 1) + 1]` int64 (any width when S == 1): entry 0 is unused (-1), entry `1 + b` is the
            candidate index of branch `b` entering step 1, and so on; candidate `c` has parent slot `c // topk`, slot 0 being
            the root.
        selected_index: `[bs, D - 1]` int64 ascending, from `select_draft_tokens`; D at most 64.
        seq_lens: `[bs]` int32/int64, committed lengths.
        topk: the draft's width K.

    Returns:
        `Tree`.

    Raises:
        TypeError, ValueError: naming the argument; on CPU also for candidates out of order or without their parent.

    Source: SGLang `build_tree_kernel_efficient` (`sgl_kernel/speculative/eagle.cuh`).
    """
    check = Checker("build_tree")
    check.tensor("selected_index", selected_index, rank=2, dtypes=(torch.int64,))
    device = selected_index.device
    if not 1 <= selected_index.shape[1] <= MAX_TREE_TOKENS - 1:
        check.fail("selected_index", f"of width in [1, {MAX_TREE_TOKENS - 1}]", f"shape {tuple(selected_index.shape)}")
    bs = selected_index.shape[0]
    check.tensor("parent_list", parent_list, shape=(bs, None), dtypes=(torch.int64,), device=device)
    check.tensor("seq_lens", seq_lens, shape=(bs,), dtypes=INDEX_DTYPES, device=device)
    check.integer("topk", topk, 1)
    return Tree(*build_tree_op(parent_list, selected_index, seq_lens, topk))


def tree_mask_to_qlen_mask(tree_mask: torch.Tensor) -> torch.Tensor:
    """`[bs, D]` int64 words to SGLang's QLEN_ONLY mask (`VerifyMask`): `[bs, D, D]` bool, True where row sees column.

    Raises TypeError or ValueError naming the argument, as the other converters do.
    """
    _check_mask(Checker("tree_mask_to_qlen_mask"), tree_mask)
    columns = torch.arange(tree_mask.shape[1], device=tree_mask.device)
    return ((tree_mask[..., None] >> columns) & 1).bool()


def qlen_mask_to_tree_mask(mask: torch.Tensor) -> torch.Tensor:
    """SGLang's QLEN_ONLY mask `[bs, D, D]` bool to `[bs, D]` int64 words; D at most 64."""
    check = Checker("qlen_mask_to_tree_mask")
    check.tensor("mask", mask, rank=3, dtypes=(torch.bool,))
    check.tensor("mask", mask, shape=(None, mask.shape[2], None))
    if mask.shape[2] > MAX_TREE_TOKENS:
        check.fail("mask", f"of width at most {MAX_TREE_TOKENS}", mask.shape[2])
    return reference.pack_bits(mask)


def tree_mask_to_full_mask(tree_mask: torch.Tensor, prefix_lens: list[int]) -> torch.Tensor:
    """Words to SGLang's FULL_MASK: flat bool, request `b` contributing D rows of `prefix_lens[b] + D` columns.

    `prefix_lens` are host integers: the flat size depends on them, which is the sync that bit masks avoid.
    """
    check = Checker("tree_mask_to_full_mask")
    _check_mask(check, tree_mask)
    _check_prefix_lens(check, prefix_lens, tree_mask.shape[0])
    square = tree_mask_to_qlen_mask(tree_mask)
    rows = [torch.cat([m.new_ones(m.shape[0], n), m], 1).flatten() for m, n in zip(square, prefix_lens, strict=True)]
    return torch.cat(rows) if rows else square.flatten()


def full_mask_to_tree_mask(mask: torch.Tensor, prefix_lens: list[int] | torch.Tensor, num_tokens: int) -> torch.Tensor:
    """SGLang's FULL_MASK (flat bool) to `[bs, num_tokens]` int64 words.

    Args:
        mask: flat bool, request `b` contributing `num_tokens` rows of `prefix_lens[b] + num_tokens` columns; with lengths on
            the device it may be longer, as an engine's buffer is.
        prefix_lens: host integers, or `[bs]` int32/int64 beside the mask: then one launch without a sync, which looks at no
            column of the prefix. With host integers they must all be True.
        num_tokens: 1 to 64.

    Raises:
        TypeError, ValueError: naming the argument. IndexError on CPU for a mask that is too short for the lengths.
    """
    check = Checker("full_mask_to_tree_mask")
    check.integer("num_tokens", num_tokens, 1, MAX_TREE_TOKENS)
    if isinstance(prefix_lens, torch.Tensor):
        check.tensor("mask", mask, rank=1, dtypes=(torch.bool,))
        if mask.numel() and mask.stride(0) != 1:
            check.fail("mask", "contiguous", f"strides {mask.stride()}")
        check.tensor("prefix_lens", prefix_lens, rank=1, dtypes=INDEX_DTYPES, device=mask.device)
        return full_mask_words_op(mask, prefix_lens, num_tokens)
    _check_prefix_lens(check, prefix_lens, None)
    sizes = [num_tokens * (n + num_tokens) for n in prefix_lens]
    check.tensor("mask", mask, shape=(sum(sizes),), dtypes=(torch.bool,))
    squares = []
    for part, n in zip(mask.split(sizes), prefix_lens, strict=True):
        rows = part.reshape(num_tokens, n + num_tokens)
        if not bool(rows[:, :n].all()):
            check.fail("mask", "True in all prefix columns", "a hidden prefix position, which bit masks cannot express")
        squares.append(rows[:, n:])
    if not squares:
        return mask.new_empty(0, num_tokens, dtype=torch.int64)
    return reference.pack_bits(torch.stack(squares))


def _check_mask(check: Checker, tree_mask) -> None:
    check.tensor("tree_mask", tree_mask, rank=2, dtypes=(torch.int64,))
    if tree_mask.shape[1] > MAX_TREE_TOKENS:
        check.fail("tree_mask", f"of width at most {MAX_TREE_TOKENS}", tree_mask.shape[1])


def _check_prefix_lens(check: Checker, prefix_lens, bs: int | None) -> None:
    if not isinstance(prefix_lens, (list, tuple)) or not all(type(n) is int and n >= 0 for n in prefix_lens):
        check.fail("prefix_lens", "a list of non-negative ints", prefix_lens, TypeError)
    if bs is not None and len(prefix_lens) != bs:
        check.fail("prefix_lens", f"of length {bs}", len(prefix_lens))
