"""`python -m benchmarks lengths`: rounds of fixed chain lengths beside rounds whose length is chosen, by the wall clock.

Prompt lookup drafts for a model's shape. Weights are random but for two things: what layers add is small, and the LM head is
such that each token has one successor, so that a text repeats itself after as many tokens as asked. Where it does not, nothing
is found and the shortest chain is best; where it does, all is accepted and the longest is.

All ways run the same compiled rounds: a fixed length is the chooser's, made to choose it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.round.shapes import SHAPES
from benchmarks.rows import write_rows
from spec_ops.cli.options import Compile, Device, DType, console, parse_device, parse_dtype, writable_file
from spec_ops.decoding import Generator, PromptLookup, SpeculationConfig
from spec_ops.decoding.lengths import LengthChooser, Planned
from spec_ops.models import CausalLM
from spec_ops.models.paged import DEFAULT_PAGE_SIZE

CHOSEN = "chosen"
PROMPT = 64  # tokens
LENGTHS, PERIODS = (0, 3, 7), (100_000, 300, 24)


def quiet(target: CausalLM) -> None:
    """Make what layers add small beside a token's embedding, so that the LM head sees which token it is."""
    for name, weight in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_(1e-2)


def repeat_after(target: CausalLM, tokens: int) -> None:
    """Give token `t` the successor `t + 1`, and every last one of `tokens` the first one of them."""
    embed = target.embed.weight.data
    token = torch.arange(embed.shape[0], device=embed.device)
    before = torch.where(token % tokens == 0, token + tokens - 1, token - 1).clamp(max=embed.shape[0] - 1)
    target.lm_head.weight.data.copy_(embed[before])


@contextmanager
def always(length: int) -> Iterator[None]:
    """Choosers choose `length`."""
    original = LengthChooser.plan
    LengthChooser.plan = lambda self, requests: Planned(length, original(self, requests).hits)  # type: ignore[method-assign]
    try:
        yield
    finally:
        LengthChooser.plan = original  # type: ignore[method-assign]


def run(generator: Generator, length: int | None, new_tokens: int) -> tuple[float, int, list[int]]:
    """Seconds of a call with rounds of `length` (None: chosen), its rounds, and its tokens."""
    count = min(PROMPT, generator.target.config.vocab_size // 4)
    prompt = list(range(2 * count, 0, -2))  # backwards: no two of them follow each other in the text
    start = time.perf_counter()
    with nullcontext() if length is None else always(length):
        result = generator.generate([prompt], max_new_tokens=new_tokens)
    return time.perf_counter() - start, result.stats.rounds, result.tokens[0]


def measure(generator: Generator, lengths: list[int], period: int, new_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of a text that repeats itself after `period` tokens: of each length, and of the choice."""
    repeat_after(generator.target, period)  # type: ignore[arg-type]
    seconds: dict[int | None, list[float]] = {way: [] for way in [*lengths, None]}
    rounds, texts = {}, {}
    for _ in range(repeats):
        for way, taken in seconds.items():
            elapsed, rounds[way], texts[way] = run(generator, way, new_tokens)
            taken.append(elapsed)
    return [
        {
            "period": period,
            "length": CHOSEN if way is None else way,
            "ms_per_token": round(statistics.median(taken) / new_tokens * 1e3, 4),
            "ms_per_token_all": [round(one / new_tokens * 1e3, 4) for one in taken],
            "accept_length": round((new_tokens - 1) / rounds[way], 3),
            "same_text": texts[way] == texts[lengths[0]],
        }
        for way, taken in seconds.items()
    ]


def bench_lengths(
    model: Annotated[str, typer.Option(help=", ".join(SHAPES) + ".")] = "llama-8b",
    length: Annotated[list[int] | None, typer.Option(min=0, help=f"In order; may be repeated; default {LENGTHS}.")] = None,
    period: Annotated[
        list[int] | None,
        typer.Option(min=2, help=f"Tokens after which a text repeats itself; may be repeated; default {PERIODS}."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the target; default all.")] = None,
    new_tokens: Annotated[int, typer.Option(min=8, help="Of each text.")] = 600,
    repeats: Annotated[int, typer.Option(min=1, help="Of every way, in turn; the median counts.")] = 3,
    device: Device = None,
    dtype: DType = "bfloat16",
    compile: Compile = False,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Also write the rows, with machine, versions and commit.")
    ] = None,
) -> None:
    """Milliseconds a token with rounds of fixed chain lengths, and of lengths that are chosen, on texts that repeat
    themselves."""
    if model not in SHAPES:
        raise typer.BadParameter(f"must be one of {', '.join(SHAPES)}, got {model}", param_hint="--model")
    lengths, periods = length or list(LENGTHS), period or list(PERIODS)
    place, weights = parse_device(device), parse_dtype(dtype)
    target, _ = SHAPES[model].with_layers(layers).build(place, weights)
    quiet(target)
    generator = Generator(
        target, PromptLookup(), SpeculationConfig(lengths=lengths), max_batch_size=1, page_size=DEFAULT_PAGE_SIZE,
        max_seq_len=2 * PROMPT + new_tokens + 2 * lengths[-1] + DEFAULT_PAGE_SIZE, compile=compile,
    )  # fmt: skip
    for one in lengths:
        with console.status(f"first rounds of length {one}"):
            run(generator, one, 24)
    rows: list[dict[str, Any]] = []
    table = Table("repeats after", "length", "ms a token", "tokens a round", "over the best fixed one", "same text")
    for after in periods:
        with console.status(f"text that repeats itself after {after} tokens"):
            of_text = measure(generator, lengths, after, new_tokens, repeats)
        best = min(row["ms_per_token"] for row in of_text if row["length"] != CHOSEN)
        for row in of_text:
            rows.append({"model": model, "layers": layers, **row, "over_best_fixed": round(row["ms_per_token"] / best, 4)})
            cells = (after, row["length"], row["ms_per_token"], row["accept_length"], f"{row['ms_per_token'] / best:.3f}")
            table.add_row(*map(str, cells), str(row["same_text"]))
        if json is not None:
            write_rows(json, rows)
    console.print(table)
    if not all(row["same_text"] for row in rows):
        console.print("[yellow]texts differ: bfloat16 rounds another way in rounds of another length[/yellow]")
