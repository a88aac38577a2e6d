"""Grammars: texts follow them, and are those of plain decoding with the same masks, whatever was drafted."""

from __future__ import annotations

import re

import pytest
import torch

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig
from spec_ops.decoding.draft import HeldDrafts
from spec_ops.decoding.logits import LogitsFeatures
from spec_ops.decoding.lookup import PromptLookup
from tests.decoding.test_generate import PROMPTS, VOCAB, config_id, full_prefill, make_draft, make_target

STOP = 90


class ModularMatcher:
    """Of three tokens in a row the last is `sum % modulus` modulo `modulus`; it ends with `STOP` after `length` tokens."""

    def __init__(self, modulus: int, length: int) -> None:
        self.modulus, self.length = modulus, length
        self.tokens: list[int] = []
        self.calls = 0

    def allowed(self) -> list[int]:
        if self.is_terminated():
            return []
        if len(self.tokens) >= self.length:
            return [STOP]
        rest = sum(self.tokens[-2:]) % self.modulus
        return [t for t in range(VOCAB) if t != STOP and t % self.modulus == rest]

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        self.calls += 1
        bits = torch.zeros(bitmask.shape[1] * 32, dtype=torch.int64)
        bits[self.allowed()] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        bitmask[index] = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    def is_terminated(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == STOP


@pytest.fixture(scope="module")
def target():
    return make_target(False)


def matchers(count: int) -> list[ModularMatcher | None]:
    return [None if i % 4 == 3 else ModularMatcher(3 + i, 4 + 3 * i) for i in range(count)]


def eager(target, prompt: list[int], matcher: ModularMatcher | None, limit: int) -> list[int]:
    """Plain greedy decoding by hand: the best allowed token, from a prefill of the whole text each time."""
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        logits = target.logits(full_prefill(target, text)[0].hidden[-1])
        if matcher is not None:
            masked = torch.full_like(logits, -torch.inf)
            masked[matcher.allowed()] = 0
            logits = logits + masked
        text.append(int(logits.argmax()))
        if matcher is not None:
            assert matcher.accept_token(text[-1])
            if matcher.is_terminated():
                break
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def expected(target) -> list[list[int]]:
    with torch.no_grad():
        return [eager(target, prompt, matcher, 20) for prompt, matcher in zip(PROMPTS, matchers(len(PROMPTS)), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "rows"),
    [
        (None, None, 3),
        (None, None, 8),
        ("eagle3", SpeculationConfig(3), 3),
        ("self", SpeculationConfig(5), 8),
        ("mtp", SpeculationConfig(3, 4, 10), 3),
        ("standalone", SpeculationConfig(2, 2), 8),
        ("lookup", SpeculationConfig(4), 3),
        ("self", SpeculationConfig.auto(draft_cost=0.1), 3),  # rounds without grammars have other lengths
    ],
    ids=lambda value: config_id(value) if isinstance(value, SpeculationConfig) else str(value),
)
def test_greedy_text_is_that_of_plain_decoding(target, expected, kind, config, rows):
    draft = PromptLookup() if kind == "lookup" else None if kind is None else make_draft(kind, target)
    generator = Generator(target, draft, config, max_batch_size=rows, max_seq_len=80, page_size=4)
    for stops in ((), (STOP,)):
        given = matchers(len(PROMPTS))
        result = generator.generate(PROMPTS, max_new_tokens=20, stop_tokens=stops, matchers=given)
        for tokens, wanted, matcher in zip(result.tokens, expected, given, strict=True):
            assert tokens == (wanted[: wanted.index(STOP) + 1] if matcher is None and stops and STOP in wanted else wanted)
            assert matcher is None or matcher.tokens == tokens  # in step, and nothing was taken back that had been said
    if kind == "self":
        assert result.stats.accept_length > 1  # drafts that the grammar allows are accepted
    plain = generator.generate(PROMPTS[:1], max_new_tokens=4)
    assert plain.tokens == [eager(target, PROMPTS[0], None, 4)]
    assert bool(plain.stats.lengths) == (generator.config.lengths is not None)


@pytest.mark.slow
def test_sampled_text_follows_the_grammar(target):
    given = [ModularMatcher(5, 12) for _ in range(64)]
    generator = Generator(target, make_draft("eagle3", target), max_batch_size=16, max_seq_len=80)
    params = SamplingParams(1.0, top_p=0.95, seed=0, repetition_penalty=1.2)
    result = generator.generate([[1, 2, 3]] * 64, max_new_tokens=30, sampling=params, matchers=given)
    assert all(len(tokens) == 13 and tokens[-1] == STOP for tokens in result.tokens)
    assert len({tuple(tokens) for tokens in result.tokens}) > 32
    for tokens in result.tokens:
        check = ModularMatcher(5, 12)
        assert all(check.accept_token(token) for token in tokens)


def test_a_draft_is_masked_by_its_own_path(target):
    """Every node that can be reached is asked about once a round, and nothing else."""
    matcher = ModularMatcher(3, 50)
    generator = Generator(target, make_draft("self", target), SpeculationConfig(3, 2, 5), max_batch_size=1, max_seq_len=80)
    result = generator.generate([[1, 2]], max_new_tokens=12, matchers=[matcher])
    rounds = result.stats.rounds
    assert rounds + 1 <= matcher.calls <= 1 + 5 * rounds


def test_a_function_of_the_users_gives_nothing_back(target):
    generator = Generator(target, make_draft("eagle3", target), max_seq_len=64)
    given = [ModularMatcher(5, 9), None]
    result = generator.generate(
        PROMPTS[:2],
        max_new_tokens=20,
        matchers=given,
        logits_processor=lambda logits, history, lengths: logits.abs().nan_to_num(),
    )
    assert given[0].tokens == result.tokens[0]
    assert len(result.tokens[0]) == 10


class Refusing(ModularMatcher):
    def accept_token(self, token_id: int) -> bool:
        return False


class Empty(ModularMatcher):
    def allowed(self) -> list[int]:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("config", [SpeculationConfig(2), SpeculationConfig(2, 2, 5)], ids=config_id)
def test_a_round_that_follows_grammars_is_one_graph(target, expected, config):
    """Traced as a whole, and once: neither masks nor refilled rows compile anything anew, and nothing is read inside."""
    generator = Generator(target, make_draft("eagle3", target), config, max_batch_size=3, max_seq_len=80, page_size=4)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    key = (3, False, LogitsFeatures(bitmask=True))
    module = generator.round(3, features=key[-1], drafts=generator.buckets.drafts.setdefault((3, False), HeldDrafts()))
    generator.buckets.rounds[key] = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        result = generator.generate(PROMPTS, max_new_tokens=20, matchers=matchers(len(PROMPTS)))
        assert result.tokens == expected
    assert len(graphs) == 1


def test_errors_name_the_matcher(target):
    generator = Generator(target, make_draft("eagle3", target), max_seq_len=64)
    one = ModularMatcher(3, 5)
    for given, problem in (
        (one, "`matchers` must be a list with a grammar matcher or None per prompt (2), got"),
        ([one], "`matchers` must be a list with a grammar matcher or None per prompt (2), got 1"),
        ([None, object()], "`matchers[1]` must have the methods of xgrammar's GrammarMatcher, ['accept_token', 'rollback'"),
        ([one, one], "`matchers[1]` must not be `matchers[0]`"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"generate: {problem}")):
            generator.generate(PROMPTS[:2], max_new_tokens=8, matchers=given)
    with pytest.raises(RuntimeError, match=r"`matchers\[1\]` refused token \d+, which its bitmask allowed"):
        generator.generate(PROMPTS[:2], max_new_tokens=8, matchers=[None, Refusing(3, 5)])
    with pytest.raises(RuntimeError, match=r"every token is masked for `prompts\[0\]` after 0 new tokens"):
        generator.generate(PROMPTS[:1], max_new_tokens=8, matchers=[Empty(3, 5)])
    assert generator.generate(PROMPTS[:1], max_new_tokens=3, matchers=[None]).tokens == [eager(target, PROMPTS[0], None, 3)]


def test_xgrammars_matchers_are_taken_as_they_are(target):
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [bytes([i + 32]) for i in range(VOCAB - 1)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[VOCAB - 1])
    grammar = xgrammar.GrammarCompiler(info).compile_regex(r"[a-c]{3,5}(=[0-9]{2})?;")
    for draft, config in ((None, None), (make_draft("mtp", target), SpeculationConfig(3, 2)), (PromptLookup(), None)):
        generator = Generator(target, draft, config, max_batch_size=2, max_seq_len=64)
        given = [xgrammar.GrammarMatcher(grammar) for _ in range(5)]
        result = generator.generate(
            PROMPTS[:5], max_new_tokens=20, matchers=given, sampling=SamplingParams(1.0, seed=1), stop_tokens=[VOCAB - 1]
        )
        for tokens in result.tokens:
            text = b"".join(vocabulary[t] for t in tokens[:-1]).decode()
            assert tokens[-1] == VOCAB - 1
            assert re.fullmatch(r"[a-c]{3,5}(=[0-9]{2})?;", text)
