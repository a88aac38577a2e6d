"""What holds our calls to the packages' real code, without a GPU.

Every argument we pass is one that a rename would break, in each recorded release. Where the packages are installed, their own
Python runs, with all its checks, up to the launch; only facts of the device and the launch itself are stood in for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_ops.backends import AttentionCall, AttentionMeta, get_backend, tokenspeed
from spec_ops.backends.flashinfer import gqa, mla, planned, provider
from tests.backends.flashinfer.test_calls import gqa_call, mla_call, ragged
from tests.helpers import provider_fakes
from tests.helpers.provider_fakes import FLASHINFER, FP8, TOKENSPEED, Fakes

BF16 = torch.bfloat16


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    provider_fakes.interpret_padding(monkeypatch)
    provider_fakes.own_scratch(monkeypatch)
    planned._wrappers.clear()
    yield
    planned._wrappers.clear()


def in_bf16(call: AttentionCall) -> AttentionCall:
    """The call with queries and caches in bfloat16 (fp8 caches stay), as the ops would make it."""
    names = [name for name in ("q", "k_cache", "v_cache") if getattr(call, name).dtype == torch.float32]
    return replace(call, **{name: getattr(call, name).nan_to_num(0.0).to(BF16) for name in names})


def append(kind: str) -> Callable[[], None]:
    """The page append as `page.py` calls it (which needs Triton's interpreter: `tests/interpreter/test_flashinfer_page.py`)."""
    function = "append_paged_kv_cache" if kind == "mha" else "append_paged_mla_kv_cache"

    def call() -> None:
        from spec_ops.backends.flashinfer import page

        def redirect(slots, given, spares, page_size):
            n = len(slots)
            index = torch.arange(n + 1, dtype=torch.int32)
            shared = {"batch_indices": index[:n], "positions": torch.zeros(n, dtype=torch.int32), "kv_indices": slots.int()}
            return given, {**shared, "kv_indptr": index, "kv_last_page_len": torch.ones(n, dtype=torch.int32)}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page, "_redirect", redirect)
            if function == "append_paged_kv_cache":
                cache, rows = torch.zeros(4, 16, 2, 64).to(BF16), torch.ones(3, 2, 64).to(BF16)
                page.append_kv(cache, cache.clone(), rows, rows, torch.tensor([0, 1, 2]), 1.0, 1.0)
            else:
                cache, (c, r) = torch.zeros(4, 64, 576).to(BF16), (torch.ones(3, n).to(BF16) for n in (512, 64))
                page.append_mla_kv(cache, c, r, torch.tensor([0, 1, 2]), 1.0)

    return call


CALLS: dict[str, Callable[[], Any]] = {
    "trtllm": lambda: gqa.trtllm(gqa_call([20], 2)),
    "xqa": lambda: gqa.xqa(gqa_call([20], 2)),
    "trtllm_extend": lambda: gqa.trtllm_extend(ragged(gqa_call([20], 1))),
    "mla trtllm": lambda: mla.trtllm(mla_call([20], 2)),
    "mla cute_dsl": lambda: mla.cute_dsl(mla_call([20], 2)),
    "fa2": lambda: planned.fa2(gqa_call([20], 2, kv_dtype=FP8)),
    "fa3": lambda: planned.fa3(gqa_call([20], 2)),
    "mla fa2": lambda: planned.fa2(mla_call([20], 2)),
    "append_kv": append("mha"),
    "append_mla_kv": append("mla"),
}
EVERY_CALL = [(release, name, call) for release in FLASHINFER for name, call in CALLS.items()]
EVERY_CALL += [(release, "tokenspeed", lambda: tokenspeed.decode(mla_call([20], 2))) for release in TOKENSPEED]


@pytest.mark.parametrize(("release", "call"), [pytest.param(r, c, id=f"{r} {n}") for r, n, c in EVERY_CALL])
def test_every_argument_we_pass_is_needed_by_its_name(release, call, monkeypatch):
    """Each is renamed in the recorded signature, one at a time: the call must fail by it."""
    fakes = Fakes([release]).install(monkeypatch)
    call()
    passed = {(path, name) for path, arguments in fakes.calls for name in arguments if name != "self"}
    assert len(passed) >= 5
    tried = 0
    for path, name in sorted(passed):
        # Releases before 0.7 have no counters: whether there is such an argument is asked, not assumed.
        if name == "multi_ctas_kv_counter_buffer":
            continue
        text = provider_fakes.RECORDED[release][path]
        renamed = re.sub(rf"\b{name}\b", f"{name}_renamed", text, count=1)
        assert renamed != text
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(provider_fakes.RECORDED[release], path, renamed)
            Fakes([release]).install(patch)
            planned._wrappers.clear()
            provider.accepts.cache_clear()
            with pytest.raises(TypeError, match=rf"'{name}(_renamed)?'"):
                call()
        tried += 1
    assert tried >= 5
    planned._wrappers.clear()


class Launches:
    """Stands in for a compiled module: notes what reaches a launch."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.pdl_asked = 0

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: self.names.append(name)

    def supports_pdl(self, device) -> bool:
        self.pdl_asked += 1
        return True


@pytest.fixture
def on_device(monkeypatch) -> Callable[..., Launches]:
    """FlashInfer as on a device of the given capability with 132 multiprocessors, whose modules note their launches."""

    def install(capability: tuple[int, int], *more: str) -> Launches:
        launches = Launches()
        facts = {
            "get_compute_capability": lambda device: capability,
            "get_device_sm_count": lambda device: 132,
            "get_num_sm": lambda device: 132,
            "device_support_pdl": launches.supports_pdl,
            "get_trtllm_gen_fmha_module": lambda *args: launches,
            "get_page_module": lambda: launches,
            "get_xqa_module": lambda *args: launches,
            "_get_compiled_mla_kernel": lambda *args, **kwargs: launches.compiled,
        }
        names = ("decode", "prefill", "xqa", "page", "mla._core", "utils", *more)
        for module in (importlib.import_module(f"flashinfer.{name}") for name in names):
            for fact, answer in facts.items():
                if hasattr(module, fact):
                    monkeypatch.setattr(module, fact, answer)
        return launches

    return install


def masks_rightly() -> bool:
    """Whether the installed XQA is of 0.7 or newer."""
    return "q_cu_seq_lens" in provider_fakes.real_signature("flashinfer.decode:xqa_batch_decode_with_kv_cache").parameters


@installed("flashinfer")
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("q_len", [1, 4, 16])
@pytest.mark.parametrize("window_left", [-1, 30])
def test_real_checks_of_xqa(q_len, kv_dtype, window_left, on_device):
    for arch in ((9, 0), (10, 0), (12, 0)):
        launches = on_device(arch)
        args = in_bf16(gqa_call([70, 33], q_len, dim=64, kv_dtype=kv_dtype, window_left=window_left, sinks=torch.zeros(4)))
        if q_len > 1 and (kv_dtype == FP8 or window_left >= 0) and not masks_rightly():
            with pytest.raises(RuntimeError, match=r"with several queries per request needs flashinfer-python 0\.7"):
                gqa.xqa(args)
            continue
        gqa.xqa(args)
        assert launches.names == ["xqa"]
        assert launches.pdl_asked == 1  # programmatic dependent launch follows the device


@installed("flashinfer")
def test_real_checks_of_xqa_trees_and_outputs(on_device):
    launches = on_device((9, 0))
    tree = torch.ones(2, 4, dtype=torch.int64)
    gqa.xqa(in_bf16(gqa_call([70, 33], 4, dim=64, tree_mask=tree, mask_len=12)))
    gqa.xqa(in_bf16(gqa_call([70, 33], 4 if masks_rightly() else 1, dim=64, kv_dtype=FP8)), out_dtype=FP8, out_scale=0.5)
    assert launches.names == ["xqa", "xqa"]
    with pytest.raises(AssertionError, match="KV cache must be fp8 when output is fp8"):
        gqa.xqa(in_bf16(gqa_call([70, 33], 4, dim=64)), out_dtype=FP8)


@installed("flashinfer")
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8], ids=["bf16", "fp8"])
def test_real_checks_of_trtllm(kv_dtype, on_device):
    launches = on_device((10, 0))
    for page_size in (16, 32, 64):
        args = in_bf16(
            gqa_call([70, 33], 4, page_size=page_size, dim=64, kv_dtype=kv_dtype, window_left=9, sinks=torch.zeros(4))
        )
        gqa.trtllm(args, skip_softmax_threshold_scale_factor=100.0)
        gqa.trtllm_extend(ragged(in_bf16(gqa_call([70, 33], 1, page_size=page_size, dim=64, kv_dtype=kv_dtype))))
        if kv_dtype == FP8:
            for dtype in (FP8, torch.float16, BF16):
                gqa.trtllm(args, out_dtype=dtype)
    assert set(launches.names) == {"trtllm_paged_attention_decode", "trtllm_paged_attention_context"}
    assert launches.pdl_asked == len(launches.names)
    if kv_dtype != FP8:
        with pytest.raises(ValueError, match="Unsupported out_dtype"):
            gqa.trtllm(args, out_dtype=FP8)


@installed("flashinfer")
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("kernel", "rank"), [("trtllm", 512), ("trtllm", 256), ("cute_dsl", 512)])
def test_real_checks_of_mla(kernel, rank, kv_dtype, on_device):
    """Over every page size that the declaration offers; heads at the limits."""
    cute = ("cute_dsl.utils", "cute_dsl.attention.monolithic.mla_decode") if kernel == "cute_dsl" else ()
    try:
        launches = on_device((10, 0), *cute)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"this release's CuTe DSL kernels do not import here: {error}")  # 0.6.12 with nvidia-cutlass-dsl 4.8
    name = "flashinfer-trtllm" if kernel == "trtllm" else "flashinfer-cute-dsl"
    for page_size, heads in itertools.product(sorted(get_backend(name).page_sizes), (8, 64, 128)):
        meta = mla_meta(rank, heads, page_size)
        if get_backend(name).refuse(meta, 100) is not None:
            continue
        launches.names.clear()
        getattr(mla, kernel)(in_bf16(mla_call([100, 33], 4, page_size=page_size, heads=heads, rank=rank, kv_dtype=kv_dtype)))
        assert launches.names == (["trtllm_paged_attention_decode"] if kernel == "trtllm" else ["compiled"])


def mla_meta(rank: int, heads: int, page_size: int) -> AttentionMeta:
    return AttentionMeta(
        step="mla_target_verify", dtype=BF16, kv_dtype=BF16, num_heads=heads, num_kv_heads=1, head_dim=rank + 64,
        v_head_dim=rank, page_size=page_size, q_len=4, tree_mask=False, window=False, sinks=False, softcap=False,
    )  # fmt: skip


@installed("flashinfer")
def test_real_refusals_of_mla_are_declared(on_device):
    """What trtllm-gen's own checks refuse, our declaration refuses."""
    on_device((10, 0))
    backend = get_backend("flashinfer-trtllm")
    refused = 0
    for page_size, heads in itertools.product((16, 32, 64, 128), (8, 64, 96, 128)):
        args = in_bf16(mla_call([100, 33], 2, page_size=page_size, heads=heads))
        try:
            mla.trtllm(args)
        except ValueError:
            refused += 1
            assert backend.refuse(mla_meta(512, heads, page_size), 100) is not None
    assert refused >= 4


@installed("flashinfer")
def test_real_checks_of_page_appends(on_device):
    launches = on_device((9, 0))
    CALLS["append_kv"]()
    CALLS["append_mla_kv"]()
    assert launches.names == ["append_paged_kv_cache", "append_paged_mla_kv_cache"]


@installed("flashinfer")
def test_xqa_declares_what_can_be_built(monkeypatch):
    """The checks of FlashInfer's own generator over page sizes, head_dims and groups, for one query and several."""
    jit = importlib.import_module("flashinfer.jit.xqa")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(jit, "gen_jit_spec", lambda name, *args, **kwargs: name)
    backend = get_backend("flashinfer-xqa")
    base = AttentionMeta(
        step="mha_target_verify", dtype=BF16, kv_dtype=BF16, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128,
        page_size=64, q_len=4, tree_mask=False, window=False, sinks=False, softcap=False,
    )  # fmt: skip
    declared = 0
    for page, dim, q_len in itertools.product(
        (1, 8, 16, 32, 48, 64, 128), (8, 16, 64, 72, 80, 128, 256, 272, 512, 528), (1, 4)
    ):
        meta = AttentionMeta(**{**vars(base), "page_size": page, "head_dim": dim, "v_head_dim": dim, "q_len": q_len})
        if backend.refuse(meta, 90) is None:
            jit.gen_xqa_module(BF16, BF16, page, dim, 4, False, BF16, q_len)
            declared += 1
    assert declared == 4 * 5 * 2


@installed("flashinfer")
def test_constants_are_the_packages(on_device):
    on_device((10, 0))
    core, utils = (importlib.import_module(f"flashinfer.{name}") for name in ("mla._core", "utils"))
    known = {(d.kv_lora_rank, d.qk_nope_head_dim) for d in core.supported_mla_head_dimensions if d.qk_rope_head_dim == 64}
    assert set(mla.NOPE_DIM.items()) <= known
    if hasattr(utils, "get_trtllm_gen_multi_ctas_kv_counter_bytes"):
        assert utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(1024, 128, 160) <= provider.COUNTER_BYTES


@installed("flashinfer")
def test_programmatic_dependent_launch_is_left_to_the_device():
    """None of our calls turns it off, and FlashInfer's default asks the device (on from sm_90)."""
    for path in provider_fakes.RECORDED[FLASHINFER[-1]]:
        parameters = provider_fakes.real_signature(path).parameters
        if "enable_pdl" in parameters:
            assert parameters["enable_pdl"].default is None
    source = inspect.getsource(importlib.import_module("flashinfer.utils").device_support_pdl)
    assert "major >= 9" in source


@installed("tokenspeed_mla")
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8], ids=["bf16", "fp8"])
def test_real_checks_of_tokenspeed(kv_dtype, monkeypatch):
    """Over the declared page sizes, and heads and batches for which its workspace is largest."""
    module = importlib.import_module("tokenspeed_mla.mla_decode")
    launched: list[Any] = []
    monkeypatch.setattr(module, "get_num_sm", lambda device: 148)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr("tvm_ffi.use_torch_stream", contextlib.nullcontext)
    monkeypatch.setattr(module, "_get_compiled_mla_kernel", lambda *args, **kwargs: lambda *a: launched.append((args, kwargs)))
    for page_size in sorted(get_backend("tokenspeed").page_sizes):
        tokenspeed.decode(in_bf16(mla_call([100, 33], 4, page_size=page_size, kv_dtype=kv_dtype)))
    dtype = FP8 if kv_dtype == FP8 else BF16
    sizes = functools.partial(
        module._get_split_kv_and_workspace_size, kv_lora_rank=512, max_active_blocks=148, torch_dtype=dtype
    )
    for batch, q_len, heads, length in itertools.product((1, 8, 64, 256), (1, 4, 16), (16, 128), (4096, 131072)):
        assert sizes(batch, q_len, heads, max_seq_len=length, mma_qk_tiler_mn=(128, 128))[1] <= tokenspeed.WORKSPACE_BYTES
    assert len(launched) == len(get_backend("tokenspeed").page_sizes)


@installed("tokenspeed_mla")
@pytest.mark.parametrize("path", sorted({path for package in TOKENSPEED for path in provider_fakes.RECORDED[package]}))
def test_tokenspeed_records_match_the_installed_release(path):
    import importlib.metadata

    package = f"tokenspeed-mla {importlib.metadata.version('tokenspeed-mla')}"
    if package not in provider_fakes.RECORDED:
        pytest.skip(f"{package} is not recorded")
    real, recorded = provider_fakes.real_signature(path), provider_fakes.signature(package, path)
    assert [(p.name, p.kind) for p in real.parameters.values()] == [(p.name, p.kind) for p in recorded.parameters.values()]
