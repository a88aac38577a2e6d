"""What `"auto"` picks follows from measured times: `measured.json` from the results, selection from `measured.json`; and what
is not the fastest in a measured case is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import ranking
from spec_ops.backends import (
    AttentionMeta,
    get_backend,
    measured,
    register_backend,
    registry,
    select_backend,
    unregister_backend,
)
from tests.helpers.paths import RESULTS, ROOT

PAGE = ROOT / "docs" / "guides" / "backends.md"
GQA = AttentionMeta(
    step="mha_target_verify", dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128,
    v_head_dim=128, page_size=64, q_len=4, tree_mask=False, window=False, sinks=False, softcap=False,
)  # fmt: skip
KERNELS = sorted(RESULTS.glob("h200-kernels*.json"))
ROUNDS = sorted(RESULTS.glob("h200-round*.json"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def meta_of(row: dict[str, Any]) -> AttentionMeta:
    """The facts of a measured call."""
    heads, _, kv_heads = row["heads"].partition("/")
    mla = row["kind"] == "mla"
    return dataclasses.replace(
        GQA,
        step=f"{ranking.KINDS[row['kind']]}_target_verify",
        kv_dtype=getattr(torch, row["dtype"]),
        num_heads=int(heads),
        num_kv_heads=int(kv_heads or 1),
        head_dim=row["head_dim"],
        v_head_dim=512 if mla else row["head_dim"],
        page_size=row["page_size"],
        q_len=row["q_len"],
        tree_mask=row["mask"] == "tree",
    )


def test_the_table_is_made_of_the_results_it_names():
    """If this fails after a measurement: python -m benchmarks.kernels.ranking benchmarks/results/h200-kernels.json"""
    shipped = json.loads(measured.PATH.read_text())
    assert shipped == ranking.summarize([ROOT / source["file"] for source in shipped["sources"]], ROOT)
    assert len(shipped["rows"]) >= 8


def test_auto_takes_the_fastest_measured_or_the_docs_say_why_not():
    """Over every case in the results: the kernel that `"auto"` takes is within 5% of the fastest that it could take, or the
    case stands in the docs' table with the factor."""
    slower, cases = {}, 0
    for path in KERNELS:
        arch = ranking._arch(json.loads(path.read_text())["environment"]["machine"])
        for case in ranking.cases(rows_of(path)):
            us = {name: row["us"] for name, row in case.items() if ranking.competes(row)}
            if len(us) < 2:
                continue
            cases += 1
            row = next(iter(case.values()))
            chosen = select_backend(meta_of(row), arch)
            assert chosen.backend.name in us
            factor = us[chosen.backend.name] / min(us.values())
            if factor > measured.TOLERANCE:
                fastest = min(us, key=us.get)
                assert "though" in chosen.reasons[fastest], "select_backend does not mention it"
                context = str(row["context"]) if row["lengths"] == "equal" else row["lengths"]
                slower[f"| {row['heads']}, {row['head_dim']} | {row['q_len']}, {row['mask']} | {row['bs']}, {context} |"] = (
                    factor
                )
    assert cases >= 56
    lines = PAGE.read_text().splitlines()
    said = {line for line in lines if line.startswith("| ") and "slower by" in line}
    assert len(said) == len(slower), slower
    for case, factor in slower.items():
        assert any(line.startswith(case) and f"slower by {factor - 1:.0%}" in line for line in said), (case, factor)


def test_auto_rounds_are_the_fastest_measured():
    """Where one file holds a round's time with several backends that `"auto"` could take, it takes one within 5% of the
    fastest. (A file with one backend has nothing to compare.)"""
    for path in ROUNDS:
        times: dict[tuple, dict[str, float]] = {}
        for row in rows_of(path):
            backend = get_backend(row.get("backend", ""))
            if backend is not None and not backend.host_plan and row.get("passes", True) and row.get("ms") is not None:
                key = tuple(row.get(name) for name in ("model", "bs", "context", "steps", "topk"))
                times.setdefault(key, {})[backend.name] = row["ms"]
        for case, ms in times.items():
            if len(ms) > 1:
                meta = dataclasses.replace(GQA, tree_mask=case[-1] not in (None, 1))
                chosen = select_backend(meta, 90).backend.name
                assert ms[chosen] <= measured.TOLERANCE * min(ms.values()), (path.name, case, ms)


def times(**mean: float) -> measured.Times:
    names = {name.replace("_", "-"): value for name, value in mean.items()}
    return measured.Times(90, "mha", "causal", "bfloat16", 4, 128, 4, 7, names, names)


@pytest.fixture
def table(monkeypatch):
    """Replaces the shipped table; selections are cached."""

    def use(*rows: measured.Times) -> None:
        monkeypatch.setattr(measured, "table", lambda: rows)
        registry._forget()

    yield use
    registry._forget()


def test_measured_times_decide(table):
    """Against the declared ranks, and only on the architecture that was measured."""
    assert get_backend("triton").rank < get_backend("flashinfer-xqa").rank
    table(times(triton=1.5, flashinfer_xqa=1.0))
    assert select_backend(GQA, 90).backend.name == "flashinfer-xqa"
    reason = select_backend(GQA, 90).reasons["triton"]
    assert (
        reason
        == "takes 1.50 times as long as flashinfer-xqa (7 cases of mha causal, 4 heads per KV head, head_dim 128, q_len 4)"
    )
    assert select_backend(GQA, 120).backend.name == "triton"
    assert select_backend(GQA, 120).reasons["flashinfer-xqa"] == "ranks after triton"
    table(times(triton=1.0, flashinfer_xqa=1.1))
    assert select_backend(GQA, 90).backend.name == "triton"
    reason = select_backend(GQA, 90).reasons["flashinfer-xqa"]
    assert "takes 1.10 times as long as triton" in reason
    assert "though" not in reason
    table(dataclasses.replace(times(triton=1.0, flashinfer_xqa=1.1), worst={"triton": 1.18, "flashinfer-xqa": 1.6}))
    reason = select_backend(GQA, 90).reasons["flashinfer-xqa"]
    assert reason.endswith("though triton takes up to 1.18 times as long as the fastest in one of them")


def test_what_cannot_run_is_not_chosen_for_its_time(table):
    table(times(triton=1.5, flashinfer_xqa=1.0))
    assert select_backend(dataclasses.replace(GQA, softcap=True), 90).backend.name == "triton"
    assert select_backend(GQA, 90, missing=frozenset({"flashinfer-xqa"})).backend.name == "triton"
    assert select_backend(GQA, 90, "triton").backend.name == "triton"
    assert select_backend(dataclasses.replace(GQA, step="mha_extend", q_len=4096), 90).backend.name == "triton"


def test_a_backend_that_was_not_measured_keeps_its_rank(table):
    """One from outside the package, ranked first, stays first whatever the times of the others are."""
    table(times(triton=1.5, flashinfer_xqa=1.0))
    for rank, name in ((5, "mine"), (120, "flashinfer-xqa"), (900, "flashinfer-xqa")):
        register_backend(dataclasses.replace(get_backend("triton"), name="mine", rank=rank))
        try:
            assert select_backend(GQA, 90).backend.name == name
        finally:
            unregister_backend("mine")


def test_the_nearest_kind_of_call_counts(table):
    """Mask first, then the cache's dtype, then sizes by their ratio."""
    base = times(triton=1.0)
    rows = [
        base,
        dataclasses.replace(base, q_len=16),
        dataclasses.replace(base, q_len=16, mask="tree"),
        dataclasses.replace(base, group=8, head_dim=64),
        dataclasses.replace(base, kv_dtype="float8_e4m3fn", q_len=64),
        dataclasses.replace(base, arch=100, kind="mla"),
    ]
    table(*rows)

    def index(arch: int = 90, **changes: Any) -> int | None:
        found = measured.nearest(dataclasses.replace(GQA, **changes), arch)
        return None if found is None else rows.index(found)

    assert index() == 0
    assert (index(q_len=1), index(q_len=7), index(q_len=9), index(q_len=64)) == (0, 0, 1, 1)
    assert (index(tree_mask=True, q_len=4), index(tree_mask=True, head_dim=64)) == (2, 2)
    assert index(num_heads=64, head_dim=64, v_head_dim=64) == 3
    assert index(kv_dtype=torch.float8_e4m3fn, q_len=1) == 4
    assert index(step="mha_draft_extend") == 0
    assert index(step="mha_extend") is None
    assert (index(arch=100), index(arch=None)) == (None, None)


def test_ranking_of_made_up_results(tmp_path):
    """Means over the cases that all were measured in; a later file replaces; host-planned and unknown backends are left out."""

    def row(backend: str, us: float, bs: int, **changes: Any) -> dict[str, Any]:
        return {
            "kind": "gqa", "heads": "32/8", "head_dim": 128, "bs": bs, "context": 4096, "lengths": "equal", "q_len": 4,
            "mask": "causal", "dtype": "bfloat16", "page_size": 64, "backend": backend, "us": us, "cuda_graph": True, **changes,
        }  # fmt: skip

    first = [row("triton", 10, 1), row("flashinfer-xqa", 20, 1), row("triton", 99, 2), row("flashinfer-xqa", 20, 2)]
    first += [row("flashinfer-fa2", 1, 1), row("torch-sdpa", 1, 1), row("triton", 1, 1, q_len=1)]
    first += [row("flashinfer-xqa", 1, 4, cuda_graph=False), row("triton", 5, 4)]
    environment = {"machine": "NVIDIA H200", "commit": "abc", "torch": "2.11"}
    for name, rows in (("a.json", first), ("b.json", [row("triton", 40, 2)])):
        (tmp_path / name).write_text(json.dumps({"environment": environment, "rows": rows}))
    made = ranking.summarize([tmp_path / "a.json", tmp_path / "b.json"], tmp_path)
    assert [source["file"] for source in made["sources"]] == ["a.json", "b.json"]
    (only,) = made["rows"]
    assert only["cases"] == 2
    assert only["mean"] == {"flashinfer-xqa": 1.414, "triton": 1.414}  # 2 and 1; 1 and 2
    assert only["worst"] == {"flashinfer-xqa": 2.0, "triton": 2.0}
    ranking.write(made, tmp_path / "measured.json")
    assert json.loads((tmp_path / "measured.json").read_text()) == made
    environment["machine"] = "NVIDIA Z9"
    (tmp_path / "c.json").write_text(json.dumps({"environment": environment, "rows": first}))
    with pytest.raises(SystemExit, match=r"machine must be one of .*, got 'NVIDIA Z9'"):
        ranking.summarize([tmp_path / "c.json"], tmp_path)


def test_the_table_is_part_of_the_package():
    assert '"backends/*.json"' in (ROOT / "pyproject.toml").read_text()
    assert measured.PATH.parent.name == "backends"


def test_compiled_code_knows_the_table(table):
    before = registry.declarations()
    table(times(triton=1.5, flashinfer_xqa=1.0))
    assert registry.declarations() != before
