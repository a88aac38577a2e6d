"""Draft trees against plain-Python oracles, and the mask converters against SGLang's layouts."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spec_ops
from tests.helpers import tree_oracle as oracle

# Derandomized: the examples are a fixed function of the test, so a run repeats exactly. No deadline: first calls are slow.
FUZZ = settings(max_examples=60, deadline=None, derandomize=True)


def _draft_batch(seed: int, topk: int, steps: int, bs: int, device: str, log: bool = False):
    rng = random.Random(seed)
    drafts = [oracle.draft(rng, topk, steps, vocab=topk + 20) for _ in range(bs)]
    if log:
        for d in drafts:
            d.scores = [math.log(s) if s > 0 else -math.inf for s in d.scores]
    scores = torch.tensor([d.scores for d in drafts], dtype=torch.float32, device=device)
    tokens = torch.tensor([d.tokens for d in drafts], device=device)
    parent_list = torch.tensor([d.parent_list for d in drafts], device=device)
    assert parent_list.shape == (bs, topk * (steps - 1) + 1)
    return drafts, scores, tokens, parent_list


def _check_tree(tree: spec_ops.Tree, expected: list[oracle.OracleTree]) -> None:
    for field in spec_ops.Tree._fields:
        got = getattr(tree, field)
        assert got.dtype == torch.int64
        assert got.tolist() == [getattr(e, field) for e in expected], field


@FUZZ
@given(st.data())
def test_selection_and_tree_match_the_oracle(device, data):
    topk = data.draw(st.integers(1, 5), "topk")
    steps = data.draw(st.integers(1, 5), "steps")
    total = oracle.num_candidates(topk, steps)
    num_tokens = data.draw(st.integers(1, min(total, 63)), "num_tokens")
    bs = data.draw(st.integers(1, 3), "bs")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), "dtype")
    log = data.draw(st.booleans(), "log-probabilities")
    seed = data.draw(st.integers(0, 2**32), "seed")
    drafts, scores, tokens, parent_list = _draft_batch(seed, topk, steps, bs, device, log)
    seq_lens = [random.Random(seed).choice([0, 1, 7, 5000]) + b for b in range(bs)]

    draft_tokens, selected = spec_ops.select_draft_tokens(scores, tokens.to(dtype), num_tokens)
    chosen = [oracle.select(d.scores, num_tokens) for d in drafts]
    assert selected.dtype == draft_tokens.dtype == torch.int64
    assert selected.tolist() == chosen
    assert draft_tokens.tolist() == [[d.tokens[c] for c in cs] for d, cs in zip(drafts, chosen, strict=True)]
    for d, row in zip(drafts, selected.tolist(), strict=True):
        assert all(d.parents[c] is None or d.parents[c] in row for c in row), "a selected node's parent is not selected"

    tree = spec_ops.build_tree(parent_list, selected, torch.tensor(seq_lens, dtype=dtype, device=device), topk)
    _check_tree(tree, [oracle.build(d.parents, c, n) for d, c, n in zip(drafts, chosen, seq_lens, strict=True)])
    nodes = torch.arange(num_tokens + 1, device=device)
    assert (tree.parents < nodes).all(), "a parent comes after its child"


@pytest.mark.parametrize("num_tokens", range(1, 6))
def test_ties_keep_ancestors(device, num_tokens):
    # K=2, S=2, every conditional probability 1: all six scores are equal, so only the order of candidates decides.
    scores = torch.ones(1, 6, device=device)
    _, selected = spec_ops.select_draft_tokens(scores, torch.arange(6, device=device)[None], num_tokens)
    assert selected.tolist() == [list(range(num_tokens))]


def test_ties_keep_ancestors_in_long_rows(device):
    # topk and unstable sorts return ties in any order; they show it on long rows. Chains of certain tokens under 8 branches.
    topk, steps = 8, 9
    total = oracle.num_candidates(topk, steps)
    scores = torch.ones(4, total, device=device)
    scores[1, ::3] = 0.5
    scores[2, total // 2 :] = 0.0
    scores[3] = 0.0
    _, selected = spec_ops.select_draft_tokens(scores, torch.zeros(4, total, dtype=torch.int64, device=device), 63)
    assert selected.tolist() == [oracle.select(row, 63) for row in scores.tolist()]


def test_full_width_tree_uses_bit_63(device):
    topk, steps, num_tokens = 8, 9, 63
    drafts, scores, tokens, parent_list = _draft_batch(5, topk, steps, 3, device)
    _, selected = spec_ops.select_draft_tokens(scores, tokens, num_tokens)
    tree = spec_ops.build_tree(parent_list, selected, torch.tensor([3, 0, 90], device=device), topk)
    _check_tree(tree, [oracle.build(d.parents, c, n) for d, c, n in zip(drafts, selected.tolist(), [3, 0, 90], strict=True)])
    assert (tree.tree_mask[:, 63] < 0).all(), "bit 63 is the sign bit"
    assert (tree.tree_mask[:, :63] >= 0).all()


@pytest.mark.parametrize("steps", [1, 2, 3, 31, 32, 62, 63])
def test_chain(device, steps):
    parent_list = _draft_batch(steps, 1, steps, 2, device)[3]
    selected = torch.arange(steps, device=device).repeat(2, 1)
    tree = spec_ops.build_tree(parent_list, selected, torch.tensor([4, 9], dtype=torch.int32, device=device), 1)
    nodes = list(range(steps + 1))
    _check_tree(
        tree,
        [
            oracle.OracleTree(
                parents=[n - 1 for n in nodes],
                positions=[length + n for n in nodes],
                tree_mask=[oracle.signed((2 << n) - 1) for n in nodes],
                first_child=[*nodes[1:], -1],
                next_sibling=[-1] * (steps + 1),
            )
            for length in (4, 9)
        ],
    )


@pytest.mark.parametrize("width", [0, 1, 7])
def test_one_step_ignores_parent_list(device, width):
    junk = torch.full((1, width), 2, device=device)
    tree = spec_ops.build_tree(junk, torch.tensor([[0, 2, 3]], device=device), torch.tensor([6], device=device), 4)
    _check_tree(
        tree, [oracle.OracleTree([-1, 0, 0, 0], [6, 7, 7, 7], [0b1, 0b11, 0b101, 0b1001], [1, -1, -1, -1], [-1, 2, 3, -1])]
    )


@pytest.mark.parametrize(
    ("parent_list", "selected"),
    [
        # K=2. Candidates 2, 3 continue branch 0 (candidate 0), and 4, 5 branch 1 (candidate 1).
        pytest.param([-1, 0, 1], [0, 4], id="parent not selected"),
        pytest.param([-1, 0, 1], [0, 2, 5], id="one of two parents not selected"),
        pytest.param([-1, 0, 1], [0, 1, 6], id="slot past parent_list"),
        pytest.param([], [0, 2], id="slot in an empty parent_list"),
    ],
)
def test_orphan_raises_on_cpu(parent_list, selected):
    good = [0, 1, 2][: len(selected)] if parent_list else [0, 1]
    rows = torch.tensor([good, selected])
    with pytest.raises(ValueError, match="orphan"):
        spec_ops.build_tree(torch.tensor([parent_list] * 2).long(), rows, torch.tensor([1, 1]), 2)
    if parent_list:
        spec_ops.build_tree(torch.tensor([parent_list]), rows[:1], torch.tensor([1]), 2)  # the other row was not at fault


def test_empty_batch_and_layout(device):
    draft_tokens, selected = spec_ops.select_draft_tokens(
        torch.zeros(0, 6, device=device), torch.zeros(0, 6, dtype=torch.int32, device=device), 4
    )
    lens = torch.zeros(0, dtype=torch.int32, device=device)
    tree = spec_ops.build_tree(torch.zeros(0, 3, dtype=torch.int64, device=device), selected, lens, 2)
    assert draft_tokens.shape == selected.shape == (0, 4)
    assert [field.shape for field in tree] == [(0, 5)] * 5


def test_outputs_are_contiguous_whatever_the_inputs(device):
    # Compiled graphs are traced with contiguous outputs; strides that follow the inputs' would break them.
    _, scores, tokens, parent_list = _draft_batch(0, 2, 3, 3, device)
    selected = spec_ops.select_draft_tokens(scores, tokens, 5)
    strided = spec_ops.select_draft_tokens(scores.t().contiguous().t(), tokens.t().contiguous().t(), 5)
    assert all(s.is_contiguous() for s in strided)
    assert [s.tolist() for s in strided] == [s.tolist() for s in selected]
    lens = torch.arange(6, device=device)[::2]
    index = selected[1].t().contiguous().t()
    tree = spec_ops.build_tree(parent_list.t().contiguous().t(), index, lens, 2)
    assert all(field.is_contiguous() for field in tree)
    assert [f.tolist() for f in tree] == [f.tolist() for f in spec_ops.build_tree(parent_list, selected[1], lens, 2)]


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "num_tokens", lambda: spec_ops.select_draft_tokens(torch.ones(1, 6), torch.ones(1, 6).long(), 0)),
        (ValueError, "num_tokens", lambda: spec_ops.select_draft_tokens(torch.ones(1, 6), torch.ones(1, 6).long(), 7)),
        (ValueError, "num_tokens", lambda: spec_ops.select_draft_tokens(torch.ones(1, 99), torch.ones(1, 99).long(), 64)),
        (TypeError, "scores", lambda: spec_ops.select_draft_tokens(torch.ones(1, 6).half(), torch.ones(1, 6).long(), 2)),
        (ValueError, "tokens", lambda: spec_ops.select_draft_tokens(torch.ones(1, 6), torch.ones(1, 5).long(), 2)),
        (
            ValueError,
            "selected_index",
            lambda: spec_ops.build_tree(torch.zeros(1, 1).long(), torch.zeros(1, 64).long(), torch.ones(1).long(), 99),
        ),
        (
            ValueError,
            "topk",
            lambda: spec_ops.build_tree(torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), torch.ones(1).long(), 0),
        ),
    ],
)
def test_bad_arguments(error, match, call):
    with pytest.raises(error, match=f"`{match}`"):
        call()


# Mask converters


def _tree_words(seed: int, bs: int, num_nodes: int, device: str) -> torch.Tensor:
    rng = random.Random(seed)
    rows = []
    for _ in range(bs):
        parents = oracle.random_parents(rng, num_nodes)
        rows.append(oracle.build([p - 1 if p else None for p in parents[1:]], list(range(num_nodes - 1)), 0).tree_mask)
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(bs, num_nodes)


@FUZZ
@given(st.integers(0, 3), st.integers(1, 12) | st.sampled_from([63, 64]), st.integers(0, 2**32))
def test_qlen_mask_round_trip(device, bs, num_nodes, seed):
    words = _tree_words(seed, bs, num_nodes, device)
    square = spec_ops.tree_mask_to_qlen_mask(words)
    assert square.dtype == torch.bool
    assert square.shape == (bs, num_nodes, num_nodes)
    assert square.tolist() == [[[bool(w >> j & 1) for j in range(num_nodes)] for w in row] for row in words.tolist()]
    assert torch.equal(spec_ops.qlen_mask_to_tree_mask(square), words)

    # The other way from any mask, not only a tree's.
    any_mask = torch.rand(bs, num_nodes, num_nodes, generator=torch.Generator().manual_seed(seed)).to(device) < 0.5
    packed = spec_ops.qlen_mask_to_tree_mask(any_mask)
    assert packed.dtype == torch.int64
    assert packed.tolist() == [
        [oracle.signed(sum(seen << j for j, seen in enumerate(row))) for row in request] for request in any_mask.tolist()
    ]
    assert torch.equal(spec_ops.tree_mask_to_qlen_mask(packed), any_mask)


@FUZZ
@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 8) | st.just(64), st.integers(0, 2**32))
def test_full_mask_layout_and_round_trip(device, prefix_lens, num_nodes, seed):
    words = _tree_words(seed, len(prefix_lens), num_nodes, device)
    full = spec_ops.tree_mask_to_full_mask(words, prefix_lens)
    assert full.dtype == torch.bool
    assert full.shape == (sum(num_nodes * (n + num_nodes) for n in prefix_lens),)
    flat = full.tolist()
    for b, length in enumerate(prefix_lens):
        offset = num_nodes * (sum(prefix_lens[:b]) + num_nodes * b)
        for i, word in enumerate(words[b].tolist()):
            start = offset + i * (length + num_nodes)
            assert flat[start : start + length] == [True] * length
            assert flat[start + length : start + length + num_nodes] == [bool(word >> j & 1) for j in range(num_nodes)]
    back = spec_ops.full_mask_to_tree_mask(full, prefix_lens, num_nodes)
    assert back.dtype == torch.int64
    assert torch.equal(back, words)
    assert torch.equal(spec_ops.tree_mask_to_full_mask(back, prefix_lens), full)


@FUZZ
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 8) | st.just(64), st.integers(0, 2**32))
def test_full_mask_by_lengths_on_the_device(device, prefix_lens, num_nodes, seed):
    """The same words; a buffer that is too long, and what it holds for the prefix, is not looked at."""
    words = _tree_words(seed, len(prefix_lens), num_nodes, device)
    full = spec_ops.tree_mask_to_full_mask(words, prefix_lens)
    lens = torch.tensor(prefix_lens, dtype=torch.int32 if seed % 2 else torch.int64, device=device)
    assert torch.equal(spec_ops.full_mask_to_tree_mask(full, lens, num_nodes), words)
    longer = torch.cat([full, torch.ones(7, dtype=torch.bool, device=device)])
    start = 0
    for length in prefix_lens:
        rows = longer[start : start + num_nodes * (length + num_nodes)].view(num_nodes, -1)
        rows[:, :length] = False
        start += rows.numel()
    assert torch.equal(spec_ops.full_mask_to_tree_mask(longer, lens, num_nodes), words)


# Of prefix lengths 2, 3, 0 and 3 nodes: rows of 5, 6 and 3 columns, starting at 0, 15 and 33.
@pytest.mark.parametrize("hidden", [0, 6, 11, 15, 23, 29])
def test_hidden_prefix_column_raises(device, hidden):
    full = spec_ops.tree_mask_to_full_mask(_tree_words(0, 3, 3, device), [2, 3, 0])
    full[hidden] = False
    with pytest.raises(ValueError, match="prefix"):
        spec_ops.full_mask_to_tree_mask(full, [2, 3, 0], 3)


@pytest.mark.parametrize("hidden", [2, 9, 14, 18, 32, 33, 41])
def test_hidden_tree_column_does_not_raise(device, hidden):
    full = spec_ops.tree_mask_to_full_mask(_tree_words(0, 3, 3, device), [2, 3, 0])
    full[hidden] = False
    words = spec_ops.full_mask_to_tree_mask(full, [2, 3, 0], 3)
    assert torch.equal(spec_ops.tree_mask_to_full_mask(words, [2, 3, 0]), full)


def test_empty_batch_of_masks(device):
    words = torch.zeros(0, 5, dtype=torch.int64, device=device)
    full = spec_ops.tree_mask_to_full_mask(words, [])
    assert full.shape == (0,)
    assert full.dtype == torch.bool
    for back in (
        spec_ops.full_mask_to_tree_mask(full, [], 5),
        spec_ops.qlen_mask_to_tree_mask(spec_ops.tree_mask_to_qlen_mask(words)),
    ):
        assert back.shape == (0, 5)
        assert back.dtype == torch.int64


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "tree_mask", lambda: spec_ops.tree_mask_to_qlen_mask(torch.zeros(1, 65).long())),
        (TypeError, "tree_mask", lambda: spec_ops.tree_mask_to_qlen_mask(torch.zeros(1, 4).int())),
        (ValueError, "mask", lambda: spec_ops.qlen_mask_to_tree_mask(torch.ones(1, 65, 65).bool())),
        (ValueError, "mask", lambda: spec_ops.qlen_mask_to_tree_mask(torch.ones(1, 3, 4).bool())),
        (ValueError, "prefix_lens", lambda: spec_ops.tree_mask_to_full_mask(torch.ones(2, 4).long(), [1])),
        (TypeError, "prefix_lens", lambda: spec_ops.tree_mask_to_full_mask(torch.ones(1, 4).long(), torch.ones(1))),
        (TypeError, "prefix_lens", lambda: spec_ops.tree_mask_to_full_mask(torch.ones(1, 4).long(), [-1])),
        (ValueError, "mask", lambda: spec_ops.full_mask_to_tree_mask(torch.ones(11).bool(), [1], 3)),
        (ValueError, "num_tokens", lambda: spec_ops.full_mask_to_tree_mask(torch.ones(0).bool(), [], 65)),
    ],
)
def test_bad_masks(error, match, call):
    with pytest.raises(error, match=f"`{match}`"):
        call()
