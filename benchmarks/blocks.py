"""Accepted drafts by block verification and by token verification, expected at the very same rounds:

    python -m benchmarks.blocks --steps 3 --steps 7 --temperature 0.8 --json benchmarks/results/cpu-blocks.json

The shipped pair decodes held-out files. At each round the expected number of accepted drafts of either rule is computed from
both distributions, so that the difference is free of the chance of acceptance, which two runs would have.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.rows import write_rows
from spec_ops import ops
from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig, SpeculativeRound
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.pretrained import load_pair


def expected_by_tokens(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`[bs]`: expected number of accepted drafts, for their probabilities `p` and `q [bs, S]`."""
    return (p / q).clamp(max=1).cumprod(1).sum(1)


def expected_by_blocks(p: torch.Tensor, q: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """The same for block verification (arXiv:2403.10444), which needs the distributions `[bs, S, V]` too."""
    scale, chances = torch.ones_like(p[:, 0]), []
    for step in range(p.shape[1]):
        scale = (scale * p[:, step] / q[:, step]).clamp(max=1)
        if step + 1 < p.shape[1]:
            left = (scale[:, None] * target[:, step + 1] - draft[:, step + 1]).clamp(min=0).sum(-1)
            chances.append(torch.where(left > 0, left / (left + 1 - scale), 0.0))
        else:
            chances.append(scale)
    expected, none_later = torch.zeros_like(scale), torch.ones_like(scale)
    for step, chance in reversed(list(enumerate(chances))):
        expected = expected + none_later * chance * (step + 1)
        none_later = none_later * (1 - chance)
    return expected


def measure(steps: int, temperature: float, prompts: int, seed: int, max_new_tokens: int = 128) -> dict[str, Any]:
    target, draft, _ = load_pair(None, device=torch.device("cpu"), dtype=torch.float32)
    tokens = held_out_prompts(ByteTokenizer(), prompts, 256, None)
    seen: list[torch.Tensor] = []
    accept = SpeculativeRound._accept_sampled

    def judged(self: SpeculativeRound, drafted: Any, logits: torch.Tensor) -> ops.Accepted:
        state, ids = self.state, self.drafter.target_to_draft
        p, q = (ops.sampling_probs(x, state.temperature).double() for x in (logits[:, :-1], drafted.logits))
        if ids is not None:
            q = torch.where(ids >= 0, q[..., ids.clamp(min=0)], 0.0)
        own = [x.gather(2, drafted.candidates[:, 1:, None])[..., 0] for x in (p, q)]
        both = torch.stack([expected_by_tokens(*own), expected_by_blocks(*own, p, q)], 1)
        seen.append(both[~state.finished])
        return accept(self, drafted, logits)

    generator = Generator(target, draft, SpeculationConfig(steps), max_batch_size=8, max_seq_len=256 + max_new_tokens)
    with mock.patch.object(SpeculativeRound, "_accept_sampled", judged):
        stats = generator.generate(
            tokens, max_new_tokens=max_new_tokens, sampling=SamplingParams(temperature, seed=seed), progress=True
        ).stats
    both = torch.cat(seen)
    by_tokens, by_blocks = (1 + both.mean(0)).tolist()
    more = both[:, 1] - both[:, 0]
    return {
        "steps": steps,
        "temperature": temperature,
        "seed": seed,
        "prompts": prompts,
        "new_tokens": stats.new_tokens,
        "request_rounds": len(both),
        "accept_length": round(stats.accept_length, 3),
        "expected_by_tokens": round(by_tokens, 4),
        "expected_by_blocks": round(by_blocks, 4),
        "difference": round(float(more.mean()), 5),
        "standard_error": round(float(more.std()) / len(more) ** 0.5, 5),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, action="append", help="draft steps; default 3")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = [measure(steps, options.temperature, options.prompts, options.seed) for steps in options.steps or [3]]
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items()), sep="  ")
    if options.json is not None:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
