"""Variants of the FlashInfer backends: skip-softmax and output dtypes reach the kernels that have them, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spec_ops
from spec_ops.backends import AttentionCall, BackendError, get_backend, registry, select_backend, unregister_backend
from spec_ops.backends.flashinfer import register_variant
from tests.backends.flashinfer.test_calls import CONTEXT, DECODE, MLA, gqa_call, mla_call
from tests.backends.flashinfer.test_selection import BACKENDS_PAGE, GQA
from tests.backends.flashinfer.test_selection import MLA as MLA_META
from tests.helpers import provider_fakes
from tests.helpers.provider_fakes import FLASHINFER, FP8, Fakes

XQA = "flashinfer.decode:xqa_batch_decode_with_kv_cache"
BF16, HALF = torch.bfloat16, torch.float16


@pytest.fixture(params=FLASHINFER)
def fakes(request, monkeypatch) -> Iterator[Fakes]:
    provider_fakes.interpret_padding(monkeypatch)
    provider_fakes.own_scratch(monkeypatch)
    monkeypatch.setattr(registry, "device_arch", lambda device: 100)
    registry._forget()
    yield Fakes([request.param]).install(monkeypatch)
    registry._forget()


@pytest.fixture
def variant() -> Iterator:
    made = []

    def register(base: str, **options):
        made.append(register_variant(base, f"variant{len(made)}", **options))
        return made[-1].name

    yield register
    for backend in made:
        unregister_backend(backend.name)


def tensors(call: AttentionCall) -> tuple:
    """What the public op takes in front."""
    return call.q, call.k_cache, call.v_cache, call.block_tables, call.seq_lens


def verify(given: tuple, backend: str) -> torch.Tensor:
    """The public op with `tensors(gqa_call(...))`, in bfloat16."""
    q, k, v, tables, lens = given
    fp8 = k.dtype == FP8
    caches = [x if fp8 else x.nan_to_num(0.0).to(BF16) for x in (k, v)]
    scales = {"k_scale": 0.5, "v_scale": 1.5} if fp8 else {}
    return spec_ops.mha_target_verify(q.to(BF16), *caches, tables, lens, scale=0.3, **scales, backend=backend)


def test_skip_softmax_reaches_trtllm(variant, fakes):
    name = variant("flashinfer-trtllm", skip_softmax_threshold_scale_factor=400.0)
    args = tensors(gqa_call([70, 33], 4, page_size=64, dim=64))
    assert torch.equal(verify(args, name), verify(args, "flashinfer-trtllm"))  # the stand-in skips nothing
    given = [call["skip_softmax_threshold_scale_factor"] for path, call in fakes.calls if path == DECODE]
    assert given == [400.0, None]
    q, k, v, tables, lens = (x.to(BF16) if x.is_floating_point() else x for x in args)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)
    spec_ops.mha_extend(q.flatten(0, 1), k, v, tables, lens, starts, 4, backend=name)
    assert fakes.last(CONTEXT)["skip_softmax_threshold_scale_factor"] == 400.0
    q, cache, _, tables, lens = tensors(mla_call([70], 2))
    spec_ops.mla_target_verify(q.to(BF16), cache.to(BF16), 512, tables, lens, scale=0.1, backend=name)
    assert fakes.last(MLA)["skip_softmax_threshold_scale_factor"] == 400.0


@pytest.mark.parametrize("base", ["flashinfer-trtllm", "flashinfer-xqa"])
def test_fp8_results(base, variant, fakes):
    """Stored as value / out_scale; a padded row is zero; the fake has the dtype that comes."""
    if base.endswith("xqa") and "q_cu_seq_lens" not in fakes.signatures[XQA].parameters:
        pytest.skip("XQA of 0.6 refuses an fp8 cache with several queries")
    name = variant(base, out_dtype=FP8, out_scale=0.25)
    args = tensors(gqa_call([70, 0, 33], 4, page_size=64, dim=64, kv_dtype=FP8))
    exact, out = verify(args, base), verify(args, name)
    assert out.dtype == FP8
    assert fakes.last(DECODE)["bmm2_scale"] == 1.5 / 0.25
    assert not out[1].view(torch.uint8).any()
    # One rounding to 4 bits of significand (or to subnormal steps of 2^-9), one to bfloat16's 8.
    torch.testing.assert_close(out.float() * 0.25, exact.float(), rtol=2**-4 + 2**-8, atol=0.25 * 2**-9)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        assert verify(tuple(faked), name).dtype == FP8


def test_trtllm_writes_halves_from_fp8_caches(variant, fakes):
    name = variant("flashinfer-trtllm", out_dtype=HALF)
    args = tensors(gqa_call([70, 33], 4, page_size=64, dim=64, kv_dtype=FP8))
    out, plain = verify(args, name), verify(args, "flashinfer-trtllm")
    assert out.dtype == HALF
    torch.testing.assert_close(out.float(), plain.float(), rtol=2**-8, atol=1e-6)


def test_ragged_fp8_results(variant, fakes):
    name = variant("flashinfer-trtllm", out_dtype=FP8)
    q, k, v, tables, lens = tensors(gqa_call([40, 3], 1, page_size=64, dim=64, kv_dtype=FP8))
    q = torch.randn(12, 4, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    out = spec_ops.mha_extend(q, k, v, tables, lens, starts, 5, k_scale=1.0, v_scale=1.0, backend=name)
    assert out.dtype == FP8
    assert out[:5].float().abs().max() > 0
    assert not out[5:].view(torch.uint8).any()  # fewer keys than queries, then padding


def test_auto_never_picks_a_variant(variant):
    name = variant("flashinfer-trtllm", skip_softmax_threshold_scale_factor=1.0)
    assert get_backend(name).rank == get_backend("flashinfer-trtllm").rank
    selection = select_backend(GQA, 100)
    assert selection.backend.name == "flashinfer-trtllm"
    assert selection.reasons[name] == "approximates: name it to use it"
    assert select_backend(GQA, 100, name).backend.options == {"skip_softmax_threshold_scale_factor": 1.0}


def test_compiled_code_knows_the_options(variant):
    """The compile cache's key differs between two values of an option, and repeats for the same."""
    texts = []
    for factor in (1.0, 2.0, 1.0):
        backend = register_variant("flashinfer-trtllm", "once", skip_softmax_threshold_scale_factor=factor)
        texts.append(registry.declarations())
        unregister_backend(backend.name)
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]
    assert " at 0x" not in texts[0]


@pytest.mark.parametrize(
    ("base", "options", "meta", "reason"),
    [
        (
            "flashinfer-trtllm",
            {"out_dtype": FP8},
            {},
            "writes torch.float8_e4m3fn from fp8 caches only, not from torch.bfloat16",
        ),
        ("flashinfer-xqa", {"out_dtype": FP8}, {}, "writes torch.float8_e4m3fn from fp8 caches only, not from torch.bfloat16"),
        ("flashinfer-trtllm", {"out_dtype": HALF}, {"mla": True}, "writes bfloat16 for MLA, not torch.float16"),
        ("flashinfer-trtllm", {"out_dtype": FP8}, {"softcap": True, "kv_dtype": FP8}, "does not support softcap"),
        ("flashinfer-trtllm", {"out_dtype": FP8}, {"v_head_dim": 64, "kv_dtype": FP8}, "needs values as wide as keys"),
    ],
)
def test_where_a_variant_does_not_run(base, options, meta, reason, variant):

    name = variant(base, **options)
    meta = dict(meta)
    call = dataclasses.replace(MLA_META if meta.pop("mla", False) else GQA, **meta)
    with pytest.raises(BackendError, match=f"`backend` '{name}' cannot run this call on sm_100: {name} .*{reason}"):
        select_backend(call, 100, name)


def test_the_variants_of_the_docs():
    code = BACKENDS_PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(code, {})
    made = {name: unregister_backend(name) for name in ("trtllm-skip", "xqa-fp8-out")}
    assert select_backend(GQA, 100).backend.name == "flashinfer-trtllm"
    assert made["xqa-fp8-out"].options == {"out_dtype": FP8, "out_scale": 0.1}


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (
            "flashinfer-fa2",
            {"out_dtype": FP8},
            "`base` must be one of ['flashinfer-trtllm', 'flashinfer-xqa'], got 'flashinfer-fa2'",
        ),
        ("triton", {"out_dtype": FP8}, "`base` must be one of"),
        ("flashinfer-xqa", {"skip_softmax_threshold_scale_factor": 1.0}, "must be None for 'flashinfer-xqa'"),
        ("flashinfer-xqa", {}, "one of ['out_dtype'] must be given"),
        ("flashinfer-xqa", {"out_dtype": HALF}, "`out_dtype` must be one of [torch.float8_e4m3fn] for 'flashinfer-xqa'"),
        ("flashinfer-trtllm", {"out_dtype": torch.float32}, "`out_dtype` must be one of"),
        ("flashinfer-trtllm", {"skip_softmax_threshold_scale_factor": 0.0}, "must be positive and finite, got 0.0"),
        ("flashinfer-trtllm", {"skip_softmax_threshold_scale_factor": float("inf")}, "must be positive and finite, got inf"),
        ("flashinfer-trtllm", {"out_dtype": HALF, "out_scale": 2.0}, "`out_scale` must be positive, and 1 unless"),
        ("flashinfer-trtllm", {"out_dtype": FP8, "out_scale": 0.0}, "`out_scale` must be positive, and 1 unless"),
    ],
)
def test_bad_options(base, options, message):
    before = spec_ops.available_backends()
    with pytest.raises(ValueError) as caught:
        register_variant(base, "bad", **options)
    assert str(caught.value).startswith("register_variant: ")
    assert message in str(caught.value)
    assert spec_ops.available_backends() == before
