"""`python -m benchmarks tune`: the table as a file, classes and candidates, ranking, what `--write` changes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks

triton = pytest.importorskip("triton", reason="triton comes for Linux only")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from benchmarks.tune import compile as tune_compile  # noqa: E402
from benchmarks.tune import report as tune_report  # noqa: E402
from benchmarks.tune import search as tune  # noqa: E402
from benchmarks.tune import shapes as tune_shapes  # noqa: E402
from benchmarks.tune import table as tune_table  # noqa: E402
from benchmarks.tune.compile import Outcome  # noqa: E402
from benchmarks.tune.shapes import MAX_CANDIDATES, ShapeClass  # noqa: E402
from spec_ops.backends.triton.attention import tuning  # noqa: E402
from spec_ops.backends.triton.attention.tuning import Config, Entry  # noqa: E402
from spec_ops.backends.triton.runtime.ahead import ARCHS, Resources  # noqa: E402

LEAN = Resources(64, 1024, 0, 0)
EVERY = [shape for arch in ARCHS for shape in tune_shapes.classes(tuning.table(), arch)]
compiled_kernels = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)


def shape_named(name: str, arch: int = 90, entries: tuple[Entry, ...] | None = None) -> ShapeClass:
    (found,) = tune_shapes.select(tune_shapes.classes(entries or tuning.table(), arch), [name])
    return found


# ---- the table ----


def test_table_round_trips(tmp_path):
    tune_table.write(tuning.table(), tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == tuning.PATH.read_text()
    assert tuning.read(tmp_path / "t.json") == tuning.table()
    # Everything that an entry can hold, the options that no entry has now included.
    config = Config(16, 32, 2, 3, 1, 4, False, False, boxes=True)
    odd = Entry("split", "gqa", None, 16, (90, 90), config, "some GPU, triton 3", 1, 0, 16)
    tune_table.write([odd], tmp_path / "odd.json")
    assert tuning.read(tmp_path / "odd.json") == (odd,)


@pytest.mark.parametrize("entry", tuning.table(), ids=lambda e: f"{e.class_name} on {e.arch}")
def test_entry_is_chosen_where_it_says_and_fits(entry):
    """On the architectures of its range, or those of them that have an entry of their own; it fits on at least one as it is."""
    mla = entry.attention == "mla"
    head_dim, v_dim = (576, 512) if mla else (entry.head_dim or 256,) * 2
    choose = tuning.choose if entry.kernel == "split" else tuning.choose_ragged
    fits = []
    for arch in (a for a in ARCHS if entry.arch[0] <= a <= entry.arch[1]):
        rows = entry.rows or 4096
        item, window, page = entry.kv_bytes or 2, -1 if entry.window is None else entry.window, entry.page or 64
        found = tuning.lookup(tuning.table(), entry.kernel, entry.attention, arch, head_dim, rows, item, window, page)
        assert found.class_name == entry.class_name
        if found == entry:
            config = choose(arch, mla, head_dim, v_dim, item, rows, *([window, page] if entry.kernel == "split" else []))
            assert config == tuning.fitted(entry.config, arch, mla, head_dim, v_dim, item)
            fits.append(config == entry.config)
    assert any(fits)


def test_choices_measured_before_the_table_was_a_file():
    """By hand: on Hopper, by rows; the range of other architectures; shapes between and above the classes."""
    assert tuning.choose(90, False, 128, 128, 2, 4) == Config(16, 64, 2, 3, 2)
    assert tuning.choose(90, False, 80, 80, 2, 17) == Config(32, 64, 4, 3, 2)
    assert tuning.choose(90, False, 64, 64, 2, 128) == Config(128, 64, 4, 3, 2)
    assert tuning.choose(89, False, 64, 64, 2, 4096) == Config(128, 64, 4, 3, 1, tma=False)  # 99 KiB; no descriptors
    assert tuning.choose(103, False, 64, 64, 2, 4096) == Config(128, 32, 8, 6, 1)
    assert tuning.choose(90, False, 256, 256, 2, 33) == Config(64, 32, 4, 3, 1)
    assert tuning.choose(120, False, 64, 64, 2, 16) == Config(16, 32, 2, 3, 2)
    assert tuning.choose(90, True, 576, 512, 2, 17) == Config(64, 64, 8, 2, 1)
    assert tuning.choose(100, True, 576, 512, 2, 17) == Config(64, 32, 8, 2, 1)
    assert tuning.choose(120, True, 576, 512, 2, 64) == Config(16, 16, 8, 3, 1)
    assert tuning.choose(90, False, 128, 128, 1, 4) == Config(16, 64, 2, 3, 4)
    assert tuning.choose(90, True, 576, 512, 1, 64) == Config(32, 64, 8, 3, 1)
    assert tuning.choose(90, False, 64, 64, 2, 128, 128) == Config(64, 32, 4, 4, 2)
    assert tuning.choose(90, False, 64, 64, 2, 128, 129) == Config(64, 64, 4, 4, 2)
    assert tuning.choose(90, False, 64, 64, 2, 128, 4096) == Config(128, 64, 4, 3, 2)
    assert tuning.choose_ragged(90, False, 128, 128, 2, 65) == Config(128, 64, 8, 3, 1)
    assert tuning.choose_ragged(86, False, 128, 128, 2, 64) == Config(64, 64, 4, 2, 1, tma=False)
    assert tuning.choose_ragged(90, False, 256, 256, 2, 16) == Config(64, 32, 4, 2, 1)


def test_lookup_prefers_small_classes_then_few_architectures():
    def entry(head_dim, rows, arch, block_n, kv_bytes=None, window=None, page=None):
        return Entry("split", "gqa", head_dim, rows, arch, Config(16, block_n, 1, 2, 1), "", kv_bytes, window, page)

    entries = [entry(None, None, (0, 999), 16), entry(128, 16, (0, 119), 32), entry(128, 16, (90, 90), 64)]
    # Those for some calls of a class come before those for all of it, whatever their architectures; windows before caches.
    some = [*entries, entry(128, 16, (0, 119), 8, kv_bytes=1), entry(128, 16, (0, 119), 4, window=64)]
    some += [entry(128, 16, (0, 119), 2, window=8)]
    calls = ((2, -1), (1, -1), (2, 65), (2, 64), (2, 9), (2, 8), (1, 0), (1, 65))
    chosen = [tuning.lookup(some, "split", "gqa", 90, 128, 16, *call).config.block_n for call in calls]
    assert chosen == [64, 8, 64, 4, 4, 2, 2, 8]
    # Pages after windows, before caches; each size is its own class.
    some += [entry(128, 16, (0, 119), 1, page=16), entry(128, 16, (0, 119), 3, kv_bytes=2, page=16)]
    calls = ((2, -1, 16), (1, -1, 16), (2, -1, 32), (2, 8, 16), (2, 65, 16))
    chosen = [tuning.lookup(some, "split", "gqa", 90, 128, 16, *call).config.block_n for call in calls]
    assert chosen == [3, 1, 64, 2, 3]
    assert tuning.lookup(some, "split", "gqa", 90, 128, 17, 1, 0).config.block_n == 16  # of a larger class

    def block_n(arch, head_dim, rows):
        return tuning.lookup(entries, "split", "gqa", arch, head_dim, rows).config.block_n

    assert [block_n(90, 128, 16), block_n(100, 128, 16), block_n(120, 128, 16)] == [64, 32, 16]
    assert [block_n(90, 129, 16), block_n(90, 128, 17), block_n(90, 16, 1)] == [16, 16, 64]
    with pytest.raises(ValueError, match="entry for the split kernel with mla on sm_90, head_dim 576, 16 rows, got none"):
        tuning.lookup(entries, "split", "mla", 90, 576, 16)


# ---- classes and candidates ----


def test_classes_are_those_of_the_table():
    assert {str(s) for s in tune_shapes.classes(tuning.table(), 90)} == {
        *(f"split/gqa/{d}/{rows}" for d in (64, 128, "any") for rows in (16, 32, 64, "more")),
        *(f"split/mla/any/{rows}" for rows in (16, "more", "more/fp8")),
        *(f"split/gqa/{name}/fp8" for name in ("64/32", *(f"128/{n}" for n in (16, 64, "more")))),
        *(f"split/gqa/any/{rows}/fp8" for rows in (16, 32, 64, "more")),
        *(f"split/gqa/64/more/window-{n}" for n in (128, 1024)),
        *(f"split/gqa/{d}/16/pages-{n}" for d, n in ((64, 1), (64, 16), (64, 32), (128, 16), (128, 32))),
        *("ragged/gqa/128/64", "ragged/gqa/128/more", "ragged/gqa/any/more", "ragged/mla/any/16", "ragged/mla/any/more"),
    }
    assert "split/gqa/64/16" not in {str(s) for s in tune_shapes.classes(tuning.table(), 120)}


@pytest.mark.parametrize("shape", EVERY, ids=lambda s: f"{s} on sm_{s.arch}")
def test_cases_lie_in_their_class(shape):
    heads, group = shape.heads, shape.heads.num_heads // shape.heads.num_kv_heads
    assert shape.cases()
    for case in shape.cases():
        assert case.q_len <= min(case.batch.lens())
        kernel, attention = shape.entry.kernel, shape.entry.attention
        call = shape.arch, heads.head_dim, case.q_len * group, shape.kv_dtype.itemsize, case.window, shape.page_size
        assert tuning.lookup(tuning.table(), kernel, attention, *call) == shape.entry


@pytest.mark.parametrize("shape", EVERY, ids=lambda s: f"{s} on sm_{s.arch}")
def test_candidates_are_bounded_and_fit(shape):
    candidates, heads = shape.candidates(), shape.heads
    assert candidates[0] == shape.present
    narrow = shape.arch < 90 or (shape.arch == 120 and heads.head_dim >= 256)  # 99 KiB leave little choice for wide heads
    least = 1 if narrow else 4
    assert least < len(candidates) == len(set(candidates)) <= MAX_CANDIDATES
    for config in candidates:
        assert (
            tuning.fitted(config, shape.arch, heads.kind == "mla", heads.head_dim, heads.v_head_dim, shape.kv_dtype.itemsize)
            == config
        )
        # The options that are not searched stay.
        assert (config.min_blocks, config.tma, config.cooperative) == (1, shape.arch >= 90, True)
    nearest = candidates[1:]
    searched = [f.name for f in dataclasses.fields(Config) if f.compare]
    changed = [sum(getattr(shape.present, name) != getattr(c, name) for name in searched) for c in nearest]
    assert min(changed) == 1


def test_select():
    shapes = tune_shapes.classes(tuning.table(), 90)
    assert tune_shapes.select(shapes, None) == shapes
    assert [str(s) for s in tune_shapes.select(shapes, ["split/mla", "split/gqa/64/16"])] == [
        "split/gqa/64/16", "split/mla/any/16", "split/mla/any/more", "split/mla/any/more/fp8",
    ]  # fmt: skip
    # A class that is the beginning of others' names is meant alone.
    assert [str(s) for s in tune_shapes.select(shapes, ["split/gqa/64/more"])] == ["split/gqa/64/more"]
    assert len(tune_shapes.select(shapes, ["split/gqa/64"])) == 10
    with pytest.raises(ValueError, match=r"must name a class or begin one, as in \['split/gqa/64/16', .*got 'split/gqa/6'"):
        tune_shapes.select(shapes, ["split/gqa/6"])


# ---- compiling ----


@pytest.fixture
def hopper_driver(monkeypatch):
    """Lets Triton compile for sm_90 without a GPU."""

    class Driver(NamedTuple):
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    before = driver._active
    driver.set_active(Driver())
    yield
    driver._active = before


@compiled_kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="would leave binaries of another driver in the kernel's cache")
def test_candidate_is_compiled(hopper_driver):
    shape = shape_named("ragged/gqa/128/64")
    outcome = tune_compile.compile_candidate(shape, shape.present)
    assert outcome.refused == ""
    assert 64 < outcome.used.registers <= 255
    assert 64 * 1024 < outcome.used.shared_bytes <= 227 * 1024
    broken = dataclasses.replace(shape.present, block_n=48)
    assert tune_compile.compile_candidate(shape, broken).refused.startswith("does not compile: ")


def test_binaries_of_a_class():
    """Decode and verify at each batch size of the split kernel; the ragged kernel takes any number of requests."""
    shape = shape_named("split/gqa/128/16")
    assert sorted((c.batch.bs, c.q_len) for c in tune_compile.variants(shape.cases())) == [
        (1, 1), (1, 4), (8, 1), (8, 4), (64, 1), (64, 4),
    ]  # fmt: skip
    launch = tune_compile.launch_of("split", shape.cases()[-1], shape.present)
    assert launch.arguments["COOPERATIVE"] is launch.options["launch_cooperative_grid"] is True
    assert launch.arguments["BS"] == 64
    ragged = shape_named("ragged/mla/any/16")
    assert "launch_cooperative_grid" not in tune_compile.launch_of("ragged", ragged.cases()[0], ragged.present).options


@pytest.mark.parametrize(
    ("name", "bs", "used", "reason"),
    [
        ("split/gqa/128/16", 8, LEAN, ""),
        ("split/gqa/128/16", 8, LEAN._replace(spill_bytes=8), "spills: 8 bytes for 8 requests"),
        ("split/gqa/128/16", 64, LEAN._replace(spill_bytes=8), ""),  # before the loop, for the vectors of lengths
        ("split/gqa/128/16", 64, LEAN._replace(spill_bytes=8, loop_spills=1), "spills: 8 bytes for 64 requests"),
        ("split/gqa/128/16", 64, LEAN._replace(spill_bytes=8, loop_spills=None), "spills: 8 bytes for 64 requests"),
        ("split/mla/any/more", 1, LEAN._replace(spill_bytes=8), ""),  # not hot
        ("split/gqa/128/16", 1, LEAN._replace(shared_bytes=120000), "too many programs: 1 fit"),
        ("split/gqa/128/64", 1, LEAN._replace(serialized=True), "each wgmma waits"),
        ("ragged/gqa/128/64", 1, LEAN._replace(shared_bytes=240000), "too much shared memory: 240000 bytes of 232448"),
    ],
)
def test_verdict(name, bs, used, reason):
    shape = shape_named(name)
    found = tune_compile.verdict(used, shape, shape.present, bs)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_classes_and_configs_reach_other_processes():
    shape = shape_named("split/mla/any/more")
    with tune_compile.compiling([shape], 1, ShapeClass._fitted) as submitted:
        for config in shape.candidates():
            assert submitted[str(shape), config].result(60) == config


# ---- ranking ----

A, B, C = (Config(16, n, 2, 3, 2) for n in (32, 64, 128))


def test_rank_is_by_geometric_mean_over_the_best_of_each_case():
    """A long case counts no more than a short one: B loses little in the long case, A a half in the short one."""
    times = {A: {"short": 15.0, "long": 1000.0}, B: {"short": 10.0, "long": 1100.0}, C: {"short": 5.0}}
    first, second = tune.rank(times)  # C has no time in one case, and is no case's best
    assert (first.config, second.config) == (B, A)
    assert first.relative == pytest.approx(math.sqrt(1.1))
    assert first.worst == pytest.approx(1.1)
    assert second.relative == pytest.approx(math.sqrt(1.5))
    assert tune.rank({}) == tune.rank({A: {}}) == []


def result_of(us: dict[Config, float], refused: set[Config] = frozenset(), failures: dict | None = None) -> tune.Result:
    shape = shape_named("split/gqa/128/16")
    outcomes = {c: Outcome(LEAN, "spills: 8 bytes" if c in refused else "") for c in (*us, *(failures or {}))}
    return tune.Result(shape, outcomes, {c: {"case": t} for c, t in us.items()}, failures or {}, 1.0)


def test_choice():
    present = shape_named("split/gqa/128/16").present
    assert present == B
    assert result_of({A: 9.0, B: 10.0}).choice == A
    assert result_of({A: 9.9, B: 10.0}).choice == B  # within what two runs of one kernel differ by
    assert result_of({A: 8.0, B: 10.0, C: 9.0}, {A}).choice == C  # the fastest spills
    assert result_of({A: 9.0, B: 10.0}, {A, B}).choice == B  # nothing is allowed: stays
    assert result_of({A: 12.0, B: 10.0}, {B}).choice == B  # what stands there spills, and is the fastest
    assert result_of({A: 9.0}, failures={B: "RuntimeError: no"}).choice == A
    assert result_of({}, failures={B: "RuntimeError: no"}).choice == B


# ---- the command ----


@pytest.fixture
def fakes(monkeypatch):
    """Threads for processes, resources and times for a GPU: 32 keys take 10 us, others 12, one launch fails."""
    monkeypatch.setattr(tune_compile, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    asked: list[tuple[str, Config]] = []

    def compiled(shape, config):
        return Outcome(LEAN, "spills: 4 bytes" if config.num_warps == 1 else "")

    def measure(shape, configs, repeats, tick):
        asked.extend((str(shape), config) for config in configs)
        failed = next(c for c in configs if c.block_n == 64 and c != shape.present)
        times = {c: {str(case): 10.0 + 2 * (c.block_n != 32) for case in shape.cases()} for c in configs if c != failed}
        for _ in range(len(configs) * len(shape.cases())):
            tick()
        return times, {failed: "RuntimeError: no"}

    monkeypatch.setattr(tune_compile.compiling.__wrapped__, "__defaults__", (compiled,))
    monkeypatch.setattr(tune.tune_class, "__defaults__", (measure,))
    return asked


def test_write_changes_the_class_asked_for_on_this_architecture_alone(fakes, tmp_path):
    path, out = tmp_path / "tuning.json", tmp_path / "out.json"
    tune_table.write(tuning.table(), path)
    shape = shape_named("split/gqa/128/16")
    with (tmp_path / "log").open("w") as log:
        console = Console(file=log, width=200)
        (result,) = tune_report.tune(console, [shape], 2, 3, out, path)
    assert result.choice.block_n == 32
    assert result.choice.num_warps > 1
    assert {name for name, _ in fakes} == {"split/gqa/128/16"}
    assert all(config.num_warps > 1 for _, config in fakes)  # what spills is not timed
    before, after = tuning.table(), tuning.read(path)
    (new,) = set(after) - set(before)
    assert [e for e in after if e != new] == list(before)
    assert (new.class_name, new.arch, new.config) == ("split/gqa/128/16", (90, 90), result.choice)
    assert "triton" in new.measured
    for arch in (80, 89, 90, 100, 120):
        for head_dim, rows in ((64, 16), (80, 16), (128, 16), (128, 17), (129, 16)):
            old, now = (tuning.lookup(t, "split", "gqa", arch, head_dim, rows).config for t in (before, after))
            asked = arch == 90 and 64 < head_dim <= 128 and rows <= 16
            assert now == (new.config if asked else old)
    # A second run on another class of the written table replaces nothing, on the same class its own entry.
    again = shape_named("split/gqa/128/16", entries=after)
    assert again.present == new.config
    third = tune_table.with_choice(after, again.entry, 90, A, "now")
    assert len(third) == len(after)
    assert tuning.lookup(third, "split", "gqa", 90, 128, 16).config == A

    text = (tmp_path / "log").read_text()
    assert "split/gqa/128/16" in text
    assert "present" in text
    assert "1 RuntimeError" in text
    assert "+20.0%" in text  # of the present config
    written = json.loads(out.read_text())
    rows = {Config(**{k: row[k] for k in Config.__dataclass_fields__}): row for row in written["rows"]}
    assert set(rows) == set(shape.candidates())
    assert rows[shape.present]["present"]
    assert rows[shape.present]["relative"] == 1.2
    assert rows[result.choice]["chosen"]
    assert rows[result.choice]["us"] == {str(case): 10.0 for case in shape.cases()}
    assert {row.get("refused") for row in rows.values()} == {None, "spills: 4 bytes", "RuntimeError: no"}
    assert written["environment"]["commit"]


def test_nothing_is_written_unless_asked(fakes, tmp_path):
    before = tuning.PATH.read_bytes()
    with (tmp_path / "log").open("w") as log:
        (result,) = tune_report.tune(Console(file=log), [shape_named("split/gqa/128/32")], 2, 3, None, None)
    assert result.choice != result.shape.present
    assert tuning.PATH.read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_command_says_so():
    shown = CliRunner().invoke(benchmarks.app, ["tune"])
    assert shown.exit_code == 2
    assert "no CUDA device is available" in " ".join(shown.output.replace("│", " ").split())


def test_bad_options(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("spec_ops.backends.registry.device_arch", lambda device: 90)
    run = CliRunner().invoke
    shown = run(benchmarks.app, ["tune", "--list", "--class", "split/mla"])
    assert shown.exit_code == 0
    assert "classes of sm_90" in shown.output
    shown = run(benchmarks.app, ["tune", "--class", "gqa"])
    assert shown.exit_code == 2
    assert "must name a class" in " ".join(shown.output.split())
    assert run(benchmarks.app, ["tune", "--table", str(tmp_path / "none.json")]).exit_code == 2


# ---- on a GPU ----


@compiled_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["split/gqa/64/16", "ragged/gqa/128/64"])
def test_measured_on_a_gpu(name, monkeypatch):
    """What other processes compile is what this one launches: measuring compiles nothing more. Its results are right."""
    from benchmarks.kernels.cases import Batch
    from spec_ops.backends.registry import device_arch

    monkeypatch.setattr(tune_shapes, "BATCHES", (Batch(1, 1024, 1024), Batch(8, 1024, 1024)))
    monkeypatch.setattr(tune_shapes, "RAGGED_BATCHES", tune_shapes.BATCHES)
    shape = shape_named(name, device_arch(torch.device("cuda")))
    configs = shape.candidates()[:2]
    kernel = tune_compile.launch_of(shape.entry.kernel, shape.cases()[0], shape.present).kernel
    outcomes = {config: tune_compile.compile_candidate(shape, config) for config in configs}
    assert not outcomes[shape.present].refused
    device = torch.cuda.current_device()
    compiled = len(kernel.device_caches[device][0])
    ticks: list[None] = []
    times, failures = tune.measure_class(shape, configs, 3, lambda: ticks.append(None))
    assert len(kernel.device_caches[device][0]) == compiled
    assert failures == {}
    assert len(ticks) == len(configs) * len(shape.cases())
    assert all(len(found) == len(shape.cases()) and min(found.values()) > 1 for found in times.values())
