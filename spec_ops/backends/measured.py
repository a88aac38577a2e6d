"""Measured times of the backends, by which `select_backend` prefers one to another.

`measured.json` beside this file is made of the results of `python -m benchmarks kernels` by
`python -m benchmarks.kernels.ranking`, and names them. A call goes by the nearest kind of call that was measured on its
architecture; where none was, declared ranks decide. Batch sizes and lengths do not count: they are not known when a round is
compiled, and one graph serves all of them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spec_ops.backends.call import RAGGED, AttentionMeta

PATH = Path(__file__).with_name("measured.json")
TOLERANCE = 1.05  # of a time: what two runs of the same kernel differ by


@dataclass(frozen=True)
class Times:
    """Times of one kind of call, over those of the fastest backend in the same case.

    Attributes:
        arch: 90 for sm_90. kind: `"mha"` or `"mla"`. mask: `"causal"` or `"tree"`. kv_dtype: as in `"bfloat16"`.
        group: query heads per KV head. head_dim, q_len: as in the ops.
        cases: how many batch sizes and lengths were measured.
        mean, worst: by backend, over those cases: geometric mean and largest; 1 is the fastest.
    """

    arch: int
    kind: str
    mask: str
    kv_dtype: str
    group: int
    head_dim: int
    q_len: int
    cases: int
    mean: Mapping[str, float]
    worst: Mapping[str, float]

    def compare(self, name: str, chosen: str) -> str | None:
        """Why `name` is not taken though it can run the call; None if the two were not measured against each other."""
        if name not in self.mean or chosen not in self.mean:
            return None
        what = f"{self.kind} {self.mask}, {self.group} heads per KV head, head_dim {self.head_dim}, q_len {self.q_len}"
        text = f"takes {self.mean[name] / self.mean[chosen]:.2f} times as long as {chosen} ({self.cases} cases of {what})"
        if self.worst[chosen] > TOLERANCE:
            text += f", though {chosen} takes up to {self.worst[chosen]:.2f} times as long as the fastest in one of them"
        return text


@functools.cache
def table() -> tuple[Times, ...]:
    """The rows of `measured.json`."""
    return tuple(Times(**row) for row in json.loads(PATH.read_text())["rows"])


def nearest(meta: AttentionMeta, arch: int | None) -> Times | None:
    """The measured kind of call that is most like `meta`; None if nothing was measured for its architecture and attention."""
    kind = meta.step[:3]
    # Prefill is not measured.
    rows = [] if meta.step in RAGGED else [row for row in table() if (row.arch, row.kind) == (arch, kind)]
    mask, kv_dtype = "tree" if meta.tree_mask else "causal", str(meta.kv_dtype).removeprefix("torch.")
    group = meta.num_heads // meta.num_kv_heads

    def distance(row: Times) -> tuple:
        sizes = ((row.group, group), (row.head_dim, meta.head_dim), (row.q_len, meta.q_len))
        return row.mask != mask, row.kv_dtype != kv_dtype, sum(abs(math.log(a / b)) for a, b in sizes)

    return min(rows, key=distance, default=None)
