"""What `explain` plans for a rank of several, in one process and without a GPU."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from spec_ops.cli import app
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models import CausalLM, Eagle3Draft, MixtureConfig, ModelConfig
from spec_ops.parallel import TensorParallel, shard
from spec_ops.passes import GraphReport, explain
from spec_ops.passes.analysis.counts import COLLECTIVES, CUDA_GRAPHS, HOST_COPIES
from tests.helpers.command_line import refusal
from tests.helpers.forked import run_code

LLAMA = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128,
    aux_layers=(0, 0, 0),
)  # fmt: skip
STEPS = 1


@functools.cache
def planned(size: int, rank: int = 0) -> GraphReport:
    """The round of a model of Llama's sizes and its EAGLE-3 head. Neither has memory."""
    ranks = TensorParallel.fake(size, rank)
    with torch.device("meta"), torch.no_grad():
        whole = CausalLM(LLAMA)
        head = Eagle3Draft(dataclasses.replace(LLAMA, num_layers=1, aux_layers=()), whole, torch.arange(32000))
    target = shard(whole, ranks, dtype=torch.bfloat16)
    draft = shard(head, ranks, target=target, dtype=torch.bfloat16)
    generator = Generator(target, draft, SpeculationConfig(STEPS), max_batch_size=1, max_seq_len=64)
    torch._dynamo.reset()
    with torch.no_grad():
        return explain(generator.round(1), arch=90)


def test_a_round_of_ranks_is_one_graph_without_nccl():
    plan = planned(8)
    # Two sums a layer, and a maximum wherever tokens are chosen.
    sums = 2 * LLAMA.num_layers + 2 * STEPS
    assert (plan.before[COLLECTIVES], plan.after[COLLECTIVES]) == (sums + 1 + STEPS, 0)
    assert (plan.after[CUDA_GRAPHS], plan.after[HOST_COPIES]) == (1, 0)
    assert plan.matches("lower_all_reduce") == sums + 1 + STEPS
    assert plan.after["all_reduce_add"] > 0  # fused with the norms
    assert plan.verdict().startswith("Plan for one of 8 ranks on sm_90, bf16: 1 CUDA graph, no host syncs, no NCCL coll")


def test_whole_experts_are_planned_like_shares_of_all():
    """What a rank does not hold is left out of the ids: no kernel more, and norms, router and experts as before."""
    config = dataclasses.replace(LLAMA, hidden_size=2048, aux_layers=(), mixture=MixtureConfig(128, 8, 768))
    ranks, plans = TensorParallel.fake(2), []
    for expert_parallel in (False, True):
        with torch.device("meta"):
            whole = CausalLM(config)
        target = shard(whole, ranks, dtype=torch.bfloat16, expert_parallel=expert_parallel)
        assert target.layers[0].mlp.gate_up_proj.shape[:2] == ((64, 1536) if expert_parallel else (128, 768))
        torch._dynamo.reset()
        with torch.no_grad():
            plans.append(explain(Generator(target, max_batch_size=1, max_seq_len=64).round(1), arch=90))
    inside, whole_experts = plans
    differing = {name for name, count in inside.after.items() if whole_experts.after[name] != count}
    assert differing == {"calls"}  # comparisons of ids, which Inductor makes one kernel of
    assert inside.matches("fuse_norm_linear") == whole_experts.matches("fuse_norm_linear") > 0
    assert "router" not in whole_experts.text()


def test_all_ranks_have_one_graph():
    """They share a cache of compiled code."""
    first, last = (planned(8, rank).text(verbose=True) for rank in (0, 7))
    assert first == last


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorParallel.fake(2, 2), r"`rank` must be an int in \[0, 1\], got 2"),
        (lambda: TensorParallel.fake(0), "`size` must be an int of at least 1, got 0"),
        (lambda: TensorParallel.fake("2"), "`size` must be an int of at least 1, got '2'"),
        (lambda: TensorParallel(1), "`group` must be a process group that has this rank, got 1"),
        (lambda: TensorParallel.connect("cpu", timeout="x"), "`timeout` must be a finite number above 0, got 'x'"),
        (lambda: TensorParallel.connect("cpu", timeout=0), "`timeout` must be a finite number above 0, got 0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=f"TensorParallel: {message}"):
        make()
    assert not dist.is_initialized()


def test_the_shipped_pair():
    result = CliRunner().invoke(app, ["explain", "--steps", "1", "--tp", "2", "--arch", "sm90"], catch_exceptions=False)
    assert result.stdout.startswith("Plan for one of 2 ranks on sm_90, bf16: 1 CUDA graph,"), result.output


PROGRAM = """
import torch, sys
from spec_ops.cli import app
from spec_ops.decoding import Generator
from spec_ops.parallel import TensorParallel, load_pair

def make():
    ranks = TensorParallel.connect("cpu")
    return Generator(load_pair(ranks, dtype=torch.bfloat16)[0], max_batch_size=1, max_seq_len=64).round(1)

if __name__ == "__main__":
    app(["explain", f"{__file__}:make", "--tp", "4", "--arch", "sm90"])
"""


def test_a_program_that_torchrun_starts(tmp_path):
    """In a process of its own: the end of a world unregisters the groups of other tests."""
    result = run_code(PROGRAM, tmp_path)
    assert result.stdout.startswith("Plan for one of 4 ranks on sm_90, bf16: 1 CUDA graph,"), result.stderr


def test_what_ranks_cannot_share():
    result = CliRunner().invoke(app, ["explain", "--tp", "3"], catch_exceptions=False)
    assert "`num_heads` must be a multiple of the 3 ranks, got 4" in refusal(result, "--tp")
