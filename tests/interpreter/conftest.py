"""These tests run Triton's interpreter, which is chosen when kernels are decorated: a process of its own, started with
`TRITON_INTERPRET=1 python -m pytest tests/interpreter` (`make test` does). Elsewhere they skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="needs Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/interpreter")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
