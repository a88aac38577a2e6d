"""compute-sanitizer over every Triton kernel of the package (see `kernels.py` beside this file):

    python -m benchmarks.sanitize.kernels            # first: compiles the kernels
    python -m benchmarks.sanitize memcheck
    python -m benchmarks.sanitize racecheck          # names of cases may follow: `racecheck skinny_mm mla`

Exit status 0: every result is right and the tool reports nothing, except for the hazards in `ORDERED`. Racecheck does not see
what orders them; a report of any other pair of lines fails the run.
"""

from __future__ import annotations

import argparse
import linecache
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import spec_ops.backends.triton

SOURCES = {path.name: path for path in Path(spec_ops.backends.triton.__file__).parent.rglob("*.py")}
TOOLS = ("memcheck", "racecheck")
# By kernel and the text of the two lines: what orders them (offsets and barriers: `docs/notebook/launches.md`).
_WARPGROUP = (
    "128 threads access shared memory, meet at their warpgroup's named barrier (bar.sync 2, 128), and one of them arrives at "
    "the mbarrier that the other warpgroup waits on"
)
_PARTITIONS = "Triton's hand-over of arguments to the partitions: all warps meet at bar.sync 1 between the two"
WARP_SPECIALIZED = ("gqa_hopper_attention", "mla_hopper_attention", "mla_hopper_few_attention")
ORDERED: dict[tuple[str, frozenset[str]], str] = {
    ("mla_hopper_attention", frozenset({"sums.store(l)", "l = sums.load(S_ROW)"})): _WARPGROUP,
    ("mla_hopper_attention", frozenset({"sums.store(l)", "l = l + sums.load(S_ROW)"})): _WARPGROUP,
    ("mla_hopper_attention", frozenset({"odd_max.store(m)", "m = odd_max.load(S_ROW)"})): _WARPGROUP,
}
for _kernel in WARP_SPECIALIZED:
    for _other in (f"def {_kernel}(", "gl.warp_specialize("):
        ORDERED[_kernel, frozenset({f"def {_kernel}(", _other})] = _PARTITIONS


class Hazard(NamedTuple):
    """Accesses by one kernel at two places, each `file.py:line`."""

    kernel: str
    first: str
    second: str
    count: int

    def reason(self) -> str | None:
        """What orders the accesses; None for a hazard that nobody has explained."""
        return ORDERED.get((self.kernel, frozenset({source_line(self.first), source_line(self.second)})))


def source_line(place: str) -> str:
    file, _, line = place.partition(":")
    return linecache.getline(str(SOURCES[file]), int(line)).strip()


_ACCESS = re.compile(r"(?:Read|Write|Atomic) access at (?P<kernel>\S+?)\+0x[0-9a-f]+ in (?P<place>\S+?:\d+)")


def hazards(log: str) -> Iterator[Hazard]:
    """Those of racecheck's analysis report.

    Raises:
        ValueError: a line about a race that is none of the known forms, or a summary that counts other reports.
    """
    reports, first = 0, None
    for line in log.splitlines():
        about = re.match(r"=+\s+(.*)", line)
        if about and "Race reported between" in about[1]:
            reports += 1
            first = _ACCESS.search(about[1])
            if not first:
                raise ValueError(f"cannot read {line!r}")
        elif about and about[1].startswith("and ") and first:
            second, count = _ACCESS.search(about[1]), re.search(r"\[(\d+) hazards?\]", about[1])
            if not (second and count):
                raise ValueError(f"cannot read {line!r}")
            yield Hazard(first["kernel"], first["place"], second["place"], int(count[1]))
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", log)
    if not summary or int(summary[1]) != reports:
        raise ValueError(f"racecheck's summary does not count the {reports} reports read: {summary and summary[0]}")


def run(tool: str, names: list[str]) -> int:
    """Exit status: 0 if all is right."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # One launch at a time (a report then follows its case's kernels); our kernels alone, not torch's.
    options = ["--print-limit", "0", "--force-blocking-launches", "--kernel-name", "regex=_(kernel|attention)$"]
    program = [sys.executable, "-m", "benchmarks.sanitize.kernels", *names]
    # Exact allocations: memcheck then sees what runs past one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, *options, *program]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = done.stdout
    print(log)
    if done.returncode:
        print(f"{tool}: cases failed, exit status {done.returncode}")
        return done.returncode
    if tool == "memcheck":
        clean = "ERROR SUMMARY: 0 errors" in log
        print(f"memcheck: {'clean' if clean else 'errors, see above'}")
        return int(not clean)
    explained: Counter[str] = Counter()
    unexplained = []
    for hazard in hazards(log):
        if reason := hazard.reason():
            explained[f"{source_line(hazard.first)} / {source_line(hazard.second)}: {reason}"] += hazard.count
        else:
            unexplained.append(hazard)
    for what, count in explained.items():
        print(f"racecheck: ordered, {count} times: {what}")
    for hazard in unexplained:
        print(f"racecheck: HAZARD {hazard}: {source_line(hazard.first)!r} and {source_line(hazard.second)!r}")
    print(f"racecheck: {'errors' if unexplained else 'clean'}, {len(unexplained)} unexplained reports")
    return int(bool(unexplained))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("names", nargs="*", help="run the cases whose names contain one of these")
    options = parser.parse_args()
    raise SystemExit(run(options.tool, options.names))


if __name__ == "__main__":
    main()
