"""Launches that count values in shared memory: Triton's own beside it, and what a thread has to do, whatever the shape."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

from spec_ops.backends.triton.runtime import ahead  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Launch, Target, recorded  # noqa: E402
from spec_ops.backends.triton.sampling import support  # noqa: E402
from spec_ops.backends.triton.sampling.bins import BINS  # noqa: E402
from tests.helpers.selection import pairs, parametrize_pairs  # noqa: E402

COUNTED = [v for v in support.ahead() if v.estimated is not None]
# Rows that begin at multiples of 16 bytes, and rows that begin anywhere: layouts differ, and with them what threads exchange. A
# thread has 8 numbers of 16 bits at a time, or 4 of 32.
SHARE = [(v, 90) for v in COUNTED if v.name.endswith(("bf16, top_p", "fp32, top_p, odd vocabulary"))]
VOCABULARIES = [1, 97, 2048, 8191, 8192, 8193, 32_000, 50_257, 151_936, 262_144]


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        assert len(SHARE) == 2
        parametrize_pairs(metafunc, pairs(COUNTED), SHARE)


def test_bins_and_what_triton_allocates_fit_a_launch(variant, arch):
    """CUDA refuses a launch of more than 48 KB that did not ask for it, and Triton asks by what it allocates itself."""
    taken = ahead.lowered(variant, arch, "llir").shared_bytes
    assert taken + 4 * BINS.value <= 48 * 1024


def launched(rows: int, vocab: int, dtype: torch.dtype, which: str) -> Launch:
    """What a draw of `rows` rows would launch on an H100."""

    def setting(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        return torch.empty(rows, dtype=dtype, device="meta") if name in which else None

    numbers = torch.empty(rows, device="meta")
    with recorded(Target(90, 132)) as launches:
        logits = torch.empty(rows, vocab, dtype=dtype, device="meta")
        support.sample_logits(logits, numbers, numbers, setting("k", torch.int32), setting("p"), setting("m"))
    (launch,) = launches
    return launch


@pytest.mark.parametrize(
    ("rows", "dtype", "which", "counts", "num_warps"),
    [
        (31, torch.bfloat16, "p", False, 8),
        (32, torch.bfloat16, "p", True, 16),
        (32, torch.bfloat16, "kp", True, 16),
        (32, torch.bfloat16, "k", False, 8),
        (32, torch.float32, "pm", True, 16),
        (32, torch.float32, "kp", False, 8),
        (67, torch.float32, "kp", True, 16),  # more than half as many as there are multiprocessors
        (4, torch.bfloat16, "kp", False, 16),  # with 8 warps there would be two tiles a program
        (4, torch.bfloat16, "k", False, 8),
        (4, torch.bfloat16, "m", False, 8),
        (4, torch.float32, "p", False, 8),
        (1, torch.bfloat16, "p", False, 8),
    ],
)
def test_how_rows_are_divided_follows_what_was_measured(rows, dtype, which, counts, num_warps):
    launch = launched(rows, 128_256, dtype, which)
    assert (launch.arguments["COUNTS"], launch.options["num_warps"]) == (counts, num_warps)
    assert launch.arguments["CHUNKS"] == 1 or not counts


@pytest.mark.parametrize("which", ["", "k", "p", "m", "kp", "kpm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_launch_is_like_one_that_is_compiled_here(dtype, which):
    """No thread has more bins, or more of a list, than there: one warp with all of them spills 10 KB and takes minutes to
    compile beside others."""
    compiled = {(v.constexprs["ROWS"], v.constexprs["LANE"], v.constexprs["TILE"], v.num_warps) for v in COUNTED}
    counted = 0
    for rows, vocab in itertools.product([1, 31, 32, 133, 5000], VOCABULARIES):
        given, options = (launch := launched(rows, vocab, dtype, which)).arguments, launch.options
        shape = given["ROWS"], given["LANE"], given["TILE"], options["num_warps"]
        if given["COUNTS"]:
            counted += 1
            assert shape in compiled
            assert BINS.value <= 16 * 32 * options["num_warps"]
        assert options["num_warps"] >= 8
    assert (counted > 0) == (which not in ("", "m") or (which == "m" and dtype == torch.bfloat16))
