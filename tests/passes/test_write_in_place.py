"""write_in_place and refuse_misplaced_views: caches that are views of one pool, taken outside of the compiled function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import spec_ops
from spec_ops.ops.kv_cache import append_kv_lowered, append_kv_op, move_kv_op
from spec_ops.ops.rope import rope_append_kv_op
from spec_ops.passes import PassManager, enabled, write_in_place
from spec_ops.passes.analysis.counts import cuda_graphs
from spec_ops.passes.analysis.graph import AUTO_FUNCTIONALIZED
from spec_ops.passes.write_in_place import STORAGE_OFFSETS_ARE_RIGHT, WriteInPlace
from tests.helpers import pass_harness
from tests.helpers.inductor_cuda import copied
from tests.helpers.pass_harness import Uncached, cache_copies, compile_interpreted, run_pass, switched_off, targets, texts

PAGES, PAGE_SIZE, HEADS, DIM = 3, 4, 2, 8
CACHE = PAGES, PAGE_SIZE, HEADS, DIM
COPY = torch.ops.aten.copy_.default


def one_pool() -> list[torch.Tensor]:
    """All keys, then all values."""
    return list(_numbers(2, *CACHE).unbind(0))


def interleaved() -> list[torch.Tensor]:
    """Page by page keys, then values: FlashInfer's layout, and vLLM's."""
    return list(_numbers(PAGES, 2, *CACHE[1:]).unbind(1))


def own() -> list[torch.Tensor]:
    return [_numbers(*CACHE) for _ in range(2)]


def pools_of_layers() -> list[torch.Tensor]:
    return list(_numbers(2, 2, *CACHE).unbind(0))


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def without_first_page() -> list[torch.Tensor]:
    return [own()[0], _numbers(PAGES + 1, *CACHE[1:])[1:]]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return _numbers(3, HEADS, DIM), torch.tensor([0, 4, 8])


def steps(k_cache, v_cache, x, slots):
    """Two steps: each appends and attends."""
    table, lens = torch.arange(3, dtype=torch.int32)[:, None], torch.ones(3, dtype=torch.int32)
    for i in range(2):
        spec_ops.append_kv(k_cache, v_cache, x * 2, x + i, slots + i)
        x = x + spec_ops.mha_draft_decode(x[:, None], k_cache, v_cache, table, lens + i)[:, 0]
    return x


def layers(k_pool, v_pool, x, slots):
    """Layers are views taken inside."""
    for k_cache, v_cache in zip(k_pool, v_pool, strict=True):
        spec_ops.append_kv(k_cache, v_cache, x * 2, x, slots)
    return x + 1


def compaction(k_cache, v_cache, x, slots):
    spec_ops.move_kv([k_cache, v_cache], slots, slots + 1)
    return x + 1


def capture(fn: Callable, *args: torch.Tensor, dynamo: bool = False) -> fx.GraphModule:
    return pass_harness.capture(fn, *args, write_back=True, dynamo=dynamo)[0]


def rotated(k_cache, v_cache, x, slots):
    """An op that also returns something."""
    angle = x[:, 0, : DIM // 2]
    q = spec_ops.rope_append_kv(x * 2, x, x + 1, angle.cos(), angle.sin(), k_cache, v_cache, slots)
    return q + spec_ops.rope_append_kv(q, x + 2, x, angle.cos(), angle.sin(), k_cache, v_cache, slots + 1)


def check(module: fx.GraphModule, matches: int, refused: str = "") -> None:
    result = run_pass(WriteInPlace(), module)
    assert result.matches == matches == len(result.done), texts(result.refused)
    assert texts(result.refused) == refused


@pytest.mark.parametrize(
    ("fn", "op", "calls"), [(steps, append_kv_op, 2), (compaction, move_kv_op, 1), (rotated, rope_append_kv_op, 2)]
)
def test_ops_are_called_on_the_inputs(fn, op, calls):
    module = capture(fn, *one_pool(), *rows())
    check(module, calls)
    assert targets(module).count(op) == calls
    assert not {AUTO_FUNCTIONALIZED, COPY} & set(targets(module))


def test_what_lower_kv_append_makes():
    module = capture(steps, *one_pool(), *rows())
    for node in module.graph.nodes:
        if node.target is AUTO_FUNCTIONALIZED:
            node.update_arg(0, append_kv_lowered)
    check(module, 2)
    assert targets(module).count(append_kv_lowered) == 2


def test_a_direct_call_counts_as_work():
    """The only one of a graph, which returns nothing."""

    def fn(k_cache, v_cache, x, slots):
        spec_ops.move_kv([k_cache, v_cache], slots, slots)

    module = capture(fn, *one_pool(), *rows())
    check(module, 1)
    assert targets(module) == [move_kv_op]
    assert cuda_graphs(module.graph) == 1


def test_report_names_the_line():
    module = capture(steps, *one_pool(), *rows(), dynamo=True)
    result = run_pass(WriteInPlace(), module)
    assert texts(result.done[:1]) == "append_kv writes 2 caches of one storage in place"
    assert "test_write_in_place.py" in result.done[0].where


@pytest.mark.parametrize("fn", [steps, layers])
def test_storages_of_their_own(fn):
    """Inductor writes these in place."""
    module = capture(fn, *(own() if fn is steps else [torch.stack(own()), torch.stack(own())]), *rows())
    check(module, 0)


def test_one_cache_for_each_call():
    """Inductor tells views apart where they are written by different calls."""

    def fn(first, second, x, slots):
        for cache in (first, second):
            spec_ops.append_mla_kv(cache, x[:, 0], x[:, 1], slots)
        return x + 1

    module = capture(fn, *_numbers(2, PAGES, PAGE_SIZE, 2 * DIM).unbind(0), *rows())
    check(module, 0)


COPIED = ", so Inductor copies all but one of its caches"


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder" and n.meta["val"].dim() == 4]


def first_write(module: fx.GraphModule) -> fx.Node:
    return next(node for node in module.graph.nodes if node.target is AUTO_FUNCTIONALIZED)


@pytest.mark.parametrize("place", [0, 1])
def test_old_contents_read_afterwards(place):
    """By a view of the cache; a read before the append does not matter."""
    module = capture(compaction, *one_pool(), *rows())
    cache, write = placeholders(module)[place], first_write(module)
    for where, matches in (("before", 1), ("after", 0)):
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(module.graph, copies)
        at = copies[write]
        with graph.inserting_before(at) if where == "before" else graph.inserting_after(at):
            view = graph.call_function(torch.ops.aten.select.int, (copies[cache], 0, 1))
            view.meta["val"] = cache.meta["val"].select(0, 1)
        with graph.inserting_after(view):
            read = graph.call_function(torch.ops.aten.sum.default, (view,))
        read.meta["val"] = cache.meta["val"].sum()
        graph.output((output, read))
        reason = "" if matches else f"move_kv: what its caches held is read afterwards (unknown source:0){COPIED}"
        check(fx.GraphModule(module, graph), matches, reason)


def snapshot(k_cache, v_cache, kept, x, slots):
    kept.copy_(k_cache)
    spec_ops.append_kv(k_cache, v_cache, x * 2, x, slots)
    return x + 1


def snapshot_of_a_page(k_cache, v_cache, kept, x, slots):
    """The copy is a part of what is computed before the append."""
    kept[1].copy_(v_cache[0])
    spec_ops.append_kv(k_cache, v_cache, x * 2, x, slots)
    return x + 1


def other_cache_restored(k_cache, v_cache, kept, x, slots):
    """The base of one cache is at last a copy of what the other held."""
    held = v_cache.clone()
    spec_ops.append_kv(k_cache, v_cache, x * 2, x, slots)
    k_cache.copy_(held)
    return x + 1


def clone_read_later(k_cache, v_cache, kept, x, slots):
    held = k_cache.clone().view(PAGES, -1)
    spec_ops.append_kv(k_cache, v_cache, x * 2, x, slots)
    return x + 1, held * 2


def twice_read_later(k_cache, v_cache, kept, x, slots):
    """No copy: it is computed before the append."""
    twice = k_cache * 2
    spec_ops.append_kv(k_cache, v_cache, x * 2, x, slots)
    return twice + k_cache


def snapshot_afterwards(k_cache, v_cache, kept, x, slots):
    spec_ops.append_kv(k_cache, v_cache, x * 2, x, slots)
    kept.copy_(k_cache)
    return x + 1


def noops_removed(module: fx.GraphModule) -> None:
    """As Inductor does after the passes."""
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(module.graph)
    module.recompile()


@pytest.mark.parametrize(
    ("fn", "matches"),
    [(snapshot, 0), (snapshot_of_a_page, 1), (other_cache_restored, 0), (clone_read_later, 0), (twice_read_later, 1),
     (snapshot_afterwards, 1)],
)  # fmt: skip
def test_snapshots_hold_the_old_contents(fn, matches):
    """Inductor drops their copies after the pass."""

    def make() -> list[torch.Tensor]:
        return [*one_pool(), _numbers(*CACHE), *rows()]

    traced, want, got = make(), make(), make()
    module, given = pass_harness.capture(fn, *traced, write_back=True)
    result = run_pass(WriteInPlace(), module)
    assert result.matches == matches, texts(result.refused)
    assert ("what its caches held is read afterwards (" in texts(result.refused)) == (not matches)
    if matches:
        noops_removed(module)
    out = fn(*want)
    places = [[tensor.data_ptr() for tensor in traced].index(tensor.data_ptr()) for tensor in given]
    results = module(*(got[place] for place in places))
    torch.testing.assert_close([*results, *got], [*(out if isinstance(out, tuple) else [out]), *want], rtol=0, atol=0)


def test_not_written_back():
    module = capture(compaction, *one_pool(), *rows())
    module.graph.erase_node(next(node for node in module.graph.nodes if node.target is COPY))
    check(module, 0, f"move_kv: not all its caches are inputs that it mutates{COPIED}")


def test_overlap():
    module = capture(compaction, *one_pool(), *rows())
    first, second = placeholders(module)
    second.meta["val"] = first.meta["val"]
    check(module, 0, f"move_kv: its caches may overlap{COPIED}")


def test_sizes_that_are_not_known():
    module = capture(compaction, *one_pool(), *rows())
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        pool = torch.empty(2, shapes.create_unbacked_symint(), *CACHE[1:])
        for node, view in zip(placeholders(module), pool.unbind(0), strict=True):
            node.meta["val"] = view
    check(module, 0, f"move_kv: its caches may overlap{COPIED}")


def test_interleaved_views_are_reported():
    """Torch makes one input of them, which Inductor writes in place."""
    module = capture(compaction, *interleaved(), *rows())
    result = run_pass(WriteInPlace(), module)
    assert result.matches == 0
    assert "interleaved views, which torch merges into one input" in texts(result.refused)
    module = capture(lambda pool, x, slots: compaction(*pool.unbind(1), x, slots), _numbers(PAGES, 2, *CACHE[1:]), *rows())
    check(module, 0)


def test_off_switch(monkeypatch):
    switched_off(WriteInPlace(), capture(steps, *one_pool(), *rows()), monkeypatch)


@pytest.mark.parametrize("make", [one_pool, interleaved, own])
@pytest.mark.parametrize("fn", [steps, compaction, rotated])
def test_same_results_with_and_without(fn: Callable, make: Callable):
    outcomes = []
    for on in (False, True):
        caches = make()
        torch._dynamo.reset()
        compiled, reports = compile_interpreted(fn, on=on)
        outcomes.append([compiled(*caches, *rows()), *caches])
        if on:
            expected = 0 if make is not one_pool else 1 if fn is compaction else 2
            assert [report.matches("write_in_place") for report in reports] == [expected]
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.parametrize("fn", [steps, rotated, pytest.param(layers, marks=pytest.mark.skipif(
    not STORAGE_OFFSETS_ARE_RIGHT, reason="refused"))])  # fmt: skip
def test_generated_code_copies_no_cache(fn):
    make = pools_of_layers if fn is layers else one_pool
    want, got = make(), make()
    out = fn(*want, *rows())
    with torch._inductor.config.patch(post_grad_custom_post_pass=Uncached()):
        result, (code,) = run_and_get_code(spec_ops.compile(fn, mode="default"), *got, *rows())
    torch.testing.assert_close(result, out)
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(one, other)
    assert not cache_copies(code, got[0])


def view_of_input(k_pool, v_pool, x, slots):
    spec_ops.append_kv(k_pool[1], v_pool[1], x * 2, x, slots)
    return x + 1


def slice_of_input(k_cache, v_cache, x, slots):
    spec_ops.append_kv(k_cache[:2], v_cache[:2], x * 2, x, slots - 4)
    return x + 1


def view_after_whole(k_pool, v_pool, x, slots):
    spec_ops.append_kv(k_pool, v_pool, x, x, slots)
    spec_ops.append_kv(k_pool[1:, :, :1], v_pool[1:, :, :1], x[:, :1], x[:, :1], slots - 4)
    return x + 1


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize(
    ("fn", "make"), [(view_of_input, pools_of_layers), (view_after_whole, one_pool), (slice_of_input, without_first_page)]
)
def test_views_at_a_wrong_address_are_refused(fn, make, right, monkeypatch):
    """The values do not begin where their storage does; slices of them are wrong in every release."""
    monkeypatch.setattr(write_in_place, "STORAGE_OFFSETS_ARE_RIGHT", right)
    no_passes = PassManager(dict.fromkeys(spec_ops.passes.pass_names(), False))
    no_passes(capture(fn, *[tensor.clone() for tensor in make()], *rows(), dynamo=True).graph)
    graph = capture(fn, *make(), *rows(), dynamo=True).graph
    if right and fn is not slice_of_input:
        no_passes(graph)
        return
    message = r"append_kv: `v_cache` must be .* an input that begins at element \d+ of .* \[\S+test_write\w+\.py:\d+\]"
    with pytest.raises(ValueError, match=message):
        no_passes(graph)


@pytest.mark.gpu
@pytest.mark.parametrize("lowered", [True, False])
@pytest.mark.parametrize("make", [one_pool, interleaved, own])
def test_on_cuda(make, lowered):
    """`append_kv`, and what `lower_kv_append` makes of it."""

    def moved() -> list[torch.Tensor]:
        caches = copied(make(), "cuda")
        shared = caches[0].untyped_storage().data_ptr() == caches[1].untyped_storage().data_ptr()
        assert shared == (make is not own)
        return caches

    def fn(k_cache, v_cache, x, slots):
        spec_ops.append_kv(k_cache, v_cache, x * 2, x + 1, slots)
        spec_ops.append_kv(k_cache, v_cache, x * 3, x, slots + 1)
        return x + k_cache[0, 0]

    want, got, reports = moved(), moved(), []
    x, slots = (tensor.cuda() for tensor in rows())
    out = fn(*want, x, slots)
    torch._dynamo.reset()
    with enabled({"lower_kv_append": lowered}, listener=reports.append):
        result, (code,) = run_and_get_code(torch.compile(fn, fullgraph=True), *got, x, slots)
    assert [report.matches("write_in_place") for report in reports] == [2 if make is one_pool else 0]
    torch.testing.assert_close(result, out)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other)
    assert not cache_copies(code, got[0])
