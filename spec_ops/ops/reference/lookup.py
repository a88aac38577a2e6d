"""Reference prompt lookup: every place of a text at once, one token of the n-gram after the other."""

from __future__ import annotations

import torch


def lookup_drafts(tokens, lens, num_steps: int, max_ngram: int, min_ngram: int):
    bs, width = tokens.shape
    if tokens.device.type == "cpu" and bool(((lens < 0) | (lens > width)).any()):
        raise ValueError(f"lookup_drafts: `lens` must be in [0, {width}], got {lens.tolist()}")
    if width == 0:
        return tokens.new_full((bs, num_steps), -1, dtype=torch.int64)
    last = lens.long()[:, None] - 1
    place = torch.arange(width, device=tokens.device)
    same = (place < last).expand(bs, -1)  # the last tokens themselves are no earlier place
    length = torch.zeros(bs, width, dtype=torch.int64, device=tokens.device)
    for back in range(min(max_ngram, width)):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        same = same & (place >= back) & (tokens.roll(back, 1) == wanted)
        length = length + same
    best = (length * width + place).amax(1, keepdim=True)  # the longest, then the last
    start = best % width + 1
    period = (last + 1 - start).clamp(min=1)
    step = torch.arange(num_steps, device=tokens.device)
    drafts = tokens.gather(1, (start + step % period).clamp(max=width - 1))
    return torch.where(best // width >= min_ngram, drafts, -1).long()
