"""The weights that `benchmarks.skinny_mm` measures."""

from __future__ import annotations

import json
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch._dynamo.testing

from benchmarks import skinny_mm, stored_mm
from benchmarks.published import products
from benchmarks.round.shapes import SHAPES
from benchmarks.timing import Ceilings
from spec_ops.backends.weight_format import dequantized, weight_format
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.parallel import TensorParallel, shard
from spec_ops.passes import PassManager, explain
from spec_ops.passes.analysis.graph import calls, value


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tensor", ("float8", 200, 256)),
        ("row", ("float8", 1, 256)),
        ("block", ("float8", 128, 128)),
        ("int4", ("int4", 1, 128)),
        ("nvfp4", ("nvfp4", 1, 16)),
        ("mxfp4", ("mxfp4", 1, 32)),
    ],
)
def test_weights_are_of_a_format_and_near_what_they_store(kind, expected):
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    parts = stored_mm.stored(weight, kind)
    assert weight_format("op", *parts) == expected
    lost = (dequantized(*parts) - weight).square().mean().sqrt()
    assert 0 < lost < (0.12 if "4" in kind else 0.03)


@pytest.mark.slow
def test_weights_of_a_share_are_those_of_its_rounds():
    """Each product of two ranks' round, and no other."""
    ranks = TensorParallel.fake(2)
    whole, head = SHAPES["llama-8b"].with_layers(1).build("meta", torch.bfloat16)
    target = shard(whole, ranks)
    draft = shard(head, ranks, target=target)
    found: set[tuple[int, ...]] = set()
    run = PassManager.__call__

    def noted(manager: PassManager, graph: torch.fx.Graph) -> None:
        found.update(tuple(reversed(value(node.args[1]).shape)) for node in calls(graph, torch.ops.aten.mm.default))
        run(manager, graph)

    with mock.patch.object(PassManager, "__call__", noted), torch.no_grad():
        torch._dynamo.reset()
        explain(Generator(target, draft, SpeculationConfig(1), max_batch_size=1, max_seq_len=64).round(1), arch=90)
    weights = skinny_mm.weights_of("llama-8b", 2)
    assert found == set(weights)
    assert weights[4096, 2048] == ["llama-8b, 2: o_proj", "llama-8b's draft, 2: o_proj"]


def test_what_a_rule_does_stands_beside_what_was_measured():
    def row(n: int, k: int, m: int, gain: float) -> dict:
        return {"n": n, "k": k, "m": m, "us": 10.0, "torch_us": 10 * gain}

    rows = [row(4096, 4096, 1, 1.2), row(4096, 4096, 16, 1.1), row(4096, 4096, 32, 0.9), row(2048, 2048, 4, 1.3)]
    rows += [row(64, 64, 128, 1.0), row(64, 64, 4, 1.0) | {"weights": "int4"}]
    assert skinny_mm.verdicts(rows) == [
        "4096 x 4096: to 16 rows 1.10 to 1.20 times, replaced; to 32 rows 0.90 to 0.90 times, replaced",
        "2048 x 2048: to 16 rows 1.30 to 1.30 times, k is less than 3072 or no multiple of 256",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-8b", "--shape", "64", "64"], "give --shape or --model, not both"),
        (["--jobs", "-1"], "--jobs must be at least 0, got -1"),
        (["--model", "tiny", "--tp", "3"], "--tp 3, tiny: shard: `num_heads` must be a multiple of the 3 ranks, got 4"),
        (["--model", "tiny", "--tp", "0"], "--tp 0, tiny: TensorParallel: `size` must be an int of at least 1, got 0"),
    ],
)
def test_mistakes(monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["skinny_mm", *options])
    with pytest.raises(SystemExit) as stopped:
        skinny_mm.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("k", [256, 320])
def test_what_torchs_own_int4_kernel_is_given(k):
    """The same weights: numbers from 0 to 15, the even column in the high half of a byte."""
    parts = stored_mm.stored(torch.randn(48, k, generator=torch.Generator().manual_seed(0)), "int4")
    numbers, scales = stored_mm.int4pack_parts(*parts[:3])
    group = k // scales.shape[0]
    halves = torch.stack([numbers >> 4, numbers & 15], 2).flatten(1).float() - 8
    scale, zero = (scales[..., i].t().float().repeat_interleave(group, 1) for i in (0, 1))
    assert torch.equal(halves * scale + zero, dequantized(*parts))


@pytest.mark.parametrize("kind", ["row", "tensor"])
def test_what_scaled_mm_is_given(kind):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 256, generator=g).bfloat16(), torch.randn(32, 256, generator=g)
    data, scale, *_ = stored_mm.stored(weight, kind)
    got, want = stored_mm.scaled_mm(x, data, scale, kind), x.float() @ dequantized(data, scale).t()
    assert (got.float() - want).norm() < 0.05 * want.norm()


def test_rows_in_blocks():
    """A scale for 128 columns of a row; they lie column by column, as `torch._scaled_mm` asks for."""
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 128:256] *= 100
    rounded, scale = stored_mm.rounded_rows(x, "block")
    assert (scale.shape, scale.stride()) == ((5, 3), (1, 5))
    wide = rounded.float().unflatten(1, (3, 128)) * scale[..., None]
    assert (wide.flatten(1) - x.float()).norm() < 0.05 * x.float().norm()
    assert torch.equal(rounded.float().unflatten(1, (3, 128)).abs().amax(2), torch.full((5, 3), 448.0))


def test_rows_are_rounded_by_few_compilations():
    """Torch keeps eight for a function, and runs it uncompiled after: then its time would not be a user's."""
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(stored_mm.rounded_rows, dynamic=True, backend=counted)
    for kind in ("row", "tensor", "block"):
        for m in skinny_mm.ROWS:
            for k in sorted({k for _, k in skinny_mm.SHAPES if k % 128 == 0}):
                x = torch.randn(m, k)
                got = compiled(x, kind)
                assert all(torch.equal(*pair) for pair in zip(got, stored_mm.rounded_rows(x, kind), strict=True))
    assert counted.frame_count <= 8


@pytest.fixture
def on_cpu(monkeypatch):
    """What is measured, with a reference in the place of our kernel and clocks in that of graphs. Nothing is built for CPUs."""
    kernels = pytest.importorskip("spec_ops.backends.triton.linear.skinny_mm", reason="triton comes for Linux only")

    def product(x, weight, bias, *scales):
        return x @ dequantized(weight, *scales).to(x.dtype).t()

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(stored_mm, "DEVICE", "cpu")
    monkeypatch.setattr(stored_mm, "COLD_BYTES", 1)
    monkeypatch.setattr(kernels, "skinny_mm", product)


@pytest.mark.parametrize("kind", ["block", "int4", "mxfp4"])
def test_rows_of_a_weight(on_cpu, kind):
    torch_us = {1: 12.5}
    rows = list(stored_mm.measure([1, 4], 64, 256, kind, 1e12, torch_us))
    assert [(row["m"], row["weights"], row["n"], row["k"]) for row in rows] == [(1, kind, 64, 256), (4, kind, 64, 256)]
    assert [row["torch_us"] for row in rows] == [12.5, torch_us[4]]  # one of them was known
    moved = {"block": 64 * 256 + 4 * 2, "int4": 64 * 128 + 2 * 2 * 64 * 2, "mxfp4": 64 * 128 + 64 * 8}[kind]
    assert [row["floor_us"] for row in rows] == [round((moved + 2 * m * (64 + 256)) / 1e6, 2) for m in (1, 4)]
    assert all(0.9 < row["error_over_torch"] < 1.1 for row in rows)
    # Rows of 8 bits have no kernel of torch here; with those that it rounds, our product loses more.
    assert all(("float8_mm_us" in row) == (kind == "block") for row in rows)
    assert all(row.get("float8_mm_error", 2.0) > 1.5 for row in rows)
    other = {"block": "scaled_mm", "int4": "int4pack"}.get(kind)  # which CPUs do not have, or have
    assert all((f"{other}_us" in row) != (other in row.get("refused", {})) for row in rows if other)
    assert all("refused" not in row for row in rows if other is None)


def test_rows_that_the_kernel_does_not_take_are_left_out(on_cpu):
    for k in (192, 256):
        rows = stored_mm.measure([64, 128, 129], 64, k, "int4", 1e12, {64: 1.0, 128: 1.0})
        assert [row["m"] for row in rows] == [64, 128]


def test_the_summary():
    row = {"n": 64, "k": 128, "m": 1, "weights": "row", "floor_us": 5.0, "us": 10.0, "torch_us": 30.0, "scaled_mm_us": 9.5}
    rows = [row, row | {"n": 32, "us": 8.0}, row | {"m": 4, "us": 20.0, "torch_us": 19.0}]
    rows += [row | {"weights": "int4", "refused": {"int4pack": "RuntimeError: no"}}, {"n": 64, "k": 128, "m": 1, "us": 1.0}]
    rows[3].pop("scaled_mm_us")
    assert [line.split() for line in stored_mm.summary(rows)[1:4]] == [
        ["rows", "1", "4"], ["row", "0.50", "to", "0.62", "0.25", "to", "0.25"], ["int4", "0.50", "to", "0.50"],
    ]  # fmt: skip
    assert stored_mm.summary(rows)[4:] == [
        "torch is faster in 1 of 4:",
        "  64 x 128 row, 4 rows: 19.0 of our 20.0 us",
        "scaled_mm is faster in 2 of 3:",
        "  64 x 128 row, 1 rows: 9.5 of our 10.0 us",
        "  64 x 128 row, 4 rows: 9.5 of our 20.0 us",
        "refused: int4pack with int4: RuntimeError: no",
    ]


def test_the_file_is_written_as_rows_come(monkeypatch, tmp_path):
    """What was measured is in it when a later weight fails."""

    def measured(rows, n, k, kind, copy, torch_us):
        if kind == "int4":
            raise RuntimeError("cut off")
        yield {"n": n, "k": k, "m": 1, "weights": kind, "us": 2.0, "torch_us": 3.0, "floor_us": 1.0}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(stored_mm, "measure", measured)
    file = tmp_path / "rows.json"
    options = ["--shape", "64", "128", "--weights", "row", "int4", "--copy-rate", "1e12", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["skinny_mm", *options])
    monkeypatch.setattr(skinny_mm, "measure_ceilings", lambda *args, copy, matmul: Ceilings(copy, matmul))
    with pytest.raises(RuntimeError, match="cut off"):
        skinny_mm.main()
    found = json.loads(file.read_text())
    assert [(row["weights"], row["us"]) for row in found["rows"]] == [("row", 2.0)]
    assert found["copy_rate"] == 1e12


def test_the_published_table(tmp_path):
    row = {"n": 4096, "k": 4096, "m": 1, "floor_us": 5.0, "torch_us": 30.0, "error_over_torch": 1.01}
    rows = [
        row | {"weights": "row", "us": 10.0, "scaled_mm_us": 20.0},
        row | {"weights": "int4", "us": 8.0, "int4pack_us": 7.0},
    ]
    rows += [row | {"weights": "row", "m": 4, "us": 10.0, "scaled_mm_us": 15.0}, row | {"us": 10.0}]
    rows += [row | {"weights": "row", "n": 64, "us": 10.0}]  # not shown
    (tmp_path / f"{products.FILE}.json").write_text(json.dumps({"rows": rows}))
    text = products.products(tmp_path)
    assert "| 4096 x 4096 | row | 1 | 5.0 | 10.0 | 0.50 | 30 | 20 |  |" in text
    assert "| 4096 x 4096 | int4 | 1 | 5.0 | 8.0 | 0.62 | 30 |  | 7.0 |" in text
    assert text.count("| 4096 x 4096 |") == 2
    assert "| 64 x " not in text
    assert "mslk" not in text
    assert "torch._scaled_mm takes 1.5 to 2.0 times as long as ours, which is faster in 2 of 2 cases" in " ".join(text.split())
    assert "torch's int4 takes 0.88 times as long as ours, which is faster in 0 of 1 cases" in " ".join(text.split())
