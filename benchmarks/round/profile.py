"""Where the time of a round goes: kernels by kind, what the host does, and one round as a picture."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

KINDS = ("matmul", "attention", "other")
# cuBLAS with its split-K sums, Inductor's templates, and ours: of few rows, batch-invariant, of experts.
_PRODUCTS = (
    "nvjet", "gemm", "gemv", "splitk", "cutlass", "triton_tem", "_mm_kernel", "hopper_float8_kernel", "hopper_mxfp4_kernel",
    "many_rows_kernel", "gate_up_kernel", "_down_kernel", "weighted_sum_kernel",
)  # fmt: skip
# Ours, FlashInfer's xqa, its fa2, fa3 and MLA with the merge of their parts, and the launches that make its inputs safe.
_ATTENTION = ("attention", "mha", "kvcachekernel", "pageattention", "mergestate", "prepare_kernel", "clear_kernel")
_COLORS = {"matmul": "C0", "attention": "C1", "other": "C2", "idle": "C3"}


class Kernel(NamedTuple):
    """One launch on the device; microseconds, from the first launch of its round. See `behind_each_other`."""

    name: str
    start: float
    duration: float

    @property
    def kind(self) -> str:
        return kind_of(self.name)


class Profile(NamedTuple):
    """`counts` per round: `kernels`, `graph_launches`, `host_launches`, `host_syncs`. `rounds`: the kernels of each."""

    counts: dict[str, float]
    rounds: list[list[Kernel]]


def kind_of(name: str) -> str:
    """`"matmul"`, `"attention"` or `"other"` (norms, RoPE and append, sampling, copies ...) by the demangled name of a kernel.

    Template arguments are not looked at: FlashInfer's attention has CUTLASS types in its own.
    """
    function = re.split(r"[<(]", name.replace("(anonymous namespace)::", ""))[0].lower()
    if any(part in function for part in _ATTENTION):
        return "attention"
    return "matmul" if any(part in function for part in _PRODUCTS) else "other"


def breakdown(kernels: Sequence[Kernel], rounds: int, milliseconds: float) -> dict[str, float]:
    """Where a round of `milliseconds` goes; `kernels` are those of `rounds` rounds.

    Keys: `matmul_ms`, `attention_ms`, `other_ms`, and `gaps_ms`, what lies between kernels. Negative gaps mean that the kernels
    took longer under the profiler.
    """
    spent = {f"{kind}_ms": sum(k.duration for k in kernels if k.kind == kind) / 1e3 / rounds for kind in KINDS}
    spent["gaps_ms"] = milliseconds - sum(spent.values())
    return {kind: round(value, 3) for kind, value in spent.items()}


def behind_each_other(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels in the order of their starts, each from the end of those before it: one that was launched early (`launch`) waits
    for them on the device, and the profiler counts that as its own time."""
    alone, free = [], float("-inf")
    for kernel in kernels:
        start, end = max(kernel.start, free), kernel.start + kernel.duration
        alone.append(kernel._replace(start=start, duration=max(end - start, 0.0)))
        free = max(free, end)
    return alone


def small_kernels(kernels: Sequence[Kernel], rounds: int) -> dict[str, list[float]]:
    """Launches and microseconds a round of each kernel that is neither product nor attention, by name, the longest first.

    Kernels of Inductor's that differ in their number alone count as one.
    """
    found: dict[str, list[float]] = {}
    for kernel in kernels:
        if kernel.kind == "other":
            sums = found.setdefault(re.sub(r"_\d+$", "", kernel.name)[:100], [0.0, 0.0])
            sums[0] += 1 / rounds
            sums[1] += kernel.duration / rounds
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    return {name: [round(value, 2) for value in sums] for name, sums in ordered}


def profile(step: Callable[[], object], rounds: int = 5) -> Profile:
    """`rounds` calls of `step` on CUDA under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("rounds"):
            for _ in range(rounds):
                step()
        torch.cuda.synchronize()
    events = list(profiler.events() or ())
    on_host = torch.autograd.DeviceType.CPU
    (window,) = (e.time_range for e in events if e.name == "rounds" and e.device_type == on_host)
    # What the host did between the first and the last round: the profiler's own sync at the end is not theirs.
    names = [e.name for e in events if window.start <= e.time_range.start <= window.end]
    launched = [e for e in events if e.device_type != on_host and not e.name.startswith(("Activity", "rounds"))]
    kernels = sorted((Kernel(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in launched), key=lambda k: k.start)
    kernels = behind_each_other(kernels)
    counts = {
        "kernels": sum(not k.name.startswith("Mem") for k in kernels) / rounds,  # but not copies and fills
        "graph_launches": sum(n.startswith("cudaGraphLaunch") for n in names) / rounds,
        "host_launches": sum(n.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for n in names) / rounds,
        "host_syncs": sum("Synchronize" in n for n in names) / rounds,
    }
    size, rest = divmod(len(kernels), rounds)
    if rest:  # a round that is not the same every time, such as a recording: no picture of one, but its sums
        return Profile(counts, [kernels])
    parts = [kernels[i * size : (i + 1) * size] for i in range(rounds)]
    return Profile(counts, [[k._replace(start=k.start - part[0].start) for k in part] for part in parts])


def idle(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """`(start, duration)` of the stretches in which nothing ran, between the first and the last of `kernels` in order."""
    found, end = [], None
    for kernel in kernels:
        if end is not None and kernel.start > end:
            found.append((end, kernel.start - end))
        end = max(end or 0.0, kernel.start + kernel.duration)
    return found


def plot(path: Path, kernels: Sequence[Kernel], title: str) -> None:
    """One round as a PNG: a lane per kind and one for the gaps; above the whole round, below a stretch of it with names.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is missing. ValueError: no kernels.
    """
    if not kernels:
        raise ValueError("plot: `kernels` must hold at least one, got none")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it would look for a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), layout="constrained")
    FigureCanvasAgg(figure)
    whole, part = figure.subplots(2, 1, height_ratios=(2, 3))
    lanes = {kind: [(k.start, k.duration) for k in kernels if k.kind == kind] for kind in KINDS} | {"idle": idle(kernels)}
    # About a layer, from the middle of the longest stretch: the target's verification.
    middle = len(kernels) // 2
    shown = kernels[max(0, middle - 6) : middle + 6]
    left, right = shown[0].start, max(k.start + k.duration for k in shown)
    for axes in (whole, part):
        for lane, (kind, bars) in enumerate(lanes.items()):
            # With an edge, or launches of a microsecond would vanish between pixels.
            axes.broken_barh(bars, (-lane - 0.4, 0.8), color=_COLORS[kind], linewidth=0.3)
        labels = [f"{kind}\n{sum(d for _, d in bars) / 1e3:.2f} ms, {len(bars)}" for kind, bars in lanes.items()]
        axes.set_yticks([-lane for lane in range(len(lanes))], labels)
        axes.set_xlabel("microseconds")
    whole.set(xlim=(0, max(k.start + k.duration for k in kernels)), title="the whole round")
    whole.axvspan(left, right, color="black", alpha=0.15)
    bottom = -len(lanes)
    part.set(xlim=(left, right), ylim=(bottom - 1.6, 0.6), title="the grey stretch")
    for number, k in enumerate(shown):
        name = re.split(r"[<(]", k.name.removeprefix("void "))[0].rpartition("::")[2]
        label = "\n".join(textwrap.wrap(name.replace("_", "_ "), 17, break_long_words=True)[:4]).replace("_ ", "_")
        x = left + (number + 0.5) * (right - left) / len(shown)
        part.plot([k.start + k.duration / 2, x], [-KINDS.index(k.kind) - 0.4, bottom], color="grey", linewidth=0.5)
        part.text(x, bottom - 0.05, f"{k.duration:.1f} us\n{label}", ha="center", va="top", fontsize=7)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
