"""RoPE and KV append three ways: an append op after Inductor's RoPE, the pass `lower_kv_append`, and `rope_append_kv`.

    python -m benchmarks.kv_append                                            # prints; about a minute
    python -m benchmarks.kv_append --json benchmarks/results/h200-kv-append.json

Times are of CUDA-graph replays of `LAYERS` layers, each of which ends in one small kernel that stands for attention, the same
in every variant. Some rows have slot -1. `bytes_differing` counts bytes of the caches that are not those of the case's first
variant; `copy_kernels` would show a copied cache. The pass takes `MAX_ROWS` from these rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import spec_ops
from benchmarks.round.profile import profile
from benchmarks.rows import write_rows
from benchmarks.timing import time_calls

LAYERS = 8
PAGES, PAGE_SIZE, POSITIONS = 64, 64, 4096
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RANK, ROPE_DIM = 512, 64
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.037, 0.041  # no powers of two: bytes are the same only if the division is

library = torch.library.Library("kv_append_benchmark", "DEF")
library.define("step(Tensor q, Tensor[] caches, Tensor x) -> Tensor")
library.impl("step", lambda q, caches, x: x.add(q.as_strided((1,), (1,)), alpha=1e-3), "CompositeExplicitAutograd")
torch.library.register_fake("kv_append_benchmark::step", lambda q, caches, x: torch.empty_like(x), lib=library)
step = torch.ops.kv_append_benchmark.step


class Variant(NamedTuple):
    name: str
    fused_op: bool = False
    lowered: bool = False
    options: dict[str, Any] | None = None


OFF, ON = Variant("pass off"), Variant("pass on", lowered=True)
COMBO = Variant("pass on, combo_kernels", lowered=True, options={"combo_kernels": True})
OP = Variant("rope_append_kv", fused_op=True)
GQA, NORMED, MLA = "GQA 32/8, 128", "GQA 32/8, 128, q/k norm", "MLA 512+64"
# The first ones matter most, should the rest be cut off.
CASES: list[tuple[str, int, torch.dtype, list[Variant]]] = [
    (GQA, 4, BF16, [OFF, ON, COMBO, OP]),
    (MLA, 4, BF16, [OFF, ON]),
    (GQA, 128, BF16, [OFF, ON, OP]),
    (GQA, 4, FP8, [OFF, ON, OP]),
    (MLA, 128, BF16, [OFF, ON]),
    (NORMED, 4, BF16, [OFF, ON, OP]),
    (GQA, 32, BF16, [OFF, ON, OP]),
    (MLA, 4, FP8, [OFF, ON]),
]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [n, heads, 2 * r]` by angles `[n, r]`."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def gqa(normed: bool, fused_op: bool) -> Callable:
    def layers(x, cos_table, sin_table, positions, slots, weight, *caches):
        cos, sin = cos_table[positions], sin_table[positions]
        scales = {"k_scale": K_SCALE, "v_scale": V_SCALE} if caches[0].dtype == FP8 else {}
        for k_cache, v_cache in zip(caches[::2], caches[1::2], strict=True):
            sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
            q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in x.split(sizes, -1))
            if normed:
                q, k = (F.rms_norm(rows, (HEAD_DIM,), weight) for rows in (q, k))
            if fused_op:
                q = spec_ops.rope_append_kv(q, k, v, cos, sin, k_cache, v_cache, slots, **scales)
            else:
                spec_ops.append_kv(k_cache, v_cache, rotated(k, cos, sin), v, slots, **scales)
                q = rotated(q, cos, sin)
            x = step(q, [k_cache, v_cache], x)
        return x

    return layers


def mla(x, cos_table, sin_table, positions, slots, weight, *caches):
    cos, sin = cos_table[positions], sin_table[positions]
    scale = {"kv_scale": K_SCALE} if caches[0].dtype == FP8 else {}
    for cache in caches:
        latent, rope = x.split([RANK, ROPE_DIM], -1)
        latent = F.rms_norm(latent, (RANK,), weight)
        spec_ops.append_mla_kv(cache, latent, rotated(rope[:, None], cos, sin)[:, 0], slots, **scale)
        x = step(x, [cache], x)
    return x


def layers_of(case: str, fused_op: bool = False) -> Callable:
    """`(*inputs) -> hidden rows`: all layers of a case."""
    return mla if case == MLA else gqa(case == NORMED, fused_op)


def inputs(case: str, rows: int, dtype: torch.dtype, device: str = "cuda", layers: int = LAYERS) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    width, dim, normed = (RANK + ROPE_DIM, ROPE_DIM, RANK) if case == MLA else (6144, HEAD_DIM, HEAD_DIM)
    row_shape, pools = ((RANK + ROPE_DIM,), 1) if case == MLA else ((KV_HEADS, HEAD_DIM), 2)
    angles = random(POSITIONS, dim // 2) * 3
    positions = torch.randint(POSITIONS, (rows,), generator=generator, device=device)
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator, device=device)[:rows]
    slots[3::5] = -1
    weight = 1 + random(normed) / 10
    caches = [torch.zeros(PAGES, PAGE_SIZE, *row_shape, device=device).to(dtype) for _ in range(pools * layers)]
    return [random(rows, width).to(BF16), angles.cos(), angles.sin(), positions, slots, weight.to(BF16), *caches]


def is_copy(kernel: str) -> bool:
    """A kernel of Inductor is named after its ops: `to_copy` is a conversion, `copy` is not."""
    name = kernel.lower().replace("to_copy", "")
    return "copy" in name or "memcpy" in name


@torch.no_grad()
def measure(case: str, rows: int, dtype: torch.dtype, variant: Variant) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What one variant takes, and the bytes of its caches after one run."""
    torch._dynamo.reset()
    args = inputs(case, rows, dtype)
    passes = {"lower_kv_append": variant.lowered}
    compiled = spec_ops.compile(layers_of(case, variant.fused_op), passes=passes, mode="default", options=variant.options)
    compiled(*args)
    written = [cache.view(torch.uint8).clone() for cache in args[6:]]
    (kernels,) = profile(lambda: compiled(*args), 1).rounds
    row = {
        "case": case,
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "variant": variant.name,
        "us_per_layer": round(time_calls([lambda: compiled(*args)]).us / LAYERS, 2),
        "kernels_per_layer": round(len(kernels) / LAYERS, 2),
        "copy_kernels": sum(is_copy(kernel.name) for kernel in kernels),
    }
    return row, written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for case, count, dtype, variants in CASES:
        expected: list[torch.Tensor] = []
        for variant in variants:
            row, written = measure(case, count, dtype, variant)
            expected = expected or written
            row["bytes_differing"] = sum(int((a != b).sum()) for a, b in zip(expected, written, strict=True))
            rows.append(row)
            print(
                f"{case}, {count} rows of {row['dtype']}, {variant.name}: {row['us_per_layer']} us and "
                f"{row['kernels_per_layer']} kernels a layer, {row['copy_kernels']} copies, "
                f"{row['bytes_differing']} bytes unlike the first",
                flush=True,
            )
    if options.json is not None:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
