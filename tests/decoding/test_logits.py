"""What a call does to the target's logits: speculation and plain decoding give the text of a loop over single rows."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig, generate
from spec_ops.decoding.draft import Drafted
from spec_ops.decoding.logits import LogitsChanges, LogitsFeatures
from spec_ops.decoding.state import RoundState
from spec_ops.models.target import CausalLM
from tests.decoding.test_generate import PROMPTS, VOCAB, full_prefill, make_draft, model_config

NEW, OPTIONS = 14, {"max_batch_size": 4, "max_seq_len": 64, "page_size": 4}
CHAIN, TREE, SMALL_TREE = SpeculationConfig(4), SpeculationConfig(3, 4, 14), SpeculationConfig(5, 2, 3)
ROWS = PROMPTS[:4]


@pytest.fixture(scope="module")
def target():
    """Of three layers, whose drafts of several tokens are accepted more often."""
    torch.manual_seed(1)
    return CausalLM(model_config(False, aux_layers=(0, 1, 2)))


@pytest.fixture(scope="module")
def next_logits(target):
    """`[V]` for a text, remembered: the cases share most of their texts."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def read(text: list[int]) -> torch.Tensor:
        if tuple(text) not in known:
            known[tuple(text)] = target.logits(full_prefill(target, text)[0].hidden[-1]).detach()
        return known[tuple(text)].clone()

    return read


def changed(logits: torch.Tensor, prompt: list[int], output: list[int], p: SamplingParams, stops=()) -> torch.Tensor:
    """One row, as the documents of vLLM and transformers say it."""
    for token, bias in (p.logit_bias or {}).items():
        logits[token] += bias
    for token in set(prompt + output):
        logits[token] *= 1 / p.repetition_penalty if logits[token] > 0 else p.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= p.frequency_penalty * count
        logits[token] -= p.presence_penalty
    text = prompt + output
    for word in p.bad_words_ids:
        if len(word) == 1 or tuple(text[1 - len(word) :]) == word[:-1]:
            logits[word[-1]] = -math.inf
    if len(output) < p.min_new_tokens:
        logits[list(stops)] = -math.inf
    logits[list(p.suppress_tokens)] = -math.inf
    return logits


def output_down(logits, history, lengths, prompt_lens):
    """Subtracts for each occurrence after the prompt."""
    position = torch.arange(history.shape[1], device=logits.device)
    new = (position >= prompt_lens[:, None]) & (position < lengths[:, None])
    return logits.scatter_add(1, history, torch.where(new, -0.8, 0.0))


def eager_loop(next_logits, prompt, params, stops=(), processor=None, new=NEW) -> list[int]:
    output: list[int] = []
    while len(output) < new and not (output and output[-1] in stops):
        logits = changed(next_logits(prompt + output), prompt, output, params, stops)
        if processor is not None:
            text = torch.tensor([prompt + output])
            named = {"prompt_lens": torch.tensor([len(prompt)])} if processor is output_down else {}
            logits = processor(logits[None], text, torch.tensor([text.shape[1]]), **named)[0]
        output.append(int(logits.argmax()))
    return output


def no_third_in_a_row(logits, history, lengths):
    """Forbids a token that the text ends with twice; reads the history at its end, and nothing after it."""
    last = history.gather(1, (lengths - 1)[:, None])
    before = history.gather(1, (lengths - 2).clamp(min=0)[:, None])
    token = torch.arange(logits.shape[1], device=logits.device)
    return torch.where((token == last) & (last == before), -math.inf, logits)


def every_history_token_down(logits, history, lengths):
    """Subtracts for each occurrence in the text, so that a wrong, missing or stale token anywhere in the history shows."""
    inside = torch.arange(history.shape[1], device=logits.device) < lengths[:, None]
    return logits.scatter_add(1, history, torch.where(inside, -0.3, 0.0))


P = SamplingParams
CASES = {
    "repetition": [P(repetition_penalty=r) for r in (1.3, 1.0, 1.02, 0.8)],
    "presence": [P(presence_penalty=p) for p in (0.5, 0.0, 2.0, -0.7)],
    "frequency": [P(frequency_penalty=p) for p in (0.1, 1.5, 0.0, -0.05)],
    "bias": [P(logit_bias={3: 2.0, 96: -1.0}), P(), P(logit_bias={t: 0.01 * t for t in range(VOCAB)}), P(logit_bias={0: 1e9})],
    "suppress": [P(suppress_tokens=range(0, VOCAB, 2)), P(suppress_tokens=[5]), P(), P(suppress_tokens=range(1, VOCAB))],
    "penalties": [
        P(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
        P(repetition_penalty=1.05, frequency_penalty=-0.1, logit_bias={7: 1.0}),
        P(presence_penalty=0.3),
        P(),
    ],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [(None, None), ("self", CHAIN), ("eagle3", TREE), ("self", SMALL_TREE)],
    ids=["plain", "self-chain", "eagle3-tree", "self-small-tree"],
)
def test_text_is_that_of_a_loop(target, next_logits, name, kind, config):
    draft = None if kind is None else make_draft(kind, target)
    result = generate(target, draft, ROWS, config, max_new_tokens=NEW, sampling=CASES[name], **OPTIONS)
    assert result.tokens == [eager_loop(next_logits, p, s) for p, s in zip(ROWS, CASES[name], strict=True)]
    if kind == "self" and config is CHAIN:
        assert result.stats.accept_length > 1.5  # paths of several tokens were judged


def test_the_cases_change_texts(next_logits):
    """Otherwise they would show nothing."""
    for name, params in CASES.items():
        same = [eager_loop(next_logits, p, s) == eager_loop(next_logits, p, P()) for p, s in zip(ROWS, params, strict=True)]
        assert sum(same) <= 2, name


def bad_words(next_logits) -> list[SamplingParams]:
    """Words of one to four tokens that the free texts contain, some of which begin in the prompt, or are longer than it."""
    texts = [eager_loop(next_logits, prompt, P()) for prompt in ROWS]
    first, second, third, fourth = texts
    return [
        P(bad_words_ids=[first[:2], first[5:9], [ROWS[0][-1], 1], *([token, 3] for token in range(20))]),
        P(bad_words_ids=[[ROWS[1][0], second[0]], second[1:4], second[1:3]]),
        P(bad_words_ids=[[*ROWS[2][-3:], third[0]], third[2:3], third[6:8]]),
        P(bad_words_ids=[[*range(9), fourth[0]], fourth[3:6]]),  # the first is longer than prompt and output for a while
    ]


@pytest.mark.parametrize(("kind", "config"), [(None, None), ("self", CHAIN), ("self", TREE)], ids=["plain", "chain", "tree"])
def test_bad_words(target, next_logits, kind, config):
    draft, params = None if kind is None else make_draft(kind, target), bad_words(next_logits)
    tokens = generate(target, draft, ROWS, config, max_new_tokens=NEW, sampling=params, **OPTIONS).tokens
    assert tokens == [eager_loop(next_logits, p, s) for p, s in zip(ROWS, params, strict=True)]
    for prompt, new, p in zip(ROWS, tokens, params, strict=True):
        text = prompt + new
        ends = [i + len(w) for w in p.bad_words_ids for i in range(len(text)) if tuple(text[i : i + len(w)]) == w]
        assert max(ends, default=0) <= len(prompt)


@pytest.mark.parametrize(("kind", "config"), [(None, None), ("self", CHAIN), ("self", TREE)], ids=["plain", "chain", "tree"])
def test_min_new_tokens(target, next_logits, kind, config):
    draft = None if kind is None else make_draft(kind, target)
    free = [eager_loop(next_logits, prompt, P()) for prompt in ROWS]
    stops = [free[0][2], free[1][4], free[2][1]]
    params = [P(min_new_tokens=n) for n in (5, 0, 9, 10**9)]
    tokens = generate(target, draft, ROWS, config, max_new_tokens=NEW, stop_tokens=stops, sampling=params, **OPTIONS).tokens
    assert tokens == [eager_loop(next_logits, p, s, stops) for p, s in zip(ROWS, params, strict=True)]
    assert len(tokens[0]) >= 5
    assert len(tokens[3]) == NEW


@pytest.mark.parametrize("processor", [no_third_in_a_row, every_history_token_down, output_down])
@pytest.mark.parametrize(("kind", "config"), [(None, None), ("self", CHAIN), ("self", TREE)], ids=["plain", "chain", "tree"])
def test_a_function_sees_each_nodes_own_history(target, next_logits, processor, kind, config):
    draft = None if kind is None else make_draft(kind, target)
    generator = Generator(target, draft, config, **OPTIONS)
    for rows in (PROMPTS[6:8] + PROMPTS[4:6], ROWS):  # shorter ones second: the buffers hold longer texts
        tokens = generator.generate(rows, max_new_tokens=NEW, logits_processor=processor).tokens
        assert tokens == [eager_loop(next_logits, prompt, P(), processor=processor) for prompt in rows]


@pytest.mark.parametrize("config", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_a_history_is_zero_after_its_end(target, config):
    """What earlier calls, other branches and the padding of prompts left there is not shown."""

    def check(logits, history, lengths):
        assert not history[torch.arange(history.shape[1]) >= lengths[:, None]].any()
        return logits

    generator = Generator(target, make_draft("self", target) if config else None, config, **OPTIONS)
    for rows in (PROMPTS[6:8] + PROMPTS[4:6], ROWS):
        generator.generate(rows, max_new_tokens=NEW)
        generator.generate(rows[::-1], max_new_tokens=5, logits_processor=check)


@pytest.mark.parametrize(("kind", "config"), [(None, None), ("self", CHAIN), ("self", TREE)], ids=["plain", "chain", "tree"])
def test_everything_together(target, next_logits, kind, config):
    draft = None if kind is None else make_draft(kind, target)
    free = [eager_loop(next_logits, prompt, P()) for prompt in ROWS]
    words = bad_words(next_logits)
    params = [
        P(
            repetition_penalty=1.05 + 0.05 * i,
            presence_penalty=0.1 * i,
            frequency_penalty=0.05,
            logit_bias={free[i][0]: -1.0, 9: 0.5},
            bad_words_ids=words[i].bad_words_ids,
            suppress_tokens=[free[i][3]],
            min_new_tokens=4 * i,
        )
        for i in range(4)
    ]
    stops, options = [free[0][1], free[2][2]], {"max_new_tokens": NEW, "logits_processor": every_history_token_down}
    tokens = generate(target, draft, ROWS, config, stop_tokens=stops, sampling=params, **options, **OPTIONS).tokens
    expected = [eager_loop(next_logits, p, s, stops, every_history_token_down) for p, s in zip(ROWS, params, strict=True)]
    assert tokens == expected


def test_a_node_counts_its_own_path():
    """Every logit of every node, where drafts repeat, are biased, and are penalized again."""
    prompt, output, drafts = [5, 9], [3, 7], [7, 2, 7]
    p = P(logit_bias={7: 1.5, 2: -0.5, 4: 0.25}, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    state = RoundState(1, 1, max_len=16, path_len=4)
    text = prompt + output
    state.tokens[0, : len(text)] = torch.tensor(text)
    state.last_token.fill_(text[-1])
    changes = LogitsChanges(state, LogitsFeatures(bias=True, repetition=True, counts=True), 12, 4)
    changes.load(torch.tensor([0]), [p], [prompt])
    changes.update(torch.tensor([output]), torch.tensor([len(output)]))
    state.committed_lens.fill_(len(text) - 1)
    logits = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(0))
    drafted = Drafted(torch.tensor([[text[-1], *drafts]]), len(text) - 1 + torch.arange(4)[None])
    expected = [changed(row.clone(), prompt, output + drafts[:n], p) for n, row in enumerate(logits[0])]
    torch.testing.assert_close(changes(logits, drafted)[0], torch.stack(expected), rtol=1e-6, atol=1e-6)


def test_features_decide_on_the_round():
    def of(*params: SamplingParams, stops=(), processor=None):
        return LogitsFeatures.of(params, stops, processor)

    assert of(P(1.0, top_k=4, top_p=0.5, min_p=0.1, seed=1), P(min_new_tokens=3), stops=()) is None
    assert of(P(min_new_tokens=3), stops=[1]) == LogitsFeatures(min_new_tokens=True)
    assert of(P(), P(repetition_penalty=1.1)) == of(P(repetition_penalty=2.0)) == LogitsFeatures(repetition=True)
    assert of(P(presence_penalty=1.0)) == of(P(frequency_penalty=-1.0)) == LogitsFeatures(counts=True)
    assert of(P(logit_bias={1: 1.0})) == of(P(suppress_tokens=[4])) == of(P(bad_words_ids=[[3]])) == LogitsFeatures(bias=True)
    assert of(P(logit_bias={})) is None
    assert of(P(bad_words_ids=[[1, 2], [1, 2, 3, 4], [5, 6]]), P()).bad_words == (4, 4)
    assert of(P(bad_words_ids=[[1, 2]])).bad_words == (1, 1)
    first, second = (lambda *inputs: inputs[0] for _ in range(2))
    assert of(P(), processor=first) == of(P(), processor=first) != of(P(), processor=second)
