"""A rank that ends in the middle of a generation, see `test_failures.py`."""

from __future__ import annotations

import os
import time
from typing import Any

from spec_ops.decoding import generate
from spec_ops.parallel import RankError, TensorParallel, shard
from tests.parallel.models import make_target


def case_death(ranks: TensorParallel) -> dict[str, Any]:
    started: list[float] = []

    def on_tokens(_request: int, _tokens: list[int]) -> None:
        started.append(time.monotonic())
        if ranks.rank == 1 and len(started) == 5:
            os._exit(3)

    try:
        generate(shard(make_target("gqa"), ranks), None, [[1, 2]], max_new_tokens=200, on_tokens=on_tokens)
    except RankError as error:
        return {"error": str(error), "seconds": time.monotonic() - started[4]}
    return {"error": "nothing was raised"}
