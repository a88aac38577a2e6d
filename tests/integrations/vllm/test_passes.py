"""Our passes as vLLM takes them: on graphs without an op of ours, in a configuration that is hashed and sent to processes."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F

from spec_ops.integrations.vllm import inductor_compile_config
from spec_ops.ops.linear import add_skinny_mm_op, scaled_skinny_mm_op, skinny_mm_op
from spec_ops.passes import PassManager, lower_skinny_mm, pass_names
from spec_ops.passes.lower_skinny_mm import Rule
from spec_ops.passes.manager import SLOT
from tests.helpers.pass_harness import capture, capture_for_cuda, targets

N, K = 192, 512


@pytest.fixture(autouse=True)
def small_rule(monkeypatch):
    """What is measured on large weights, for small ones."""
    monkeypatch.setattr(lower_skinny_mm, "RULES", {90: (Rule(8, 256, K, 2 * N * K, 4 * N * K),)})


def piece(rows: int = 4) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """What is between two attention ops: a product, an activation."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=g).to(torch.bfloat16) for shape in ((rows, K), (N, K)))
    return capture(lambda x, weight: F.silu(F.linear(x, weight)), x, weight)


def test_a_graph_without_an_op_of_ours_is_rewritten():
    module, inputs = piece()
    (before,) = module(*inputs)
    config = inductor_compile_config(arch=90)
    assert config["shape_padding"] is False
    config[SLOT](module.graph)
    module.recompile()
    assert skinny_mm_op in targets(module)
    assert torch.ops.aten.mm.default not in targets(module)
    (after,) = module(*inputs)
    torch.testing.assert_close(after, before, rtol=2**-6, atol=2**-6)  # bfloat16, added up in another order


def normalized(x, residual, w0, gain, w1):
    """A norm in plain PyTorch between two products, as a model's own code has it."""
    y = residual + F.linear(x, w0)
    return y, F.linear(F.rms_norm(y, (K,), gain, 1e-5), w1)


def test_a_norm_in_plain_pytorch(monkeypatch):
    monkeypatch.setattr(lower_skinny_mm, "RULES", {90: (Rule(8, K, K, 2 * K * K, 4 * K * K),)})
    g = torch.Generator().manual_seed(1)
    shapes = [(4, K), (4, K), (K, K), (K,), (K, K)]  # rows, residual; weights
    inputs = [(torch.randn(shape, generator=g) * (1 if shape[0] == 4 else K**-0.5)).to(torch.bfloat16) for shape in shapes]
    module, inputs = capture(normalized, *inputs)
    before = module(*inputs)
    inductor_compile_config(arch=90)[SLOT](module.graph)
    module.recompile()
    assert {add_skinny_mm_op, scaled_skinny_mm_op} <= set(targets(module))
    assert torch.ops.aten.rsqrt.default not in targets(module)
    for after, expected in zip(module(*inputs), before, strict=True):
        torch.testing.assert_close(after, expected, rtol=2**-6, atol=2**-6)


def argmax(logits):
    return logits.argmax(-1)


def test_an_argmax_in_plain_pytorch():
    logits = torch.randn(4, 128256, generator=torch.Generator().manual_seed(0))
    module = capture_for_cuda(argmax, logits)
    inductor_compile_config(arch=90)[SLOT](module.graph)
    module.recompile()
    assert torch.ops.aten.amax.default in targets(module)  # of each part
    assert torch.equal(module(logits), logits.argmax(-1))


@pytest.mark.parametrize(
    "made", [lambda: piece()[0], lambda: capture_for_cuda(argmax, torch.zeros(4, 128256))], ids=["product", "argmax"]
)
def test_elsewhere_such_a_graph_is_left_alone(made):
    module = made()
    before = targets(module)
    PassManager(arch=90)(module.graph)
    assert targets(module) == before


def test_a_pass_is_switched_off():
    module, _ = piece()
    inductor_compile_config({"lower_skinny_mm": False}, arch=90)[SLOT](module.graph)
    assert skinny_mm_op not in targets(module)
    with pytest.raises(ValueError, match="unknown pass"):
        inductor_compile_config({"no_such_pass": True})


def test_the_configuration_reaches_other_processes_with_its_key():
    manager = inductor_compile_config({"split_argmax": False}, arch=90)[SLOT]
    sent = pickle.loads(pickle.dumps(manager))
    assert sent.uuid() == manager.uuid() is not None
    assert sent.every_graph
    assert [p.name for p in sent.passes] == [name for name in pass_names() if name != "split_argmax"]
    assert PassManager({"split_argmax": False}, arch=90).uuid() != manager.uuid()
