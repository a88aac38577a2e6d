"""`skinny_mm` next to `torch.mm` on the weights of models' layers: CUDA-graph replay over more weights than L2 holds.

    python -m benchmarks.skinny_mm                                              # prints
    python -m benchmarks.skinny_mm --json benchmarks/results/h200-skinny-mm.json
    python -m benchmarks.skinny_mm --weights row block                          # stored in 8 bits, beside torch._scaled_mm
    python -m benchmarks.skinny_mm --weights int4 --jobs 12                     # compiled in 12 processes first
    python -m benchmarks.skinny_mm --model llama-8b --tp 2 4 8                  # a rank's share of a model and its draft

The pass `lower_skinny_mm` takes its rule from these rows: a product is replaced where `us` is below `torch_us`. The last lines
say for each weight which of the rule's ranges of rows gain, and what the rule does today (on sm_90). Products with
weights of fewer bits are measured beside `torch.mm` on the dequantized weight (`torch_us`) and what a user has otherwise
(`stored_mm.py`): `scaled_mm_us`, `float8_mm_us`, `int4pack_us`, `mslk_us`. `*_error` is such a kernel's error divided by
`torch.mm`'s. For these the last lines are the shares of the floor, and what was faster. The file is written after every weight.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

from benchmarks import stored_mm
from benchmarks.round.shapes import SHAPES as MODELS
from benchmarks.rows import write_rows
from benchmarks.stored_mm import COLD_BYTES, OTHERS, error
from benchmarks.timing import measure_ceilings, time_calls
from spec_ops.backends.triton.linear.skinny_mm import skinny_mm
from spec_ops.parallel import TensorParallel, shard
from spec_ops.passes.lower_skinny_mm import RULES, refusal

# n, k
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (2880, 4096), (1536, 7168)]  # replaced
SHAPES += [(5120, 2880), (24576, 1536), (28672, 4096), (7168, 16384)]  # left to cuBLAS
ROWS = (1, 4, 8, 16, 32, 64)
WEIGHTS = ("bf16", *stored_mm.KINDS)
ARCH = 90  # of the rules that figures are compared with


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


def weights_of(model: str, ranks: int) -> dict[tuple[int, int], list[str]]:
    """The weights `(n, k)` of the products in a layer, the LM head and the draft of a model, or of the first rank's share."""
    shape = MODELS[model]
    dense = shape.target.mixture.first_dense if shape.target.mixture else 0
    target, draft = shape.with_layers(dense + 1).build("meta", torch.bfloat16)
    if ranks != 1:
        group, whole = TensorParallel.fake(ranks), target
        target = shard(whole, group)
        draft = shard(draft, group, target=target)
    found: dict[tuple[int, int], list[str]] = {}
    seen: set[torch.nn.Module] = set()
    for who, part in ((model, target), (f"{model}'s draft", draft)):
        for path, module in part.named_modules():
            if isinstance(module, torch.nn.Linear) and module not in seen:
                seen.add(module)
                n, k = module.weight.shape
                found.setdefault((n, k), []).append(f"{who}, {ranks}: {path.rpartition('.')[2]}")
    return found


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """For each weight in 16 bits and each range of rows that has a rule: the gains over cuBLAS, and what the rule does."""
    lines = []
    bounds = [0, *sorted({rule.max_m for rule in RULES[ARCH]})]
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows if "weights" not in row):
        parts = []
        for least, most in itertools.pairwise(bounds):
            measured = [
                row for row in rows if (row["n"], row["k"]) == (n, k) and "weights" not in row and least < row["m"] <= most
            ]
            if gains := [row["torch_us"] / row["us"] for row in measured]:
                reason = refusal(ARCH, most, n, k)
                parts.append(f"to {most} rows {min(gains):.2f} to {max(gains):.2f} times, {reason or 'replaced'}")
        lines += [f"{n} x {k}: {'; '.join(parts)}"] if parts else []
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("N", "K"), help="instead of the built-in ones")
    parser.add_argument("--model", nargs="+", default=[], choices=MODELS, help="the weights of these, instead")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], metavar="RANKS", help="with --model: ranks that share it")
    parser.add_argument("--left", action="store_true", help=f"only products that cuBLAS keeps on sm_{ARCH} today")
    parser.add_argument("--most-mib", type=int, metavar="MIB", help="no weights of more MiB in 16 bits")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=WEIGHTS)
    parser.add_argument("--copy-rate", type=float, help="bytes/s for the floor; measured by default")
    parser.add_argument("--jobs", type=int, default=0, help="compile kernels of --weights in 8 and 4 bits in so many processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.shape and options.model:
        parser.error("give --shape or --model, not both")
    if options.jobs < 0:
        parser.error(f"--jobs must be at least 0, got {options.jobs}")
    named = {shape: [] for shape in map(tuple, options.shape or ([] if options.model else SHAPES))}
    for model, ranks in itertools.product(options.model, options.tp):
        try:
            found = weights_of(model, ranks)
        except ValueError as error:
            parser.error(f"--tp {ranks}, {model}: {error}")
        for shape, names in found.items():
            named.setdefault(shape, []).extend(names)
    cases = [
        (n, k, m)
        for n, k in named
        for m in options.rows
        if (options.most_mib is None or 2 * n * k <= options.most_mib << 20)
        and not (options.left and not refusal(ARCH, m, n, k))
    ]
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    by_shape: dict[tuple[int, int], list[int]] = {}
    for n, k, m in cases:
        by_shape.setdefault((n, k), []).append(m)
    kinds = [kind for kind in options.weights if kind != "bf16"]
    if options.jobs and kinds and by_shape:
        stored_mm.compile_all([(counts, *shape, kind) for shape, counts in by_shape.items() for kind in kinds], options.jobs)
    copy = measure_ceilings(torch.device("cuda"), copy=options.copy_rate, matmul=1.0).copy
    rows: list[dict[str, Any]] = []
    of_torch: dict[tuple[int, int], dict[int, float]] = {shape: {} for shape in by_shape}
    for ((n, k), counts), kind in itertools.product(by_shape.items(), options.weights):
        if kind != "bf16":
            measured = stored_mm.measure(counts, n, k, kind, copy, of_torch[n, k])
        else:
            measured = (measure(m, n, k, copy) for m in counts)
        for row in measured:
            rows.append(row)
            us, torch_us, floor_us = (row[name] for name in ("us", "torch_us", "floor_us"))
            beside = "".join(f", {name} {row[f'{name}_us']}" for name in OTHERS if f"{name}_us" in row)
            beside = f"torch.mm {torch_us} ({torch_us / us:.2f} times){beside}"
            print(f"{n} x {k} {kind}, {row['m']} rows: {us} us, {beside}, floor {floor_us}", flush=True)
        if options.json is not None:  # now, in case a limit ends this
            write_rows(options.json, rows, copy_rate=copy)
    for shape, names in named.items():
        if names:
            print(f"{shape[0]} x {shape[1]} is {'; '.join(names)}")
    print("\n".join(verdicts(rows) + (stored_mm.summary(rows) if kinds else [])))


if __name__ == "__main__":
    main()
