"""require_invariance: what a graph's operations become, the same for every number of rows, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import spec_ops
from spec_ops.backends import get_backend, push, unregister_backend
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.target import CausalLM
from spec_ops.ops.collectives import all_reduce_op
from spec_ops.ops.invariance import NotInvariantError
from spec_ops.parallel import TensorParallel, shard
from spec_ops.passes.require_invariance import RequireInvariance
from tests.helpers.groups import pretended
from tests.helpers.pass_harness import capture, run_pass, targets, texts

SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
NAME = "require_invariance"


def block(x, w0, w1, g):
    """What a layer does to rows, and a softmax of their logits."""
    hidden = x + F.linear(F.silu(F.linear(F.rms_norm(x, (128,), g, 1e-5), w0)), w1)
    return hidden, torch.einsum("mk,hkn->mhn", hidden, w0.view(2, 128, 96)).float().softmax(-1)


def inputs(m: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=g)[:m]
    return [t.bfloat16() for t in (x, *(torch.randn(s, generator=g) for s in ((192, 128), (128, 192), (128,))))]


def notes(report, name: str = NAME) -> list[str]:
    return [note.text for result in report.results if result.name == name for note in result.done]


def test_rows_do_not_decide():
    plans = [spec_ops.explain(_with_an_op(m), *inputs(m), arch=90, invariant=True) for m in (1, 4, 40, 64)]
    want = ["RMSNorm: rms_norm", "aten.mm.default: batched_mm", "aten.sum.dim_IntList: row_sum"]
    for plan in plans:
        assert sorted(notes(plan)) == want
        assert len(notes(plan, "lower_skinny_mm")) == 2
        assert not [note for result in plan.results if result.name == NAME for note in result.refused]


def _with_an_op(m: int, fn: Callable = block):
    """`fn`, and an op of ours: without one, passes leave a graph alone."""
    caches = torch.zeros(2, 4, 8, 1, 64, dtype=torch.bfloat16).unbind()
    slots, rows = torch.arange(m) % 32, torch.zeros(2, m, 1, 64, dtype=torch.bfloat16)

    def call(*args):
        spec_ops.append_kv(*caches, *rows.unbind(), slots)
        return fn(*args)

    return call


def test_compiled_bits():
    """On the CPU, compiled: a row's bits of 7 rows and alone."""
    torch._dynamo.reset()
    compiled = spec_ops.compile(block, mode="default", invariant=True)
    (x, *weights), rows = inputs(7), slice(3, 4)
    whole, alone = compiled(x, *weights), compiled(x[rows].clone(), *weights)
    for one, all_rows, eager in zip(alone, whole, block(x, *weights), strict=True):
        assert torch.equal(one, all_rows[rows])
        torch.testing.assert_close(all_rows, eager, rtol=2e-2, atol=2e-2)


def sums_and_norms(x, y, z, g):
    """A sum that is read later too, and normalized twice; one of other shapes, and one whose second term is scaled."""
    first = x + y
    normed = F.rms_norm(first, (128,), g, 1e-5) * F.rms_norm(first, (128,), g * 2, 1e-3)
    broad = F.rms_norm(normed + z, (128,), g, 1e-5)
    scaled = F.rms_norm(torch.add(first, broad, alpha=2), (128,), g, 1e-5)
    return first * 2, normed, broad, scaled


def test_norms_of_sums():
    args = [t.bfloat16() for t in torch.randn(4, 3, 5, 128, generator=torch.Generator().manual_seed(0))]
    args[2], args[3] = args[2][0, 0], args[3][0, 0]
    plan = spec_ops.explain(sums_and_norms, *args, arch=90, invariant=True)
    assert notes(plan) == ["RMSNorm: add_rms_norm", *["RMSNorm: rms_norm"] * 3]
    torch._dynamo.reset()
    compiled = spec_ops.compile(sums_and_norms, mode="default", invariant=True)
    for one, eager in zip(compiled(*args), sums_and_norms(*args), strict=True):
        torch.testing.assert_close(one, eager, rtol=2e-2, atol=2e-2)


def test_norms_whose_weight_is_not_one_number_for_each_column():
    """One for each head, a gate, one for all, one for each row: the op's kernel takes none of these."""

    def fn(x, heads, gate, number, grows):
        def normalized(x):
            return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        rows = x.flatten(0, 1)[:, 0]
        return normalized(x) * heads, normalized(rows) * gate, normalized(rows) * number, normalized(rows[:1]) * grows

    g = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 4, 8), (4, 8), (6, 8), (), (6, 1)]
    args = [torch.randn(size, generator=g).bfloat16() for size in sizes]
    plan = spec_ops.explain(_with_an_op(4, fn), *args, arch=90, invariant=True)
    assert set(notes(plan)) == {"aten.mean.dim: row_sum"}
    torch._dynamo.reset()
    compiled = spec_ops.compile(_with_an_op(4, fn), mode="default", invariant=True)
    for one, eager in zip(compiled(*args), fn(*args), strict=True):
        assert one.shape == eager.shape
        torch.testing.assert_close(one, eager, rtol=2e-2, atol=2e-2)


c10d = torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("size", "ranks", "arch", "sums"),
    [((4, 64), 2, 90, 1), ((400, 4096), 8, 90, 2), ((1025, 4096), 4, 100, 2), ((400, 4096), 8, None, 1)],
)
def test_sums_over_ranks(size, ranks, arch, sums):
    """Ours, as much of them at a time as there is room for; on the CPU all at once."""
    group = pretended(ranks)
    module, _ = capture(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", group)) + 1, torch.ones(size).bfloat16())
    result = run_pass(RequireInvariance(), module, arch, invariant=True)
    assert [note.text for note in result.done] == ["_c10d_functional.all_reduce.default: all_reduce"]
    called = targets(module)
    assert called.count(all_reduce_op) == sums
    assert not {c10d.all_reduce.default, c10d.wait_tensor.default} & set(called)
    parts = [node.meta["val"].numel() * 2 for node in module.graph.nodes if node.target is all_reduce_op]
    assert sum(parts) == 2 * size[0] * size[1]
    assert arch is None or max(parts) <= push.MOST_BYTES[ranks]


@pytest.mark.slow
@pytest.mark.parametrize("bs", [1, 32])
def test_rounds_of_a_share(models, bs, monkeypatch):
    """Nothing is refused, and no sum is left to NCCL, however many rows there are."""
    monkeypatch.setitem(push.MOST_BYTES, 2, 4096)  # room for 16 rows
    target = shard(models[0], TensorParallel.fake(2))
    plan = spec_ops.explain(Generator(target, max_batch_size=bs, max_seq_len=64).round(bs), arch=90, invariant=True)
    assert not [note for result in plan.results if result.name == NAME for note in result.refused]
    lowered = len(notes(plan, "lower_all_reduce")), sum(text.endswith(": all_reduce") for text in notes(plan))
    sums = 2 * models[0].config.num_layers  # of attention and MLP, beside the largest logits
    assert lowered == ((sums + 1, 0) if bs == 1 else (1, sums))


def test_what_ranks_copy_stands():
    group = pretended(2)

    def fn(x, keys):
        keys = c10d.wait_tensor(c10d.all_reduce(keys, "max", group))
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group)) + 1, keys + 1

    module, _ = capture(fn, torch.ones(4, 8), torch.arange(4))
    result = run_pass(RequireInvariance(), module, 90, invariant=True)
    assert not result.done
    assert not result.refused


@pytest.mark.parametrize(
    ("x", "ranks", "reduce", "arch", "reason"),
    [
        (torch.ones(4, 8), 2, "sum", 90, "got sum of torch.float32"),
        (torch.ones(4, 8).bfloat16(), 3, "sum", 90, "over 3 ranks on sm_90 has no batch-invariant kernel"),
        (torch.ones(4, 8).bfloat16(), 2, "sum", 80, "over 2 ranks on sm_80 has no batch-invariant kernel"),
        (torch.ones(4, 8).bfloat16(), 2, "avg", 90, "with 'avg' has no batch-invariant kernel"),
        (torch.ones(1, 3).bfloat16(), 2, "sum", 90, "must be of a multiple of 16 bytes, got 6"),
    ],
)
def test_sums_over_ranks_that_are_refused(x, ranks, reduce, arch, reason):
    group = pretended(ranks)
    module, _ = capture(lambda x: c10d.wait_tensor(c10d.all_reduce(x, reduce, group)) + 1, x)
    result = run_pass(RequireInvariance(), module, arch, invariant=True)
    assert not result.done
    assert reason in texts(result.refused)


def test_refused_with_lines():
    def mixing(x, w):
        return F.linear(x, w) - x.mean(0)[:5]

    here = mixing.__code__.co_firstlineno + 1
    torch._dynamo.reset()
    pattern = rf"test_require_invariance.py:{here}: aten.mean.dim is over dimension 0 of \[3, 8\], so that it mixes rows"
    with pytest.raises(Exception, match=pattern) as raised:
        spec_ops.compile(mixing, mode="default", invariant=True)(torch.randn(3, 8), torch.randn(5, 8))
    assert NotInvariantError.__name__ in str(raised.value)


def test_off_without_the_flag():
    plan = spec_ops.explain(_with_an_op(4), *inputs(4), arch=90)
    assert not notes(plan)
    with pytest.raises(ValueError, match="`require_invariance` must be on with `invariant=True`"):
        spec_ops.compile(block, passes={NAME: False}, invariant=True)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(num_layers=1, aux_layers=(0, 0, 0), **SIZES)).bfloat16()
    return target, Eagle3Draft(ModelConfig(num_layers=1, **SIZES), target, torch.arange(0, 200, 2)).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "bs"),
    [(SpeculationConfig(1), 32), (SpeculationConfig(2, 2, 4), 2)],
)
def test_plain_and_speculative_rounds_come_to_the_same(models, config, bs):
    """For the target's layers, the same replacements in the same order, and the same attention, whatever the rows are."""

    def of_target(draft, *more) -> list[str]:
        generator = Generator(models[0], draft, *more, max_batch_size=bs, max_seq_len=64)
        plan = spec_ops.explain(generator.round(bs), arch=90, invariant=True)
        assert not [note for result in plan.results if result.name == NAME for note in result.refused]
        names = ("lower_skinny_mm", NAME, "select_backends", "fuse_norm_linear")
        found = [note for result in plan.results if result.name in names for note in result.done]
        texts = [f"{re.sub(r'^.*rows, ', '', note.text)} {note.where}" for note in found if "drafts.py" not in note.where]
        return [text for text in texts if not re.match(r"mha_\w+: ", text)] + sorted(
            {text.split(": ")[1].split()[0] for text in texts if text.startswith("mha_")}
        )

    plain, speculative = of_target(None), of_target(models[1], config)
    assert [text for text in plain if text not in speculative] == []
    assert "triton-deterministic" in plain
    assert sum("skinny_mm, invariant" in text or "weight" in text for text in plain) == 4 + 1
    assert sum("rms_norm" in text for text in plain) == 2 + 1


def test_trees_are_refused_where_slots_decide(models):
    """By a backend whose paths are not chains, in every step that has a mask."""
    slots_decide = "in-order-of-slots"
    spec_ops.register_backend(
        dataclasses.replace(get_backend("triton-deterministic"), name=slots_decide, rank=5, tree_paths=False)
    )
    try:
        generator = Generator(*models, SpeculationConfig(2, 2, 4), max_batch_size=1, max_seq_len=64)
        plan = spec_ops.explain(generator.round(1), arch=90, invariant=True)
    finally:
        unregister_backend(slots_decide)
    refused = {note.text for result in plan.results if result.name == NAME for note in result.refused}
    assert refused == {
        f"mha_{step} by {slots_decide}: with a tree mask, the slots of a path decide its bits, and a chain has others"
        for step in ("draft_decode", "target_verify")
    }
