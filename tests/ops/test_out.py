"""`out=` of attention steps and page tables: the caller's memory is written, buffers may be longer than the batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spec_ops
from tests.helpers.wrong_calls import CALLS
from tests.ops.test_attention import make_case

KINDS = ("mha", "mla")
MODES = ("draft_chain", "verify_chain", "verify_tree", "draft_extend_chain", "extend")


def made(kind: str, mode: str, device: str):
    return make_case(kind, mode, device, lens=[20, 3, 33], **({"head_dim": 96} if kind == "mla" else {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_result_is_the_callers_tensor(kind, mode, device):
    case = made(kind, mode, device)
    expected = case.run()
    out = torch.full_like(expected, float("nan"))
    assert case.run(out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_longer_than_the_batch(kind, mode, device):
    """As engines keep for their largest batch; what lies past the batch would raise if it were read."""
    case = made(kind, mode, device)
    expected, longer = case.run(), {}
    for name in ("seq_lens", "block_tables", "tree_mask", "q_indptr"):
        if (given := case.arguments.get(name)) is not None and not (name == "seq_lens" and mode == "extend"):
            longer[name] = torch.cat([given, given.new_full((2, *given.shape[1:]), 2**30)])
    assert torch.equal(case.run(out=torch.empty_like(expected), **longer), expected)
    with pytest.raises(ValueError, match="must be of shape"):
        case.run(**longer)  # without `out` that is a mistake


class Allocations(TorchDispatchMode):
    """Counts tensors with memory of their own that ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.made.append(str(func))
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_returns_no_new_memory(kind, device):
    """What the caller sees: one op, which returns nothing; without `out` it returns a new tensor."""
    case = made(kind, "verify_chain", device)
    out = case.run()
    with Allocations() as calls:
        case.run(out=out)
    assert calls.made == []
    with Allocations() as calls:
        case.run()
    assert calls.made == [f"spec_ops.{kind}_target_verify.default"]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_the_op_that_passes_know(kind, device):
    case, ops = made(kind, "verify_chain", device), []

    def keep(module, inputs):
        ops.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    out = torch.empty_like(expected := case.run())
    compiled = torch.compile(lambda **arguments: case.run(**arguments), backend=keep, fullgraph=True)
    assert compiled(out=out) is out
    assert torch.equal(out, expected)
    assert getattr(torch.ops.spec_ops, f"{kind}_target_verify").default in ops


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda out: out.tolist(), "a torch.Tensor, got list"),
        (lambda out: out[:, :2], r"of shape \[2, 3, 4, \d+\], got shape \(2, 2"),
        (lambda out: out.double(), "of dtype float32, got float64"),
        (lambda out: out.to("meta"), "on device cpu, got device meta"),
        (lambda out: out.transpose(1, 2).contiguous().transpose(1, 2), r"contiguous, got strides \("),
    ],
)
@pytest.mark.parametrize("op", ["mha_target_verify", "mla_draft_decode"])
def test_what_out_must_be(op, change, told):
    call = CALLS[op]()
    out = getattr(spec_ops, op)(**call)
    with pytest.raises((TypeError, ValueError), match=rf"{op}: `out` must be {told}"):
        getattr(spec_ops, op)(**call, out=change(out))


@pytest.mark.parametrize("op", ["mha_target_verify", "mla_draft_decode"])
def test_out_shares_no_memory_with_what_is_read(op):
    """A kernel would read what it has just written; memory beside it is fine."""
    call = CALLS[op]()
    function, result = getattr(spec_ops, op), getattr(spec_ops, op)(**call)
    caches = [name for name in ("k_cache", "v_cache", "kv_cache") if name in call]
    for name in ("q", *caches):
        size = call[name].numel()
        memory = torch.zeros(result.numel() + size)
        call[name] = memory[-size:].view(call[name].shape).copy_(call[name])
        beside = memory[: result.numel()].view(result.shape)
        assert torch.equal(function(**call, out=beside), result)
        over = memory[1 : 1 + result.numel()].view(result.shape)
        with pytest.raises(ValueError, match=f"{op}: `out` must be in other memory than `{name}`, got a tensor that overlaps"):
            function(**call, out=over)


@pytest.mark.parametrize("kind", KINDS)
def test_two_calls_into_one_tensor_compiled(kind, device):
    """Functionalization keeps their order, and what is read between them."""
    case = made(kind, "verify_chain", device)
    q, expected = case.arguments["q"], case.run()

    def twice(q, out):
        first = case.run(q=q, out=out) * 1
        case.run(q=2 * q, out=out)
        return first

    out = torch.empty_like(expected)
    first = torch.compile(twice, backend="aot_eager", fullgraph=True)(q, out)
    assert torch.equal(first, expected)
    assert torch.equal(out, case.run(q=2 * q))


def test_page_table_into_a_buffer(device):
    """Rows past the batch, and what lies between rows, stay as they are."""
    pool = torch.arange(5 * 48, dtype=torch.int32, device=device).reshape(5, 48)
    rows, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, 0], [40, 17]))
    buffer = torch.full((4, 6), -7, dtype=torch.int32, device=device)
    out = buffer[:, 1:4]
    assert spec_ops.page_table(pool, rows, lens, 16, out=out) is out
    expected = torch.full_like(buffer, -7)
    expected[:2, 1:4] = spec_ops.page_table(pool, rows, lens, 16)
    assert torch.equal(buffer, expected)


def test_page_table_in_a_compiled_function(device):
    pool = torch.arange(5 * 48, dtype=torch.int32, device=device).reshape(5, 48)
    rows, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, 0], [40, 17]))
    out = torch.full((3, 3), -7, dtype=torch.int32, device=device)
    torch.compile(spec_ops.page_table, backend="eager", fullgraph=True)(pool, rows, lens, 16, out=out)
    assert torch.equal(out[:2], spec_ops.page_table(pool, rows, lens, 16))
    assert out[2].tolist() == [-7] * 3


@pytest.mark.parametrize("mode", ["draft_chain", "verify_chain", "extend"])
def test_pools_with_heads_before_tokens(mode, device):
    """HND pools, as an engine may lay them out, are strided views: no op copies them."""
    case = make_case("mha", mode, device, lens=[20, 3, 33])
    turned = {n: case.arguments[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_cache", "v_cache")}
    assert not turned["k_cache"].is_contiguous()
    assert torch.equal(case.run(**turned), case.run())
