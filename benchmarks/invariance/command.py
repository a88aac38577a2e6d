"""`python -m benchmarks invariance`: texts and logits that must be equal in bfloat16, how many are not without the flag, and
what it costs, on one GPU.

The shipped pair, and models of transformers with random weights in which many tokens are near ties, decode the same
prompts in many ways: plain, with chains and trees of every kind of draft, alone and beside others, in pieces. Plain decoding at
batch 32, whose rows are refilled, is what the others are compared with; plain decoding of single prompts is one of them. Small
batches take long, so they decode a share of the prompts (`--whole`: all).

Most of the time goes into compiling rounds: processes do that side by side, and share the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.invariance.models import MODELS
from benchmarks.invariance.price import price
from benchmarks.invariance.ways import (
    OTHERS,
    OTHERS_WITHOUT,
    PLAIN,
    WITHOUT,
    Decoded,
    Sizes,
    Way,
    close_models,
    compare,
    decode,
)
from benchmarks.rows import write_rows
from spec_ops.cli.options import console, writable_file


def bench_invariance(
    model: Annotated[list[str], typer.Option(help=f"{', '.join(MODELS)}; may be repeated.")] = list(MODELS),  # noqa: B006
    way: Annotated[list[str] | None, typer.Option(help="Only ways whose name contains this; may be repeated.")] = None,
    prompts: Annotated[int, typer.Option(min=1)] = 512,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Of the longest prompt.")] = 48,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of the longest text.")] = 256,
    whole: Annotated[bool, typer.Option("--whole", help="Small batches too decode every prompt.")] = False,
    without: Annotated[bool, typer.Option("--without/--no-without", help="Also decode without the flag.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile and decode side by side.")] = 8,
    total_seconds: Annotated[float | None, typer.Option(min=0, help="Begin no further way after so long.")] = None,
    texts: Annotated[bool, typer.Option("--texts/--no-texts")] = True,
    costs: Annotated[bool, typer.Option("--price/--no-price", help="Time a prompt and a round of a Llama-type model.")] = True,
    layers: Annotated[int, typer.Option(min=1, help="Of the model that is timed.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is timed.")] = 8192,
    device: Annotated[str, typer.Option(help="A CPU runs small sizes in this process, to try the command.")] = "cuda",
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Write the rows, with machine, versions and commit.")
    ] = None,
) -> None:
    """Texts and logits that must be equal in bfloat16, and what that costs. Exit code 1 if any differ, or a way fails."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"must be cuda or cpu, got {device!r}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available", param_hint="--device")
    if unknown := sorted(set(model) - set(MODELS)):
        raise typer.BadParameter(f"must be one of {list(MODELS)}, got {unknown}", param_hint="--model")
    sizes = Sizes(device, prompts, prompt_tokens, new_tokens)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []

    def keep(rows: list[dict[str, Any]], **more: Any) -> None:
        if json is not None:
            write_rows(json, rows, prompts=prompts, new_tokens=new_tokens, **more)

    if texts:
        plans = [(name, PLAIN, _named(OTHERS, way)) for name in model]
        plans += [(name, WITHOUT, _named(OTHERS_WITHOUT, way)) for name in model if without]
        if way and not any(others for *_, others in plans):
            known = [each.name for each in OTHERS]
            raise typer.BadParameter(f"must be part of one of {known}, got {way}", param_hint="--way")
        deadline = None if total_seconds is None else time.monotonic() + total_seconds
        executor: Executor = _Here()
        if device == "cuda":
            # Each process has Inductor compile on as many others as there are cores, unless it is told.
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
            executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
        try:
            with executor:
                rows, left_out = decode_all(executor, plans, sizes, whole, deadline, keep)
        finally:
            close_models()
    more: dict[str, Any] = {"left_out": left_out} if left_out else {}
    if costs:
        more["price"] = price(torch.device(device), layers, prompt)
        for cost in more["price"]:
            console.print(
                f"{cost['what']}: {cost['ms']:.2f} ms, with the flag {cost['invariant_ms']:.2f} ({cost['ratio']:.3f})"
            )
    keep(rows, **more)
    for name in left_out:
        console.print(f"[yellow]left out: {name}[/yellow]", soft_wrap=True)
    if any("error" in row or (row["invariant"] and (row["differ"] or row.get("logits_differ"))) for row in rows):
        console.print("[red]texts or logits differ[/red]")
        raise typer.Exit(1)


Plan = tuple[str, Way, tuple[Way, ...]]  # a model, the way that is compared with, and others


def _named(ways: tuple[Way, ...], parts: list[str] | None) -> tuple[Way, ...]:
    return tuple(way for way in ways if not parts or any(part in way.name for part in parts))


class _Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def decode_all(
    executor: Executor,
    plans: list[Plan],
    sizes: Sizes,
    whole: bool,
    deadline: float | None,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Decode in all ways; a line for each that ends.

    Args:
        plans: whose first ways are decoded first, by every model, since they last longest.
        deadline: of `time.monotonic`; what has not begun by then is left out.
        keep: is given the rows so far, each time there is one more.

    Returns:
        Rows of the report in the order of `plans`, and names of what was left out.
    """
    start = time.monotonic()
    found: dict[tuple[str, Way], dict[str, Any]] = {}
    futures: dict[Future[Decoded], tuple[str, Way]] = {}
    references: dict[tuple[str, bool], Decoded] = {}
    waiting = {(name, first.invariant): others for name, first, others in plans}
    every = [(name, way) for name, first, others in plans for way in (first, *others)]

    def begin(name: str, way: Way, reference: Decoded | None) -> None:
        futures[executor.submit(decode, name, way, sizes, reference, whole)] = name, way

    for name, first, _ in plans:
        begin(name, first, None)
    while futures:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, _ = wait(futures, timeout=left, return_when=FIRST_COMPLETED)
        if not done:
            futures = {future: key for future, key in futures.items() if not future.cancel()}
            deadline, waiting = None, {}
            continue
        for future in [future for future in futures if future in done]:
            name, way = futures.pop(future)
            try:
                got = future.result()
            except Exception as error:
                text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                found[name, way] = {"model": name, "way": way.name, "invariant": way.invariant, "error": text[:300]}
            else:
                reference = references.setdefault((name, way.invariant), got)
                found[name, way] = compare(name, way, got, reference)
                if got is reference:
                    for other in waiting.pop((name, way.invariant), ()):
                        begin(name, other, got)
            console.print(f"{time.monotonic() - start:5.0f} s  {_line(found[name, way])}", soft_wrap=True, highlight=False)
            keep([found[key] for key in every if key in found])
    names = [
        f"{name}, {way.name}{'' if way.invariant else ', without the flag'}" for name, way in every if (name, way) not in found
    ]
    return [found[key] for key in every if key in found], names


def _line(row: dict[str, Any]) -> str:
    what = f"{row['model']}, {row['way']}{'' if row['invariant'] else ', without the flag'}"
    if "error" in row:
        return f"{what}: {row['error']}"
    logits = f", logits of {row['logits_differ']} tokens" if "logits_differ" in row else ""
    return (
        f"{what}: {row['differ']} of {row['texts']} texts differ{logits} ({row['accept_length']} a round, {row['seconds']} s)"
    )
