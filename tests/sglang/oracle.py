"""What transformers writes in float32: SGLang's own backends for a CPU have neither MLA nor windows, sinks or caches of 8 bits.

python -m tests.sglang.oracle MODELS '[{}, {"sliding_window": 512}]'

prints texts for each of these changes; so a newer transformers is asked for models that the installed one does not have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.sglang.serve import PROMPTS


def written(
    folder: Path, cache: Callable[[], Any] | None = None, sinks: float | None = None, **changes: Any
) -> list[list[int]]:
    """Texts of a target, over a `cache` of its own, with other `sinks`, or with `changes` to its configuration."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, **changes)
    if sinks is not None:
        for name, weight in model.named_parameters():
            if name.endswith(".sinks"):
                weight.data.fill_(sinks)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}

    def text(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache and cache(), **options)
        return made[0, len(prompt) :].tolist()

    return [text(prompt) for prompt in PROMPTS]


def main() -> None:
    folder, changes = Path(sys.argv[1]), json.loads(sys.argv[2])
    print("RESULT " + json.dumps([written(folder, **each) for each in changes]), flush=True)


if __name__ == "__main__":
    main()
