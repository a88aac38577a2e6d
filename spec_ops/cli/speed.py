"""What `python -m spec_ops generate --compare` shows on a GPU once the texts were equal: how fast compiled rounds are.

Plain and speculative rounds, compiled, in bfloat16, on the kernels that `auto` picks; timed over the same request, then counted
under the profiler. Then their texts, and those of batch-invariant rounds, which must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.table import Table

from spec_ops.cli.options import console
from spec_ops.cli.text import Text
from spec_ops.decoding import GenerationResult, GenerationStats, Generator, SpeculationConfig

PROFILED = 5  # rounds


@dataclass(frozen=True)
class Counts:
    """What one round takes: replays of CUDA graphs, other launches, and waits of the host for the device."""

    graphs: float
    launches: float
    syncs: float


@dataclass(frozen=True)
class Speed:
    """One way to decode.

    Attributes:
        stats: of the timed run. compile_seconds: of the first run, the compiler's and the recording's; None if not compiled.
        counts: None where there is no profiler of the device.
        kernels: what the plan says of attention, `"triton (mha_target_verify x6)"`.
        tokens: of the timed run.
    """

    stats: GenerationStats
    compile_seconds: float | None
    counts: Counts | None
    kernels: list[str]
    tokens: Sequence[int] = ()

    @property
    def milliseconds(self) -> float:
        """Of a round, by the wall clock."""
        return self.stats.decode_seconds / max(self.stats.rounds, 1) * 1e3


def show_speed(text: Text, config: SpeculationConfig, *, compiled: bool = True) -> dict[str, Speed]:
    """Measure both ways and print the comparison. `text`: models in the dtype to run in."""
    device, dtype = text.target.embed.weight.device, str(text.target.embed.weight.dtype).removeprefix("torch.")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    console.rule(f"{'compiled ' if compiled else ''}rounds in {dtype} on {where}", align="left")
    speeds = {}
    for kind, draft in (("plain", None), ("speculative", text.draft)):
        length = len(text.tokens) + text.max_new_tokens
        generator = Generator(
            text.target, draft, config if draft is not None else None, max_batch_size=1, max_seq_len=length, compile=compiled
        )
        speeds[kind] = measure(generator, text, kind)
    console.print(speed_table(speeds))
    for line in remarks(speeds):
        console.print(line, markup=False, soft_wrap=True)
    return speeds


def measure(generator: Generator, text: Text, kind: str) -> Speed:
    def run(tokens: int) -> GenerationResult:
        return generator.generate(
            [text.tokens], max_new_tokens=tokens, stop_tokens=text.stop_tokens, stop_when=text.stop_when()
        )

    few = min(text.max_new_tokens, 24)
    with _telling(f"compiling the {kind} round" if generator.compile else f"warming up the {kind} round"):
        start = time.perf_counter()
        run(few)
        first = time.perf_counter() - start
        warm_up(generator, run, text.max_new_tokens)
    result = run(text.max_new_tokens)
    counts = _count(generator, result.stats)
    return Speed(result.stats, first if generator.compile else None, counts, _kernels(generator), result.tokens[0])


def show_texts(text: Text, config: SpeculationConfig, speeds: dict[str, Speed]) -> bool:
    """Say whether both ways gave one text as they were timed, where near ties may fall either way, and with batch-invariant
    rounds, where they must; these run uncompiled, so that nobody waits for a compiler.

    Returns:
        Whether the second two were equal.
    """
    dtype = str(text.target.embed.weight.dtype).removeprefix("torch.")
    timed = [speed.tokens for speed in speeds.values()]
    console.print(f"texts of these rounds {_difference(*timed)}")
    length = len(text.tokens) + text.max_new_tokens
    found = []
    for kind, draft in (("plain", None), ("speculative", text.draft)):
        with _telling(f"{kind} decoding in {dtype} with invariant=True, uncompiled"):
            generator = Generator(
                text.target, draft, None if draft is None else config, max_batch_size=1, max_seq_len=length, invariant=True
            )
            result = generator.generate(
                [text.tokens], max_new_tokens=text.max_new_tokens, stop_tokens=text.stop_tokens, stop_when=text.stop_when()
            )
        found.append(result.tokens[0])
    equal = found[0] == found[1]
    style = "green" if equal else "red"
    console.print(f"[{style}]texts in {dtype} with invariant=True {_difference(*found)}[/{style}]")
    return equal


def _difference(first: Sequence[int], second: Sequence[int]) -> str:
    if first == second:
        return "are equal"
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return f"differ after {same} tokens"


def warm_up(generator: Generator, run: Callable[[int], object], tokens: int) -> None:
    """`run(n)`, which generates `n` tokens, before one of `tokens` is timed. Graphs record in the first rounds, and kernels
    load. Where lengths are chosen, each is compiled when it is first chosen: until a whole run chooses no new one."""
    made, few = -1, min(tokens, 24) if generator.config.lengths is None else tokens
    while len(generator.buckets.rounds) > made:
        made = len(generator.buckets.rounds)
        run(few)


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Says what takes long: a spinner in a terminal, lines elsewhere; the seconds when it is done."""
    start = time.perf_counter()
    with console.status(f"{what} ..."):
        if not console.is_terminal:
            console.print(f"{what} ...")
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s")


def _count(generator: Generator, stats: GenerationStats) -> Counts | None:
    """Of rounds over the finished request, of the length that most had: they do the same work, and nobody reads what they
    emit."""
    if generator.device.type != "cuda":
        return None
    length = (max(stats.lengths, key=stats.lengths.__getitem__),) if stats.lengths else ()
    key = (generator.bucket(1), False, *length, None)
    step = generator.buckets.rounds[key]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad(), torch.cuda.device(generator.device):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            with torch.profiler.record_function("rounds"):
                for _ in range(PROFILED):
                    step()
            torch.cuda.synchronize()
    # What the host did inside the mark: the sync after it is not the rounds'.
    events = list(profiler.events() or ())
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    window = next(event.time_range for event in on_host if event.name == "rounds")
    return counted([event.name for event in on_host if window.start <= event.time_range.start <= window.end], PROFILED)


def counted(names: list[str], rounds: int) -> Counts:
    """`names`: of calls of the CUDA runtime and driver, in any order."""
    graphs = sum(name.startswith("cudaGraphLaunch") for name in names)
    launches = sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
    syncs = sum("Synchronize" in name for name in names)
    return Counts(graphs / rounds, launches / rounds, syncs / rounds)


def _kernels(generator: Generator) -> list[str]:
    from spec_ops.passes import explain

    with torch.no_grad():
        plan = explain(generator.round(1))
    found = {kernel.backend: kernel.calls.items() for kernel in plan.chosen()}
    return [f"{backend} ({', '.join(f'{step} x{times}' for step, times in calls)})" for backend, calls in found.items()]


def speed_table(speeds: dict[str, Speed]) -> Table:
    table = Table("", *speeds)

    def row(name: str, cells: list[str | None]) -> None:
        if any(cells):
            table.add_row(name, *(cell or "" for cell in cells))

    each = list(speeds.values())
    row("tokens/s", [f"{one.stats.tokens_per_second:.1f}" for one in each])
    row("milliseconds a round", [f"{one.milliseconds:.2f}" for one in each])
    row("tokens a round", [f"{one.stats.accept_length:.2f}" for one in each])
    for name, field in (("CUDA graphs", "graphs"), ("other launches", "launches"), ("host syncs", "syncs")):
        row(f"{name} a round", [f"{getattr(one.counts, field):g}" if one.counts else None for one in each])
    row("seconds to compile", [f"{one.compile_seconds:.1f}" if one.compile_seconds is not None else None for one in each])
    return table


def remarks(speeds: dict[str, Speed]) -> Iterator[str]:
    """What the table does not say: who computes attention, and how much was gained."""
    for kind, speed in speeds.items():
        yield f"attention of the {kind} round by {', '.join(speed.kernels) or 'nobody'}"
    plain, speculative = (speeds[kind].stats.tokens_per_second for kind in ("plain", "speculative"))
    if plain and speculative:
        yield f"speculative decoding gives {speculative / plain:.2f} times the tokens/s of plain decoding"
