"""What `invariant=True` costs: milliseconds of a prompt and of a round of a Llama-type model with random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.target import CausalLM

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
LLAMA = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, **HEADS}  # Llama-3.1-8B
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


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
