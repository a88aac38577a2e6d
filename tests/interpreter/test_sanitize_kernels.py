"""Cases that run under compute-sanitizer, in Triton's interpreter: they pass, and they can fail."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")

from benchmarks.sanitize import kernels as sanitize_kernels
from spec_ops.backends.triton.cache import append as kv_cache

CASES = {case.name: case for case in sanitize_kernels.cases()}


def run(capsys, *names: str) -> tuple[int, str]:
    failed = sanitize_kernels.run_cases([CASES[name] for name in names], "cpu")
    return failed, capsys.readouterr().out


def test_right_results(capsys):
    names = ["append_mla_kv", "move_kv", "build_tree", "rope_append_kv, float32", "skinny_mm, 4 rows", "norm_linear, 15 rows"]
    names += ["dequantize, row", "dequantize, nvfp4"]
    names += ["route_experts", "topk_logits", "moe_experts, 70 tokens", "moe_experts, 5 tokens", "moe_experts, 20 tokens"]
    failed, out = run(capsys, *names, "rope_append_kv, float8_e4m3fn")
    assert out.splitlines() == [*[f"{name} ok" for name in names], "rope_append_kv, float8_e4m3fn skipped: needs a GPU"]
    assert failed == 0


def test_wrong_results(capsys, monkeypatch):
    def append_mla_kv(cache, *rest):
        kept = cache.clone()
        kernel(cache, *rest)
        cache.copy_(kept)

    kernel = kv_cache.append_mla_kv
    monkeypatch.setattr(kv_cache, "append_mla_kv", append_mla_kv)
    failed, out = run(capsys, "append_mla_kv", "append_kv")
    assert failed == 1
    assert "append_mla_kv FAILED AssertionError" in out
    assert "differs at bytes" in out
    assert "append_kv ok" in out  # the next case runs all the same


def test_kernels_that_are_not_launched(capsys, monkeypatch):
    monkeypatch.setattr(sanitize_kernels, "check", lambda op, args, device: None)
    assert run(capsys, "page_table") == (1, "page_table FAILED AssertionError: launched [], not ['page_table_kernel']\n")
