"""`examples/naive_round.py` over the weights, caches and state of a `Generator`, so that it can be timed beside our round.

Two things differ from the example. RoPE is plain PyTorch beside the append, as in a model that was not written for these ops;
and only chains are drafted.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from spec_ops.decoding import Generator
from spec_ops.models import PagedAttention
from spec_ops.models.drafts import Draft
from spec_ops.models.layers import rotary


def _example() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "naive_round.py"
    spec = importlib.util.spec_from_file_location("benchmarks.round.naive_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where Dynamo looks up the globals of what it traces
    spec.loader.exec_module(module)
    return module


example = _example()


class NaiveAttention(PagedAttention):
    """RoPE by itself, then the append."""

    def mha(self, layer, q, k, v, *, rope=None, **softmax):
        if rope is not None:
            q, k = rotary(q, rope), rotary(k, rope)
        return super().mha(layer, q, k, v, **softmax)


class NaiveRound(example.NaiveRound):  # type: ignore[misc, name-defined]
    """Greedy chains for drafts that pair features at `p` with token `p + 1` (EAGLE-3, MTP).

    Args:
        generator: made with a draft; its state for `batch_size` must hold the block tables that all rounds will use.
        batch_size: requests, one of the generator's buckets.
    """

    def __init__(self, generator: Generator, batch_size: int) -> None:
        nn.Module.__init__(self)  # the example's own would make caches and state
        draft, cache, config = generator.draft, generator.draft_cache, generator.config
        if not isinstance(draft, Draft) or cache is None or draft.token_offset != 0 or config.topk != 1:
            raise ValueError("NaiveRound: `generator` must draft chains with an EAGLE-3 or MTP draft")
        self.target, self.draft, self.steps, self.width = generator.target, draft, config.num_steps, 1
        self.num_tokens, self.page_size, self.backend = config.num_steps + 1, generator.page_size, generator.backend
        self.target_cache, self.draft_cache = generator.target_cache, cache
        state = generator.buckets.state(batch_size)
        self.committed, self.last_token, self.hidden = state.committed_lens, state.last_token, state.draft_hidden
        self.first_drafts, self.first_scores = state.draft_tokens, state.draft_scores
        tables = state.block_tables
        place = torch.arange(self.page_size, dtype=torch.int32, device=tables.device)
        tokens = (tables[:, :, None] * self.page_size + place).flatten(1)
        for name, buffer in (("req_to_token", tokens), ("requests", torch.arange(batch_size, device=tables.device))):
            torch._dynamo.mark_static_address(buffer)
            self.register_buffer(name, buffer, persistent=False)

    def paged_attention(self, *args, **options):
        options["backend"] = self.backend
        return NaiveAttention(*args, **options)

    @torch.no_grad()
    def forward(self) -> None:
        super().forward()
