"""Model families of transformers run and give their own tokens, or are refused at construction; docs/models.md says which."""

from __future__ import annotations

import pytest
import transformers

from tests.helpers.model_families import FAMILIES, PAGE, page, try_family

# Tried each time: those that need something particular, and a share of the rest. All of them: --all-families.
PARTICULAR = [
    "biogpt",
    "ctrl",
    "diffllama",
    "gemma3",
    "gemma4_text",
    "gpt2",
    "gpt_bigcode",
    "mllama",
    "opt",
    "roberta",
    "whisper",
]
SHARE = 9


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-families")
        chosen = [f for i, f in enumerate(FAMILIES) if everything or f in PARTICULAR or i % SHARE == 0]
        metafunc.parametrize("family", chosen)


def documented() -> dict[str, str]:
    """The second column of the page by model type."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows[1:]}


def test_a_family_runs_or_is_refused_as_documented(family):
    """Wrong tokens, or anything raised after construction, fail here whatever the page says."""
    result = try_family(family)
    assert result.outcome != "wrong", result.reason
    if f"transformers {transformers.__version__}:" in PAGE.read_text():
        written = documented()[family]
        assert written.split(":")[0] == result.outcome, result.reason
        if result.outcome == "refused":  # why one could not be tried depends on what is installed
            assert written == f"refused: {result.reason}"


def test_the_page_lists_every_model_type():
    if f"transformers {transformers.__version__}:" not in PAGE.read_text():
        pytest.skip(f"docs/models.md speaks of another version than {transformers.__version__}")
    assert list(documented()) == list(FAMILIES)


def test_the_page_counts_its_rows():
    from tests.helpers.model_families import Result

    rows = {family: Result(*(said.split(": ", 1) if ": " in said else (said, ""))) for family, said in documented().items()}
    written = PAGE.read_text()
    if f"transformers {transformers.__version__}:" in written:
        assert page(rows) == written
