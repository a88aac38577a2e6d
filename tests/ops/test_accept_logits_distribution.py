"""Acceptance from logits keeps the target's distribution, for every setting: chi-square over 100,000 draws, and controls.

As in `test_accept_distribution`: fixed seeds, `PASS` for right rules, `FAIL` for rules wrong on purpose. About 80 p-values are
looked at: with other seeds a right rule would fail with a chance of 8% at most.
"""

from __future__ import annotations

import pytest
import scipy.stats
import torch

import spec_ops
from tests.helpers.distribution import DEPTH, DRAWS, FAIL, PASS, Model, p_values

VOCAB, SCALE = 6, 0.6
IDS = [4, 0, 5, 2]  # target ids of a draft vocabulary of 4; no id keeps its place
SETTINGS = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 1.4},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.4},
    "all": {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.25},
}
KEEP_ALL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
RULES = {"tokens": {}, "block": {"block": True}}


def per_request(groups: list[dict], device: str) -> dict[str, torch.Tensor]:
    """`DRAWS` requests of each of the settings `groups`, one group after the other."""
    dtypes = {"top_k": torch.int32}
    return {
        name: torch.tensor([(KEEP_ALL | group)[name] for group in groups], dtype=dtypes.get(name, torch.float32), device=device)
        .repeat_interleave(DRAWS)
        for name in KEEP_ALL
    }  # fmt: skip


def chains(target: Model, draft: Model, groups: list[dict], device: str, seed: int, ids: list[int] | None = None) -> dict:
    """Arguments of `accept_sampled_logits`: chains of two drafts, drawn by `sample_logits`; target ids are `ids[draft id]`."""
    generator = torch.Generator().manual_seed(seed)
    settings = per_request(groups, device)
    count = DRAWS * len(groups)
    candidates, drafted = torch.zeros(count, DEPTH, dtype=torch.int64), torch.zeros(count, DEPTH, dtype=torch.int64)
    target_rows, draft_rows, supports = [], [], []
    for d in range(DEPTH):
        target_rows.append(target.after(target.logits, candidates[:, 1 : d + 1]))
        if d + 1 < DEPTH:
            draft_rows.append(draft.after(draft.logits, drafted[:, 1 : d + 1]))
            coins = torch.rand(count, generator=generator).to(device)
            sampled = spec_ops.sample_logits(draft_rows[-1].to(device), coins, **settings)
            supports.append(sampled.support)
            drafted[:, d + 1] = sampled.tokens.cpu()
            candidates[:, d + 1] = drafted[:, d + 1] if ids is None else torch.tensor(ids)[drafted[:, d + 1]]
    logits = torch.stack(target_rows, 1).to(device)
    args = {
        "candidates": candidates.to(device),
        "target_logits": logits,
        "target_support": spec_ops.sampling_support(logits, **settings),
        "uniforms": torch.rand(count, DEPTH, generator=generator).to(device),
        "final_uniforms": torch.rand(count, generator=generator).to(device),
        "temperature": settings["temperature"],
        "draft_logits": torch.stack(draft_rows, 1).to(device),
        "draft_support": torch.stack(supports, 1),
    }
    if ids is not None:
        place = [ids.index(x) if x in ids else -1 for x in range(target.vocab)]
        args["target_to_draft"] = torch.tensor(place, device=device)
    return args


def target_only(args: dict) -> dict:
    return {name: value for name, value in args.items() if name not in ("draft_logits", "draft_support", "target_to_draft")}


@pytest.fixture(scope="module")
def pairs():
    """Target and draft for each of the settings; the logits are the same ones."""
    return {
        name: [Model(seed=seed, vocab=VOCAB, scale=SCALE, **setting) for seed in (21, 22)] for name, setting in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def plain(pairs, device):
    return chains(*pairs["plain"], [{}], device, seed=23)


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_the_distribution(pairs, device, name):
    target, _ = pairs[name]
    logits = target.logits[0].expand(DRAWS, VOCAB).to(device)
    coins = torch.rand(DRAWS, generator=torch.Generator().manual_seed(24)).to(device)
    tokens = spec_ops.sample_logits(logits, coins, **per_request([SETTINGS[name]], device)).tokens
    assert p_values(target, tokens[:, None], torch.ones(DRAWS), seed=25)[0] > PASS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_chains_are_lossless(pairs, plain, device, name, rule):
    target, draft = pairs[name]
    args = plain if name == "plain" else chains(target, draft, [SETTINGS[name]], device, seed=23)
    accepted = spec_ops.accept_sampled_logits(**args, **RULES[rule])
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=26)) > PASS


@pytest.mark.parametrize("rule", RULES)
def test_a_reduced_vocabulary_is_lossless(pairs, device, rule):
    target = pairs["plain"][0]
    args = chains(target, Model(seed=27, vocab=len(IDS), scale=SCALE), [{}], device, seed=28, ids=IDS)
    accepted = spec_ops.accept_sampled_logits(**args, **RULES[rule])
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=29)) > PASS


@pytest.mark.parametrize("name", ["plain", "all"])
def test_target_only_is_lossless(pairs, plain, device, name):
    target, draft = pairs[name]
    args = plain if name == "plain" else chains(target, draft, [SETTINGS[name]], device, seed=30)
    accepted = spec_ops.accept_sampled_logits(**target_only(args))
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=31)) > PASS


def trees(target: Model, setting: dict, device: str, seed: int) -> dict:
    """Arguments for trees of two random children of the root and two of its first child, siblings different."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.rand(DRAWS, VOCAB, generator=generator).topk(2).indices for _ in range(2))
    candidates = torch.cat([torch.zeros_like(first[:, :1]), first, second], 1)
    prefixes = [first[:, :0], first[:, :1], first[:, 1:]]
    prefixes += [torch.stack([first[:, 0], second[:, i]], 1) for i in range(2)]
    logits = torch.stack([target.after(target.logits, prefix) for prefix in prefixes], 1).to(device)
    settings = per_request([setting], device)
    return {
        "candidates": candidates.to(device),
        "target_logits": logits,
        "target_support": spec_ops.sampling_support(logits, **settings),
        "uniforms": torch.rand(DRAWS, 5, generator=generator).to(device),
        "final_uniforms": torch.rand(DRAWS, generator=generator).to(device),
        "temperature": settings["temperature"],
        "parents": torch.tensor([[-1, 0, 0, 1, 1]], device=device).expand(DRAWS, -1),
        "path_len": DEPTH,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "min_p", "all"])
def test_trees_are_lossless(pairs, device, name):
    target = pairs[name][0]
    accepted = spec_ops.accept_sampled_logits(**trees(target, SETTINGS[name], device, seed=32))
    assert min(p_values(target, accepted.tokens, accepted.lens, seed=33)) > PASS
    assert (accepted.lens == DEPTH).any()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_requests_of_mixed_settings_in_one_batch(pairs, device, rule):
    target, draft = pairs["plain"]
    groups = [{"temperature": 0.0}, SETTINGS["all"], SETTINGS["top_k"], {}]
    accepted = spec_ops.accept_sampled_logits(**chains(target, draft, groups, device, seed=34), **RULES[rule])
    tokens, lens = accepted.tokens.split(DRAWS), accepted.lens.split(DRAWS)
    for name, own, own_lens in zip(["all", "top_k", "plain"], tokens[1:], lens[1:], strict=True):
        assert min(p_values(pairs[name][0], own, own_lens, seed=35)) > PASS
    best = target.logits[0].argmax()
    assert (tokens[0][:, 0] == best.item()).all()
    assert len(tokens[0].unique(dim=0)) == 1


def test_blocks_accept_more(pairs, plain):
    """The mean number of accepted drafts is the exact one of each rule, and block verification's is larger."""
    means = []
    for name, rule in RULES.items():
        count = (spec_ops.accept_sampled_logits(**plain, **rule).lens - 1).double().cpu()
        exact = accepted_drafts(*pairs["plain"], block=name == "block")
        means.append(exact)
        error = (count.mean() - exact) / (count.std() / DRAWS**0.5)
        assert 2 * scipy.stats.norm.sf(abs(float(error))) > PASS
    assert means[1] > means[0] + 0.005


def accepted_drafts(target: Model, draft: Model, block: bool) -> float:
    """The expected number for chains of two, from the chance of every pair of drafts."""
    p, q = ([model.probs[0], model.probs[1]] for model in (target, draft))
    first, second = p[0] / q[0], p[1] / q[1]
    pair = q[0][:, None] * q[1]
    if not block:
        one = first.clamp(max=1)[:, None]
        return float((pair * one * (1 + second.clamp(max=1))).sum())
    scale = first.clamp(max=1)
    left = (scale[:, None] * p[1] - q[1]).clamp(min=0).sum(1)
    one = (left / (left + 1 - scale))[:, None]
    two = (scale[:, None] * second).clamp(max=1)
    return float((pair * (2 * two + (1 - two) * one)).sum())


# Negative controls: arguments wrong on purpose must fail the very statistic that the right ones pass.


@pytest.mark.parametrize("rule", RULES)
def test_another_support_than_the_drafts_is_caught(pairs, device, rule):
    target, draft = pairs["top_k"]
    args = chains(target, draft, [SETTINGS["top_k"]], device, seed=36)
    args["draft_support"] = spec_ops.sampling_support(args["draft_logits"], args["temperature"])
    accepted = spec_ops.accept_sampled_logits(**args, **RULES[rule])
    assert max(p_values(target, accepted.tokens, accepted.lens, seed=37)) < FAIL


def test_one_uniform_for_every_draft_of_a_block_is_caught(pairs, plain):
    shared = plain["uniforms"][:, :1].expand(-1, DEPTH)
    accepted = spec_ops.accept_sampled_logits(**(plain | {"uniforms": shared}), block=True)
    assert min(p_values(pairs["plain"][0], accepted.tokens, accepted.lens, seed=38)) < FAIL


def test_a_blocks_length_decided_as_tokens_is_caught(pairs, plain):
    """Accepted as a block, continued as after tokens: from `max(p - q, 0)` instead of `max(a p - q, 0)`."""
    target = pairs["plain"][0]
    accepted = spec_ops.accept_sampled_logits(**plain, block=True)
    row = torch.arange(DRAWS, device=accepted.lens.device)
    last = accepted.lens.long() - 1
    short = last < DEPTH - 1
    p = torch.softmax(plain["target_logits"][row, last], -1)
    q = torch.softmax(plain["draft_logits"][row, last.clamp(max=DEPTH - 2)], -1)
    final = spec_ops.sample_tokens((p - q).clamp(min=0), plain["final_uniforms"])
    tokens = torch.where(short[:, None], accepted.tokens.scatter(1, last[:, None], final[:, None]), accepted.tokens)
    assert min(p_values(target, tokens, accepted.lens, seed=39)) < FAIL
