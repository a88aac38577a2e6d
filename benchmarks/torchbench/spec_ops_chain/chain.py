"""Rounds of speculative decoding by the shipped pair that start from the same state at every call."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from spec_ops.decoding import Generator, SpeculationConfig, SpeculativeRound
from spec_ops.models.pretrained import load_pair

PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "    def test_empty(self):\n        self.assertEqual(",
)
NEVER = 2**30  # length at which a request would end


class ChainRounds(nn.Module):
    """`num_rounds` speculative rounds of one batch.

    A round advances the state and writes KV after the committed tokens; setting the state back rewinds it, since what lies
    after the committed tokens is written anew before it is read.

    Args:
        round: the round, with models, caches and state as submodules.
        num_rounds: its caches must have room for as many.
    """

    def __init__(self, round: SpeculativeRound, num_rounds: int) -> None:
        super().__init__()
        self.round, self.num_rounds = round, num_rounds

    def forward(self, **start: torch.Tensor) -> torch.Tensor:
        """Tokens `[bs, num_rounds, S + 3]` int64 as in `RoundState.output`, from the state `start` (its buffers by name)."""
        return self.run(self.round, start)

    def run(self, step: Callable[[], object], start: dict[str, torch.Tensor]) -> torch.Tensor:
        """The same by `step`: the round, or what a compiler made of it."""
        state = self.round.state
        for name, value in start.items():
            getattr(state, name).copy_(value)
        outputs = []
        for _ in range(self.num_rounds):
            step()
            outputs.append(state.output.clone())
            torch._dynamo.graph_break()  # a compiler of this function compiles one round, not `num_rounds` in a row
        return torch.stack(outputs, 1)


def build(
    batch_size: int, num_steps: int, num_rounds: int, *, device: str, dtype: torch.dtype
) -> tuple[ChainRounds, dict[str, torch.Tensor]]:
    """The rounds, and the state after the prompts to start them from.

    Raises:
        ValueError: naming the argument.
    """
    for name, value in (("batch_size", batch_size), ("num_rounds", num_rounds)):
        if value < 1:
            raise ValueError(f"spec_ops_chain: `{name}` must be at least 1, got {value}")
    target, draft, tokenizer = load_pair(device=device, dtype=dtype)
    prompts = [tokenizer.encode(text) for text in itertools.islice(itertools.cycle(PROMPTS), batch_size)]
    config = SpeculationConfig(num_steps)
    longest = max(map(len, prompts)) + 1 + num_rounds * config.path_len
    generator = Generator(target, draft, config, max_batch_size=batch_size, max_seq_len=longest)
    # The prefill alone: it emits one token and drafts the next. The limits are what rows get their pages for.
    limits = [longest - len(prompt) for prompt in prompts]
    generator.generate(prompts, max_new_tokens=limits, stop_when=lambda request, tokens, count: count)
    round = generator.round(batch_size)
    assert isinstance(round, SpeculativeRound)
    state = round.state
    state.finished.fill_(False)
    state.max_lens.fill_(NEVER)
    return ChainRounds(round, num_rounds), {name: buffer.clone() for name, buffer in state.named_buffers()}
