"""`python -m benchmarks round`: the rounds it builds, and their rows."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks
from benchmarks.round import ranks as sharing
from benchmarks.round.measure import CompiledRound, RoundCase, floor_bytes
from benchmarks.round.report import kind
from benchmarks.round.shapes import MLA_STACK, SHAPES
from spec_ops.models.stored_tensor import StoredTensor
from spec_ops.passes import explain
from spec_ops.passes.analysis import counts

TINY = RoundCase("tiny", 3, (40, 70), device="cpu", dtype="float32", compiled=False, repeats=2)


@pytest.fixture
def tiny_mla(monkeypatch):
    """A DeepSeek-type shape of a size for tests."""
    small = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
    small |= {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    monkeypatch.setitem(SHAPES, "tiny-mla", replace(MLA_STACK, target=replace(MLA_STACK.target, **small)))
    return replace(TINY, model="tiny-mla")


def two_rounds(case: RoundCase, round: str) -> tuple[CompiledRound, CompiledRound]:
    """The speculative round and another over equal weights and caches."""
    ours, other = CompiledRound(case), CompiledRound(replace(case, round=round))
    pairs = [(getattr(ours.generator, name), getattr(other.generator, name)) for name in ("target", "target_cache")]
    if other.generator.draft is not None:
        pairs += [(getattr(ours.generator, name), getattr(other.generator, name)) for name in ("draft", "draft_cache")]
    with torch.no_grad():
        for source, copy in pairs:
            for x, y in zip([*source.parameters(), *source.buffers()], [*copy.parameters(), *copy.buffers()], strict=True):
                y.copy_(x)
    for one in (ours, other):
        one.reset(case.contexts[-1])
    return ours, other


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_the_naive_round_does_the_same(mla, tiny_mla):
    """Round by round the same tokens: of several requests, so that pages in random order and ragged rows matter."""
    torch.manual_seed(0)
    case = tiny_mla if mla else TINY
    ours, naive = two_rounds(case, "naive")
    states = [one.generator.buckets.state(case.batch_size) for one in (ours, naive)]
    for _ in range(5):
        ours.step()
        naive.step()
        for name in ("committed_lens", "last_token", "draft_tokens"):
            assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name
        torch.testing.assert_close(states[0].draft_hidden, states[1].draft_hidden)
    assert int(states[0].committed_lens.min()) >= case.contexts[-1] + 5


@pytest.mark.slow
def test_the_passes_clean_the_naive_round():
    naive = CompiledRound(replace(TINY, round="naive"))
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        plan = explain(naive.step, arch=90)
    found = {name: (plan.before[name], plan.after[name]) for name in (counts.PAGE_TABLES, counts.KV_GENERATIONS)}
    assert found == {counts.PAGE_TABLES: (4, 1), counts.KV_GENERATIONS: (4, 0)}
    assert (plan.before[counts.ITEMS], plan.after[counts.ITEMS]) == (4, 0)
    assert (plan.before[counts.PREFILLS], plan.after[counts.PREFILLS]) == (1, 0)


def test_naive_rounds_draft_chains_only():
    with pytest.raises(ValueError, match="must draft chains"):
        CompiledRound(replace(TINY, round="naive", topk=2))


def test_plain_rounds_gain_one_token_and_speculative_ones_stay_within_their_slack():
    ours, plain = two_rounds(TINY, "plain")
    for one, most in ((plain, 1), (ours, 4)):
        state = one.generator.buckets.state(3)
        for count in range(1, 4):
            one.step()
            gained = state.committed_lens - TINY.contexts[-1]
            assert bool((gained >= count).all())
            assert bool((gained <= most * count).all())
    assert ours.generator.max_seq_len >= max(TINY.contexts) + 4 * (TINY.repeats + 4)


def test_rounds_of_prompt_lookup():
    """No draft model: neither its memory nor its bytes count. A round verifies drafts of the text; one of length 0 does not."""
    cases = {
        kind: replace(TINY, model="tiny-experts", round=kind, bandwidth=1e9) for kind in ("plain", "plain-lookup", "lookup")
    }
    made = {kind: CompiledRound(case) for kind, case in cases.items()}
    rows = {kind: next(one.rows()) for kind, one in made.items()}
    assert [(row["kind"], row["steps"], row["accept_length"]) for row in rows.values()] == [
        ("plain", 0, 1.0),
        ("plain-lookup", 0, 1.0),
        ("lookup", 3, 3.0),
    ]
    assert rows["lookup"]["model"] == rows["plain-lookup"]["model"] == "tiny-experts-2-layers+lookup"
    assert rows["plain"]["weights_floor_ms"] == rows["plain-lookup"]["weights_floor_ms"] < rows["lookup"]["weights_floor_ms"]
    experts = {kind: row["touched_experts"] for kind, row in rows.items()}
    assert experts == {kind: round(16 * (1 - 0.75**n), 2) for kind, n in (("plain", 3), ("plain-lookup", 3), ("lookup", 12))}
    assert cases["lookup"].memory_bytes() < replace(cases["lookup"], round="speculative").memory_bytes()
    assert cases["plain-lookup"].memory_bytes() == cases["plain"].memory_bytes()
    for name, read in (("plain-lookup", 1), ("lookup", 4)):
        generator, seen = made[name].generator, []
        made[name].reset(40)
        state = generator.buckets.state(3)
        assert state.tokens.unique().numel() > 50  # in a text of equal tokens every place would be found
        state.tokens[:] = torch.arange(7).repeat(state.tokens.shape[1])[: state.tokens.shape[1]]
        state.last_token[:] = state.tokens[:, 40]
        generator.target.embed.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].view(3, -1).clone()))
        made[name].step()
        assert seen[0].tolist() == [[(40 + i) % 7 for i in range(read)]] * 3
        assert made[name].step.drafter is not None


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
def test_rounds_of_a_model_of_transformers(family, monkeypatch):
    sizes = replace(TINY.shape.target, attention_sinks=False, sliding_window=None, sliding_window_pattern=None)
    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPES["tiny"], target=sizes, family=family))
    floors = []
    for path in ("own", "transformers"):
        rounds = [CompiledRound(replace(TINY, path=path, round=round, contexts=(40,))) for round in ("speculative", "plain")]
        found = [row for compiled in rounds for row in compiled.rows()]
        assert [(row["path"], row["kind"], row["model"]) for row in found] == [
            (path, "eagle3", "tiny-2-layers+eagle3"),
            (path, "plain", "tiny-2-layers"),
        ]
        assert all(row["first_call_s"] > 0 for row in found)
        floors.append([floor_bytes(compiled.generator, 3, 40, sizes) for compiled in rounds])
        if path == "transformers":
            assert type(rounds[0].generator.target.decoder).__name__ == f"{family}Model"
    norms = 2 * 2 * sizes.head_dim * 4 if family == "Qwen3" else 0  # of queries and keys, which our class does not have
    assert [(weights + norms, kv) for weights, kv in floors[0]] == floors[1]


def test_rows_of_a_round_on_cpu():
    rows = list(CompiledRound(TINY).rows())
    assert [row["context"] for row in rows] == [40, 70]
    for row in rows:
        assert row["ms"] > 0
        assert row["floor_ms"] == pytest.approx(row["weights_floor_ms"] + row["kv_floor_ms"], abs=0.002)
        assert row["tokens_per_s"] == pytest.approx(3.0 * 3 / row["ms"] * 1e3, rel=0.01)
        assert (row["round"], row["model"], row["topk"]) == ("speculative", "tiny-2-layers+eagle3", 1)


def test_one_rank_alone():
    """Shares with weights of their own; of the whole models nothing is made."""
    slow = replace(TINY, bandwidth=1e9)
    (whole, *_), (share, *_) = (list(CompiledRound(case).rows()) for case in (slow, replace(slow, tp=2, alone=True)))
    assert (share["tp"], share["gpus"], share["collective"]) == (2, 1, "push")
    assert 0.5 * whole["weights_floor_ms"] <= share["weights_floor_ms"] < 0.8 * whole["weights_floor_ms"]
    assert kind(share) == "speculative, one of 2 ranks alone, push"
    assert replace(TINY, tp=2).memory_bytes() < TINY.memory_bytes()


def test_a_rank_that_holds_whole_experts():
    """As many bytes as a share of each, whichever it is."""
    made = replace(TINY, model="tiny-experts", tp=2, alone=True, bandwidth=1e9, contexts=(40,))
    (inside,), (whole,) = (list(CompiledRound(replace(made, expert_parallel=flag)).rows()) for flag in (False, True))
    assert whole["weights_floor_ms"] == inside["weights_floor_ms"]
    assert whole["expert_parallel"]
    assert kind(whole) == "speculative, one of 2 ranks alone, push, whole experts"


def test_a_rank_with_a_whole_draft():
    """Every rank reads all of it. The name of the case tells it from the other."""
    made = replace(TINY, tp=2, alone=True, bandwidth=1e9, contexts=(40,))
    (divided,), (whole,) = (list(CompiledRound(replace(made, whole_draft=flag)).rows()) for flag in (False, True))
    target = next(CompiledRound(replace(made, round="plain")).rows())["weights_floor_ms"]
    drafts = [row["weights_floor_ms"] - target for row in (divided, whole)]
    assert drafts[1] == pytest.approx(2 * drafts[0], rel=0.3)
    assert kind(whole) == "speculative, one of 2 ranks alone, push, whole draft"


def test_a_token_that_differs_once_is_found(monkeypatch):
    """Ranks compare one number for many rounds: it depends on every token of every round."""
    monkeypatch.setattr(sharing, "COMPARED", 30)

    def totals(wrong: int | None) -> list[int]:
        found: list[int] = []
        output, random, begun = torch.zeros(2, 5, dtype=torch.int64), torch.Generator().manual_seed(0), itertools.count()

        def step() -> None:
            output.copy_(torch.randint(-1, 100, output.shape, generator=random))
            if next(begun) == wrong:
                output[1, 3] += 1

        ranks = SimpleNamespace(check_same=lambda where, values: found.append(values["tokens"].item()))
        sharing.check_tokens(ranks, step, output, lambda number: None, 70)
        return found

    right = totals(None)
    assert len(right) == 3
    for wrong in (0, 29, 30, 69):
        differing = [index for index, (a, b) in enumerate(zip(right, totals(wrong), strict=True)) if a != b]
        assert differing == list(range(wrong // 30, 3))


@pytest.mark.parametrize("tree", [{}, {"topk": 2, "tree_tokens": 6}], ids=["chain", "tree"])
@pytest.mark.parametrize("penalties", [False, True], ids=["logits as they are", "penalties"])
def test_rounds_that_sample(tree, penalties):
    """Every request by the settings of the case; the same tokens after each reset, and not the greedy ones."""
    torch.manual_seed(0)
    case = replace(TINY, temperature=0.6, top_p=0.9, min_p=0.01, penalties=penalties, **tree)
    made = CompiledRound(case)
    state = made.generator.buckets.state(3)
    assert (state.temperature == 0.6).all()
    assert (state.top_p == torch.tensor(0.9)).all()
    assert (state.min_p == torch.tensor(0.01)).all()
    assert len(set(state.seeds.tolist())) == 3

    def texts() -> list[torch.Tensor]:
        made.reset(40)
        found = []
        for _ in range(4):
            made.step()
            found.append(state.output.clone())
        return found

    first = texts()
    assert all(torch.equal(a, b) for a, b in zip(first, texts(), strict=True))
    state.temperature.zero_()
    made.reset(40)
    state.temperature.zero_()
    made.step()
    assert not torch.equal(state.output, first[0])
    (row, _) = made.rows()
    said = {"sampled": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.01}
    assert {name: row[name] for name in said} == said
    assert row.get("penalties", False) is penalties
    assert row.get("num_tokens") == tree.get("tree_tokens")


def test_batch_invariant_rounds():
    """In bfloat16: what one request gets is what it gets beside others."""
    case = replace(TINY, dtype="bfloat16", invariant=True)
    assert CompiledRound(case).generator.invariant
    (row, _) = CompiledRound(case).rows()
    assert row["invariant"] is True
    assert kind(row) == "speculative, invariant"


@pytest.mark.parametrize("path", ["own", "transformers"])
def test_rounds_with_weights_of_fewer_bits(path, monkeypatch):
    """The layers of target and draft are stored; the same texts as of the dequantized models."""
    sizes = replace(TINY.shape.target, attention_sinks=False, sliding_window=None, sliding_window_pattern=None)
    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPES["tiny"], target=sizes))
    case = replace(TINY, contexts=(40,), path=path)
    for weights, bits in (("float8", 8), ("float8_block", 8), ("float8_block_dynamic", 8), ("int4", 4), ("nvfp4", 4)):
        made = CompiledRound(replace(case, weights=weights))
        layers = [m for model in (made.generator.target, made.generator.draft) for m in model.modules() if type(m) is nn.Linear]
        stored = [layer.weight for layer in layers if isinstance(layer.weight, StoredTensor)]
        assert {layer.in_features for layer in layers if not isinstance(layer.weight, StoredTensor)} <= {96}
        assert len(stored) >= 2 * 3 + 3
        assert {w.data_.numel() * w.data_.element_size() * 8 // w.numel() for w in stored} == {bits}
        assert all((w.inputs is not None) == weights.endswith("_dynamic") for w in stored)
        (row,) = made.rows()
        assert row["weights"] == weights
        assert kind(row) == f"speculative, {weights}" + (", transformers" if path == "transformers" else "")


def test_penalties_change_the_round():
    """The bitmask of the case allows about half of the tokens; each that is emitted is one of them."""
    torch.manual_seed(0)
    made = CompiledRound(replace(TINY, round="plain", penalties=True))
    made.step()
    state = made.generator.buckets.state(3)
    assert made.changes is not None
    allowed = (made.changes.bitmask[:, 0, :, None] >> torch.arange(32)) & 1
    tokens = state.last_token
    assert allowed.flatten(1).gather(1, tokens[:, None]).all()
    assert 0.3 < allowed.double().mean() < 0.7
    assert int(made.changes.counts.sum()) == 3 * 5  # five rounds: four of the constructor
    assert "sampled" not in next(made.rows())


def test_rows_of_mixtures():
    made = CompiledRound(replace(TINY, model="tiny-experts"))
    rows = list(made.rows())
    assert {row["touched_experts"] for row in rows} == {round(16 * (1 - 0.75**12), 2)}  # 3 requests of 4 tokens
    from benchmarks.round.assisted import AssistedRound

    with pytest.raises(ValueError, match="round: shapes with mixtures of experts"):
        AssistedRound(replace(TINY, model="tiny-experts", round="assisted", batch_size=1))


@pytest.mark.parametrize("model", ["tiny", "tiny-mla"])
def test_transformers_assisted_generation(model, tiny_mla):
    from benchmarks.round.assisted import AssistedRound

    made = AssistedRound(replace(TINY, model=model, round="assisted", batch_size=1, contexts=(30, 150)))
    rows = list(made.rows())
    assert [row["context"] for row in rows] == [30, 150]
    for row in rows:
        assert row["ms"] > 0
        assert (row["backend"], row["round"]) == ("transformers", "assisted")
        assert row["model"].endswith("-2-layers+one-layer")
    ours, _ = made.case.shape.build("meta", torch.float32)
    theirs, mine = (sum(p.numel() for p in m.parameters()) for m in (made.target, ours))
    assert mine <= theirs < 1.03 * mine  # gpt-oss has biases and a router
    if model == "tiny":  # an assistant with a window fails in transformers 5.17
        assert made.target.config.layer_types == ["sliding_attention", "full_attention"]
        assert made.assistant.config.layer_types == ["full_attention"]
    row = sum(torch.Size(shape).numel() for shape in made.case.shape.target.kv_rows[0]) * 4
    seen = (128 if model == "tiny" else 150) + 150 + made.case.steps * 150  # the target's two layers, the assistant's one
    assert made.floor_bytes(150)[1] == seen * row


def test_assisted_generation_takes_one_request():
    from benchmarks.round.assisted import AssistedRound

    with pytest.raises(ValueError, match="one request"):
        AssistedRound(replace(TINY, round="assisted"))


@pytest.mark.gpu
def test_one_layer_rounds(tmp_path):
    path, picture = tmp_path / "round.json", tmp_path / "round.png"
    args = ["round", "--layers", "1", "--batch-size", "2", "--context", "128", "--context", "200", "--repeats", "5"]
    args += ["--naive", "--plain", "--passes", "both", "--backend", "auto", "--backend", "triton", "--compile-times"]
    result = CliRunner().invoke(benchmarks.app, [*args, "--timeline", str(picture), "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert picture.stat().st_size > 10_000
    assert len(found["rows"]) == 3 * 2 * 2 * 2  # kinds, backends, passes, contexts
    assert len(found["auto"]) == 12
    for row in found["rows"]:
        assert row["ms"] > row["floor_ms"] > 0
        if row["passes"] or row["round"] != "naive":
            assert row["graph_launches"] == 1
            assert row["host_launches"] == row["host_syncs"] == 0
        assert row["kernels"] > 10
        assert min(row["matmul_ms"], row["attention_ms"], row["other_ms"]) > 0
        parts = row["matmul_ms"] + row["attention_ms"] + row["other_ms"] + row["gaps_ms"]
        assert parts == pytest.approx(row["ms"], abs=0.01)
        assert sum(us for _, us in row["small_kernels"].values()) == pytest.approx(row["other_ms"] * 1e3, abs=5)
        assert row["compile_cold_s"] > row["compile_warm_s"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu():
    result = CliRunner().invoke(benchmarks.app, ["round"])
    assert result.exit_code == 2
    assert "CUDA" in result.output
