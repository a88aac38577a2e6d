"""Products with stored weights in eager mode: which kernel or library multiplies, and with what. On a CPU, whose tensors stand
for those on a GPU; `tests/gpu/test_eager_products.py` has the kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spec_ops.models import eager_products, stored_tensor
from spec_ops.models.inputs import Inputs
from spec_ops.models.quantized import STORED, float8_tensor
from spec_ops.models.stored_tensor import StoredTensor
from spec_ops.ops.eager_invariance import BatchInvariant

BF16 = torch.bfloat16
GROUPS, ROWS = Inputs("float8", 128, float32_scales=True), Inputs("float8", float32_scales=True)
M = 3


@pytest.fixture
def hopper(monkeypatch):
    """Tensors of this process pass for those of a Hopper GPU. Returns the names of what multiplied."""
    called: list[str] = []

    def noted(name, op):
        def call(*args, **kwargs):
            called.append(name)
            return op(*args, **kwargs)

        return call

    def scaled_mm(x, right, steps, scale, out_dtype, use_fast_accum):
        """In float64, of operands as the library asks for them."""
        (m, k), n = x.shape, right.shape[1]
        assert x.is_contiguous()
        assert right.t().is_contiguous()
        assert steps.dtype == scale.dtype == torch.float32
        assert not use_fast_accum
        if steps.shape == (m, k // 128) and k > 128:
            assert m % 4 == 0
            assert steps.t().is_contiguous()
            assert scale.t().is_contiguous()
            steps, scale = steps.repeat_interleave(128, 1), scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            assert steps.numel() == scale.numel() == 1 or (steps.shape, scale.shape) == ((m, 1), (1, n))
            assert steps.is_contiguous()
            assert scale.is_contiguous()
        return ((x.double() * steps.double()) @ (right.double() * scale.double())).to(out_dtype)

    monkeypatch.setattr(stored_tensor, "is_eager", lambda *tensors: True)
    monkeypatch.setattr(eager_products, "device_arch", lambda device: 90)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch, "_scaled_mm", noted("library", scaled_mm))
    for name in ("float8_mm_op", "dequantize_op", "round_rows_op"):
        monkeypatch.setattr(eager_products, name, noted(name.removesuffix("_op"), getattr(eager_products, name)))
    return called


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def weight_of(n: int, k: int, rows: int, columns: int, inputs: Inputs | None, step: float | None = None) -> StoredTensor:
    made = float8_tensor(rand(n, k), rows, columns)
    scale = None if step is None else torch.tensor([step]).to(BF16)
    return StoredTensor(made.data_, made.scale, dtype=BF16, inputs=inputs, input_scale=scale)


def check(weight: StoredTensor, m: int, bias: torch.Tensor | None = None) -> None:
    """A batch of rows, apart in memory, against what a graph has."""
    n, k = weight.shape
    x = rand(m, k + 8)[None, :, :k]
    rows = x if weight.inputs is None else weight.inputs.rounded(x, weight.input_scale)
    want = rows.double() @ weight.dequantize().double().t() + (0 if bias is None else bias.double())
    got = F.linear(x, weight, bias)
    assert got.shape == (1, m, n)
    assert got.dtype == BF16
    # A step's last bit, and a number in the middle that goes the other way; rows and result rounded to 16 bits.
    assert (got.double() - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.parametrize(
    ("weight", "by"),
    [
        (weight_of(256, 512, 1, 512, ROWS), "library"),
        (weight_of(256, 512, 256, 512, ROWS), "library"),
        (weight_of(256, 512, 256, 512, Inputs("float8"), 0.01), "library"),
        (weight_of(256, 512, 1, 512, Inputs("float8"), 0.01), "library"),
        (weight_of(256, 512, 128, 128, GROUPS), "library"),
        (weight_of(256, 640, 128, 128, GROUPS), "dequantize"),  # 640 is no multiple of 512
        (weight_of(192, 512, 128, 128, GROUPS), "dequantize"),  # a block of 64 rows
        (weight_of(100, 512, 1, 512, ROWS), "dequantize"),  # 100 is no multiple of 16
        (weight_of(256, 512, 128, 128, ROWS), "dequantize"),
        (weight_of(256, 512, 1, 512, GROUPS), "dequantize"),
        (weight_of(256, 512, 1, 64, ROWS), "dequantize"),
        (weight_of(256, 512, 1, 512, Inputs("float8", 64)), "dequantize"),
        (weight_of(256, 512, 1, 512, Inputs("int8")), "dequantize"),
        (weight_of(256, 448, 1, 448, ROWS), "dequantize"),
        (weight_of(256, 512, 1, 512, None), "dequantize"),
    ],
)
def test_who_multiplies(weight, by, hopper):
    """Many rows, as many as no four divide; and few, which are our kernel's where the library's conditions do not matter."""
    check(weight, 129, rand(weight.shape[0], seed=1))
    assert hopper == (["round_rows", by] if by == "library" else [by])
    hopper.clear()
    check(weight, M)
    inputs, whole = weight.inputs, weight.scale.shape[1] == 1 or weight.scale.shape[0] == 2
    ours = inputs is not None and inputs.kind == "float8" and inputs.group != 64 and weight.shape[1] % 128 == 0
    assert hopper == (["round_rows", "float8_mm"] if ours and whole else [by])


def test_float16_has_no_scales_of_rows_in_the_library(hopper):
    for rows, by in ((1, "dequantize"), (256, "dequantize")):
        made = weight_of(256, 512, rows, 512, ROWS).to(torch.float16)
        F.linear(rand(200, 512, dtype=torch.float16), made)
        assert hopper == [by]
        hopper.clear()


@pytest.mark.parametrize("kind", ["float8_block", "int4", "nvfp4", "mxfp4"])
def test_other_weights_are_dequantized(kind, hopper):
    weight = STORED[kind](rand(100, 384))
    x = rand(M, 384)
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize().to(BF16)))
    assert hopper == ["dequantize"]


def test_columns_in_another_order(hopper):
    weight = weight_of(256, 512, 1, 512, ROWS)
    order = torch.randperm(512)
    weight = StoredTensor(weight.data_, weight.scale, dtype=BF16, inputs=ROWS, order=order)
    check(weight, M)
    assert hopper == ["dequantize"]


def test_weights_that_no_kernel_reads(hopper):
    weight = weight_of(256, 512, 1, 512, ROWS)
    wide = torch.zeros(256, 520).to(torch.float8_e4m3fn)
    for data in (wide[:, 8:].copy_(weight.data_), weight.data_.t().contiguous().t()):
        check(StoredTensor(data, weight.scale, dtype=BF16, inputs=ROWS), 129)
    assert hopper == ["dequantize"]  # and the transposed one by torch alone
    assert F.linear(rand(0, 512), weight).shape == (0, 256)


def test_scales_of_blocks_that_are_apart_in_memory(hopper):
    weight = weight_of(256, 512, 128, 128, GROUPS)
    for scale in (F.pad(weight.scale, (0, 4))[:, :4], weight.scale.t().contiguous().t()):
        check(StoredTensor(weight.data_, scale, dtype=BF16, inputs=GROUPS), 129)
    assert hopper == ["round_rows", "library"] * 2


def test_autocast(hopper):
    """Results are of its dtype; where it casts nothing, rows are multiplied as they are."""
    x, weight = rand(M, 512), weight_of(256, 512, 1, 512, ROWS)
    for dtype, by in ((torch.float16, ["dequantize"]), (BF16, ["round_rows", "float8_mm"])):
        with torch.autocast("cpu", dtype):
            assert F.linear(x, weight).dtype == dtype
        assert hopper == by
        hopper.clear()


@pytest.mark.parametrize(
    ("changed", "served"),
    [
        ({}, True),
        ({"cuda": "12.8"}, False),
        ({"cuda": "13.0"}, True),
        ({"cuda": None}, False),
        ({"arch": 100}, False),
        ({"k": 640}, False),
        ({"n": 192}, False),
        ({"in_groups": False}, False),
        ({"blocks": False}, False),
        ({"in_groups": False, "blocks": False}, True),
        ({"in_groups": False, "blocks": False, "cuda": "12.4", "arch": 89, "k": 640, "n": 192}, True),
        ({"in_groups": False, "blocks": False, "n": 100}, False),
        ({"in_groups": False, "blocks": False, "dtype": torch.float16}, False),
        ({"dtype": torch.float16}, True),
    ],
)
def test_what_the_library_serves(changed, served):
    known = {"n": 256, "k": 512, "in_groups": True, "blocks": True, "dtype": BF16, "arch": 90, "cuda": "12.9"}
    assert eager_products.library_serves(**(known | changed)) == served


def test_who_traces_or_watches_sees_what_it_is_made_of(monkeypatch):
    """Tensors of a CPU, tracing, dispatch modes and gradients."""
    x = rand(M, 512)

    class OnGpu(torch.Tensor):
        is_cuda = True

    assert not eager_products.is_eager(x)
    monkeypatch.setattr(eager_products, "_PLAIN", (OnGpu,))
    here = x.as_subclass(OnGpu)
    assert eager_products.is_eager(here, None)
    assert not eager_products.is_eager(here, x)
    with BatchInvariant():
        assert not eager_products.is_eager(here)
    assert not torch.func.vmap(lambda row: row + eager_products.is_eager(here))(torch.zeros(2)).any()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not eager_products.is_eager(here)
    monkeypatch.undo()
    monkeypatch.setattr(eager_products, "_PLAIN", (OnGpu,))
    wanted = x.clone().requires_grad_().as_subclass(OnGpu)
    assert not eager_products.is_eager(here, wanted)
    with torch.no_grad():
        assert eager_products.is_eager(here, wanted)
