"""`RoundState.tokens`: the prompt and every emitted token, whatever drafted them and whatever ended the request."""

from __future__ import annotations

import pytest
import torch

from spec_ops.decoding import Generator, RoundState, SamplingParams, SpeculationConfig
from tests.decoding.test_generate import PROMPTS, make_draft, make_target
from tests.helpers.pairs import pairwise

CONFIGS = [SpeculationConfig(3), SpeculationConfig(3, 4, 10), SpeculationConfig(5, 2, 2)]


@pytest.fixture(scope="module")
def target():
    return make_target(False)


def histories(generator: Generator, count: int) -> list[list[int]]:
    state = generator.buckets.state(generator.bucket(count))
    lens = (state.committed_lens + 1).tolist()
    histories = [row[:length] for row, length in zip(state.tokens.tolist(), lens, strict=True)]
    assert state.last_token[:count].tolist() == [history[-1] for history in histories[:count]]
    return histories[:count]


@pytest.mark.slow
@pairwise(kind=["eagle3", "mtp", "standalone", "self"], config=CONFIGS, temperature=[0.0, 1.0])
def test_history_is_prompt_and_output(target, kind, config, temperature):
    generator = Generator(target, make_draft(kind, target), config, max_batch_size=4, max_seq_len=60, page_size=4)
    sampling = SamplingParams(temperature, seed=3)
    for prompts in (PROMPTS[:3], PROMPTS[6:7] + PROMPTS[3:6]):  # the second call finds the first one's tokens in the buffers
        free = generator.generate(prompts, max_new_tokens=12, sampling=sampling).tokens
        assert histories(generator, len(prompts)) == [p + t for p, t in zip(prompts, free, strict=True)]
        limits, stop = [1, 12, 4, 8][: len(prompts)], free[1][6]
        ended = generator.generate(prompts, max_new_tokens=limits, stop_tokens=[stop], sampling=sampling).tokens
        assert histories(generator, len(prompts)) == [p + t for p, t in zip(prompts, ended, strict=True)]
        assert ended[1][-1] == stop


def test_history_of_plain_decoding_up_to_the_last_slot(target):
    generator = Generator(target, max_batch_size=2, max_seq_len=30, page_size=4)
    tokens = generator.generate(PROMPTS[:2], max_new_tokens=[25, 29]).tokens
    assert histories(generator, 2) == [p + t for p, t in zip(PROMPTS, tokens, strict=False)]


def test_commit_appends_what_it_emits():
    state = RoundState(5, 1, max_len=8, path_len=3)
    state.finished.copy_(torch.tensor([False, False, False, False, True]))
    state.committed_lens.copy_(torch.tensor([0, 4, 0, 5, 2]))
    state.max_lens.fill_(8)
    state.stop_tokens[:, 0] = 9
    tokens = torch.tensor([[5, 6, 7], [5, 6, 7], [9, 6, 7], [5, -1, -1], [5, 6, 7]])
    count = state.commit(tokens, torch.tensor([2, 3, 3, 2, 3], dtype=torch.int32))
    assert count.tolist() == [2, 3, 1, 1, 0]
    assert state.tokens[:, 1:9].tolist() == [
        [5, 6, -1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 5, 6, 7, 0],
        [9, -1, -1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 5, -1, -1],
        [0, 0, -1, -1, -1, 0, 0, 0],
    ]
