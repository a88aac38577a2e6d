"""benchmarks/lookup.py on two short texts of each kind."""

from __future__ import annotations

import json

import pytest

from benchmarks import lookup
from spec_ops.models.corpus import ByteTokenizer


@pytest.mark.slow
def test_prompts_quote_what_is_to_be_continued():
    for kind in lookup.KINDS:
        texts = [ByteTokenizer().decode(prompt) for prompt in lookup.prompts(kind)]
        assert len(set(texts)) == lookup.PROMPTS
        assert all(500 < len(text) + 1 < lookup.ROOM for text in texts)
    source, edited = ByteTokenizer().decode(lookup.prompts("edit")[0]).split("\n\n\n# The same function")
    first = edited.split("\n")[1]
    assert first.startswith("def ")
    assert first.split("(")[0] == source.split("(")[0]


def test_rows_of_every_draft(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lookup, "NEW_TOKENS", 12)
    monkeypatch.setattr(lookup, "prompts", lambda kind: [ByteTokenizer().encode("def f(x):\n    return x\n\n\ndef f(")])
    monkeypatch.setattr(lookup, "KINDS", ("edit",))
    lookup.main(["--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows[0]["draft"] == "plain"
    assert rows[0]["accept_length"] == 1
    assert {row["new_tokens"] for row in rows} == {12}
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 7
    steps = [(row["draft"], row["steps"]) for row in rows]
    assert steps[2:6] == [("lookup, 2 compared", 5), ("lookup", 3), ("lookup", 5), ("lookup", 8)]
    lookup.main(["--draft", "lookup: 5 steps", "--json", str(tmp_path / "some.json")])
    some = json.loads((tmp_path / "some.json").read_text())["rows"]
    assert [(row["draft"], row["steps"]) for row in some] == [("plain", 0), ("lookup", 5)]
    assert some[1]["accept_length"] == rows[4]["accept_length"] > 1
