"""The program for compute-sanitizer: every kernel has a case, no unexplained hazard passes, and what explains them holds.

The cases themselves run in `tests/interpreter/test_sanitize_kernels.py`.
"""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")

from benchmarks.sanitize import __main__ as sanitize
from benchmarks.sanitize import kernels as sanitize_kernels
from spec_ops.backends.triton.attention.hopper import gqa as gqa_hopper
from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
from spec_ops.backends.triton.linear import hopper_float8, hopper_mm
from spec_ops.backends.triton.runtime import ahead


def test_every_kernel_has_a_case():
    cases = sanitize_kernels.cases()
    assert {kernel for case in cases for kernel in case.kernels} == sanitize_kernels.package_kernels()
    assert len({case.name for case in cases}) == len(cases)


def place(text: str, kernel: str = "mla_hopper_attention") -> str:
    """`mla.py:line` of the line of the kernel's file that reads so, or of a helper's in `hopper_shares.py`."""
    (source,) = [file for file in sanitize.SOURCES.values() if f"def {kernel}(" in file.read_text()]
    for file in (source, sanitize.SOURCES["hopper_shares.py"]):
        lines = [line.strip() for line in file.read_text().splitlines()]
        if text in lines:
            return f"{file.name}:{lines.index(text) + 1}"
    raise AssertionError(f"{kernel} has no line {text!r}")


def report(*places: str, kernel: str = "mla_hopper_attention") -> str:
    """A report of racecheck 2025.3: the first place, and each of the others with it."""
    lines = [f"========= Error: Race reported between Write access at {kernel}+0x74d0 in {places[0]}"]
    lines += [f"=========     and Read access at {kernel}+0x1f6f0 in {other} [1920 hazards]" for other in places[1:]]
    return "\n".join([*lines, "========= \n"])


def log(*reports: str) -> str:
    summary = f"========= RACECHECK SUMMARY: {len(reports)} hazards displayed ({len(reports)} errors, 0 warnings)"
    return "\n".join(["========= COMPUTE-SANITIZER", *reports, summary])


@pytest.mark.parametrize(
    ("kernel", "pair"), sanitize.ORDERED, ids=lambda part: part if isinstance(part, str) else " / ".join(sorted(part))
)
def test_explained_hazards_name_lines_of_the_kernel(kernel, pair):
    first, second = (list(pair) * 2)[:2]
    (hazard,) = sanitize.hazards(log(report(place(first, kernel), place(second, kernel), kernel=kernel)))
    assert hazard.count == 1920
    assert hazard.reason() == sanitize.ORDERED[kernel, pair]


def test_other_hazards_are_not_explained():
    store, load, entry = place("odd_max.store(m)"), place("m = odd_max.load(S_ROW)"), place("def mla_hopper_attention(")
    unrelated = place("even_max.store(m_even)")
    elsewhere = report(store, load, kernel="gqa_hopper_attention")
    text = log(report(store, load, unrelated), elsewhere, report(entry, load), report(entry, entry, kernel="other_attention"))
    found = list(sanitize.hazards(text))
    assert [bool(hazard.reason()) for hazard in found] == [True, False, False, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        log(report("mla.py:1", "mla.py:2")).replace("1 hazards displayed", "2 hazards displayed"),
        log(report("mla.py:1", "mla.py:2").replace("in mla.py:2", "somewhere")),
        log(report("mla.py:1", "mla.py:2").replace("in mla.py:1", "somewhere")),
    ],
    ids=["no summary", "other count", "second place", "first place"],
)
def test_a_log_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ValueError, match=r"cannot read|does not count"):
        list(sanitize.hazards(text))


READ = "========= Uninitialized __global__ memory read of size 4 bytes\n========="
ERRORS = "========= ERROR SUMMARY: {} errors"


def test_only_our_kernels_reads_count():
    ours = f"{READ}     at sum_kernel+0x74d0 in push.py:88\n"
    torchs = f"{READ}     at void at::native::vectorized_elementwise_kernel<4, at::native::F>(int, F)+0x70 in x.cuh:20\n"
    nameless = f"{READ}     at few_down_kernel(float *, int)+0x70\n"
    found = sanitize.reads("\n".join([ours, torchs, ours, nameless, ERRORS.format(4)]))
    assert found == {"sum_kernel in push.py:88": 2, "few_down_kernel in an unknown place": 1}
    assert not sanitize.reads(ERRORS.format(0))
    for text in ("", ours + ERRORS.format(2), READ + "     somewhere\n" + ERRORS.format(1)):
        with pytest.raises(ValueError, match=r"cannot read|does not count"):
            sanitize.reads(text)


TOOL = """#!/bin/sh
echo "$@"
case "$2" in
    initcheck) printf '%s\\n' '========= Uninitialized __global__ memory read of size 4 bytes' \\
        '=========     at sum_kernel+0x10 in push.py:8' '========= ERROR SUMMARY: 1 error';;
    memcheck) echo "========= ERROR SUMMARY: 0 errors";;
    synccheck) echo "========= ERROR SUMMARY: 1 error";;
    racecheck) sleep 60;;
esac
"""


@pytest.mark.parametrize(
    ("tool", "limit", "status", "verdict"),
    [
        ("memcheck", None, 0, "memcheck: clean"),
        ("synccheck", 60.0, 1, "synccheck: errors, see above"),
        ("initcheck", None, 1, "initcheck: UNINITIALIZED sum_kernel in push.py:8, 1 times\ninitcheck: errors"),
        ("racecheck", 0.2, 1, "racecheck: not done after 0.2 s"),
    ],
)
def test_a_tools_verdict(monkeypatch, tmp_path, capsys, tool, limit, status, verdict):
    program = tmp_path / "compute-sanitizer"
    program.write_text(TOOL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert sanitize.run(tool, ["all_reduce"], limit) == status
    printed = capsys.readouterr().out
    assert printed.strip().endswith(verdict)
    assert f"--tool {tool} " in printed
    assert ("--kernel-name" in printed) == (tool != "initcheck")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize(
    ("kernel", "least"),
    [
        (mla_hopper.mla_hopper_attention, 10),
        (gqa_hopper.gqa_hopper_attention, 10),
        (hopper_mm.hopper_mm_kernel, 4),
        (hopper_float8.hopper_float8_kernel, 1),
    ],
    ids=["mla", "gqa", "mm", "float8"],
)
def test_a_warpgroup_meets_before_it_announces(kernel, least):
    """What `sanitize.ORDERED` claims of a Hopper kernel, in its PTX.

    One thread arrives for its warpgroup: since the last barrier of all its threads, nobody may have accessed shared memory.
    """
    hopper = next(v for v in ahead.variants() if v.kernel is kernel)
    arrivals, met = 0, False
    for line in ahead.compiled(hopper, 90).asm["ptx"].splitlines():
        if re.search(r"\b(bar|barrier)\.sync\b", line):
            met = True
        elif re.search(r"\b(ld|st)\.shared\b|\b(ld|st)matrix\b|^\s*(\$L\S+:|bra\b|@%p\d+ bra\b)", line):
            met = False
        elif "mbarrier.arrive.shared" in line:
            arrivals += 1
            assert met, f"arrival {arrivals} without a barrier before it"
    assert arrivals >= least


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")
def test_copies_are_counted_before_their_warp_arrives():
    """As `sanitize.ORDERED` claims of rows' scales. A lane that arrived before another counted its copy would end the phase."""
    variant = next(v for v in hopper_float8.ahead() if v.constexprs["X_BLOCKS"])
    ptx = ahead.compiled(variant, 90).asm["ptx"]
    steps = re.findall(r"cp\.async\.ca|cp\.async\.mbarrier\.arrive(?:\.noinc)?|bar\.warp\.sync|arrive\.expect_tx", ptx)
    start = steps.index("cp.async.ca")
    assert "cp.async.ca" not in steps[start + 1 :]
    after = [step for step in steps[start:] if step != "bar.warp.sync"]
    assert after[:3] == ["cp.async.ca", "cp.async.mbarrier.arrive", "arrive.expect_tx"]
    counted, arrives = steps.index("cp.async.mbarrier.arrive"), steps.index("arrive.expect_tx")
    assert "bar.warp.sync" in steps[counted:arrives]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize(
    "name",
    [
        "attention, GQA 32/8 D128, 16 tree", "attention, GQA 64/8 D64, 1 causal", "add_skinny_mm, 4 x 4096",
        "add_skinny_mm, 16 x 4096", "add_skinny_mm, 32 x 4096", "topk_logits, 4 of 32000", "topk_logits, 8 of 128256",
    ],
)  # fmt: skip
def test_copies_of_a_sum_are_equal(name):
    """A sum that threads exchange (`shfl`) must not take a product into the same instruction.

    Each thread then rounds its own product less, copies of the sum differ, and which of them stays in shared memory is a race
    (triton-lang/triton#7264).
    """
    variant = next(v for v in ahead.variants() if v.name.startswith(name) and 90 in v.archs)
    exchanged: set[str] = set()
    for line in ahead.compiled(variant, 90).asm["ptx"].splitlines():
        if found := re.search(r"shfl\.sync\.bfly\.b32\s+(%\w+)", line):
            exchanged.add(found[1])
        elif found := re.search(r"fma\.rn\.f32\s+%\w+, (.*);", line):
            assert not exchanged & set(found[1].split(", ")), line
    assert exchanged


def test_a_name_of_no_case_is_refused_beside_one_that_has_cases(monkeypatch):
    monkeypatch.setattr("sys.argv", ["kernels", "topk", "rounding", "--device", "cpu"])
    monkeypatch.setattr(sanitize_kernels, "run_cases", lambda chosen, device: 0)
    with pytest.raises(SystemExit, match=r"no case has one of \['rounding'\] in its name"):
        sanitize_kernels.main()
