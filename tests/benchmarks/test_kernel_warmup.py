"""What `benchmarks/kernels` compiles in other processes before it measures: what will be launched, and what is told."""

from __future__ import annotations

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks
from benchmarks.kernels import report as kernel_report
from benchmarks.kernels import warmup
from benchmarks.kernels.cases import Batch, Case, Heads, select
from benchmarks.kernels.measure import FLEX, SDPA
from benchmarks.kernels.warmup import PAGES, call_once, short_cases, warm_up
from tests.helpers import forked

CPU = torch.device("cpu")
TYPES: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "kv_dtype": torch.float32}
SMALL = Case(Heads("gqa", 4, 2, 16, 16), Batch(2, 300, 300), 1, "causal")


def test_one_short_case_for_each_binary():
    cases = select(None, None, None, None, None, quick=False)
    found = short_cases(cases, 64)
    # Four kinds of heads, batches of 1, 8, 64 and 32 requests, and 1, 4, 16 queries and 16 in a tree.
    assert len(found) == len(set(found)) == 4 * 4 * 4
    assert {(c.heads, c.batch.bs, c.q_len, c.mask) for c in found} == {(c.heads, c.batch.bs, c.q_len, c.mask) for c in cases}
    assert {tuple(case.batch.lens()) for case in found if case.batch.bs == 1} == {(PAGES * 64,)}
    (unequal,) = short_cases([replace(SMALL, batch=Batch(3, 20, 70))], 64)
    assert unequal.batch.lens() == [max(Batch(3, 20, 70).lens())] * 3


def test_short_contexts_launch_the_binaries_of_long_ones():
    pytest.importorskip("triton", reason="triton comes for Linux only")
    from spec_ops.backends.triton.attention import launcher as steps
    from spec_ops.backends.triton.attention import tuning
    from spec_ops.backends.triton.attention import variants as ahead
    from spec_ops.backends.triton.attention.hopper import gqa as gqa_hopper
    from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
    from spec_ops.backends.triton.attention.hopper import mla_few as mla_hopper_few

    def binary(shape: ahead.Shape, case: Case, launcher: Any, **options: Any) -> tuple:
        """What Triton's cache looks a binary up by, and whether all programs must be resident."""
        call = ahead.call_of(shape, case.batch.bs, case.q_len, case.mask == "tree", pages=-(-case.batch.low // 64))
        (launch,) = ahead.launches_of(functools.partial(launcher, call, **options))
        made = ahead.variant_of("", launch, options.get("config", ahead.HOPPER), (90,), hot=True)
        return made.kernel, dict(made.signature), dict(made.constexprs), launch.options

    compared = 0
    for case in select(None, None, ["1x4096", "1x81920", "8x8192", "64x8192"], None, None, quick=False):
        heads = case.heads
        shape = ahead.Shape(
            "", heads.num_heads, heads.num_kv_heads if heads.kind == "gqa" else 0, heads.head_dim, heads.v_head_dim
        )
        rows = case.q_len * heads.num_heads // heads.num_kv_heads
        config = tuning.choose(90, heads.kind == "mla", heads.head_dim, heads.v_head_dim, 2, rows)
        launchers = [(steps.attention, {"config": config})]
        if heads.kind == "mla":
            launchers.append(((mla_hopper_few if rows <= mla_hopper_few.MAX_ROWS else mla_hopper).mla, {}))
        elif heads.head_dim == 64 and rows >= gqa_hopper.MIN_ROWS:
            launchers.append((gqa_hopper.mha, {}))
        (short,) = short_cases([case], 64)
        for launcher, options in launchers:
            assert binary(shape, short, launcher, **options) == binary(shape, case, launcher, **options)
            compared += 1
    assert compared > 64


def test_every_backend_is_called_on_every_case(monkeypatch):
    forking = forked.context()
    told: list[tuple[int, int, str]] = []
    settings: list[bool] = []
    monkeypatch.setattr(warmup, "find_binaries_where_inductor_does", lambda: settings.append(not told))
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: forking)  # here they need not spawn
    cases = [SMALL, replace(SMALL, batch=Batch(2, 900, 900)), replace(SMALL, q_len=4)]
    backends = ["reference", "torch-sdpa", "triton"]
    warm_up(cases, backends, 2, **TYPES, page_sizes=[16, 60], tick=lambda *what: told.append(what))
    # With pages of 16 two of the cases are one: 16 pages of them are no more than 300 tokens.
    assert [(done, total) for done, total, _ in told] == [(n, 10) for n in range(1, 11)]
    assert sorted(bool(refused) for *_, refused in told) == [False] * 5 + [True] * 5
    assert all("triton" in refused for *_, refused in told if refused)  # float32 on a CPU is not for it
    assert settings == [True]  # before any process began: they inherit the environment


def test_nothing_is_started_for_torchs_own_attention():
    sizes = [16, 64]
    warm_up([SMALL], [SDPA, FLEX], 10**6, **TYPES, page_sizes=sizes, tick=lambda *what: pytest.fail(f"called: {what}"))


def test_a_call_says_why_it_was_refused():
    assert call_once(SMALL, "reference", **TYPES, page_size=16) == ""
    assert "nonsense" in call_once(SMALL, "nonsense", **TYPES, page_size=16)


def test_the_command_compiles_first(monkeypatch):
    asked: list[Any] = []

    def noted(cases, backends, jobs, *, tick, **types):
        asked.append((len(cases), list(backends), jobs, types["page_sizes"]))
        tick(1, 1, "")

    def measured(cases, backends, **options):
        asked.append(("measured", options["page_size"]))
        return iter(())

    monkeypatch.setattr(kernel_report, "warm_up", noted)
    monkeypatch.setattr(kernel_report, "measure", measured)
    tiny = ["--device", "cpu", "--heads", "4/2:16", "--case", "1x64", "--q-len", "1", "--backend", "reference"]
    tiny += ["--copy-rate", "1e10", "--matmul-rate", "1e11"]
    for options in ([], ["--jobs", "3", "--page-size", "16", "--page-size", "64"]):
        result = CliRunner().invoke(benchmarks.app, ["kernels", *tiny, *options])
        assert result.exit_code == 0, result.output
    # All sizes of pages at once; nothing is compiled for a CPU unless asked for.
    assert asked == [("measured", 64), (1, ["reference"], 3, [16, 64]), ("measured", 16), ("measured", 64)]


@pytest.mark.gpu
def test_the_measuring_process_finds_the_binaries(monkeypatch, tmp_path):
    """That process is a new one: Triton asks for ptxas's version once, and earlier tests may have asked before Inductor
    changed it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # the processes inherit it
    cuda = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    cases = select("gqa", ["32/8"], ["3x4096"], [1, 4], ["causal"], quick=False)
    told: list[str] = []
    warm_up(cases, ["triton"], 2, **cuda, page_sizes=[64], tick=lambda done, total, refused: told.append(refused))
    assert told == ["", ""]
    compiled = set(tmp_path.rglob("*.cubin"))
    assert len(compiled) == 2
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for case in cases:
            assert pool.submit(call_once, case, "triton", **cuda, page_size=64).result() == ""
    assert set(tmp_path.rglob("*.cubin")) == compiled
