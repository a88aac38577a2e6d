"""Sampling from logits and acceptance beside FlashInfer's functions and torch's."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.published.text import load, paragraph, short, table, without_empty_columns
from benchmarks.sampling.cases import JOBS
from benchmarks.sampling.kernels import OURS, READ
from benchmarks.sampling.report import ahead, by_case

FILE = "h200-sampling"
# Shown of the cases; all of them are in the file.
VOCAB, ROWS, LOGITS, SETTINGS = 128256, (4, 32, 512), "peaked", ("nothing", "top-p", "top-k-top-p", "min-p")


def sampling(results: Path) -> str:
    if not (results / f"{FILE}.json").exists():
        return paragraph("Sampling from logits (`python -m benchmarks sampling`): not measured yet.")
    intro = "Sampling from logits on one H200, bf16, vocabulary of 128,256, CUDA-graph replay over rotating buffers,"
    intro += f" microseconds (`python -m benchmarks sampling`, `benchmarks/results/{FILE}.json`). The floor is the bytes of the"
    intro += ' logits over the copy rate; "reading" is a kernel that does nothing but read them; for FlashInfer the fastest of'
    intro += " its functions is shown. The logits are peaked as a language model's."
    rows = load(FILE, results)["rows"]
    if of_requests := [f"{job} ({JOBS[job]})" for job in ("verify", "accept") if any(row["job"] == job for row in rows)]:
        intro += f" A request has four rows in {' and '.join(of_requests)}:"
    lines = []
    for (job, vocab, count, setting, logits), found in by_case(rows).items():
        if vocab != VOCAB or count not in ROWS or logits != LOGITS or setting not in SETTINGS:
            continue
        theirs = [row["us"] for name, row in found.items() if name.startswith("flashinfer")]
        times = [short(found[name]["us"]) if name in found else "" for name in (READ, OURS)]
        times += [short(min(theirs)) if theirs else "", short(found["torch"]["us"]) if "torch" in found else ""]
        floor = short(next(iter(found.values()))["floor_us"])
        lines.append([job, str(count), setting, floor, *times])
    told = []
    for job in JOBS:
        if ratios := [ratio for _, ratio in ahead(rows, job)]:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            told.append(f"{job} {mean:.2f} ({min(ratios):.2f} to {max(ratios):.1f} over {len(ratios)} cases)")
    outro = f"Times as fast as FlashInfer over the file's cases, flat logits too, geometric mean: {'; '.join(told)}."
    header = ("job", "rows", "cut", "floor", "reading", "spec_ops", "FlashInfer", "torch")
    return "\n\n".join([paragraph(intro), table(*without_empty_columns(header, lines)), *([paragraph(outro)] if told else [])])
