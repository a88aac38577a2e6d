"""On two GPUs: every op, workspace and generator gives the same on both, whichever is current."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

import spec_ops  # noqa: E402
from spec_ops.backends import AttentionCall, get_backend  # noqa: E402
from spec_ops.backends import workspace as scratch  # noqa: E402
from spec_ops.backends.capture import capture_of_current_stream  # noqa: E402
from spec_ops.backends.triton.runtime import counters  # noqa: E402
from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig  # noqa: E402
from spec_ops.decoding.output import OutputReader  # noqa: E402
from spec_ops.models.pretrained import load_pair  # noqa: E402
from spec_ops.ops.collectives import all_reduce_add_op, all_reduce_op  # noqa: E402
from spec_ops.ops.reference import collectives as reference  # noqa: E402
from spec_ops.parallel import TensorParallel  # noqa: E402
from tests.backends.test_workspace import in_threads  # noqa: E402
from tests.gpu import two_ranks  # noqa: E402
from tests.helpers.groups import alone  # noqa: E402
from tests.helpers.op_samples import SAMPLES, SEEDS, flat_tensors, overload, sample  # noqa: E402
from tests.helpers.pass_harness import registered  # noqa: E402
from tests.helpers.paths import ROOT  # noqa: E402

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
BOTH = (FIRST, SECOND)
TEXTS = ["def add(a, b):\n", "import os\nimport sys\n\n\ndef main(argv):\n", "for i in range(", "x"]


@pytest.fixture(autouse=True)
def first_is_current():
    with torch.cuda.device(FIRST):
        yield
        assert torch.cuda.current_device() == 0  # no call leaves another one current


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def placed(value: Any, device: torch.device) -> Any:
    """A copy on `device`, of the same strides; what is on the host stays there. Of ranks' memory: that on `device`."""
    if isinstance(value, str) and value == alone("cuda"):
        return alone(str(device))
    if isinstance(value, list):
        return [placed(part, device) for part in value]
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    distinct = value
    for dim, stride in enumerate(value.stride() if value.numel() else ()):
        if stride == 0:  # expanded
            distinct = distinct.narrow(dim, 0, 1)
    copy = torch.empty_strided(distinct.shape, distinct.stride(), dtype=value.dtype, device=device)
    return copy.copy_(distinct).expand(value.shape)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_op(name, seed):
    made = sample(name, seed, "cuda", fp8=False)
    results = []
    for device in BOTH:
        args = [placed(arg, device) for arg in made]
        # Which kernel computes a call may depend on strides, and how it rounds.
        assert [t.stride() for arg in args for t in flat_tensors(arg)] == [
            t.stride() for arg in made for t in flat_tensors(arg)
        ]
        outputs = flat_tensors(overload(name)(*args))
        assert all(out.device == device for out in outputs)
        results.append([bits(part) for part in (*outputs, *(t for arg in args for t in flat_tensors(arg)))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# heads, KV heads (0: MLA), head_dim, queries: of every attention kernel.
KERNELS = {
    "plain": (32, 8, 128, 4),
    "many rows": (64, 8, 64, 16),
    "MLA": (128, 0, 576, 1),
    "MLA, few rows": (16, 0, 576, 1),
}


def attention(kind: str, device: torch.device, **options: Any) -> torch.Tensor:
    heads, kv_heads, dim, q_len = KERNELS[kind]
    rng = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).bfloat16().to(device)

    q = normal(3, q_len, heads, dim)
    tables = torch.randperm(48, generator=rng).view(3, 16).int().to(device)
    lens = torch.tensor([1000, 64, 300], dtype=torch.int32, device=device)
    if kv_heads:
        caches = normal(48, 64, kv_heads, dim), normal(48, 64, kv_heads, dim)
        return spec_ops.mha_target_verify(q, *caches, tables, lens, scale=dim**-0.5, **options)
    return spec_ops.mla_target_verify(q, normal(48, 64, dim), 512, tables, lens, scale=dim**-0.5, **options)


@pytest.mark.parametrize("options", [{"backend": "triton"}, {"deterministic": True}], ids=["triton", "deterministic"])
@pytest.mark.parametrize("kind", KERNELS)
def test_attention_kernels(kind, options):
    wanted, got = (attention(kind, device, **options) for device in BOTH)
    assert got.device == SECOND
    assert torch.equal(got.cpu(), wanted.cpu())


@pytest.mark.parametrize("kind", KERNELS)
def test_attention_by_two_threads_on_two_devices(kind):
    wanted = attention(kind, FIRST, backend="triton").cpu()
    results = in_threads(4, lambda i: [attention(kind, BOTH[i % 2], backend="triton").cpu() for _ in range(10)])
    assert all(torch.equal(out, wanted) for outs in results for out in outs)


def test_a_capture_is_that_of_the_tensors_device(monkeypatch):
    """Not of the current one."""
    monkeypatch.setattr(scratch, "_buffers", {})
    for device in BOTH:
        counters.arrival_counters(device, 8)
    x = torch.ones(4, device=SECOND)
    eager = [scratch.workspace("both", device, 64).data_ptr() for device in BOTH]
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(SECOND)):
        x * 2
        with torch.cuda.device(FIRST):
            assert capture_of_current_stream(1) != 0
            assert capture_of_current_stream(0) == 0
            assert scratch.workspace("both", FIRST, 64).data_ptr() == eager[0]
            graphs_own = scratch.workspace("both", SECOND, 64)
            assert graphs_own.device == SECOND
            assert graphs_own.data_ptr() != eager[1]
            captured = counters.arrival_counters(SECOND, 8)
        assert captured.data_ptr() == counters.arrival_counters(SECOND, 8).data_ptr()
    assert captured.data_ptr() != counters.arrival_counters(SECOND, 8).data_ptr()


def where(call: AttentionCall) -> torch.Tensor:
    """A kernel of another package, which launches on the current device."""
    return call.q.new_full((*call.q.shape[:-1], call.v_head_dim), torch.cuda.current_device())


def where_appended(k_cache, v_cache, *rest: Any) -> None:
    k_cache.fill_(torch.cuda.current_device())


def test_kernels_of_other_packages_find_the_tensors_device_current():
    kernels = {"mha_target_verify": f"{__name__}:where", "append_kv": f"{__name__}:where_appended"}
    backend = dataclasses.replace(get_backend("reference"), name="where", kernels=kernels)
    with registered(backend):
        for device in BOTH:
            assert attention("plain", device, backend="where").unique().tolist() == [device.index]
            caches, rows = torch.full((2, 1, 4, 1, 8), -1.0, device=device), torch.ones(2, 1, 1, 8, device=device)
            slots = torch.zeros(1, dtype=torch.int64, device=device)
            spec_ops.append_kv(*caches, *rows, slots, backend="where")
            assert caches[0].unique().tolist() == [device.index]


def test_an_output_is_read_when_it_is_there():
    """The reader waits for the stream that writes it, whichever device is current."""
    output = torch.zeros(4, dtype=torch.int64, device=SECOND).fill_(1)
    reader = OutputReader(SimpleNamespace(output=output))
    with torch.cuda.device(SECOND):
        torch.cuda._sleep(1)  # its kernel is loaded
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # some 100 ms
        output.fill_(7)
    assert reader.read() is None
    assert reader.drain().tolist() == [7] * 4


def generator(device: torch.device, config: SpeculationConfig, compile: bool) -> tuple[Generator, list[list[int]]]:
    target, draft, tokenizer = load_pair(device=device)
    made = Generator(target, draft, config, max_batch_size=4, max_seq_len=512, compile=compile)
    return made, [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
def test_generator_gives_the_same_tokens(config, compile, sampling):
    torch._dynamo.reset()
    tokens, rates = [], []
    for device in BOTH:
        made, prompts = generator(device, config, compile)
        result = made.generate(prompts, max_new_tokens=64, sampling=sampling)
        tokens.append(result.tokens)
        rates.append(result.stats.rounds)
    assert tokens[0] == tokens[1]
    assert rates[0] == rates[1]


def test_generators_of_two_threads_on_two_devices():
    """Not compiled: torch keeps CUDA graphs of compiled functions for each thread."""
    pairs = [generator(device, SpeculationConfig(3), False) for device in BOTH]
    wanted = [made.generate(prompts, max_new_tokens=64).tokens for made, prompts in pairs]
    assert wanted[0] == wanted[1]
    for _ in range(3):
        got = in_threads(2, lambda i: pairs[i][0].generate(pairs[i][1], max_new_tokens=64).tokens)
        assert got == wanted


def test_a_rank_without_the_others_on_each_device():
    """Of one group's name, each with memory of its own."""
    found = []
    for device in BOTH:
        ranks = TensorParallel.fake(2, device=device)
        x = two_ranks.parts(1)[0].to(device)
        found.append([out.cpu() for out in (all_reduce_op(x, "sum", ranks.name), *all_reduce_add_op(x, x, x[0], ranks.name))])
    assert torch.equal(found[1][0], two_ranks.parts(1)[0] * 2)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert TensorParallel.fake(4, device="cuda").device == FIRST


def test_ranks_whose_memory_is_on_the_other_device():
    message = "all_reduce: `x` must be on cuda:0, where 'alone on cuda:0' has its memory, got cuda:1"
    with pytest.raises(ValueError, match=message):
        all_reduce_op(torch.ones(1, 16, device=SECOND).bfloat16(), "sum", alone("cuda:0"))


def test_two_ranks_whichever_device_is_current(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.two_ranks", str(rank), str(tmp_path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    *parts, residual = two_ranks.parts(2)
    total = reference.sum_of(parts)
    added = reference.add_to(total, residual, residual[0])
    wanted = [total, torch.arange(5), *added, total, torch.cat(parts, -1)]
    tokens = []
    for rank in range(2):
        for found in torch.load(tmp_path / f"{rank}.pt"):
            for got, expected in zip(found["outputs"], wanted, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-6 if got.dtype == torch.float32 else 0, atol=0)
            tokens.append(found["tokens"])
    assert all(tokens[0])
    assert tokens == [tokens[0]] * 4
