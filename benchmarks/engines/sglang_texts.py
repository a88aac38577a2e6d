"""One SGLang engine that serves requests: `python sglang_texts.py JSON_FILE`, a line of JSON with each one's tokens.

It runs in SGLang's environment and needs nothing of this repository. All requests are there at once, of different lengths, so
they join and leave the running batch one by one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

MARK = "ROW "


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import sglang

    engine = sglang.Engine(**job["engine"])
    sampling = [{"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for count in job["new_tokens"]]
    try:
        start = time.perf_counter()
        outputs = engine.generate(input_ids=job["prompts"], sampling_params=sampling)
        seconds = time.perf_counter() - start
    finally:
        engine.shutdown()
    rounds = sum(output["meta_info"].get("spec_verify_ct") or 0 for output in outputs)
    tokens = [output["output_ids"] for output in outputs]
    row = {"version": sglang.__version__, "seconds": round(seconds, 2), "rounds": rounds, "tokens": tokens}
    print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
