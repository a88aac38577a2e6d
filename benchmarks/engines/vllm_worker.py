"""One vLLM engine whose rounds are timed: `python vllm_worker.py JSON_FILE`, a line of JSON for each case.

It runs in vLLM's environment and needs nothing of this repository. A round's time is found as in `sglang_worker.py`: from the
fastest long and the fastest short call, so that prefill, and what a call does once, cancel out. How many rounds a call took is
read off vLLM's counter of drafts: with random weights no draft need be accepted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

MARK = "ROW "
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
Call = tuple[float, float]  # seconds, rounds


def counted(engine: Any, name: str) -> float:
    """Over the engine's life; 0 if it has no such counter."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == name)


def generate(engine: Any, prompts: list[list[int]], new_tokens: int, drafts: bool) -> Call:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    before = counted(engine, DRAFTS) if drafts else 0.0
    start = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    if drafts:
        return seconds, (counted(engine, DRAFTS) - before) / len(prompts)
    return seconds, float(max(len(output.outputs[0].token_ids) for output in outputs) - 1)


def measure(engine: Any, job: dict[str, Any], batch_size: int, context: int) -> dict[str, Any]:
    drawn = random.Random(batch_size * 1_000_003 + context)
    prompts = [[drawn.randrange(10, job["vocab_size"]) for _ in range(context)] for _ in range(batch_size)]
    drafts, (short, long) = job["drafts"], (1 + rounds for rounds in job["rounds"])
    engine.reset_prefix_cache()
    for _ in range(2):  # fills the prefix cache; then what the timed calls do is compiled
        generate(engine, prompts, short, drafts)
    before = counted(engine, ACCEPTED), counted(engine, DRAFTS)
    calls = [(generate(engine, prompts, short, drafts), generate(engine, prompts, long, drafts)) for _ in range(job["repeats"])]
    accepted, drafted = (counted(engine, name) - was for name, was in zip((ACCEPTED, DRAFTS), before, strict=True))
    # Where drafts are accepted, calls of one length may take unequal numbers of rounds: each brings its own count.
    fastest = [min(of_one_length) for of_one_length in zip(*calls, strict=True)]
    return {
        "bs": batch_size, "context": context, "ms_per_round": _ms_between(*fastest),
        "ms_per_round_all": [_ms_between(*pair) for pair in calls],
        "ms_of_a_call_per_round": [round(seconds / max(rounds, 1) * 1e3, 4) for _, (seconds, rounds) in calls],
        "accept_length": round(1 + accepted / drafted, 3) if drafted else None,
    }  # fmt: skip


def _ms_between(short: Call, long: Call) -> float:
    """Milliseconds of each round by which the calls differ."""
    return round((long[0] - short[0]) / max(long[1] - short[1], 1) * 1e3, 4)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its processes log to stdout

    def tell(row: dict[str, Any]) -> None:
        print(MARK + json.dumps(row), file=channel, flush=True)

    import vllm

    start = time.perf_counter()
    engine = vllm.LLM(**job["engine"])
    tell({"version": vllm.__version__, "start_s": round(time.perf_counter() - start, 1)})
    for batch_size, context in job["cases"]:
        tell(measure(engine, job, batch_size, context))


if __name__ == "__main__":
    main()
