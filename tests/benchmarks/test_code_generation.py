"""benchmarks/code_generation.py on the smallest round."""

from __future__ import annotations

import json

import pytest

from benchmarks import code_generation


@pytest.mark.slow
def test_a_case_is_timed(tmp_path, capsys, monkeypatch):
    generate, rounds = code_generation.generate_round, []

    def generated(module) -> None:
        rounds.append(module)
        if len(rounds) > 1:  # the first warms up
            generate(module)

    monkeypatch.setattr(code_generation, "generate_round", generated)
    path = tmp_path / "times.json"
    code_generation.main(["--case", "2", "1", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["layers"], row["steps"]) == (2, 1)
    assert row["seconds"] > 0.5
    assert f"2 layers, 1 steps: {row['seconds']} s" in capsys.readouterr().out
