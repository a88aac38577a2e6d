"""What `benchmarks/tune` times, run by Triton's interpreter in float32: results are right, and a wrong one has no time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.kernels.cases import Batch, Heads
from benchmarks.tune import search as tune
from benchmarks.tune import shapes as tune_shapes
from spec_ops.backends.triton.attention import launcher as steps
from spec_ops.backends.triton.attention import tuning


@pytest.fixture
def small(monkeypatch):
    # The reference's own error bounds the others'. In float32 it is a matter of chance: for one draw in ten it is too small.
    torch.manual_seed(0)
    for module in (tune, tune_shapes):
        monkeypatch.setattr(module, "DTYPE", torch.float32)  # numpy has no bfloat16
    monkeypatch.setattr(tune_shapes, "BATCHES", (Batch(2, 100, 100),))
    monkeypatch.setattr(tune_shapes, "RAGGED_BATCHES", tune_shapes.BATCHES)
    monkeypatch.setattr(tune_shapes, "PREFILL", 24)
    monkeypatch.setattr(tune_shapes, "HEADS", {64: Heads("gqa", 2, 1, 64, 64), None: Heads("gqa", 2, 1, 64, 64)})
    monkeypatch.setattr(tune_shapes, "MLA_HEADS", dict.fromkeys((16, None), Heads("mla", 4, 1, 576, 512)))


@pytest.mark.parametrize(
    "name",
    [
        *("split/gqa/64/16", "split/gqa/64/64", "split/mla/any/16", "ragged/gqa/128/64", "ragged/mla"),
        *("split/gqa/64/32/fp8", "split/gqa/64/more/window-128"),
    ],
)
def test_classes_are_measured(small, name):
    for shape in tune_shapes.select(tune_shapes.classes(tuning.table(), 90), [name]):
        other = dataclasses.replace(shape.present, block_n=32)
        ticks: list[None] = []
        times, failures = tune.measure_class(shape, [shape.present, other], 1, lambda ticks=ticks: ticks.append(None), "cpu")
        assert failures == {}
        assert len(ticks) == 2 * len(shape.cases())
        assert all(set(found) == {str(case) for case in shape.cases()} for found in times.values())
        assert {r.config for r in tune.rank(times)} == {shape.present, other}


def test_wrong_results_have_no_time(small, monkeypatch):
    (shape,) = tune_shapes.select(tune_shapes.classes(tuning.table(), 90), ["split/gqa/64/64"])
    wrong, right = dataclasses.replace(shape.present, block_n=32), steps.attention

    def launched(call, config):
        return right(call, config) * (1.02 if config == wrong else 1)

    monkeypatch.setattr(steps, "attention", launched)
    times, failures = tune.measure_class(shape, [shape.present, wrong], 1, lambda: None, "cpu")
    assert times[shape.present]
    assert not times[wrong]
    assert list(failures) == [wrong]
    assert failures[wrong].startswith("ValueError: its error must be at most ")
