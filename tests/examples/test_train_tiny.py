"""The training example: its dense attention against the paged ops, and one small run from end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
import torch

from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.paged import PagedAttention, PagedKVCache
from spec_ops.models.pretrained import load_pair
from spec_ops.models.target import CausalLM
from tests.helpers.forked import run_script
from tests.helpers.paths import EXAMPLES

SCRIPT = EXAMPLES / "train_tiny.py"
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
PAGE_SIZE, NUM_PAGES = 4, 16


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny"] = module  # typing.NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair() -> tuple[CausalLM, Eagle3Draft]:
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(num_layers=4, aux_layers=(1, 2, 3), **SIZES))
    return target, Eagle3Draft(ModelConfig(num_layers=1, **SIZES), target, torch.arange(1, 33, 2))


class Paged:
    """One request with its own cache in scattered pages."""

    def __init__(self, config: ModelConfig) -> None:
        self.cache = PagedKVCache(config, NUM_PAGES, PAGE_SIZE)
        self.pages = torch.randperm(NUM_PAGES).int()

    def attention(self, step: str, start: int, end: int) -> PagedAttention:
        positions = torch.arange(start, end)
        slots = self.pages.long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        ragged = {"q_indptr": torch.tensor([0, end - start], dtype=torch.int32), "max_q_len": end - start}
        return PagedAttention(
            self.cache,
            step,
            self.pages[None],
            torch.tensor([end], dtype=torch.int32),
            slots if step == "extend" else slots[None],
            **(ragged if step == "extend" else {}),
        )


@torch.no_grad()
def test_dense_target_equals_paged_prefill(example, pair):
    target, _ = pair
    tokens = torch.randint(40, (21,))
    positions = torch.arange(21)
    dense = target(tokens[None], positions, example.DenseAttention())
    paged = target(tokens, positions, Paged(target.config).attention("extend", 0, 21))
    torch.testing.assert_close(dense.hidden[0], paged.hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dense.aux[0], paged.aux, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["extend", "draft_extend"])
@pytest.mark.parametrize("row", [0, 1, 7, 15])
def test_unrolled_training_equals_drafting(example, pair, row, prefill):
    """Row `n` of every unrolled step is what the head computes when it prefills up to `n` and then drafts from there."""
    target, draft = pair
    tokens = torch.randint(40, (1, 21))
    features = draft.encode(target(tokens, torch.arange(21), example.DenseAttention()))[:, :16]
    unrolled = example.unroll(draft, features, tokens, example.UNROLL_STEPS)

    paged, n = Paged(draft.config), row
    inputs = (tokens[:, 1 : n + 2], features[:, : n + 1], torch.arange(n + 1)[None])
    if prefill == "extend":
        inputs = tuple(x[0] for x in inputs)
    hidden = draft(*inputs, paged.attention(prefill, 0, n + 1)).reshape(1, n + 1, -1)
    torch.testing.assert_close(unrolled[0][:, : n + 1], hidden, rtol=1e-4, atol=1e-5)
    hidden = hidden[:, -1:]
    for step in range(1, example.UNROLL_STEPS):
        position = n + step
        attention = paged.attention("draft_decode", position, position + 1)
        hidden = draft(tokens[:, position + 1 : position + 2], hidden, torch.tensor([[position]]), attention)
        torch.testing.assert_close(unrolled[step][:, n : n + 1], hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(draft.logits(unrolled[step][:, n : n + 1]), draft.logits(hidden), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_target_logits_are_for_the_token_the_step_predicts(example, pair):
    target, draft = pair
    tokens = torch.randint(40, (2, 28))
    logits = target.logits(target(tokens, torch.arange(28), example.DenseAttention()).hidden)
    steps = example.draft_steps(target, draft, tokens)
    assert len(steps) == example.UNROLL_STEPS
    for j, step in enumerate(steps):
        assert step.logits.shape == (2, 24, 16)
        for row in (0, 23):  # predicts token row + j + 2, whose distribution stands one position before
            torch.testing.assert_close(step.target_logits[:, row], logits[:, row + j + 1])


@torch.no_grad()
def test_greedy_generation_equals_reforwarding(example, pair):
    target, _ = pair
    prompts = torch.randint(40, (3, 5))
    generator = torch.Generator().manual_seed(0)
    written = example.generate(target, prompts, 17, torch.zeros(3), generator)
    assert torch.equal(written[:, :5], prompts)
    logits = target.logits(target(written, torch.arange(17), example.DenseAttention()).hidden)
    assert torch.equal(written[:, 5:], logits[:, 4:-1].argmax(-1))


def test_draft_loss_trains_the_head_alone(example, pair):
    target, draft = pair
    target.requires_grad_(False)
    example.draft_loss(target, draft, torch.randint(40, (2, 28))).backward()
    assert all(p.grad is None for p in target.parameters())
    own = [p for p in draft.parameters() if p.requires_grad]
    assert own
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in own)


def test_accept_length_stops_at_the_first_disagreement(example):
    agree = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
    assert example.accept_length(agree) == pytest.approx(1 + (4 + 1 + 0) / 3)


@pytest.mark.parametrize(("steps", "seconds"), [(40, None), (10**6, 1.0)])
def test_learning_rate_decays_to_zero_within_either_budget(example, monkeypatch, steps, seconds):
    rates, module = [], torch.nn.Linear(2, 2)
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    start = example.time.perf_counter()
    record = example.train(
        "test",
        module,
        lambda tokens: module(tokens.float()).square().mean(),
        lambda: torch.ones(4, 2, dtype=torch.long),
        lambda: 1.0,
        lr=1.0,
        steps=steps,
        deadline=None if seconds is None else start + seconds,
    )
    assert record["steps"] == len(rates)
    assert rates[-1] < 0.02 * max(rates)
    assert len(record["curves"]["step"]) == len(record["curves"]["heldout_loss"]) <= example.EVALUATIONS
    if seconds is None:
        assert record["steps"] == steps
    else:
        assert example.time.perf_counter() - start < seconds + 5


@pytest.mark.slow
def test_tiny_run(example, tmp_path):
    """As a script, then once more in this process, from the target that the first left."""
    out, plot = tmp_path / "pair", tmp_path / "plots" / "losses.png"
    done = run_script(SCRIPT, "--tiny", "--device", "cpu", "--out", str(out), "--plot", str(plot), "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "tokens per round" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    target, draft, tokenizer = load_pair(out)
    assert target.config.vocab_size == tokenizer.vocab_size
    assert draft.draft_to_target.unique().numel() == 128
    training = json.loads((out / "config.json").read_text())["training"]
    assert training["seed"] == 1
    for phase in ("target", "draft"):
        curves = training[phase]["curves"]
        assert curves["heldout_loss"][-1] < curves["heldout_loss"][0]
        assert curves["train_loss"][-1] < curves["train_loss"][0]

    again = tmp_path / "again"
    example.main(tiny=True, device="cpu", out=again, target=out, seed=2)
    for name, value in load_pair(again)[0].state_dict().items():
        assert torch.equal(value, target.state_dict()[name])
