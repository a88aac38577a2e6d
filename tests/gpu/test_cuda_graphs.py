"""On a GPU: the compiled round is one CUDA graph per bucket, replayed without syncs, recompiles or growth."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters
from tqdm.auto import tqdm

from benchmarks.soak import recorded_graphs
from spec_ops.backends import get_backend
from spec_ops.decoding import GenerationResult, Generator, SamplingParams, SpeculationConfig
from spec_ops.decoding.admission import begin
from spec_ops.decoding.arguments import Requests, check_sampling
from spec_ops.decoding.batch import Batch
from spec_ops.models.pretrained import load_pair
from tests.helpers.pass_harness import registered

pytestmark = pytest.mark.gpu

TEXTS = [
    "def add(a, b):\n",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "class Node:\n    def __init__(self, value):\n",
    "for i in range(",
    "    try:\n        return self._cache[key]\n",
    "# -*- coding: utf-8 -*-\n",
    "def test_simple(self):\n        self.assertEqual(",
    "x",
]


@pytest.fixture(scope="module")
def pair():
    return load_pair(device="cuda")


@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 4, 12)], ids=["chain", "tree"])
def test_one_graph_per_bucket_and_steady_replay(pair, config):
    target, draft, tokenizer = pair
    torch._dynamo.reset()
    counters.clear()
    prompts = [tokenizer.encode(text) for text in TEXTS]
    plain = Generator(target, max_batch_size=8, max_seq_len=512).generate(prompts, max_new_tokens=64).tokens
    generator = Generator(target, draft, config, max_batch_size=8, max_seq_len=512, compile=True)
    before = recorded_graphs()
    for buckets, batch in enumerate((1, 2, 4, 8), 1):
        assert generator.generate(prompts[:batch], max_new_tokens=64).tokens == plain[:batch]
        assert recorded_graphs() - before == buckets
    assert counters["inductor"]["cudagraph_skips"] == 0

    with torch._dynamo.config.patch(error_on_recompile=True):
        # Another batch inside a bucket: other prompts, another number of them.
        assert generator.generate(prompts[5:], max_new_tokens=64).tokens == plain[5:]
        assert generator.generate(prompts[:3], max_new_tokens=64).tokens == plain[:3]

        step = generator.buckets.rounds[8, False, None]
        memory = None
        rounds = 0
        while rounds < 1000:
            limits = [400 - len(p) for p in prompts]
            state = generator.buckets.state(8)
            requests = Requests(prompts, limits, [])
            state.clear()
            result = GenerationResult([[] for _ in prompts])
            batch = Batch(requests, state, generator._pool(generator.num_pages), result, None, None, tqdm(disable=True))
            with torch.no_grad():
                choice = check_sampling(None, requests, target.config.vocab_size)
                begin(batch, choice, None, generator.buckets, generator.prefill_chunk_size, generator.prefill_backend)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    for _ in range(100):
                        step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            rounds += 100
            torch.cuda.synchronize()
            now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            memory = memory or now
            assert now == memory
            assert int(state.committed_lens.min()) > 200  # the rounds really decoded
    assert recorded_graphs() - before == 4
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rounds_that_change_logits_are_one_graph(pair, config, temperature):
    """Without a sync, and recorded once whatever the values."""
    target, draft, tokenizer = pair
    torch._dynamo.reset()
    counters.clear()
    prompts, stops = [tokenizer.encode(text) for text in TEXTS[:4]], [tokenizer.encode("\n")[-1]]
    generator = Generator(target, draft, config, max_batch_size=4, max_seq_len=256, compile=True)
    plain = Generator(target, max_batch_size=4, max_seq_len=256)
    before = recorded_graphs()
    for value in (1, 2):
        params = [
            SamplingParams(
                temperature, seed=value, repetition_penalty=1 + 0.1 * value, presence_penalty=0.2 * row, frequency_penalty=0.1,
                logit_bias={97 + value: -1.0}, min_new_tokens=8 * row, bad_words_ids=[[102, 111 + value], [32, 32, 32]],
            )
            for row in range(4)
        ]  # fmt: skip
        options = {"max_new_tokens": 48, "stop_tokens": stops, "sampling": params}
        with torch._dynamo.config.patch(error_on_recompile=value > 1):
            tokens = generator.generate(prompts, **options).tokens
        if temperature == 0:
            assert tokens == plain.generate(prompts, **options).tokens
    assert recorded_graphs() - before == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    (step,) = generator.buckets.rounds.values()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):  # as `generate` calls it
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_output_is_read_one_round_late_but_complete(pair):
    target, draft, tokenizer = pair
    generator = Generator(target, draft, max_batch_size=4, max_seq_len=256)
    prompts = [tokenizer.encode(text) for text in TEXTS[:3]]
    seen: dict[int, list[int]] = {}
    result = generator.generate(prompts, max_new_tokens=[40, 3, 1], on_tokens=lambda i, new: seen.setdefault(i, []).extend(new))
    assert [len(t) for t in result.tokens] == [40, 3, 1]
    assert [seen[i] for i in range(3)] == result.tokens
    assert result.stats.request_rounds >= result.stats.rounds


def test_a_partitioned_round_gives_the_same_tokens(pair):
    """A backend that plans on the host: several CUDA graphs with its calls between them, and the tokens of one graph."""
    target, draft, tokenizer = pair
    torch._dynamo.reset()
    prompts = [tokenizer.encode(text) for text in TEXTS[:4]]
    plain = Generator(target, max_batch_size=4, max_seq_len=512).generate(prompts, max_new_tokens=48).tokens
    planned = dataclasses.replace(get_backend("reference"), name="planned-reference", host_plan=True, rank=1000)
    generators = []  # all are kept: what is compiled for a generator that is gone goes with it
    with registered(planned):
        for config in (SpeculationConfig(3), SpeculationConfig(3, 4, 12)):
            before = recorded_graphs()
            sizes = {"max_batch_size": 4, "max_seq_len": 512, "prefill_backend": "reference"}
            generators.append(Generator(target, draft, config, compile=True, backend=planned.name, **sizes))
            for _ in range(2):
                assert generators[-1].generate(prompts, max_new_tokens=48).tokens == plain
            assert recorded_graphs() - before > 1
