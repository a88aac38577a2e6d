"""One SGLang engine on a CPU: prompts in, a line of JSON with its tokens out. `test_sglang.py` starts it, a process each.

python -m tests.sglang.serve MODELS '{"attention_backend": "spec_ops", "page_size": 16}'
"""

from __future__ import annotations

import json
import sys

PROMPTS = [[5, 17, 99, 3], list(range(20, 61)), [7] * 16, [int(x) for x in range(3, 120, 7)]]


def main() -> None:
    models, options = sys.argv[1], json.loads(sys.argv[2])
    import sglang

    engine = sglang.Engine(
        model_path=f"{models}/target", device="cpu", dtype="float32", skip_tokenizer_init=True, disable_cuda_graph=True,
        max_total_tokens=2048, max_running_requests=8, random_seed=0, log_level="warning", grammar_backend="none", **options,
    )  # fmt: skip
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    try:
        together = engine.generate(input_ids=PROMPTS, sampling_params=sampling)
        alone = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in PROMPTS[:1]]
        tokens = [out["output_ids"] for out in together + alone]
        meta = [out["meta_info"] for out in together]
    finally:
        engine.shutdown()
    lengths = [m.get("spec_accept_length", m.get("accept_length")) for m in meta]
    print("RESULT " + json.dumps({"tokens": tokens, "accept_lengths": lengths}), flush=True)


if __name__ == "__main__":
    main()
