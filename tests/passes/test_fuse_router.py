"""fuse_router alone: routers as models write them become one launch, and what is none stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import spec_ops
from spec_ops.ops.moe import route_experts_op
from spec_ops.passes import PassManager
from spec_ops.passes.fuse_router import FuseRouter
from tests.helpers.pass_harness import capture, run_pass, switched_off, targets, texts

aten = torch.ops.aten
TOKENS, EXPERTS, HIDDEN, INNER, K = 5, 12, 16, 6, 3
# Numbers without ties at the cut, in bfloat16 too: torch's topk takes any of equal scores, the op the first.
G = torch.Generator().manual_seed(0)
GATE_UP, DOWN = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=G), torch.randn(EXPERTS, HIDDEN, INNER, generator=G)
X, ROUTER = torch.randn(TOKENS, HIDDEN, generator=G), torch.randn(EXPERTS, HIDDEN, generator=G) * 0.5
BIAS = torch.randn(EXPERTS, generator=G)


def experts(x, ids, weights):
    return spec_ops.moe_experts(x, ids, weights, GATE_UP.to(x.dtype), DOWN.to(x.dtype))


def fused(fn, *args, left: int = 0, arch: int | None = 90):
    """The form that the op is called with, and the pass's result. Nothing is converted between it and the experts."""
    with torch.no_grad():
        module, inputs = capture(fn, *args)
        want = module(*inputs)
        result = run_pass(FuseRouter(), module, arch=arch)
        got = module(*inputs)
    for one, other in zip(got, want, strict=True):
        # Weights of another order of the same sum, times numbers of a product of 16.
        torch.testing.assert_close(one, other, rtol=2e-2 if one.dtype == torch.bfloat16 else 2e-5, atol=2e-5)
    assert targets(module).count(aten.topk.default) == left
    calls = [node for node in module.graph.nodes if node.target is route_experts_op]
    assert len(calls) == result.matches, texts(result.refused)
    for node in calls:
        (weights,) = (user for user in node.users if user.args[1] == 1) if len(node.users) == 2 else (None,)
        if weights is not None and weights.users:
            assert not any(user.target is torch.ops.prims.convert_element_type.default for user in weights.users)
    return [tuple(node.args[2:-1]) for node in calls], result


def softmax_first(x, router):
    scores = F.softmax(F.linear(x, router), -1, dtype=torch.float32)
    weights, ids = scores.topk(K, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    return (experts(x, ids, weights),)


def softmax_last(x, router):
    values, ids = F.linear(x, router).topk(K, -1)
    return (experts(x, ids, values.softmax(-1)),)


def with_a_bias(x, router, bias):
    scores = F.linear(x.float(), router.float()).sigmoid()
    ids = (scores + bias).topk(K, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    return (experts(x, ids, weights),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_softmax_before_and_after(dtype):
    for fn in (softmax_first, softmax_last):
        forms, result = fused(fn, X.to(dtype), ROUTER.to(dtype))
        assert forms == [(K, "softmax", 1, 1, True, 1.0)]
        assert texts(result.done) == f"{K} of {EXPERTS} experts and their weights in one launch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(EXPERTS,), (1, EXPERTS)], ids=str)
def test_a_bias_and_a_factor(dtype, shape):
    forms, _ = fused(with_a_bias, X.to(dtype), ROUTER.to(dtype), BIAS.view(shape).to(dtype))
    assert forms == [(K, "sigmoid", 1, 1, True, 2.5)]


ROUTERS = {
    "qwen3_moe.Qwen3MoeTopKRouter": (K, "softmax", 1, 1, True, 1.0),
    "gpt_oss.GptOssTopKRouter": (K, "softmax", 1, 1, True, 1.0),
    "mixtral.MixtralTopKRouter": (K, "softmax", 1, 1, True, 1.0),
    "olmoe.OlmoeTopKRouter": (K, "softmax", 1, 1, True, 1.0),
    "ernie4_5_moe.Ernie4_5_MoeTopKRouter": (K, "softmax", 1, 1, True, 1.0),
    "deepseek_v2.DeepseekV2TopkRouter": (K, "softmax", 1, 1, False, 2.446),
    "deepseek_v3.DeepseekV3TopkRouter": (K, "sigmoid", 4, 2, True, 2.446),
    "glm4_moe.Glm4MoeTopkRouter": (K, "sigmoid", 4, 2, True, 2.446),
    "mistral4.Mistral4TopkRouter": (K, "none", 1, 1, False, 1.0),  # groups by two scores without a bias: experts alone
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_transformers(name):
    module, _, kind = name.partition(".")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    config = SimpleNamespace(
        num_experts_per_tok=K, num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS, hidden_size=HIDDEN,
        norm_topk_prob=True, routed_scaling_factor=2.446, n_group=4, topk_group=2, topk_method="greedy",
        router_jitter_noise=0.0, moe_num_experts=EXPERTS, moe_k=K, moe_norm_min=1e-12,
    )  # fmt: skip
    router, generator = getattr(modeling, kind)(config).requires_grad_(False), torch.Generator().manual_seed(0)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)

    def fn(x):
        _, weights, ids = router(x)
        return (experts(x, ids, weights),)

    forms, _ = fused(fn, X, left=2 if module == "mistral4" else 0)
    assert forms == [ROUTERS[name]]


def test_weights_that_the_op_does_not_have():
    """A sum that is not exact below 1e-6, as LFM2's: the op gives what is divided."""

    def fn(x, router, bias):
        scores = F.linear(x, router).sigmoid()
        ids = (scores + bias).topk(K, -1).indices
        weights = scores.gather(1, ids)
        return (experts(x, ids, weights / (weights.sum(-1, keepdim=True) + 1e-6)),)

    forms, _ = fused(fn, X, ROUTER, BIAS)
    assert forms == [(K, "sigmoid", 1, 1, False, 1.0)]


def test_experts_of_another_rank_stay_masked():
    def fn(x, router):
        scores = F.softmax(F.linear(x, router), -1)
        weights, ids = scores.topk(K, -1)
        return experts(x, torch.where(ids < 6, ids, -1).int(), weights), ids

    forms, _ = fused(fn, X, ROUTER)
    assert forms == [(K, "softmax", 1, 1, False, 1.0)]


def test_layers_written_alike_are_compared_once(monkeypatch):
    from spec_ops.passes.analysis import routers

    ran = []
    whole = routers._form_of
    monkeypatch.setattr(routers, "_form_of", lambda *args: ran.append(args) or whole(*args))

    def fn(x, first, second):
        (x,) = softmax_first(x, first)
        return softmax_first(x, second)

    forms, _ = fused(fn, X * 0.01, ROUTER, ROUTER + 1)
    assert len(forms) == 2
    assert len(ran) == 1


def other_scores(x, router):
    scores = F.linear(x, router).tanh()
    ids = scores.topk(K, -1).indices
    weights, _ = scores.exp().topk(K, -1)
    return experts(x, ids, weights)


def temperature_of_a_token(x, router):
    scores = F.softmax(F.linear(x, router) * x[:, :1], -1)
    weights, ids = scores.topk(K, -1)
    return experts(x, ids, weights * x[:, :1])


def smallest(x, router):
    weights, ids = F.softmax(F.linear(x, router), -1).topk(K, -1, largest=False)
    return experts(x, ids, weights)


def noisy(x, router):
    logits = F.linear(x, router)
    weights, ids = F.softmax(logits + torch.rand_like(logits), -1).topk(K, -1)
    return experts(x, ids, weights)


def given(x, router):
    return experts(x, router[:TOKENS, :K].long().clamp(0, 3), router[:TOKENS, :K])


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (smallest, "takes the smallest"),
        (given, "no `topk` chooses the experts"),
    ],
)
def test_near_misses_are_left_and_say_why(fn, why):
    with torch.no_grad():
        module, _ = capture(lambda *args: (fn(*args),), X, ROUTER)
        before = str(module.graph)
        result = run_pass(FuseRouter(), module, arch=90)
    assert result.matches == 0
    assert why in texts(result.refused)
    assert str(module.graph) == before


@pytest.mark.parametrize("fn", [other_scores, temperature_of_a_token])
def test_scores_of_another_kind_are_chosen_by_as_they_are(fn):
    """What the graph computes before `topk` and after it stays."""
    forms, _ = fused(lambda *args: (fn(*args),), X, ROUTER, left=1 if fn is other_scores else 0)
    assert {form[1] for form in forms} <= {"none", "softmax"}


def test_noise_is_drawn_once():
    """What is random is an input of the op: none of it is drawn again, or left out."""
    with torch.no_grad():
        module, inputs = capture(lambda *args: (noisy(*args),), X, ROUTER)
        torch.manual_seed(3)
        want = module(*inputs)
        run_pass(FuseRouter(), module, arch=90)
        torch.manual_seed(3)
        got = module(*inputs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("invariant", [False, True])
def test_not_on_a_cpu_nor_where_rounds_must_not_differ(invariant):
    with torch.no_grad():
        module, _ = capture(softmax_first, X, ROUTER)
        PassManager(arch=90 if invariant else None, invariant=invariant, listener=lambda report: None)(module.graph)
    assert route_experts_op not in targets(module)


def test_switched_off(monkeypatch):
    with torch.no_grad():
        module, _ = capture(softmax_first, X, ROUTER)
    switched_off(FuseRouter(), module, monkeypatch)


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_any_number_of_tokens(tokens):
    forms, _ = fused(softmax_first, torch.randn(tokens, HIDDEN), ROUTER)
    assert forms == [(K, "softmax", 1, 1, True, 1.0)]


def test_sums_of_all_tokens_are_seen():
    """Weights divided by a sum over tokens: not what the op computes of each."""

    def fn(x, router):
        scores = F.softmax(F.linear(x, router), -1)
        weights, ids = scores.topk(K, -1)
        return (experts(x, ids, weights / weights.sum()),)

    forms, _ = fused(fn, X, ROUTER)
    assert forms == [(K, "softmax", 1, 1, False, 1.0)]


def clamped(x, router):
    weights, ids = F.softmax(F.linear(x, router).clamp(-50, 50), -1).topk(K, -1)
    return (experts(x, ids, weights),)


def without_nan(x, router):
    logits = F.linear(x, router)
    weights, ids = F.softmax(torch.where(logits.isnan(), 0.0, logits), -1).topk(K, -1)
    return (experts(x, ids, weights),)


def floored(x, router):
    weights, ids = F.softmax(F.linear(x, router), -1).topk(K, -1)
    return (experts(x, ids, torch.where(weights < 1e-12, 0.5, weights)),)


@pytest.mark.parametrize(
    ("fn", "kept"), [(clamped, aten.clamp_max.default), (without_nan, aten.isnan.default), (floored, aten.lt.Scalar)]
)
def test_what_acts_on_few_numbers_stays(fn, kept):
    with torch.no_grad():
        module, _ = capture(fn, X, ROUTER)
        run_pass(FuseRouter(), module, arch=90)
    assert route_experts_op in targets(module)
    assert kept in targets(module)


def test_a_router_that_does_not_run_with_drawn_numbers():
    """A bias that is an index: drawn ones are none."""

    def fn(x, router, bias):
        scores = F.linear(x, router).sigmoid()
        ids = (scores + bias).topk(K, -1).indices
        other = scores.gather(1, (bias * 1e16).long().expand(TOKENS, EXPERTS))
        return (experts(x, ids, other.gather(1, ids)),)

    fused(fn, X, ROUTER, torch.arange(EXPERTS) * 1e-16)


def test_all_experts_in_ascending_order():
    def fn(x, router):
        weights, ids = F.softmax(F.linear(x, router), -1).topk(EXPERTS, -1, largest=False)
        return experts(x, ids, weights), ids

    forms, result = fused(fn, X, ROUTER, left=1)
    assert forms == []
    assert "takes the smallest" in texts(result.refused)


def test_a_factor_of_less_than_a_rounding():
    def fn(x, router):
        weights, ids = F.softmax(F.linear(x, router), -1).topk(K, -1)
        return (experts(x, ids, weights * 1.006),)

    with torch.no_grad():
        module, _ = capture(fn, X.bfloat16(), ROUTER.bfloat16())
        run_pass(FuseRouter(), module, arch=90)
    (call,) = [node for node in module.graph.nodes if node.target is route_experts_op]
    (weights,) = [user for user in call.users if user.args[1] == 1]
    assert [user.target for user in weights.users] == [aten.mul.Tensor]


@pytest.mark.parametrize("name", ["sum", "best two", "best two, others 0"])
def test_groups_by_another_value(name):
    """Scores of a softmax are small: a bias that is not would choose the groups alone."""

    def fn(x, router, bias):
        scores = F.softmax(F.linear(x, router), -1)
        choice = scores + bias
        grouped = choice.view(TOKENS, 4, 3)
        values = grouped.sum(-1) if name == "sum" else grouped.topk(2, -1).values.sum(-1)
        mask = torch.zeros_like(values).scatter_(1, values.topk(2, -1).indices, 1)
        mask = mask.unsqueeze(-1).expand(TOKENS, 4, 3).reshape(TOKENS, EXPERTS).bool()
        ids = choice.masked_fill(~mask, 0.0 if "0" in name else -torch.inf).topk(K, -1, sorted=False).indices
        return (experts(x, ids, scores.gather(1, ids)),)

    with torch.no_grad():
        module, _ = capture(fn, X, ROUTER, BIAS * 0.05)
        run_pass(FuseRouter(), module, arch=90)
    (form,) = [tuple(node.args[2:5]) for node in module.graph.nodes if node.target is route_experts_op]
    assert form == ((K, "none", 1) if name != "best two" else (K, "softmax", 4))


def test_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        forms, _ = fused(softmax_first, X, ROUTER)
    finally:
        torch.set_default_dtype(torch.float32)
    assert forms == [(K, "softmax", 1, 1, True, 1.0)]
