"""Reference sampling from logits: sort every row, sum its weights as integers.

An integer sum does not depend on the order of its terms: a kernel that shares a row among many programs gets these very sums.
"""

from __future__ import annotations

import torch

from spec_ops.ops._pieces import in_pieces

ONE = 1 << 44  # weight of the most likely token
UNIFORM_BITS = 24
ALL_MASKED = -2  # `last` of a support of a row whose largest logit is -inf


def _as_rows(logits: torch.Tensor) -> torch.Tensor:
    return (logits if logits.dim() == 3 else logits[:, None]).float().contiguous()


def _relative(logits, top, temperature) -> torch.Tensor:
    """Probabilities of `logits [..., n]` over that of the largest one, `top [..., 1]`; float32."""
    # Shifted before the division: a tiny temperature must not overflow to inf - inf.
    ratio = in_pieces(torch.exp, (logits - top) / torch.where(temperature > 0, temperature, 1.0))
    return torch.where(logits == -torch.inf, 0.0, ratio)  # NaN at an infinite temperature


def _weights(logits, top, temperature) -> torch.Tensor:
    return (_relative(logits, top, temperature).nan_to_num(0.0) * ONE).to(torch.int64)  # NaN: no distribution


def _is_kept(chosen, ids, logits, support) -> torch.Tensor:
    """Whether the support of the rows `logits [..., V]` keeps the tokens `ids`, whose logits are `chosen`."""
    last = support[..., 1:2]
    bound = logits.gather(-1, last.clamp(min=0)).float()
    return (last < 0) | (chosen > bound) | ((chosen == bound) & (ids <= last))


def kept_weights(logits, support, temperature, ids=None) -> torch.Tensor:
    """int64 weights of all tokens of the rows `logits [..., V]`, or of `ids [..., n]` (0 for a negative id).

    `temperature` broadcasts to `logits`.
    """
    chosen = (logits if ids is None else logits.gather(-1, ids.clamp(min=0))).float()
    ids = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
    weights = _weights(chosen, logits.gather(-1, support[..., :1]).float(), temperature)
    return torch.where(_is_kept(chosen, ids, logits, support) & (ids >= 0) & (support[..., 2:] > 0), weights, 0)


def draw(weights, uniforms) -> torch.Tensor:
    """The first token whose running weight exceeds `floor(u * total)`, exactly; -1 where the total is 0."""
    running = weights.cumsum(-1)
    total = running[..., -1]
    coin = (uniforms * 2**UNIFORM_BITS).to(torch.int64).clamp(0, 2**UNIFORM_BITS - 1)
    # The product may have 88 bits.
    low = (total & (2**UNIFORM_BITS - 1)) * coin
    level = (total >> UNIFORM_BITS) * coin + (low >> UNIFORM_BITS)
    return torch.where(total > 0, (running <= level[..., None]).sum(-1), -1)


def sampling_support(logits, temperature, top_k, top_p, min_p):
    rows = _as_rows(logits)
    vocab, temperature = rows.shape[-1], temperature[:, None, None]
    top = rows.argmax(-1, keepdim=True)  # the first NaN if there is one
    best = rows.gather(-1, top)
    weights = _weights(rows, best, temperature)
    if top_k is None and top_p is None and min_p is None:
        last, total = torch.full_like(top, -1), weights.sum(-1, keepdim=True)
    else:
        order = rows.sort(dim=-1, descending=True, stable=True).indices
        ordered = weights.gather(-1, order)
        running = ordered.cumsum(-1)
        count, cut = torch.full_like(top, vocab), torch.zeros_like(top, dtype=torch.bool)
        if top_k is not None:
            k = top_k.long()[:, None, None]
            applies = (k >= 1) & (k < vocab)
            count, cut = torch.where(applies, k, count), cut | applies
        if top_p is not None:
            p = top_p.double()[:, None, None]
            wanted = (p * running.gather(-1, count - 1)).ceil().clamp(min=1)
            needed = (running < wanted.to(torch.int64)).sum(-1, keepdim=True) + 1
            count, cut = torch.where(p < 1, torch.minimum(count, needed), count), cut | (p < 1)
        if min_p is not None:
            least = min_p.double()[:, None, None]
            heavy = (ordered >= (least.clamp(max=2) * ONE).ceil().to(torch.int64)).sum(-1, keepdim=True)
            count = torch.where(least > 0, torch.minimum(count, heavy.clamp(min=1)), count)
            cut = cut | (least > 0)
        last, total = torch.where(cut, order.gather(-1, count - 1), -1), running.gather(-1, count - 1)
    last = torch.where(temperature > 0, last, top)
    total = torch.where(temperature > 0, total, ONE)
    real = best.isfinite()
    none = torch.where(best == -torch.inf, ALL_MASKED, -1)
    parts = (torch.where(real, top, 0), torch.where(real, last, none), torch.where(real, total, 0))
    return torch.cat(parts, -1).reshape(*logits.shape[:-1], 3)


def sample_logits(logits, uniforms, temperature, top_k, top_p, min_p):
    support = sampling_support(logits, temperature, top_k, top_p, min_p)
    rows = _as_rows(logits)
    weights = kept_weights(rows, support.reshape(*rows.shape[:-1], 3), temperature[:, None, None])
    return draw(weights, uniforms.reshape(rows.shape[:-1])).reshape(logits.shape[:-1]), support


def sampling_probs(logits, temperature, top_k, top_p, min_p):
    support = sampling_support(logits, temperature, top_k, top_p, min_p)
    rows, hot = _as_rows(logits), temperature[:, None, None]
    top, ids = rows.argmax(-1, keepdim=True), torch.arange(logits.shape[-1], device=logits.device)
    kept = _is_kept(rows, ids, rows, support.reshape(*rows.shape[:-1], 3))
    # Not the truncated weights: a token far down the tail has a probability too.
    weights = torch.where(kept, _relative(rows, rows.gather(-1, top), hot), 0.0)
    probs = (weights / weights.sum(-1, keepdim=True, dtype=torch.float64)).float()
    greedy = torch.zeros_like(rows).scatter_(-1, top, 1.0)
    return torch.where(hot > 0, probs, greedy).reshape(logits.shape)


def sample_tokens(probs, uniforms):
    vocab = probs.shape[-1]
    cumulative = probs.double().cumsum(-1)
    index = (cumulative <= uniforms.double()[..., None] * cumulative[..., -1:]).sum(-1)
    # Rounding may leave the target at the very end; the last token that can be drawn is the last positive one.
    ids = torch.arange(vocab, device=probs.device)
    token = torch.minimum(index, torch.where(probs > 0, ids, 0).amax(-1))
    total = cumulative[..., -1]
    return torch.where((total > 0) & (total < torch.inf), token, -1)
