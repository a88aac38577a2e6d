"""Every Triton kernel of the package on small inputs, compared with the CPU reference: what `sanitize.py` runs.

python -m benchmarks.sanitize.kernels            # all; `append move` for the cases whose names contain one of these
TRITON_INTERPRET=1 python -m benchmarks.sanitize.kernels --device cpu append
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.runtime.interpreter import GridExecutor

from benchmarks.sanitize import attention as sanitize_attention
from spec_ops.backends.push import of_one_process
from spec_ops.backends.triton.cache import rope_append as rope
from spec_ops.backends.triton.collectives import push
from spec_ops.backends.triton.drafting import topk
from spec_ops.backends.triton.linear import dequantize, hopper_float8, rounding
from spec_ops.backends.triton.linear import invariant as invariant_linear
from spec_ops.backends.triton.linear import norm as norm_linear
from spec_ops.backends.triton.linear import skinny_mm as linear
from spec_ops.backends.triton.linear.hopper_tiles import float8_tile
from spec_ops.backends.triton.linear.operands import Weight
from spec_ops.backends.triton.linear.row_parts import PARTS
from spec_ops.backends.triton.moe import experts, route
from spec_ops.backends.triton.runtime import ahead
from spec_ops.backends.triton.sampling import accept, accept_logits, probabilities, support
from spec_ops.ops.reference import accept as reference_accept
from spec_ops.ops.reference import collectives as reference_collectives
from spec_ops.ops.reference import invariant as reference_invariant
from spec_ops.ops.reference import linear as reference_linear
from spec_ops.ops.reference import moe as reference_moe
from spec_ops.ops.reference import rope as reference_rope
from spec_ops.ops.reference import rounding as reference_rounding
from spec_ops.ops.reference import sampling as reference_sampling
from spec_ops.ops.reference import topk as reference_topk
from tests.helpers.accept_rows import ROW_KINDS, long_rows
from tests.helpers.mixtures import FORMS as MOE_FORMS
from tests.helpers.mixtures import PUBLISHED as MOE_PUBLISHED
from tests.helpers.mixtures import call as moe_call
from tests.helpers.mixtures import exact as moe_exact
from tests.helpers.mixtures import stored_call as stored_moe_call
from tests.helpers.op_cases import CASES, Copy, Rng, check
from tests.helpers.stored_weights import exact, stored

FP8 = torch.float8_e4m3fn
SEEDS = 7  # of the random cases of an op: so many have chains and trees
KERNELS = {
    "append_kv": ("append_kv_kernel",),
    "append_mla_kv": ("append_mla_kv_kernel",),
    "move_kv": ("move_kv_kernel",),
    "page_table": ("page_table_kernel",),
    "kv_indices": ("kv_indices_kernel",),
    "draft_kv_indices": ("kv_indices_kernel",),
    "draft_kv_indices_steps": ("kv_indices_kernel",),
    "select_draft_tokens": ("select_draft_tokens_kernel",),
    "build_tree": ("build_tree_kernel",),
    "full_mask_words": ("full_mask_words_kernel",),
    "accept_greedy": ("accept_greedy_kernel",),
    "accept_sampled": ("accept_sampled_tree_kernel", "accept_sampled_chain_kernel"),
    "lookup_drafts": ("lookup_drafts_kernel",),
    "sample_tokens": ("sample_tokens_kernel",),
}


class Case(NamedTuple):
    """`run` takes the device, and raises unless the kernel does what the reference does. `kernels`: those it launches.

    Triton's interpreter cannot do what is not `interpreted`: it truncates to bfloat16, rounds to e4m3 in ways of its own,
    knows no assembly, and ops do not take Triton's attention on a CPU.
    """

    name: str
    kernels: tuple[str, ...]
    run: Callable[[str], None]
    interpreted: bool = True


def _random(op: str, device: str) -> None:
    """Chains and trees, int32 and int64, layouts of caches, dropped slots: as `CASES` draws them."""
    for seed in range(SEEDS):
        check(op, CASES[op](Rng(f"{op}{seed}"), device == "cpu"), device)


def _long_rows(op: str, device: str) -> None:
    """A vocabulary of several of the kernel's blocks; a chain and a tree."""
    rng = Rng(op)
    vocab = 2 * accept.VOCAB_BLOCK + 100
    if op == "sample_tokens":
        check(op, (torch.softmax(rng.tensor(3, vocab) * 3, -1), torch.rand(3)), device)
        return
    target = torch.softmax(rng.tensor(2, 3, vocab) * 4, -1)
    draft = torch.softmax(rng.tensor(2, 2, vocab) * 4, -1)
    candidates = torch.cat([target[:, :1].argmax(-1), target[:, :-1].argmax(-1)], 1)
    coins = torch.rand(2, 3), torch.rand(2)
    check(op, (candidates, target, *coins, None, draft, None, 3, 1.0, 1.0), device)
    check(op, (candidates, target, *coins, torch.tensor([[-1, 0, 0]] * 2), None, None, 2, 1.0, 1.0), device)


def _sampling(op: str, device: str) -> None:
    """Rows of several tiles and of less than one; greedy rows; every filter alone, and all; few rows, which programs share."""
    rng = Rng(op)
    temperature = torch.tensor([0.0, 0.7, 1.0])
    top_k, top_p, min_p = torch.tensor([3, 5000, 20]), torch.tensor([0.9, 0.5, 1.0]), torch.tensor([0.0, 0.01, 0.1])
    for vocab in (100, 2 * probabilities.BLOCK + 100):
        logits = (rng.tensor(3, 2, vocab) * 4).bfloat16()
        for cuts in ((None, None, None), (top_k, None, None), (None, top_p, None), (None, None, min_p), (top_k, top_p, min_p)):
            args = logits, temperature, *cuts
            if op == "sampling_probs":
                got = probabilities.sampling_probs(*Copy(args, device).args).cpu()
                wanted = reference_sampling.sampling_probs(*args)
                assert torch.equal(got > 0, wanted > 0), "keeps other tokens"
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
            else:
                args = logits, torch.rand(3, 2), *args[1:]
                got = support.sample_logits(*Copy(args, device).args)[1].cpu()
                wanted = reference_sampling.sample_logits(*args)[1]
                assert torch.equal(got[..., :2], wanted[..., :2]), "keeps other tokens"
                torch.testing.assert_close(got[..., 2], wanted[..., 2], rtol=1e-5, atol=0)


def _accept_logits(kind: str, device: str) -> None:
    """Rows that several programs share."""
    args = long_rows(0, kind, 5000)
    got = accept_logits.accept_sampled_logits(*Copy(args, device).args)
    for mine, wanted in zip(got, reference_accept.accept_sampled_logits(*args), strict=True):
        assert torch.equal(mine.cpu(), wanted), kind


def _rope_append_kv(dtype: torch.dtype, scale: float, normed: bool, device: str) -> None:
    """Rows of caches before and after those that are written; a dropped slot."""
    rng = Rng("rope_append_kv")
    q, k, v = (rng.tensor(5, heads, 32) for heads in (9, 3, 3))
    pools = [rng.tensor(5, 8, 3, 32).to(dtype) for _ in range(2)]
    slots = torch.tensor([3, -1, 39, 0, 17])
    norms = (rng.tensor(32), rng.tensor(32), 1e-6) if normed else ()
    args = q, k, v, rng.tensor(5, 12), rng.tensor(5, 12), *pools, slots, scale, scale, *norms
    expected, given = Copy(args, "cpu"), Copy(args, device)
    wanted, got = reference_rope.rope_append_kv(*expected.args), rope.rope_append_kv(*given.args).cpu()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(given.args[5:7], expected.args[5:7], strict=True):
        # Rotations round once less or more than the reference's; in e4m3 the neighbour is up to an eighth away.
        close = {"rtol": 0.13, "atol": 2**-9} if dtype == FP8 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(mine.cpu().float(), theirs.float(), **close)


def _skinny_mm(m: int, n: int, k: int, device: str) -> None:
    """Enough of k that several programs share a tile; columns that no block divides."""
    rng = Rng(m)
    args = rng.tensor(m, k).half(), rng.tensor(n, k).half(), rng.tensor(n).half()
    got = linear.skinny_mm(*Copy(args, device).args).cpu()
    wanted = reference_linear.skinny_mm(*(x.double() for x in args))
    torch.testing.assert_close(got.double(), wanted, rtol=2**-10, atol=1e-3)


def _hopper_mm(kind: str, m: int, k: int, device: str) -> None:
    """In Gluon: as `_skinny_mm`."""
    x, (weight, *scales) = Rng(m).tensor(m, k).bfloat16(), stored(Rng(kind).tensor(200, k), kind, torch.bfloat16)
    got = linear.skinny_mm(*Copy((x, weight, None, *scales), device).args).cpu()
    wanted = exact(x, weight, *scales)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=0.25)


def _hopper_float8(kind: str, m: int, device: str) -> None:
    """As `_hopper_mm`, with rows of float8 too: scales of blocks go through shared memory."""
    (x, x_scale, _), (weight, scale, _) = (stored(Rng(i).tensor(i, 1280), kind) for i in (m, 200))
    if kind == "block":  # a row's scales, not those of 128 rows
        x_scale = x_scale.repeat_interleave(128, 0)[:m].contiguous()
    args = x, x_scale, weight, scale, None, torch.bfloat16
    got = hopper_float8.float8_mm(*Copy(args, device).args).cpu()
    wanted = reference_linear.float8_mm(*args[:-1], torch.float32)
    torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=0.25)


def _two_parts(kind: str, m: int, device: str) -> None:
    """Rows of bfloat16 in two parts of float8; two programs share a tile, and the second has fewer blocks of k. This small the
    kernel is not chosen."""
    x, (weight, scale, _) = Rng(m).tensor(m, 640).bfloat16(), stored(Rng(kind).tensor(200, 640), kind, torch.bfloat16)
    rows, *parts = Copy((x, weight, scale), device).args
    out = rows.new_empty(m, 200)
    tile = float8_tile(64 if m <= 64 else 128, 1, False, 2, PARTS)
    assert hopper_float8.product(rows, Weight(*parts, None, None), None, out, tile)
    torch.testing.assert_close(out.cpu().double(), exact(x, weight, scale), rtol=2**-7, atol=0.25)


def _norm_linear(m: int, device: str) -> None:
    """A norm divided among two products, and its scale in SiLU: several programs share a tile; odd rows, columns and sums."""
    rng = Rng(m)
    x, w0, r, g, w1 = (rng.tensor(*shape).half() for shape in ((m, 1088), (320, 1088), (m, 320), (320,), (50, 320)))
    x, w0, r, g, w1 = args = Copy((x, w0 * 0.05, r, g, w1), device).args
    y, z, squares = norm_linear.add_skinny_mm(x, w0, r, g)
    out = norm_linear.scaled_skinny_mm(z, w1, None, squares, 1e-5)
    act = norm_linear.scaled_silu_mul(z[:, :100], z[:, 100:200], squares, 320, 1e-5)
    x, w0, r, g, w1 = (a.cpu() for a in args)
    z, squares = z.cpu(), squares.cpu()
    wanted = reference_linear.add_skinny_mm(x.double(), w0.double(), r.double(), g.double())[0]
    torch.testing.assert_close(y.cpu().double(), wanted, rtol=2**-9, atol=2e-3)  # rounded twice
    torch.testing.assert_close(z, (y.cpu().float() * g.float()).half(), rtol=0, atol=0)
    torch.testing.assert_close(squares.sum(1), y.cpu().float().square().sum(1), rtol=1e-5, atol=0)
    wanted = reference_linear.scaled_skinny_mm(z.double(), w1.double(), None, squares, 1e-5)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=2**-10, atol=1e-3)
    wanted = reference_linear.scaled_silu_mul(z[:, :100].double(), z[:, 100:200].double(), squares, 320, 1e-5)
    torch.testing.assert_close(act.cpu().double(), wanted, rtol=2**-10, atol=1e-3)


def _rounding(op: str, columns: int, device: str) -> None:
    """Odd rows, a part of the last program's columns, and rows farther apart than they are long."""
    rng, f32 = Rng(op), torch.float32
    x, y = rng.tensor(5, 2 * 1408).half().chunk(2, 1)
    norm = ((rng.tensor(1408) * 0.1 + 1).half(), 1e-5, 1)
    args = (x, *((y,) if op[0] in "ag" else ()), *(("silu",) if op[0] == "g" else norm if "norm" in op else ()))
    args = (*args, columns, f32, f32, 1e-30, 0.0)
    got, want = getattr(rounding, op)(*Copy(args, device).args), getattr(reference_rounding, op)(*args)
    for ours, other in zip(got, want, strict=True):
        # A last bit may decide which of two numbers of float8 is nearest.
        torch.testing.assert_close(ours.cpu().float(), other.float(), rtol=0.13, atol=2**-8)


def _dequantize(kind: str, device: str) -> None:
    weight, *scales = stored(Rng(kind).tensor(70, 1280), kind, torch.bfloat16)
    weight = weight.view(torch.uint8) if weight.dtype == torch.int8 and weight.shape[1] < 1280 else weight
    args = (weight, *scales, *[None] * (3 - len(scales)), torch.float32)
    got, want = dequantize.dequantize(*Copy(args, device).args), reference_linear.dequantize(*args)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


def _many_rows(device: str) -> None:
    rng = Rng("many rows")
    args = rng.tensor(257, 192).half(), (rng.tensor(130, 192) * 0.05).half(), rng.tensor(130).half()
    got = invariant_linear.skinny_mm(*Copy(args, device).args, invariant=True)
    wanted = torch.nn.functional.linear(*(a.double() for a in args))
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=2**-10, atol=1e-3)


def _invariant(op: str, device: str) -> None:
    """Odd sizes: several blocks of a row, of rows and of columns, none of them full."""
    rng = Rng(op)
    args: tuple[Any, ...] = {
        "batched_mm": (rng.tensor(3, 70, 72), rng.tensor(3, 72, 130), rng.tensor(130)),
        "row_sum": (rng.tensor(5, 1300),),
        "rms_norm": (rng.tensor(5, 1300), rng.tensor(1300), 1e-5, False),
        "add_rms_norm": (rng.tensor(5, 1300), rng.tensor(5, 1300), rng.tensor(1300), 1e-5, False),
    }[op]
    results = [getattr(invariant_linear, op)(*Copy(args, device).args), getattr(reference_invariant, op)(*args)]
    got, want = ([t.cpu() for t in (result if isinstance(result, tuple) else (result,))] for result in results)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def _moe(tokens: int, device: str) -> None:
    """gpt-oss's form of experts: dropped ids, odd sizes, several tiles of an expert."""
    args = moe_call(MOE_FORMS["gpt-oss"], tokens, 3, 7, 72, 56, torch.float16, dropped=0.2)
    got = experts.moe_experts(*Copy(args, device).args).cpu()
    torch.testing.assert_close(got.double(), moe_exact(args), rtol=2e-3, atol=2e-3)


def _topk_logits(device: str) -> None:
    """Rows of one part, and of three."""
    for vocab, k in ((50, 4), (2 * topk.PART + 100, 7)):
        logits = Rng("topk_logits").tensor(3, vocab)
        got = topk.topk_logits(*Copy((logits, k, "log_softmax", torch.float32), device).args)
        for one, other in zip(got, reference_topk.topk_logits(logits, k, "log_softmax", torch.float32), strict=True):
            torch.testing.assert_close(one.cpu(), other)


def _ranged_moe(device: str) -> None:
    """gpt-oss as it is published: programs with several tiles, of two experts, and a k that chunks do not divide."""
    args = stored_moe_call(MOE_PUBLISHED, "MXFP4", 5, 3, 7, 192, 2240, torch.bfloat16, dropped=0.2)
    got = experts.moe_experts(*Copy(args, device).args).cpu()
    torch.testing.assert_close(got.double(), moe_exact(args), rtol=2e-2, atol=2e-2)


def _hopper_moe(tokens: int, device: str) -> None:
    """gpt-oss as it is published: tiles of 8 and 16 rows, several of an expert, columns and a k that blocks do not divide."""
    args = stored_moe_call(MOE_PUBLISHED, "MXFP4", tokens, 3, 7, 192, 320, torch.bfloat16, dropped=0.2)
    got = experts.moe_experts(*Copy(args, device).args).cpu()
    torch.testing.assert_close(got.double(), moe_exact(args), rtol=2e-2, atol=2e-2)


def _route_experts(device: str) -> None:
    logits, bias = Rng("route_experts").tensor(5, 24), Rng("bias").tensor(24)
    for args in ((None, 3, "softmax", 1, 1, True, 1.0), (bias, 4, "sigmoid", 4, 2, True, 2.5)):
        got = route.route_experts(*Copy((logits, *args), device).args)
        wanted = reference_moe.route_experts(logits, *args)
        assert torch.equal(got[0].cpu(), wanted[0])
        torch.testing.assert_close(got[1].cpu(), wanted[1], rtol=1e-5, atol=0)


def _collectives(device: str) -> None:
    """All ranks in one launch: a sum, one with a residual, and a maximum; sums one-shot and two-shot in turn, each in twice as
    many calls as there are buffers."""
    ranks, rng = of_one_process(4, torch.device(device), 1 << 14, 1_000_000), Rng("collectives")
    for call, columns in enumerate(2 * (48, 4096, 272, 16, 4096, 1040)):
        two_shot = call % 2 == 1
        parts, residual, weight = rng.tensor(4, 1, columns), rng.tensor(1, columns), rng.tensor(columns)
        parts, residual, weight = (t.bfloat16() for t in (parts, residual, weight))
        keys = torch.randint(-(2**62), 2**62, (4, 33))
        x, same, g, k = (t.to(device) for t in (parts, residual.expand(4, 1, -1).contiguous(), weight, keys))
        out, y, z, largest = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x), torch.empty_like(k)
        squares = torch.empty(4, 1, columns // 16, device=device)
        push.push(ranks, x, out, "sum", local=4, two_shot=two_shot)
        push.push(ranks, x, y, "sum", (same, g, z, squares, columns), local=4, two_shot=not two_shot)
        push.push(ranks, k, largest, "max", local=4)
        total = reference_collectives.sum_of(list(parts))
        for rank in range(4):
            for got, wanted in zip((y, z, squares), reference_collectives.add_to(total, residual, weight), strict=True):
                torch.testing.assert_close(got[rank].cpu(), wanted, rtol=1e-5, atol=0)
            assert torch.equal(out[rank].cpu(), total)
            assert torch.equal(largest[rank].cpu(), keys.amax(0))


def cases() -> list[Case]:
    """Every kernel of the package."""
    found = [Case(op, kernels, functools.partial(_random, op)) for op, kernels in KERNELS.items()]
    for op in ("sample_tokens", "accept_sampled"):
        found.append(Case(f"{op}, long rows", KERNELS[op], functools.partial(_long_rows, op)))
    for kind in ROW_KINDS:
        kernel = "tree" if kind in ("tree", "target_only") else "chain"
        run = functools.partial(_accept_logits, kind)
        found.append(Case(f"accept_sampled_logits, {kind}", (f"accept_logits_{kernel}_kernel",), run))
    for op, kernels in (("sample_logits", ()), ("sampling_probs", ("sampling_probs_kernel",))):
        found.append(Case(op, ("sampling_support_kernel", *kernels), functools.partial(_sampling, op)))
    for dtype, scale, normed in ((torch.float32, 1.0, False), (FP8, 0.25, False), (torch.float32, 1.0, True)):
        run = functools.partial(_rope_append_kv, dtype, scale, normed)
        name = f"rope_append_kv, {str(dtype).removeprefix('torch.')}{', norms' if normed else ''}"
        found.append(Case(name, ("rope_append_kv_kernel",), run, interpreted=dtype != FP8))
    for m, n, k in ((4, 50, 1088), (16, 40, 1024), (31, 130, 832), (64, 130, 704)):
        found.append(Case(f"skinny_mm, {m} rows", ("skinny_mm_kernel",), functools.partial(_skinny_mm, m, n, k)))
    for kind, m in (("int4-128", 31), ("int4-128", 127), ("nvfp4", 63), ("mxfp4", 64), ("mxfp4", 127)):
        run = functools.partial(_hopper_mm, kind, m, 1344 if kind == "mxfp4" else 1280)  # 10 blocks of k and a half, or 10
        found.append(Case(f"skinny_mm on Hopper, {kind}, {m} rows", ("hopper_mm_kernel",), run, interpreted=False))
    for kind, m in (("row", 7), ("block", 31), ("row", 127), ("block", 128)):
        run = functools.partial(_hopper_float8, kind, m)
        found.append(Case(f"float8_mm, {kind}, {m} rows", ("hopper_float8_kernel",), run, interpreted=False))
    for kind, m in (("row", 40), ("block", 127)):
        run, names = functools.partial(_two_parts, kind, m), ("row_parts_kernel", "hopper_float8_kernel")
        found.append(Case(f"skinny_mm in two parts, {kind}, {m} rows", names, run, interpreted=False))
    for m in (4, 15, 31):
        names = ("add_skinny_mm_kernel", "scaled_skinny_mm_kernel", "scaled_silu_mul_kernel")
        found.append(Case(f"norm_linear, {m} rows", names, functools.partial(_norm_linear, m)))
    for op, columns in itertools.product(
        ("round_rows", "gated_round_rows", "norm_round_rows", "add_norm_round_rows"), (128, 1408)
    ):
        run = functools.partial(_rounding, op, columns)
        found.append(Case(f"{op}, {columns} columns", ("round_rows_kernel",), run, interpreted=False))
    for kind in ("row", "block", "int8", "int4-128", "nvfp4", "mxfp4"):
        found.append(Case(f"dequantize, {kind}", ("dequantize_kernel",), functools.partial(_dequantize, kind)))
    found.append(Case("skinny_mm of many rows, invariant", ("many_rows_kernel",), _many_rows))
    for op in ("batched_mm", "row_sum", "rms_norm", "add_rms_norm"):
        found.append(Case(op, (f"{op.removeprefix('add_')}_kernel",), functools.partial(_invariant, op)))
    found.append(Case("route_experts", ("route_experts_kernel",), _route_experts))
    found.append(Case("topk_logits", ("topk_logits_kernel",), _topk_logits))
    grouped = ("sort_pairs_kernel", "grouped_gate_up_kernel", "grouped_down_kernel", "weighted_sum_kernel")
    found.append(Case("moe_experts, 70 tokens", grouped, functools.partial(_moe, 70)))
    for tokens in (5, 20):
        few = ("few_gate_up_kernel", "few_down_kernel")
        found.append(Case(f"moe_experts, {tokens} tokens", few, functools.partial(_moe, tokens)))
    for tokens in (9, 40):
        names = ("sorted_rows_kernel", "hopper_mxfp4_kernel", "activated_rows_kernel", "summed_rows_kernel")
        run = functools.partial(_hopper_moe, tokens)
        found.append(Case(f"moe_experts, MXFP4 as float8, {tokens} tokens", names, run, interpreted=False))
    found.append(Case("moe_experts, MXFP4", ("ranged_gate_up_kernel", "few_down_kernel"), _ranged_moe, interpreted=False))
    found.append(
        Case("all_reduce of 4 ranks", ("sum_kernel", "two_shot_kernel", "max_kernel"), _collectives, interpreted=False)
    )
    found += [Case(*case, interpreted=False) for case in sanitize_attention.cases()]
    return found


def package_kernels() -> set[str]:
    return {variant.kernel.fn.__name__ for variant in ahead.variants()}


@contextlib.contextmanager
def launches(device: str) -> Iterator[set[str]]:
    """Inside, the names of kernels are added to the set as they are launched."""
    launched: set[str] = set()
    if device == "cuda":

        def note(metadata: Any) -> None:
            launched.add(metadata.get()["name"])

        hooks = triton.knobs.runtime.launch_enter_hook
        hooks.add(note)
        try:
            yield launched
        finally:
            hooks.remove(note)
        return
    run = GridExecutor.__call__

    def noted(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launched.add(self.fn.__name__)
        run(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", noted):
        yield launched


def run_cases(chosen: Iterable[Case], device: str) -> int:
    """Prints a line for each case; how many failed."""
    failed = 0
    for case in chosen:
        if device == "cpu" and not case.interpreted:
            print(case.name, "skipped: needs a GPU", flush=True)
            continue
        torch.manual_seed(0)
        try:
            with launches(device) as launched:
                case.run(device)
                if device == "cuda":
                    torch.cuda.synchronize()
            assert launched == set(case.kernels), f"launched {sorted(launched)}, not {sorted(case.kernels)}"
        except Exception as error:  # one failure must not hide the others'
            failed += 1
            print(case.name, "FAILED", f"{type(error).__name__}: {error}", flush=True)
        else:
            print(case.name, "ok", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run the cases whose names contain one of these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    found = cases()
    if unknown := [name for name in options.names if not any(name in c.name for c in found)]:
        raise SystemExit(f"no case has one of {unknown} in its name")
    chosen = [c for c in found if not options.names or any(name in c.name for name in options.names)]
    failed = run_cases(chosen, options.device)
    if failed:
        raise SystemExit(f"{failed} of {len(chosen)} cases failed")


if __name__ == "__main__":
    main()
