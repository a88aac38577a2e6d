"""`skinny_mm` next to `torch.mm` on the weights of models' layers: CUDA-graph replay over more weights than L2 holds.

    python -m benchmarks.skinny_mm                                              # prints
    python -m benchmarks.skinny_mm --json benchmarks/results/h200-skinny-mm.json

The pass `lower_skinny_mm` takes its rule from these rows: a product is replaced where `us` is below `torch_us`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import write_rows
from benchmarks.timing import measure_ceilings, time_calls
from spec_ops.backends.triton.linear.skinny_mm import skinny_mm

# n, k
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (2880, 4096), (1536, 7168)]  # replaced
SHAPES += [(5120, 2880), (24576, 1536), (28672, 4096), (7168, 16384)]  # left to cuBLAS
ROWS = (1, 4, 8, 16, 32, 64)
COLD_BYTES = 200_000_000  # of weights in turn: four times the L2 of an H200


def error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Root mean square against float64."""
    return (out.double() - x.double() @ weight.double().t()).square().mean().sqrt().item()


def measure(m: int, n: int, k: int, copy: float) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(m * n + k)
    pairs = [
        [torch.randn(rows, k, dtype=torch.bfloat16, device="cuda", generator=generator) for rows in (m, n)]
        for _ in range(COLD_BYTES // (2 * n * k) + 2)
    ]
    ours = time_calls([lambda x=x, w=w: skinny_mm(x, w, None) for x, w in pairs], min_ms=4, min_replays=5)
    torchs = time_calls([lambda x=x, w=w: torch.mm(x, w.t()) for x, w in pairs], min_ms=4, min_replays=5)
    floor_us = 2 * (n * k + m * (n + k)) / copy * 1e6
    errors = [error(timing.output, *pairs[0]) for timing in (ours, torchs)]
    times = {"us": round(ours.us, 2), "torch_us": round(torchs.us, 2), "floor_us": round(floor_us, 2)}
    return {"n": n, "k": k, "m": m, **times, "error_over_torch": round(errors[0] / errors[1], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("N", "K"), help="instead of the built-in ones")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--copy-rate", type=float, help="bytes/s for the floor; measured by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    copy = measure_ceilings(torch.device("cuda"), copy=options.copy_rate, matmul=1.0).copy
    rows = []
    for n, k in options.shape or SHAPES:
        for m in options.rows:
            rows.append(row := measure(m, n, k, copy))
            us, torch_us, floor_us = (row[name] for name in ("us", "torch_us", "floor_us"))
            print(
                f"{n} x {k}, {m} rows: {us} us, torch.mm {torch_us} ({torch_us / us:.2f} times), floor {floor_us}", flush=True
            )
    if options.json is not None:
        write_rows(options.json, rows, copy_rate=copy)


if __name__ == "__main__":
    main()
