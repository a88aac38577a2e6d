"""`skinny_mm` next to `torch.mm` on the weights of models' layers: CUDA-graph replay over more weights than L2 holds.

    python -m benchmarks.skinny_mm                                              # prints
    python -m benchmarks.skinny_mm --json benchmarks/results/h200-skinny-mm.json
    python -m benchmarks.skinny_mm --weights row block                          # stored in 8 bits, beside torch._scaled_mm
    python -m benchmarks.skinny_mm --weights int4 --warm                        # compiles, in as many processes as you like
    python -m benchmarks.skinny_mm --model llama-8b --tp 2 4 8                  # a rank's share of a model and its draft

The pass `lower_skinny_mm` takes its rule from these rows: a product is replaced where `us` is below `torch_us`. The last lines
say for each weight which of the rule's ranges of rows gain, and what the rule does today (on sm_90). Products with
weights of fewer bits are measured beside `torch.mm` on the dequantized weight (`torch_us`) and what a user has otherwise:
`torch._scaled_mm` on rows that are quantized before it, for float8 with a scale for each row or for all (`scaled_mm_us`: its
time with theirs); for int4 torch's `_weight_int4pack_mm` (`int4pack_us`), which torchao's `tile_packed_to_4d` calls, and where
`mslk` is installed the kernel of `Int4Tensor` (`mslk_us`). `*_error` is such a kernel's error divided by `torch.mm`'s.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.round.shapes import SHAPES as MODELS
from benchmarks.rows import write_rows
from benchmarks.timing import measure_ceilings, time_calls
from spec_ops.backends.triton.linear.skinny_mm import skinny_mm
from spec_ops.backends.weight_format import dequantized, packed
from spec_ops.models.quantized import float8_tensor, mxfp4_tensor, nvfp4_tensor
from spec_ops.parallel import TensorParallel, shard
from spec_ops.passes.lower_skinny_mm import RULES, refusal

# n, k
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (2880, 4096), (1536, 7168)]  # replaced
SHAPES += [(5120, 2880), (24576, 1536), (28672, 4096), (7168, 16384)]  # left to cuBLAS
ROWS = (1, 4, 8, 16, 32, 64)
WEIGHTS = ("bf16", "tensor", "row", "block", "int4", "nvfp4", "mxfp4")
OTHERS = ("scaled_mm", "int4pack", "mslk")  # what a user has otherwise
ARCH = 90  # of the rules that figures are compared with
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


def stored(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`weight` in 8 or 4 bits, its scale, its zero and its tensor's scale."""
    if kind == "int4":
        groups = weight.float().unflatten(1, (-1, 128 if weight.shape[1] % 128 == 0 else 64))
        low, high = groups.aminmax(dim=2)
        scale = (high - low) / 15
        numbers = ((groups - low[..., None]) / scale[..., None]).round().to(torch.int8).sub(8).flatten(1)
        return packed(numbers), scale.bfloat16().t().contiguous().t(), (low + 8 * scale).bfloat16().t().contiguous().t(), None
    n, k = weight.shape
    if kind in ("nvfp4", "mxfp4"):
        made = nvfp4_tensor(weight) if kind == "nvfp4" else mxfp4_tensor(weight)
    else:
        made = float8_tensor(weight, *{"tensor": (n, k), "row": (1, k), "block": (128, 128)}[kind])
    return made.data_, made.scale, made.zero, made.tensor_scale


def scaled_mm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What a user has otherwise for a weight with a scale for each row, or one for all: rows in 8 bits too."""
    dim = None if scale.numel() == 1 else 1
    greatest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    rows = greatest.float().reshape(-1, 1) / torch.finfo(torch.float8_e4m3fn).max
    return torch._scaled_mm((x / rows).to(torch.float8_e4m3fn), weight.t(), rows, scale.t(), out_dtype=x.dtype)


def int4pack_parts(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `torch._convert_weight_to_int4pack` takes, `[n, k / 2]` of numbers from 0 to 15, the even column in the high half;
    and `[k / group, n, 2]` scales and zeros, of numbers less 8."""
    swapped = ((weight & 15) << 4) | (weight >> 4)
    return swapped ^ 0x88, torch.stack([scale.t(), zero.t()], 2).contiguous()


def others(kind: str, cases: list[tuple[Any, ...]], m: int) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """Calls of what a user has otherwise, by name. `cases`: rows of all counts, and a stored weight's parts."""
    if kind in ("row", "tensor"):
        compiled = torch.compile(scaled_mm, dynamic=False)
        return {"scaled_mm": [lambda x=x[:m], w=w, s=s: compiled(x, w, s) for x, w, s, *_ in cases]}
    if kind != "int4":
        return {}
    found: dict[str, list[Callable[[], torch.Tensor]]] = {"int4pack": []}
    for x, w, s, z, _ in cases:
        k, group = 2 * w.shape[1], 2 * w.shape[1] // s.shape[1]
        numbers, scales = int4pack_parts(w, s, z)
        tiles = torch._convert_weight_to_int4pack(numbers, 8 if k % 128 == 0 else 2)
        found["int4pack"].append(lambda x=x[:m], w=tiles, g=group, s=scales: torch._weight_int4pack_mm(x, w, g, s))
    if hasattr(torch.ops.mslk, "bf16i4bf16_rowwise"):
        product = torch.ops.mslk.bf16i4bf16_rowwise
        found["mslk"] = [partial(product, x[:m], w.view(torch.int8), s.t(), z.t()) for x, w, s, z, _ in cases]
    return found


def measure_stored(rows: Sequence[int], n: int, k: int, kind: str, copy: float, warm: bool = False) -> Iterator[dict[str, Any]]:
    """A row of figures for each number of `rows`, in that order; none if `warm`, which only compiles."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    bits = 4 if kind in ("int4", "nvfp4", "mxfp4") else 8
    x, weight = (torch.randn(r, k, device="cuda", generator=generator).bfloat16() for r in (max(rows), n))
    parts = stored(weight, kind)
    # Kernels take as long for any numbers: copies of one weight are enough to keep it out of L2.
    count = 1 if warm else 8 * COLD_BYTES // (bits * n * k) + 2
    cases = [
        (x, *(p if p is None or i == 0 else p.clone(memory_format=torch.preserve_format) for p in parts)) for i in range(count)
    ]
    exact = dequantized(*parts)
    plain = [exact.bfloat16() for _ in range(1 if warm else COLD_BYTES // (2 * n * k) + 2)]
    moved = sum(t.numel() * t.element_size() for t in parts if t is not None)
    for m in rows:
        calls = {"us": [lambda x=x[:m], w=w, s=s: skinny_mm(x, w, None, *s) for x, w, *s in cases]}
        calls["torch_us"] = [lambda x=x[:m], w=w: torch.mm(x, w.t()) for w in plain]
        calls |= {f"{name}_us": made for name, made in others(kind, cases, m).items()}
        if warm:
            for made in calls.values():
                made[0]()
            continue
        times = {name: time_calls(made, min_ms=4, min_replays=5) for name, made in calls.items()}
        lost = {name: error(timing.output, x[:m], exact) for name, timing in times.items()}
        row = {"n": n, "k": k, "m": m, "weights": kind} | {name: round(timing.us, 2) for name, timing in times.items()}
        row["floor_us"] = round((moved + 2 * m * (n + k)) / copy * 1e6, 2)
        row["error_over_torch"] = round(lost["us"] / lost["torch_us"], 4)
        row |= {
            f"{name.removesuffix('_us')}_error": round(lost[name] / lost["torch_us"], 4)
            for name in times
            if name not in ("us", "torch_us")
        }
        yield row


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
    parser.add_argument("--warm", action="store_true", help="measure nothing: compile the kernels of --weights in 8 and 4 bits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.shape and options.model:
        parser.error("give --shape or --model, not both")
    if options.warm and options.json is not None:
        parser.error("give --warm or --json, not both")
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
    if options.warm and options.copy_rate is None:
        options.copy_rate = 1.0
    copy = measure_ceilings(torch.device("cuda"), copy=options.copy_rate, matmul=1.0).copy
    rows = []
    by_shape: dict[tuple[int, int], list[int]] = {}
    for n, k, m in cases:
        by_shape.setdefault((n, k), []).append(m)
    for ((n, k), counts), kind in itertools.product(by_shape.items(), options.weights):
        if kind != "bf16":
            measured = measure_stored(counts, n, k, kind, copy, options.warm)
        else:
            measured = (measure(m, n, k, copy) for m in counts if not options.warm)
        for row in measured:
            rows.append(row)
            us, torch_us, floor_us = (row[name] for name in ("us", "torch_us", "floor_us"))
            beside = "".join(f", {name} {row[f'{name}_us']}" for name in OTHERS if f"{name}_us" in row)
            beside = f"torch.mm {torch_us} ({torch_us / us:.2f} times){beside}"
            print(f"{n} x {k} {kind}, {row['m']} rows: {us} us, {beside}, floor {floor_us}", flush=True)
    for shape, names in named.items():
        if names:
            print(f"{shape[0]} x {shape[1]} is {'; '.join(names)}")
    print("\n".join(verdicts(rows)))
    if options.json is not None:
        write_rows(options.json, rows, copy_rate=copy)


if __name__ == "__main__":
    main()
