"""What `python -m benchmarks round` makes of times: where they go by names of kernels, and how rounds are compared."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from PIL import Image

from benchmarks.round import profile as round_profile
from benchmarks.round.profile import Kernel, behind_each_other, breakdown, idle, kind_of, small_kernels
from benchmarks.round.report import above_floor, beside_base, choice_table, describe_choice, judge_auto, kind, with_bf16_ms


def test_where_the_time_goes():
    """Kernel names as cuBLAS, Inductor, Triton and FlashInfer give them."""
    times = {
        "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT": ("matmul", 2000.0),
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": ("matmul", 120.0),
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(T1::Params)": ("matmul", 1.0),
        "split_kv_attention_kernel": ("attention", 360.0),
        "mla_hopper_attention": ("attention", 20.0),
        "ragged_attention_kernel": ("attention", 1.0),
        "kernel_mha(unsigned int, float, __nv_bfloat16*)": ("attention", 1.0),
        "prepare_kernel": ("attention", 1.0),
        "clear_kernel": ("attention", 1.0),
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<(flashinfer::MaskMode)1>(T1)": ("attention", 1.0),
        "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<cutlass::gemm::X>>(T1)": ("attention", 1.0),
        "void flashinfer::mla::BatchMLAPagedAttentionKernel<T1>(T2)": ("attention", 1.0),
        "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<T1>(T2)": ("attention", 1.0),
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u>(T1)": ("attention", 1.0),
        "rope_append_kv_kernel": ("other", 50.0),
        "append_mla_kv_kernel": ("other", 1.0),
        "triton_red_fused__fused_rms_norm__unsafe_view_add_29": ("other", 150.0),
        "void (anonymous namespace)::elementwise_kernel<4>(int)": ("other", 1.0),
        "Memcpy DtoD (Device -> Device)": ("other", 1.0),
    }
    assert {name: kind_of(name) for name in times} == {name: kind for name, (kind, _) in times.items()}
    kernels = [Kernel(name, 0.0, 2 * duration) for name, (_, duration) in times.items()]
    expected = {"matmul_ms": 2.121, "attention_ms": 0.389, "other_ms": 0.203, "gaps_ms": 0.287}
    assert breakdown(kernels, 2, 3.0) == expected


@pytest.mark.parametrize("package", ["linear", "moe"])
def test_our_products_are_known(package):
    """Every kernel beside them is named here, so that a new one is not counted as other unnoticed."""
    folder = pytest.importorskip(f"spec_ops.backends.triton.{package}", reason="triton comes for Linux only")
    found = {
        name
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
        for name, value in vars(importlib.import_module(module.name)).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
    beside = {"scaled_silu_mul_kernel", "row_sum_kernel", "rms_norm_kernel", "route_experts_kernel", "sort_pairs_kernel"}
    beside |= {"round_rows_kernel", "row_parts_kernel", "dequantize_kernel"}
    beside |= {"sorted_rows_kernel", "activated_rows_kernel", "summed_rows_kernel"}
    assert {name for name in found if kind_of(name) == "other"} == found & beside
    assert {name for name in found if kind_of(name) == "matmul"} == found - beside


def test_small_kernels_by_name():
    """Per round; without the numbers by which Inductor tells kernels apart."""
    times = [
        ("triton_poi_add_7", 1.0),
        ("rope_append_kv_kernel", 9.0),
        ("triton_poi_add_12", 2.0),
        ("nvjet_x", 5.0),
    ]
    kernels = [Kernel(name, 0.0, duration) for name, duration in 2 * times]
    found = small_kernels(kernels, 2)
    assert found == {"rope_append_kv_kernel": [1, 9], "triton_poi_add": [2, 3]}
    assert list(found) == ["rope_append_kv_kernel", "triton_poi_add"]


def test_a_kernel_that_waits_for_the_last_one_does_not_count_twice():
    early = [Kernel("a", 0.0, 10.0), Kernel("b", 2.0, 11.0), Kernel("c", 3.0, 4.0), Kernel("d", 15.0, 1.0)]
    alone = [Kernel("a", 0.0, 10.0), Kernel("b", 10.0, 3.0), Kernel("c", 13.0, 0.0), Kernel("d", 15.0, 1.0)]
    assert behind_each_other(early) == alone
    assert behind_each_other(alone) == alone


def test_idle_stretches_of_overlapping_kernels():
    kernels = [Kernel("a", 0.0, 10.0), Kernel("b", 2.0, 3.0), Kernel("c", 12.0, 1.0), Kernel("d", 13.0, 1.0)]
    assert idle(kernels) == [(10.0, 2.0)]


def test_timeline_picture(tmp_path):
    names = ("nvjet_x", "split_kv_attention_kernel", "rope_append_kv_kernel")
    kernels = [Kernel(names[i % 3], 10.0 * i, 9.0 - i % 3) for i in range(60)]
    round_profile.plot(tmp_path / "new" / "round.png", kernels, "title")
    with Image.open(tmp_path / "new" / "round.png") as image:
        assert image.width > 1000
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)} <= colors  # every lane has bars
    with pytest.raises(ValueError, match="at least one"):
        round_profile.plot(tmp_path / "empty.png", [], "title")


def test_what_weights_of_fewer_bits_are_judged_by():
    def row(ms: float, **more) -> dict:
        same = {"model": "m", "bs": 1, "context": 8, "steps": 3, "topk": 1, "round": "plain", "backend": "auto", "passes": True}
        return same | {"ms": ms} | more

    rows = [row(4.0), row(2.5, weights="float8"), row(2.0, weights="int4"), row(5.0, path="transformers")]
    rows += [
        row(2.6, weights="float8", path="transformers"),
        row(2.7, weights="float8", invariant=True),
        row(1.0, bs=2, weights="int4"),
    ]
    assert [r.get("bf16_ms") for r in with_bf16_ms(rows)] == [None, 4.0, 4.0, None, 5.0, None, None]
    assert describe_choice(rows[2]) == "greedy, int4"


def test_time_above_the_floor_by_where_it_goes():
    row = {"matmul_ms": 4.6, "attention_ms": 0.4, "other_ms": 0.3, "gaps_ms": 0.1, "weights_floor_ms": 4.0, "kv_floor_ms": 0.3}
    assert above_floor(row) == pytest.approx({"matmul": 0.6, "attention": 0.1, "other": 0.3, "gaps": 0.1})
    assert above_floor({"ms": 200.0}) is None


def test_whether_auto_is_the_fastest():
    def row(backend: str, ms: float, **more) -> dict:
        same = {"model": "m+eagle3", "bs": 1, "context": 8, "steps": 3, "topk": 1, "round": "speculative", "passes": True}
        return same | {"backend": backend, "ms": ms} | more

    ahead, level = (
        judge_auto([row("auto", 5.0), row("flashinfer-xqa", 4.9), row("triton", 5.1)])[0],
        judge_auto([row("auto", 5.0), row("flashinfer-xqa", 4.7), row("auto", 1.0, bs=2)]),
    )
    assert (ahead["fastest"], ahead["auto_over_fastest"], ahead["auto_wins"], ahead["why"]) == (
        "flashinfer-xqa",
        1.02,
        True,
        None,
    )
    assert [v["auto_wins"] for v in level] == [False]  # and nothing is said about a case with one backend
    assert "rank" in level[0]["why"]
    (planned,) = judge_auto([row("auto", 5.0), row("flashinfer-fa2", 4.0)])
    assert "plans on the host" in planned["why"]
    assert judge_auto([row("auto", 5.0), row("transformers", 4.0, round="assisted")]) == []


def test_what_a_round_is_judged_by():
    """A sampled round by the greedy one of its case, one with penalties by the same without."""
    sampled = {"sampled": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05}

    def row(ms: float, **more) -> dict:
        same = {"model": "m+eagle3", "bs": 1, "context": 8, "steps": 3, "topk": 1, "round": "speculative", "backend": "auto"}
        return same | {"passes": True, "ms": ms} | more

    tree = {"topk": 4, "num_tokens": 16}
    rows = [row(4.0), row(5.0, **sampled), row(4.1, penalties=True), row(5.2, **sampled, penalties=True), row(6.0, **tree)]
    rows += [row(6.6, **tree, **sampled), row(7.0, bs=8, **sampled), row(7.0, backend="triton", **sampled)]
    assert [(a["ms"], b["ms"]) for a, b in beside_base(rows)] == [(5.0, 4.0), (4.1, 4.0), (5.2, 5.0), (6.6, 6.0)]
    cells = [list(column.cells) for column in choice_table(rows).columns]
    assert cells[-1] == ["1.250", "1.025", "1.040", "1.100"]
    assert cells[0][3] == "m+eagle3, S=3, K=4, 16 tokens"
    assert cells[4][0] == "temperature 0.6, top-k 20, top-p 0.9, min-p 0.05"
    assert cells[6] == ["greedy", "greedy", "temperature 0.6, top-k 20, top-p 0.9, min-p 0.05", "greedy"]
    assert kind(rows[3]) == "speculative, sampled, penalties"
    invariant = [row(4.2, invariant=True), row(5.5, **sampled, invariant=True)]
    assert [(a["ms"], b["ms"]) for a, b in beside_base(rows[:2] + invariant)] == [(5.0, 4.0), (4.2, 4.0), (5.5, 5.0)]
    assert describe_choice(invariant[0]) == "greedy, batch-invariant"
    assert choice_table(rows[:1]) is None
    # Verdicts on `auto` keep them apart.
    other = [row(3.0, backend="triton"), row(6.0, backend="triton", **sampled)]
    assert [(v["fastest"], v.get("sampled")) for v in judge_auto([*rows[:2], *other])] == [("triton", None), ("auto", True)]
