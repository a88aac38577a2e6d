"""lower_kv_append: which appends become Inductor's, what it generates for them, and on a GPU what they write.

`tests/interpreter/test_lower_kv_append.py` runs the generated code in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import spec_ops
from spec_ops.ops.kv_cache import append_kv_lowered, append_mla_kv_lowered
from spec_ops.passes import PassManager
from spec_ops.passes.lower_kv_append import MAX_ROWS, LowerKvAppend
from tests.helpers.append_models import (
    DIM,
    FP8,
    KV_HEADS,
    PAGE_SIZE,
    PAGES,
    RANK,
    as_bytes,
    gqa,
    inputs,
    mla,
    partial,
    rotary,
    rotate_half,
)  # fmt: skip
from tests.helpers.inductor_cuda import ARCH, cuda_graph, generate, launches
from tests.helpers.pass_harness import Uncached, cache_copies, capture, run_pass, switched_off, texts
from tests.helpers.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def lowered(module: fx.GraphModule) -> int:
    return sum(bool({append_kv_lowered, append_mla_kv_lowered} & set(node.args)) for node in module.graph.nodes)


def check(module: fx.GraphModule, matches: int, refused: str = "", arch: int = ARCH) -> None:
    result = run_pass(LowerKvAppend(), module, arch)
    assert result.matches == matches == len(result.done) == lowered(module), texts(result.refused)
    assert texts(result.refused) == refused


def normed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotary(torch.nn.functional.rms_norm(x, (DIM,)), cos, sin)


@pytest.mark.slow
@pytest.mark.parametrize("rope", [rotary, rotate_half, partial, normed])
def test_keys_that_are_computed(rope):
    module = cuda_graph(gqa(rope), *inputs(layers=3))
    check(module, 3)


def test_latents_that_are_computed():
    check(cuda_graph(mla(0.5), *inputs("mla", dtype=FP8)), 1)


def test_fp8_caches():
    check(cuda_graph(gqa(scale=0.3), *inputs(dtype=FP8)), 1)


def test_as_many_rows_as_were_measured():
    check(cuda_graph(gqa(), *inputs(n=MAX_ROWS, slots=[-1] * MAX_ROWS)), 1)


def test_report_names_the_line():
    result = run_pass(LowerKvAppend(), cuda_graph(gqa(), *inputs()), ARCH)
    assert texts(result.done) == "k and v are computed and appended in one go"
    assert "append_models.py" in result.done[0].where


def product(qkv, cos, sin, slots, k_cache, v_cache):
    """Keys and values are views of a product."""
    k, v = (qkv @ qkv.T @ qkv)[:, : 2 * KV_HEADS * DIM].unflatten(-1, (2, KV_HEADS, DIM)).unbind(1)
    spec_ops.append_kv(k_cache, v_cache, k, v, slots)


def given(qkv, cos, sin, slots, k_cache, v_cache):
    k = qkv[:, : KV_HEADS * DIM].view(-1, KV_HEADS, DIM)
    spec_ops.append_kv(k_cache, v_cache, k, k, slots)


def from_an_op(qkv, cos, sin, slots, k_cache, v_cache):
    """What an op of ours returns is a buffer."""
    lens, table = torch.full((5,), 3, dtype=torch.int32), torch.zeros(5, PAGES, dtype=torch.int32)
    q = qkv[:, : KV_HEADS * DIM].view(5, 1, KV_HEADS, DIM)
    out = spec_ops.mha_draft_decode(q, k_cache, v_cache, table, lens, backend="reference")
    spec_ops.append_kv(k_cache, v_cache, out[:, 0], out[:, 0], slots)


def other_width(qkv, cos, sin, slots, k_cache, v_cache):
    """Values of another width than the keys, and nothing computes them."""
    k, v = qkv[:, : KV_HEADS * DIM].unflatten(-1, (-1, DIM)), qkv[:, : KV_HEADS * 4].unflatten(-1, (-1, 4))
    spec_ops.append_kv(k_cache, v_cache[..., :4], rotary(k, cos, sin), v, slots)


def one_pool(qkv, cos, sin, slots, k_cache, v_cache):
    pool = torch.stack([k_cache, v_cache])
    gqa()(qkv, cos, sin, slots, pool[0], pool[1])
    return pool


def views_of_an_input(qkv, cos, sin, slots, pool, _):
    """The upper half of each head holds keys, the lower one values."""
    k = qkv[:, : KV_HEADS * DIM].unflatten(-1, (-1, DIM)) * 2
    spec_ops.append_kv(pool[..., :4], pool[..., 4:], k[..., :4], k[..., 4:], slots)


def own_caches(qkv, cos, sin, slots, k_cache, v_cache):
    caches = k_cache * 2, v_cache * 2
    gqa()(qkv, cos, sin, slots, *caches)
    return caches


def given_latent(rows, cos, sin, slots, cache):
    spec_ops.append_mla_kv(cache, rows[:, :RANK], rotary(rows[:, None, RANK:], cos, sin)[:, 0], slots)


LATENT = "append_mla_kv: nothing computes c_kv, so its scatter would be a launch of its own"
BUFFERS = "append_kv: k and v are buffers already: there is nothing to fuse"
WIDTH = "append_kv: nothing computes v, so its scatter would be a launch of its own"
POOL = "append_kv: both caches are views of one tensor, so Inductor would write them one after the other"
MADE = "append_kv: the cache is made in this graph"
MANY = "append_kv: more than 128 rows"
ALONE = "append_kv: Inductor fuses no kernels that share as little as 8 bytes of slots"


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        pytest.param(product, inputs(), BUFFERS, id="views of a product"),
        pytest.param(given, inputs(), BUFFERS, id="inputs"),
        pytest.param(from_an_op, inputs(), BUFFERS, id="result of an op"),
        pytest.param(other_width, inputs(), WIDTH, id="values of another width"),
        pytest.param(given_latent, inputs("mla"), LATENT, id="latent is an input"),
        pytest.param(gqa(), inputs(n=1), ALONE, id="one row"),
        pytest.param(gqa(), inputs(n=MAX_ROWS + 1, slots=[-1] * (MAX_ROWS + 1)), MANY, id="129 rows"),
        pytest.param(views_of_an_input, inputs(), POOL, id="one pool"),
        pytest.param(one_pool, inputs(), MADE, id="pool made here"),
        pytest.param(own_caches, inputs(), MADE, id="caches made here"),
        pytest.param(gqa(backend="reference"), inputs(), "", id="a named backend"),
    ],
)
def test_near_misses(fn, args, reason):
    check(cuda_graph(fn, *args), 0, reason)


def test_fp8_needs_a_gpu_that_converts():
    module = cuda_graph(gqa(scale=0.5), *inputs(dtype=FP8))
    check(module, 0, "append_kv: Triton does not convert to torch.float8_e4m3fn on sm_80", arch=80)


def test_cpu_keeps_the_op():
    module, _ = capture(gqa(), *inputs())
    check(module, 0)


def test_sizes_that_are_not_known():
    module = cuda_graph(gqa(), *inputs())
    slots = next(n for n in module.graph.nodes if n.op == "placeholder" and n.meta["val"].dtype == torch.int64)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        slots.meta["val"] = torch.empty(shapes.create_unbacked_symint(), dtype=torch.int64, device="cuda")
    check(module, 0, "append_kv: its sizes are not known while compiling")


def test_off_switch(monkeypatch):
    switched_off(LowerKvAppend(), cuda_graph(gqa(), *inputs()), monkeypatch)


def test_the_option_is_part_of_the_cache_key():
    on, off, default = ({"lower_kv_append": True}, {"lower_kv_append": False}, None)
    assert PassManager(on).uuid() == PassManager(default).uuid() != PassManager(off).uuid()


def test_the_measured_rule():
    """Faster in every measured case, up to as many rows as the pass takes, with the same bytes and no copy."""
    rows = json.loads((BENCHMARKS / "results" / "h200-kv-append.json").read_text(encoding="utf-8"))["rows"]
    times: dict[str, dict[tuple, float]] = {}
    for row in rows:
        times.setdefault(row["variant"], {})[row["case"], row["rows"], row["dtype"]] = row["us_per_layer"]
        assert row["copy_kernels"] == 0
        assert row["bytes_differing"] == 0 or row["variant"] == "rope_append_kv"  # which rounds less often
    off, on = times["pass off"], times["pass on"]
    assert off.keys() == on.keys()
    assert all(on[case] < off[case] for case in on)
    assert max(count for _, count, _ in on) == MAX_ROWS


def test_the_benchmark_compares_what_the_pass_does():
    spec = importlib.util.spec_from_file_location("kv_append", BENCHMARKS / "kv_append.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for case, dtype in dict.fromkeys((case, dtype) for case, _, dtype, _ in benchmark.CASES):
        check(cuda_graph(benchmark.layers_of(case), *benchmark.inputs(case, 4, dtype, "cpu", layers=1)), 1)


LAUNCHES = ["kernel_0", "append_kv", "kernel_1"], ["kernel_0", "kernel_1"]
MLA_LAUNCHES = ["kernel_0", "kernel_1", "append_mla_kv"], ["kernel_0", "kernel_1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "args", "before", "after"),
    [
        pytest.param(gqa(), inputs(), *LAUNCHES, id="gqa"),
        pytest.param(gqa(scale=0.3), inputs(dtype=FP8), *LAUNCHES, id="fp8"),
        pytest.param(gqa(normed), inputs(), *LAUNCHES, id="norm"),
        pytest.param(mla(), inputs("mla"), *MLA_LAUNCHES, id="mla"),
    ],
)
def test_generated_code_launches_less_and_copies_no_cache(fn, args, before, after):
    """Inductor's code for CUDA; no GPU is needed."""
    assert launches(generate(fn, *args, passes={"lower_kv_append": False}).code) == before
    code = generate(fn, *args).code
    assert launches(code) == after
    assert not cache_copies(code, args[-1])


GPU_CASES = [
    pytest.param("gqa", gqa(), torch.bfloat16, id="gqa"),
    pytest.param("gqa", gqa(rotate_half), torch.float16, id="transformers"),
    pytest.param("gqa", gqa(scale=0.3), FP8, id="fp8"),
    pytest.param("gqa", gqa(normed), torch.bfloat16, id="norm"),
    pytest.param("mla", mla(), torch.bfloat16, id="mla"),
    pytest.param("mla", mla(0.3), FP8, id="mla-fp8"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [None, [7, -1, 0, -1, 11], [-1] * 5], ids=["all", "dropped", "none"])
@pytest.mark.parametrize(("kind", "fn", "dtype"), GPU_CASES)
def test_caches_equal_those_of_the_op(kind: str, fn: Callable, dtype: torch.dtype, slots: list[int] | None):
    """Compiled both ways. Random angles and a scale that is no power of two: the bytes agree all the same."""

    def compiled(on: bool) -> tuple[list[torch.Tensor], list[str]]:
        args = [arg.cuda() for arg in inputs(kind, dtype=dtype, slots=slots)]
        angle = torch.randn(args[1].shape, generator=torch.Generator().manual_seed(0)).cuda() * 5
        args[1:3] = angle.cos(), angle.sin()
        torch._dynamo.reset()
        counters.clear()
        with torch._inductor.config.patch(post_grad_custom_post_pass=Uncached()):
            run = spec_ops.compile(fn, passes={"lower_kv_append": on}, mode="default")
            out, code = run_and_get_code(run, *args)
        assert counters["inductor"]["spec_ops_lower_kv_append"] == on
        return [out, *args], code

    (want, _), (got, code) = compiled(False), compiled(True)
    assert not [line for text in code for line in cache_copies(text, got[-1])]
    for one, other in zip(want, got, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.gpu
def test_bytes_moved_do_not_grow_with_the_cache():
    """Peak memory too would show a copy: the pools are 1 GiB each."""
    qkv, cos, sin, slots, *_ = (arg.cuda() for arg in inputs())
    pages = 2**30 // (PAGE_SIZE * KV_HEADS * DIM * 2)
    caches = [torch.zeros(pages, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    run = spec_ops.compile(gqa(), mode="default")
    run(qkv, cos, sin, slots, *caches)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(qkv, cos, sin, slots, *caches)
    assert torch.cuda.max_memory_allocated() - before < 2**20
