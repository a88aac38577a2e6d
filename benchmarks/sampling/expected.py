"""Whether a result is right, by sorting each row in float64.

What a kernel returns is checked decision by decision against the float64 distribution: a threshold, a draw by its uniform, an
acceptance by its coin. Kernels that draw with a generator of their own are held to what can be drawn at all.
"""

from __future__ import annotations

import torch

from benchmarks.sampling.cases import STEPS, Problem, Setting

# float32 rounds (x - top) / T, up to 32 where a token weighs anything, and its exponential: 32 * 2**-24 and some.
EPS = 2.0**-18
# Others sum probabilities in float32, some of them in any order.
EPS_FLOAT32_SUMS = 2.0**-10
ONE = 2.0**44


class Rows:
    """float64 distributions of `logits [n, V]`, sorted from the likeliest, equal ones by token id."""

    def __init__(self, logits: torch.Tensor, temperature: float, setting: Setting) -> None:
        self.logits, self.setting = logits, setting
        self.values, self.order = logits.double().sort(dim=-1, descending=True, stable=True)
        best = self.values[:, :1]
        self.sorted_weights = torch.exp((self.values - best) / temperature)
        self.running = self.sorted_weights.cumsum(-1)
        self.weights = torch.exp((logits.double() - best) / temperature)
        places = torch.arange(logits.shape[1], device=logits.device).expand_as(self.order)
        self.rank = torch.empty_like(self.order).scatter_(1, self.order, places)

    def counts(self, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Fewest and most tokens `[n, 1]` that may be kept, where probabilities are right within a factor of `1 + eps`."""
        setting, vocab = self.setting, self.logits.shape[1]
        base = min(setting.top_k or vocab, vocab)
        found = []
        for factor in (1 - eps, 1 + eps):
            count = torch.full_like(self.order[:, :1], base)
            if setting.top_p < 1:
                wanted = setting.top_p * factor * self.running[:, base - 1 : base]
                count = ((self.running < wanted).sum(-1, keepdim=True) + 1).clamp(max=base)
            if setting.min_p > 0:
                heavy = (self.sorted_weights >= setting.min_p * (2 - factor)).sum(-1, keepdim=True)
                count = torch.minimum(count, heavy.clamp(min=1))
            found.append(count)
        return found[0], found[1]

    def mass(self, count: torch.Tensor) -> torch.Tensor:
        """Weight `[n, 1]` of the first `count [n, 1]` tokens."""
        return self.running.gather(1, count - 1)

    def probs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[n, V]`, and what they may be off by `[n, 1]` where rounding decides whether tokens at the boundary are kept."""
        low, high = self.counts(EPS)
        kept = torch.where(self.rank < high, self.weights, 0.0) / self.mass(high)
        return kept, 1 - self.mass(low) / self.mass(high)

    def holds(self, tokens: torch.Tensor) -> torch.Tensor:
        """Whether `tokens [n]`, all ids, can be drawn by one who sums in float32 and keeps all of equal tokens."""
        _, high = self.counts(EPS_FLOAT32_SUMS)
        return (self.logits.gather(1, tokens[:, None]) >= self.values.gather(1, high - 1))[:, 0]

    def wrong_support(self, support: torch.Tensor) -> str:
        """Why `support [n, 3]` is not right; "" if it is."""
        top, last, total = (support[:, i : i + 1] for i in range(3))
        if not torch.equal(top, self.order[:, :1]):
            return "another token is the likeliest"
        if not self.setting.cuts:
            if (last != -1).any():
                return "something is cut where nothing may be"
            count = torch.full_like(last, self.logits.shape[1])
        else:
            if not _are_ids(last, self.logits.shape[1]):
                return "the threshold is no token"
            count = self.rank.gather(1, last) + 1
            low, high = self.counts(EPS)
            if ((count < low) | (count > high)).any():
                return "another number of tokens is kept"
        exact = self.mass(count)
        return "" if ((total / ONE - exact).abs() <= EPS * exact).all() else "another sum of the weights"

    def wrong_tokens(self, tokens: torch.Tensor, uniforms: torch.Tensor | None) -> str:
        """Of draws `[n]`, by inverting the distribution in the order of token ids at `uniforms [n]`, if they are given."""
        if not _are_ids(tokens, self.logits.shape[1]):
            return "a draw is no token"
        tokens = tokens.long()
        if not self.holds(tokens).all():
            return "a token was drawn that is cut"
        if uniforms is None:
            return ""
        probs, slack = self.probs()
        return _wrong_draw(probs, slack + EPS, tokens, uniforms)

    def wrong_probs(self, probs: torch.Tensor, exact: bool) -> str:
        """Of probabilities `[n, V]`, by total variation; all of the tokens that are as likely as the last may be kept or not,
        unless `exact`."""
        mine, slack = self.probs()
        allowed = slack + EPS
        if not exact:
            low, high = self.counts(EPS_FLOAT32_SUMS)
            edge = self.values.gather(1, high - 1)
            tied = torch.where(self.values == edge, self.sorted_weights, 0.0).sum(-1, keepdim=True)
            allowed = EPS_FLOAT32_SUMS + 1 - self.mass(low) / self.mass(high) + tied / self.mass(low)
        off = (probs.double() - mine).abs().sum(-1, keepdim=True) / 2
        return "" if (off <= allowed).all() else f"total variation {float(off.max()):.1e}"


def _are_ids(tokens: torch.Tensor, vocab: int) -> bool:
    return bool(((tokens >= 0) & (tokens < vocab)).all())


def _wrong_draw(weights: torch.Tensor, slack: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor) -> str:
    """Whether `uniforms [n]` fall on `tokens [n]`; `weights [n, V]` are right within `slack [n, 1]` in their sum."""
    running, coin = weights.cumsum(-1), uniforms.double()[:, None]
    end = running.gather(1, tokens[:, None])
    start, level = end - weights.gather(1, tokens[:, None]), coin * running[:, -1:]
    fits = (start - slack <= level) & (level <= end + slack)
    return "" if fits.all() else "a uniform falls on another token"


class Expected:
    """What a case's first buffer set should give."""

    def __init__(self, problem: Problem) -> None:
        case = problem.case
        self.problem = problem
        self.rows = Rows(problem.logits[0], case.temperature, case.setting)
        if case.drafts:
            self.drafts = Rows(problem.draft_logits[0].flatten(0, 1), case.temperature, case.setting)

    def wrong(self, out: torch.Tensor, exact: bool, block: bool = False) -> str:
        """Why a kernel's result is not right; "" if it is.

        Args:
            out: tokens `[rows]`, supports `[rows, 3]`, probabilities `[rows, V]`, or accepted tokens `[bs, STEPS + 1]`, -1 past
                their number; a multiple of `rows` numbers in any shape.
            exact: it computes as these ops define, with the problem's uniforms. block: it verifies blocks.
        """
        if self.problem.case.drafts:
            return self._wrong_paths(out.view(self.problem.requests, STEPS + 1).long(), exact, block)
        if self.problem.case.job == "draw":
            return self.rows.wrong_tokens(out.flatten(), self.problem.uniforms if exact else None)
        if out.dtype == torch.int64:
            return self.rows.wrong_support(out.view(-1, 3))
        return self.rows.wrong_probs(out.view(self.problem.case.rows, -1), exact)

    def _wrong_paths(self, tokens: torch.Tensor, exact: bool, block: bool) -> str:
        problem, vocab = self.problem, self.problem.case.vocab
        drafted = problem.candidates[0][:, 1:]
        place = torch.arange(STEPS + 1, device=tokens.device)
        lens = (tokens >= 0).sum(1, keepdim=True)
        if (lens < 1).any() or not torch.equal(tokens >= 0, place < lens) or (tokens >= vocab).any():
            return "not a path of tokens"
        accepted = lens - 1  # drafts `[bs, 1]`
        if (place[:-1] < accepted)[tokens[:, :-1] != drafted].any():
            return "a token before the last is not the draft"
        final = tokens.gather(1, accepted)
        rows = (torch.arange(problem.requests, device=tokens.device)[:, None] * (STEPS + 1) + accepted)[:, 0]
        every = torch.zeros_like(problem.uniforms, dtype=torch.long).index_copy_(0, rows, final[:, 0])
        if not self.rows.holds(every)[rows].all():
            return "a token was drawn that is cut"
        return self._wrong_coins(accepted, final[:, 0], rows, block) if exact else ""

    def _wrong_coins(self, accepted: torch.Tensor, final: torch.Tensor, rows: torch.Tensor, block: bool) -> str:
        """Whether each acceptance follows from its coin, and the last token from its uniform."""
        problem, drafted = self.problem, self.problem.candidates[0][:, 1:]
        (p_rows, p_slack), (q_rows, q_slack) = self.rows.probs(), self.drafts.probs()
        p_all, q_all = p_rows.unflatten(0, (-1, STEPS + 1)), q_rows.unflatten(0, (-1, STEPS))
        slack = p_slack.view(-1, STEPS + 1).amax(1, keepdim=True) + q_slack.view(-1, STEPS).amax(1, keepdim=True) + 8 * EPS
        p, q = (x[:, :STEPS].gather(2, drafted[..., None])[..., 0] for x in (p_all, q_all))
        coins = problem.uniforms.view(-1, STEPS + 1)[:, :STEPS].double()
        place = torch.arange(STEPS, device=accepted.device)
        scale = torch.ones_like(accepted, dtype=torch.float64)
        if not block:
            taken, refused = place < accepted, place == accepted
            margin = slack * torch.maximum(p, q)
            wrong = taken & (coins * q > p + margin) | refused & (coins * q < p - margin)
        else:
            chances, margins, scales, carried = [], [], [scale], scale[:, 0]
            for step in range(STEPS):
                carried = (carried * p[:, step] / q[:, step]).clamp(max=1)
                chance, spread = carried, torch.ones_like(carried)
                if step + 1 < STEPS:
                    left = (carried[:, None] * p_all[:, step + 1] - q_all[:, step + 1]).clamp(min=0).sum(-1)
                    # A small residual beside a small deficit: their ratio is not known any better.
                    spread = (left + 1 - carried).clamp(min=EPS)
                    chance = left / spread
                scales.append(carried[:, None])
                chances.append(chance)
                margins.append(slack[:, 0] / spread)
            chance, margin, scale = torch.stack(chances, 1), torch.stack(margins, 1), torch.cat(scales, 1).gather(1, accepted)
            wrong = (place + 1 == accepted) & (coins > chance + margin) | (place >= accepted) & (coins < chance - margin)
        if wrong.any():
            return "a coin decides otherwise"
        last = accepted.clamp(max=STEPS - 1)[..., None].expand(-1, -1, q_all.shape[-1])
        before = q_all.gather(1, last)[:, 0]
        residual = (scale * p_rows[rows] - torch.where(accepted < STEPS, before, 0.0)).clamp(min=0)
        residual = torch.where(accepted < STEPS, residual, p_rows[rows])
        return _wrong_draw(residual, 2 * slack, final, problem.final_uniforms)
