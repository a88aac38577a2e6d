"""Batch-invariant kernels on a GPU, each alone: a row's bits are equal for every number of rows and every place among them. And
texts of the shipped pair in bfloat16."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models.corpus import held_out_prompts
from spec_ops.models.pretrained import load_pair
from spec_ops.ops.eager_invariance import BatchInvariant
from spec_ops.ops.invariant import add_rms_norm_op, batched_mm_op, rms_norm_op, row_sum_op
from spec_ops.ops.linear import skinny_mm_op
from spec_ops.ops.moe import moe_experts_op
from spec_ops.ops.reference.invariant import fused_product
from tests.helpers.mixtures import FORMS, PUBLISHED, STORED, call, stored_call

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = [(4096, 4096), (6144, 4096), (28_672, 4096), (4096, 14_336), (1536, 7168), (576, 7168), (1000, 1024), (128_256, 4096)]
ROWS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 96, 127, 128)
MANY = (65, 128, 129, 256, 257, 300, 1024, 2048)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def check(function, x: torch.Tensor, rows=ROWS) -> None:
    """`function` of some rows of `x`, from its first and up to its last: the bits of those rows of `function(x)`."""
    whole = function(x)
    for count in rows:
        for start in {0, x.shape[0] - count}:
            got = function(x[start : start + count])
            assert torch.equal(bits(got), bits(whole[start : start + count])), (count, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products(n, k, dtype):
    weight, bias = normal(n, k, dtype=dtype, seed=1) / k**0.5, normal(n, dtype=dtype, seed=2)
    x = normal(128, k, dtype=dtype)
    check(lambda rows: skinny_mm_op(rows, weight, bias, invariant=True), x)
    want = (x.double() @ weight.double().t() + bias.double()).to(dtype)
    error = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(skinny_mm_op(x, weight, bias, invariant=True), want, rtol=error, atol=error)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1536, 7168), (1000, 1088)])
def test_products_of_many_rows(n, k):
    """Slices, tiles of 128 rows in which a program adds up all splits: the bits of one row alone."""
    weight = normal(n, k, seed=1) / k**0.5
    check(lambda rows: skinny_mm_op(rows, weight, None, invariant=True), normal(2048, k), (1, 8, 64, *MANY))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_batched_products(dtype):
    b = normal(16, 128, 512, dtype=dtype, seed=1) / 11
    a = normal(300, 16, 128, dtype=dtype)
    check(lambda rows: batched_mm_op(rows.transpose(0, 1), b, None).transpose(0, 1).contiguous(), a, (*ROWS, 65, 300))


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 1030), (128_256, 512)])
def test_products_of_float32(n, k):
    """Eager calls: linear layers with a bias, of any number of rows; and in the order that the reference states."""
    weight, bias = normal(n, k, dtype=torch.float32, seed=1) / k**0.5, normal(n, dtype=torch.float32, seed=2)
    x = normal(300, k, dtype=torch.float32)
    with BatchInvariant():
        check(lambda rows: F.linear(rows, weight, bias), x, (*ROWS, 65, 300))
        got = F.linear(x[:33], weight, bias)
    want = fused_product(x[:33].cpu(), weight.t()[:, :100].cpu()) + bias[:100].cpu()
    assert torch.equal(bits(got[:, :100].contiguous().cpu()), bits(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 96, 576, 4096, 7168, 16_384])
def test_sums_and_norms(n, dtype):
    x, weight = normal(300, n, dtype=dtype), normal(n, dtype=dtype, seed=1)
    total, out = add_rms_norm_op(x, x.flip(0), weight, 1e-5, False)
    assert torch.equal(bits(total), bits(x + x.flip(0)))
    assert torch.equal(bits(out), bits(rms_norm_op(total, weight, 1e-5, False)))
    check(row_sum_op, x)
    for rounded in (False, True):
        check(lambda rows, rounded=rounded: rms_norm_op(rows, weight, 1e-5, rounded), x)
    with BatchInvariant():
        eager = F.rms_norm(x.view(3, 100, n), (n,), weight, 1e-5).view(x.shape)
    assert torch.equal(bits(eager), bits(rms_norm_op(x, weight, 1e-5, False)))
    error = {torch.bfloat16: 2**-6, torch.float32: 2**-19}[dtype]
    torch.testing.assert_close(rms_norm_op(x, weight, 1e-5, False), F.rms_norm(x, (n,), weight, 1e-5), rtol=error, atol=error)


@pytest.mark.parametrize(("kind", "dtype"), [*product(["plain", *STORED], DTYPES), ("plain", torch.float32)])
@pytest.mark.parametrize("form", [FORMS["Qwen3-MoE"], PUBLISHED], ids=["gate and up", "published"])
def test_experts(form, dtype, kind):
    """Tiles of 64 and of 128 rows; others who go elsewhere, and whose rows are NaN."""
    sizes = (1200, 2, 8, 576, 320)
    args = call(form, *sizes, dtype) if kind == "plain" else stored_call(form, kind, *sizes, dtype=dtype)
    x, ids, weights, *rest = (a.cuda() if isinstance(a, torch.Tensor) else a for a in args)
    with BatchInvariant():
        whole = moe_experts_op(x, ids, weights, *rest)
        for count in (*ROWS, 200, 600):
            for start in {0, len(x) - count}:
                rows = slice(start, start + count)
                got = moe_experts_op(x[rows], ids[rows], weights[rows], *rest)
                assert torch.equal(bits(got), bits(whole[rows])), (count, start)
        x[1:], ids[1:] = float("nan"), ids[:1].clone()
        for count in (1, 2, 40, 1200):
            got = moe_experts_op(x[:count], ids[:count], weights[:count], *rest)
            assert torch.equal(bits(got)[0], bits(whole)[0]), count


@pytest.mark.parametrize("function", [F.silu, torch.cos, torch.exp, lambda x: x.float().softmax(-1), lambda x: F.gelu(x)])
def test_eager_functions(function):
    x = normal(300, 1000)
    with BatchInvariant():
        check(function, x)


PROCESS = """
import hashlib, torch
import spec_ops
from spec_ops.ops.invariant import add_rms_norm_op, batched_mm_op, row_sum_op
from spec_ops.ops.linear import skinny_mm_op
from tests.helpers.mixtures import FORMS, call
from spec_ops.ops.moe import moe_experts_op

g = torch.Generator("cuda").manual_seed(0)
normal = lambda *shape: torch.randn(shape, generator=g, device="cuda").bfloat16()
weight = normal(6144, 4096)
experts = call(FORMS["Qwen3-MoE"], 40, 4, 16, 256, 128, torch.bfloat16)
experts = [a.cuda() if isinstance(a, torch.Tensor) else a for a in experts]
tables = torch.arange(40, dtype=torch.int32, device="cuda").view(2, 20)
lens = torch.tensor([1203, 77], dtype=torch.int32, device="cuda")
for out in (
    *(skinny_mm_op(normal(rows, 4096), weight, None, invariant=True) for rows in (5, 128, 600)),
    batched_mm_op(normal(16, 5, 128), normal(16, 128, 512), None),
    *add_rms_norm_op(normal(5, 4096), normal(5, 4096), normal(4096), 1e-5, False),
    row_sum_op(normal(5, 4096)),
    moe_experts_op(*experts, None, None, True),
    spec_ops.mha_target_verify(
        normal(2, 4, 32, 128), normal(40, 64, 8, 128), normal(40, 64, 8, 128), tables, lens, deterministic=True
    ),
):
    print(hashlib.sha256(out.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
"""


def test_two_processes_agree():
    runs = [subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (run.stdout.split() for run in runs)
    assert first == second
    assert len(set(first)) == 9


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_texts_of_the_shipped_pair(dtype):
    """Compiled rounds: plain, several lengths of chains, trees, together and alone."""
    target, draft, tokenizer = load_pair(device="cuda", dtype=dtype)
    prompts = held_out_prompts(tokenizer, 8, 96)

    def texts(*draft, prompts=prompts, **more):
        options = {"max_batch_size": 8, "max_seq_len": 256, "compile": True, "invariant": True, **more}
        return Generator(target, *draft, **options).generate(prompts, max_new_tokens=128).tokens

    want = texts()
    for steps in (1, 3, 5):
        assert texts(draft, SpeculationConfig(steps)) == want, steps
    for topk, nodes in ((2, 6), (4, 16)):
        assert texts(draft, SpeculationConfig(3, topk=topk, num_draft_tokens=nodes)) == want, topk
    assert texts(draft, SpeculationConfig(3), prefill_chunk_size=32, page_size=64) == want
    assert texts(prompts=prompts[3:4], max_batch_size=1) == want[3:4]
    assert texts(draft, SpeculationConfig(3), prompts=prompts[5:6], max_batch_size=1) == want[5:6]
