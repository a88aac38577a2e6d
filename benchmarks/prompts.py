"""`python -m benchmarks prompts`: many prompts of very unequal lengths through one generator.

Rows take the next prompt when their own has ended. Beside it: the same prompts in groups, where a batch begins when the whole
one before it has ended; and one prompt at a time. Prompts are held-out text of the standard library, for the shipped pair.

It also reports the memory of each way: the KV pages that requests share (`kv_pages`, `kv_mib`); what `max_batch_size` requests
would need if each had pages for the longest one (`unshared_kv_mib`); and, on a GPU, the most that a call allocates
(`call_mib`), which happens while it runs its prompts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.rows import write_rows
from spec_ops.cli.options import (
    Compile,
    Device,
    DType,
    Steps,
    Temperature,
    console,
    parse_config,
    parse_device,
    parse_dtype,
    writable_file,
)
from spec_ops.decoding import Generator, SamplingParams
from spec_ops.decoding.pages import PagePool
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.paged import DEFAULT_PAGE_SIZE
from spec_ops.models.pretrained import load_pair

SHORTEST, LONGEST = 8, 512  # tokens, of prompts and of limits
SPREAD = 1.2  # standard deviation of the logarithm of a length


def heavy_tailed(count: int, median: int, seed: int) -> list[int]:
    """Lengths from a log-normal distribution."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), SPREAD, count)
    return [int(length) for length in drawn.clip(SHORTEST, LONGEST)]


def kv_mib(generator: Generator, pages: int) -> float:
    """MiB of so many pages in the caches of target and draft."""
    caches = [cache for cache in (generator.target_cache, generator.draft_cache) if cache is not None]
    return sum(t.nbytes for cache in caches for t in cache.tensors()) / generator.num_pages * pages / 2**20


def bench_prompts(
    prompts: Annotated[int, typer.Option(min=2, help="How many.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows.")] = 16,
    median: Annotated[int, typer.Option(min=SHORTEST, max=LONGEST, help="Of prompt lengths and of new tokens.")] = 32,
    steps: Steps = 3,
    temperature: Temperature = None,
    single: Annotated[bool, typer.Option("--single", help="One prompt at a time too.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way, in turn; the median counts.")] = 3,
    seed: int = 0,
    device: Device = None,
    dtype: DType = "float32",
    compile: Compile = False,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Also write the figures, with machine, versions and commit.")
    ] = None,
) -> None:
    """Tokens a second, and memory, over prompts of very unequal lengths: rows that are refilled, groups, and one prompt at a
    time. Texts are compared in float32."""
    place, weights, config = parse_device(device), parse_dtype(dtype), parse_config(steps, 1, None)
    target, draft, _ = load_pair(device=place, dtype=weights)
    lengths, limits = heavy_tailed(prompts, median, seed), heavy_tailed(prompts, median, seed + 1)
    texts = held_out_prompts(ByteTokenizer(), prompts, LONGEST // 8)
    texts = [(text * 8)[:length] for text, length in zip(texts, lengths, strict=True)]
    sampling = SamplingParams(temperature or 0.0, seed=seed)
    longest = max(length + limit for length, limit in zip(lengths, limits, strict=True))
    needed = PagePool(0, DEFAULT_PAGE_SIZE, config.reserve).needed
    most = sorted((needed(a + b) for a, b in zip(lengths, limits, strict=True)), reverse=True)[:batch_size]
    options: dict[str, Any] = {"max_batch_size": batch_size, "max_seq_len": longest, "compile": compile}
    shared = Generator(target, draft, config, num_pages=sum(most), **options)
    groups = [range(first, min(first + batch_size, prompts)) for first in range(0, prompts, batch_size)]
    ways: dict[str, tuple[Generator, list[range]]] = {"refilled": (shared, [range(prompts)]), "groups": (shared, groups)}
    if single:
        alone = Generator(target, draft, config, **options | {"max_batch_size": 1})
        ways["single"] = (alone, [range(i, i + 1) for i in range(prompts)])

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[list[int]]] = {}
    rounds: dict[str, int] = {}
    call_mib: dict[str, float] = {}
    for turn in range(repeats + 1):  # the first one compiles and warms up
        for name, (generator, parts) in ways.items():
            if place.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start, found[name], rounds[name] = time.perf_counter(), [], 0
            for part in parts:
                result = generator.generate(
                    [texts[i] for i in part],
                    max_new_tokens=[limits[i] for i in part],
                    sampling=sampling,
                    progress=turn == 0 and len(parts) == 1,
                )
                found[name] += result.tokens
                rounds[name] += result.stats.rounds
            if turn:
                seconds[name].append(time.perf_counter() - start)
                if place.type == "cuda":
                    call_mib[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    same = dtype != "float32" or sampling.temperature > 0 or all(tokens == found["refilled"] for tokens in found.values())
    new_tokens = sum(map(len, found["refilled"]))
    rows = []
    for name in ways:
        took = float(np.median(seconds[name]))
        generator = ways[name][0]
        rows.append(
            {
                "way": name, "prompts": prompts, "batch_size": generator.max_batch_size, "median": median,
                "new_tokens": new_tokens, "rounds": rounds[name], "seconds": round(took, 3),
                "tokens_per_second": round(new_tokens / took, 1),
                "kv_pages": generator.num_pages, "page_size": generator.page_size,
                "kv_mib": round(kv_mib(generator, generator.num_pages), 1),
                "unshared_kv_mib": round(kv_mib(generator, generator.max_pages * generator.max_batch_size), 1),
                "call_mib": round(call_mib[name], 1) if name in call_mib else None, "steps": steps,
                "temperature": sampling.temperature, "dtype": dtype, "device": str(place), "compile": compile,
            }
        )  # fmt: skip
    columns = {
        "way": "way", "rows": "batch_size", "rounds": "rounds", "seconds": "seconds", "tokens/s": "tokens_per_second",
        "KV pages": "kv_pages", "MiB": "kv_mib", "MiB unshared": "unshared_kv_mib", "MiB of a call": "call_mib",
    }  # fmt: skip
    table = Table(*columns, title=f"{prompts} prompts, {new_tokens} new tokens")
    for row in rows:
        table.add_row(*("" if row[key] is None else str(row[key]) for key in columns.values()))
    console.print(table)
    if json is not None:
        write_rows(json, rows)
    if not same:
        console.print("[red]texts differ[/red]")
        raise typer.Exit(1)
