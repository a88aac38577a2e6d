"""elide_unread_inputs alone: which inputs go, what dies with them, and what must stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import spec_ops
from spec_ops.ops.attention import OPS
from spec_ops.ops.kv_indices import kv_indices_op, page_table_op
from spec_ops.passes.analysis.counts import is_host_copy
from spec_ops.passes.analysis.graph import arg, attention_calls
from spec_ops.passes.elide_unread_inputs import OPTIONAL_INPUTS, ElideUnreadInputs
from tests.helpers.pass_harness import capture, capture_for_cuda, run_pass, switched_off, targets, texts, using_provider

BS, PAGE, WIDTH = 2, 4, 16


def tensors() -> list[torch.Tensor]:
    """q, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens"""
    g = torch.Generator().manual_seed(0)
    q, k_cache, v_cache = (torch.randn(*s, generator=g) for s in ((BS, 1, 4, 8), (8, PAGE, 2, 8), (8, PAGE, 2, 8)))
    req_to_token = torch.arange(2 * WIDTH, dtype=torch.int32).reshape(2, WIDTH)
    return [q, k_cache, v_cache, req_to_token, torch.tensor([1, 0]), torch.tensor([7, 3], dtype=torch.int32)]


def naive(backend: str = "reference", result: Callable = lambda out, *_: out, again: str | None = None) -> Callable:
    """A draft step that hands the op everything; `result` picks what it returns, `again` runs it once more elsewhere."""

    def fn(q, k_cache, v_cache, req_to_token, rows, seq_lens):
        table = spec_ops.page_table(req_to_token, rows, seq_lens, PAGE)
        indptr, indices = spec_ops.kv_indices(req_to_token, rows, seq_lens)
        host = seq_lens.cpu()
        given = {"kv_indptr": indptr, "kv_indices": indices, "seq_lens_cpu": host, "max_seq_len": WIDTH}
        out = spec_ops.mha_draft_decode(q, k_cache, v_cache, table, seq_lens, **given, backend=backend)
        if again is not None:
            out = spec_ops.mha_draft_decode(out, k_cache, v_cache, table, seq_lens, **given, backend=again)
        return result(out, indptr, indices, host)

    return fn


def given(node: fx.Node) -> set[str]:
    return {name for name in OPTIONAL_INPUTS if arg(node, name) is not None}


def host_copies(module: fx.GraphModule) -> int:
    return sum(map(is_host_copy, module.graph.nodes))


def check(fn: Callable, matches: int) -> tuple[fx.GraphModule, Any]:
    """Runs the pass on the graph for a GPU; the graph then computes the same, which the CPU can tell."""
    module, args = capture_for_cuda(fn, *tensors()), tensors()
    expected = module(*args)
    result = run_pass(ElideUnreadInputs(), module)
    assert result.matches == matches == len(result.done), texts(result.refused)
    torch.testing.assert_close(module(*args), expected, rtol=0, atol=0)
    return module, result


def test_nothing_that_is_not_read_remains():
    module, result = check(naive(), 3)
    assert result.refused == []
    assert targets(module).count(kv_indices_op) == host_copies(module) == 0
    assert targets(module).count(page_table_op) == 1
    assert targets(module) == [page_table_op, OPS["mha_draft_decode"]]
    for name in ("kv_indices", "kv_indptr", "seq_lens_cpu"):  # it does read max_seq_len
        assert f"mha_draft_decode: reference does not read {name}" in texts(result.done)


def test_source_lines():
    module, args = capture(naive(), *tensors())
    expected = module(*args)
    result = run_pass(ElideUnreadInputs(), module)
    assert result.matches == 3
    assert all(__file__ in note.where for note in result.done)
    torch.testing.assert_close(module(*args), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op(name):
    g = torch.Generator().manual_seed(1)
    ragged = name.endswith("_extend") and "draft" not in name
    shape = (6, 4, 8) if ragged else (BS, 3, 4, 8)
    caches = [torch.randn(8, PAGE, 2, 8, generator=g)] * 2 if name.startswith("mha") else [torch.randn(8, PAGE, 8, generator=g)]

    def fn(q, q_indptr, table, lens, indptr, indices, *caches):
        options: dict[str, Any] = {"q_indptr": q_indptr, "max_q_len": 3} if ragged else {}
        options |= {} if name.startswith("mha") else {"kv_lora_rank": 6, "scale": 0.4}
        heads = dict(zip(["k_cache", "v_cache"] if name.startswith("mha") else ["kv_cache"], caches, strict=True))
        options |= {"kv_indptr": indptr * 2, "kv_indices": indices + 1, "seq_lens_cpu": lens.cpu().long(), "max_seq_len": 9}
        out = getattr(spec_ops, name)(q, **heads, block_tables=table, seq_lens=lens, **options, backend="reference")
        return (out,)

    q = torch.randn(*shape, generator=g)
    lens, table = torch.tensor([7, 3], dtype=torch.int32), torch.tensor([[1, 2, 0], [3, 0, 0]], dtype=torch.int32)
    args = (q, torch.tensor([0, 3, 6], dtype=torch.int32), table, lens, torch.zeros(3).int(), torch.zeros(10).int(), *caches)
    module = capture_for_cuda(fn, *args)
    expected = module(*args)
    assert run_pass(ElideUnreadInputs(), module).matches == 3
    assert targets(module) == [OPS[name]]
    torch.testing.assert_close(module(*args), expected, rtol=0, atol=0)


def test_a_reader_keeps_what_it_reads():
    """One with CSR indices, one with half of them, one that plans on the host, one with all."""
    for reads, left in (
        ({"kv_indptr", "kv_indices"}, {kv_indices_op: 1, "copies": 0}),
        ({"kv_indices"}, {kv_indices_op: 1, "copies": 0}),
        ({"seq_lens_cpu", "max_seq_len"}, {kv_indices_op: 0, "copies": 1}),
        (set(OPTIONAL_INPUTS), {kv_indices_op: 1, "copies": 1}),
    ):
        with using_provider(reads=frozenset(reads)):
            module, _ = check(naive("provider"), 4 - len(reads))
        (node,) = attention_calls(module.graph)
        assert given(node) == reads
        assert targets(module).count(kv_indices_op) == left[kv_indices_op]
        assert host_copies(module) == left["copies"]


def test_host_planned_overload():
    with using_provider(reads=frozenset({"seq_lens_cpu"}), host_plan=True):
        module, _ = check(naive("provider"), 3)
    assert [given(node) for node in attention_calls(module.graph)] == [{"seq_lens_cpu"}]


def test_tensors_that_are_also_returned():
    """The call lets go of them; what made them has another reader and stays."""
    module, _ = check(naive(result=lambda out, indptr, indices, host: (out, indices)), 3)
    assert targets(module).count(kv_indices_op) == 1
    assert host_copies(module) == 0
    module, _ = check(naive(result=lambda out, indptr, indices, host: (out, host)), 3)
    assert targets(module).count(kv_indices_op) == 0
    assert host_copies(module) == 1


def test_a_second_call_that_reads_them():
    with using_provider(reads=frozenset({"kv_indptr", "kv_indices"})):
        module, _ = check(naive(again="provider"), 5)
    assert [given(node) for node in attention_calls(module.graph)] == [{"max_seq_len"}, {"kv_indptr", "kv_indices"}]
    assert targets(module).count(kv_indices_op) == 1


def test_two_calls_that_do_not():
    module, _ = check(naive(again="reference"), 6)
    assert targets(module).count(kv_indices_op) == 0


def test_a_call_without_its_backend_is_left_alone():
    module = capture_for_cuda(naive("auto"), *tensors())
    before = str(module.graph)
    result = run_pass(ElideUnreadInputs(), module)
    assert (result.matches, str(module.graph)) == (0, before)
    assert "mha_draft_decode has no backend yet: kv_indices, kv_indptr, max_seq_len, seq_lens_cpu" in texts(result.refused)


def test_a_backend_that_is_gone():
    with using_provider():
        module = capture_for_cuda(naive("provider"), *tensors())
    result = run_pass(ElideUnreadInputs(), module)
    assert (result.matches, "unknown backend 'provider'" in texts(result.refused)) == (0, True)


def test_nothing_given_nothing_said():
    def fn(q, k_cache, v_cache, req_to_token, rows, seq_lens):
        table = spec_ops.page_table(req_to_token, rows, seq_lens, PAGE)
        return spec_ops.mha_draft_decode(q, k_cache, v_cache, table, seq_lens)

    _, result = check(fn, 0)
    assert result.refused == []


def test_off(monkeypatch):
    switched_off(ElideUnreadInputs(), capture_for_cuda(naive(), *tensors()), monkeypatch)
