"""4-bit floats inside a kernel: NVFP4 and MXFP4, scaled before they meet the tensor cores.

With a scale for 16 or 32 numbers, sums would be scaled as often as products are computed. But e2m1 has 2 significant bits and a
scale of e4m3 has 4, so that their product is exact in bfloat16 and float16, and so is one with a power of 2: it is the number
that is scaled, and the sum is one over all of k. What the whole weight is multiplied by, the last sum is. So no weight is
rounded after it was dequantized. (In float16 a number scaled by e8m0 is infinite beyond 65504, and less exact below 2^-14.)

Formats: `backends/weight_format.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_ops.backends.triton.linear.quantized import INTERPRETED, chunked_rows

# Bits of e2m1 where exponent and mantissa of a wider format meet are the number times 2^-126, or 2^-14 in float16. A scale of
# e4m3 is at most 448, so it takes most of that back at no further cost; the rest, 2^8, is left to the last sum. Those of e8m0
# may be any power of 2, so numbers are brought back first.
UNITS = {"bf16": 0x7E80, "f16": 0x7400}  # 2^126, 2^14
_NV_UNIT = {"bf16": 2.0**118, "f16": 2.0**6}
NV_REST = tl.constexpr(2.0**8)


def _scaled_pairs(kind: str, unit: bool) -> str:
    """PTX: the numbers of each of four bytes `$4` times its pair, `$5` to `$8`, as pairs of 16 bits `$0` to `$3`. Whether four
    bytes have one scale is a matter of the layout: where warpgroups take them from registers, they have not.

    A number is in the lower half of each 16 bits of `p`. In bfloat16 one multiplication puts copies of it where the sign is
    and where the rest is, 6 bits apart, so that they do not overlap.
    """
    steps = ["and.b32 low, $4, 0x0F0F0F0F", "shr.u32 high, $4, 4", "and.b32 high, high, 0x0F0F0F0F"]
    steps += [f"mov.b32 unit, 0x{UNITS[kind] * 0x10001:08X}"] * unit
    for i in range(4):
        # A selector above 7 repeats a byte's sign, which is 0.
        steps += [f"prmt.b32 p, low, high, 0x{0x8480 + 0x1111 * i:04X}"]
        if kind == "bf16":
            steps += ["mul.lo.u32 p, p, 0x1040", "and.b32 p, p, 0x81C081C0"]
        else:
            steps += ["shl.b32 rest, p, 9", "and.b32 rest, rest, 0x0E000E00", "shl.b32 p, p, 12"]
            steps += ["lop3.b32 p, p, 0x80008000, rest, 0xEA"]  # (a & b) | c
        steps += [f"mul.rn.{kind}x2 p, p, unit"] * unit
        steps += [f"mul.rn.{kind}x2 ${i}, p, ${5 + i}"]
    return f"{{ .reg .b32 low, high, p, rest, unit; {'; '.join(steps)}; }}"


_PAIRS = {(kind, unit): tl.constexpr(_scaled_pairs(kind, unit)) for kind in UNITS for unit in (False, True)}
_NV_BF16, _MX_BF16 = _PAIRS["bf16", False], _PAIRS["bf16", True]
_NV_FP16, _MX_FP16 = _PAIRS["f16", False], _PAIRS["f16", True]
_NV_UNIT_BF16, _NV_UNIT_FP16 = tl.constexpr(_NV_UNIT["bf16"]), tl.constexpr(_NV_UNIT["f16"])


@triton.jit
def load_float4_scales(
    scale, row_stride, column_stride, n, chunk, N, K, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The scales `[CHUNKS, n, CHUNK / GROUP]` of rows `n` as they are stored, for the chunks of k from number `chunk` on; 0
    beyond the weight, of which k is a multiple of `WHOLE`."""
    EACH: tl.constexpr = CHUNK // GROUP
    part = chunk + tl.arange(0, CHUNKS)[:, None, None]
    column = part * EACH + tl.arange(0, EACH)[None, None, :]
    at = scale + n[None, :, None].to(tl.int64) * row_stride + column * column_stride
    none: tl.constexpr = 0 if scale.dtype.element_ty == tl.uint8 else 0.0
    inside = part < K // CHUNK if WHOLE >= CHUNK else column // (WHOLE // GROUP) < K // WHOLE
    return tl.load(at, mask=(n < N)[None, :, None] & inside, other=none)


@triton.jit
def interpreted_scale(scale, dtype: tl.constexpr):
    """What `scale_pairs` has twice."""
    return scale_pairs(scale, dtype).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def scale_pairs(scale, dtype: tl.constexpr):
    """Each of e4m3 or e8m0, twice in 32 bits as `dtype`; e4m3 times what numbers are left by."""
    if scale.dtype == tl.uint8:
        wide = tl.maximum(scale.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    else:
        wide = scale.to(tl.float16).to(tl.float32) * (_NV_UNIT_BF16 if dtype == tl.bfloat16 else _NV_UNIT_FP16)
    if dtype == tl.bfloat16:
        bits = wide.to(tl.int32, bitcast=True)  # the lower half is 0
        return bits | ((bits >> 16) & 0xFFFF)
    bits = wide.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def scaled_numbers(block, scale, dtype: tl.constexpr):
    """What a block `[chunks, n, k / 2]` of a weight holds, `[chunks, n, k]` of `dtype`, times `scale [chunks, n, groups]` as it
    is stored; for e4m3 divided by `NV_REST`."""
    MX: tl.constexpr = scale.dtype == tl.uint8
    GROUPS: tl.constexpr = scale.shape[2]
    parts = tl.reshape(block, [block.shape[0], block.shape[1], GROUPS, block.shape[2] // GROUPS])
    pair = tl.expand_dims(scale_pairs(scale, dtype), -1)
    if INTERPRETED:
        BITS: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
        UNIT: tl.constexpr = (2.0**126 if dtype == tl.bfloat16 else 2.0**14) if MX else 1.0
        one, bits = pair.to(tl.int16).to(dtype, bitcast=True), parts.to(tl.int16)
        low = ((((bits & 7) << BITS) | ((bits & 8) << 12)).to(dtype, bitcast=True) * UNIT).to(dtype) * one
        high = ((((bits & 0x70) << (BITS - 4)) | ((bits & 0x80) << 8)).to(dtype, bitcast=True) * UNIT).to(dtype) * one
    else:
        CODE: tl.constexpr = (
            (_MX_BF16 if MX else _NV_BF16) if dtype == tl.bfloat16 else (_MX_FP16 if MX else _NV_FP16)
        )  # fmt: skip
        pairs = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r,r,r,r,r", [parts, pair], dtype=tl.int32, is_pure=True, pack=4
        )  # fmt: skip
        low = pairs.to(tl.int16).to(dtype, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), [block.shape[0], block.shape[1], 2 * block.shape[2]])


@triton.jit
def rest_of(scale, tensor_scale):
    """What a weight is multiplied by beyond what `scaled_numbers` gives; no constant, even where it is 1."""
    rest = 1.0 if scale.dtype.element_ty == tl.uint8 else NV_REST
    if tensor_scale is not None:
        return tl.load(tensor_scale) * rest
    else:
        return opaque(rest)


@triton.jit
def opaque(value):
    """A float that Triton does not know to be the constant that it is."""
    if INTERPRETED:
        return value
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def float4_products(
    x, x_stride, weight, scale, scale_row, scale_column, tile, first, end, n, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_M]` sums over blocks `first` to `end` of k, before `rest_of`. Tiles are narrower than `WARPGROUP`."""
    dtype: tl.constexpr = x.dtype if x_stride is None else x.dtype.element_ty
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    sums = tl.zeros([CHUNKS, BLOCK_N, BLOCK_M], tl.float32)
    # Asked for a block ahead, as in `quantized_products`.
    s = load_float4_scales(scale, scale_row, scale_column, n, first * CHUNKS, N, K, CHUNK, CHUNKS, COLUMNS, CHUNK)
    for block in tl.range(first, end, num_stages=STAGES):
        columns = scaled_numbers(weight.load([block * CHUNKS, tile * BLOCK_N, 0]), s, dtype)
        rows = chunked_rows(x, x_stride, block, M, K, BLOCK_M, CHUNKS, CHUNK)
        sums = tl.dot(columns, rows, sums)
        s = load_float4_scales(scale, scale_row, scale_column, n, (block + 1) * CHUNKS, N, K, CHUNK, CHUNKS, COLUMNS, CHUNK)
    return tl.sum(sums, 0)


@triton.jit
def wide_float4_products(
    x, weight, scale, rest, scale_row, scale_column, tile, first, end, n, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums, times `rest`, in tiles that warpgroups compute. That is done in each block, since a product in place has ptxas
    begin no instruction before the last one has ended. So `rest` must not be a constant that Triton sees through."""
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    s = load_float4_scales(scale, scale_row, scale_column, n, first, N, K, BLOCK_K, 1, COLUMNS, CHUNK)
    for block in tl.range(first, end, num_stages=STAGES):
        stored = weight.load([tile * BLOCK_N, block * (BLOCK_K // 2)])
        columns = tl.reshape(scaled_numbers(tl.expand_dims(stored, 0), s, x.dtype), [BLOCK_N, BLOCK_K])
        rows = tl.permute(x.load([0, block * BLOCK_K]), (1, 0))
        sums += tl.dot(columns, rows) * rest
        s = load_float4_scales(scale, scale_row, scale_column, n, block + 1, N, K, BLOCK_K, 1, COLUMNS, CHUNK)
    return sums
