"""Cases of `python -m benchmarks sampling`: the grid, and the inputs of a case in rotating buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spec_ops import ops

STEPS = 3  # drafts of a request in `verify` and `accept`; each has `STEPS + 1` rows of the target
ROTATE = 2  # buffer sets hold this many times the L2 cache together
MAX_SETS = 2048


@dataclass(frozen=True)
class Setting:
    """What is cut of a distribution; 0, 1 and 0 cut nothing."""

    name: str
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("nothing"),
        Setting("top-p", top_p=0.9),
        Setting("top-k-top-p", top_k=50, top_p=0.95),
        Setting("min-p", min_p=0.05),
    )
}
JOBS = {
    "draw": "a token a row from logits",
    "support": "the truncated distribution of each row: its threshold, or its probabilities",
    "verify": f"chains of {STEPS} drafts: the target's distributions, and acceptance",
    "accept": "acceptance alone, distributions given",
}
KINDS = ("peaked", "flat")
VOCABS = (32000, 128256, 201088)
ROWS = (1, 4, 8, 32, 128, 512)


@dataclass(frozen=True)
class Case:
    """One measurement: a job over `rows` rows of logits, `STEPS + 1` of them a request where drafts are verified."""

    job: str
    vocab: int
    rows: int
    setting: Setting
    logits: str
    dtype: str = "bfloat16"
    temperature: float = 1.0

    def __str__(self) -> str:
        return f"{self.job} {self.rows} x {self.vocab} {self.setting.name} {self.logits}"

    @property
    def drafts(self) -> bool:
        return self.job in ("verify", "accept")

    def read_bytes(self) -> int:
        """The least that must be read: the logits of all rows once; for acceptance the two rows of each request whose residual
        is drawn from. Thresholds, tokens and settings are not counted."""
        row, requests = self.vocab * getattr(torch, self.dtype).itemsize, self.rows // (STEPS + 1)
        return row * {"accept": 2 * requests, "verify": self.rows + requests}.get(self.job, self.rows)


def select(
    jobs: Sequence[str] | None,
    vocabs: Sequence[int] | None,
    rows: Sequence[int] | None,
    settings: Sequence[str] | None,
    kinds: Sequence[str] | None,
    dtype: str,
    temperature: float,
) -> list[Case]:
    """Every combination; jobs with drafts where the rows are whole requests.

    Raises:
        ValueError: naming the option: an unknown name, or nothing is left.
    """
    for option, given, known in (("--job", jobs, JOBS), ("--setting", settings, SETTINGS), ("--logits", kinds, KINDS)):
        if unknown := sorted(set(given or ()) - set(known)):
            raise ValueError(f"{option} must be one of {list(known)}, got {unknown}")
    grid = itertools.product(jobs or JOBS, vocabs or VOCABS, rows or ROWS, kinds or KINDS, settings or SETTINGS)
    cases = [Case(job, vocab, n, SETTINGS[name], kind, dtype, temperature) for job, vocab, n, kind, name in grid]
    whole = [case for case in dict.fromkeys(cases) if not case.drafts or case.rows % (STEPS + 1) == 0]
    if not whole:
        raise ValueError(f"--rows must hold a multiple of {STEPS + 1} for verify and accept, got {list(rows or ())}")
    return whole


def num_sets(case: Case, l2_bytes: int) -> int:
    """How many buffer sets to rotate among so that none is found in L2."""
    return min(max(1, math.ceil(ROTATE * l2_bytes / case.read_bytes())), MAX_SETS)


def random_logits(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """`"flat"`: normal, so that top-p keeps more than half of the vocabulary. `"peaked"`: probabilities fall with the power 1.5
    of a token's rank, as a language model's do."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if kind == "flat":
        return noise.to(dtype)
    rank = torch.rand(shape, generator=generator, device=generator.device).argsort(-1) + 1
    return (noise.mul_(0.5) - 1.5 * rank.log()).to(dtype)


class Problem:
    """Inputs of a case: `sets` sets of logits; settings, uniforms and drafts are shared.

    Attributes:
        logits: per set `[rows, V]`; of the target where drafts are verified, a request's rows after each other.
        uniforms: `[rows]`; with drafts, the coins of their acceptance.
        temperature, top_k, top_p, min_p: `[rows]`; None for what cuts nothing.
        draft_logits, draft_support: per set `[bs, STEPS, V]` and `[bs, STEPS, 3]`; candidates: per set `[bs, STEPS + 1]`;
            final_uniforms: `[bs]`. Empty without drafts.
    """

    def __init__(self, case: Case, device: torch.device, sets: int) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(case.vocab + case.rows)
        setting, rows = case.setting, case.rows

        def fill(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        def coins(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=device)

        dtype = getattr(torch, case.dtype)
        self.logits = [random_logits(case.logits, (rows, case.vocab), dtype, generator) for _ in range(sets)]
        self.uniforms = coins(rows)
        self.temperature = fill(case.temperature)
        self.top_k = fill(setting.top_k, torch.int32) if setting.top_k else None
        self.top_p = fill(setting.top_p) if setting.top_p < 1 else None
        self.min_p = fill(setting.min_p) if setting.min_p else None
        self.draft_logits: list[torch.Tensor] = []
        self.draft_support: list[torch.Tensor] = []
        self.candidates: list[torch.Tensor] = []
        if not case.drafts:
            return
        self.final_uniforms = coins(self.requests)
        for logits in self.logits:
            near = logits.view(self.requests, STEPS + 1, -1)[:, :-1]
            noise = torch.randn(near.shape, generator=generator, device=device)
            draft = (near + 0.5 * noise).to(dtype)  # agrees often enough that some drafts are accepted
            tokens, support = ops.sample_logits(draft, coins(self.requests, STEPS), *self.by_request())
            self.draft_logits.append(draft)
            self.draft_support.append(support)
            self.candidates.append(torch.nn.functional.pad(tokens, (1, 0)))

    @property
    def requests(self) -> int:
        return self.case.rows // (STEPS + 1)

    def by_request(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Temperature, top-k, top-p and min-p, one of each request's rows."""
        values = (self.temperature, self.top_k, self.top_p, self.min_p)
        return tuple(None if v is None else v[: self.requests] for v in values)  # type: ignore[return-value]

    def target_logits(self, index: int) -> torch.Tensor:
        """`[bs, STEPS + 1, V]`."""
        return self.logits[index].view(self.requests, STEPS + 1, -1)
