"""The classes that inherit from vLLM's, on stand-ins for them: what they declare, make and refuse."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from spec_ops.integrations.vllm import limits
from tests.helpers import vllm_stand_ins as stand_ins
from tests.helpers.vllm_stand_ins import DIM, HEADS, KV_HEADS, RANK, ROPE, common, config

SPEC = SimpleNamespace(block_size=16)


@pytest.fixture
def backend(monkeypatch) -> ModuleType:
    stand_ins.install(monkeypatch)
    return importlib.import_module("spec_ops.integrations.vllm.backend")


@pytest.fixture
def mla(backend) -> ModuleType:
    return importlib.import_module("spec_ops.integrations.vllm.mla")


def impl_of(backend: ModuleType, **changes: Any) -> Any:
    given = {"num_heads": HEADS, "head_size": DIM, "scale": 0.3, "num_kv_heads": KV_HEADS}
    return backend.SpecOpsImpl(**(given | changes))


def mla_impl_of(mla: ModuleType, **changes: Any) -> Any:
    given = {
        "num_heads": HEADS, "head_size": RANK + ROPE, "scale": 0.2, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "kv_lora_rank": RANK, "indexer": None,
    }  # fmt: skip
    return mla.SpecOpsMLAImpl(**(given | changes))


def builder_of(cls: type, impl: Any, drafts: int = 0, spec: Any = SPEC, **changes: Any) -> Any:
    made = config([impl], drafts, **changes)
    return cls(spec, ["layer.0"], made, torch.device("cpu"))


def test_one_name_means_the_class_of_the_model(backend, mla):
    choice = importlib.import_module("spec_ops.integrations.vllm.choice")
    assert choice.SpecOpsBackendOfModel is backend.SpecOpsBackend  # no engine
    assert choice.of_model(config(), "backbone") is backend.SpecOpsBackend
    latent = config(mla=True)
    assert choice.of_model(latent, "backbone") is mla.SpecOpsMLABackend
    latent.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(use_mla=False))
    assert choice.of_model(latent, "backbone") is mla.SpecOpsMLABackend
    assert choice.of_model(latent, "eagle_head") is backend.SpecOpsBackend  # its draft is another model
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        choice.Other  # noqa: B018


def test_names(backend, mla, monkeypatch):
    assert backend.SpecOpsBackend.get_name() == mla.SpecOpsMLABackend.get_name() == "CUSTOM"
    stand_ins.register_backend("SPEC_OPS", "path")
    assert backend.SpecOpsBackend.get_name() == mla.SpecOpsMLABackend.get_name() == "SPEC_OPS"


def test_layouts_of_caches_before_vllm_0_29(backend, monkeypatch):
    utils = ModuleType("utils")
    monkeypatch.setitem(__import__("sys").modules, "vllm.v1.attention.backends.utils", utils)
    cls = backend.SpecOpsBackend
    logical = cls.get_kv_cache_shape(10, 16, KV_HEADS, DIM)
    assert logical == (10, KV_HEADS, 16, 2 * DIM)
    for layout, physical in (("HND", (10, KV_HEADS, 16, 2 * DIM)), ("NHD", (10, 16, KV_HEADS, 2 * DIM))):
        utils.get_kv_cache_layout = lambda layout=layout: layout
        assert tuple(logical[i] for i in cls.get_kv_cache_stride_order()) == physical
        with_layers = (3, *logical)
        order = cls.get_kv_cache_stride_order(include_num_layers_dimension=True)
        assert sorted(order) == list(range(5))
        assert order[0] != 0  # pages outermost: vLLM may put layers side by side in a page
        assert tuple(with_layers[i] for i in order if i != 0) == physical


def test_forward(backend):
    """The layer's calls in vLLM's order: memory is measured, keys are stored, queries attend; padding stays."""
    impl = impl_of(backend, sliding_window=5, logits_soft_cap=3.0)
    layer = stand_ins.layer()
    out = torch.full((6, HEADS, DIM), float("nan"))
    assert (impl.forward(layer, out, None, None, torch.zeros(0), None, out) == 0).all()
    kv_cache = stand_ins.cache(4, 16, "HND")
    builder = builder_of(backend.SpecOpsMetadataBuilder, impl, drafts=3)
    meta = builder.build(0, common([4, 1], [4, 1], torch.tensor([[2], [3]], dtype=torch.int32)))
    q, k, v = (torch.randn(6, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    slots = torch.tensor([32, 33, 34, 35, 48])  # the last row is padding of a graph
    impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
    out.fill_(7.0)
    assert impl.forward(layer, q, k, v, kv_cache, meta, out) is out
    assert (out[5] == 7.0).all()
    torch.testing.assert_close(out[4], v[4].repeat_interleave(HEADS // KV_HEADS, 0))  # a token that sees itself alone
    assert torch.isfinite(out[:4]).all()


def test_forward_refuses_quantized_outputs(backend):
    with pytest.raises(ValueError, match="quantized outputs of attention are not supported; leave fuse_attn_quant off"):
        impl_of(backend).forward(None, None, None, None, None, None, torch.zeros(1), output_scale=torch.ones(1))


def test_builders_record_chains_alone(backend, mla):
    tables = torch.zeros(2, 3, dtype=torch.int32)
    for cls, impl in ((backend.SpecOpsMetadataBuilder, impl_of(backend)), (mla.SpecOpsMLAMetadataBuilder, mla_impl_of(mla))):
        builder = builder_of(cls, impl, drafts=3)
        assert builder.reorder_batch_threshold == 4
        assert builder._cudagraph_support == 2
        assert builder.supports_draft_decode_metadata_update
        made = builder.build_for_cudagraph_capture(common([4, 4], [4, 4], tables))
        builder.update_draft_decode_metadata(made)
        with pytest.raises(ValueError, match="a full CUDA graph of requests of 1 to 4 tokens"):
            builder.build_for_cudagraph_capture(common([4, 1], [4, 4], tables))


def test_latent_attention_decodes(mla):
    impl = mla_impl_of(mla)
    assert impl.supports_quant_query_input is False
    builder = builder_of(mla.SpecOpsMLAMetadataBuilder, impl, drafts=3)
    meta = builder.build(0, common([4, 4, 0], [4, 4, 0], torch.tensor([[0], [1], [2]], dtype=torch.int32)))
    assert meta.decode.q_len == 4
    latents, q = torch.randn(3, 16, RANK + ROPE), torch.randn(8, HEADS, RANK + ROPE)
    whole, nothing = impl.forward_mqa(q, latents, meta, stand_ins.layer())
    assert nothing is None
    assert whole.shape == (8, HEADS, RANK)
    torch.testing.assert_close(whole[0], latents[0, :1, :RANK].expand(HEADS, -1))  # the first query sees one row
    parts, _ = impl.forward_mqa((q[..., :RANK], q[..., RANK:]), latents, meta, stand_ins.layer())
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    meta.causal = False
    with pytest.raises(ValueError, match="not causal"):
        impl.forward_mqa(q, latents, meta, stand_ins.layer())


def test_what_vllm_refuses_comes_with_an_advice(backend, mla):
    assert backend.SpecOpsBackend.validate_configuration(block_size=64) == []
    assert backend.SpecOpsBackend.validate_configuration(block_size=8) == [
        "block_size not supported", "pass --block-size 16, 32, 64, 128 or a multiple of 16", limits.OTHER,
    ]  # fmt: skip
    assert backend.SpecOpsBackend.validate_configuration(use_mla=True) == ["MLA not supported", limits.OTHER]
    assert limits.OTHER_MLA in mla.SpecOpsMLABackend.validate_configuration(block_size=8)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"attn_type": "encoder_decoder"}, "attention of type encoder_decoder"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 is not supported; pass one of auto, float16"),
        ({"use_alibi_sqrt": True}, "layers with use_alibi_sqrt"),
        ({"chunk_lookback": 3}, "layers with chunk_lookback"),
    ],
)
def test_refused_layers(changes, told, backend):
    impl_of(backend, use_alibi_sqrt=False, chunk_lookback=-1)  # what such layers are given where nothing is asked
    with pytest.raises(ValueError, match=rf"--attention-backend SPEC_OPS \(vLLM .*\): .*{told}"):
        impl_of(backend, **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sliding_window": 4}, "layers with windows"),
        ({"logits_soft_cap": 4.0}, "layers with soft caps"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "layers with shared caches"),
        ({"indexer": object()}, "layers with sparse indexers"),
        ({"attn_type": "encoder"}, "attention of type encoder.*TRITON_MLA"),
    ],
)
def test_refused_latent_layers(changes, told, mla):
    with pytest.raises(ValueError, match=told):
        mla_impl_of(mla, **changes)


@pytest.mark.parametrize(
    ("block_size", "part", "name", "value", "told"),
    [
        (256, None, None, None, "pages of 256 tokens are not supported; pass --block-size 64"),
        (
            16,
            "parallel_config",
            "decode_context_parallel_size",
            2,
            "decode context parallelism.*--decode-context-parallel-size",
        ),
        (16, "parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
        (16, "cache_config", "calculate_kv_scales", True, "--calculate-kv-scales is not supported"),
    ],
)
def test_refused_engines(block_size, part, name, value, told, backend):
    made = config([impl_of(backend)])
    made.cache_config.cache_dtype = "fp8"
    if part is not None:
        setattr(getattr(made, part), name, value)
    with pytest.raises(ValueError, match=told):
        limits.check_engine(made, SimpleNamespace(block_size=block_size))


def test_a_model_without_kernels_is_refused_on_a_gpu(backend, mla, monkeypatch):
    """There `reference` would run, right and slow."""
    monkeypatch.setattr("spec_ops.integrations.vllm.limits.device_arch", lambda device: 90)
    gpu = torch.device("cuda")
    impl = impl_of(backend)
    with pytest.raises(
        ValueError, match=r"no kernel runs mha_draft_decode of this model: .*query dtype torch.float32.*TRITON_ATTN"
    ):
        limits.check_kernels(limits.metas_of_layer(impl, torch.float32, 16, 4), gpu)
    limits.check_kernels(limits.metas_of_layer(impl, torch.bfloat16, 16, 4), gpu)
    latent = mla_impl_of(mla, head_size=576, kv_lora_rank=512)
    metas = limits.metas_of_layer(latent, torch.bfloat16, 64, 4)
    assert [meta.step for meta in metas] == ["mla_draft_decode", "mla_target_verify"]  # vLLM prefills
    limits.check_kernels(metas, gpu, limits.OTHER_MLA)


def test_kernels_are_chosen_by_all_that_a_layer_asks_for(backend):
    impl = impl_of(backend, sliding_window=5, sinks=torch.zeros(HEADS), logits_soft_cap=2.0, kv_cache_dtype="fp8")
    decode, verify, extend = limits.metas_of_layer(impl, torch.bfloat16, 64, 4)
    assert [meta.step for meta in (decode, verify, extend)] == ["mha_draft_decode", "mha_target_verify", "mha_extend"]
    assert (decode.q_len, verify.q_len, verify.page_size, verify.kv_dtype) == (1, 4, 64, torch.float8_e4m3fn)
    assert all(meta.window and meta.sinks and meta.softcap and not meta.tree_mask for meta in (decode, verify, extend))
    plain = impl_of(backend, kv_cache_dtype="bfloat16")
    assert [meta.kv_dtype for meta in limits.metas_of_layer(plain, torch.bfloat16, 64, 1)] == [torch.bfloat16] * 2
