"""elide_host_syncs alone: reads of the device that go, those that stay, and that Inductor compiles what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.torch_version import TorchVersion

import spec_ops
from spec_ops.ops.kv_indices import kv_indices_op
from spec_ops.passes import PassResult, manager
from spec_ops.passes.analysis.graph import arg, attention_calls
from spec_ops.passes.elide_host_syncs import ITEM, ElideHostSyncs, _holds_unless_negative, is_sync
from spec_ops.passes.elide_unread_inputs import ElideUnreadInputs
from spec_ops.passes.select_backends import SelectBackends
from tests.helpers.pass_harness import capture, capture_for_cuda, run_pass, switched_off, targets, texts, using_provider
from tests.passes.test_elide_unread_inputs import PAGE, WIDTH, naive, tensors


def step(q, k_cache, v_cache, req_to_token, rows, seq_lens, **options: Any) -> torch.Tensor:
    table = spec_ops.page_table(req_to_token, rows, seq_lens, PAGE)
    return spec_ops.mha_draft_decode(q, k_cache, v_cache, table, seq_lens, **options)


def longest(*args: torch.Tensor):
    return step(*args, max_seq_len=args[-1].max().item())


def longest_plus_one(*args: torch.Tensor):
    return step(*args, max_seq_len=args[-1].max().item() + 1)


def longest_of_list(*args: torch.Tensor):
    return step(*args, max_seq_len=torch.sym_max(*args[-1].tolist()))


def longest_on_host(*args: torch.Tensor):
    return step(*args, max_seq_len=args[-1].cpu().max().item())


def syncs(module: fx.GraphModule) -> int:
    return sum(map(is_sync, module.graph.nodes))


def run_on(module: fx.GraphModule, args: list[torch.Tensor]) -> Any:
    """The interpreter, since generated code cannot hold every symbolic argument."""
    return fx.Interpreter(module).run(*args)


def check(fn: Callable, matches: int, left: int, on: str = "cuda") -> tuple[fx.GraphModule, PassResult]:
    """The pass on the graph of `fn` for `on`: `matches`, `left` reads that stay, and not a bit of difference."""
    module, args = capture(fn, *tensors()) if on == "cpu" else (capture_for_cuda(fn, *tensors()), tensors())
    expected = run_on(module, args)
    result = run_pass(ElideHostSyncs(), module)
    assert result.matches == matches == len(result.done), f"{result}"
    assert syncs(module) == left == len(result.refused), f"{result}"
    torch.testing.assert_close(run_on(module, args), expected, rtol=0, atol=0)
    return module, result


@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize(("fn", "reads"), [(longest, 1), (longest_plus_one, 1), (longest_of_list, 2)])
def test_a_bound_takes_the_place_of_a_read(fn, reads, on):
    module, result = check(fn, 1 + reads, 0, on)
    (node,) = attention_calls(module.graph)
    assert arg(node, "max_seq_len") == WIDTH
    assert "the page table's width, 16, instead of a read at" in texts(result.done)
    assert texts(result.done).count("item: nothing needs it") == reads
    assert not any(isinstance(n.meta.get("val"), (torch.SymInt, torch.SymBool)) for n in module.graph.nodes)
    if on == "cpu":
        assert all(__file__ in note.where for note in result.done)


def test_copy_and_item_in_a_row():
    _, result = check(longest_on_host, 3, 0)
    assert "device-to-host copy: nothing needs it" in texts(result.done)


def test_steps_share_a_read_and_a_kernel_that_reads_it():
    def fn(*args):
        bound = args[-1].max().item()
        first = step(*args, max_seq_len=bound, backend="provider")
        return step(first, *args[1:], max_seq_len=bound, backend="provider")

    with using_provider(reads=frozenset({"max_seq_len"})):
        module, result = check(fn, 3, 0)
    assert [arg(node, "max_seq_len") for node in attention_calls(module.graph)] == [WIDTH] * 2
    assert result.refused == []


def test_static_bounds_and_sizes_are_left_alone():
    def fn(*args):
        return step(*args, max_seq_len=13)

    module, _ = check(fn, 0, 0)
    assert [arg(node, "max_seq_len") for node in attention_calls(module.graph)] == [13]


def test_copies_that_nothing_reads():
    """What another pass left without a reader."""

    def fn(*args):
        host = args[-1].cpu()
        _ = host.max().item() + host.min().item()
        return step(*args)

    check(fn, 3, 0)


def capacity(*args: torch.Tensor):
    indptr, indices = spec_ops.kv_indices(args[3], args[4], args[5], args[5].sum().item())
    return step(*args, kv_indptr=indptr, kv_indices=indices, backend="reference")


def rounded_capacity(*args: torch.Tensor):
    total = (args[5].sum().item() + 3) // 4 * 4
    indptr, indices = spec_ops.kv_indices(args[3], args[4], args[5], total)
    return step(*args, kv_indptr=indptr, kv_indices=indices, backend="reference")


@pytest.mark.parametrize("fn", [capacity, rounded_capacity])
def test_asserts_of_tracing_go_with_the_read(fn):
    """A read sized the index list; tracing noted that sizes are not negative, and nobody needs the list."""
    module, args = capture(fn, *tensors())
    expected = run_on(module, args)
    assert torch.ops.aten._assert_scalar.default in targets(module)
    assert "kv_indices" in run_pass(ElideHostSyncs(), module).refused[0].text
    assert torch.ops.aten._assert_scalar.default in targets(module)
    run_pass(ElideUnreadInputs(), module)
    assert targets(module).count(kv_indices_op) == 0
    assert syncs(module) == 1
    result = run_pass(ElideHostSyncs(), module)
    assert (result.matches, syncs(module), result.refused) == (1, 0, [])
    assert torch.ops.aten._assert_scalar.default not in targets(module)
    torch.testing.assert_close(run_on(module, args), expected, rtol=0, atol=0)


def test_constraints_without_bounds():
    """As older torch releases write them; with a bound they are somebody's."""

    def dead(*args):
        _ = args[-1].max().item()
        return step(*args)

    for target, bounds, goes in (
        (torch.ops.aten.sym_constrain_range_for_size.default, {}, True),
        (torch.ops.aten.sym_constrain_range_for_size.default, {"min": 0}, True),
        (torch.ops.aten.sym_constrain_range_for_size.default, {"max": 8}, False),
        (torch.ops.aten.sym_constrain_range.default, {}, True),
        (torch.ops.aten.sym_constrain_range.default, {"min": 0}, False),
    ):
        module = capture_for_cuda(dead, *tensors())
        (item,) = (node for node in module.graph.nodes if node.target is ITEM)
        with module.graph.inserting_after(item):
            module.graph.call_function(target, (item,), bounds)
        result = run_pass(ElideHostSyncs(), module)
        assert (result.matches == 1) == goes == (syncs(module) == 0), (target, bounds, result)


def user_check(*args):
    bound = args[-1].max().item()
    torch._check(bound <= WIDTH)
    return step(*args, max_seq_len=bound)


def user_check_not_negative(*args):
    bound = args[-1].max().item()
    torch._check(bound >= 0)
    return step(*args, max_seq_len=bound)


def user_check_of_a_read(*args):
    torch._check(args[-1].max().item() >= 0)
    return step(*args)


# Older releases fold this check into the assert that tracing itself puts on a read: the pass cannot tell them apart.
folded = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="torch folds the check into the read's own assert")


@pytest.mark.parametrize(
    ("fn", "matches"), [(user_check, 1), pytest.param(user_check_not_negative, 1, marks=folded), (user_check_of_a_read, 0)]
)
def test_the_users_own_checks_stay(fn, matches):
    """The bound is replaced; the read stays for the check's sake, and the report says so."""
    module, result = check(fn, matches, 1, "cpu")
    assert torch.ops.aten._assert_scalar.default in targets(module)
    assert "item stays: needed by the check at " in texts(result.refused)
    assert f"{__file__}:" in texts(result.refused)
    assert __file__ in result.refused[0].where


def test_which_conditions_follow_from_reads_being_not_negative():
    u = ShapeEnv().create_unbacked_symint()
    follow = [u >= 0, (u + 3) // 4 * 4 >= 0, u + 1 > 0, u >= -3]
    do_not = [u >= 1, u > 0, u - 5 >= 0, u <= 7, u != 3, 8 - u >= 0]
    assert [_holds_unless_negative(c) for c in (*follow, True)] == [True] * 5
    assert [_holds_unless_negative(c) for c in (*do_not, False, None)] == [False] * 8


def test_reads_that_are_used_stay():
    """Returned, in arithmetic that is returned, in a shape, and for a host plan."""

    def copied(*args):
        return step(*args), args[-1].cpu()

    def computed(*args):
        return step(*args), args[-1].max().item() * 2 + 1

    def both(*args):
        bound = args[-1].max().item()
        return step(*args, max_seq_len=bound), bound + 1

    def shaped(*args):
        return step(*args), torch.zeros(args[-1].max().item(), device=args[0].device)

    def from_list(*args):
        first, second = args[-1].cpu().tolist()
        return step(*args), first - second

    for fn, matches, left, consumer in (
        (copied, 0, 1, "device-to-host copy stays: needed by the graph's output"),
        (computed, 0, 1, "item stays: needed by the graph's output"),
        (both, 1, 1, "item stays: needed by the graph's output"),
        (shaped, 0, 1, "item stays: needed by aten.full"),
        (from_list, 0, 3, "device-to-host copy stays: needed by the graph's output"),
    ):
        fn.__name__ = f"used_{fn.__name__}"
        if fn is shaped:  # without a GPU, zeros of the graph for one cannot be made
            module = capture_for_cuda(fn, *tensors())
            result = run_pass(ElideHostSyncs(), module)
            assert (result.matches, syncs(module)) == (matches, left)
        else:
            _, result = check(fn, matches, left)
        assert consumer in texts(result.refused), texts(result.refused)


def test_a_host_plan_keeps_its_copy():
    with using_provider(reads=frozenset({"seq_lens_cpu"}), host_plan=True):
        module = capture_for_cuda(naive("provider"), *tensors())
        result = run_pass(ElideUnreadInputs(), module)
        result = run_pass(ElideHostSyncs(), module)
    assert (result.matches, syncs(module)) == (0, 1)
    assert "needed by mha_draft_decode (seq_lens_cpu, backend provider)" in texts(result.refused)


def test_a_shape_that_depends_on_data_is_named():
    def fn(*args):
        return step(*args), args[-1].nonzero()

    _, result = check(fn, 0, 1, "cpu")
    assert "aten.nonzero.default (a size that depends on data) stays: needed by the graph's output" in texts(result.refused)


def test_a_copy_into_a_host_tensor_stays():
    """It is an effect: the caller reads the tensor."""

    def fn(*args):
        return step(*args)

    module = capture_for_cuda(fn, *tensors())
    nodes = list(module.graph.nodes)
    with module.graph.inserting_before(module.graph.output_node()):
        ring = module.graph.call_function(torch.ops.aten.empty.memory_format, ([2],), {"dtype": torch.int32})
        copy = module.graph.call_function(torch.ops.aten.copy_.default, (ring, nodes[5]))
    ring.meta["val"] = copy.meta["val"] = torch.empty(2, dtype=torch.int32)
    result = run_pass(ElideHostSyncs(), module)
    assert "device-to-host copy stays: needed by the tensor that it writes" in texts(result.refused)


def test_no_static_width():
    module = capture_for_cuda(longest, *tensors())
    (node,) = attention_calls(module.graph)
    table = arg(node, "block_tables")
    table.meta["val"] = None
    result = run_pass(ElideHostSyncs(), module)
    assert (result.matches, "no static width" in texts(result.refused)) == (0, True)
    assert "needed by mha_draft_decode (max_seq_len, backend auto)" in texts(result.refused)


def test_off(monkeypatch):
    switched_off(ElideHostSyncs(), capture_for_cuda(longest, *tensors()), monkeypatch)


@pytest.mark.parametrize("fn", [longest_plus_one, rounded_capacity])
def test_inductor_compiles_what_is_left(fn, monkeypatch):
    """Symbols whose read is gone must not be missed by Inductor, nor tensors that are no longer passed."""
    left: list[int] = []

    class Spy(ElideHostSyncs):
        def run(self, graph, context, result):
            super().run(graph, context, result)
            graph.eliminate_dead_code()
            left.append(sum(map(is_sync, graph.nodes)))

    monkeypatch.setattr(manager, "PASSES", (SelectBackends(), ElideUnreadInputs(), Spy()))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = spec_ops.compile(fn, mode="default", options={"force_disable_caches": True})
        assert torch.equal(compiled(*tensors()), fn(*tensors()))
    assert left == [0]
