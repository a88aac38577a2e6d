"""Layouts of GPTQ, AWQ and compressed-tensors: each is the weight that its format says, without another rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spec_ops.backends.weight_format import e8m0, weight_format
from spec_ops.models.layouts import layout_of
from tests.helpers.layouts import LAYOUTS, awq, float4, float8, gptq, int8, packed, rounding

N, K = 96, 256
WEIGHT = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) + 0.1


@pytest.mark.parametrize("kind", LAYOUTS)
def test_weights_are_what_the_format_says(kind):
    tensors, config, exact = LAYOUTS[kind](WEIGHT)
    layout = layout_of(config)
    assert any(mark in tensors for mark in layout.marks)
    assert set(tensors) <= set(layout.names)
    stored = layout.stored(tensors, N, K, torch.bfloat16)
    assert (stored.shape, stored.dtype) == ((N, K), torch.bfloat16)
    assert stored.dequantize().dtype == torch.float32
    torch.testing.assert_close(stored.dequantize().double(), exact, rtol=2**-23, atol=0)
    # Or they would be numbers without meaning; of 4-bit floats 4 and 6 of a sixth are neighbours.
    assert (exact - WEIGHT).abs().max() < (0.75 if "fp4" in kind else 0.4)
    found = weight_format("", stored.data_, stored.scale, stored.zero, stored.tensor_scale)
    assert found.kind == ("float8" if "float8" in kind else "int8" if "8" in kind else kind[:5] if "fp4" in kind else "int4")
    assert (stored.order is not None) == ("order" in kind)
    assert (stored.zero is not None) == (kind in ("gptq", "gptq v2", "gptq in the order of activations", "awq")) or (
        kind == "packed with zero points"
    )


@pytest.mark.parametrize("kind", LAYOUTS)
def test_rows_are_rounded_as_the_checkpoint_says(kind):
    tensors, config, exact = LAYOUTS[kind](WEIGHT)
    stored = layout_of(config).stored(tensors, N, K, torch.float32)
    rows = 3 * torch.randn(2, 3, K, generator=torch.Generator().manual_seed(2))
    rows[0, 0] = 1e-9  # of a scale that is not zero
    rounded = rounding(config)
    want = (rows if rounded is None else rounded(rows)).double() @ exact.t()
    torch.testing.assert_close(F.linear(rows, stored).double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(F.linear(torch.zeros(1, K), stored), torch.zeros(1, N))
    if rounded is not None:
        assert not torch.allclose(want, rows.double() @ exact.t(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if not kind.startswith(("gptq", "awq"))])
def test_weights_are_those_of_compressed_tensors(kind):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig

    tensors, config, _ = LAYOUTS[kind](WEIGHT)
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    theirs = compressors.BaseCompressor.get_value_from_registry(config["format"])
    float4 = "fp4" in kind
    wide = {name: t.float() if name == "weight_scale" and not float4 else t for name, t in tensors.items()}
    want = theirs.decompress(wide, scheme)["weight"]
    got = layout_of(config).stored(tensors, N, K, torch.bfloat16).dequantize()
    # 4-bit floats become bfloat16 there.
    torch.testing.assert_close(got, want.float(), rtol=2**-8 if float4 else 2**-23, atol=0)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_4_bit_floats_are_packed_as_compressed_tensors_packs_them(kind):
    """The package itself writes the tensors that the tests of loading have."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig

    tensors, config, _ = LAYOUTS[kind](WEIGHT)
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    scale = tensors["weight_scale"]
    given = {"weight": WEIGHT, "weight_scale": e8m0(scale) if kind == "mxfp4" else scale.float()}
    given |= {name: t for name, t in tensors.items() if name == "weight_global_scale"}
    written = compressors.BaseCompressor.get_value_from_registry(config["format"]).compress(given, scheme)
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name].view(tensor.dtype).float(), tensor.float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_4_bits_are_those_of_compressed_tensors(dtype):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    tensors, config, _ = LAYOUTS["nvfp4 with inputs of 4 bits"](WEIGHT)
    module = torch.nn.Module()
    module.quantization_status, module.input_global_scale = QuantizationStatus.COMPRESSED, tensors["input_global_scale"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    rows = (3 * torch.randn(2, 3, K, generator=torch.Generator().manual_seed(2))).to(dtype)
    rows[0, 0], rows[0, 1, :16] = 1e-9, 40.0  # of the least scale, and beyond the greatest
    want = forward_quantize(module, rows, "input", scheme.input_activations)
    weight = layout_of(config).stored(tensors, N, K, dtype)
    assert torch.equal(weight.inputs.rounded(rows, weight.input_scale), want)


def test_a_scale_that_was_measured_is_stored_as_rows_meet_it():
    """In their dtype: the same numbers as if it were rounded at every call."""
    weight = WEIGHT.to(torch.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": torch.ones(1), "input_scale": torch.tensor([0.0123])}
    rows = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    group = {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}, "input_activations": rows}
    made = layout_of({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})
    for dtype in (torch.bfloat16, torch.float32):
        scale = made.stored(tensors, N, K, dtype).input_scale
        assert scale.dtype == dtype
        assert torch.equal(scale, tensors["input_scale"].to(dtype))


def mxfp4(weight: torch.Tensor) -> tuple:
    return float4(weight, "mxfp4")


def damaged(make, change) -> tuple[dict, dict]:
    tensors, config, _ = make(WEIGHT)
    change(tensors)
    return tensors, config


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (gptq, lambda t: t.pop("qzeros"), r"`qzeros` must be \[4, 12\], got None"),
        (gptq, lambda t: t.update(qweight=t["qweight"][1:]), r"`qweight` must be \[32, 96\], got \[31, 96\]"),
        (gptq, lambda t: t.update(qweight=t["qweight"].long()), "packed numbers must be int32, got torch.int64"),
        (gptq, lambda t: t["g_idx"].zero_(), "`g_idx` must have 64 columns for each group"),
        (gptq, lambda t: t.update(scales=t["scales"].double()), "`scales` must be of float32, bfloat16 or float16"),
        (lambda w: gptq(w, 8), lambda t: None, "zero points of 8 bits must be 128"),
        (awq, lambda t: t.update(qzeros=t["qzeros"][:2]), r"`qzeros` must be \[4, 12\], got \[2, 12\]"),
        (packed, lambda t: t.update(weight_shape=torch.tensor([K, N])), r"`weight_shape` must be \[96, 256\], got \[256, 96\]"),
        (packed, lambda t: t.update(weight_packed=t["weight_packed"][:, :5]), r"`weight_packed` must be \[96, 32\] or"),
        (packed, lambda t: t.pop("weight_scale"), "`weight_scale` must be of float32, bfloat16 or float16 .* got None"),
        (packed, lambda t: t.update(weight_scale=t["weight_scale"].repeat(1, 4)), "groups must be multiples of 32 columns"),
        (float8, lambda t: t.update(weight=t["weight"][:, :128]), r"`weight` must be \[96, 256\], got \[96, 128\]"),
        (lambda w: float8(w, "tensor", "tensor"), lambda t: t.pop("input_scale"), "`input_scale` must be one number, got None"),
        (float4, lambda t: t.pop("weight_scale"), "`weight_scale` must be torch.float8_e4m3fn, got None"),
        (float4, lambda t: t.update(weight_scale=t["weight_scale"].float()), "must be torch.float8_e4m3fn, got torch.float32"),
        (
            float4,
            lambda t: t.update(weight_scale=t["weight_scale"][:, :3]),
            r"`weight_scale` must be \[96, 16\], got \[96, 3\]",
        ),
        (
            float4,
            lambda t: t.update(weight_packed=t["weight_packed"][1:]),
            r"`weight_packed` must be \[96, 128\], got \[95, 128\]",
        ),
        (float4, lambda t: t["weight_scale"].view(torch.uint8)[0].fill_(0x7F), "`weight_scale` must be of numbers, got NaN"),
        (float4, lambda t: t.pop("weight_global_scale"), "`weight_global_scale` must be one positive number, got None"),
        (float4, lambda t: t["weight_global_scale"].zero_(), r"`weight_global_scale` must be one positive number, got \[0.0\]"),
        (
            float4,
            lambda t: t["weight_global_scale"].fill_(1e-39),
            r"`weight_global_scale` must have an inverse in float32, got",
        ),
        (
            float4,
            lambda t: t.update(weight_shape=torch.tensor([N, 2 * K])),
            r"`weight_shape` must be \[96, 256\], got \[96, 512\]",
        ),
        (
            float4,
            lambda t: t.update(weight_zero_point=torch.ones(N, K // 16)),
            "`weight_zero_point` must be 0 with 4-bit floats",
        ),
        (
            mxfp4,
            lambda t: t.update(weight_g_idx=torch.arange(K).flip(0) // 32),
            "`weight_g_idx` must have the columns of 4-bit floats in order",
        ),
        (
            mxfp4,
            lambda t: t.update(weight_global_scale=torch.tensor([2.0])),
            "`weight_global_scale` must not be given beside scales of e8m0",
        ),
        (mxfp4, lambda t: t["weight_scale"][0].fill_(255), "`weight_scale` must be of numbers, got 255, which is NaN"),
        (mxfp4, lambda t: t.update(float4(WEIGHT)[0]), "`weight_scale` must be torch.uint8, got torch.float8_e4m3fn"),
        (
            lambda w: float4(w, inputs=True),
            lambda t: t.pop("input_global_scale"),
            "`input_global_scale` must be one number, got",
        ),
        (int8, lambda t: t.update(weight_zero_point=torch.ones(N, 1)), "`weight_zero_point` must be 0 with 8 bits"),
    ],
)
def test_damaged_tensors_are_named(make, change, message):
    tensors, config = damaged(make, change)
    with pytest.raises(ValueError, match=message):
        layout_of(config).stored(tensors, N, K, torch.bfloat16)


CT = float8(WEIGHT)[1]
WEIGHTS = CT["config_groups"]["group_0"]
INPUTS = WEIGHTS["input_activations"]
MX = mxfp4(WEIGHT)[1]
MX_GROUP = MX["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, r"`quant_method` must be one of \['gptq', 'awq', 'compressed-tensors'\], got 'aqlm'"),
        ({"quant_method": "gptq", "bits": 3}, r"`bits` must be one of \[4, 8\], got 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "`checkpoint_format` must be .* got 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "`version` must be gemm, got 'gemv'"),
        (CT | {"kv_cache_scheme": {"num_bits": 8}}, "`kv_cache_scheme` must be None"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "`sparsity_config.format` must be dense, got 'sparse-24"),
        (
            CT | {"config_groups": {"a": WEIGHTS | {"format": "mxfp6-pack-quantized"}}},
            "`config_groups.a.format` must be .* got 'mxfp6-pack-quantized'",
        ),
        (
            CT | {"config_groups": {"a": WEIGHTS | {"format": "nvfp4-pack-quantized"}}},
            "`config_groups.a.weights.num_bits` must be 4, got 8",
        ),
        (
            {**MX, "config_groups": {"a": {**MX_GROUP, "weights": MX_GROUP["weights"] | {"group_size": 16}}}},
            "`config_groups.a.weights.group_size` must be 32, got 16",
        ),
        (
            {**MX, "config_groups": {"a": {**MX_GROUP, "input_activations": MX_GROUP["weights"] | {"dynamic": True}}}},
            "`config_groups.a.input_activations.num_bits` must be 8, got 4",
        ),
        (
            CT | {"config_groups": {"a": WEIGHTS | {"weights": {"type": "int", "num_bits": 3}}}},
            "`config_groups.a.weights` must be int of 4 or 8 bits or float of 8, got int of 3",
        ),
        (
            CT | {"config_groups": {"a": WEIGHTS | {"input_activations": INPUTS | {"symmetric": False}}}},
            "`config_groups.a.input_activations.symmetric` must be True, got False",
        ),
        (
            CT | {"config_groups": {"a": WEIGHTS | {"input_activations": INPUTS | {"strategy": "tensor"}}}},
            r"`config_groups.a.input_activations.strategy` must be one of \['token', 'group'\], got 'tensor'",
        ),
        (CT | {"config_groups": {"a": WEIGHTS, "b": WEIGHTS | {"input_activations": None}}}, "must have the same `input_act"),
        (CT | {"config_groups": {"a": WEIGHTS | {"output_activations": INPUTS}}}, "`config_groups.a.output_activations` must"),
        (CT | {"config_groups": {"a": WEIGHTS | {"weights": None}}}, "`config_groups.a.weights` must be given"),
    ],
)
def test_unknown_layouts_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        layout_of(config)
