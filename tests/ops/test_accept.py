"""Acceptance against plain-Python walks in exact arithmetic."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_ops
from tests.helpers import accept_oracle as oracle
from tests.helpers.exact import ALMOST_ONE, FUZZ, below, dyadic_row, float_tensor, uniform_rows
from tests.helpers.tree_oracle import random_parents


def _as_lists(accepted: spec_ops.Accepted, bs: int, path_len: int) -> list[tuple[list[int], list[int]]]:
    """Per request its tokens and nodes, after checking dtypes, shapes and the padding with -1."""
    assert accepted.tokens.dtype == accepted.path.dtype == torch.int64
    assert accepted.lens.dtype == torch.int32
    assert accepted.tokens.shape == accepted.path.shape == (bs, path_len)
    assert accepted.lens.shape == (bs,)
    out = []
    for tokens, index, n in zip(accepted.tokens.tolist(), accepted.path.tolist(), accepted.lens.tolist(), strict=True):
        assert 1 <= n <= path_len
        assert tokens[n:] == index[n:] == [-1] * (path_len - n)
        out.append((tokens[:n], index[:n]))
    return out


# accept_greedy


def _greedy_walk(candidates: list[int], target: list[int], parents: list[int], path_len: int):
    tokens, nodes = [target[0]], [0]
    while len(nodes) < path_len:
        children = [n for n in range(1, len(parents)) if parents[n] == nodes[-1] and candidates[n] == tokens[-1]]
        if not children:
            break
        nodes.append(children[0])
        tokens.append(target[children[0]])
    return tokens, nodes


@FUZZ
@given(st.data())
def test_greedy_matches_the_walk(device, data):
    bs = data.draw(st.integers(0, 6), "bs")
    num_nodes = data.draw(st.integers(1, 16) | st.just(64), "num_nodes")
    chain = data.draw(st.booleans(), "chain")
    path_len = num_nodes if chain else data.draw(st.integers(1, num_nodes), "path_len")
    vocab = data.draw(st.integers(1, 4), "vocab")  # small: long paths and duplicate siblings
    dtypes = [data.draw(st.sampled_from([torch.int32, torch.int64])) for _ in range(2)]
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    candidates = [[rng.randrange(vocab) for _ in range(num_nodes)] for _ in range(bs)]
    target = [[rng.randrange(vocab) for _ in range(num_nodes)] for _ in range(bs)]
    parents = [list(range(-1, num_nodes - 1)) if chain else random_parents(rng, num_nodes) for _ in range(bs)]

    def tensor(rows, dtype=torch.int64):
        return torch.tensor(rows, dtype=dtype, device=device).reshape(bs, num_nodes)

    explicit_path_len = None if path_len == num_nodes and data.draw(st.booleans()) else path_len
    accepted = spec_ops.accept_greedy(
        tensor(candidates, dtypes[0]), tensor(target, dtypes[1]), None if chain else tensor(parents), explicit_path_len
    )
    assert _as_lists(accepted, bs, path_len) == [
        _greedy_walk(candidates[b], target[b], parents[b], path_len) for b in range(bs)
    ]


def test_greedy_by_hand(device):
    #       0
    #    1     2     duplicate siblings: the lowest node wins, although node 2 would go on longer
    #    3     4
    parents = torch.tensor([[-1, 0, 0, 1, 2]] * 3, device=device)
    candidates = torch.tensor([[9, 5, 5, 6, 7], [9, 5, 8, 6, 7], [-1, 5, 8, 6, 7]], device=device)
    target = torch.tensor([[5, 7, 7, 1, 2], [8, 1, 7, 3, 4], [1, 5, 5, 5, 5]], device=device)
    accepted = spec_ops.accept_greedy(candidates, target, parents, 3)
    assert _as_lists(accepted, 3, 3) == [([5, 7], [0, 1]), ([8, 7, 4], [0, 2, 4]), ([1], [0])]
    # A path of 2 stops at the child; its own target token is still the last one.
    assert _as_lists(spec_ops.accept_greedy(candidates, target, parents, 2), 3, 2)[1] == ([8, 7], [0, 2])


# accept_sampled, exact. All probabilities are multiples of 1/64, all uniforms of 1/128 and all thresholds powers of two, so
# that float32 holds every sum, product and quotient exactly: comparisons, ties included, have one right answer.


@FUZZ
@given(st.data())
def test_target_only_matches_the_walk(device, data):
    bs = data.draw(st.integers(1, 5), "bs")
    num_nodes = data.draw(st.integers(1, 10), "num_nodes")
    chain = data.draw(st.booleans(), "chain")
    path_len = num_nodes if chain else data.draw(st.integers(1, num_nodes), "path_len")
    vocab = data.draw(st.integers(1, 6), "vocab")
    single, acc = data.draw(st.sampled_from([(1.0, 1.0), (0.25, 1.0), (1.0, 0.5), (0.5, 0.25)]), "thresholds")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    candidates = [[rng.randrange(vocab) for _ in range(num_nodes)] for _ in range(bs)]
    parents = [list(range(-1, num_nodes - 1)) if chain else random_parents(rng, num_nodes) for _ in range(bs)]
    probs = [[dyadic_row(rng, vocab) for _ in range(num_nodes)] for _ in range(bs)]
    uniforms, final = uniform_rows(rng, bs, num_nodes), uniform_rows(rng, bs)
    accepted = spec_ops.accept_sampled(
        torch.tensor(candidates, dtype=dtype, device=device),
        float_tensor(probs, device),
        float_tensor(uniforms, device),
        float_tensor(final, device),
        parents=None if chain else torch.tensor(parents, device=device),
        path_len=path_len,
        threshold_single=single,
        threshold_acc=acc,
    )
    assert _as_lists(accepted, bs, path_len) == [
        oracle.target_only(
            candidates[b], probs[b], uniforms[b], final[b], parents[b], path_len, Fraction(single), Fraction(acc)
        )
        for b in range(bs)
    ]


@FUZZ
@given(st.data())
def test_rejection_matches_the_walk(device, data):
    bs = data.draw(st.integers(1, 6), "bs")
    num_nodes = data.draw(st.integers(1, 8), "num_nodes")
    vocab = data.draw(st.integers(1, 6), "vocab")
    reduced = data.draw(st.booleans(), "reduced vocabulary")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    ids = rng.sample(range(vocab), rng.randint(1, vocab)) if reduced else list(range(vocab))
    p = [[dyadic_row(rng, vocab) for _ in range(num_nodes)] for _ in range(bs)]
    q = [[dyadic_row(rng, len(ids)) for _ in range(num_nodes - 1)] for _ in range(bs)]
    q_full = [[[row[ids.index(t)] if t in ids else Fraction(0) for t in range(vocab)] for row in rows] for rows in q]
    # Drafts of probability 0 too: they cannot come from sampling, but a padded row may hold them.
    candidates = [[rng.randrange(vocab)] + [rng.choice(ids) for _ in range(num_nodes - 1)] for _ in range(bs)]
    uniforms, final = uniform_rows(rng, bs, num_nodes), uniform_rows(rng, bs)
    accepted = spec_ops.accept_sampled(
        torch.tensor(candidates, dtype=dtype, device=device),
        float_tensor(p, device),
        float_tensor(uniforms, device),
        float_tensor(final, device),
        draft_probs=float_tensor(q, device).reshape(bs, num_nodes - 1, len(ids)),
        draft_to_target=torch.tensor(ids, device=device) if reduced else None,
    )
    assert _as_lists(accepted, bs, num_nodes) == [
        oracle.rejection(candidates[b], p[b], q_full[b], uniforms[b], final[b]) for b in range(bs)
    ]


@FUZZ
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_one_hot_target_equals_greedy(device, seed, chain, with_draft_probs):
    rng = random.Random(seed)
    bs, num_nodes, vocab = 4, rng.randint(1, 12), rng.randint(1, 4)
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(vocab, (bs, num_nodes), generator=generator).to(device)
    target = torch.randint(vocab, (bs, num_nodes), generator=generator).to(device)
    probs = torch.nn.functional.one_hot(target, vocab).float()
    uniforms = torch.rand(bs, num_nodes, generator=generator).to(device)
    final = torch.rand(bs, generator=generator).to(device)
    parents, draft_probs = None, None
    if not chain:
        parents = torch.tensor([random_parents(rng, num_nodes) for _ in range(bs)], device=device)
    elif with_draft_probs:  # a greedy draft: one-hot too
        draft_probs = torch.nn.functional.one_hot(candidates[:, 1:], vocab).float()
    sampled = spec_ops.accept_sampled(candidates, probs, uniforms, final, parents=parents, draft_probs=draft_probs)
    greedy = spec_ops.accept_greedy(candidates, target, parents)
    for got, expected in zip(sampled, greedy, strict=True):
        assert torch.equal(got, expected)


def _sampled(device, candidates, probs, uniforms, final, **kwargs):
    """`accept_sampled` of one request given as lists: `(tokens, nodes)`."""
    tensors = {k: torch.tensor([v], device=device) if isinstance(v, list) else v for k, v in kwargs.items()}
    accepted = spec_ops.accept_sampled(
        torch.tensor([candidates], device=device),
        torch.tensor([probs], device=device),
        torch.tensor([uniforms], device=device),
        torch.tensor([final], device=device),
        **tensors,
    )
    return _as_lists(accepted, 1, kwargs.get("path_len", len(candidates)))[0]


@pytest.mark.parametrize(("uniform", "nodes"), [(0.0, [0, 1]), (below(0.5), [0, 1]), (0.5, [0]), (ALMOST_ONE, [0])])
def test_target_only_boundary(device, uniform, nodes):
    # Accept strictly below p = 1/2: a uniform is below 1/2 with a probability of exactly 1/2.
    probs = [[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]
    tokens, got = _sampled(device, [2, 0], probs, [uniform, 0.0], 0.5)
    assert got == nodes
    assert tokens == ([0, 2] if len(nodes) == 2 else [2])  # the residual is {1, 2} with 1/2 each


@pytest.mark.parametrize(
    ("uniform", "nodes"), [(0.0, [0, 1]), (below(0.25), [0, 1]), (0.25, [0, 2]), (below(0.5), [0, 2]), (0.5, [0])]
)
def test_sibling_boundaries(device, uniform, nodes):
    row = [0.25, 0.25, 0.0, 0.5]
    tokens, got = _sampled(device, [3, 0, 1, 2], [row] * 4, [uniform, 0.0, 0.0, 0.0], 0.0, parents=[-1, 0, 0, 0])
    assert got == nodes
    assert tokens[-1] == (3 if nodes == [0] else 0)


@pytest.mark.parametrize(("uniform", "nodes"), [(0.0, [0, 1]), (below(0.5), [0, 1]), (0.5, [0]), (ALMOST_ONE, [0])])
def test_rejection_boundary(device, uniform, nodes):
    p, q = [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]
    tokens, got = _sampled(device, [1, 0], [p, p], [uniform, 0.0], 0.0, draft_probs=[q])
    assert got == nodes
    assert tokens == ([0, 0] if len(nodes) == 2 else [2])  # max(p - q, 0) is positive at token 2 alone


def test_a_draft_that_cannot_be_is_never_accepted(device):
    p = [0.0, 1.0]
    assert _sampled(device, [1, 0], [p, p], [0.0, 0.0], 0.0) == ([1], [0])
    assert _sampled(device, [1, 0, 0], [p] * 3, [0.0] * 3, 0.0, parents=[-1, 0, 0]) == ([1], [0])
    assert _sampled(device, [1, 0], [p, p], [0.0, 0.0], 0.0, draft_probs=[[1.0, 0.0]]) == ([1], [0])
    assert _sampled(device, [1, 0], [p, p], [0.0, 0.0], 0.0, draft_probs=[p]) == ([1], [0])


def test_equal_distributions_accept_every_draft(device):
    # u * q < p must hold for q == p and every u below 1, for all float32 values of p.
    p = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0)).to(device)
    p = torch.cat([p, 1 - p], 1)[:, None]
    ones = torch.full((4096, 2), ALMOST_ONE, device=device)
    candidates = torch.zeros(4096, 2, dtype=torch.int64, device=device)
    accepted = spec_ops.accept_sampled(candidates, p.repeat(1, 2, 1), ones, ones[:, 0].contiguous(), draft_probs=p)
    assert (accepted.lens == 2).all()


def test_index_names_the_path(device):
    #       0        each `index` entry is the node whose target output yielded the token beside it
    #    1     2
    #         3 4
    sure = [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.25] * 4, [0.0, 0.0, 0.5, 0.5]]
    args = ([0, 1, 2, 0, 3], sure, [0.5] * 5, 0.75)
    assert _sampled(device, *args, parents=[-1, 0, 0, 2, 2]) == ([2, 3, 3], [0, 2, 4])
    # Ended by path_len: node 2 rejected nothing, so its own distribution, children included, gives the last token.
    assert _sampled(device, *args, parents=[-1, 0, 0, 2, 2], path_len=2) == ([2, 3], [0, 2])
    assert _sampled(device, *args, parents=[-1, 0, 0, 2, 2], path_len=1) == ([2], [0])


def test_empty_residual_falls_back_to_the_target(device):
    # Rows whose float32 sum is a little below 1 can reject a draft and leave nothing: p <= q everywhere.
    p, q = [0.5, 0.4999], [0.5, 0.5]
    tokens, nodes = _sampled(device, [0, 1], [p, p], [ALMOST_ONE, 0.0], 0.75, draft_probs=[q])
    assert (tokens, nodes) == ([1], [0])
    tokens, nodes = _sampled(device, [0, 1, 0], [p] * 3, [ALMOST_ONE, 0.0, 0.0], 0.25, parents=[-1, 0, 0])
    assert (tokens, nodes) == ([0], [0])


@pytest.mark.parametrize(
    ("single", "acc", "uniform", "nodes"),
    [
        (1.0, 1.0, 0.5, [0]),
        (0.25, 1.0, ALMOST_ONE, [0, 1]),  # the first child's own probability reaches the threshold
        (0.3, 1.0, 0.5, [0]),  # neither child's does
        (1.0, 0.5, below(0.5), [0, 1]),  # 0.25 / 0.5
        (1.0, 0.5, 0.5, [0, 2]),  # (0.25 + 0.25) / 0.5 is 1
        (1.0, 0.25, ALMOST_ONE, [0, 1]),
    ],
)
def test_thresholds(device, single, acc, uniform, nodes):
    row = [0.25, 0.25, 0.5]
    kwargs = {"parents": [-1, 0, 0], "threshold_single": single, "threshold_acc": acc}
    assert _sampled(device, [0, 0, 1], [row] * 3, [uniform, 0.0, 0.0], 0.0, **kwargs)[1] == nodes


def test_root_only_samples_the_target(device):
    row = [0.25, 0.5, 0.25]
    assert _sampled(device, [0], [row], [0.0], 0.25) == ([1], [0])
    empty = torch.zeros(1, 0, 3, device=device)
    assert _sampled(device, [0], [row], [0.0], below(0.25), draft_probs=empty) == ([0], [0])


@pytest.mark.parametrize(
    ("error", "match", "kwargs"),
    [
        (ValueError, "draft_probs", {"draft_probs": torch.ones(1, 2, 4), "parents": torch.tensor([[-1, 0, 1]])}),
        (ValueError, "draft_probs", {"draft_probs": torch.ones(1, 2, 3)}),
        (ValueError, "draft_probs", {"draft_probs": torch.ones(1, 3, 4)}),
        (ValueError, "draft_to_target", {"draft_to_target": torch.arange(4)}),
        (ValueError, "draft_to_target", {"draft_probs": torch.ones(1, 2, 3), "draft_to_target": torch.arange(4)}),
        (ValueError, "threshold_single", {"draft_probs": torch.ones(1, 2, 4), "threshold_single": 0.5}),
        (ValueError, "threshold_acc", {"draft_probs": torch.ones(1, 2, 4), "threshold_acc": 0.5}),
        (ValueError, "threshold_single", {"threshold_single": 0.0}),
        (ValueError, "threshold_acc", {"threshold_acc": 1.5}),
        (ValueError, "path_len", {"path_len": 2}),
        (ValueError, "path_len", {"path_len": 4, "parents": torch.tensor([[-1, 0, 1]])}),
        (TypeError, "parents", {"parents": torch.tensor([[-1, 0, 1]], dtype=torch.int32)}),
        (TypeError, "target_probs", {"target_probs": torch.ones(1, 3, 4, dtype=torch.bfloat16)}),
        (ValueError, "uniforms", {"uniforms": torch.zeros(1, 2)}),
        (ValueError, "final_uniforms", {"final_uniforms": torch.zeros(2)}),
        (ValueError, "candidates", {"candidates": torch.zeros(1, 0, dtype=torch.int64)}),
    ],
)
def test_bad_arguments(error, match, kwargs):
    good = {
        "candidates": torch.zeros(1, 3, dtype=torch.int64),
        "target_probs": torch.full((1, 3, 4), 0.25),
        "uniforms": torch.zeros(1, 3),
        "final_uniforms": torch.zeros(1),
    }
    spec_ops.accept_sampled(**good)
    with pytest.raises(error, match=f"`{match}`"):
        spec_ops.accept_sampled(**(good | kwargs))
