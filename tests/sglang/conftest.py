"""What tests of several files share: small models, and what SGLang's own backend writes with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.engines import WARM, serve


def llama(folder: Path, ids: int) -> Path:
    """A Llama and its EAGLE heads, which it accepts at times, since `ids` tokens are likely."""
    from tests.helpers.engine_checkpoints import write_draft, write_first_draft, write_target

    write_target(folder / "target", ids=ids)
    write_draft(folder / "draft", ids=ids)
    write_first_draft(folder / "first_draft")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _end_of_warm() -> Iterator[None]:
    yield
    for process in WARM.values():
        process.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    return llama(tmp_path_factory.mktemp("models"), ids=12)


@pytest.fixture(scope="session")
def plain(models) -> list[list[int]]:
    """What SGLang's own backend writes."""
    return serve(models, attention_backend="torch_native", page_size=1)["tokens"]
