"""compute-sanitizer over every Triton kernel of the package (see `kernels.py` beside this file):

    python -m benchmarks.sanitize.kernels            # first: compiles the kernels
    python -m benchmarks.sanitize memcheck
    python -m benchmarks.sanitize racecheck          # names of cases may follow: `racecheck skinny_mm mla`
    python -m benchmarks.sanitize synccheck all_reduce --limit 90

Exit status 0: every result is right and the tool reports nothing, except for the hazards in `ORDERED`. Racecheck does not see
what orders them; a report of any other pair of lines fails the run. Initcheck watches torch's kernels too, since it takes what
it did not see written for uninitialized; only reads by our kernels count.
"""

from __future__ import annotations

import argparse
import itertools
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import spec_ops.backends.triton

SOURCES = {path.name: path for path in Path(spec_ops.backends.triton.__file__).parent.rglob("*.py")}
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OURS = "_(kernel|attention)$"  # names of our kernels, and of none of torch's
# By kernel and the text of the two lines: what orders them (offsets and barriers: `docs/notebook/launches.md`).
_WARPGROUP = (
    "128 threads access shared memory, meet at their warpgroup's named barrier (bar.sync 2, 128), and one of them arrives at "
    "the mbarrier that the other warpgroup waits on"
)
_COPIES = (
    "the mbarrier that readers wait on counts the copies (cp.async.mbarrier.arrive), and the warp that copies waits for "
    "another one, at which readers arrive"
)
_PARTITIONS = "Triton's hand-over of arguments to the partitions: all warps meet at bar.sync 1 between the two"
WARP_SPECIALIZED = (
    "gqa_hopper_attention", "mla_hopper_attention", "mla_hopper_few_attention", "hopper_mm_kernel", "hopper_float8_kernel",
    "hopper_mxfp4_kernel",
)  # fmt: skip
ORDERED: dict[tuple[str, frozenset[str]], str] = {
    ("mla_hopper_attention", frozenset({"sums.store(l)", "l = sums.load(S_ROW)"})): _WARPGROUP,
    ("mla_hopper_attention", frozenset({"sums.store(l)", "l = l + sums.load(S_ROW)"})): _WARPGROUP,
    ("mla_hopper_attention", frozenset({"odd_max.store(m)", "m = odd_max.load(S_ROW)"})): _WARPGROUP,
    ("hopper_float8_kernel", frozenset({
        "async_copy.async_copy_global_to_shared(to, at)",
        "product = product * gl.expand_dims(f_smem.index(stage).load(of_rows) * factor, 0)",
    })): _COPIES,
}  # fmt: skip
for _kernel in WARP_SPECIALIZED:
    for _other in (f"def {_kernel}(", "gl.warp_specialize("):
        ORDERED[_kernel, frozenset({f"def {_kernel}(", _other})] = _PARTITIONS
for _kernel in ("hopper_mm_kernel", "hopper_float8_kernel"):  # where partitions differ, the branch has their line
    ORDERED[_kernel, frozenset({f"def {_kernel}(", "if CONSUMERS == 1:"})] = _PARTITIONS


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


def reads(log: str) -> Counter[str]:
    """How often our kernels read uninitialized memory, by kernel and place, of initcheck's report.

    Raises:
        ValueError: a report without a kernel, or a summary that counts other reports.
    """
    lines, found, reports = log.splitlines(), Counter[str](), 0
    for line, after in itertools.pairwise([*lines, ""]):
        if "Uninitialized __global__ memory read" in line:
            reports += 1
            if not (at := re.search(r"\bat ([^\s(+]+)[^+]*\+0x[0-9a-f]+(?: in (\S+))?", after)):
                raise ValueError(f"cannot read {after!r}")
            if re.search(OURS, at[1]):
                found[f"{at[1]} in {at[2] or 'an unknown place'}"] += 1
    summary = re.search(r"ERROR SUMMARY: (\d+) errors?", log)
    if not summary or int(summary[1]) != reports:
        raise ValueError(f"initcheck's summary does not count the {reports} reports read: {summary and summary[0]}")
    return found


def logged(command: list[str], environment: dict[str, str], limit: float | None) -> tuple[int | None, str]:
    """The exit status of a command and what it printed; None, with its processes killed, if it takes more than `limit`
    seconds."""
    with tempfile.TemporaryFile("w+") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = started.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
        log.seek(0)
        return status, log.read()


def run(tool: str, names: list[str], limit: float | None = None) -> int:
    """Exit status: 0 if all is right."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # One launch at a time: a report then follows its case's kernels.
    options = ["--print-limit", "0", "--force-blocking-launches"]
    if tool != "initcheck":
        options += ["--kernel-name", f"regex={OURS}"]
    program = [sys.executable, "-m", "benchmarks.sanitize.kernels", *names]
    # Exact allocations: memcheck then sees what runs past one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, log = logged([sanitizer, "--tool", tool, *options, *program], environment, limit)
    print(log)
    if status is None:
        print(f"{tool}: not done after {limit:g} s")
        return 1
    if status:
        print(f"{tool}: cases failed, exit status {status}")
        return status
    if tool == "initcheck":
        for what, count in (found := reads(log)).items():
            print(f"initcheck: UNINITIALIZED {what}, {count} times")
        print(f"initcheck: {'errors' if found else 'clean'}")
        return int(bool(found))
    if tool != "racecheck":
        clean = "ERROR SUMMARY: 0 errors" in log
        print(f"{tool}: {'clean' if clean else 'errors, see above'}")
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
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="after which the run is ended, and has failed")
    options = parser.parse_args()
    raise SystemExit(run(options.tool, options.names, options.limit))


if __name__ == "__main__":
    main()
