"""Every kernel but attention's, in Triton's interpreter, against the CPU reference: bit for bit."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.cache import append as kv_cache
from spec_ops.backends.triton.cache import indices as kv_indices
from spec_ops.backends.triton.cache import rope_append
from spec_ops.backends.triton.drafting import lookup
from spec_ops.backends.triton.runtime import launch
from spec_ops.backends.triton.sampling import accept
from spec_ops.backends.triton.tree import full_mask
from tests.helpers import far_appends
from tests.helpers.exact import ALMOST_ONE
from tests.helpers.op_cases import CASES, OPS, Rng, check, compare, kernel, reference, sampled


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Work is split as on a GPU with long rows: several blocks of the vocabulary and of the tables for small tensors."""
    monkeypatch.setattr(accept, "VOCAB_BLOCK", 64)
    monkeypatch.setattr(kv_indices, "BLOCK", 128)
    monkeypatch.setattr(lookup, "BLOCK", 32)
    monkeypatch.setattr(lookup, "PART", 64)
    monkeypatch.setattr(kv_indices, "LENS_BLOCK", 2)
    monkeypatch.setattr(full_mask, "LENS_BLOCK", 2)


@pytest.mark.parametrize("op", OPS)
def test_takes_what_the_reference_takes(op):
    assert list(inspect.signature(kernel(op)).parameters) == list(inspect.signature(reference(op)).parameters)


@pytest.mark.parametrize("op", OPS)
def test_random_layouts(op):
    for seed in range(25):
        check(op, sampled(op, seed, fp8=False), "cpu")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("op", OPS)
def test_random_cases(op, part):
    cases = 3 if op.startswith("draft_kv") else 6  # these have many programs, and the interpreter's are slow
    for seed in range(part * cases, part * cases + cases):
        check(op, CASES[op](Rng(f"{op}{seed}"), True), "cpu")


@pytest.mark.parametrize("rows", [5, 16, 17, 40])
def test_move_kv_of_more_rows_than_registers_hold(rows, monkeypatch):
    """They pass through memory; 16 rows are the most that do not."""
    monkeypatch.setattr(kv_cache, "MOVE_TILES", {16: (64, 4)})
    monkeypatch.setattr(launch, "INTERPRETER_SMS", 2)  # each program takes several turns with its part of that memory
    rng = Rng(rows)
    caches = [torch.arange(48 * width).float().reshape(12, 4, width) for width in (40, 24)]
    cycle = rng.distinct(48, rows)
    check("move_kv", (caches, cycle, cycle.roll(1)), "cpu")


def test_move_kv_has_rows_of_any_stride():
    """Rows of five dimensions, none of which lies next to another in memory, and rows without elements."""
    scattered = torch.arange(6 * 2 * 3 * 2 * 5 * 8).float().reshape(5, 2, 6, 3, 2, 8)[..., :3].permute(2, 4, 1, 0, 3, 5)
    empty = torch.zeros(3, 4, 0)
    check("move_kv", ([scattered, empty], torch.tensor([1, 0, 7]), torch.tensor([11, 1, 0])), "cpu")


def past_2_31() -> torch.Tensor:
    """More than 2^31 elements, of which the system only provides the pages that are touched."""
    return torch.empty(2**31 // (64 * 1024) + 2, 64, 8, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_addresses_past_2_31_elements():
    k_cache, v_cache = past_2_31(), past_2_31()
    last, first = k_cache.shape[0] * 64 - 1, 3
    k, v = torch.ones(2, 8, 128), torch.full((2, 8, 128), 2.0)
    kernel("append_kv")(k_cache, v_cache, k, v, torch.tensor([last, first], dtype=torch.int32), 1.0, 1.0)
    for cache, value in ((k_cache, 1.0), (v_cache, 2.0)):
        assert (cache[-1, 63].float() == value).all()
        assert (cache[0, first].float() == value).all()
    kernel("append_kv")(k_cache, v_cache, 4 * k, 4 * v, torch.tensor([5, 6]), 1.0, 1.0)
    kernel("move_kv")([k_cache, v_cache], torch.tensor([5, last]), torch.tensor([last, 9]))
    for cache, value in ((k_cache, 1.0), (v_cache, 2.0)):
        assert (cache[-1, 63].float() == 4 * value).all()
        assert (cache[0, 9].float() == value).all()
    latent = k_cache.flatten(2)
    kernel("append_mla_kv")(latent, torch.ones(1, 960) / 2, torch.ones(1, 64) / 4, torch.tensor([last - 1]), 1.0)
    assert (latent[-1, 62, :960].float() == 0.5).all()
    assert (latent[-1, 62, 960:].float() == 0.25).all()


@pytest.mark.parametrize("op", far_appends.STRIDED)
def test_strides_of_appends_past_2_31_elements(op):
    far_appends.check(op, rope_append.rope_append_kv if op == "rope_append_kv" else kernel(op), "cpu")


def test_samplers_without_any_weight():
    """No distribution (all zero, a NaN, an infinity) gives -1; a subnormal weight is one."""
    probs = torch.zeros(6, 200)
    probs[1, 140], probs[2, 70], probs[3, 199], probs[5, 3] = 0.5, 1e-44, torch.nan, torch.inf
    probs[4] = torch.nan
    args = probs, torch.tensor([0.3, 0.999, 0.5, 0.5, 0.0, 0.5])
    wanted = torch.tensor([-1, 140, 70, -1, -1, -1])
    compare(wanted, kernel("sample_tokens")(*args), args)
    compare(wanted, reference("sample_tokens")(*args), args)


@pytest.mark.parametrize("kind", ["chain", "reduced", "tree"])
def test_acceptance_ends_where_the_target_is_no_distribution(kind):
    """The path so far is kept and its last token is -1. A draft that is none is rejected: the target alone decides."""
    p = torch.full((3, 3, 200), 1 / 200)
    p[0, 1], p[1, 0] = torch.nan, 0.0
    q = torch.full((3, 2, 200), 1 / 200)
    q[2] = torch.nan
    candidates, coins = torch.tensor([[0, 70, 130]] * 3), torch.zeros(3, 3)
    ids = torch.arange(199, -1, -1) if kind == "reduced" else None
    final = torch.full((3,), 0.5)
    if kind == "tree":
        args = (candidates, p, coins, final, torch.tensor([[-1, 0, 1]] * 3), None, None, 3, 1.0, 1.0)
    else:
        args = (candidates, p, coins, final, None, q, ids, 3, 1.0, 1.0)
    wanted = reference("accept_sampled")(*args)
    assert wanted[0][:2].tolist() == [[70, -1, -1], [-1, -1, -1]]
    assert wanted[2].tolist() == [2, 1, 3 if kind == "tree" else 1]
    assert wanted[0][2, 0] == (70 if kind == "tree" else 100)
    compare(wanted, kernel("accept_sampled")(*args), args)


@pytest.mark.parametrize("kind", ["chain", "reduced", "tree"])
def test_a_missing_draft_is_neither_accepted_nor_rejected(kind):
    """A candidate of -1 is no token: the walk ends before it, and the target alone decides. What lies in front of a row of
    probabilities is another row's last token, here the likeliest."""
    p = torch.full((3, 3, 200), 0.25 / 199)
    p[:, :, 199] = 0.75
    candidates = torch.tensor([[0, -1, 199], [0, -1, -1], [0, 199, -1]])
    coins, final = torch.zeros(3, 3), torch.full((3,), ALMOST_ONE)
    ids = torch.arange(199, -1, -1) if kind == "reduced" else None
    q = p[:, :2] if ids is None else p[:, :2].flip(2)
    if kind == "tree":
        args = (candidates, p, coins, final, torch.tensor([[-1, 0, 1]] * 3), None, None, 3, 1.0, 1.0)
    else:
        args = (candidates, p, coins, final, None, q, ids, 3, 1.0, 1.0)
    wanted = reference("accept_sampled")(*args)
    assert wanted[0].tolist() == [[199, -1, -1], [199, -1, -1], [199, 199, -1]]
    assert wanted[2].tolist() == [1, 1, 2]
    compare(wanted, kernel("accept_sampled")(*args), args)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.75, ALMOST_ONE])
def test_empty_residual_falls_back_to_the_target(uniform):
    """Rows whose float32 sum is a little below 1 can reject a draft and leave nothing."""
    p = torch.zeros(1, 3, 200)
    p[0, :, 130], p[0, :, 70] = 0.5, 0.4999
    q = torch.zeros(1, 2, 200)
    q[0, :, 130], q[0, :, 70] = 0.5, 0.5
    coins, final = torch.full((1, 3), ALMOST_ONE), torch.tensor([uniform])
    ids = torch.arange(199, -1, -1)
    for args in (
        (torch.tensor([[0, 70, 130]]), p, coins, final, None, q, None, 3, 1.0, 1.0),
        (torch.tensor([[0, 70, 130]]), p, coins, final, None, q.flip(2), ids, 3, 1.0, 1.0),
        (torch.tensor([[0, 130, 70]]), p, coins, final, torch.tensor([[-1, 0, 0]]), None, None, 2, 1.0, 1.0),
    ):
        wanted = reference("accept_sampled")(*args)
        assert wanted[2].tolist() == [1]
        assert wanted[0][0, 0] == (70 if uniform < 0.5 else 130)
        compare(wanted, kernel("accept_sampled")(*args), args)


@pytest.mark.parametrize("tokens", [[0, 63], [64, 65, 66], [199], [0, 64, 128, 192], [5, 5]])
def test_rejected_children_weigh_nothing_in_any_block(tokens):
    """Blocks of 64 tokens: children at their edges, several in one, one in each, and twice the same."""
    nodes = len(tokens) + 1
    probs = torch.full((1, nodes, 200), 1 / 256)
    probs[0, 0, tokens] = 0.0  # a child that cannot be is rejected, and must not come back as the last token
    probs[0, 0, tokens[0]] = 1 / 64
    candidates = torch.tensor([[-1, *tokens]])
    parents = torch.tensor([[-1, *[0] * len(tokens)]])
    for step in range(16):
        final = torch.tensor([step / 16])
        coins = torch.full((1, nodes), 0.99)
        args = candidates, probs, coins, final, parents, None, None, 2, 1.0, 1.0
        compare(reference("accept_sampled")(*args), kernel("accept_sampled")(*args), args)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5])
def test_a_uniform_at_the_boundary_rejects(uniform):
    """Accepted is strictly below: the first child up to 1/4, the second up to 1/2; a draft of q = 1/2 and p = 1/4 up to 1/2."""
    row = torch.tensor([0.25, 0.25, 0.0, 0.5])
    coins, final = torch.tensor([[uniform, 0.0, 0.0]]), torch.zeros(1)
    tree = torch.tensor([[-1, 0, 1]]), row.expand(1, 3, 4), coins, final, torch.tensor([[-1, 0, 0]]), None, None, 2, 1.0, 1.0
    wanted = reference("accept_sampled")(*tree)
    assert wanted[1][0].tolist() == {0.0: [0, 1], 0.25: [0, 2], 0.5: [0, -1]}[uniform]
    compare(wanted, kernel("accept_sampled")(*tree), tree)
    q = torch.tensor([0.5, 0.25, 0.25, 0.0]).expand(1, 2, 4)
    chain = torch.tensor([[-1, 0, 2]]), row.expand(1, 3, 4), coins, final, None, q, None, 3, 1.0, 1.0
    wanted = reference("accept_sampled")(*chain)
    assert wanted[2].tolist() == [1 if uniform == 0.5 else 2]  # token 2 cannot be: never accepted, at a uniform of 0 either
    compare(wanted, kernel("accept_sampled")(*chain), chain)
