"""What the backend refuses when an engine starts: the message says what, and what to use instead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spec_ops.integrations.engine_symbols import Symbol, read_module
from spec_ops.integrations.sglang import symbols
from spec_ops.integrations.sglang.limits import check_inputs, check_layer, check_runner
from tests.helpers.engine_source import write_source
from tests.integrations.sglang.stand_ins import layer, runner

EAGLE = {
    "speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": 4, "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
}  # fmt: skip


class SWAKVPool:
    dtype, head_num, head_dim = torch.float32, 2, 16


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("arguments", [{}, EAGLE, EAGLE | {"speculative_algorithm": "EAGLE"}])
def test_supported(mla, arguments):
    check_runner(runner(64 if not arguments else 1, mla=mla, **arguments))


@pytest.mark.parametrize(
    ("page_size", "arguments", "told"),
    [
        (256, {}, "pages of 256 tokens.*--page-size 64"),
        (1, EAGLE | {"speculative_algorithm": "NGRAM"}, "speculation by NGRAM.*use one of EAGLE, EAGLE3, NEXTN"),
        (1, EAGLE | {"speculative_num_draft_tokens": 65}, "65 draft tokens.*64 or less"),
        (1, EAGLE | {"speculative_eagle_topk": 10, "speculative_num_steps": 7}, "10 branches and 7 steps.*at most 64"),
        (64, EAGLE | {"speculative_eagle_topk": 2}, "trees with pages of 64.*--page-size 1"),
        (64, {"enable_two_batch_overlap": True}, "two-batch overlap.*--enable-two-batch-overlap"),
        (64, {"enable_multi_layer_eagle": True}, "multi-layer EAGLE"),
        (64, {"enable_deterministic_inference": True}, "deterministic inference"),
        (64, {"attn_cp_size": 2}, "context parallelism"),
        (64, {"dcp_size": 2}, "context parallelism"),
        (64, {"enable_pdmux": True}, "PD multiplexing.*--enable-pdmux"),
    ],
)
def test_refused_arguments(page_size, arguments, told):
    with pytest.raises(ValueError, match=rf"--attention-backend spec_ops \(SGLang .*\): .*{told}"):
        check_runner(runner(page_size, **arguments))


def test_refused_pools_and_models():
    with pytest.raises(ValueError, match=r"KV pool SWAKVPool.*another --attention-backend.*--disable-hybrid-swa-memory"):
        check_runner(runner(64, pool=SWAKVPool()))
    crossing = runner(64)
    crossing.model_config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="cross attention"):
        check_runner(crossing)


SPLIT = "layers/attention/hybrid_attn_backend.py"


@pytest.mark.parametrize(
    ("prefill", "decode", "mode", "refused"),
    [
        ("fa3", "spec_ops", "decode", True),
        ("spec_ops", "fa3", "prefill", True),
        ("fa3", "spec_ops", "prefill", False),  # fa3 verifies
        ("spec_ops", "fa3", "decode", False),
        ("spec_ops", "spec_ops", "decode", False),
    ],
)
def test_two_backends_of_which_ours_verifies(prefill, decode, mode, refused, tmp_path, monkeypatch):
    """Before some release SGLang hands neither the tables of a CUDA graph nor the tree's mask on: tokens would be wrong."""
    split = {"get_attention_backends": lambda: (prefill, decode), "speculative_attention_mode": mode}
    check_runner(runner(1, **split))  # without speculation all is handed on
    folder = write_source(tmp_path, (Symbol(SPLIT, "HybridAttnBackend.init_forward_metadata_out_graph"),))
    monkeypatch.setattr(symbols, "root", lambda: folder)
    if refused:
        told = rf"with {prefill} for prefill and {decode} for decode, .*pass --attention-backend spec_ops alone"
        with pytest.raises(ValueError, match=told):
            check_runner(runner(1, **EAGLE, **split))
    else:
        check_runner(runner(1, **EAGLE, **split))
    read_module.cache_clear()
    newer = ("HybridAttnBackend.init_forward_metadata_in_graph", "HybridAttnBackend.verify_mask")
    write_source(tmp_path, tuple(Symbol(SPLIT, path) for path in newer))
    check_runner(runner(1, **EAGLE, **split))


@pytest.mark.parametrize("mla", [False, True])
def test_caches_without_a_kernel_are_refused_on_every_device(mla):
    made = runner(64, mla=mla)
    made.token_to_kv_pool.dtype = torch.float8_e5m2
    with pytest.raises(ValueError, match=r"float8_e5m2.*use another --attention-backend"):
        check_runner(made)


def test_heads_without_a_kernel_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr("spec_ops.integrations.sglang.limits.device_arch", lambda device: 90)
    on_gpu = runner(64)
    on_gpu.device, on_gpu.dtype = "cuda", torch.bfloat16
    on_gpu.token_to_kv_pool.dtype, on_gpu.token_to_kv_pool.head_dim = torch.bfloat16, 1024
    on_gpu.model.modules = lambda: [layer(qk_head_dim=1024, v_head_dim=1024)]
    with pytest.raises(ValueError, match=r"no kernel runs mha_draft_decode of this model: .*1024"):
        check_runner(on_gpu)


def test_a_model_without_kernels_is_refused_on_a_gpu(monkeypatch):
    """There `reference` would run, right and slow."""
    monkeypatch.setattr("spec_ops.integrations.sglang.limits.device_arch", lambda device: 90)
    on_gpu = runner(64)
    on_gpu.device = "cuda"
    with pytest.raises(ValueError, match=r"no kernel runs mha_draft_decode of this model: .*query dtype torch.float32"):
        check_runner(on_gpu)
    on_gpu.dtype = on_gpu.token_to_kv_pool.dtype = torch.bfloat16
    check_runner(on_gpu)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "layer 0 has attention of type encoder_only"),
        ({"is_cross_attention": True}, "layer 0 has attention of type cross"),
        ({"xai_temperature_len": 5}, "xai_temperature_len"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "caps logits by sigmoid"),
    ],
)
def test_refused_layers(changes, told):
    check_layer(layer())
    with pytest.raises(ValueError, match=told):
        check_layer(layer(**changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tp_k_head_num": 4}, "layer 3 has 4 KV heads with keys 16 and values 16 wide"),
        ({"qk_head_dim": 24}, "layer 3 has 2 KV heads with keys 24 and values 16 wide"),
        ({"v_head_dim": 8}, "layer 3 has 2 KV heads with keys 16 and values 8 wide"),
        ({"xai_temperature_len": 5}, "layer 3 scales logits by length"),
    ],
)
def test_all_layers_are_looked_at_when_an_engine_starts(changes, told):
    """Keys of more heads than a pool has would be written past a token's row."""
    given = runner(64)
    given.model.modules = lambda: [SimpleNamespace(), layer(), layer(layer_id=3, **changes)]
    told = f"{told}, where the KV pool holds 2 with 16 and 16" if told.endswith("wide") else told
    with pytest.raises(ValueError, match=rf"{told}.*; use another --attention-backend"):
        check_runner(given)


def test_values_may_be_narrower_than_keys():
    given = runner(64)
    given.token_to_kv_pool.v_head_dim = 8
    given.model.modules = lambda: [layer(v_head_dim=8)]
    check_runner(given)


BOTH_WAYS = {"attn_type": SimpleNamespace(value="decoder_bidirectional")}


def test_layers_of_gemma_3_that_are_said_to_attend_both_ways():
    """Its text is causal; an embedding model's is not."""
    check_layer(layer(**BOTH_WAYS))
    check_layer(layer(**BOTH_WAYS), SimpleNamespace(use_bidirectional_attention=False))
    with pytest.raises(ValueError, match="layer 0 has attention of type decoder_bidirectional"):
        check_layer(layer(**BOTH_WAYS), SimpleNamespace(use_bidirectional_attention=True))


def test_images_between_whose_tokens_attention_goes_both_ways():
    image, sound = (SimpleNamespace(contains_image_inputs=lambda found=found: found) for found in (True, False))
    for given in (None, [], [None], [None, sound]):
        check_inputs(layer(**BOTH_WAYS), SimpleNamespace(mm_inputs=given))
    check_inputs(layer(), SimpleNamespace(mm_inputs=[image]))
    with pytest.raises(ValueError, match="both directions between the tokens of an image; use another --attention-backend"):
        check_inputs(layer(**BOTH_WAYS), SimpleNamespace(mm_inputs=[None, image]))
