"""The sampling filters of transformers as steps: the classes of `transformers.generation.logits_process` that cut logits off.

`temperature`, `top_k`, `top_p` and `min_p` are usually those of the round (`SamplingParams`). They are here too because
`generate` applies `typical_p`, `epsilon_cutoff` and `eta_cutoff` to what they have left, and `top_h` before them: with one of
these, all filters of the call run here, in transformers' order.

Each computes what its class computes, ties and infinities included.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from spec_ops.integrations.transformers.steps import Rows, Step


class Temperature(Step):
    """`TemperatureLogitsWarper`."""

    temperature: torch.Tensor

    def __init__(self, temperature: float) -> None:
        super().__init__(temperature=float(temperature))

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        return scores / self.temperature


class TopK(Step):
    """`TopKLogitsWarper`: the `top_k` largest, with all that equal the least of them."""

    last: torch.Tensor

    def __init__(self, top_k: int, vocab_size: int) -> None:
        super().__init__(last=min(top_k, vocab_size) - 1)

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        least = scores.sort(-1, descending=True).values.index_select(-1, self.last[None])
        return scores.masked_fill(scores < least, -torch.inf)


class TopP(Step):
    """`TopPLogitsWarper`: all but the least likely, whose probabilities sum up to at most `1 - top_p`."""

    tail: torch.Tensor

    def __init__(self, top_p: float) -> None:
        super().__init__(tail=1 - float(top_p))

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        ascending, order = scores.sort(-1)
        cut = ascending.softmax(-1).cumsum(-1) <= self.tail
        cut = torch.cat([cut[:, :-1], torch.zeros_like(cut[:, -1:])], 1)  # the most likely token stays
        return scores.masked_fill(torch.empty_like(cut).scatter(1, order, cut), -torch.inf)


class MinP(Step):
    """`MinPLogitsWarper`: tokens at least `min_p` times as likely as the most likely one."""

    min_p: torch.Tensor

    def __init__(self, min_p: float) -> None:
        super().__init__(min_p=float(min_p))

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        probs = scores.softmax(-1)
        return scores.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)


class TopH(Step):
    """`TopHLogitsWarper`: the most likely tokens, until their terms of the entropy of the `count` most likely sum up to
    `top_h` of it (Potraghloo et al., arXiv:2509.02510)."""

    top_h: torch.Tensor

    def __init__(self, top_h: float, vocab_size: int, count: int = 100) -> None:
        super().__init__(top_h=float(top_h))
        self.count = min(count, vocab_size)

    @property
    def key(self) -> Hashable:
        return super().key, self.count

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        top = scores.topk(self.count, -1)
        probs = _log_probs(top.values).softmax(-1)
        terms = -probs * probs.log()  # NaN where the probability is 0: neither it nor what follows stays
        keep = terms.cumsum(-1) <= self.top_h * _entropy(top.values)
        keep = torch.cat([torch.ones_like(keep[:, :1]), keep[:, 1:]], 1)
        cut = torch.ones_like(scores, dtype=torch.bool).scatter(1, top.indices, ~keep)
        return scores.masked_fill(cut, -torch.inf)


class Typical(Step):
    """`TypicalLogitsWarper`: the tokens whose information is nearest to the entropy, until their probability reaches `mass`
    (Meister et al., arXiv:2202.00666)."""

    mass: torch.Tensor

    def __init__(self, mass: float) -> None:
        super().__init__(mass=float(mass))

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        information = -scores.log_softmax(-1)
        entropy = (information * (-information).exp()).nansum(-1, keepdim=True)
        distance = (information - entropy).abs()
        ascending, order = distance.sort(-1)
        below = (scores.gather(-1, order).softmax(-1).cumsum(-1) < self.mass).sum(-1, keepdim=True)
        furthest = ascending.gather(-1, below.clamp(max=scores.shape[-1] - 1))
        return scores.masked_fill(distance > furthest, -torch.inf)


class Epsilon(Step):
    """`EpsilonLogitsWarper`: tokens of at least this probability, and the most likely one (Hewitt et al., arXiv:2210.15191)."""

    epsilon: torch.Tensor

    def __init__(self, epsilon: float) -> None:
        super().__init__(epsilon=float(epsilon))

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        return _cut_unlikely(scores, self.epsilon)


class Eta(Step):
    """`EtaLogitsWarper`: as `Epsilon`, with a smaller threshold where the entropy is large."""

    epsilon: torch.Tensor

    def __init__(self, epsilon: float) -> None:
        super().__init__(epsilon=float(epsilon))

    def forward(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        eta = torch.minimum(self.epsilon, self.epsilon.sqrt() * torch.exp(-_entropy(scores)))
        return _cut_unlikely(scores, eta)


def _cut_unlikely(scores: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    unlikely = (scores.softmax(-1) < least) & (scores < scores.amax(-1, keepdim=True))
    return scores.masked_fill(unlikely, -torch.inf)


def _log_probs(scores: torch.Tensor) -> torch.Tensor:
    return scores - scores.logsumexp(-1, keepdim=True)


def _entropy(scores: torch.Tensor) -> torch.Tensor:
    """`[rows, 1]`, summed as `torch.distributions.Categorical` sums it."""
    log_probs = _log_probs(scores)
    return -(log_probs.clamp(min=torch.finfo(scores.dtype).min) * log_probs.softmax(-1)).sum(-1, keepdim=True)
