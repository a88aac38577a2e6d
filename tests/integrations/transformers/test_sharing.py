"""Models that transformers has divided among processes (`DistributedConfig(tp_size=2)`): two processes, float32, gloo."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_ops.integrations.transformers import TransformersGenerator, TransformersModel
from spec_ops.passes.analysis import counts
from tests.helpers import world
from tests.helpers.forked import run_code
from tests.helpers.tiny_transformers import make_model
from tests.integrations.transformers.sharing_cases import (
    BATCH,
    FAMILIES,
    JOBS,
    MTP,
    decoded,
    drafted,
    eagle3,
    loaded,
    own_embedding,
    with_mtp,
)
from tests.integrations.transformers.test_mtp import write as write_mtp

pytest.importorskip("transformers.distributed", reason="no DistributedConfig in this release")
pytest.importorskip("accelerate", reason="transformers needs it to divide models")
pytestmark = pytest.mark.slow  # what the two processes do takes 50 s, whichever test asks first


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    found = world.run(2, "tests.integrations.transformers.sharing_cases", tmp_path_factory)
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
        assert results["case_ranks"] == {"size": 2, "same": True, "whole": True, "kv_heads": [1, 1, 1], "user's": True}


def test_weights_lie_side_by_side_as_long_as_it_is_taken_over(ranks):
    expected = {"apart": {}, "open": [True] * 3, "same": True, "closed": True, "still the same": True}
    assert [results["case_weights"] for results in ranks] == [expected] * 2


def test_changed_weights_are_seen(ranks):
    alone = {}
    model = make_model("llama", "eager")
    for name in ("in place", "replaced"):
        with torch.no_grad(), TransformersGenerator(model, compile=False, max_seq_len=64) as made:
            for parameter in model.parameters():
                parameter.mul_(-1)
            alone[name] = made.generator.generate(BATCH, max_new_tokens=12).tokens
    assert alone["in place"] != alone["replaced"]
    for results in ranks:
        assert results["case_changed_weights"] == {**alone, "joined": True}


def test_hooks_and_forwards_of_the_user_count(ranks):
    with TransformersGenerator(make_model("llama", "eager"), compile=False, max_seq_len=64) as made:
        made.target.lm_head.register_forward_hook(lambda _module, _args, logits: -logits)
        tokens = made.generator.generate(BATCH, max_new_tokens=6).tokens
    for results in ranks:
        for name, found in results["case_own_calls"].items():
            assert found["tokens"] == tokens, name
            assert found["calls"] == [-1, 1], name
            assert found["apart"] == (["k_proj", "q_proj", "v_proj"] if "before" in name else []), name


def test_a_forward_of_theirs_around_that_of_the_class(ranks):
    for results in ranks:
        assert [name for name, plain in results["case_forwards"].items() if plain] == ["theirs", "around the class"]


def test_layers_that_give_more_than_their_rows_stay_apart(ranks):
    with TransformersGenerator(make_model("llama", "eager"), compile=False, max_seq_len=64) as made:
        tokens = made.generator.generate(BATCH, max_new_tokens=12).tokens
    names = {f"model.layers.{layer}.mlp.{name}_proj" for layer in range(3) for name in ("gate", "up")}
    for results in ranks:
        found = results["case_gathered_siblings"]
        assert found["tokens"] == tokens
        assert set(found["apart"]) == names
        assert all("gives something else than the product with its own rows" in why for why in found["apart"].values())


def test_which_models_choose_tokens_by_an_exchange(ranks):
    for results in ranks:
        assert results["case_heads"] == {
            "llama": {"divided": True, "gathers": 0, "right": True},
            "gemma2": {"divided": True, "gathers": 1, "right": True},  # it caps what its LM head gives
            "llama lm_head": {"divided": False, "gathers": 0, "right": True},
        }


def test_a_head_of_ours_may_be_divided_for_it(ranks):
    target = TransformersModel(make_model("llama", "eager"), (0, 1, 3))
    draft = eagle3(target)
    alone = drafted(target, draft)
    assert any(sum(row[1:]) for row in alone["histograms"])  # drafts are accepted
    draft.embed, draft.lm_head, draft.draft_to_target = own_embedding(), target.lm_head, None
    own = drafted(target, draft)
    assert own["drafts"] != alone["drafts"]
    for results in ranks:
        for name, found in results["case_eagle3"].items():
            assert found == {"shared": alone, "whole": alone, "own": own, "kept": True}, name


def test_published_heads_may_be_divided_for_it(ranks, tmp_path):
    alone = {kind: loaded(tmp_path / kind, kind, make_model("llama", "eager"))["whole"] for kind in ("own", "shared", "all")}
    for results in ranks:
        for name, found in results["case_loaded_heads"].items():
            kind = name.split()[0]
            assert found == {"whole": alone[kind], "shared": alone[kind], "head": kind == "all"}, name


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


BOTH = """
import json, tempfile
from collections import Counter
import torch
from spec_ops import explain
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.integrations.transformers import TransformersModel
from spec_ops.models import CausalLM, Eagle3Draft, ModelConfig
from spec_ops.parallel import TensorParallel, shard
from spec_ops.parallel.fake import first_of
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

SIZES = dict(vocab_size=256, hidden_size=128, intermediate_size=256)
HEADS = dict(num_heads=4, num_kv_heads=2, head_dim=64)

def theirs(ranks):
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SIZES, **heads, num_hidden_layers=2)).save_pretrained(folder)
        plan = DistributedConfig(tp_size=2, tp_plan={"model.embed_tokens": "replicate"})
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=plan)
    target = TransformersModel(model, (0, 1, 2))
    return target, target

def ours(ranks):
    whole = CausalLM(ModelConfig(**SIZES, **HEADS, num_layers=2, aux_layers=(0, 1, 1)))
    return whole, shard(whole, ranks, dtype=torch.bfloat16)

def planned(make):
    ranks = TensorParallel.connect("cpu")
    trained_for, target = make(ranks)
    draft = Eagle3Draft(ModelConfig(**SIZES, **HEADS, num_layers=1), trained_for, torch.arange(64))
    draft = shard(draft, ranks, target=target, dtype=torch.bfloat16)
    torch._dynamo.reset()
    report = explain(Generator(target, draft, SpeculationConfig(2), max_batch_size=1, max_seq_len=64).round(1), arch=90)
    calls = Counter(record.after.target for record in report.history.records if record.after is not None)
    watched = ("mm", "linear", "spec_ops", "c10d")
    return {name: count for name, count in calls.items() if any(word in name for word in watched)}

with first_of(2), torch.no_grad():
    print(json.dumps([planned(theirs), planned(ours)]))
"""


def test_a_round_costs_what_it_costs_of_our_own_model(tmp_path):
    """As many products, sums of ranks, norms in them and exchanges, by the same ops."""
    run = run_code(BOTH, tmp_path)
    assert run.stdout, run.stderr
    theirs, ours = json.loads(run.stdout.splitlines()[-1])
    assert theirs == ours
    assert ours["aten.mm.default"] == 20  # of two layers and a head's: 4 each; fc, in draft and extend; LM heads
    assert not any("c10d" in name for name in ours)


@pytest.mark.parametrize(("kind", "head"), MTP)
def test_mtp_layers_are_divided_as_their_target_is(ranks, tmp_path, kind, head):
    write_mtp(tmp_path, kind, head=head)
    alone = with_mtp(str(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert (alone["here"], alone["shared"]) == (1.0, False)
    for results in ranks:
        assert results["case_mtp"][f"{kind} {head}"] == {"found": alone["found"], "here": 0.5, "shared": True}
