"""Prose and comments are for a reader who never saw a run: no commit ids, and none of the phrases that crept in before."""

from __future__ import annotations

import re

import pytest

from tests.helpers.paths import ROOT

# A record of runs, which names commits: tables of figures and where they come from, the notebook.
RECORDS = [ROOT / "docs" / "performance", ROOT / "docs" / "notebook"]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
SOURCES = [path for folder in ("spec_ops", "examples") for path in (ROOT / folder).rglob("*.py")]
COMMIT = re.compile(r"(?<![.\w])(?!\d+e\d+\b)(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,10}\b")
# Literal translations and what to write instead.
PHRASES = {
    r"\bshall\b": "will, must, or is to",
    r"(?:^|[.:;] )That of\b": "name the thing again",
    r"\bof the (?:tree|commit) of\b": "name the commit in a table",
    r"\b(?:thereof|whereof|herewith|therewith)\b": "of it, with it",
    r"\bin silence\b": "silently",
    r"\bwalked by itself\b": "computed separately",
    r"\bhand(?:s|ed)? it on\b": "pass it on",
    r"\bstands? in the sources\b": "is in the sources",
}


def test_no_commit_ids_outside_of_records():
    found = []
    for path in [*DOCUMENTS, *SOURCES]:
        if not any(record in path.parents for record in RECORDS):
            found += [f"{path.relative_to(ROOT)}: {commit}" for commit in COMMIT.findall(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("phrase", PHRASES)
def test_prose_is_idiomatic(phrase):
    found = []
    for path in [*DOCUMENTS, *SOURCES]:
        for line in re.finditer(rf"^.*(?:{phrase}).*$", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.append(f"{path.relative_to(ROOT)}: {line[0].strip()[:100]}")
    assert found == [], f"write: {PHRASES[phrase]}"
