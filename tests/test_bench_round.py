"""`python -m spec_ops bench round`: a one-layer round on a GPU, and a clear refusal without one."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from spec_ops import cli
from spec_ops.bench.round import breakdown


@pytest.mark.gpu
def test_one_layer_round(tmp_path):
    path = tmp_path / "round.json"
    args = ["bench", "round", "--layers", "1", "--batch-size", "2", "--context", "128", "--repeats", "5", "--json", str(path)]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["passes"] for row in rows] == [False, True]
    for row in rows:
        assert row["ms"] > row["floor_ms"] > 0
        assert row["graph_launches"] == 1
        assert row["host_launches"] == row["host_syncs"] == 0
        assert row["kernels"] > 10
        assert min(row["matmul_ms"], row["attention_ms"], row["other_ms"]) > 0
        parts = row["matmul_ms"] + row["attention_ms"] + row["other_ms"] + row["gaps_ms"]
        assert parts == pytest.approx(row["ms"], abs=0.01)


def test_where_the_time_goes():
    """Kernel names as cuBLAS, Inductor and Triton give them on an H200."""
    kernels = [
        ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT", 2000.0),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", 120.0),
        ("split_kv_attention_kernel", 380.0),
        ("mla_hopper_attention", 20.0),
        ("rope_append_kv_kernel", 50.0),
        ("triton_red_fused__fused_rms_norm__unsafe_view_add_29", 150.0),
    ]
    expected = {"matmul_ms": 2.12, "attention_ms": 0.4, "other_ms": 0.2, "gaps_ms": 0.28}
    assert breakdown(kernels, 3.0) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu():
    result = CliRunner().invoke(cli.app, ["bench", "round"])
    assert result.exit_code == 2
    assert "CUDA" in result.output
