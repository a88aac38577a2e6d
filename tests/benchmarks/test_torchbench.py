"""The TorchBench entries: what they measure, and both of TorchBench's runners on them.

The runners need a clone of pytorch/benchmark with its requirements installed (psutil and pyyaml are enough), and
SPEC_OPS_TORCHBENCH set to its path. The test links our folders into the clone and takes the links away again.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spec_ops
from benchmarks.kernels.cases import Heads
from spec_ops.backends.workspace import release_workspaces, workspace
from spec_ops.decoding import SpeculationConfig, generate
from spec_ops.models.corpus import held_out_prompts
from spec_ops.models.pretrained import load_pair
from tests.helpers.paths import ROOT

ENTRIES = ROOT / "benchmarks" / "torchbench"


def load(path: str):
    """A module of the entries that needs no TorchBench."""
    name = f"torchbench_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ENTRIES / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


metrics, chain = load("spec_ops/metrics.py"), load("spec_ops_chain/chain.py")


class Calls(TorchDispatchMode):
    """Names of our ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "spec_ops":
            self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


TIMED = {f"{kind}_{step}" for kind in ("mha", "mla") for step in ("draft_decode", "target_verify", "draft_extend", "extend")}
TIMED |= {"append_kv", "append_mla_kv", "accept_greedy", "accept_sampled"}


def test_every_op_is_timed():
    heads = (Heads("gqa", 4, 2, 16, 16), Heads("mla", 2, 1, 24, 16))
    options = metrics.Options("cpu", (3,), context=70, steps=2, prompts=3, new_tokens=9, compile=False, heads=heads)
    with Calls() as calls, torch.no_grad():
        found = dict(metrics.acceptance(options, 3))
        for each in heads:
            found |= metrics.attention_and_append(options, each, 3)
    assert calls.names == TIMED
    assert {re.match(r"op=(\w+), bs=3, .*device=cpu, metric=latency_us$", key)[1] for key in found} == TIMED
    assert all(0 < us < 60e6 for us in found.values())


@pytest.mark.slow
def test_generation():
    options = metrics.Options("cpu", (2,), context=40, steps=1, prompts=2, new_tokens=8, compile=False, heads=())
    with torch.no_grad():
        found = {key.rpartition("metric=")[2]: value for key, value in metrics.generation(options, 2)}
    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, 2, metrics.PROMPT)
    stats = generate(target, draft, prompts, SpeculationConfig(1), max_new_tokens=8).stats
    assert found["accept_length"] == stats.accept_length > 1.5
    assert min(found["tokens_per_second"], found["round_latency_ms"]) > 0
    assert found["planned_host_syncs"] == 0
    assert found["planned_cuda_graphs"] == 1
    assert "cudagraph_skips" not in found  # nothing was compiled


def test_measure_names_every_batch_size(monkeypatch):
    monkeypatch.setattr(metrics, "generation", lambda options, bs: [(options.key("tokens_per_second", bs=bs), 7)])
    options = metrics.Options.for_device("cpu", bs=[1, 2], context=8, heads=(Heads("gqa", 2, 1, 16, 16),))
    found = metrics.measure(options)
    assert len(found) == 2 * (5 + 2 + 1)
    assert found["bs=2, device=cpu, metric=tokens_per_second"] == 7.0
    assert all(type(value) is float for value in found.values())
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bs": [0]}, "--bs"),
        ({"bs": [9], "prompts": 8}, "--bs"),
        ({"prompts": 10**6}, "--prompts"),
        ({"new_tokens": 0}, "--new-tokens"),
        ({"context": 3}, "--context"),
    ],
)
def test_bad_options(given, named):
    with pytest.raises(ValueError, match=named):
        metrics.Options.for_device("cpu", **given)


@pytest.mark.parametrize(("batch_size", "num_rounds", "named"), [(0, 1, "batch_size"), (1, 0, "num_rounds")])
def test_bad_sizes_of_the_model(batch_size, num_rounds, named):
    with pytest.raises(ValueError, match=named):
        chain.build(batch_size, 3, num_rounds, device="cpu", dtype=torch.float32)


def test_rounds_rewind_and_decode_what_the_target_would():
    rounds, start = chain.build(5, num_steps=2, num_rounds=3, device="cpu", dtype=torch.float32)
    first = rounds(**start)
    assert first.shape == (5, 3, 2 + 3)
    for _ in range(2):  # beyond where the first run ended: stale KV lies after the committed tokens
        rounds.round()
    assert torch.equal(rounds(**start), first)
    assert torch.equal(copy.deepcopy(rounds)(**start), first)

    target, _, tokenizer = load_pair()
    prompts = [tokenizer.encode(chain.PROMPTS[i % len(chain.PROMPTS)]) for i in range(5)]
    plain = generate(target, None, prompts, max_new_tokens=1 + 3 * 3).tokens
    for row, tokens, committed in zip(first, plain, start["committed_lens"], strict=True):
        emitted = [token for one in row.tolist() for token in one[: one[-2]]]
        assert len(emitted) > 3  # some drafts were accepted
        assert emitted == tokens[1 : 1 + len(emitted)]
        assert committed > 0


def test_the_caches_die_with_the_model():
    rounds, start = chain.build(1, num_steps=2, num_rounds=1, device="cpu", dtype=torch.float32)
    rounds(**start)
    caches = [
        weakref.ref(tensor) for cache in (rounds.round.target_cache, rounds.round.drafter.cache) for tensor in cache.tensors()
    ]
    assert len(caches) == 18
    del rounds, start
    gc.collect()
    assert not any(cache() is not None for cache in caches)


def test_workspaces_are_released_and_made_anew():
    cpu = torch.device("cpu")
    scratch = workspace("test", cpu, 16)
    scratch.fill_(1)
    assert workspace("test", cpu, 16).data_ptr() == scratch.data_ptr()
    release_workspaces()
    assert workspace("test", cpu, 32).tolist() == [0] * 32  # larger too, which the old one was not
    release_workspaces()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_is_left_on_the_device(compiled):
    def left() -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    release_workspaces()
    before = left()
    rounds, start = chain.build(4, num_steps=3, num_rounds=4, device="cuda", dtype=torch.bfloat16)
    step = spec_ops.compile(rounds.round) if compiled else rounds.round
    with torch.no_grad():
        first = rounds.run(step, start)
        for _ in range(3):
            assert torch.equal(rounds.run(step, start), first)
    assert left() > before
    del rounds, start, step, first
    release_workspaces()
    assert left() == before


@pytest.fixture(scope="module")
def clone():
    path = os.environ.get("SPEC_OPS_TORCHBENCH")
    if not path:
        pytest.skip("set SPEC_OPS_TORCHBENCH to a clone of pytorch/benchmark")
    clone = Path(path).resolve()
    assert (clone / "run_benchmark.py").is_file(), f"SPEC_OPS_TORCHBENCH: no clone of pytorch/benchmark at {clone}"
    with contextlib.ExitStack() as made:
        for name, folder in (("spec_ops", "userbenchmark"), ("spec_ops_chain", "torchbenchmark/models")):
            link = clone / folder / name
            if not link.exists():
                link.symlink_to(ENTRIES / name, target_is_directory=True)
                made.callback(link.unlink)
            assert link.resolve() == ENTRIES / name
        yield clone


def run(clone: Path, *command: str, fails: bool = False) -> str:
    """What a command of the clone prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "backslashreplace"}
    done = subprocess.run([sys.executable, *command], cwd=clone, env=environment, timeout=600, check=False, **both)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


@pytest.mark.timeout(900)
def test_userbenchmark_runs_in_a_clone(clone, device):
    before = set((clone / ".userbenchmark" / "spec_ops").glob("*.json"))
    run(clone, "run_benchmark.py", "spec_ops", "--device", device, "--bs", "2", "--prompts", "2", "--new-tokens", "24",
        "--context", "128")  # fmt: skip
    (written,) = set((clone / ".userbenchmark" / "spec_ops").glob("*.json")) - before
    output = json.loads(written.read_text())
    written.unlink()
    assert output["name"] == "spec_ops"
    assert output["environ"]["pytorch_version"] == torch.__version__
    found = output["metrics"]
    assert {match[1] for key in found if (match := re.match(r"op=(\w+)", key))} == TIMED
    assert all(f"device={device}" in key for key in found)
    of_pair = {key.rpartition("metric=")[2]: value for key, value in found.items() if key.startswith("model=")}
    assert 1 < of_pair["accept_length"] <= 4
    if device == "cuda":
        assert of_pair["cudagraph_skips"] == of_pair["host_syncs"] == of_pair["host_launches"] == 0
        assert of_pair["graph_launches"] == 1


@pytest.mark.timeout(900)
def test_unknown_options_of_the_userbenchmark(clone):
    assert "--bs must lie in [1, 2]" in run(clone, "run_benchmark.py", "spec_ops", "--bs", "3", "--prompts", "2", fails=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ([], "CPU Wall Time"),
        (["--compile-rounds"], "CPU Wall Time"),
        (["--torchdynamo", "inductor"], "PT2 Graph Breaks"),
        # Of tokens, so in float32: in bfloat16 a near tie may rightly fall either way.
        (["--torchdynamo", "inductor", "--accuracy", "--precision", "fp32"], r"Accuracy: +pass"),
        (["--precision", "bf16", "--num-steps", "1"], "precision bf16"),
    ],
    ids=["eager", "compiled", "inductor", "accuracy", "bf16"],
)
def test_model_runs_in_a_clone(clone, device, options, printed):
    output = run(clone, "run.py", "spec_ops_chain", "-d", device, "-t", "eval", "--bs", "2", "--num-rounds", "3", *options)
    assert re.search(printed, output), output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-t", "train"], "NotImplementedError: spec_ops_chain decodes"),
        (["-t", "eval", "--precision", "amp"], "NotImplementedError: .* not in amp"),
        (["-t", "eval", "--compile-rounds", "--accuracy"], "NotImplementedError: --compile-rounds goes without"),
        (["-t", "eval", "--num-round", "3"], "no unknown args"),
        (["-t", "eval", "--num-rounds", "0"], "`num_rounds` must be at least 1"),
    ],
    ids=["train", "precision", "accuracy", "unknown", "number"],
)
def test_model_refuses(clone, options, reason):
    assert re.search(reason, run(clone, "run.py", "spec_ops_chain", "-d", "cpu", *options, fails=True))


@pytest.mark.timeout(900)
def test_torchbench_checks_pass(clone, device):
    output = run(clone, "test.py", "-v", "-k", f"*spec_ops_chain*_{device}")
    results = dict(re.findall(rf"^test_spec_ops_chain_(\w+)_{device} .*\.\.\. (\w+)", output, re.MULTILINE))
    assert results == {"example": "ok", "train": "skipped", "eval": "ok", "check_device": "ok"}, output
