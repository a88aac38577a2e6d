"""Kernels that are compiled while an engine starts are those that its batches launch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

from spec_ops.backends.call import RAGGED, AttentionCall  # noqa: E402
from spec_ops.backends.triton.attention import launcher  # noqa: E402
from spec_ops.backends.triton.cache import append  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Target, compile_in_background  # noqa: E402
from spec_ops.integrations import ahead  # noqa: E402
from spec_ops.integrations.vllm import ahead as ours  # noqa: E402
from spec_ops.integrations.vllm import attention  # noqa: E402
from tests.helpers import vllm_stand_ins as stand_ins  # noqa: E402
from tests.helpers.triton_target import choosing_for, keys, pretended_gpu  # noqa: E402

H200, CUDA = Target(90, 132), torch.device("cuda", 0)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LENGTH, REQUESTS, TOKENS, PAGE, DRAFTS = 2048, 9, 1000, 64, 3
# Query lengths of batches: recorded ones of all sizes, and mixed ones, where prompts begin anywhere.
UNIFORM = [[1] * bs for bs in range(1, REQUESTS + 1)] + [[1 + DRAFTS] * bs for bs in range(1, REQUESTS + 1)]
SHORT_PROMPTS = [[2, 700], [3], [2, 2, 9]]  # verified by requests that a batch begins with
RAGGED_BATCHES = [[4] * bs + [n, m] for bs in range(4) for n, m in ((5, 9), (64, 17), (1, 700), (991, 1))] + [[TOKENS], [5]]


@pytest.fixture
def backend(monkeypatch) -> ModuleType:
    stand_ins.install(monkeypatch)
    return importlib.import_module("spec_ops.integrations.vllm.backend")


@pytest.fixture(autouse=True)
def nothing_started() -> Iterator[None]:
    ahead._start.cache_clear()
    yield
    ahead._start.cache_clear()


def engine(**parts: Any) -> Any:
    made = stand_ins.config(
        dtype=BF16, drafts=DRAFTS,
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS), **parts,
    )  # fmt: skip
    made.model_config.max_model_len, made.cache_config.block_size = LENGTH, PAGE
    return made


def compute(step: str) -> Any:
    """What the op of this name does on a GPU, here on a CPU's tensors."""

    def call(q, k_cache, v_cache, tables, lens, *queries, **options):
        made = AttentionCall(step, q, k_cache, v_cache, None, tables, lens, **options)
        if step in RAGGED:
            made.q_indptr, made.max_q_len = queries
        launcher.attention(made)

    return call


def launched(impl: Any, cache: torch.Tensor, batches: list[list[int]]) -> set[tuple[str, str]]:
    """Keys of the binaries that batches of these query lengths look for."""
    ops = SimpleNamespace(
        append_kv=lambda *args, k_scale=1.0, v_scale=1.0: append.append_kv(*args, k_scale, v_scale),
        **{step: compute(step) for step in ("mha_draft_decode", "mha_target_verify", "mha_extend")},
    )
    heads, kv_heads, dim = impl.num_heads, impl.num_kv_heads, impl.head_size
    tables = torch.zeros(REQUESTS + 2, LENGTH // PAGE + 3, dtype=torch.int32)  # rows begin anywhere
    seen: set[tuple[str, str]] = set()
    with pytest.MonkeyPatch.context() as patch, pretended_gpu(), choosing_for(H200):
        patch.setattr(attention, "ops", ops)
        for lens in batches:
            qkv = torch.zeros(sum(lens), (heads + 2 * kv_heads) * dim, dtype=BF16)
            q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
            common = stand_ins.common(lens, lens, tables[: len(lens)])
            common.seq_lens = torch.zeros(REQUESTS + 2, dtype=torch.int32)[: len(lens)]
            with keys() as found:
                impl.do_kv_cache_update(stand_ins.layer(), k, v, cache, torch.zeros(sum(lens), dtype=torch.int64))
                impl.forward(
                    stand_ins.layer(), q, k, v, cache, attention.metadata_of(common, 1 + DRAFTS),
                    torch.zeros(sum(lens), heads, dim, dtype=BF16),
                )  # fmt: skip
            seen |= set(found)
    return seen


LAYERS = [
    {"num_heads": 32, "head_size": 128, "num_kv_heads": 8},
    {"num_heads": 14, "head_size": 64, "num_kv_heads": 2, "sliding_window": 128, "sinks": torch.zeros(14, dtype=BF16)},
    {"num_heads": 4, "head_size": 256, "num_kv_heads": 1, "logits_soft_cap": 50.0, "sliding_window": 512},
    {"num_heads": 32, "head_size": 128, "num_kv_heads": 8, "kv_cache_dtype": "fp8"},
]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("given", LAYERS)
def test_what_is_compiled_is_what_batches_launch(backend, given, layout):
    impl = backend.SpecOpsImpl(scale=0.1, **given)
    kv_heads, dim = impl.num_kv_heads, impl.head_size
    shape = (5, kv_heads, PAGE, 2 * dim) if layout == "HND" else (5, PAGE, kv_heads, 2 * dim)
    cache = torch.zeros(shape, dtype=torch.uint8 if impl.kv_cache_dtype == "fp8" else BF16)
    cache = cache if layout == "HND" else cache.transpose(1, 2)
    with pretended_gpu(), keys() as compiled:
        compile_in_background(ahead.launches(*next(ours.needed(impl, engine())), H200), CUDA)
    binaries = launched(impl, cache, UNIFORM + RAGGED_BATCHES + SHORT_PROMPTS)
    assert binaries == set(compiled)
    # Of 1 to 9 requests four sizes count: up to 2, 4, 8 and 16. Prompts of 2 and 3 tokens have binaries of their own.
    assert len([name for name, _ in binaries if "split" in name]) == 2 * 4 + 2


LATENT = {
    "num_heads": 16, "head_size": 576, "scale": 0.2, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None,
    "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None,
    "kv_lora_rank": 512, "indexer": None,
}  # fmt: skip


@pytest.fixture
def mla(backend) -> ModuleType:
    return importlib.import_module("spec_ops.integrations.vllm.mla")


def test_latent_attention(mla):
    impl = mla.SpecOpsMLAImpl(**LATENT)
    with pretended_gpu(), keys() as compiled:
        compile_in_background(ahead.launches(*next(ours.needed(impl, engine())), H200), CUDA)
    cache, seen = torch.zeros(5, PAGE, 576, dtype=BF16), set()
    with pretended_gpu(), choosing_for(H200), keys() as found:
        for lens in [*UNIFORM, [2], [3, 3]]:
            q = torch.zeros(len(lens), lens[0], 16, 576, dtype=BF16)
            tables, step = torch.zeros(len(lens), 17, dtype=torch.int32), "draft_decode" if lens[0] == 1 else "target_verify"
            launcher.attention(
                AttentionCall(f"mla_{step}", q, cache, cache, 512, tables, torch.zeros(len(lens), dtype=torch.int32))
            )
        seen |= set(found)
    assert seen
    assert seen <= set(compiled)


@pytest.fixture
def started(monkeypatch) -> list[tuple[ahead.Layer, ahead.Batches, torch.device]]:
    """What is begun; on a machine with a GPU."""
    seen: list[tuple[ahead.Layer, ahead.Batches, torch.device]] = []
    monkeypatch.setattr(ahead, "_start", lambda *given: seen.append(given) or 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return seen


@pytest.mark.parametrize("latent", [False, True], ids=["gqa", "mla"])
def test_a_layer_begins_when_it_is_made_and_the_cache_says_the_rest(backend, mla, started, monkeypatch, latent):
    config = engine()
    module, impl_class, builder_class, given = (
        (mla, "SpecOpsMLAImpl", "SpecOpsMLAMetadataBuilder", LATENT)
        if latent
        else (backend, "SpecOpsImpl", "SpecOpsMetadataBuilder", {"scale": 0.1, **LAYERS[0]})
    )
    monkeypatch.setattr(module, "get_current_vllm_config_or_none", lambda: config)
    impl = getattr(module, impl_class)(**given)
    assert [(layer.is_mla, layer.page_size, device.index) for layer, _, device in started] == [(latent, PAGE, 1)]
    config.compilation_config.static_forward_context = {"layer.0": SimpleNamespace(impl=impl)}
    monkeypatch.setattr(module.limits, "check_kernels", lambda *_: None)
    getattr(module, builder_class)(SimpleNamespace(block_size=32), ["layer.0"], config, CUDA)
    assert [(layer.page_size, device.index) for layer, _, device in started] == [(PAGE, 1), (32, 0)]


def test_nothing_is_begun_without_a_gpu_an_engine_or_a_page_size(backend, started, monkeypatch):
    impl = backend.SpecOpsImpl(num_heads=8, head_size=64, scale=0.1, num_kv_heads=2)
    config = engine()
    assert ours.start(impl, None) == ours.start(impl, config, PAGE, torch.device("cpu")) == 0
    config.cache_config.block_size = None
    assert ours.start(impl, config) == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert ours.start(impl, config, PAGE) == 0
    assert not started


def test_a_guess_that_fails_fails_no_start(backend, started, monkeypatch):
    impl = backend.SpecOpsImpl(num_heads=8, head_size=64, scale=0.1, num_kv_heads=2)

    def broken(*_: Any) -> int:
        raise RuntimeError("of a newer vLLM")

    monkeypatch.setattr(ahead, "_start", broken)
    assert ours.start(impl, engine(), PAGE) == 0
    assert ours.start(impl, SimpleNamespace(), PAGE) == 0
