"""What an engine's profiler saw of each round: graphs, copies to the host, waits of the host."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cuEventSynchronize")


def per_round(trace: Path, rounds: int) -> dict[str, Any]:
    """Counts of a trace that torch's profiler wrote, over the rounds in it.

    Returns:
        `graphs`, `copies_to_host`, `bytes_to_host` and `host_waits` of a round.

    Raises:
        ValueError: the trace holds no work of a GPU.
    """
    with gzip.open(trace, "rt", encoding="utf-8", errors="replace") as file:
        events = json.load(file)["traceEvents"]
    counts: Counter[str] = Counter()
    kernels = 0
    for event in events:
        kind, name, about = event.get("cat"), event.get("name", ""), event.get("args", {})
        if kind == "kernel":
            kernels += 1
        elif kind == "gpu_memcpy" and "DtoH" in name:
            counts["copies_to_host"] += 1
            counts["bytes_to_host"] += about.get("bytes", 0)
        elif kind in ("cuda_runtime", "cuda_driver"):
            counts["graphs"] += name.startswith(_LAUNCHES)
            counts["host_waits"] += name in _WAITS
    if not kernels:
        raise ValueError(f"{trace}: expected kernels of a GPU, got none among {len(events)} events")
    names = ("graphs", "copies_to_host", "bytes_to_host", "host_waits")
    return {name: round(counts[name] / rounds, 2) for name in names}
