"""`accept_sampled_logits` against walks in exact arithmetic and against `accept_sampled`; block verification by enumeration."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_ops
from tests.helpers import accept_oracle as oracle
from tests.helpers.exact import ALMOST_ONE, FUZZ
from tests.helpers.sampling_oracle import kept_weights_of, support_of
from tests.helpers.tree_oracle import random_parents

NAN, INF = math.nan, math.inf
KINDS = ["target_only", "tree", "rejection", "reduced", "block", "reduced_block"]


def rows_of(logits: torch.Tensor, supports: list, temperature: float) -> list[list[Fraction]]:
    """Of one request: its distributions in exact numbers."""
    weights = [kept_weights_of(row, temperature, support) for row, support in zip(logits, supports, strict=True)]
    return [[Fraction(w, max(support[2], 1)) for w in row] for row, support in zip(weights, supports, strict=True)]


class Case:
    """Random arguments of a kind: logits of many ties, mixed settings, masked tokens, no drafts and no distributions."""

    def __init__(self, rng: random.Random, kind: str, broken: bool = True) -> None:
        self.rng, self.kind = rng, kind
        self.bs, self.nodes, self.vocab = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 7)
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.temperature = [rng.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(self.bs)]
        self.settings = [
            (rng.choice([0, 1, 3]), rng.choice([0.3, 0.9, 1.0]), rng.choice([0.0, 0.1, 0.9])) for _ in range(self.bs)
        ]
        with_drafts = kind not in ("target_only", "tree")
        self.target, self.target_support = self.make_rows(self.nodes, self.vocab, broken)
        self.ids = rng.sample(range(self.vocab), rng.randint(1, self.vocab)) if "reduced" in kind else list(range(self.vocab))
        self.draft, self.draft_support = self.make_rows(self.nodes - 1, len(self.ids), broken) if with_drafts else (None, None)
        self.candidates = [[-1, *(self.make_draft() for _ in range(self.nodes - 1))] for _ in range(self.bs)]
        self.uniforms = [[self.coin() for _ in range(self.nodes)] for _ in range(self.bs)]
        self.final = [self.coin() for _ in range(self.bs)]
        self.parents = [random_parents(rng, self.nodes) for _ in range(self.bs)] if kind == "tree" else None
        self.path_len = rng.randint(1, self.nodes) if kind == "tree" else self.nodes
        self.thresholds = (1.0, 1.0) if with_drafts else rng.choice([(1.0, 1.0), (0.5, 1.0), (1.0, 0.5)])

    def coin(self) -> float:
        return self.rng.choice([0.0, ALMOST_ONE, *(self.rng.randrange(2**24) / 2**24 for _ in range(6))])

    def make_draft(self) -> int:
        return self.rng.choice([-1, *self.ids * 3])

    def make_rows(self, count: int, vocab: int, broken: bool) -> tuple[torch.Tensor, list]:
        logits = torch.randn(self.bs, count, vocab, generator=self.generator) * self.rng.choice([0.3, 1.0, 4.0])
        if self.rng.random() < 0.5:
            logits = (logits * 2).round() / 2
        logits = logits.to(self.rng.choice([torch.float32, torch.bfloat16, torch.float16]))
        if count and self.rng.random() < 0.3:
            logits[0, self.rng.randrange(count), self.rng.randrange(vocab)] = self.rng.choice([NAN, INF] if broken else [-INF])
        if count and vocab > 1 and self.rng.random() < 0.3:
            logits[-1, :, self.rng.randrange(vocab)] = -INF
        one_each = zip(logits, self.temperature, self.settings, strict=True)
        return logits, [[support_of(row, hot, *settings) for row in request] for request, hot, settings in one_each]

    def op(self, device: str) -> spec_ops.Accepted:
        def supports(values: list, count: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64).reshape(self.bs, count, 3).to(device)

        drafts = {}
        if self.draft is not None:
            drafts = {"draft_logits": self.draft.to(device), "draft_support": supports(self.draft_support, self.nodes - 1)}
        if "reduced" in self.kind:
            ids = [self.ids.index(x) if x in self.ids else -1 for x in range(self.vocab)]
            drafts["target_to_draft"] = torch.tensor(ids, device=device)
        return spec_ops.accept_sampled_logits(
            torch.tensor(self.candidates, device=device),
            self.target.to(device),
            supports(self.target_support, self.nodes),
            torch.tensor(self.uniforms, device=device),
            torch.tensor(self.final, device=device),
            torch.tensor(self.temperature, device=device),
            parents=None if self.parents is None else torch.tensor(self.parents, device=device),
            path_len=self.path_len,
            threshold_single=self.thresholds[0],
            threshold_acc=self.thresholds[1],
            block="block" in self.kind,
            **drafts,
        )

    def walk(self, b: int) -> oracle.Path:
        p = rows_of(self.target[b], self.target_support[b], self.temperature[b])
        coins, final = [Fraction(u) for u in self.uniforms[b]], Fraction(self.final[b])
        if self.draft is None:
            parents = list(range(-1, self.nodes - 1)) if self.parents is None else self.parents[b]
            thresholds = map(Fraction, self.thresholds)
            return oracle.target_only(self.candidates[b], p, coins, final, parents, self.path_len, *thresholds)
        q = [[Fraction(0)] * self.vocab for _ in range(self.nodes - 1)]
        for row, reduced in zip(q, rows_of(self.draft[b], self.draft_support[b], self.temperature[b]), strict=True):
            for draft_id, x in enumerate(self.ids):
                row[x] = reduced[draft_id]
        rule = oracle.block if "block" in self.kind else oracle.rejection
        return rule(self.candidates[b], p, q, coins, final)


def paths(accepted: spec_ops.Accepted) -> list[oracle.Path]:
    lens = accepted.lens.tolist()
    assert ((accepted.tokens >= 0) | (accepted.path >= 0)).sum(1).tolist() == lens
    return [(t[:n], i[:n]) for t, i, n in zip(accepted.tokens.tolist(), accepted.path.tolist(), lens, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(st.integers(0, 2**32))
def test_matches_the_walk(kind, seed):
    """On the CPU: with a GPU's exponential a support of these logits has other last bits."""
    case = Case(random.Random(seed), kind)
    assert paths(case.op("cpu")) == [case.walk(b) for b in range(case.bs)]


@pytest.mark.parametrize("kind", ["chain", "reduced", "target_only", "tree"])
def test_equals_acceptance_by_distributions(device, kind):
    """The same uniforms give what `accept_sampled` gives, but where one falls within rounding of a boundary."""
    generator = torch.Generator().manual_seed(5)
    bs, nodes, vocab, draft_vocab = 4000, 4, 12, 8 if kind == "reduced" else 12
    logits = 2 * torch.randn(bs, nodes, vocab, generator=generator)
    draft_logits = logits[:, :-1, :draft_vocab] + torch.randn(bs, nodes - 1, draft_vocab, generator=generator)
    settings = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(bs // 4),
        "top_k": torch.tensor([0, 5, 0, 9, 3]).repeat(bs // 5),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 0.8]).repeat_interleave(bs // 4),
        "min_p": torch.tensor([0.0, 0.1]).repeat_interleave(bs // 2),
    }
    settings = {name: value.to(device) for name, value in settings.items()}
    logits, draft_logits = logits.to(device), draft_logits.to(device)
    uniforms, final = torch.rand(bs, nodes, generator=generator).to(device), torch.rand(bs, generator=generator).to(device)
    coins = torch.rand(bs, nodes - 1, generator=generator).to(device)
    drafted = spec_ops.sample_logits(draft_logits, coins, **settings)
    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].to(device) if kind == "reduced" else None
    candidates = torch.nn.functional.pad(drafted.tokens if ids is None else ids[drafted.tokens], (1, 0))
    by_logits, by_probs = {}, {}
    if kind == "tree":
        by_logits = by_probs = {"parents": torch.tensor([[-1, 0, 0, 1]], device=device).repeat(bs, 1), "path_len": 3}
    elif kind != "target_only":
        by_logits = {"draft_logits": draft_logits, "draft_support": drafted.support}
        by_probs = {"draft_probs": spec_ops.sampling_probs(draft_logits, **settings)}
    if ids is not None:
        place = torch.full((vocab,), -1, device=device)
        by_logits["target_to_draft"] = place.index_copy(0, ids, torch.arange(draft_vocab, device=device))
        by_probs["draft_to_target"] = ids
    got = spec_ops.accept_sampled_logits(
        candidates, logits, spec_ops.sampling_support(logits, **settings), uniforms, final, settings["temperature"], **by_logits
    )
    wanted = spec_ops.accept_sampled(candidates, spec_ops.sampling_probs(logits, **settings), uniforms, final, **by_probs)
    # Float32 probabilities are off by 2^-24 of themselves. A request compares uniforms with at most 15 boundaries, so that one
    # of all 4000 differs with a chance of 1%.
    differing = (got.tokens != wanted.tokens).any(1) | (got.lens != wanted.lens)
    assert differing.sum() <= 1
    assert 1.1 < got.lens.float().mean() < nodes - 0.5


def chain(device, target, draft, drafts, uniforms, final, temperature=1.0, **kwargs) -> oracle.Path:
    """One request given as lists: what is accepted."""
    hot = torch.tensor([temperature], device=device)
    target, draft = (torch.tensor([x], device=device) for x in (target, draft))
    accepted = spec_ops.accept_sampled_logits(
        torch.tensor([[-1, *drafts]], device=device),
        target,
        spec_ops.sampling_support(target, hot),
        torch.tensor([[*uniforms, 0.0]], device=device),
        torch.tensor([final], device=device),
        hot,
        draft_logits=draft,
        draft_support=spec_ops.sampling_support(draft, hot),
        **kwargs,
    )
    return paths(accepted)[0]


@pytest.mark.parametrize("block", [False, True])
def test_equal_distributions_accept_every_draft(device, block):
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(6)).tolist()
    for temperature in (0.0, 0.5, 1.0):
        best = [max(range(9), key=row.__getitem__) for row in rows]
        tokens, nodes = chain(device, rows, rows[:3], best[:3], [ALMOST_ONE] * 3, 0.0, temperature, block=block)
        assert nodes == [0, 1, 2, 3]
        assert tokens[:3] == best[:3]


@pytest.mark.parametrize("block", [False, True])
def test_a_draft_after_no_distribution_counts_as_none(device, block):
    even, broken = [0.0, 0.0], [NAN, 0.0]
    for coin, token in ((0.25, 0), (0.75, 1)):  # the target's own distribution, from which nothing was rejected
        assert chain(device, [even] * 2, [broken], [1], [0.0], coin, block=block) == ([token], [0])
        assert chain(device, [even] * 2, [even], [-1], [0.0], coin, block=block) == ([token], [0])
    # A request whose target has no distribution after an accepted draft says so, whatever was drafted next.
    assert chain(device, [even, broken, even], [even] * 2, [1, 1], [0.0, 0.0], 0.5, block=block) == ([1, -1], [0, 1])
    assert chain(device, [broken, even], [even], [1], [0.0], 0.5, block=block) == ([-1], [0])


def test_a_block_accepts_what_tokens_would_reject(device):
    # The first draft alone is accepted with 1/2, the second makes up for it: p = (1/4, 3/4), q = (1/2, 1/2), then the reverse.
    low, even = [0.0, math.log(3.0)], [0.0, 0.0]
    high = [math.log(3.0), 0.0]
    args = ([low, high, even], [even, even], [0, 0], [0.6, 0.6], 0.0)
    assert chain(device, *args)[1] == [0]
    assert chain(device, *args, block=True)[1] == [0, 1, 2]  # the pair's ratio is 3/4


def test_no_drafts_at_all(device):
    logits, ones = torch.tensor([[[0.0, 1.0]]], device=device), torch.ones(1, device=device)
    args = (torch.tensor([[-1]], device=device), logits, spec_ops.sampling_support(logits, ones))
    for kwargs in (
        {},
        {"draft_logits": logits[:, :0], "draft_support": torch.zeros(1, 0, 3, dtype=torch.int64, device=device)},
    ):
        for block in {False, bool(kwargs)}:
            for coin, token in ((0.2, 0), (0.3, 1)):
                final = torch.tensor([coin], device=device)
                accepted = spec_ops.accept_sampled_logits(
                    *args, torch.zeros(1, 1, device=device), final, ones, block=block, **kwargs
                )
                assert paths(accepted) == [([token], [0])]


# Block verification by exact enumeration.


def random_row(rng: random.Random, vocab: int) -> list[Fraction]:
    parts = [rng.choice([0, rng.randint(1, 9)]) for _ in range(vocab)]
    parts[rng.randrange(vocab)] += 1
    return [Fraction(part, sum(parts)) for part in parts]


class Pair:
    """A target and a draft of random conditionals over `vocab` tokens, as exact numbers."""

    def __init__(self, rng: random.Random, vocab: int, steps: int) -> None:
        self.vocab, self.steps = vocab, steps
        prefixes = [x for d in range(steps + 1) for x in itertools.product(range(vocab), repeat=d)]
        self.p = {x: random_row(rng, vocab) for x in prefixes}
        # Often equal to the target's, where every deficit is 0.
        self.q = {x: self.p[x] if rng.random() < 0.2 else random_row(rng, vocab) for x in prefixes}

    def joint(self, rows: dict, tokens: tuple[int, ...]) -> Fraction:
        return math.prod((rows[tokens[:i]][token] for i, token in enumerate(tokens)), start=Fraction(1))

    def outcomes(self, block: bool):
        """Every `(chance, accepted drafts, distribution of the next token)`."""
        for drafts in itertools.product(range(self.vocab), repeat=self.steps):
            chance = self.joint(self.q, drafts)
            if not chance:
                continue
            p, q = ([rows[drafts[:i]] for i in range(self.steps + 1)] for rows in (self.p, self.q))
            if block:
                scales, accept = oracle.block_chances(drafts, p, q)
                reached = [accept[i - 1] if i else Fraction(1) for i in range(self.steps + 1)]
                chances = [reached[i] * math.prod(1 - h for h in accept[i:]) for i in range(self.steps + 1)]
            else:
                scales = [Fraction(1)] * (self.steps + 1)
                ratios = [min(p[i][x] / q[i][x], Fraction(1)) for i, x in enumerate(drafts)]
                chances = [math.prod(ratios[:i]) * (1 - ratios[i] if i < self.steps else 1) for i in range(self.steps + 1)]
            for kept, share in enumerate(chances):
                left = oracle.residual(p[kept], q[kept], scales[kept]) if kept < self.steps else p[kept]
                if share:
                    total = sum(left)
                    yield chance * share, drafts[:kept], [x / total for x in left]


@pytest.mark.parametrize(("vocab", "steps", "pairs"), [(2, 1, 60), (2, 2, 60), (2, 3, 30), (3, 2, 30), (2, 4, 6), (3, 3, 4)])
def test_block_verification_is_lossless_and_accepts_no_fewer(vocab, steps, pairs):
    rng = random.Random(f"{vocab} {steps}")
    more = 0
    for _ in range(pairs):
        pair = Pair(rng, vocab, steps)
        accepted = []
        for block in (False, True):
            emitted = dict.fromkeys(itertools.product(range(vocab), repeat=steps + 1), Fraction(0))
            count = Fraction(0)
            for chance, kept, row in pair.outcomes(block):
                count += chance * len(kept)
                # Whatever was not emitted comes from the target in later rounds.
                for rest in itertools.product(range(vocab), repeat=steps - len(kept)):
                    for x, share in enumerate(row):
                        tokens = (*kept, x, *rest)
                        later = math.prod(
                            (pair.p[tokens[:i]][tokens[i]] for i in range(len(kept) + 1, steps + 1)), start=Fraction(1)
                        )
                        emitted[tokens] += chance * share * later
            assert emitted == {x: pair.joint(pair.p, x) for x in emitted}
            accepted.append(count)
        assert accepted[1] >= accepted[0]
        more += accepted[1] > accepted[0]
    assert (more > 0) == (steps > 1)  # one draft alone is verified alike
