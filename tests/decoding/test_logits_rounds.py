"""Rounds that change logits: rows with settings of their own, a token bitmask, one graph, no sync, one dense pass."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.utils import counters

from spec_ops.decoding import Generator, RoundState, SamplingParams, SpeculationConfig, generate
from spec_ops.decoding.draft import Drafted
from spec_ops.decoding.logits import LogitsChanges, LogitsFeatures, masked_end, masked_tokens
from spec_ops.decoding.round import commit_next
from tests.decoding.test_generate import PROMPTS, VOCAB, make_draft, make_target
from tests.decoding.test_logits import every_history_token_down
from tests.helpers.inductor_cuda import generate as generate_code
from tests.helpers.inductor_cuda import launches
from tests.passes.test_compile import compiled_generator

OPTIONS = {"max_batch_size": 4, "max_seq_len": 64, "page_size": 4}
CHAIN, TREE = SpeculationConfig(2), SpeculationConfig(2, 2)
ALL = LogitsFeatures(True, True, True, True, (2, 2), True, every_history_token_down)
P = SamplingParams


@pytest.fixture(scope="module")
def target():
    return make_target(False)


@pytest.mark.parametrize("config", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_greedy_and_sampled_rows_in_one_batch(target, config):
    draft = make_draft("self", target) if config else None
    params = [P(), P(1.0, seed=5), P(0.7, top_k=9, seed=6, repetition_penalty=1.2), P(repetition_penalty=1.2)]
    generator = Generator(target, draft, config, **OPTIONS)
    result = generator.generate(PROMPTS[:4], max_new_tokens=12, sampling=params)
    for i, sampling in enumerate(params):  # a row's tokens are those of a call in which all rows have its settings
        alone = generator.generate(PROMPTS[:4], max_new_tokens=12, sampling=sampling)
        assert alone.seed == sampling.seed
        assert result.tokens[i] == alone.tokens[i]
    assert result.seed is None
    assert set(generator.buckets.rounds) == {
        (4, sampled, features) for sampled in (False, True) for features in (None, LogitsFeatures(repetition=True))
    }


def test_rows_without_a_seed_share_one(target):
    torch.manual_seed(7)
    params = [P(1.0), P(), P(1.0, seed=3), P(1.0)]
    first = generate(target, None, [PROMPTS[0]] * 4, max_new_tokens=12, sampling=params)
    assert len({tuple(tokens) for tokens in first.tokens}) == 4
    again = [P(1.0, seed=first.seed), P(), P(1.0, seed=3), P(1.0, seed=first.seed)]
    assert generate(target, None, [PROMPTS[0]] * 4, max_new_tokens=12, sampling=again).tokens == first.tokens


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """`[..., V]` bool in xgrammar's layout, written with Python's integers."""
    words = [
        [sum(1 << bit for bit, on in enumerate(row[start : start + 32]) if on) for start in range(0, len(row), 32)]
        for row in allowed.flatten(0, -2).tolist()
    ]
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32).view(*allowed.shape[:-1], -1)


@pytest.mark.parametrize("vocab", [64, VOCAB])
def test_bitmask(vocab):
    torch.manual_seed(0)
    bs, nodes = 3, 4
    changes = LogitsChanges(RoundState(bs, 1, max_len=8, path_len=4), LogitsFeatures(bitmask=True), vocab, nodes)
    changes.load(torch.arange(bs), [P()] * bs, [[1], [2], [3]])
    logits = torch.randn(bs, nodes, vocab)
    drafted = Drafted(torch.zeros(bs, nodes, dtype=torch.int64), torch.arange(nodes).expand(bs, -1))
    assert torch.equal(changes(logits, drafted), logits)  # a mask that nobody filled allows everything
    allowed = torch.rand(bs, nodes, vocab) < 0.5
    changes.bitmask.copy_(packed(allowed))
    assert changes.bitmask.shape == (bs, nodes, -(-vocab // 32))
    assert torch.equal(changes(logits, drafted), torch.where(allowed, logits, -torch.inf))
    assert torch.equal(changes(logits[:, :1])[:, 0], torch.where(allowed, logits, -torch.inf)[:, 0])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("config", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_a_masked_round_emits_what_its_nodes_allow(target, config, sampled):
    """Node `n` allows tokens of one residue: the k-th token of a round shows after which node it came."""
    draft = make_draft("self", target) if config else None
    generator = Generator(target, draft, config, **OPTIONS)
    generator.generate(PROMPTS[:2], max_new_tokens=2, sampling=P(float(sampled), seed=1))
    state, step = generator.buckets.state(2), generator.round(2, sampled=sampled, features=LogitsFeatures(bitmask=True))
    state.finished.fill_(False)
    state.max_lens.fill_(60)
    nodes = 1 if config is None else config.num_tokens
    residue = torch.arange(VOCAB) % nodes
    step.changes.bitmask.copy_(packed(residue == torch.arange(nodes)[:, None]).expand(2, -1, -1))
    for _ in range(4):
        step()
        for *tokens, count, status in state.output.tolist():
            assert (count >= 1, status) == (True, 0)
            assert tokens[0] % nodes == 0
            assert config is not CHAIN or [token % nodes for token in tokens[:count]] == list(range(count))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "sampled"), [(CHAIN, True), (TREE, False)], ids=["chain-sampled", "tree-greedy"])
def test_one_graph_whatever_the_values(target, config, sampled):
    torch._dynamo.reset()
    stops = [3, 9]
    calls = [
        (PROMPTS[:3], [P(float(sampled), seed=1, repetition_penalty=r, presence_penalty=0.1, logit_bias={4: 1.0},
                         bad_words_ids=[[1, 2, 3], [5, 6]], min_new_tokens=4) for r in (1.0, 1.2, 1.4)]),
        (PROMPTS[3:7], [P(float(sampled), seed=2, repetition_penalty=1.1, frequency_penalty=f, suppress_tokens=[f, 8],
                          bad_words_ids=[[f, 1, 1]] * 2, min_new_tokens=9 * f) for f in range(2)] * 2),
    ]  # fmt: skip
    draft = make_draft("eagle3", target)
    backend = "aot_eager" if sampled else "eager"  # Dynamo makes the graph; AOTAutograd takes half as long again
    eager, compiled = Generator(target, draft, config, **OPTIONS), compiled_generator(target, draft, config, backend)
    options = {"max_new_tokens": 10, "stop_tokens": stops, "logits_processor": every_history_token_down}
    counters.clear()
    for i, (prompts, params) in enumerate(calls):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            tokens = compiled.generate(prompts, sampling=params, **options).tokens
        assert tokens == eager.generate(prompts, sampling=params, **options).tokens
    assert counters["stats"]["unique_graphs"] == 1
    assert len(compiled.buckets.rounds) == 1


def captured(step: torch.nn.Module) -> str:
    """The code that Dynamo captures of a round."""
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs):
        graphs.append(module.print_readable(print_output=False))
        return module.forward

    torch._dynamo.reset()
    torch.compile(step, backend=backend, fullgraph=True, dynamic=False)()
    (code,) = graphs
    return code


@pytest.mark.slow
def test_a_call_that_changes_nothing_traces_what_it_always_did(target):
    """Whatever calls there were before; and the traced round knows none of the buffers of features."""
    draft = make_draft("eagle3", target)
    fresh, used = (Generator(target, draft, CHAIN, **OPTIONS) for _ in range(2))
    params = P(repetition_penalty=1.1, presence_penalty=1.0, logit_bias={1: 1.0}, bad_words_ids=[[1, 2]], min_new_tokens=2)
    used.generate(PROMPTS[:2], max_new_tokens=2, sampling=params, stop_tokens=[1])
    expected = captured(fresh.round(2))
    assert captured(used.round(2)) == expected
    assert "changes" not in expected
    assert "changes" in captured(used.round(2, features=LogitsFeatures(bias=True)))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_no_value_is_read_off_the_cpu(tree):
    """As in `test_no_sync.py`: a tensor on the meta device has no values."""
    state = RoundState(2, 1, max_len=16, path_len=4, device="meta")
    changes = LogitsChanges(state, ALL, VOCAB, 5)
    logits = torch.empty(2, 5, VOCAB, device="meta")
    nodes = torch.empty(2, 5, dtype=torch.int64, device="meta")
    out = changes(logits, Drafted(nodes, nodes, *((nodes, nodes) if tree else ())))
    assert out.shape == logits.shape
    tokens = masked_tokens(out, out.argmax(-1))[:, :4]
    support = torch.empty(2, 5, 3, dtype=torch.int64, device="meta")
    tokens = masked_end(support, tokens, nodes[:, :4], state.committed_lens)
    changes.update(tokens, state.commit(tokens, state.committed_lens))
    target = make_target(False).to("meta")
    commit_next(target, torch.empty(2, target.config.hidden_size, device="meta"), state, False, changes)


class Tail(torch.nn.Module):
    """What follows the target in a greedy round."""

    def __init__(self, features: LogitsFeatures | None, bs: int, nodes: int, vocab: int) -> None:
        super().__init__()
        self.state = RoundState(bs, 1, max_len=16, path_len=nodes)
        self.changes = None if features is None else LogitsChanges(self.state, features, vocab, nodes)
        self.register_buffer("logits", torch.zeros(bs, nodes, vocab, dtype=torch.bfloat16))
        self.register_buffer("candidates", torch.zeros(bs, nodes, dtype=torch.int64))

    def forward(self) -> None:
        logits, state = self.logits, self.state
        if self.changes is not None:
            positions = state.committed_lens[:, None] + torch.arange(logits.shape[1], device=logits.device)
            logits = self.changes(logits, Drafted(self.candidates, positions))
        tokens = logits.argmax(-1) if self.changes is None else masked_tokens(logits, logits.argmax(-1))
        count = state.commit(tokens, torch.ones_like(state.committed_lens))
        if self.changes is not None:
            self.changes.update(tokens, count)

    def cuda_code(self) -> str:
        named = dict(self.named_buffers(remove_duplicate=False))
        distinct = {id(tensor): tensor for tensor in named.values()}

        def run(*tensors: torch.Tensor) -> tuple:
            by_id = dict(zip(distinct, tensors, strict=True))
            torch.func.functional_call(self, {name: by_id[id(tensor)] for name, tensor in named.items()}, ())
            return ()

        return generate_code(run, *distinct.values())[0]


@pytest.mark.slow
def test_penalties_are_one_dense_pass_on_cuda():
    """Generated for a GPU: one float32 tensor of logits, which the corrections change in place."""
    bs, nodes, vocab = 4, 4, 1024
    plain = launches(Tail(None, bs, nodes, vocab).cuda_code())
    features = LogitsFeatures(bias=True, repetition=True, counts=True, bitmask=True)
    code = Tail(features, bs, nodes, vocab).cuda_code()
    assert len(launches(code)) <= len(plain) + 2  # the dense pass, with the bitmask, and the paths
    kernels = dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL))
    dense = [name for name, source in kernels.items() if ">>" in source and f"xnumel = {bs * nodes * vocab}" in source]
    assert len(dense) == 1
    assert "_poi_" in dense[0]
    # In the loop of the argmax the bits' arithmetic took six times as long as the reduction.
    assert not [name for name, source in kernels.items() if "_red_" in name or "_per_" in name if ">> " in source]
    made = [line for line in code.splitlines() if "= empty_strided_cuda(" in line and f"{nodes}, {vocab})" in line]
    assert len(made) == 1
