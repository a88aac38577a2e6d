"""One vLLM engine on a CPU, in this process; prints the tokens that it writes greedily, and which attention ran.

python -m tests.vllm.serve MODEL '{"speculative_config": {...}}'
"""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

PROMPTS = [[5, 17, 99, 3], list(range(20, 61)), [7] * 16, [int(x) for x in range(3, 120, 7)]]


def count_calls() -> collections.Counter:
    """Of our attention by steps, filled while an engine runs."""
    from spec_ops.integrations.vllm import backend, mla

    calls: collections.Counter = collections.Counter()
    attend, attend_mla = backend.attend, mla.attend_mla

    def counted(part: Any, *args: Any, **options: Any) -> None:
        calls[part.step] += 1
        attend(part, *args, **options)

    def counted_mla(q, cache, rank, tables, lens, q_len, **options: Any):
        calls["mla_draft_decode" if q_len == 1 else "mla_target_verify"] += 1
        return attend_mla(q, cache, rank, tables, lens, q_len, **options)

    backend.attend, mla.attend_mla = counted, counted_mla
    return calls


def main() -> None:
    model, options = sys.argv[1], json.loads(sys.argv[2])
    passes = options.pop("passes", None)
    from vllm import LLM, SamplingParams

    reports: list[Any] = []
    if passes is not None:
        from spec_ops.integrations.vllm import inductor_compile_config

        config = inductor_compile_config(**passes)
        config["post_grad_custom_pre_pass"].listener = reports.append
        options["compilation_config"] = options.get("compilation_config", {}) | {"inductor_compile_config": config}
    calls = count_calls()
    options = {"max_num_seqs": 8} | options
    engine = LLM(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=256, seed=0, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    made = [
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        for prompts in (PROMPTS, PROMPTS[:1])
    ]
    tokens = [list(out.outputs[0].token_ids) for outs in made for out in outs]
    matches: collections.Counter = collections.Counter()
    for report in reports:
        matches.update({result.name: result.matches for result in report.results})
    print("RESULT " + json.dumps({"tokens": tokens, "calls": calls, "graphs": len(reports), "matches": matches}), flush=True)


if __name__ == "__main__":
    main()
