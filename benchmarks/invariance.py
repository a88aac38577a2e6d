"""`python -m benchmarks invariance`: texts with `invariant=True`, and its price, on one GPU.

Texts of the shipped pair, plain and with several chains, alone and together, must be equal; the exit code says so. The price is
the time of a compiled round of a Llama-type model with random weights, with and without the flag, and that of a prompt. Most of
the time goes into compiling rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from spec_ops.cli.options import writable_file
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models.config import ModelConfig
from spec_ops.models.corpus import held_out_prompts
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.pretrained import load_pair
from spec_ops.models.target import CausalLM

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LLAMA = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, **HEADS}  # Llama-3.1-8B
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


def bench_invariance(
    device: Annotated[str, typer.Option(help="A CPU runs small sizes, to try the command.")] = "cuda",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts whose texts are compared.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Of the model that is timed.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is timed.")] = 8192,
    out: Annotated[Path | None, typer.Option(callback=writable_file, help="Write the results there, as JSON.")] = None,
) -> None:
    """Texts that must be equal in bfloat16, and what that costs."""
    place = torch.device(device)
    texts = compare_texts(place, prompts, new_tokens)
    report = {"device": _name(place), "torch": torch.__version__, "texts": texts, "price": price(place, layers, prompt)}
    text = json.dumps(report, indent=2)
    typer.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    if any(texts["different"].values()):
        raise typer.Exit(1)


def compare_texts(place: torch.device, count: int, new_tokens: int) -> dict[str, Any]:
    """How many of `count` texts differ from those of plain decoding, for each way to decode; and without the flag."""
    target, draft, tokenizer = load_pair(device=place, dtype=torch.bfloat16)
    given = held_out_prompts(tokenizer, count, 64)

    def texts(chain: int | None, batch: int, invariant: bool = True) -> list[list[int]]:
        more = () if chain is None else (draft, SpeculationConfig(chain))
        options = {"max_batch_size": batch, "max_seq_len": 64 + new_tokens, "compile": place.type == "cuda"}
        generator = Generator(target, *more, invariant=invariant, **options)
        return generator.generate(given, max_new_tokens=new_tokens).tokens

    def differing(first: list[list[int]], second: list[list[int]]) -> int:
        return sum(a != b for a, b in zip(first, second, strict=True))

    want = texts(None, 8)
    ways = {f"chain of {chain}, batch {batch}": (chain, batch) for chain, batch in ((1, 8), (3, 1), (6, 8))}
    different = {name: differing(texts(*way), want) for name, way in ways.items()}
    different["plain, batch 1"] = differing(texts(None, 1), want)
    return {"prompts": count, "different": different, "without": differing(texts(3, 8, False), texts(None, 8, False))}


def price(place: torch.device, layers: int, prompt: int) -> list[dict[str, Any]]:
    """Milliseconds of a round of 4 verified tokens, and of a prompt, without the flag and with it."""
    sizes, prompt = (LLAMA, prompt) if place.type == "cuda" else (SMALL, 16)
    with place:
        torch.set_default_dtype(torch.bfloat16)
        try:
            target = CausalLM(ModelConfig(num_layers=layers, aux_layers=(0, 0, 0), **sizes))
            draft = Eagle3Draft(ModelConfig(num_layers=1, **sizes), target, None)
        finally:
            torch.set_default_dtype(torch.float32)
    rows = []
    times = {}
    for invariant in (False, True):
        options = {"max_batch_size": 1, "max_seq_len": prompt + 64, "compile": place.type == "cuda"}
        generator = Generator(target, draft, SpeculationConfig(3), invariant=invariant, **options)
        words = [[7 * i % sizes["vocab_size"] for i in range(prompt)]]

        def run(new: int, generator: Generator = generator, words: list[list[int]] = words) -> tuple[float, float]:
            stats = generator.generate(words, max_new_tokens=new).stats
            return stats.decode_seconds, stats.rounds

        run(8)
        prefill = _seconds(lambda run=run: run(1), place, 3)
        long = [run(32) for _ in range(3)]
        times[invariant] = prefill, statistics.median(seconds / rounds for seconds, rounds in long)
        del generator
    for what, i in ((f"prompt of {prompt}", 0), (f"round, batch 1, context {prompt}", 1)):
        without, with_it = times[False][i] * 1e3, times[True][i] * 1e3
        rows.append({"what": what, "layers": layers, "ms": without, "invariant_ms": with_it, "ratio": with_it / without})
    return rows


def _seconds(function: Callable[[], Any], place: torch.device, times: int) -> float:
    found = []
    for _ in range(times):
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        start = time.perf_counter()
        function()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _name(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
