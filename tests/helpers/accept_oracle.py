"""Acceptance of one request as a plain walk over numbers of any exact type: what the ops must do, and why it is lossless.

`p[i]` and `q[i]` are the target's and the draft's distributions after node `i`, lists over the target's tokens. A row of zeros
is no distribution. Candidate 0 is the root, whose token nobody looks at; -1 stands for no draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tests.helpers.exact import invert_cdf

Row = Sequence[Fraction]
Path = tuple[list[int], list[int]]  # tokens, nodes


def drawn(weights: Row, uniform: Fraction) -> int:
    return invert_cdf(list(weights), uniform) if any(weights) else -1


def residual(p: Row, q: Row, scale: Fraction | int = 1) -> list[Fraction]:
    return [max(scale * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def target_only(candidates, p, uniforms, final_uniform, parents, path_len, single=Fraction(1), acc=Fraction(1)) -> Path:
    """SGLang's loop over siblings."""
    tokens, nodes, weights = [], [0], list(p[0])
    while len(nodes) < path_len:
        node, running = nodes[-1], Fraction(0)
        weights = list(p[node])
        for child in (n for n in range(1, len(parents)) if parents[n] == node and candidates[n] >= 0):
            chance = p[node][candidates[child]]
            running += chance
            if chance > 0 and (uniforms[node] < running / acc or chance >= single):
                nodes.append(child)
                tokens.append(candidates[child])
                weights = list(p[child])
                break
            weights[candidates[child]] = Fraction(0)
        else:
            break
    return [*tokens, drawn(weights if any(weights) else p[nodes[-1]], final_uniform)], nodes


def rejection(candidates, p, q, uniforms, final_uniform) -> Path:
    """arXiv:2211.17192. A draft whose row in `q` is no distribution counts as none."""
    tokens: list[int] = []
    for i, token in enumerate(candidates[1:]):
        if token < 0 or not any(q[i]):
            return [*tokens, drawn(p[i], final_uniform)], list(range(i + 1))
        if not (p[i][token] and uniforms[i] * q[i][token] < p[i][token]):
            left = residual(p[i], q[i])
            return [*tokens, drawn(left if any(left) else p[i], final_uniform)], list(range(i + 1))
        tokens.append(token)
    return [*tokens, drawn(p[-1], final_uniform)], list(range(len(candidates)))


def block_chances(drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row]) -> tuple[list[Fraction], list[Fraction]]:
    """Of Algorithm 2 of arXiv:2403.10444: the scales `p_0` to `p_n`, and the chances `h_1` to `h_n`, of `n` drafts."""
    scales, chances = [Fraction(1)], []
    for i, token in enumerate(drafts):
        scale = scales[-1] * p[i][token]
        scales.append(min(scale / q[i][token], Fraction(1)) if q[i][token] else Fraction(scale > 0))
        left = sum(residual(p[i + 1], q[i + 1], scales[-1])) if i + 1 < len(drafts) else None
        if left is None:
            chances.append(scales[-1])
        else:
            chances.append(left / (left + 1 - scales[-1]) if left else Fraction(0))
    return scales, chances


def block(candidates, p, q, uniforms, final_uniform) -> Path:
    """Block verification. A block ends before what is no draft, and before a draft after no distribution of the target."""
    drafts: list[int] = []
    for i, token in enumerate(candidates[1:]):
        if token < 0 or not any(q[i]) or not any(p[i]):
            break
        drafts.append(token)
    scales, chances = block_chances(drafts, p, q)
    kept = max((i for i in range(1, len(drafts) + 1) if uniforms[i - 1] < chances[i - 1]), default=0)
    left = residual(p[kept], q[kept], scales[kept]) if kept < len(drafts) else []
    return [*drafts[:kept], drawn(left if any(left) else p[kept], final_uniform)], list(range(kept + 1))
