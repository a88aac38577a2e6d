"""Mixtures of experts in Triton's interpreter, against the reference: routers in every form, products in every layout.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.moe import experts, few, grouped, route
from spec_ops.backends.triton.runtime.launch import recorded
from spec_ops.ops.reference import moe as reference
from tests.helpers.mixtures import FORMS, call, exact, stored_call
from tests.helpers.op_cases import sampled


def check_close(got: torch.Tensor, args: tuple, rounding: float) -> None:
    want = exact(args)
    assert got.dtype == args[0].dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("seed", range(12))
def test_routers(seed):
    args = sampled("route_experts", seed, None)
    ids, weights = route.route_experts(*args)
    wanted, wanted_weights = reference.route_experts(*args)
    assert torch.equal(ids, wanted), args
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[weights.dtype]
    torch.testing.assert_close(weights, wanted_weights, rtol=rounding, atol=1e-7)
    assert ids.is_contiguous()
    assert weights.is_contiguous()


def test_routers_with_ties_and_nan():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [1.0, 2.0, 2.0, 1.0, 2.0, 0.0],
            [nan, -1.0, nan, -inf, 0.0, nan],
            [0.0] * 6,
            [-1.0, -0.0, 0.0, -0.0, 0.0, -1.5],
            [-inf, -3e38, nan, inf, -inf, inf],
        ]
    )
    for args in (("softmax", 1, 1), ("sigmoid", 3, 2), ("softmax", 2, 1), ("none", 3, 2)):
        for bias in (None, torch.zeros(6), torch.tensor([inf, -inf, 0.0, inf, -inf, -inf])):
            got = route.route_experts(logits, bias, 3, *args, True, 1.0)
            want = reference.route_experts(logits, bias, 3, *args, True, 1.0)
            assert torch.equal(got[0], want[0])
            torch.testing.assert_close(got[1], want[1], equal_nan=True)


@pytest.mark.parametrize("name", FORMS)
def test_grouped_products(name):
    """Odd sizes, dropped ids, several tiles of an expert."""
    for args in (
        call(FORMS[name], 5, 3, 7, 40, 27, dropped=0.3),
        call(FORMS[name], 40, 2, 3, 33, 20, torch.float16, routing="zipf"),
    ):
        check_close(grouped.grouped_experts(*args), args, 2e-3 if args[0].dtype == torch.float16 else 2e-6)


def test_grouped_products_of_many_rows():
    """Tiles of 64 and 128 rows."""
    for tokens in (70, 300):
        args = call(FORMS["Qwen3-MoE"], tokens, 2, 2, 24, 16, torch.float16, routing="identical")
        assert grouped.choose(2 * tokens, 2, torch.float16).block_m == (64 if tokens == 70 else 128)
        check_close(grouped.grouped_experts(*args), args, 2e-3)


SIDE_BY_SIDE = [name for name, form in FORMS.items() if form.transposed]  # rows of the weights


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_rows_side_by_side(name):
    """Several blocks of columns, the last of them odd; tiles of 16 to 128 rows; ids that are not owned."""
    for tokens, inner, dtype in (
        (5, 75, torch.float16),
        (9, 75, torch.float32),
        (70, 101, torch.float16),
        (270, 65, torch.float16),
    ):
        args = call(FORMS[name], tokens, 2, 3, 72, inner, dtype, routing="identical" if tokens > 9 else "zipf", dropped=0.2)
        with recorded() as launches:
            grouped.grouped_experts(*args)
        assert [made.arguments["ADJACENT"] for made in launches[1:3]] == [True, True]
        check_close(grouped.grouped_experts(*args), args, 3e-3 if dtype == torch.float16 else 4e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("limit", [None, 0.3])
def test_alternating_gates_and_ups(bias, limit):
    """They differ in what is clamped and in the activation, so that one in the other's place is noticed; a strided weight."""
    args = list(call(FORMS["gpt-oss"]._replace(limit=limit, biases=bias), 20, 2, 5, 40, 37, torch.float16, dropped=0.3))
    check_close(grouped.grouped_experts(*args), tuple(args), 3e-3)
    args[3] = torch.cat([args[3], torch.full_like(args[3], float("nan"))], 2)[..., : args[3].shape[2]]
    assert not args[3].is_contiguous()
    check_close(grouped.grouped_experts(*args), tuple(args), 3e-3)


def test_rows_side_by_side_are_told_by_strides():
    """Not by whether the call has its weights transposed."""
    args = list(call(FORMS["gpt-oss"], 20, 2, 5, 40, 32, torch.float16))
    for at in (3, 4):
        args[at] = args[at].transpose(1, 2).contiguous().transpose(1, 2)
    with recorded() as launches:
        grouped.grouped_experts(*args)
    assert [made.arguments["ADJACENT"] for made in launches[1:3]] == [False, False]
    check_close(grouped.grouped_experts(*args), tuple(args), 3e-3)


def test_stored_rows_side_by_side_have_their_scales():
    args = list(stored_call(FORMS["Qwen3-MoE"], "row", 20, 2, 3, 64, 32, dtype=torch.float16))
    for at in (3, 4):
        args[at] = args[at].transpose(1, 2).contiguous().transpose(1, 2)
    with recorded() as launches:
        grouped.grouped_experts(*args)
    assert [made.arguments["ADJACENT"] for made in launches[1:3]] == [False, False]
    check_close(grouped.grouped_experts(*args), tuple(args), 3e-3)


def test_grouped_products_in_chunks(monkeypatch):
    """64 tokens at a time, the last ones fewer."""
    args = call(FORMS["gpt-oss"], 150, 2, 4, 24, 16, dropped=0.2)
    monkeypatch.setattr(grouped, "TEMPORARY", 1)
    with recorded() as launches:
        grouped.grouped_experts(*args)
    assert [launch.arguments["out"].shape[0] for launch in launches[3::4]] == [64, 64, 22]
    check_close(grouped.grouped_experts(*args), args, 2e-6)


@pytest.mark.parametrize("seed", range(12))
def test_grouped_products_in_every_layout(seed):
    """opcheck's samples: strided tensors, no tokens, no experts of a token."""
    args = sampled("moe_experts", seed, None)
    if args[0].dtype == torch.bfloat16:
        args = tuple(a.half() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args)
    check_close(grouped.grouped_experts(*args), args, 4e-3 if args[0].dtype == torch.float16 else 1e-5)


def test_chunks_hold_at_least_64_tokens():
    random.seed(0)
    for _ in range(20):
        k, hidden, inner = random.randint(1, 16), random.randint(1, 8192), random.randint(1, 8192)
        tokens = grouped.chunk_tokens(k, hidden, inner, torch.bfloat16)
        assert tokens == 64 or tokens * k * (4 * hidden + 2 * inner) <= grouped.TEMPORARY


def few_config(args: tuple, sms: int = 4, arch: int = 90) -> tuple[few.Config, few.Config]:
    (tokens, hidden), k, form = args[0].shape, args[1].shape[1], args[8:11]
    inner = args[4].shape[1 if form[2] else 2]
    return few.choose(few.Sizes(tokens, k, args[3].shape[0], hidden, inner, *form), sms, arch)


@pytest.mark.parametrize("tokens", [1, 7, 16, 23, 64])
@pytest.mark.parametrize("name", FORMS)
def test_few_tokens(name, tokens):
    """Columns that no block divides, inner dimensions that `BLOCK_K` does not divide, experts that nobody goes to."""
    hidden, inner = (136, 72) if tokens in (1, 23) else (320, 128)
    args = call(FORMS[name], tokens, 3, 9, hidden, inner, torch.float16, routing="zipf", dropped=0.2)
    assert few.supports(args[0], args[1], args[3], args[4], inner)
    check_close(few.few_experts(*args), args, 2e-3)


@pytest.mark.parametrize("tokens", [5, 40])
def test_shares_of_the_inner_dimension(tokens):
    """One program adds up all experts, or some, or not even one; more programs than blocks."""
    args = call(FORMS["gpt-oss" if tokens == 40 else "Qwen3-MoE"], tokens, 2, 3, 40, 200, torch.float16)
    first, second = few_config(args)
    for splits in (1, 2, 7):
        got = few.few_experts(*args, configs=(first, replace(second, splits=splits)))
        check_close(got, args, 2e-3)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss"])
def test_a_token_does_not_depend_on_the_others(name):
    """Bit for bit, also where they go to other experts or hold NaN."""
    args = call(FORMS[name], 12, 3, 8, 128, 64, torch.float16)
    whole = few.few_experts(*args)
    others = [args[0].clone(), args[1].roll(1, 1).flip(0), args[2].clone(), *args[3:]]
    others[0][1:], others[1][0], others[2][0] = float("nan"), args[1][0], args[2][0]
    got = few.few_experts(*others)
    assert torch.equal(got[0], whole[0])
    assert got[1:].isnan().all()


def test_tokens_without_experts():
    args = call(FORMS["gpt-oss"], 6, 2, 4, 64, 64, torch.float16)
    ids = args[1].clone()
    ids[::2] = -1
    got = few.few_experts(args[0], ids, *args[2:])
    assert (got[::2] == 0).all()
    check_close(got, (args[0], ids, *args[2:]), 2e-3)
    padded = args[0].clone()
    padded[::2] = float("nan")  # as rows of padding may be
    assert torch.equal(few.few_experts(padded, ids, *args[2:]), got)
    assert (few.few_experts(padded, torch.full_like(ids, 99), *args[2:]) == 0).all()


def test_ids_whose_last_32_bits_are_an_experts():
    """They are no expert's."""
    args = call(FORMS["gpt-oss"], 5, 2, 4, 64, 64, torch.float16)
    ids = args[1].to(torch.int64)
    ids[:4, 1] = torch.tensor([-(2**63), -(2**32), 2**32 + 1, -(2**32) + 2])
    got = few.few_experts(args[0], ids, *args[2:])
    assert torch.equal(got, few.few_experts(args[0], torch.where((ids < 0) | (ids > 3), -1, ids), *args[2:]))


def test_an_expert_that_a_token_goes_to_twice():
    """Its weights add up, for the bias of its result too."""
    args = call(FORMS["gpt-oss"], 6, 2, 4, 64, 64, torch.float16)
    ids = args[1].clone()
    ids[::2, 1] = ids[::2, 0]
    args = (args[0], ids, *args[2:])
    check_close(few.few_experts(*args), args, 2e-3)
    check_close(grouped.grouped_experts(*args), args, 2e-3)


def test_strided_arguments():
    """A slice of a wider tensor, experts and rows further apart than their sizes."""
    x, ids, weights, gate_up, down, *rest = call(FORMS["Qwen3-MoE"], 6, 2, 4, 64, 64, torch.float16)

    def wider(t: torch.Tensor, *extra: int) -> torch.Tensor:
        padded = torch.full([size + more for size, more in zip(t.shape, extra, strict=True)], float("nan"), dtype=t.dtype)
        padded[tuple(slice(size) for size in t.shape)] = t
        return padded[tuple(slice(size) for size in t.shape)]

    for columns in (8, 3):  # TMA cannot read the second one's rows: `x` is copied
        args = (wider(x, 2, columns), ids.t().contiguous().t(), weights.repeat(1, 2)[:, :2], wider(gate_up, 0, 1, 8),
                wider(down, 1, 1, 16), *rest)  # fmt: skip
        assert few.supports(args[0], args[1], args[3], args[4], 64)
        check_close(few.few_experts(*args), args, 2e-3)


def test_which_kernels_take_a_call():
    def taken(tokens: int, hidden: int, inner: int, dtype: torch.dtype, arch: int = 90, **changes) -> bool:
        args = call(FORMS["Qwen3-MoE"], tokens, 2, 4, hidden, inner, dtype)
        gate_up, down = changes.get("gate_up", args[3]), changes.get("down", args[4])
        return few.supports(args[0], changes.get("ids", args[1]), gate_up, down, inner, arch)

    assert taken(64, 64, 8, torch.bfloat16)
    assert not taken(65, 64, 8, torch.bfloat16)
    assert not taken(0, 64, 8, torch.bfloat16)
    assert not taken(4, 60, 8, torch.float16)
    assert not taken(4, 64, 12, torch.float16)
    assert not taken(4, 64, 8, torch.float32)
    assert not taken(4, 64, 8, torch.float16, arch=89)
    assert not taken(4, 64, 8, torch.float16, ids=torch.zeros(4, 0, dtype=torch.int64))
    assert not taken(4, 64, 8, torch.float16, gate_up=torch.zeros(4, 64, 16).half().transpose(1, 2))
    assert not taken(4, 64, 8, torch.float16, down=torch.zeros(4, 64, 9).half()[..., :8])


def test_the_op_takes_either():
    for tokens, kernels in (
        (3, ["few_gate_up_kernel", "few_down_kernel"]),
        (65, ["sort_pairs_kernel", "grouped_gate_up_kernel"]),
    ):
        args = call(FORMS["Qwen3-MoE"], tokens, 2, 4, 64, 64, torch.float16)
        with recorded() as launches:
            experts.moe_experts(*args)
        assert [launch.kernel.__name__ for launch in launches][: len(kernels)] == kernels
        check_close(experts.moe_experts(*args), args, 2e-3)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("tokens", [16, 70])
def test_no_weights_are_copied(tokens):
    """What is made grows with pairs times their rows, never with pairs times an expert's weights."""
    args = call(FORMS["Qwen3-MoE"], tokens, 2, 4, 64, 72, torch.float16)
    with recorded(), Largest() as largest:  # the launches' own tensors, not the interpreter's
        experts.moe_experts(*args)
    rows = 2 * tokens if tokens == 70 else 4 * 16  # pairs; with few tokens those of each touched expert
    assert 0 < largest.elements <= rows * 72
