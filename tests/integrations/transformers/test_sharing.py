"""Models that transformers has divided among processes (`DistributedConfig(tp_size=2)`): two processes, float32, gloo."""

from __future__ import annotations

import pytest

from spec_ops.passes.analysis import counts
from tests.helpers import world
from tests.helpers.forked import run_code
from tests.helpers.tiny_transformers import make_model
from tests.integrations.transformers.sharing_cases import FAMILIES, JOBS, decoded

pytest.importorskip("transformers.distributed", reason="no DistributedConfig in this release")
pytest.importorskip("accelerate", reason="transformers needs it to divide models")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    found = world.run(2, "tests.integrations.transformers.sharing_cases", tmp_path_factory.mktemp("world"))
    errors = [case["error"] for results in found for case in results.values() if "error" in case]
    assert not errors, errors[0]
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> tuple[str, dict[str, list[list[int]]]]:
    """A family, and what one process decodes."""
    return request.param, decoded(make_model(request.param, "eager"), make_model(request.param, "eager", 2))


def test_tokens_are_those_of_one_process(ranks, family):
    name, alone = family
    for results in ranks:
        for job in JOBS:
            assert results["case_tokens"][name][job] == alone[job], job
        if name == "llama":
            assert results["case_both_divided"]["tokens"] == alone


def test_the_ranks_are_found(ranks):
    for results in ranks:
        assert results["case_ranks"] == {"size": 2, "same": True, "whole": True, "kv_heads": [1, 1, 1], "name": True}


PROGRAM = """
import sys, tempfile
import torch
import torch.distributed as dist
from spec_ops import cli
from spec_ops.decoding import Generator
from spec_ops.integrations.transformers import TransformersModel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

def make():
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder)
        plan = DistributedConfig(tp_size=dist.get_world_size())
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=plan)
    return Generator(TransformersModel(model), max_batch_size=1, max_seq_len=64).round(1)

if __name__ == "__main__":
    cli.app(["explain", f"{__file__}:make", "--tp", "2", "--arch", "sm90"])
"""


def test_a_round_is_one_graph(tmp_path):
    """DTensors are gone from it, and sums of ranks are our kernel's."""
    run = run_code(PROGRAM, tmp_path)
    assert "Plan for one of 2 ranks on sm_90, bf16: 1 CUDA graph, no host syncs" in run.stdout, run.stderr
    assert "sum over ranks of [1, 1, 64]" in run.stdout
    assert counts.COLLECTIVES in run.stdout
