"""Generation: greedy speculation equals plain greedy decoding; caches, stops, limits, buckets, streaming, statistics."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_ops.backends import BackendError, get_backend
from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig, SpeculativeRound, generate
from spec_ops.models import CausalLM, Eagle3Draft, ModelConfig, MTPDraft, PagedAttention, PagedKVCache, StandaloneDraft
from tests.helpers.pairs import pairwise
from tests.helpers.pass_harness import using_provider

VOCAB = 97
PROMPTS = [[1, 2, 3, 4, 5], [7], list(range(20, 41)), [9, 9], [3] * 13, [50, 51, 52], list(range(60, 90)), [2, 4, 8, 16]]
CHAINS = [SpeculationConfig(steps) for steps in (1, 3, 5)]
TREES = [SpeculationConfig(3, 2), SpeculationConfig(3, 4, 10), SpeculationConfig(1, 4), SpeculationConfig(5, 4, 64)]


def config_id(config: SpeculationConfig) -> str:
    return f"S{config.num_steps}K{config.topk}D{config.num_tokens}"


def model_config(mla: bool, num_layers: int = 3, **sizes) -> ModelConfig:
    common = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_layers": num_layers, "num_heads": 4}
    if mla:
        attention = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    else:
        attention = {"num_kv_heads": 2, "head_dim": 16}
    return ModelConfig(**{**common, **attention, **sizes})


def make_target(mla: bool, device: str = "cpu", **sizes) -> CausalLM:
    torch.manual_seed(1)
    return CausalLM(model_config(mla, 2, aux_layers=(0, 1, 1), **sizes)).to(device)


def make_draft(kind: str, target: CausalLM, seed: int = 2, layers: int = 1):
    """`layers` of a standalone draft; the others have one."""
    torch.manual_seed(seed)
    mla, device = target.config.is_mla, target.embed.weight.device
    if kind == "eagle3":
        reduced = torch.randperm(VOCAB)[:40].sort().values
        draft = Eagle3Draft(model_config(False, 1), target, reduced)
    elif kind == "mtp":
        draft = MTPDraft(model_config(mla, 1), target)
    elif kind == "standalone":
        draft = StandaloneDraft(CausalLM(model_config(mla, layers, hidden_size=48)))
    else:  # the target drafting for itself: every draft that reaches the target is accepted
        draft = StandaloneDraft(target)
    return draft.to(device)


@functools.cache
def target_and_text(mla: bool) -> tuple[CausalLM, list[list[int]]]:
    target = make_target(mla)
    return target, generate(target, None, PROMPTS, max_new_tokens=16, page_size=4).tokens


@pytest.fixture(scope="module", params=[False, True], ids=["gqa", "mla"])
def target(request) -> CausalLM:
    return target_and_text(request.param)[0]


@pytest.fixture(scope="module")
def plain_tokens(target) -> list[list[int]]:
    return target_and_text(target.config.is_mla)[1]


@pairwise(mla=[False, True], kind=["eagle3", "mtp", "standalone", "self"], config=CHAINS + TREES, batch=[1, 3, 8])
def test_greedy_speculation_equals_plain_greedy(mla, kind, config, batch):
    target, plain_tokens = target_and_text(mla)
    draft = make_draft(kind, target)
    result = generate(target, draft, PROMPTS[:batch], config, max_new_tokens=16, page_size=4)
    assert result.tokens == plain_tokens[:batch]
    if kind == "self" and config.topk == 1:
        # 15 tokens after the prefill's: all drafts are accepted, so only the last round is cut short.
        assert result.stats.rounds == -(-15 // (config.num_steps + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 4, 10)], ids=config_id)
def test_greedy_speculation_equals_plain_greedy_on_cuda(mla, config):
    target = make_target(mla, "cuda")
    plain = generate(target, None, PROMPTS, max_new_tokens=16)
    for kind in ("eagle3", "mtp", "standalone", "self"):
        assert generate(target, make_draft(kind, target), PROMPTS, config, max_new_tokens=16).tokens == plain.tokens


@pytest.mark.parametrize("kind", ["eagle3", "self"])
@pytest.mark.parametrize("config", [SpeculationConfig(5, 2, 2), SpeculationConfig(4, 3, 4)], ids=config_id)
def test_trees_of_fewer_tokens_than_steps(target, plain_tokens, kind, config):
    """The tree cannot hold a path as long as the draft's."""
    draft = make_draft(kind, target)
    assert generate(target, draft, PROMPTS[:3], config, max_new_tokens=16, page_size=4).tokens == plain_tokens[:3]
    sampling = SamplingParams(1.0, top_k=1)
    sampled = generate(target, draft, PROMPTS[:3], config, max_new_tokens=16, page_size=4, sampling=sampling)
    assert sampled.tokens == plain_tokens[:3]


def test_round_keeps_no_autograd_graph(target):
    """Called outside `no_grad`, on models whose parameters want gradients, the state would grow a graph round by round."""
    assert next(target.parameters()).requires_grad
    generator = Generator(target, make_draft("eagle3", target), max_batch_size=2, max_seq_len=64)
    generator.generate(PROMPTS[:2], max_new_tokens=2)
    caches = (generator.target_cache, generator.draft_cache)
    state = generator.buckets.state(2)
    state.finished.fill_(False)
    SpeculativeRound(target, generator.draft, *caches, state, generator.config)()
    assert not any(buffer.requires_grad for module in (state, *caches) for buffer in module.buffers())


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor], ids=["tuple", "numpy", "torch"])
def test_prompts_as_other_sequences(target, plain_tokens, convert):
    prompts = [convert(prompt) for prompt in PROMPTS[:3]]
    assert generate(target, None, prompts, max_new_tokens=np.int64(16), page_size=4).tokens == plain_tokens[:3]


def test_generator_is_usable_after_an_interrupt(target, plain_tokens):
    def interrupt(request, tokens):
        raise KeyboardInterrupt

    generator = Generator(target, make_draft("mtp", target), max_batch_size=3, max_seq_len=64)
    with pytest.raises(KeyboardInterrupt):
        generator.generate(PROMPTS[3:], max_new_tokens=16, sampling=SamplingParams(1.0), on_tokens=interrupt)
    assert generator.generate(PROMPTS, max_new_tokens=16).tokens == plain_tokens


def test_plain_decoding_equals_recomputing_every_token(target):
    """Against an argmax over a full prefill per token: no KV of an earlier call is reused."""
    result = generate(target, None, PROMPTS[:3], max_new_tokens=6, page_size=4)
    for prompt, got in zip(PROMPTS, result.tokens, strict=False):
        text = list(prompt)
        for _ in range(6):
            text.append(int(target.logits(full_prefill(target, text)[0].hidden[-1]).argmax()))
        assert got == text[len(prompt) :]


def full_prefill(model, tokens: list[int], hidden: torch.Tensor | None = None, page_size: int = 4):
    """One ragged extend over `tokens` into a fresh cache; returns `(output, cache)`."""
    length = len(tokens)
    cache = PagedKVCache(model.config, -(-length // page_size), page_size)
    attention = PagedAttention(
        cache,
        "extend",
        torch.arange(cache.num_pages, dtype=torch.int32)[None],
        torch.tensor([length], dtype=torch.int32),
        torch.arange(length),
        q_indptr=torch.tensor([0, length], dtype=torch.int32),
        max_q_len=length,
    )
    inputs = (torch.tensor(tokens),) if hidden is None else (torch.tensor(tokens), hidden)
    with torch.no_grad():
        return model(*inputs, torch.arange(length), attention), cache


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "standalone", "self"])
@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(4, 3, 12)], ids=config_id)
def test_caches_after_generation_equal_a_fresh_prefill(target, kind, config):
    """Slots, extends and the tree's compaction: after many rounds every committed row of both caches is what one prefill of
    the final text writes (the draft's with the target's features)."""
    draft = make_draft(kind, target)
    generator = Generator(target, draft, config, max_batch_size=2, max_seq_len=64, page_size=4)
    prompts = PROMPTS[1:3]
    tokens = generator.generate(prompts, max_new_tokens=17).tokens
    state = generator.buckets.state(2)
    for row, (prompt, new) in enumerate(zip(prompts, tokens, strict=True)):
        text = list(prompt) + new
        committed = int(state.committed_lens[row])
        assert committed == len(text) - 1
        output, fresh = full_prefill(target, text[:committed])
        if draft.token_offset == 0:
            _, fresh_draft = full_prefill(draft, text[1 : committed + 1], draft.encode(output))
        else:
            _, fresh_draft = full_prefill(draft, text[: committed + 1], torch.zeros(committed + 1, draft.config.hidden_size))
        pages = state.block_tables[row].long()
        for cache, expected, length in (
            (generator.target_cache, fresh, committed),
            (generator.draft_cache, fresh_draft, committed + draft.token_offset),
        ):
            for got, want in zip(cache.tensors(), expected.tensors(), strict=True):
                # fp32; different batch shapes change the order of sums in the matrix products
                torch.testing.assert_close(got[pages].flatten(0, 1)[:length], want.flatten(0, 1)[:length], rtol=1e-4, atol=1e-5)


def test_sliding_window_target(plain_tokens):
    target = make_target(False, sliding_window=6)
    plain = generate(target, None, PROMPTS, max_new_tokens=16, page_size=4).tokens
    assert plain != plain_tokens
    for config in (SpeculationConfig(3), SpeculationConfig(3, 4, 10)):
        for kind in ("eagle3", "self"):
            assert generate(target, make_draft(kind, target), PROMPTS, config, max_new_tokens=16).tokens == plain


@pytest.mark.parametrize("kind", [None, "eagle3", "self"])
def test_stop_tokens_and_lengths(target, plain_tokens, kind):
    draft = None if kind is None else make_draft(kind, target)
    full = plain_tokens[:3]
    stop = full[0][10]  # appears in the middle of a round for some configurations
    limits = [16, 5, 1]
    result = generate(target, draft, PROMPTS[:3], max_new_tokens=limits, stop_tokens=[stop], page_size=4)
    for got, want, limit in zip(result.tokens, full, limits, strict=True):
        want = want[:limit]
        assert got == (want[: want.index(stop) + 1] if stop in want else want)
    assert result.stats.new_tokens == sum(map(len, result.tokens))


def test_a_request_does_not_depend_on_its_batch(target):
    """Row `i` of a seed is the same in groups of any size, and beside other prompts."""
    draft = make_draft("eagle3", target)
    options = {"max_new_tokens": 16, "sampling": SamplingParams(temperature=1.0, seed=5)}
    together = generate(target, draft, PROMPTS, **options).tokens
    assert generate(target, draft, PROMPTS, max_batch_size=3, **options).tokens == together
    assert generate(target, draft, PROMPTS[:1], **options).tokens == together[:1]
    others = [PROMPTS[0], PROMPTS[5], PROMPTS[2]]
    assert generate(target, draft, others, **options).tokens[::2] == together[:3:2]


def test_rows_and_seeds_draw_differently(target):
    """The same prompt in every row, with neighbouring seeds: no row of one run is a row of another."""
    runs = [
        generate(target, None, [PROMPTS[0]] * 4, max_new_tokens=16, sampling=SamplingParams(1.0, seed=seed)).tokens
        for seed in (0, 1, 2)
    ]
    assert len({tuple(row) for run in runs for row in run}) == 12


def test_without_a_seed_torchs_generator_decides(target):
    def run(seed: int | None = None):
        return generate(target, None, PROMPTS[:2], max_new_tokens=16, sampling=SamplingParams(1.0, seed=seed))

    torch.manual_seed(7)
    first, second = run(), run()
    assert first.tokens != second.tokens
    torch.manual_seed(7)
    again = run()
    assert (again.tokens, again.seed) == (first.tokens, first.seed)
    assert run(second.seed).tokens == second.tokens
    state = torch.get_rng_state()
    assert generate(target, None, PROMPTS[:1], max_new_tokens=2).seed is None
    assert torch.equal(torch.get_rng_state(), state)  # greedy decoding draws nothing


class BrokenAfter(CausalLM):
    """Logits that hold a NaN once a request is `limit` tokens long."""

    limit = 9

    def forward(self, tokens, positions, attention):
        output = super().forward(tokens, positions, attention)
        late = (positions >= self.limit)[..., None]
        return output._replace(hidden=torch.where(late, torch.nan, output.hidden))


@pytest.mark.parametrize("config", [None, SpeculationConfig(3), SpeculationConfig(3, 2)], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}], ids=["plain", "filtered"])
def test_logits_that_are_nan_end_in_an_error(config, filters):
    torch.manual_seed(1)
    target = BrokenAfter(model_config(False, 1))
    draft = StandaloneDraft(make_target(False)) if config else None
    generator = Generator(target, draft, config, max_batch_size=2, max_seq_len=64)
    seen: dict[int, list[int]] = {0: [], 1: []}
    with pytest.raises(RuntimeError, match=r"nothing can be sampled for `prompts\[1\]` after 1 new tokens.*NaN"):
        generator.generate(
            [[1, 2, 3], list(range(9))], max_new_tokens=20, sampling=SamplingParams(1.0, seed=1, **filters),
            on_tokens=lambda i, new: seen[i].extend(new),
        )  # fmt: skip
    assert all(0 <= token < VOCAB for tokens in seen.values() for token in tokens)
    short = generator.generate([[1, 2, 3]], max_new_tokens=5, sampling=SamplingParams(1.0, seed=1, **filters))
    assert len(short.tokens[0]) == 5


def test_a_generator_serves_one_call_at_a_time(target, plain_tokens):
    generator = Generator(target, max_batch_size=3, max_seq_len=64)
    inside = []

    def again(request, tokens):
        with pytest.raises(RuntimeError, match="already running"):
            generator.generate(PROMPTS[:1], max_new_tokens=2)
        thread = threading.Thread(target=lambda: inside.append(attempt()))
        thread.start()
        thread.join()

    def attempt() -> str:
        try:
            generator.generate(PROMPTS[:1], max_new_tokens=2)
        except RuntimeError as error:
            return str(error)
        return "ran"

    assert generator.generate(PROMPTS[:2], max_new_tokens=5, on_tokens=again).tokens == [t[:5] for t in plain_tokens[:2]]
    assert inside
    assert all("another thread" in message for message in inside)
    with pytest.raises(ValueError, match="prompts"):
        generator.generate([[]])
    assert attempt() == "ran"


@pytest.mark.parametrize("keep", [-1, 3, 1.0, True, "1"])
def test_stop_when_returns_a_count(target, keep):
    with pytest.raises(ValueError, match=r"`stop_when` must return None or how many of the 1 new tokens to keep, got"):
        generate(target, None, PROMPTS[:1], max_new_tokens=8, stop_when=lambda request, tokens, count: keep)


def test_rows_buckets_and_reuse(target, plain_tokens):
    """More prompts than rows: the next one takes the row of one that has ended. A bucket's state and round are made once."""
    generator = Generator(target, make_draft("mtp", target), max_batch_size=3, max_seq_len=64)
    assert [generator.bucket(n) for n in (1, 2, 3)] == [1, 2, 3]
    for _ in range(2):
        assert generator.generate(PROMPTS, max_new_tokens=16).tokens == plain_tokens
    assert set(generator.buckets.rounds) == {(3, False, None)}
    assert Generator(target, max_batch_size=6).bucket(5) == 6


def test_streaming_and_statistics(target):
    seen: dict[int, list[int]] = {}
    calls = []

    def on_tokens(request: int, tokens: list[int]) -> None:
        seen.setdefault(request, []).extend(tokens)
        calls.append(len(tokens))

    result = generate(target, make_draft("self", target), PROMPTS[:3], max_new_tokens=[24, 9, 1], on_tokens=on_tokens)
    assert [seen[i] for i in range(3)] == result.tokens
    stats = result.stats
    assert max(calls) == 4
    assert stats.new_tokens == 34
    assert stats.rounds == 6  # 23 tokens, 4 a round
    assert stats.request_rounds == 6 + 2
    assert stats.accept_length == (23 + 8) / 8
    assert stats.tokens_per_second > 0


def test_progress_bar_is_shown(target, capsys):
    generate(target, None, PROMPTS[:1], max_new_tokens=3, progress=True)
    assert "3/3" in capsys.readouterr().err
    generate(target, None, PROMPTS[:1], max_new_tokens=3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "config"),
    [("eagle3", SpeculationConfig(2, 3)), ("mtp", SpeculationConfig(3)), ("standalone", SpeculationConfig(2, 3))],
    ids=["eagle3-tree", "mtp-chain", "standalone-tree"],
)
def test_sampling_repeats_and_near_zero_temperature_is_greedy(target, plain_tokens, kind, config):
    draft = make_draft(kind, target)

    def run(temperature: float, seed: int = 3) -> list[list[int]]:
        sampling = SamplingParams(temperature, top_k=20, top_p=0.95, seed=seed)
        return generate(target, draft, PROMPTS[:3], config, max_new_tokens=14, sampling=sampling, page_size=4).tokens

    first = run(1.0)
    assert run(1.0) == first
    assert run(1.0, seed=4) != first
    assert run(1e-4) == [tokens[:14] for tokens in plain_tokens[:3]]


def test_thresholds_accept_more(target):
    sampling, draft = SamplingParams(1.0), make_draft("self", target)
    strict, lossy = (
        generate(target, draft, PROMPTS, SpeculationConfig(3, 4, 10, **thresholds), max_new_tokens=16, sampling=sampling).stats
        for thresholds in ({}, {"threshold_single": 0.1, "threshold_acc": 0.3})
    )
    assert lossy.accept_length > strict.accept_length + 0.1


def test_fp8_cache_decodes(target):
    """Tokens may change with the cache's rounding; speculation must still start as plain decoding does, and run."""
    options = {"max_new_tokens": 12, "cache_dtype": torch.float8_e4m3fn}
    plain = generate(target, None, PROMPTS[:3], **options).tokens
    chain = generate(target, make_draft("eagle3", target), PROMPTS[:3], **options).tokens
    assert [t[0] for t in chain] == [t[0] for t in plain]
    assert [len(t) for t in chain] == [12] * 3


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"prompts": [[]]}, "prompts[0]"),
        ({"prompts": [[1], [VOCAB]]}, "prompts[1]"),
        ({"prompts": [[1], [-1]]}, "prompts[1]"),
        ({"prompts": [[1.5]]}, "prompts[0]"),
        ({"prompts": ["text"]}, "`prompts[0]` .*got the text 'text': encode it first"),
        ({"prompts": "text"}, "`prompts` .*got the text 'text': encode it first"),
        ({"prompts": [1, 2, 3]}, "`prompts` .*got one flat list of ids: pass `[prompt]`"),
        ({"prompts": torch.tensor([1, 2, 3])}, "`prompts` .*got one flat list of ids"),
        ({"prompts": {"input_ids": [[1]]}}, "`prompts` .*pass its `input_ids`"),
        ({"prompts": None}, "`prompts` .*got None"),
        ({"prompts": [None]}, "`prompts[0]` .*got None"),
        ({"prompts": [torch.tensor(3)]}, "`prompts[0]`"),
        ({"prompts": [torch.tensor([1.0])]}, "`prompts[0]`"),
        ({"prompts": [[True]]}, "`prompts[0]`"),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompts": [[1]], "max_new_tokens": [2.5]}, "max_new_tokens"),
        ({"prompts": [[1]], "max_new_tokens": 2.0}, "max_new_tokens"),
        ({"prompts": [[1]], "max_new_tokens": True}, "max_new_tokens"),
        ({"prompts": [[1]], "max_new_tokens": None}, "max_new_tokens"),
        ({"prompts": [[1]], "max_new_tokens": torch.tensor(4)}, "max_new_tokens"),
        ({"prompts": [[1]], "max_new_tokens": 4, "stop_tokens": None}, "stop_tokens"),
        ({"prompts": [[1]], "max_new_tokens": 4, "stop_tokens": 3}, "stop_tokens"),
        ({"prompts": [[1]], "max_new_tokens": 4, "stop_tokens": [True]}, "stop_tokens"),
        ({"prompts": [[1]], "max_new_tokens": 4, "stop_tokens": torch.tensor([1.5])}, "stop_tokens"),
        ({"prompts": [[1]], "max_new_tokens": [1, 2]}, "max_new_tokens"),
        ({"prompts": [[1] * 60], "max_new_tokens": 10}, "max_seq_len"),
        ({"prompts": [[1]], "max_new_tokens": 4, "stop_tokens": list(range(9))}, "stop_tokens"),
        ({"prompts": [[1]], "max_new_tokens": 4, "stop_tokens": [VOCAB]}, "stop_tokens"),
        (
            {"prompts": [[1]], "max_new_tokens": 4, "sampling": {"temperature": 1}},
            "`sampling` must be a SamplingParams, or a list with one per prompt, got dict",
        ),
        ({"prompts": [[1]], "max_new_tokens": 4, "on_tokens": 3}, "`on_tokens` must be a function, got 3"),
        ({"prompts": [[1]], "max_new_tokens": 4, "stop_when": 3}, "`stop_when` must be a function, got 3"),
    ],
)
def test_bad_generate_arguments(target, kwargs, name):
    generator = Generator(target, max_seq_len=64)
    with pytest.raises(ValueError, match=name.replace("[", r"\[").replace("]", r"\]")):
        generator.generate(**kwargs)


def test_prompts_come_after_the_models(target):
    with pytest.raises(ValueError, match=r"`draft` must be a .*Draft, got list: prompts come after it, `generate\(target,"):
        generate(target, PROMPTS, make_draft("self", target))


@pytest.mark.parametrize("name", ["max_batch_size", "max_seq_len", "page_size"])
@pytest.mark.parametrize("value", [0, 2.0, True, "8", None])
def test_sizes_are_integers(target, name, value):
    with pytest.raises(ValueError, match=f"Generator: `{name}` must be an int .*, got {value!r}"):
        Generator(target, **{name: value})
    with pytest.raises(ValueError, match=f": `{name}` must be an int .*, got {value!r}"):
        generate(target, None, [[1]], max_new_tokens=2, **{name: value})


@pytest.mark.parametrize("name", ["backend", "prefill_backend"])
@pytest.mark.parametrize("value", ["nonsense", 3])
def test_an_unknown_backend_is_named_at_once(target, name, value):
    with pytest.raises(ValueError, match=f"Generator: `{name}` must be 'auto' or one of .*, got {value!r}"):
        Generator(target, **{name: value})


@pytest.mark.parametrize("name", ["threshold_single", "threshold_acc"])
@pytest.mark.parametrize("value", ["1", None, True, torch.tensor(0.5), float("nan"), 0, 1.5])
def test_thresholds_are_numbers(name, value):
    with pytest.raises(ValueError, match=rf"SpeculationConfig: `{name}` must be a number in \(0, 1\], got "):
        SpeculationConfig(3, 2, **{name: value})
    with pytest.raises(ValueError, match=f"SpeculationConfig: `{name}` must be 1 for a chain, got"):
        SpeculationConfig(3, **{name: 0.5})


@pytest.mark.parametrize("config", [{"num_steps": 2}, 3])
def test_a_configuration_of_another_kind(target, config):
    with pytest.raises(ValueError, match=f"Generator: `config` must be a SpeculationConfig, got {type(config).__name__}"):
        Generator(target, make_draft("mtp", target), config)


def test_numpy_integers_and_tensors_are_taken(target, plain_tokens):
    config = SpeculationConfig(np.int64(3), np.int32(1))
    generator = Generator(target, make_draft("mtp", target), config, page_size=np.int64(4), max_seq_len=np.int64(64))
    prompts = torch.tensor([PROMPTS[3], [9, 9]])
    stop = torch.tensor([plain_tokens[3][4]])
    result = generator.generate(prompts, max_new_tokens=torch.tensor([16, 3]), stop_tokens=stop)
    expected = plain_tokens[3][: plain_tokens[3].index(int(stop)) + 1]
    assert result.tokens == [expected, expected[:3]]
    assert SamplingParams(1, np.int64(5), 1, np.int64(3)) == SamplingParams(1.0, 5, 1.0, 3)


def test_models_in_the_wrong_place_are_named(target):
    draft = make_draft("eagle3", target)
    with pytest.raises(ValueError, match=r"`target` must be a .*Target, got Eagle3Draft: are `target` and `draft` swapped\?"):
        Generator(draft, target)
    with pytest.raises(ValueError, match=r"`draft` must be a .*Draft, got CausalLM: .*StandaloneDraft\(model\)"):
        Generator(target, target)
    with pytest.raises(ValueError, match=r"`target` must be a .*Target, got str"):
        Generator("model")


def test_a_draft_that_does_not_fit_is_named(target):
    with pytest.raises(ValueError, match=r"`config.topk` must be at most the draft's vocabulary of 40, got 41"):
        Generator(target, make_draft("eagle3", target), SpeculationConfig(1, 41))
    other = StandaloneDraft(CausalLM(model_config(False, vocab_size=50)))
    with pytest.raises(ValueError, match="`draft` must know the target's 97 tokens, got 50"):
        Generator(target, other)
    with pytest.raises(ValueError, match=r"`draft` must be torch.float32, as the target is, got torch.bfloat16"):
        Generator(target, make_draft("standalone", target).bfloat16())
    with pytest.raises(ValueError, match=r"`cache_dtype` must be .*, got torch.bfloat16"):
        Generator(target, cache_dtype=torch.bfloat16)


def test_a_head_of_another_target_is_named_before_anything_runs(target):
    wider, fewer, none = (
        CausalLM(replace(target.config, **change))
        for change in ({"hidden_size": 128}, {"aux_layers": target.config.aux_layers[:2]}, {"aux_layers": ()})
    )
    for kind in ("eagle3", "mtp"):
        with pytest.raises(ValueError, match="`draft` must be a head for the target's hidden size of 128, got one for 64"):
            Generator(wider, make_draft(kind, target))
    for other, count in ((fewer, 2), (none, 0)):
        message = f"`draft` must read as many layers as the target's `aux_layers` name, {count}, got one that reads 3"
        with pytest.raises(ValueError, match=message):
            Generator(other, make_draft("eagle3", target))
        Generator(other, make_draft("mtp", target))  # the last hidden state, whatever the layers
    Generator(wider, make_draft("standalone", target))  # it reads tokens alone


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 2.0}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"topk": "2"}, "topk"),
        ({"topk": 2, "num_draft_tokens": 4.0}, "num_draft_tokens"),
        ({"topk": 4, "num_draft_tokens": 100}, r"in \[2, 37\], got 100: 3 steps of width 4 draft 36 candidates"),
        ({"topk": 0}, "topk"),
        ({"num_steps": 3, "num_draft_tokens": 5}, "num_draft_tokens"),
        ({"num_steps": 2, "topk": 2, "num_draft_tokens": 8}, "num_draft_tokens"),
        ({"num_steps": 18, "topk": 4}, "topk"),
        ({"num_steps": 64}, "num_steps"),
        ({"threshold_acc": 0.5}, "threshold_acc"),
        ({"topk": 2, "threshold_single": 0.0}, "threshold_single"),
    ],
)
def test_bad_speculation_config(kwargs, name):
    with pytest.raises(ValueError, match=name):
        SpeculationConfig(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": "0.9"}, "top_p"),
        ({"temperature": None}, "temperature"),
        ({"temperature": torch.tensor(1.0)}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
    ],
)
def test_bad_sampling_params(kwargs, name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**kwargs)


def test_prefill_backend(target, plain_tokens):
    """A provider without a ragged kernel decodes, and never stands in for one that was named."""
    reference = get_backend("reference")
    kernels = {step: path for step, path in reference.kernels.items() if step not in ("mha_extend", "mla_extend")}
    with using_provider("decode_only", kernels=kernels):
        with pytest.raises(BackendError, match=r"decode_only has no kernel for m.a_extend"):
            Generator(target, page_size=4, backend="decode_only").generate(PROMPTS[:1], max_new_tokens=2)
        generator = Generator(target, page_size=4, backend="decode_only", prefill_backend="reference")
        assert generator.generate(PROMPTS, max_new_tokens=16).tokens == plain_tokens
