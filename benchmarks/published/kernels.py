"""Attention kernels: the tables of microseconds, fp8 caches and windows, and how good the automatic choice is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.text import Row, listed, load, paragraph, short, table

FLASHINFER = ("flashinfer-xqa", "flashinfer-fa2", "flashinfer-fa3")

# Shown of the kernels' results: kind, heads, head_dim, batch, context, queries, mask; all of them are in the file.
KERNELS = (
    ("gqa", "32/8", 128, 1, 4096, 4, "causal"),
    ("gqa", "32/8", 128, 1, 81920, 16, "tree"),
    ("gqa", "32/8", 128, 8, 8192, 4, "causal"),
    ("gqa", "32/8", 128, 64, 8192, 1, "causal"),
    ("gqa", "32/8", 128, 64, 8192, 16, "tree"),
    ("gqa", "32/8", 128, 32, "log-uniform 512-65536", 4, "causal"),
    ("gqa", "64/8", 64, 8, 81920, 4, "causal"),
    ("gqa", "64/8", 64, 64, 8192, 16, "tree"),
    ("mla", "128", 576, 1, 81920, 1, "causal"),
    ("mla", "128", 576, 8, 8192, 1, "causal"),
    ("mla", "128", 576, 8, 81920, 4, "causal"),
    ("mla", "128", 576, 64, 8192, 1, "causal"),
    ("mla", "128", 576, 64, 8192, 16, "tree"),
    ("mla", "16", 576, 1, 81920, 1, "causal"),
    ("mla", "16", 576, 8, 8192, 4, "causal"),
    ("mla", "16", 576, 64, 8192, 1, "causal"),
    ("mla", "16", 576, 32, "log-uniform 512-65536", 4, "causal"),
)


def _kernel_cases(results: Path, name: str = "h200-kernels") -> dict[tuple, dict[str, Row]]:
    """Cases of H200 kernel results by backend; a case of unequal lengths has their range for its context."""
    cases: dict[tuple, dict[str, Row]] = {}
    for row in load(name, results)["rows"]:
        context = row["context"] if row["lengths"] == "equal" else row["lengths"]
        case = (row["kind"], row["heads"], row["head_dim"], row["bs"], context, row["q_len"], row["mask"])
        cases.setdefault(case, {})[row["backend"]] = row
    return cases


def _over_fastest(cases: dict[tuple, dict[str, Row]], kind: str) -> list[float]:
    """Per case: the time of FlashInfer's fastest kernel over ours."""
    both = [found for case, found in cases.items() if case[0] == kind and "triton" in found and {*FLASHINFER} & found.keys()]
    return [min(found[name]["us"] for name in FLASHINFER if name in found) / found["triton"]["us"] for found in both]


def over_fastest(results: Path, kind: str) -> tuple[float, int]:
    """Geometric mean of the times of FlashInfer's fastest kernels over ours, and the number of cases."""
    ratios = _over_fastest(_kernel_cases(results), kind)
    return _mean(ratios), len(ratios)


def _mean(ratios: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def kernels(results: Path) -> str:
    cases, lines = _kernel_cases(results), []
    for case in KERNELS:
        kind, heads, head_dim, bs, context, q_len, mask = case
        found = cases[case]
        lengths = str(context).removeprefix("log-uniform ").replace("-", " to ")
        layer = f"{heads}, {head_dim}" if kind == "gqa" else f"MLA {heads}"
        times = [
            short(found["triton"]["floor_us"]),
            *(short(found[n]["us"]) if n in found else "" for n in ("triton", *FLASHINFER)),
        ]
        lines.append([layer, f"{bs}, {lengths}", f"{q_len}{', tree' * (mask == 'tree')}", *times])
    told = []
    for kind in ("gqa", "mla"):
        ratios = _over_fastest(cases, kind)
        spread = f"{min(ratios):.2f} to {max(ratios):.1f}"
        told.append(f"{_mean(ratios):.2f} times as fast over {len(ratios)} {kind.upper()} cases ({spread})")
    everything = [row for row in load("h200-kernels", results)["rows"] if row["backend"] == "triton"]
    worst = max(row["error"] / row["reference_error"] for row in everything if row["reference_error"])
    copy = load("h200-kernels", results)["ceilings"]["copy"] / 1e12
    intro = (
        "Attention on one H200, bf16, pages of 64, CUDA-graph replay over rotating buffers, next to FlashInfer's kernels in one"
    )
    intro += " run (`python -m benchmarks kernels`, `benchmarks/results/h200-kernels.json`); microseconds, floor at"
    intro += f" {copy:.1f} TB/s and the rate of large matrix products. Every measurement starts from rest and is short"
    intro += " (20 ms, or seven replays), since after 40 to 60 ms of MLA with 128 heads the GPU is at its power limit, and its"
    intro += " clocks fall by a fifth:"
    outro = "Next to the fastest of FlashInfer's kernels in each case, the Triton kernels are in the geometric mean"
    outro += (
        f" {' and '.join(told)}; their error is at most {worst:.2f} times that of torch's own attention. fa2 and fa3 need a"
    )
    outro += (
        " plan on the host before every call, which is left out here. The xqa times hold two small launches of ours that make"
    )
    outro += " its inputs safe."
    header = ("heads, head_dim", "batch, context", "queries", "floor", "Triton", "FlashInfer xqa", "fa2", "fa3")
    return "\n\n".join((paragraph(intro), table(header, lines), paragraph(outro)))


def _fp8_over_bf16(results: Path) -> dict[tuple[str, str], list[float]]:
    """Times with fp8 caches over those with bfloat16 ones, 8192 tokens and more; by kind and rows per KV head."""
    bf16 = _kernel_cases(results)
    ratios: dict[tuple[str, str], list[float]] = {}
    for case, found in _kernel_cases(results, "h200-kernels-fp8").items():
        kind, heads, _, _, context, q_len, _ = case
        queries, _, kv_heads = heads.partition("/")
        rows = int(queries) // int(kv_heads or 1) * q_len
        if context > 4096:
            size = "few" if rows <= 16 else "some" if rows <= 32 else "many"
            ratios.setdefault((kind, size), []).append(found["triton"]["us"] / bf16[case]["triton"]["us"])
    return ratios


def fp8(results: Path) -> str:
    ratios, cases = _fp8_over_bf16(results), _kernel_cases(results, "h200-kernels-window")
    rows = {case: found["triton"] for case, found in _kernel_cases(results, "h200-kernels-fp8").items() if case[0] == "gqa"}
    shares = [row["us"] / row["floor_us"] for case, row in rows.items() if case[4] == 81920 and case[5] == 1]
    both = [(found["triton"]["us"], found["flashinfer-xqa"]["us"]) for found in cases.values() if "flashinfer-xqa" in found]
    text = "Fp8 caches (`benchmarks/results/h200-kernels-fp8.json`): from 8192 tokens on, GQA with up to 16 query rows for a KV"
    fp8_at, bf16_at = (load(name, results)["environment"]["commit"] for name in ("h200-kernels-fp8", "h200-kernels"))
    text += f" head takes {listed(ratios['gqa', 'few'])} of the time of bf16 caches (two runs, at {fp8_at} and {bf16_at}: see"
    text += " the remarks in the files), decoding at 81920 tokens"
    text += f" {listed(shares, '{:.2f}'.format)} times the floor. Layers with a window of 128 (gpt-oss's heads,"
    text += f" `benchmarks/results/h200-kernels-window.json`): {listed(found['triton']['us'] for found in cases.values())} us;"
    text += f" xqa takes {listed((theirs / ours for ours, theirs in both), '{:.1f}'.format)} times as long."
    return paragraph(text)


def limits(results: Path) -> str:
    ours = {
        case[1:]: found["triton"] for case, found in _kernel_cases(results).items() if case[0] == "gqa" and "triton" in found
    }
    one = [row for (_, _, bs, context, _, _), row in ours.items() if (bs, context) == (1, 4096)]
    busy = [row for (_, dim, _, context, q, _), row in ours.items() if (dim, q) == (64, 16) and context != 4096]
    ratios = _fp8_over_bf16(results)
    text = f"On one request of 4096 tokens the Triton attention kernel takes {listed(r['us'] for r in one)} us where the floor"
    text += f" is {listed(r['floor_us'] for r in one)}; with head_dim 64 and 16 queries it is bound by arithmetic, at"
    text += f" {listed(r['us'] / r['floor_us'] for r in busy)} times the floor on longer contexts."
    text += f" With fp8 caches, GQA of 32 rows for a KV head takes {listed(ratios['gqa', 'some'])} of bf16's time and more rows"
    text += f" {listed(ratios['gqa', 'many'])}; MLA of up to 16 rows {listed(ratios['mla', 'few'])}, more rows"
    text += f" {listed(ratios['mla', 'many'])} (the Gluon kernels take no fp8)."
    return paragraph(text)


def choice(results: Path) -> str:
    """Whether `auto`'s kernel is the fastest, and how near those come that plan on the host."""
    cases = {case: found for case, found in _kernel_cases(results).items() if "triton" in found}
    compared = sum(case[0] == "gqa" and "flashinfer-xqa" in found for case, found in cases.items())
    ahead, name, case = max(
        (found["triton"]["us"] / found[name]["us"], name, case)
        for case, found in cases.items()
        for name in ("flashinfer-fa2", "flashinfer-fa3")
        if name in found
    )
    (kind, heads, head_dim, bs, context, q_len, mask), found = case, cases[case]
    text = "Batch size and lengths do not count: one compiled round serves all lengths. In each of the"
    text += f" {compared} measured cases on sm_90 that choice is the fastest within 5%"
    text += " (`benchmarks/results/h200-kernels.json`), which `tests/backends/test_measured.py` checks. fa2 and fa3 plan on the"
    text += " host, so `auto` leaves them out. With that plan"
    text += " left out of"
    text += f" their times too, they are at most {max(ahead - 1, 0):.1%} ahead of `triton` in that file: {name} with"
    text += f" {kind.upper()} {heads}, head_dim {head_dim}, {q_len} queries ({mask}) and {bs} requests of {context} tokens"
    text += f" ({found[name]['us']:.0f} us, `triton` {found['triton']['us']:.0f})."
    return paragraph(text)


_PAGES = ("h100-kernels-pages", "h200-kernels-pages")


def _over_whole_pages(results: Path) -> dict[tuple[str, str], dict[int, list[float]]]:
    """By heads and queries, and by tokens of a page: times over those with pages of 64, a batch each."""
    cases: dict[tuple, dict[int, float]] = {}
    for row in (row for name in _PAGES for row in load(name, results)["rows"]):
        layer = f"{row['heads']}, {row['head_dim']}" if row["kind"] == "gqa" else f"MLA {row['heads']}"
        queries = f"{row['q_len']}{', tree' * (row['mask'] == 'tree')}"
        cases.setdefault((layer, queries, row["bs"], row["context"], row["lengths"]), {})[row["page_size"]] = row["us"]
    ratios: dict[tuple[str, str], dict[int, list[float]]] = {}
    for (layer, queries, *_), times in cases.items():
        for size, us in times.items():
            if size != 64:
                ratios.setdefault((layer, queries), {}).setdefault(size, []).append(us / times[64])
    return ratios


def pages(results: Path) -> str:
    """Small pages beside pages of 64."""
    ratios = _over_whole_pages(results)
    sizes = sorted({size for found in ratios.values() for size in found}, reverse=True)
    lines = [
        [*case, *(f"{_mean(found[size]):.2f}, {max(found[size]):.2f}" if size in found else "" for size in sizes)]
        for case, found in ratios.items()
    ]
    batches = [len(times) for found in ratios.values() for times in found.values()]
    text = "Times with small pages over those with pages of 64: GQA and MLA of 16 heads on one H100, MLA of 128 heads on one"
    text += f" H200 ({', '.join(f'`benchmarks/results/{name}.json`' for name in _PAGES)}). The geometric mean over"
    text += f" {listed(batches, str)} batches, and the worst of them."
    header = ("heads, head_dim", "queries", *(f"pages of {size}" for size in sizes))
    return paragraph(text) + "\n\n" + table(header, lines)


def deterministic(results: Path) -> str:
    """Batch-invariant attention beside the default kernels."""
    cases, lines = _kernel_cases(results, "h200-deterministic"), []
    for (kind, heads, head_dim, bs, context, q_len, mask), found in cases.items():
        if {"triton", "triton-deterministic"} <= found.keys():
            ours, fixed = found["triton"]["us"], found["triton-deterministic"]["us"]
            layer = f"{heads}, {head_dim}" if kind == "gqa" else f"MLA {heads}"
            queries = f"{q_len}{', tree' * (mask == 'tree')}"
            lines.append([layer, f"{bs}, {context}", queries, short(ours), short(fixed), f"{fixed / ours:.1f}"])
    intro = "What batch-invariant attention costs, microseconds (`benchmarks/results/h200-deterministic.json`):"
    header = ("heads, head_dim", "batch, context", "queries", "triton", "triton-deterministic", "ratio")
    return paragraph(intro) + "\n\n" + table(header, lines)
