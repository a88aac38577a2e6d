"""lower_all_reduce alone: which sums of ranks become our kernel's, and which NCCL keeps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from spec_ops.backends import push
from spec_ops.ops.collectives import all_reduce_op
from spec_ops.passes import PassManager
from spec_ops.passes.hoist_row_select import HoistRowSelect
from spec_ops.passes.lower_all_reduce import LowerAllReduce
from tests.helpers.groups import pretended
from tests.helpers.pass_harness import capture, run_pass, switched_off, targets, texts

c10d = torch.ops._c10d_functional
GROUPS = {size: pretended(size) for size in (2, 3, 8)}
NEUTRAL = [c10d.all_reduce.default, c10d.wait_tensor.default]


def reduced(x: torch.Tensor, size: int = 2, reduce: str = "sum") -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, reduce, GROUPS[size]))


def rows(m: int = 4, n: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(m, n).to(dtype)


def test_a_sum_of_few_rows():
    module, _ = capture(lambda x: reduced(x @ x.t()) + 1, rows())
    result = run_pass(LowerAllReduce(), module, 90)
    assert texts(result.done) == "sum over ranks of [4, 4]"
    assert all_reduce_op in targets(module)
    assert not set(NEUTRAL) & set(targets(module))
    (call,) = [node for node in module.graph.nodes if node.target is all_reduce_op]
    assert call.args[1:] == ("sum", GROUPS[2])
    assert call.meta["val"].dtype == torch.bfloat16


def test_a_maximum_of_keys():
    module, _ = capture(lambda x: reduced(x, 8, "max") + 1, torch.arange(5))
    assert run_pass(LowerAllReduce(), module, 100).matches == 1


@pytest.mark.parametrize(
    ("x", "size", "reduce", "arch", "reason"),
    [
        (rows(), 2, "sum", 80, "no figures for sm_80"),
        (rows(), 3, "sum", 90, "no figures for 3 ranks"),
        (rows(513, 2048), 8, "sum", 90, "must be of at most 2097152 bytes, got 2101248"),
        (rows(dtype=torch.float32), 2, "sum", 90, "got sum of torch.float32"),
        (rows(), 2, "avg", 90, "got avg of torch.bfloat16"),
        (rows(1, 4), 2, "sum", 90, "must be of a multiple of 16 bytes, got 8"),
    ],
)
def test_what_nccl_keeps(x, size, reduce, arch, reason):
    module, _ = capture(lambda x: reduced(x, size, reduce) + 1, x)
    result = run_pass(LowerAllReduce(), module, arch)
    assert result.matches == 0
    assert texts(result.refused).endswith(reason)
    assert [target for target in targets(module) if target in NEUTRAL] == NEUTRAL


def test_a_sum_that_is_read_before_it_is_there():
    name = GROUPS[2]

    def fn(x):
        early = c10d.all_reduce(x, "sum", name)
        return c10d.wait_tensor(early), early.shape[0] + early

    module, _ = capture(fn, rows())
    result = run_pass(LowerAllReduce(), module, 90)
    assert result.matches == 0
    assert "something other than one wait_tensor reads it" in texts(result.refused)


def test_ranks_that_do_not_see_one_another():
    """What is planned for another machine takes its GPUs to; on this one they must have met, on the tensor's device."""
    name = GROUPS[2]
    module, _ = capture(lambda x: reduced(x) + 1, rows())
    with mock.patch("spec_ops.passes.lower_all_reduce.device_arch", return_value=90):
        result = run_pass(LowerAllReduce(), module)
        assert texts(result.refused).endswith("the ranks cannot write to one another's memory")
        ranks: Any = object()
        with mock.patch.dict(push._workspaces, {(name, torch.device("cuda", 1)): ranks}):
            assert run_pass(LowerAllReduce(), module).matches == 0
        with mock.patch.dict(push._workspaces, {(name, torch.device("cpu")): ranks}):
            assert run_pass(LowerAllReduce(), module).matches == 1


def test_who_has_met_is_part_of_the_cache_key():
    ranks: Any = object()
    before = PassManager().uuid()
    with mock.patch.dict(push._workspaces, {("two", torch.device("cuda", 0)): ranks}):
        assert PassManager().uuid() != before
    assert PassManager().uuid() == before


def test_on_the_cpu_nothing_is_to_be_said():
    module, _ = capture(lambda x: reduced(x) + 1, rows())
    result = run_pass(LowerAllReduce(), module)
    assert (result.matches, result.refused) == (0, [])


def test_switched_off(monkeypatch):
    module, _ = capture(lambda x: reduced(x) + 1, rows())
    switched_off(LowerAllReduce(), module, monkeypatch)


def test_only_the_rows_that_are_used_are_added_up():
    """Before they are lowered, so that a sum that is too large may become small enough."""
    weight = torch.ones(64, 64).bfloat16()

    def fn(x, row):
        hidden = reduced((x.view(-1, 64) @ weight).view(8, 4, 64))
        return hidden.gather(1, row[:, None, None].expand(-1, 1, 64))[:, 0] * 2

    module, _ = capture(fn, torch.ones(8, 4, 64).bfloat16(), torch.zeros(8, dtype=torch.int64))
    assert run_pass(HoistRowSelect(), module, 90).matches == 1
    (call,) = [node for node in module.graph.nodes if node.target is NEUTRAL[0]]
    assert call.meta["val"].shape.numel() == 8 * 64
    assert targets(module).count(NEUTRAL[1]) == 1
    assert run_pass(LowerAllReduce(), module, 90).matches == 1
