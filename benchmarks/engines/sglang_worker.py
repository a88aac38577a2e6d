"""One SGLang engine whose rounds are timed: `python sglang_worker.py JSON_FILE`, a line of JSON for each case.

It runs in SGLang's environment and needs nothing of this repository. A round's time is the difference between the fastest long
call and the fastest short call, divided by the number of rounds that the long one has more. So prefill (in the engine's prefix
cache after the first call) and the beginning and end of a call cancel out. The differences of consecutive calls are written
too; their minimum would favour a short call that something held up.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

MARK = "ROW "
Call = tuple[float, int, dict[str, Any]]


def generate(engine: Any, prompts: list[list[int]], new_tokens: int) -> Call:
    """Seconds, rounds, and what the engine says of the first request."""
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    start = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.perf_counter() - start
    about = [output["meta_info"] for output in outputs]
    rounds = max(one.get("spec_verify_ct") or one["completion_tokens"] for one in about)
    return seconds, rounds, about[0]


def drawn_prompts(job: dict[str, Any], batch_size: int, context: int) -> list[list[int]]:
    """The same ones for every call with a case: the second finds them in the prefix cache."""
    drawn = random.Random(batch_size * 1_000_003 + context)
    return [[drawn.randrange(10, job["vocab_size"]) for _ in range(context)] for _ in range(batch_size)]


def measure(engine: Any, job: dict[str, Any], batch_size: int, context: int) -> dict[str, Any]:
    prompts = drawn_prompts(job, batch_size, context)
    engine.flush_cache()
    short, long = (1 + int(rounds * job["tokens_per_round"]) for rounds in job["rounds"])
    for _ in range(2):  # fills the prefix cache; then what the timed calls do is compiled
        generate(engine, prompts, short)
    calls = [(generate(engine, prompts, short), generate(engine, prompts, long)) for _ in range(job["repeats"])]
    fastest = [min(of_one_length, key=lambda call: call[0]) for of_one_length in zip(*calls, strict=True)]
    about = calls[-1][1][2]
    return {
        "bs": batch_size, "context": context, "ms_per_round": _ms_between(*fastest),
        "ms_per_round_all": [_ms_between(*pair) for pair in calls],
        "ms_of_a_call_per_round": [round(seconds / rounds * 1e3, 4) for _, (seconds, rounds, _) in calls],
        "cached_tokens": about.get("cached_tokens"), "accept_length": about.get("spec_accept_length"),
    }  # fmt: skip


def profile(engine: Any, job: dict[str, Any], batch_size: int, context: int) -> dict[str, Any]:
    """A case once more under torch's profiler: the rounds in the trace that the engine writes to `job["profile"]`."""
    prompts = drawn_prompts(job, batch_size, context)
    new_tokens = 1 + int(job["rounds"][1] * job["tokens_per_round"])
    generate(engine, prompts, new_tokens)
    engine.start_profile(output_dir=job["profile"], activities=["CPU", "GPU"], with_stack=False, record_shapes=False)
    _, rounds, _ = generate(engine, prompts, new_tokens)
    engine.stop_profile()
    return {"profiled": [batch_size, context], "rounds": rounds}


def _ms_between(short: Call, long: Call) -> float:
    """Milliseconds of each round by which the calls differ."""
    return round((long[0] - short[0]) / max(long[1] - short[1], 1) * 1e3, 4)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import sglang

    start = time.perf_counter()
    engine = sglang.Engine(**job["engine"])
    try:
        print(MARK + json.dumps({"version": sglang.__version__, "start_s": round(time.perf_counter() - start, 1)}), flush=True)
        for batch_size, context in job["cases"]:
            print(MARK + json.dumps(measure(engine, job, batch_size, context)), flush=True)
        if "profile" in job:
            print(MARK + json.dumps(profile(engine, job, *job["cases"][0])), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
