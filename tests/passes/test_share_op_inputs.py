"""share_op_inputs alone: which inputs become one buffer, and which are left."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import spec_ops
from spec_ops.passes.share_op_inputs import ShareOpInputs
from tests.helpers.inductor_cuda import generate, launches
from tests.helpers.inductor_unbuilt import unbuilt
from tests.helpers.pass_harness import capture, run_pass, switched_off, targets, texts

FORCE = torch.ops.prims.inductor_force_stride_order.default


def inputs() -> list[torch.Tensor]:
    """x, positions, k_cache, v_cache"""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, 8, generator=g), torch.arange(4), *(torch.randn(4, 4, 2, 8, generator=g) for _ in range(2))]


def shared(cos, sin, slots):
    return cos, sin, slots


def layers(count: int = 3, prepare: Callable = shared, result: Callable = lambda out, *_: out) -> Callable:
    """`count` layers over the same angles and slots, which `prepare` turns into what each layer's op takes."""

    def fn(x, positions, k_cache, v_cache):
        angle = positions[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
        cos, sin, slots = angle.cos(), angle.sin(), positions * 2 + 1
        out = x[:, :4]
        for _ in range(count):
            c, s, at = prepare(cos, sin, slots)
            out = spec_ops.rope_append_kv(out, x[:, 4:], x[:, :2], c, s, k_cache, v_cache, at)
        return result(out, cos, sin, slots)

    return fn


def check(fn: Callable, matches: int) -> torch.fx.GraphModule:
    module, args = capture(fn, *inputs())
    expected = module(*[a.clone() for a in args])
    result = run_pass(ShareOpInputs(), module)
    assert result.matches == matches == len(result.done), texts(result.done)
    assert targets(module).count(FORCE) == matches
    for got, want in zip(module(*[a.clone() for a in args]), expected, strict=True):
        assert torch.equal(got, want)
    return module


def test_each_shared_input_becomes_one_buffer():
    module = check(layers(), 3)
    for node in module.graph.nodes:
        if node.target is FORCE:
            assert len(node.users) == 3


def test_two_readers_are_enough():
    check(layers(count=2), 3)


def test_each_layer_views_the_value():
    module = check(layers(prepare=lambda cos, sin, slots: (cos[None].view(4, 4), sin, slots.view(2, 2).flatten())), 3)
    for node in module.graph.nodes:
        if node.target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
            assert [user.target for user in node.users] == [FORCE]


def test_returned_views_share_memory():
    """One of them leads to ops, which take a buffer."""

    def fn(x, positions, k_cache, v_cache):
        angle = positions[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
        cos, sin, out = angle.cos(), angle.sin(), x[:, :4]
        paired = cos.view(2, 8)
        for _ in range(2):
            out = spec_ops.rope_append_kv(out, x[:, 4:], x[:, :2], paired.view(4, 4), sin, k_cache, v_cache, positions)
        return out, paired, cos[1:]

    module = check(fn, 2)
    *_, paired, part = module(*capture(fn, *inputs())[1])
    assert paired.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def test_other_readers_keep_the_value_itself():
    """Fusion with pointwise work must not wait for the buffer."""
    module = check(layers(result=lambda out, cos, sin, slots: out.sum() + cos.sum()), 3)
    readers = [user for node in module.graph.nodes if node.target is torch.ops.aten.cos.default for user in node.users]
    assert {user.target for user in readers} == {FORCE, torch.ops.aten.sum.default}


@pytest.mark.parametrize(
    ("fn", "matches"),
    [
        pytest.param(layers(count=1), 0, id="one reader"),
        pytest.param(layers(prepare=lambda cos, sin, slots: (cos + 1, sin + 1, slots + 1)), 0, id="computed anew per layer"),
        pytest.param(layers(prepare=lambda cos, sin, slots: (cos @ torch.eye(4), sin, slots)), 2, id="a product has a buffer"),
    ],
)
def test_near_misses(fn, matches):
    check(fn, matches)


def test_graph_inputs_are_buffers():
    def fn(x, positions, k_cache, v_cache):
        angles = x[:, 0, :4]
        out = x[:, :4]
        for _ in range(2):
            out = spec_ops.rope_append_kv(out, x[:, 4:], x[:, :2], angles, angles, k_cache, v_cache, positions)
        return out

    check(fn, 0)


def test_a_single_number_is_computed_once():
    """Inductor ignores a stride order where there is one element, as in the lengths of one request."""

    def fn(x, lens, k_cache, v_cache, table):
        seq_lens = torch.where(lens > 2, lens + 1, 0)
        for _ in range(3):
            x = spec_ops.mha_draft_decode(x, k_cache, v_cache, table, seq_lens)
        return x

    caches = [torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    args = x, torch.full((1,), 5, dtype=torch.int32), *caches, torch.zeros(1, 2, dtype=torch.int32)
    on, off = (launches(generate(fn, *args, passes={"share_op_inputs": switch}).code) for switch in (True, False))
    assert on == ["kernel_0"] + ["mha_draft_decode"] * 3
    assert len(off) == 6


def test_sizes_that_are_not_known_are_refused():
    module, _ = capture(layers(), *inputs())
    node = next(n for n in module.graph.nodes if n.target is torch.ops.aten.cos.default)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        node.meta["val"] = torch.empty(shapes.create_unbacked_symint(), 4)
    result = run_pass(ShareOpInputs(), module)
    assert result.matches == 2
    assert texts(result.refused) == "an input of 3 ops has sizes that are not known while compiling"
    assert "test_share_op_inputs.py" in result.refused[0].where


def test_off_switch(monkeypatch):
    module, _ = capture(layers(), *inputs())
    switched_off(ShareOpInputs(), module, monkeypatch)


def test_generated_code_computes_them_once():
    def outputs(on: bool) -> int:
        """Buffers of the one metadata kernel: the angles' cosine and sine and the slots, of each layer or of all."""
        torch._dynamo.reset()
        with unbuilt():
            _, (code,) = run_and_get_code(spec_ops.compile(layers(), passes={"share_op_inputs": on}), *inputs())
        calls = re.findall(r"^ *cpp_fused\w*\((.*)\)$", code, re.MULTILINE)
        return sum(call.count("buf") for call in calls)

    assert outputs(False) - outputs(True) == 2 * 3
