"""One SGLang engine on a CPU: prompts in, a line of JSON with its tokens out. `engines.py` starts it, a process each.

python -m tests.sglang.serve MODELS '{"attention_backend": "spec_ops", "page_size": 16}' [WORK.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[5, 17, 99, 3], list(range(20, 61)), [7] * 16, [int(x) for x in range(3, 120, 7)]]
# Requests of one call: token ids, and how many tokens each gets (one number for all). `alone`: how many follow, one by one.
WORK = {"prompts": PROMPTS, "new_tokens": 24, "alone": 1}
SIZES = {"max_total_tokens": 2048, "max_running_requests": 8, "disable_cuda_graph": True, "log_level": "warning"}


def main() -> None:
    models, options = sys.argv[1], json.loads(sys.argv[2])
    work: dict[str, Any] = WORK | (json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else {})
    import sglang

    engine = sglang.Engine(
        model_path=f"{models}/target", device="cpu", dtype="float32", skip_tokenizer_init=True,
        random_seed=0, grammar_backend="none", **SIZES | options,
    )  # fmt: skip
    prompts, counts = work["prompts"], work["new_tokens"]
    if isinstance(counts, int):
        counts = [counts] * len(prompts)
    sampling = [{"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for count in counts]
    try:
        together = engine.generate(input_ids=prompts, sampling_params=sampling)
        alone = [engine.generate(input_ids=prompts[i], sampling_params=sampling[i]) for i in range(work["alone"])]
    finally:
        engine.shutdown()
    rounds = [out["meta_info"].get("spec_verify_ct") for out in together]
    tokens = [out["output_ids"] for out in together + alone]
    print("RESULT " + json.dumps({"tokens": tokens, "rounds": rounds}), flush=True)


if __name__ == "__main__":
    main()
