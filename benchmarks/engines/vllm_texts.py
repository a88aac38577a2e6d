"""One vLLM engine that serves requests: `python vllm_texts.py JSON_FILE`, a line of JSON with each one's tokens.

It runs in vLLM's environment and needs nothing of this repository. All requests are there at once, of different lengths, so
they join and leave the running batch one by one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

MARK = "ROW "
DRAFTS = "vllm:spec_decode_num_drafts"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its processes log to stdout
    import vllm

    start = time.perf_counter()
    engine = vllm.LLM(**job["engine"])
    ready = time.perf_counter()
    sampling = [
        vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in job["new_tokens"]
    ]
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    row = {
        "version": vllm.__version__, "start_s": round(ready - start, 1), "seconds": round(time.perf_counter() - ready, 2),
        "rounds": round(sum(metric.value for metric in engine.get_metrics() if metric.name == DRAFTS)),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }  # fmt: skip
    print(MARK + json.dumps(row), file=channel, flush=True)


if __name__ == "__main__":
    main()
