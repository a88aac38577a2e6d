"""split_argmax alone: equal indices, ties and NaN included; what stays whole; what Inductor makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import spec_ops
from spec_ops.passes.split_argmax import MIN_WIDTH, PART, PROGRAMS, SplitArgmax, _parts
from tests.helpers.inductor_cuda import generate, launches
from tests.helpers.pass_harness import capture_for_cuda, run_pass, switched_off, targets, texts

aten = torch.ops.aten
VOCAB = 128256


def argmax(logits):
    return logits.argmax(-1)


def rewritten(fn, logits: torch.Tensor, matches: int = 1) -> torch.fx.GraphModule:
    module = capture_for_cuda(fn, logits)
    result = run_pass(SplitArgmax(), module)
    assert result.matches == matches, texts(result.refused)
    return module


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "parts"), [((1, VOCAB), 96), ((2, 4, VOCAB), 48), ((32, VOCAB), 16)])
def test_in_parts(shape, parts, keepdim):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    module = rewritten(lambda x: x.argmax(-1, keepdim=keepdim), logits)
    (largest,) = module.graph.find_nodes(op="call_function", target=aten.amax.default)
    assert largest.meta["val"].shape == (*shape[:-1], parts)
    expected = logits.argmax(-1, keepdim=keepdim)
    got = module(logits)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@settings(max_examples=60, deadline=None)
@given(places=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), nans=st.lists(st.integers(0, VOCAB - 1), max_size=3))
def test_the_first_of_equals_and_of_nans(places, nans):
    logits = torch.full((2, VOCAB), -float("inf"))
    logits[:, places] = 7.0
    logits[1, nans] = float("nan")
    assert torch.equal(test_the_first_of_equals_and_of_nans.module(logits), logits.argmax(-1))


test_the_first_of_equals_and_of_nans.module = rewritten(argmax, torch.zeros(2, VOCAB))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (argmax, (4, MIN_WIDTH - 8)),  # narrow
        (argmax, (PROGRAMS // 2, MIN_WIDTH)),  # rows for every multiprocessor
        (lambda x: x.argmax(0), (VOCAB, 4)),  # not over the last dimension
        (lambda x: x.argmax(), (4, VOCAB)),  # over everything
        (lambda x: x.argmin(-1), (4, VOCAB)),
        (argmax, ()),  # no dimension
    ],
)
def test_near_misses(fn, shape):
    module = rewritten(fn, torch.zeros(shape), matches=0)
    assert aten.amax.default not in targets(module)


def test_rows_that_no_part_divides():
    module = capture_for_cuda(argmax, torch.zeros(4, 100003))
    result = run_pass(SplitArgmax(), module)
    assert result.matches == 0
    assert "rows of 100003" in texts(result.refused)


def test_sizes_that_are_not_known():
    module, shapes = capture_for_cuda(argmax, torch.zeros(4, VOCAB)), ShapeEnv()
    (node,) = module.graph.find_nodes(op="call_function", target=aten.argmax.default)
    with FakeTensorMode(shape_env=shapes):
        node.args[0].meta["val"] = torch.empty(shapes.create_unbacked_symint(), VOCAB, device="cuda")
    result = run_pass(SplitArgmax(), module)
    assert result.matches == 0
    assert "not known while compiling" in texts(result.refused)


def test_on_the_cpu_rows_stay_whole():
    module = make_fx(argmax)(torch.zeros(4, VOCAB))
    assert run_pass(SplitArgmax(), module).matches == 0


def test_off_switch(monkeypatch):
    switched_off(SplitArgmax(), capture_for_cuda(argmax, torch.zeros(4, VOCAB)), monkeypatch)


@pytest.mark.parametrize("vocab", [32000, 49152, 100352, 102400, 128256, 129280, 151936, 152064, 201088, 256000, 262144])
@pytest.mark.parametrize("rows", [1, 4, 32, 128])
def test_common_vocabularies_divide(vocab, rows):
    parts = _parts(rows, vocab)
    assert parts is not None
    assert vocab % parts == 0
    assert PART[0] <= vocab // parts <= PART[1]


@pytest.mark.parametrize(("split", "kernels"), [(True, 2), (False, 1)])
def test_inductor_reads_the_logits_once(split, kernels):
    """One kernel over the parts (two would read them twice), one over what they found; the append makes it a graph of ours."""

    def fn(x, k_cache, v_cache, rows, slots):
        spec_ops.append_kv(k_cache, v_cache, rows, rows, slots)
        return x.argmax(-1)

    caches = [torch.zeros(1, 4, 2, 16) for _ in range(2)]
    args = (torch.zeros(4, VOCAB), *caches, torch.zeros(3, 2, 16), torch.arange(3))
    code = generate(fn, *args, passes={"split_argmax": split, "lower_kv_append": False}).code
    assert [name.startswith("kernel") for name in launches(code)].count(True) == kernels
