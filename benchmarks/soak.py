"""`python -m benchmarks soak`: rounds for as long as asked, while requests come and go in every way they can.

One generator serves the same cycle of calls again and again: greedy and sampled, more prompts than rows, fewer pages than rows
could use, requests that a hook ends, callbacks that raise, Ctrl-C, a request that no number of pages can hold. After the first
two cycles nothing may be compiled or recorded, no memory may grow, and every call gives the tokens that it gave at first.

    python -m benchmarks soak --device cuda --dtype bfloat16 --compile
    torchrun --nproc-per-node 2 --module benchmarks soak --device cuda --dtype bfloat16 --compile

Ranks that torchrun has started share the pair, and compare the tokens of every round.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch._dynamo.utils import counters

from benchmarks.prompts import LONGEST, SHORTEST, heavy_tailed
from benchmarks.rows import write_rows
from spec_ops.cli.options import Compile, Device, DType, Steps, console, parse_config, parse_device, parse_dtype, writable_file
from spec_ops.decoding import Generator, SamplingParams
from spec_ops.decoding.pages import PagePool
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.paged import DEFAULT_PAGE_SIZE
from spec_ops.models.pretrained import load_pair
from spec_ops.parallel import TensorParallel
from spec_ops.parallel import load_pair as load_shares

KINDS = ("greedy", "sampled", "left", "raised", "interrupted", "too long")
WARM_UP = 2  # cycles: compiling, recording, filling caches
# By how much a process may grow that keeps nothing: caches of Python's modules, allocators.
OBJECTS, HOST_MIB = 100, 16.0


class CallbackError(Exception):
    """What a callback raises on purpose."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, not the user's own."""


class RaisesAt:
    """A callback that raises at its `count`-th call."""

    def __init__(self, error: type[BaseException], count: int) -> None:
        self.error, self.left = error, count

    def __call__(self, request: int, tokens: list[int]) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def leaves(request: int, tokens: list[int], count: int) -> int | None:
    """A hook that ends every third request after five tokens."""
    return max(count - (len(tokens) - 5), 0) if request % 3 == 0 and len(tokens) >= 5 else None


@dataclass(frozen=True)
class Load:
    """Prompts of one call, and how many tokens each may get."""

    prompts: list[list[int]]
    limits: list[int]

    def call(self, generator: Generator, kind: str) -> tuple[list[list[int]] | str, int]:
        """The tokens of a call of one of `KINDS` or, where it has to fail, the error; and how many rounds a call took that did
        not fail."""
        settings: dict[str, Any] = {"max_new_tokens": self.limits}
        if kind == "sampled":
            settings["sampling"] = SamplingParams(0.8, top_p=0.95, seed=len(self.prompts))
        elif kind == "left":
            settings["stop_when"] = leaves
        elif kind in ("raised", "interrupted"):
            error = CallbackError if kind == "raised" else Interrupt
            settings["on_tokens"] = RaisesAt(error, 3 * len(self.prompts) // 2)  # in the middle, with requests that wait
        elif kind == "too long":
            room = generator.max_seq_len - len(self.prompts[-1])
            settings["max_new_tokens"] = [*self.limits[:-1], room]
        try:
            result = generator.generate(self.prompts, **settings)
        except (CallbackError, Interrupt, ValueError) as error:
            return f"{type(error).__name__}: {error}", 0
        return result.tokens, result.stats.rounds


@dataclass(frozen=True)
class Sample:
    """What must not grow, after so many rounds.

    Attributes:
        compiled, recorded: graphs of Dynamo, and CUDA graphs.
        device_bytes: of tensors; 0 on a CPU.
        objects: that Python's garbage collector knows.
        host_mib: resident memory of this process.
    """

    rounds: int
    seconds: float
    compiled: int
    recorded: int
    device_bytes: int
    objects: int
    host_mib: float


def recorded_graphs() -> int:
    """CUDA graphs recorded so far by Inductor's CUDA-graph trees on this device."""
    if not torch.cuda.is_initialized():
        return 0
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    pending, count = [] if manager is None else [node for nodes in manager.roots.values() for node in nodes], 0
    while pending:
        node = pending.pop()
        count += 1
        pending += [child for children in node.children.values() for child in children]
    return count


def sample(rounds: int, seconds: float) -> Sample:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    allocated = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return Sample(
        rounds, round(seconds, 1), counters["stats"]["unique_graphs"], recorded_graphs(), allocated, len(gc.get_objects()),
        round(resident / 2**20, 1),
    )  # fmt: skip


def soak(
    generator: Generator, loads: list[Load], rounds: int, seconds: float, tell: Callable[[Sample], None]
) -> tuple[list[Sample], list[str]]:
    """Samples after each cycle that follows the warm-up, and which calls gave something else than at first."""
    first: dict[tuple[int, str], Any] = {}
    samples: list[Sample] = []
    wrong: list[str] = []
    done, cycle, start = 0, 0, time.perf_counter()

    def more() -> bool:
        return len(samples) < 2 or (samples[-1].rounds < rounds and samples[-1].seconds < seconds)

    while more() if generator.ranks is None else generator.ranks.first(more()):  # the ranks' clocks differ
        with torch._dynamo.config.patch(error_on_recompile=cycle >= WARM_UP):
            for index, load in enumerate(loads):
                for kind in KINDS:
                    given, took = load.call(generator, kind)
                    done += took
                    if first.setdefault((index, kind), given) != given:
                        wrong.append(f"cycle {cycle}, load {index}, {kind}")
        cycle += 1
        if cycle == WARM_UP:
            done, start = 0, time.perf_counter()
        if cycle >= WARM_UP:
            samples.append(sample(done, time.perf_counter() - start))
            tell(samples[-1])
    failed = {kind for (_, kind), given in first.items() if isinstance(given, str)}
    if failed != {"raised", "interrupted", "too long"}:
        wrong.append(f"failed: {sorted(failed)}")
    return samples, wrong


def grown(samples: Sequence[Sample], calls: int) -> list[str]:
    """What grew from the first sample to the last: by an object kept for each call, of `calls` in a cycle, beyond `OBJECTS`."""
    first, last = samples[0], samples[-1]
    allowed = {"objects": OBJECTS + calls * (len(samples) - 1) - 1, "host_mib": HOST_MIB}
    names = ("compiled", "recorded", "device_bytes", "objects", "host_mib")
    return [
        f"{name}: {getattr(first, name)} to {getattr(last, name)}"
        for name in names
        if getattr(last, name) - getattr(first, name) > allowed.get(name, 0)
    ]


def make_loads(count: int, prompts: int, median: int, seed: int) -> list[Load]:
    """Held-out texts of the standard library, lengths and limits drawn from a heavy-tailed distribution."""
    loads = []
    for drawn in range(seed, seed + 2 * count, 2):
        lengths, limits = (heavy_tailed(prompts, median, of) for of in (drawn, drawn + 1))
        texts = held_out_prompts(ByteTokenizer(), prompts, max(lengths))
        loads.append(Load([text[:length] for text, length in zip(texts, lengths, strict=True)], limits))
    return loads


def bench_soak(
    rounds: Annotated[int, typer.Option(min=1, help="How many, after a warm-up of two cycles.")] = 100_000,
    seconds: Annotated[float, typer.Option(min=0, help="Stop after so many, at the end of a cycle.")] = 3600.0,
    prompts: Annotated[int, typer.Option(min=6, help="Of a call; a third end early where a hook ends them.")] = 64,
    loads: Annotated[int, typer.Option(min=1, help="Sets of prompts in a cycle.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows.")] = 16,
    median: Annotated[int, typer.Option(min=SHORTEST, max=LONGEST, help="Of prompt lengths and of new tokens.")] = 32,
    steps: Steps = 3,
    seed: int = 0,
    device: Device = None,
    dtype: DType = "float32",
    compile: Compile = False,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Also write the samples, with machine, versions and commit.")
    ] = None,
) -> None:
    """Rounds while requests join and leave in every way: nothing may be compiled, recorded or kept, and no text may change."""
    place, config = parse_device(device), parse_config(steps, 1, None)
    ranks = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        ranks = TensorParallel.connect(place, check_rounds=True)
        target, draft, _ = load_shares(ranks, device=ranks.device, dtype=parse_dtype(dtype))
    else:
        target, draft, _ = load_pair(device=place, dtype=parse_dtype(dtype))
    speaks = ranks is None or ranks.rank == 0
    sets = make_loads(loads, prompts, median, seed)
    totals = sorted((len(p) + n for one in sets for p, n in zip(one.prompts, one.limits, strict=True)), reverse=True)
    needed = PagePool(0, DEFAULT_PAGE_SIZE, config.reserve).needed
    # Fewer than rows could use: requests wait for pages too.
    pages = max(needed(totals[0]), sum(map(needed, totals[:batch_size])) // 2)
    generator = Generator(
        target,
        draft,
        config,
        max_batch_size=batch_size,
        max_seq_len=pages * DEFAULT_PAGE_SIZE,
        num_pages=pages,
        compile=compile,
    )
    table = Table(*(field.name.replace("_", " ") for field in fields(Sample)), title=f"{loads * len(KINDS)} calls a cycle")

    def tell(reached: Sample) -> None:
        if speaks:
            console.print(f"{reached.rounds} rounds, {reached.seconds:.0f} s", soft_wrap=True)

    samples, problems = soak(generator, sets, rounds, seconds, tell)
    for one in (samples[0], samples[len(samples) // 2], samples[-1]):
        table.add_row(*map(str, asdict(one).values()))
    if speaks:
        console.print(table)
    if json is not None and speaks:
        settings = {"prompts": prompts, "batch_size": batch_size, "median": median, "steps": steps, "dtype": dtype}
        settings["tp"] = 1 if ranks is None else ranks.size
        write_rows(json, [asdict(one) for one in samples], settings=settings | {"device": str(place), "compile": compile})
    problems += grown(samples, loads * len(KINDS))
    for problem in problems:
        console.print(f"[red]{problem}[/red]")
    if problems:
        raise typer.Exit(1)
