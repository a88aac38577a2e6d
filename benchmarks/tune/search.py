"""Times candidate block shapes of the attention kernels class by class, and ranks them.

Times are those of CUDA-graph replays over rotating buffers, results are checked against float64 as in `benchmarks/kernels`.
Classes are measured in turn while other processes still compile the candidates of later ones.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.kernels.cases import Pool, Problem, num_sets, pages_needed
from benchmarks.kernels.measure import MAX_ERROR_RATIO, Expected
from benchmarks.timing import side_stream, time_calls
from benchmarks.tune.compile import Outcome, call
from benchmarks.tune.shapes import DTYPE, ShapeClass
from spec_ops.backends.triton.attention.tuning import Config

MIN_MS = 4.0  # of replays per candidate and case
KEEP = 1.02  # an entry stays unless another config is faster by more than two runs of the same one differ

Times = dict[Config, dict[str, float]]  # microseconds by candidate and case


@dataclass(frozen=True)
class Ranked:
    """A candidate's times over the best of each case: geometric mean and largest."""

    config: Config
    relative: float
    worst: float


def rank(times: Mapping[Config, Mapping[str, float]]) -> list[Ranked]:
    """The candidates that have a time in every case, the fastest first."""
    cases = {case for found in times.values() for case in found}
    whole = {config: found for config, found in times.items() if cases and cases == set(found)}
    best = {case: min(found[case] for found in whole.values()) for case in cases} if whole else {}
    ranked = []
    for config, found in whole.items():
        ratios = [found[case] / best[case] for case in cases]
        ranked.append(Ranked(config, geometric_mean(ratios), max(ratios)))
    return sorted(ranked, key=lambda r: r.relative)


@dataclass(frozen=True)
class Result:
    """What was found out about one class.

    Attributes:
        outcomes: of compiling, by candidate; the present config is timed whatever it says. failures: by candidate, why it lacks
            a time though it compiled. seconds: that measuring took.
    """

    shape: ShapeClass
    outcomes: Mapping[Config, Outcome]
    times: Times
    failures: Mapping[Config, str]
    seconds: float

    @functools.cached_property
    def ranked(self) -> list[Ranked]:
        return rank(self.times)

    @property
    def present(self) -> Ranked | None:
        return next((r for r in self.ranked if r.config == self.shape.present), None)

    @property
    def choice(self) -> Config:
        """What the table should say: the present config unless a better one is faster by more than `KEEP`."""
        allowed = [r for r in self.ranked if not self.outcomes[r.config].refused]
        if not allowed or (self.present is not None and self.present.relative <= KEEP * allowed[0].relative):
            return self.shape.present
        return allowed[0].config

    def why_not(self, config: Config) -> str:
        return self.outcomes[config].refused or self.failures.get(config, "")

    def rows(self) -> list[dict[str, Any]]:
        """A row per candidate, for JSON."""
        ranked = {r.config: r for r in self.ranked}
        rows = []
        for config, outcome in self.outcomes.items():
            row: dict[str, Any] = {"class": str(self.shape), "arch": self.shape.arch, **asdict(config)}
            row |= {"present": config == self.shape.present, "chosen": config == self.choice}
            row |= outcome.used._asdict() if outcome.used else {}
            row |= {"us": {case: round(us, 2) for case, us in self.times.get(config, {}).items()}}
            if (found := ranked.get(config)) is not None:
                row |= {"relative": round(found.relative, 4), "worst": round(found.worst, 4)}
            rows.append(row | ({"refused": reason} if (reason := self.why_not(config)) else {}))
        return rows


def measure_class(
    shape: ShapeClass, configs: Sequence[Config], repeats: int, tick: Callable[[], object], device: str = "cuda"
) -> tuple[Times, dict[Config, str]]:
    """Microseconds of `configs` in every case of the class, each of at least `repeats` replays; and why some have none.

    `tick` is called after each pair of candidate and case. A candidate whose result is wrong or whose launch fails in one case
    is not run in the others.
    """
    place = torch.device(device)
    l2 = torch.cuda.get_device_properties(place).L2_cache_size if place.type == "cuda" else 0
    cases = [(case, num_sets(case, shape.kv_dtype.itemsize, l2)) for case in shape.cases()]
    pages = max(pages_needed(c, shape.page_size) * sets for c, sets in cases)
    pool = Pool(shape.heads, pages, shape.page_size, DTYPE, shape.kv_dtype, place)
    times: Times = {config: {} for config in configs}
    failures: dict[Config, str] = {}
    for case, sets in cases:
        problem = Problem(case, pool, sets)
        expected = Expected(problem)
        indptr = torch.arange(len(problem.lens) + 1, dtype=torch.int32, device=place) * case.q_len
        for config in configs:
            if config not in failures:
                try:
                    times[config][str(case)] = _time(shape, problem, expected, indptr, config, repeats)
                except Exception as error:  # of this candidate alone
                    if place.type == "cuda":
                        torch.cuda.synchronize()  # raises again if the context is lost: no later time would mean anything
                    failures[config] = f"{type(error).__name__}: {error}"
                torch.cuda.empty_cache()  # graphs leave blocks that fit nothing else
            tick()
        del problem, expected
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    return times, failures


def _time(shape: ShapeClass, problem: Problem, expected: Expected, indptr: torch.Tensor, config: Config, repeats: int) -> float:
    def run(index: int) -> torch.Tensor:
        inputs = (problem.q[index], problem.pool.caches, problem.tables[index], problem.seq_lens, problem.tree_mask, indptr)
        return call(shape.entry.kernel, problem.case, config, *inputs, problem.pool.kv_scale or 1.0)

    calls = [functools.partial(run, index) for index in range(len(problem.q))]
    with side_stream():
        timing = time_calls(calls, min_ms=MIN_MS, min_replays=repeats)
        error = expected.error(timing.output)
    if not error <= (limit := MAX_ERROR_RATIO * expected.reference_error):  # NaN too
        raise ValueError(f"its error must be at most {limit:.2e}, got {error:.2e}")
    return timing.us


Measure = Callable[[ShapeClass, Sequence[Config], int, Callable[[], object]], tuple[Times, dict[Config, str]]]


def tune_class(
    shape: ShapeClass,
    outcomes: Mapping[Config, Outcome],
    repeats: int,
    tick: Callable[[], object],
    measure: Measure = measure_class,
) -> Result:
    """Measures the candidates that were not refused, and the present config."""
    kept = [config for config, outcome in outcomes.items() if not outcome.refused or config == shape.present]
    start = time.monotonic()
    times, failures = measure(shape, kept, repeats, tick)
    return Result(shape, outcomes, times, failures, time.monotonic() - start)
