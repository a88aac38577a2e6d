"""What the passes did to a graph, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from spec_ops.passes.analysis import counts
from spec_ops.passes.analysis.graph import arg, attention_calls, group_of, has_arg, num_ranks, value
from spec_ops.passes.base import Note, PassContext, PassResult
from spec_ops.passes.history import History
from spec_ops.passes.page import page
from spec_ops.passes.wording import Kernel, groups, listed, places_of, short_place, source_text, with_times

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_SHOWN_OF_A_PASS = 4  # lines, unless everything is asked for
_ON_GPU_ALONE = (counts.HOST_COPIES, counts.CUDA_GRAPHS, counts.COLLECTIVES)
_SELECTION = "select_backends"


class Place(NamedTuple):
    """What a graph was compiled or planned for: the compute capability (None: CPU), the dtypes of attention, and how many ranks
    share the work."""

    arch: int | None = None
    dtypes: tuple[str, ...] = ()
    ranks: int = 1

    @classmethod
    def of(cls, graph: fx.Graph, context: PassContext) -> Place:
        arch, dtypes = context.arch, dict[str, None]()
        for call in attention_calls(graph):
            q, cache = value(arg(call, "q")), value(arg(call, "k_cache" if has_arg(call, "k_cache") else "kv_cache"))
            if isinstance(q, torch.Tensor) and isinstance(cache, torch.Tensor):
                arch = context.machine(q.device)[0]
                dtypes[_short(q.dtype) + ("" if cache.dtype == q.dtype else f" with {_short(cache.dtype)} caches")] = None
        names = {name for node in graph.nodes if (name := group_of(node)) is not None}
        return cls(arch, tuple(dtypes), max((num_ranks(name) for name in names), default=1))

    def __str__(self) -> str:
        place = "the CPU" if self.arch is None else f"sm_{self.arch}"
        return ", ".join([place if self.ranks == 1 else f"one of {self.ranks} ranks on {place}", *self.dtypes])


@dataclass
class GraphReport:
    """One compiled graph: counts before and after (`count_nodes`), and every pass's result.

    `print(report)` shows what changed; `text(verbose=True)` shows everything, and `to_html()` shows it on a page.
    """

    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    results: list[PassResult] = field(default_factory=list)
    place: Place = field(default_factory=lambda: Place())
    history: History | None = None

    def matches(self, name: str) -> int:
        return sum(result.matches for result in self.results if result.name == name)

    def kernels(self) -> list[str]:
        """The selections with the reasons against the other kernels, in call order."""
        return [note.text + (f" ({'; '.join(note.why)})" if note.why else "") for note in self._selections()]

    def warnings(self) -> list[str]:
        """What is slow and need not be, each once: calls without a kernel on a GPU."""
        return list(dict.fromkeys(note.text for result in self.results for note in result.warnings))

    def host_plan_cost(self) -> str | None:
        """What calls that plan on the host cost; None if there are none."""
        if not (calls := self.after.get(counts.HOST_PLANNED, 0)):
            return None
        graphs = self.after[counts.CUDA_GRAPHS]
        said = f"{calls} calls plan on the host and run" if calls > 1 else "1 call plans on the host and runs"
        return f"{said} outside CUDA graphs: {graphs} graphs instead of 1"

    def verdict(self) -> str:
        """One line: what it is a plan for, what the passes changed, and who computes attention."""
        syncs = (counts.HOST_COPIES, counts.ITEMS)
        parts = [self._change("host sync", *syncs)]
        if self.place.arch is not None:
            parts.insert(0, self._change("CUDA graph", counts.CUDA_GRAPHS))
            parts += [self._change("NCCL collective", counts.COLLECTIVES)] if self.place.ranks > 1 else []
        if self.before.get(counts.METADATA_LAUNCHES) or self.after.get(counts.METADATA_LAUNCHES):
            parts.append(self._change("metadata launch", counts.METADATA_LAUNCHES))
        backends = [kernel.backend for kernel in self.chosen()]
        attention = f"; attention by {listed(backends)}" if backends else ""
        return f"Plan for {self.place}: {', '.join(parts)}{attention}"

    def text(self, verbose: bool = False) -> str:
        """The verdict, the counts that changed, kernels, rewrites and refusals, each reason once; `verbose`: everything, with
        the user's source lines."""
        parts = [[self.verdict(), *(f"warning: {text}" for text in self.warnings())]]
        parts[0] += [cost] if (cost := self.host_plan_cost()) else []
        parts += [self._table(verbose), self._kernel_lines(verbose)]
        rewrites = [(result, result.done) for result in self.results if result.name != _SELECTION]
        parts.append(_section("rewrites", rewrites, verbose))
        parts.append(_section("not done", [(result, result.refused) for result in self.results], verbose))
        if verbose and (idle := [r.name for r in self.results if not (r.matches or r.refused)]):
            parts.append([f"found nothing to do: {', '.join(idle)}"])
        return "\n\n".join("\n".join(part) for part in parts if part)

    def to_html(self) -> str:
        """The report as one page that needs nothing else: counts, rewrites, refusals, and the graph before and after."""
        return page(
            self.verdict(),
            [*self.warnings(), *([cost] if (cost := self.host_plan_cost()) else [])],
            self.rows(verbose=True),
            self.chosen(),
            self.results,
            self.history.records if self.history is not None else [],
        )

    def __str__(self) -> str:
        return self.text()

    def _selections(self) -> list[Note]:
        return [note for result in self.results if result.name == _SELECTION for note in result.done]

    def chosen(self) -> list[Kernel]:
        """The backends of the attention calls, in the order in which they first appear."""
        found: dict[str, Kernel] = {}
        for note in self._selections():
            step, _, chosen = note.text.partition(": ")
            backend, _, missing = chosen.partition(", which ")
            kernel = found.setdefault(backend, Kernel(backend, Counter(), {}, missing or None, {}))
            kernel.calls[step] += 1
            places = kernel.places.setdefault(step, [])
            places += [note.where] if note.where not in places else []
            for why in note.why:
                steps = kernel.others.setdefault(why.replace(" ", ": ", 1), [])
                steps += [step] if step not in steps else []
        return list(found.values())

    def _change(self, noun: str, *names: str) -> str:
        before, after = (sum(found.get(name, 0) for name in names) for found in (self.before, self.after))
        plural = "es" if noun.endswith("ch") else "s"
        text = f"{after or 'no'} {noun}{plural if after != 1 else ''}"
        return text if before == after else f"{text} instead of {before}"

    def rows(self, verbose: bool = False) -> list[tuple[str, int, int]]:
        """`(name, count without the passes, count with them)`: what the passes are after and changed, or every count."""
        names = [name for name in counts.SUMMARY if self.place.arch is not None or name not in _ON_GPU_ALONE]
        if verbose:
            names += [*sorted((self.before.keys() | self.after.keys()) - {*counts.SUMMARY, "calls"}), "calls"]
        found = [(name, self.before.get(name, 0), self.after.get(name, 0)) for name in names]
        return [row for row in found if verbose or row[1] != row[2]]

    def _table(self, verbose: bool) -> list[str]:
        if not (rows := self.rows(verbose)):
            return []
        return [f"{'':28s} {'without':>8s} {'with':>8s}  the passes", *(f"{n:28s} {b:8d} {a:8d}" for n, b, a in rows)]

    def _kernel_lines(self, verbose: bool) -> list[str]:
        lines = []
        for kernel in self.chosen():
            lines.append(f"  {kernel.backend}: {listed(with_times(kernel.calls))}")
            lines += [f"    {kernel.missing}"] if kernel.missing else []
            lines += [f"    {step}  [{places_of(places)}]" for step, places in kernel.places.items() if verbose]
            for reason, steps in kernel.others.items() if verbose else ():
                lines.append(f"    not {reason}" + (f" ({listed(steps)})" if len(steps) < len(kernel.calls) else ""))
        return ["attention kernels", *lines] if lines else []


def _section(title: str, parts: Sequence[tuple[PassResult, list[Note]]], verbose: bool) -> list[str]:
    lines = []
    for result, notes in parts:
        if notes:
            times = f" ({len(notes)})" if len(notes) > 1 else ""
            lines.append(f"  {result.name}{times}: {result.about}".rstrip(" :"))
            lines += _every(notes) if verbose else _briefly(notes)
    return [title, *lines] if lines else []


def _briefly(notes: list[Note]) -> Iterator[str]:
    found = groups(notes)
    shown = found if len(found) <= _SHOWN_OF_A_PASS + 1 else found[:_SHOWN_OF_A_PASS]  # not a line to say that one is left
    for group in shown:
        named = with_times(group.subjects)
        subjects = listed([*named[:3], f"{len(named) - 3} others"] if len(named) > 4 else named)
        times = f" ({group.subjects['']} times)" if group.subjects[""] > 1 else ""
        yield f"    {subjects + ': ' if subjects else ''}{group.reason}{times}  [{places_of(group.places)}]"
    if len(found) > len(shown):
        yield f"    and {len(found) - len(shown)} more kinds"


def _every(notes: list[Note]) -> Iterator[str]:
    for (text, where), times in Counter((note.text, note.where) for note in notes).items():
        yield f"    {text}" + (f" ({times} times)" if times > 1 else "") + f"  [{short_place(where)}]"
        yield from (f"        {line}" for line in [source_text(where)] if line)


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(dtype, "fp8" if name.startswith("float8") else name)
