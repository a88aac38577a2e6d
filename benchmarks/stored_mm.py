"""Products with stored weights for `benchmarks.skinny_mm`: ours, `torch.mm` with the dequantized weight, and what a user has
otherwise.

- float8: `torch._scaled_mm`, for which rows are rounded to 8 bits before it, with a scale for each row, for all of them, or for
  128 columns of a row beside a weight in blocks. Compiled, as a user would; its time has theirs. And our `float8_mm` on the
  same rows.
- int4: torch's `_weight_int4pack_mm`, which torchao's `tile_packed_to_4d` calls, and where `mslk` is installed the kernel of
  torchao's `Int4Tensor`.

What torch refuses (a shape, a version without the kernel) is told, and left out of the row.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch

from benchmarks.timing import time_calls
from spec_ops.backends.triton.linear import hopper_tiles
from spec_ops.backends.weight_format import dequantized, packed, weight_format
from spec_ops.models.quantized import float8_tensor, mxfp4_tensor, nvfp4_tensor
from spec_ops.ops.linear import float8_mm_op
from spec_ops.passes.manager import find_binaries_where_inductor_does

KINDS = ("tensor", "row", "block", "int4", "nvfp4", "mxfp4")
OTHERS = ("scaled_mm", "float8_mm", "int4pack", "mslk")  # what a user has otherwise; rows of 8 bits by our own kernel
DEVICE = "cuda"
COLD_BYTES = 200_000_000  # of weights in turn: four times the L2 of an H200
# Seconds before a measurement, fewer than elsewhere: these products wait for memory, and a measurement takes some 10 ms.
REST_S = 0.05
BLOCK = 128  # columns of a row that share a scale beside a weight in blocks


def error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Root mean square against float64."""
    return (out.double() - x.double() @ weight.double().t()).square().mean().sqrt().item()


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


def rounded_rows(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in float8, and the scales `[m or 1, 1]` of its rows, or `[m, k / 128]` in blocks, column by column."""
    parts = x.unflatten(1, (-1, BLOCK)) if kind == "block" else x[:, None]
    greatest = parts.abs().amax() if kind == "tensor" else parts.abs().amax(2)
    scale = greatest.float().reshape(-1, 1 if kind != "block" else parts.shape[1]) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (parts / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return rounded, scale.t().contiguous().t() if kind == "block" else scale


def scaled_mm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, kind: str, rows: Callable[..., Any] = rounded_rows
) -> torch.Tensor:
    """What a user has otherwise for a weight of float8: rows in 8 bits too. `rows`: `rounded_rows`, perhaps compiled."""
    rounded, row_scales = rows(x, kind)
    return torch._scaled_mm(rounded, weight.t(), row_scales, scale.t(), out_dtype=x.dtype)


def float8_mm(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, kind: str, rows: Callable[..., Any] = rounded_rows
) -> torch.Tensor:
    """As `scaled_mm`, by our kernel."""
    rounded, row_scales = rows(x, kind)
    return float8_mm_op(rounded, row_scales, weight, scale, None, x.dtype)


def int4pack_parts(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `torch._convert_weight_to_int4pack` takes, `[n, k / 2]` of numbers from 0 to 15, the even column in the high half;
    and `[k / group, n, 2]` scales and zeros, of numbers less 8."""
    swapped = ((weight & 15) << 4) | (weight >> 4)
    return swapped ^ 0x88, torch.stack([scale.t(), zero.t()], 2).contiguous()


def others(kind: str, cases: list[tuple[Any, ...]]) -> dict[str, Callable[[int], list[Callable[[], torch.Tensor]]]]:
    """What makes calls for m rows, by the name of what a user has otherwise. `cases`: all rows, and a stored weight's parts."""
    k = cases[0][0].shape[1]
    if kind in ("row", "tensor", "block"):
        if kind == "block" and k % BLOCK:
            return {}
        # For any sizes, or there would be a compilation for each, and after eight of them none.
        rows = torch.compile(rounded_rows, dynamic=True)

        def of(product: Callable[..., torch.Tensor]) -> Callable[[int], list[Callable[[], torch.Tensor]]]:
            return lambda m: [partial(product, x[:m], w, s, kind, rows) for x, w, s, *_ in cases]

        return {"scaled_mm": of(scaled_mm), "float8_mm": of(float8_mm)}
    if kind != "int4":
        return {}

    @functools.cache
    def packed_parts() -> list[tuple[Any, ...]]:
        found = []
        for _, w, s, z, _ in cases:
            numbers, scales = int4pack_parts(w, s, z)
            found.append((torch._convert_weight_to_int4pack(numbers, 8 if k % 128 == 0 else 2), k // s.shape[1], scales))
        return found

    found: dict[str, Any] = {
        "int4pack": lambda m: [partial(torch._weight_int4pack_mm, cases[0][0][:m], *parts) for parts in packed_parts()]
    }
    if hasattr(torch.ops.mslk, "bf16i4bf16_rowwise"):
        product = torch.ops.mslk.bf16i4bf16_rowwise
        found["mslk"] = lambda m: [partial(product, x[:m], w.view(torch.int8), s.t(), z.t()) for x, w, s, z, _ in cases]
    return found


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def tried(make: Callable[[int], list[Callable[[], torch.Tensor]]], m: int) -> list[Callable[[], torch.Tensor]] | str:
    """Calls of somebody else's kernel that has run once, or why it does not."""
    try:
        calls = make(m)
        calls[0]()
        _wait()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as refused:  # a shape, or a version without it
        return f"{type(refused).__name__}: {str(refused).splitlines()[0]}"
    return calls


def _most_rows(data: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor | None) -> int:
    """Most rows of bfloat16 that `skinny_mm` takes with such a weight."""
    from spec_ops.backends.triton.runtime.launch import arch_of  # here: triton comes for Linux only

    n, k = dequantized(data, scale, *rest).shape
    format_ = weight_format("skinny_mm", data, scale, *rest)
    return hopper_tiles.most_rows(n, k, format_, torch.bfloat16, scale.dtype, arch_of(data.device))


def measure(
    rows: Sequence[int], n: int, k: int, kind: str, copy: float, torch_us: dict[int, float], warm: bool = False
) -> Iterator[dict[str, Any]]:
    """A row of figures for each number of `rows` that `skinny_mm` takes, in that order; none if `warm`, which only compiles.
    `torch_us`: times of `torch.mm` with n x k, which no format changes; those that are missing are measured and added."""
    from spec_ops.backends.triton.linear.skinny_mm import skinny_mm  # here: triton comes for Linux only

    generator = torch.Generator(DEVICE).manual_seed(n + k)
    bits = 4 if kind in ("int4", "nvfp4", "mxfp4") else 8
    x, weight = (torch.randn(r, k, device=DEVICE, generator=generator).bfloat16() for r in (max(rows), n))
    parts = stored(weight, kind)
    most = _most_rows(*parts)
    rows = [m for m in rows if m <= most]
    # Kernels take as long for any numbers: copies of one weight are enough to keep it out of L2.
    count = 1 if warm else 8 * COLD_BYTES // (bits * n * k) + 2
    cases = [
        (x, *(p if p is None or i == 0 else p.clone(memory_format=torch.preserve_format) for p in parts)) for i in range(count)
    ]
    exact = dequantized(*parts)
    rounded = exact.bfloat16()
    timed = not warm and any(m not in torch_us for m in rows)
    plain = [rounded, *(rounded.clone() for _ in range(COLD_BYTES // (2 * n * k) + 1 if timed else 0))]
    moved = sum(t.numel() * t.element_size() for t in parts if t is not None)
    beside = others(kind, cases)
    for m in rows:
        calls = {"us": [partial(skinny_mm, x[:m], w, None, *s) for x, w, *s in cases]}
        refused: dict[str, str] = {}
        for name, make in beside.items():
            if isinstance(made := tried(make, m), str):
                refused[name] = made
            else:
                calls[f"{name}_us"] = made
        if warm:
            calls["us"][0]()
            continue
        if m not in torch_us:
            of_torch = [partial(torch.mm, x[:m], w.t()) for w in plain]
            torch_us[m] = round(time_calls(of_torch, min_ms=4, min_replays=5, rest_s=REST_S).us, 2)
        times = {name: time_calls(made, min_ms=4, min_replays=5, rest_s=REST_S) for name, made in calls.items()}
        lost = {name: error(timing.output, x[:m], exact) for name, timing in times.items()}
        of_mm = error(torch.mm(x[:m], rounded.t()), x[:m], exact)
        row = {"n": n, "k": k, "m": m, "weights": kind} | {name: round(timing.us, 2) for name, timing in times.items()}
        row |= {"torch_us": torch_us[m], "floor_us": round((moved + 2 * m * (n + k)) / copy * 1e6, 2)}
        row["error_over_torch"] = round(lost.pop("us") / of_mm, 4)
        row |= {f"{name.removesuffix('_us')}_error": round(loss / of_mm, 4) for name, loss in lost.items()}
        yield row | ({"refused": refused} if refused else {})


def _compile(rows: Sequence[int], n: int, k: int, kind: str) -> None:
    for _ in measure(rows, n, k, kind, 1.0, {}, warm=True):
        pass
    _wait()


def compile_all(cases: Sequence[tuple[Sequence[int], int, int, str]], jobs: int) -> None:
    """Calls every kernel of `cases` (rows, n, k, kind) once in `jobs` processes, so that the one that measures finds binaries.

    Raises:
        Whatever a call raised, with the case.
    """
    find_binaries_where_inductor_does()  # here and, through the environment, there
    # A forked process cannot use CUDA.
    with ProcessPoolExecutor(min(jobs, len(cases)), mp_context=multiprocessing.get_context("spawn")) as pool:
        calls = {pool.submit(_compile, *case): case for case in cases}
        for call in as_completed(calls):
            if (problem := call.exception()) is not None:
                rows, n, k, kind = calls[call]
                raise RuntimeError(f"{n} x {k} {kind}, {' '.join(map(str, rows))} rows: {problem}") from problem


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of rows with stored weights: for each format and number of rows the least and greatest share of the floor's rate, and
    lines of what was faster than ours."""
    measured = [row for row in rows if "weights" in row]
    counts = sorted({row["m"] for row in measured})
    lines = ["share of the floor, least to greatest over all weights", f"{'rows':<8}" + "".join(f"{m:>12}" for m in counts)]
    for kind in dict.fromkeys(row["weights"] for row in measured):
        cells = []
        for m in counts:
            shares = [row["floor_us"] / row["us"] for row in measured if (row["weights"], row["m"]) == (kind, m)]
            cells.append(f"{min(shares):.2f} to {max(shares):.2f}" if shares else "")
        lines.append(f"{kind:<8}" + "".join(f"{cell:>14}"[1:] if len(cell) > 11 else f"{cell:>12}" for cell in cells))
    for name in ("torch", *OTHERS):
        beside = [row for row in measured if f"{name}_us" in row]
        faster = [row for row in beside if row[f"{name}_us"] < row["us"]]
        if beside:
            lines.append(f"{name} is faster in {len(faster)} of {len(beside)}{':' if faster else ''}")
        lines += [
            f"  {row['n']} x {row['k']} {row['weights']}, {row['m']} rows: {row[f'{name}_us']} of our {row['us']} us"
            for row in faster
        ]
    told = {f"{name} with {row['weights']}: {why}" for row in measured for name, why in row.get("refused", {}).items()}
    return lines + sorted(f"refused: {line}" for line in told)
