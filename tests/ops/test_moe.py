"""Mixtures of experts: routers and experts of transformers, and what tokens without experts get."""

from __future__ import annotations

import pytest
import torch

import spec_ops
from spec_ops.backends.expert_format import dequantized_expert, expert_format
from tests.helpers.mixtures import FORMS, PUBLISHED, STORED, call, dequantized_call, stored_call

EXPERTS, HIDDEN, INNER, TOKENS = 16, 24, 20, 9


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=rng(seed))


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """With random weights and biases, in float64."""
    generator = rng(1)
    for value in (*module.parameters(), *module.buffers()):
        value.data.copy_(torch.randn(value.shape, generator=generator))
    return module.double().requires_grad_(False)


def routers() -> dict:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "vocab_size": 8}
    local = {**sizes, "num_local_experts": EXPERTS}
    groups = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    qwen = {**sizes, "num_experts": EXPERTS}
    grouped = {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5}
    return {
        "mixtral": (MixtralTopKRouter(transformers.MixtralConfig(**local)), {}),
        "qwen3_moe": (Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**qwen, norm_topk_prob=True)), {}),
        "qwen3_moe as they are": (
            Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**qwen, norm_topk_prob=False)), {"renormalize": False},
        ),
        "gpt_oss": (GptOssTopKRouter(transformers.GptOssConfig(**local)), {}),
        "deepseek_v3": (DeepseekV3TopkRouter(transformers.DeepseekV3Config(**sizes, **groups)), grouped),
        "glm4_moe": (Glm4MoeTopkRouter(transformers.Glm4MoeConfig(**sizes, **groups)), grouped),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe as they are", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_routers_of_transformers(name):
    router, arguments = routers()[name]
    filled(router).float()
    bias = getattr(router, "e_score_correction_bias", None)
    logits, weights, ids = router(normal(64, HIDDEN) * 0.3)
    got_ids, got_weights = spec_ops.route_experts(logits, 3, bias=bias, **arguments)
    wanted_ids, order = ids.sort()  # transformers leaves the order open
    ours, our_order = got_ids.sort()
    assert torch.equal(ours, wanted_ids)
    torch.testing.assert_close(got_weights.gather(1, our_order), weights.gather(1, order), rtol=1e-6, atol=0)
    choice = logits if bias is None else logits.sigmoid() + bias
    assert (choice.gather(1, got_ids).diff() <= 0).all()  # best first


def test_ties_go_to_the_lower_id_and_nan_comes_last():
    nan = float("nan")
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [nan, -1.0, nan, -float("inf"), 0.0], [0.0] * 5])
    ids, weights = spec_ops.route_experts(logits, 4)
    assert ids.tolist() == [[1, 2, 4, 0], [4, 1, 0, 2], [0, 1, 2, 3]]
    assert weights.isfinite().all()
    assert (weights[1, 2:] == 0).all()
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32


def test_a_bias_chooses_and_does_not_weigh():
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 5.0, 0.0, 3.0])
    ids, weights = spec_ops.route_experts(logits, 2, scoring="sigmoid", bias=bias, renormalize=False)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("bias", [None, torch.zeros(6)])
def test_how_good_a_group_is(bias):
    """Its best two together with a bias; its best one without. An expert of another group is worse than -inf."""
    logits = torch.tensor([[9.0, -9.0, 5.0, 4.9, -9.0, -float("inf")]])
    ids, _ = spec_ops.route_experts(logits, 2, scoring="sigmoid", bias=bias, groups=3, top_groups=1)
    assert ids.tolist() == ([[0, 1]] if bias is None else [[2, 3]])
    ids, _ = spec_ops.route_experts(logits.neg(), 2, groups=3, top_groups=1)
    assert ids.tolist() == [[5, 4]]


def experts_of(name: str) -> tuple[torch.nn.Module, dict]:
    """An experts module of transformers, and how the op is told of its form."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "hidden_act": "silu", "vocab_size": 8}
    if name == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config = transformers.GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
        form = {"interleaved": True, "transposed": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
        return GptOssExperts(config), form
    if name == "deepseek_v4":
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

        module = DeepseekV4Experts(transformers.DeepseekV4Config(**sizes, n_routed_experts=EXPERTS))
        module.limit = 2.0
        return module, {"limit": 2.0}
    if name == "nemotron_h":
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

        config = transformers.NemotronHConfig(
            **{**sizes, "mlp_hidden_act": "relu2"}, n_routed_experts=EXPERTS, moe_latent_size=None
        )
        return NemotronHExperts(config), {"gated": False, "activation": "relu2"}
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    module = Qwen3MoeExperts(transformers.Qwen3MoeConfig(**sizes, num_experts=EXPERTS))
    module.act_fn = {"gelu": torch.nn.GELU(), "gelu_tanh": torch.nn.GELU("tanh"), "relu": torch.nn.ReLU()}.get(
        name, torch.nn.SiLU()
    )
    return module, {"activation": name} if name != "qwen3_moe" else {}


def routing(k: int = 3, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, EXPERTS, generator=rng(5)).topk(k).indices, torch.rand(tokens, k, generator=rng(6))


@pytest.mark.parametrize("name", ["qwen3_moe", "gelu", "gelu_tanh", "relu", "gpt_oss", "deepseek_v4", "nemotron_h"])
def test_experts_of_transformers(name):
    """Against the module's own loop in float64: what differs is float32's rounding."""
    module, form = experts_of(name)
    filled(module)
    module.config._experts_implementation = "eager"
    x, (ids, weights) = normal(TOKENS, HIDDEN, seed=2), routing()
    wanted = module(x.double(), ids, weights.double())
    stacks = {n: p.float() for n, p in module.named_parameters()}
    got = spec_ops.moe_experts(
        x, ids.int(), weights, stacks.get("gate_up_proj", stacks.get("up_proj")), stacks["down_proj"],
        gate_up_bias=stacks.get("gate_up_proj_bias"), down_bias=stacks.get("down_proj_bias"), **form,
    )  # fmt: skip
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def stacks(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = normal(EXPERTS, 2 * INNER, HIDDEN, seed=3), normal(EXPERTS, HIDDEN, INNER, seed=4)
    return (gate_up / HIDDEN**0.5).to(dtype), (down / INNER**0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype):
    x, (ids, weights), (gate_up, down) = normal(TOKENS, HIDDEN).to(dtype), routing(), stacks(dtype)
    got = spec_ops.moe_experts(x, ids, weights, gate_up, down)
    wanted = spec_ops.moe_experts(x.float(), ids, weights, gate_up.float(), down.float())
    assert got.dtype == dtype
    assert torch.equal(got, wanted.to(dtype))


def test_negative_ids_are_no_experts():
    """Whatever their weights say, and whatever the other experts hold."""
    x, (ids, weights), (gate_up, down) = normal(TOKENS, HIDDEN), routing(), stacks()
    dropped = torch.rand(ids.shape, generator=rng(7)) < 0.5
    dropped[2] = True
    wanted = spec_ops.moe_experts(x, ids, weights.masked_fill(dropped, 0.0), gate_up, down)
    poisoned = weights.masked_fill(dropped, float("nan"))
    got = spec_ops.moe_experts(x, ids.masked_fill(dropped, -1), poisoned, gate_up, down)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert (got[2] == 0).all()


def test_an_expert_that_is_named_twice_counts_twice():
    x, (gate_up, down) = normal(2, HIDDEN), stacks()
    twice = spec_ops.moe_experts(x, torch.tensor([[3, 3], [5, 1]]), torch.tensor([[0.25, 0.5], [1.0, 0.0]]), gate_up, down)
    once = spec_ops.moe_experts(x, torch.tensor([[3], [5]]), torch.tensor([[0.75], [1.0]]), gate_up, down)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("tokens", "k"), [(0, 3), (4, 0)])
def test_nothing_to_do(tokens, k):
    gate_up, down = stacks()
    out = spec_ops.moe_experts(torch.ones(tokens, HIDDEN), *(r[:, :k] for r in routing(tokens=tokens)), gate_up, down)
    assert out.shape == (tokens, HIDDEN)
    assert (out == 0).all()


def test_mxfp4_is_what_transformers_reads():
    """All numbers and scales but NaN, as gpt-oss's files have them: blocks of 16 bytes."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = rng(3)
    blocks = torch.randint(256, (3, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 2), generator=generator, dtype=torch.uint8)
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    stored = expert_format("test", "down", blocks.flatten(2), scales)
    assert stored == (4, 1, 32, 1, False)
    for block, scale, expert in zip(blocks.flatten(2), scales, wanted, strict=True):
        assert torch.equal(dequantized_expert(block, scale, stored), expert)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("form", [FORMS["Qwen3-MoE"], PUBLISHED], ids=["gate and up", "interleaved"])
def test_stored_weights_are_the_dequantized_ones(form, kind):
    args = stored_call(form, kind, 9, 3, 5, 160, 192)
    wide = dequantized_call(args)
    for mine, given in zip(wide[3:5], call(form, 9, 3, 5, 160, 192)[3:5], strict=True):
        assert (mine - given).norm() < (0.2 if STORED[kind] == 4 else 0.05) * given.norm()
    names = ("gate_up_bias", "down_bias", "activation", "gated", "interleaved", "transposed", "limit", "alpha", "beta")
    options = dict(zip(names, args[5:14], strict=True))
    got = spec_ops.moe_experts(*args[:5], **options, gate_up_scale=args[14], down_scale=args[15])
    assert torch.equal(got, spec_ops.moe_experts(*wide[:5], **options))


def test_gate_and_up_projection_have_blocks_of_their_own():
    """Halves of 192 rows: the second begins in the middle of a block of 128 of all rows."""
    weight, scale = torch.ones(1, 384, 8).to(torch.float8_e4m3fn), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
    stored = expert_format("test", "gate_up", weight, scale, 2)
    rows = dequantized_expert(weight[0], scale[0], stored)[:, 0].tolist()
    assert rows == [1.0] * 128 + [2.0] * 64 + [3.0] * 128 + [4.0] * 64


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (
            torch.ones(5, 64, 4),
            ValueError,
            r"must be \[5, 64, 192 / group\] with a group of .* beside int4, got shape \(5, 64, 4",
        ),
        (torch.ones(5, 1, 6), ValueError, r"must be \[5, 64, 192 / group\]"),
        (torch.ones(5, 64, 6, dtype=torch.uint8)[..., :5], ValueError, r"must be \[5, 64, 192 / 32\] beside MXFP4"),
        (
            torch.ones(5, 64, 6, dtype=torch.int8),
            TypeError,
            "must be of uint8 .e8m0. beside MXFP4, or of float32, .* beside int4",
        ),
        (None, ValueError, "must be given beside"),
    ],
)
def test_scales_of_4_bits_that_fit_no_format(scale, error, message):
    with pytest.raises(error, match=f"test: `down_scale` {message}"):
        expert_format("test", "down", torch.zeros(5, 64, 96, dtype=torch.uint8), scale)
