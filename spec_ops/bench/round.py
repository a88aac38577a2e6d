"""Time of one speculative round on a real model's shape with random weights: passes on against off, kernels, launches, syncs.

Everything runs through CUDA-graph replays of the compiled round; the median of single replays between events is reported. The
floor is the bytes of weights and KV that a round must read once, over the measured copy bandwidth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from spec_ops.bench.timing import median_ms
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models import CausalLM, Eagle3Draft, ModelConfig
from spec_ops.passes import compile as compile_with_passes

LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    aux_layers=(2, 16, 29),
)
DRAFT_VOCAB = 32000


def build(layers: int, steps: int, batch_size: int, context: int, device: str, dtype: torch.dtype) -> Generator:
    """A generator of the Llama-3.1-8B shape (with `layers` layers) and an EAGLE-3 head, random weights, mid-generation."""
    scale = {"num_layers": layers, "aux_layers": tuple(min(a, layers - 1) for a in LLAMA_8B.aux_layers)}
    config = ModelConfig.from_dict({**LLAMA_8B.to_dict(), **scale})
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            target = CausalLM(config)
            head = ModelConfig.from_dict({**config.to_dict(), "num_layers": 1, "aux_layers": ()})
            draft = Eagle3Draft(head, target, torch.arange(DRAFT_VOCAB))
    finally:
        torch.set_default_dtype(default)
    generator = Generator(
        target, draft, SpeculationConfig(steps), max_batch_size=batch_size, max_seq_len=context + 1024, page_size=64
    )
    for cache in (generator.target_cache, generator.draft_cache):
        assert cache is not None
        for tensor in cache.tensors():
            tensor.normal_()
    return generator


def reset(generator: Generator, batch_size: int, context: int) -> None:
    """All rows in the middle of a generation at `context` committed tokens."""
    state = generator._state(batch_size)
    state.clear()
    pages = torch.arange(batch_size * generator.max_pages, dtype=torch.int32).reshape(batch_size, -1)
    state.block_tables.copy_(pages)
    state.committed_lens.fill_(context)
    state.max_lens.fill_(2**30)
    state.finished.fill_(False)


def floor_bytes(generator: Generator, batch_size: int, context: int) -> int:
    """Bytes one round must read: the target once, the head's layer and LM head once per draft forward, KV likewise."""

    def size(module: torch.nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    target, draft, steps = generator.target, generator.draft, generator.config.num_steps
    assert isinstance(draft, Eagle3Draft)
    head = size(draft) - size(draft.embed)
    item = target.embed.weight.element_size()
    rows = [*target.config.kv_rows, *draft.config.kv_rows * steps]
    kv = batch_size * context * item * sum(math.prod(row) for layer in rows for row in layer)
    return size(target) - size(target.embed) + steps * head + kv


_PRODUCTS = ("nvjet", "gemm", "splitk", "cutlass", "triton_tem")  # cuBLAS, its split-K sums, Inductor's templates


def breakdown(kernels: Iterable[tuple[str, float]], milliseconds: float) -> dict[str, float]:
    """Where a round of `milliseconds` goes: `kernels` are the names and microseconds of one round's kernels.

    Keys: `matmul_ms`, `attention_ms`, `other_ms` (norms, RoPE and append, sampling ...), and `gaps_ms`, what lies between
    kernels. Negative gaps mean that kernels overlap.
    """
    spent = {"matmul_ms": 0.0, "attention_ms": 0.0, "other_ms": 0.0}
    for name, microseconds in kernels:
        if any(part in name.lower() for part in _PRODUCTS):
            kind = "matmul_ms"
        else:
            kind = "attention_ms" if "attention" in name.lower() else "other_ms"
        spent[kind] += microseconds / 1e3
    spent["gaps_ms"] = milliseconds - sum(spent.values())
    return {kind: round(value, 3) for kind, value in spent.items()}


def _profiled(step: Callable[[], None], rounds: int, milliseconds: float) -> dict[str, float]:
    """Kernels on the device, and graph launches, other launches and syncs of the host, per round; where the time goes."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("rounds"):
            for _ in range(rounds):
                step()
        torch.cuda.synchronize()
    events = list(profile.events() or ())
    (window,) = (e.time_range for e in events if e.name == "rounds" and e.device_type == torch.autograd.DeviceType.CPU)
    # What the host did between the first and the last round: the profiler's own sync at the end is not theirs.
    names = [e.name for e in events if window.start <= e.time_range.start <= window.end]
    cuda = [
        e
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(("Mem", "Activity", "rounds"))
    ]
    return {
        "kernels": len(cuda) / rounds,
        "graph_launches": sum(n.startswith("cudaGraphLaunch") for n in names) / rounds,
        "host_launches": sum(n.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for n in names) / rounds,
        "host_syncs": sum("Synchronize" in n for n in names) / rounds,
        **breakdown([(e.name, e.time_range.elapsed_us() / rounds) for e in cuda], milliseconds),
    }


def measure(
    *,
    layers: int,
    steps: int,
    batch_size: int,
    context: int,
    backend: str,
    repeats: int,
    bandwidth: float,
    passes: tuple[bool, ...],
) -> Iterator[dict[str, Any]]:
    """One row per setting of `passes`, both over the same weights and caches.

    `compile_cold_s` is the first call's compile time with whatever is in Inductor's cache directory (point it at an empty one
    for a cold figure), `compile_warm_s` a second compilation in this process after Dynamo forgot the first.
    """
    generator = build(layers, steps, batch_size, context, "cuda", torch.bfloat16)
    generator.backend = backend
    floor = floor_bytes(generator, batch_size, context) / bandwidth * 1e3
    for on in passes:
        seconds = []
        for _ in range(2):
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            reset(generator, batch_size, context)
            module = generator.round(batch_size)
            step = compile_with_passes(module) if on else torch.compile(module, mode="reduce-overhead", fullgraph=True)
            start = time.perf_counter()
            with torch.no_grad():
                step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        with torch.no_grad():
            for _ in range(3):  # record the graph, and replay it
                step()
            reset(generator, batch_size, context)
            milliseconds = median_ms(step, repeats)
            counts = _profiled(step, 5, milliseconds)
        yield {
            "model": f"llama-3.1-8b-shape-{layers}-layers+eagle3",
            "bs": batch_size,
            "context": context,
            "steps": steps,
            "topk": 1,
            "backend": backend,
            "passes": on,
            "ms": round(milliseconds, 3),
            "floor_ms": round(floor, 3),
            **counts,
            "compile_cold_s": round(seconds[0], 1),
            "compile_warm_s": round(seconds[1], 1),
        }
