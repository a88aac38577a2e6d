"""Chi-square of what a sampled acceptance emits: models whose every probability is known, and p-values of their sequences.

A model is a table of conditionals per prefix, so that every token depends on those before it.
"""

from __future__ import annotations

import numpy as np
import scipy.stats
import torch

from tests.helpers.exact import filtered_probs

DRAWS = 100_000
PASS, FAIL = 1e-3, 1e-6
DEPTH = 3  # tokens looked at: two drafts and the one after them


class Model:
    """`logits[d]`: `[V] * d + [V]`, of the token after each prefix of `d` tokens; `probs` likewise, float64."""

    def __init__(self, seed: int, vocab: int, scale: float, **sampling) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.logits = [scale * torch.randn([vocab] * (d + 1), generator=generator) for d in range(DEPTH)]
        self.probs = []
        for table in self.logits:
            rows = [filtered_probs(row, **({"temperature": 1.0} | sampling))[0] for row in table.reshape(-1, vocab).tolist()]
            self.probs.append(torch.from_numpy(np.array(rows)).reshape(table.shape))

    def after(self, tables, prefix: torch.Tensor) -> torch.Tensor:
        """Rows of `tables` (`self.logits` or `self.probs`) for prefixes `[n, d]`: `[n, V]`."""
        d = prefix.shape[1]
        return tables[d][tuple(prefix.unbind(1))].expand(prefix.shape[0], self.vocab)

    def joint(self, depth: int) -> np.ndarray:
        """Probability of every sequence of `depth` tokens, flat."""
        out = self.probs[0]
        for d in range(1, depth):
            out = out[..., None] * self.probs[d]
        return out.flatten().numpy()


def p_values(model: Model, tokens: torch.Tensor, lens: torch.Tensor, seed: int) -> list[float]:
    """Of the joint of the first 1, 2, 3 emitted tokens.

    A request that emitted fewer goes on with tokens drawn from the target itself, by torch.multinomial rather than by the op
    under test: had the op's own tokens the target's distribution, the completed sequence has it exactly.
    """
    tokens, lens = tokens.cpu()[:, :DEPTH].clone(), lens.cpu()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens.shape[1], DEPTH):
        tokens = torch.cat([tokens, tokens.new_full((len(tokens), 1), -1)], 1)
    for d in range(1, DEPTH):
        short = lens <= d
        drawn = torch.multinomial(model.after(model.probs, tokens[short, :d]), 1, generator=generator)
        tokens[short, d] = drawn[:, 0]
    out = []
    for depth in range(1, DEPTH + 1):
        code = tokens[:, 0]
        for d in range(1, depth):
            code = code * model.vocab + tokens[:, d]
        expected = model.joint(depth)
        counts = np.bincount(code.numpy(), minlength=len(expected))
        possible = expected > 0
        if counts[~possible].any():  # a token that the target cannot emit
            out.append(0.0)
            continue
        expected = len(code) * expected[possible] / expected[possible].sum()
        assert expected.min() >= 5, "too rare for chi-square"
        out.append(float(scipy.stats.chisquare(counts[possible], expected).pvalue))
    return out
