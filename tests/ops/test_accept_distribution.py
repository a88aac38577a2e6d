"""Sampled acceptance keeps the target's distribution: chi-square over 100,000 draws, and wrong rules that must fail it.

The distribution tests draw from fixed seeds on the CPU whatever the device, so a run repeats exactly and cannot flake. A
right rule must reach p > 1e-3 (`PASS`): about 40 p-values are looked at, so other seeds, or another generator in a later torch,
would fail a right rule with a chance of 4% at most. The same statistic on rules wrong on purpose must give p < 1e-6 (`FAIL`),
three orders below, which shows that the number of draws resolves such mistakes.
"""

from __future__ import annotations

import pytest
import scipy.stats
import torch

import spec_ops
from tests.helpers.distribution import DEPTH, DRAWS, FAIL, PASS, Model, p_values


def _uniforms(generator: torch.Generator, device: str, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator).to(device)


def _sample_chain(target: Model, draft: Model, device: str, seed: int, ids: list[int] | None = None, sampling=None):
    """Arguments of `accept_sampled` for chains of two drafts, sampled from `draft`; target ids are `ids[draft id]`.

    Target and draft tokens condition on target ids, hence the draft's tables are those of the target's vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.zeros(DRAWS, DEPTH, dtype=torch.int64)
    target_rows, draft_rows = [], []

    def rows(model, prefix):
        if sampling is None:
            return model.after(model.probs, prefix).float()
        logits = model.after(model.logits, prefix).to(device)
        per_request = {k: torch.full((DRAWS,), v, device=device) for k, v in sampling.items()}
        return spec_ops.sampling_probs(logits, **per_request).cpu()

    for d in range(DEPTH):
        prefix = candidates[:, 1 : d + 1]
        target_rows.append(rows(target, prefix))
        if d + 1 < DEPTH:
            # A draft's conditionals, on a reduced vocabulary, are looked up by the draft ids of the prefix.
            q = rows(draft, prefix if ids is None else torch.tensor(_inverse(ids))[prefix])
            drafted = spec_ops.sample_tokens(q.to(device), _uniforms(generator, device, DRAWS)).cpu()
            candidates[:, d + 1] = drafted if ids is None else torch.tensor(ids)[drafted]
            draft_rows.append(q)
    return {
        "candidates": candidates.to(device),
        "target_probs": torch.stack(target_rows, 1).to(device),
        "uniforms": _uniforms(generator, device, DRAWS, DEPTH),
        "final_uniforms": _uniforms(generator, device, DRAWS),
        "draft_probs": torch.stack(draft_rows, 1).to(device),
    }


def _inverse(ids: list[int]) -> list[int]:
    """Draft id of each target id; 0 for those without, which are never drafted."""
    return [ids.index(t) if t in ids else 0 for t in range(max(ids) + 1)]


def _sample_tree(target: Model, draft: Model, device: str, seed: int, topk: int, num_tokens: int, random_siblings: bool):
    """Arguments of `accept_sampled` for two-step trees of top-k drafts.

    With `random_siblings` each request perturbs the draft's log-probabilities (Gumbel noise: siblings drawn without
    replacement), so that trees differ; the rule must be lossless for any siblings chosen without knowing the uniforms.
    """
    generator = torch.Generator().manual_seed(seed)

    def propose(prefix):
        logp = draft.after(draft.probs, prefix).log().float()
        if random_siblings:
            logp = logp - torch.empty(logp.shape).exponential_(generator=generator).log()
        best = logp.log_softmax(-1).topk(topk)
        return best.values, best.indices

    root = torch.zeros(DRAWS, 0, dtype=torch.int64)
    score, token = propose(root)
    scores, tokens = [score], [token]
    for branch in range(topk):
        child_score, child = propose(token[:, branch : branch + 1])
        scores.append(score[:, branch, None] + child_score)
        tokens.append(child)
    parent_list = torch.arange(-1, topk).repeat(DRAWS, 1).to(device)
    drafted, selected = spec_ops.select_draft_tokens(
        torch.cat(scores, 1).to(device), torch.cat(tokens, 1).to(device), num_tokens
    )
    tree = spec_ops.build_tree(parent_list, selected, torch.zeros(DRAWS, dtype=torch.int64, device=device), topk)
    candidates = torch.cat([drafted.new_zeros(DRAWS, 1), drafted], 1).cpu()
    depth, parents = tree.positions.cpu(), tree.parents.cpu()
    probs = []
    for node in range(num_tokens + 1):
        token = candidates[:, node : node + 1]
        before = candidates.gather(1, parents[:, node : node + 1].clamp(min=0))
        by_depth = torch.stack([target.after(target.probs, p).float() for p in (root, token, torch.cat([before, token], 1))], 1)
        probs.append(by_depth[torch.arange(DRAWS), depth[:, node]])
    return {
        "candidates": candidates.to(device),
        "target_probs": torch.stack(probs, 1).to(device),
        "uniforms": _uniforms(generator, device, DRAWS, num_tokens + 1),
        "final_uniforms": _uniforms(generator, device, DRAWS),
        "parents": tree.parents,
        "path_len": DEPTH,
    }


def _without(args: dict, *names: str) -> dict:
    return {k: v for k, v in args.items() if k not in names}


def _assert_accept_rate(accepted: spec_ops.Accepted, expected: torch.Tensor) -> None:
    """The first draft is accepted with this probability: a rule that never accepted would be lossless too, and useless."""
    count = int((accepted.lens > 1).sum())
    p = float(expected.double().mean())
    assert scipy.stats.binomtest(count, DRAWS, p).pvalue > PASS


# Sampling parameters of the scenarios: a flat distribution, since rare sequences would need more draws.
VOCAB = 6
SCALE = 0.7


@pytest.fixture(scope="module")
def target():
    return Model(seed=1, vocab=VOCAB, scale=SCALE)


@pytest.fixture(scope="module")
def draft():
    return Model(seed=2, vocab=VOCAB, scale=SCALE)


@pytest.fixture(scope="module")
def chain(target, draft, device):
    return _sample_chain(target, draft, device, seed=3)


TREES = {
    "top-2 of 5": {"topk": 2, "num_tokens": 5, "random_siblings": False},
    "top-3 of 7": {"topk": 3, "num_tokens": 7, "random_siblings": False},
    "random top-2 of 6": {"topk": 2, "num_tokens": 6, "random_siblings": True},
    "random top-3 of 6": {"topk": 3, "num_tokens": 6, "random_siblings": True},
}


@pytest.fixture(scope="module")
def random_tree(target, draft, device):
    return _sample_tree(target, draft, device, seed=4, **TREES["random top-2 of 6"])


def test_rejection_sampling_is_lossless(target, chain):
    accepted = spec_ops.accept_sampled(**chain)
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=10)) > PASS
    _assert_accept_rate(accepted, torch.minimum(chain["target_probs"][:, 0], chain["draft_probs"][:, 0]).sum(-1))


def test_target_only_chain_is_lossless(target, chain):
    accepted = spec_ops.accept_sampled(**_without(chain, "draft_probs"))
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=11)) > PASS
    _assert_accept_rate(accepted, chain["target_probs"][:, 0].gather(1, chain["candidates"][:, 1:2]))


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_tree_is_lossless(target, draft, device, tree):
    args = _sample_tree(target, draft, device, seed=4, **tree)
    accepted = spec_ops.accept_sampled(**args)
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=12)) > PASS
    children = args["target_probs"][:, 0].gather(1, args["candidates"]) * (args["parents"] == 0)
    _assert_accept_rate(accepted, children.sum(1))


SAMPLING = {"temperature": 0.8, "top_k": 5, "top_p": 0.85}


@pytest.fixture(scope="module")
def filtered(device):
    """A target and a chain with temperature, top-k and top-p on draft and target."""
    target, draft = (Model(seed=s, vocab=8, scale=SCALE, **SAMPLING) for s in (5, 6))
    return target, draft, _sample_chain(target, draft, device, seed=7, sampling=SAMPLING)


@pytest.mark.parametrize("with_draft_probs", [True, False])
def test_lossless_with_temperature_top_k_and_top_p(filtered, with_draft_probs):
    target, _, args = filtered
    assert (target.joint(1) == 0).any(), "nothing was cut off"
    accepted = spec_ops.accept_sampled(**(args if with_draft_probs else _without(args, "draft_probs")))
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=13)) > PASS


IDS = [4, 0, 5, 2]  # target ids of a draft vocabulary of 4; no id keeps its place


@pytest.fixture(scope="module")
def reduced(target, device):
    return _sample_chain(target, Model(seed=8, vocab=len(IDS), scale=SCALE), device, seed=9, ids=IDS)


def test_lossless_with_a_reduced_draft_vocabulary(target, reduced, device):
    accepted = spec_ops.accept_sampled(**reduced, draft_to_target=torch.tensor(IDS, device=device))
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=14)) > PASS
    drafted = torch.nn.functional.one_hot(reduced["candidates"][:, 1], VOCAB).sum(0)
    assert (drafted > 0).nonzero().flatten().tolist() == sorted(IDS)


# Negative controls: wrong rules must fail the very statistic that the right ones pass.


def _rejection(args: dict, accept: str = "ratio", resample: str = "residual") -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling of chains, again, with knobs for doing it wrong."""
    p, q, drafted = args["target_probs"], args["draft_probs"], args["candidates"][:, 1:]
    p_draft, q_draft = (x[:, : DEPTH - 1].gather(2, drafted[..., None])[..., 0] for x in (p, q))
    bound = p_draft / q_draft if accept == "ratio" else p_draft
    kept = (args["uniforms"][:, : DEPTH - 1] < bound).long().cumprod(1).sum(1)
    row = torch.arange(DRAWS, device=p.device)
    weights = p[row, kept]
    if resample == "residual":
        weights = (weights - torch.cat([q, torch.zeros_like(q[:, :1])], 1)[row, kept]).clamp(min=0)
    final = torch.searchsorted(weights.cumsum(1), args["final_uniforms"][:, None] * weights.sum(1, keepdim=True), right=True)
    tokens = torch.cat([drafted, drafted.new_full((DRAWS, 1), -1)], 1)
    return tokens.scatter(1, kept[:, None], final.clamp(max=p.shape[2] - 1)), kept + 1


def test_control_itself_is_lossless(target, chain):
    assert min(p_values(target, *_rejection(chain), seed=15)) > PASS


@pytest.mark.parametrize("wrong", [{"accept": "target probability"}, {"resample": "target"}])
def test_wrong_rejection_is_caught(target, chain, wrong):
    assert max(p_values(target, *_rejection(chain, **wrong), seed=15)) < FAIL


def test_forgotten_scatter_is_caught(target, reduced):
    # Draft probabilities padded to the target's width, still in the order of the draft's ids.
    padded = torch.nn.functional.pad(reduced["draft_probs"], (0, VOCAB - len(IDS)))
    accepted = spec_ops.accept_sampled(**(reduced | {"draft_probs": padded}))
    assert max(p_values(target, accepted.tokens, accepted.lens, seed=14)) < FAIL


def test_unfiltered_draft_probs_are_caught(filtered):
    target, draft, args = filtered
    prefixes = [args["candidates"][:, 1 : d + 1].cpu() for d in range(DEPTH - 1)]
    raw = torch.stack([draft.after(draft.logits, p).softmax(-1) for p in prefixes], 1).to(args["candidates"].device)
    accepted = spec_ops.accept_sampled(**(args | {"draft_probs": raw}))
    assert max(p_values(target, accepted.tokens, accepted.lens, seed=13)) < FAIL


@pytest.mark.slow
def test_residual_with_rejected_siblings_is_caught(target, random_tree):
    accepted = spec_ops.accept_sampled(**random_tree)
    last = accepted.lens.long()[:, None] - 1
    node = accepted.path.gather(1, last)
    probs = random_tree["target_probs"].gather(1, node[..., None].expand(-1, 1, VOCAB))[:, 0]
    final = spec_ops.sample_tokens(probs, random_tree["final_uniforms"])
    tokens = accepted.tokens.scatter(1, last, final[:, None])
    assert max(p_values(target, tokens, accepted.lens, seed=12)) < FAIL


def test_one_uniform_for_every_node_is_caught(target, random_tree):
    shared = random_tree["uniforms"][:, :1].expand(-1, random_tree["uniforms"].shape[1])
    accepted = spec_ops.accept_sampled(**(random_tree | {"uniforms": shared}))
    first, second, third = p_values(target, accepted.tokens, accepted.lens, seed=12)
    assert first > PASS  # one node alone is right: what is wrong is the dependence
    assert max(second, third) < FAIL


def test_reusing_the_uniform_of_a_rejection_is_caught(target, chain):
    accepted = spec_ops.accept_sampled(**(chain | {"final_uniforms": chain["uniforms"][:, 0].contiguous()}))
    assert max(p_values(target, accepted.tokens, accepted.lens, seed=10)) < FAIL


# Lossy thresholds


@pytest.mark.parametrize("thresholds", [{"threshold_single": 0.2}, {"threshold_acc": 0.5}])
def test_thresholds_accept_more_and_are_lossy(target, chain, random_tree, thresholds):
    for args in (_without(chain, "draft_probs"), random_tree):
        strict = spec_ops.accept_sampled(**args)
        lossy = spec_ops.accept_sampled(**args, **thresholds)
        assert ((lossy.lens > 1) >= (strict.lens > 1)).all(), "a root's child accepted before is accepted still"
        assert lossy.lens.double().mean() > strict.lens.double().mean() + 0.05
        assert max(p_values(target, lossy.tokens, lossy.lens, seed=16)) < FAIL
