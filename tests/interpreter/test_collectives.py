"""Sums and maxima over ranks in Triton's interpreter: all ranks in one launch, in any order of their programs.

float16, since the interpreter truncates to bfloat16.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from spec_ops.backends import push as workspaces
from spec_ops.backends.push import PushWorkspace, of_one_process
from spec_ops.ops.reference import collectives as reference

pytest.importorskip("triton", reason="triton comes for Linux only")

import triton.language as tl

from spec_ops.backends.triton.collectives import push
from tests.interpreter.resident import resident

CPU = torch.device("cpu")
LOOKS = 1000


def read(slots: Any, mask: Any) -> Any:
    return tl.load(slots, mask=mask, other=1, volatile=True)


class Links:
    """Between the ranks: what they send is under way until it arrives, 16 bytes at a time and in any order."""

    def __init__(self, seed: int) -> None:
        self.order = random.Random(seed)
        self.under_way: list[tuple[int, bytes]] = []

    def send(self, place: Any, *words_and_mask: Any) -> None:
        operands = np.broadcast_arrays(place.handle.data, *(operand.handle.data for operand in words_and_mask))
        for at, *words, there in zip(*(operand.flat for operand in operands), strict=True):
            if there:
                self.under_way.append((int(at), b"".join(word.tobytes() for word in words)))

    def deliver(self) -> None:
        some, self.under_way = self.under_way, []
        for at, vector in some:
            if self.order.random() < 0.5:
                ctypes.memmove(at, vector, len(vector))
            else:
                self.under_way.append((at, vector))

    def read_all(self, slots: Any, mask: Any) -> Any:
        while self.under_way:
            self.deliver()
        return read(slots, mask)


@contextlib.contextmanager
def together(kernel: Any, seed: int) -> Iterator[Links]:
    """What the interpreter lacks: assembly, and programs that run at the same time."""
    links = Links(seed)
    with resident(kernel, seed) as switch:

        def read_again(slots: Any, mask: Any) -> Any:
            switch()
            links.deliver()
            return read(slots, mask)

        patches = {"send": links.send, "send_long": links.send, "read_again": read_again}
        with mock.patch.multiple(push, **patches):
            yield links


def ranks_of(size: int, most: int = 1 << 14, looks: int = LOOKS) -> PushWorkspace:
    return of_one_process(size, CPU, most, looks)


def run(
    ranks: PushWorkspace,
    parts: torch.Tensor,
    reduce: str = "sum",
    added: Any = None,
    seed: int = 0,
    two_shot: bool = False,
) -> torch.Tensor:
    """Of each rank, what it has afterwards; `parts[rank]` is what it gives."""
    out = torch.empty_like(parts)
    kernel = push.max_kernel if reduce == "max" else push.two_shot_kernel if two_shot else push.sum_kernel
    with together(kernel, seed) as links:
        push.push(ranks, parts, out, reduce, added, warps=1, local=ranks.size, two_shot=two_shot)
    assert ranks.failed.item() == 0
    assert not links.under_way, "a rank does not wait for all that it is sent"
    buffers, turn = ranks.memory.view(ranks.size, 3, -1), ranks.state[0, 0].item()
    assert not buffers[:, [turn, (turn + 1) % 3]].any(), "something is left of earlier calls"
    return out


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """NaN has many."""
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0).view(torch.int16), wanted.nan_to_num(7.0).view(torch.int16))


def parts_of(size: int, m: int, n: int, seed: int = 0) -> torch.Tensor:
    """With zeros of both signs alone, in pairs and on all ranks, infinities and NaN, and what another order would lose."""
    g = torch.Generator().manual_seed(seed)
    parts = torch.randn(size, m, n, generator=g).half()
    for value in (0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        parts[torch.rand(parts.shape, generator=g) < 0.05] = value
    for i, value in enumerate((0.0, -0.0)):
        parts[:, :, 4 * i : 4 * i + 3] = value
    parts[size - 1, :, 8:16] = 0.0
    parts[:, :, 14:16] = 0.0
    for some, value in ((slice(0, 1), 2.0**15), (slice(1, 2), -(2.0**15)), (slice(2, size), 2.0**-24)):
        parts[some, :, 14:16] = value  # the last after those of the first two: beside one of them it would vanish
    return parts


SHOTS = pytest.mark.parametrize("two_shot", [False, True], ids=["one-shot", "two-shot"])


@SHOTS
@pytest.mark.parametrize(("size", "m", "n"), [(2, 1, 16), (2, 3, 264), (4, 5, 128), (8, 1, 520)])
def test_sum_of_ranks(size, m, n, two_shot):
    """In the order of the ranks, rounded once, and the same bits on all; any order of programs.

    Shares of two shots: the last rank's is empty in the first and the last case, and a part of one in the second.
    """
    ranks = ranks_of(size)
    for seed in range(3):
        parts = parts_of(size, m, n, seed)
        for got in run(ranks, parts, seed=seed, two_shot=two_shot):
            same_bits(got, reference.sum_of(list(parts)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_shares_of_any_number_of_vectors(size):
    """Less than two vectors a rank, tiles that are full, and a sum that ends inside a tile."""
    ranks = ranks_of(size)
    for n in (8, 24, 256 * size, 256 * size + 8, 512 * size - 8):
        parts = parts_of(size, 1, 16 * (n // 16 + 1))[..., :n].contiguous()
        for got in run(ranks, parts, two_shot=True):
            same_bits(got, reference.sum_of(list(parts)))


def test_bytes_decide_how_a_sum_is_computed():
    """A slot has room for two shares: more than one for a rank's whole part."""
    ranks = of_one_process(4, CPU, 512, LOOKS, one_shot=256)
    launched: list[Any] = []
    for n in (128, 136, 512):
        parts = parts_of(4, 1, n)
        with mock.patch.object(push, "launch", lambda kernel, *args, **kwargs: launched.append(kernel)):
            push.push(ranks, parts, torch.empty_like(parts), "sum", local=4)
        for got in run(ranks, parts, two_shot=launched[-1] is push.two_shot_kernel):
            same_bits(got, reference.sum_of(list(parts)))
    assert launched == [push.sum_kernel, push.two_shot_kernel, push.two_shot_kernel]
    with pytest.raises(ValueError, match="`x` must be of at most 1024 bytes, got 1040"):
        push.push(ranks, torch.ones(4, 1, 520).half(), torch.ones(4, 1, 520).half(), "sum", local=4)
    with pytest.raises(ValueError, match="`x` must be of at most 512 bytes in one shot, got 528"):
        push.push(ranks, torch.ones(4, 1, 264).half(), torch.ones(4, 1, 264).half(), "sum", local=4, two_shot=False)


@pytest.mark.parametrize("shape", [(1, 8), (16, 1), (8, 5), (2, 4, 3, 1)])
def test_sum_of_any_shape(shape):
    """A word has two numbers, a row need not, and a tensor may begin in the middle of one."""
    parts = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).half()
    moved = parts.new_empty(parts.numel() + 1)[1:].view(parts.shape).copy_(parts)
    for given in (parts, moved):
        for got in run(ranks_of(2), given):
            same_bits(got, reference.sum_of(list(parts)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_without_the_others(size):
    """It gets its own part from each, in calls of any sizes in turn.

    Of a sum in two shots it gets its own share from each, which adds up all of its shares. It waits for nobody where these
    do not come out even, as those of 136 columns.
    """
    with mock.patch.dict(workspaces._workspaces):
        elsewhere = workspaces.without_others(f"alone of {size}", size, torch.device("meta"))
        ranks = workspaces.without_others(f"alone of {size}", size, CPU)
        assert workspaces.workspace_of("sum", f"alone of {size}", CPU) is ranks
        assert workspaces.workspace_of("sum", f"alone of {size}", torch.device("meta")) is elsewhere
        assert elsewhere.addresses.is_meta
    ranks = dataclasses.replace(ranks, looks=LOOKS)
    for call, columns in enumerate((528, 16, 136, 272, 528)):
        part = parts_of(1, 1, columns, call)
        out, largest = torch.empty_like(part), torch.empty(1, 3, dtype=torch.int64)
        with together(push.sum_kernel, call):
            push.push(ranks, part, out, "sum", warps=1)
        same_bits(out[0], reference.sum_of([part[0]] * size))
        with together(push.two_shot_kernel, call):
            push.push(ranks, part, out, "sum", warps=1, two_shot=True)
        share = 16 * -(-columns // (16 * size))
        padded = torch.zeros(1, size * share).half()
        padded[:, :columns] = part[0]
        wanted = reference.sum_of(list(padded.view(size, 1, share))).repeat(1, size)
        same_bits(out[0], wanted[:, :columns])
        keys = torch.tensor([[3, -5, 2**40 + call]])
        with together(push.max_kernel, call):
            push.push(ranks, keys, largest, "max", warps=1)
        assert torch.equal(largest, keys)
    assert ranks.failed.item() == 0


def test_calls_of_any_sizes_in_turn():
    """Three buffers in rotation: what a longer call left must be zero before a shorter one's successor reads it."""
    ranks = ranks_of(2)
    for call, columns in enumerate((1040, 16, 16, 1040, 272, 1040, 1040, 16, 528, 16)):
        if call % 4 == 3:
            keys = torch.randint(-(2**62), 2**62, (2, columns // 8), generator=torch.Generator().manual_seed(call))
            for got in run(ranks, keys, "max", seed=call):
                assert torch.equal(got, keys.max(0).values)
        parts = parts_of(2, 1, columns, call)
        for got in run(ranks, parts, seed=call, two_shot=call % 3 == 2):
            same_bits(got, reference.sum_of(list(parts)))


def test_maximum_of_keys():
    """Of all int64: a half of a key may be zero, and a key the least there is."""
    least, most = -(2**63), 2**63 - 1
    mine = [0, -1, least, most, 1 << 32, 5, least, -(1 << 32), 0xFFFFFFFF, least]
    others = [0, 0, least, 0, 1, 5 << 32, most, -1, 1 << 32, least + 1]
    keys = torch.tensor([mine, others, [least] * 10, [least] * 10])
    for got in run(ranks_of(4), keys, "max"):
        assert torch.equal(got, keys.max(0).values)


@SHOTS
@pytest.mark.parametrize(("size", "m", "n"), [(2, 3, 272), (4, 1, 1040), (8, 7, 48)])
def test_sum_with_a_residual(size, m, n, two_shot):
    """Every rank has the same residual; what is normalized afterwards comes with the squares of its rows."""
    parts = parts_of(size, m, n).nan_to_num(1.0, 2.0, 3.0)
    g = torch.Generator().manual_seed(n)
    residual, weight = torch.randn(m, n, generator=g).half(), torch.randn(n, generator=g).half()
    everywhere = residual.expand(size, m, n).contiguous()
    wanted = reference.add_to(reference.sum_of(list(parts)), residual, weight)
    for seed in range(3):
        z = torch.empty_like(parts)
        squares = torch.empty(size, m, n // 16)
        got = run(ranks_of(size), parts, added=(everywhere, weight, z, squares, n), seed=seed, two_shot=two_shot)
        for rank in range(size):
            same_bits(got[rank], wanted[0])
            same_bits(z[rank], wanted[1])
            torch.testing.assert_close(squares[rank], wanted[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kernel", "waits"),
    [(push.sum_kernel, 1), (push.two_shot_kernel, 2), (push.max_kernel, 1)],
    ids=["one-shot", "two-shot", "maximum"],
)
def test_a_rank_that_does_not_come(kernel, waits):
    """The others give up, say so, and do not wait again: neither for the next tiles nor in the next call."""
    ranks = ranks_of(2, looks=20)
    tiles = 3
    of_max = kernel is push.max_kernel
    part = torch.ones(1, 128 * tiles, dtype=torch.int64) if of_max else torch.ones(1, 256 * tiles * waits).half()
    out = torch.zeros_like(part)
    for expected in (20 + tiles * waits, tiles * waits):
        with (
            together(kernel, 0),
            mock.patch.object(push, "num_sms", return_value=1),
            mock.patch.object(push, "read_again", side_effect=read) as looks,
        ):
            reduce = "max" if of_max else "sum"
            push.push(ranks, part, out, reduce, warps=1, two_shot=kernel is push.two_shot_kernel)
        assert of_max or out.isnan().all()
        assert ranks.failed.item() == 1
        assert looks.call_count == expected


def test_a_sum_that_lacks_a_part_is_nobodys():
    """Rank 0 gives up before the other comes, which has all parts of its own share. It must not take the sum of rank 0's share
    for one: it gives up too, and waits once."""
    ranks = ranks_of(2, looks=20)
    failed = torch.zeros(1, dtype=torch.int32)
    addresses = torch.cat([ranks.addresses[:2], torch.tensor([failed.data_ptr()])])
    other = dataclasses.replace(ranks, rank=1, state=ranks.state[1:], failed=failed, addresses=addresses)
    tiles = 3
    parts = torch.ones(2, 1, 512 * tiles).half()
    for rank, one in enumerate((ranks, other)):
        out = torch.zeros_like(parts[rank])
        with (
            together(push.two_shot_kernel, 0) as links,
            mock.patch.object(push, "num_sms", return_value=1),
            mock.patch.object(push, "read_again", side_effect=links.read_all) as looks,
        ):
            push.push(one, parts[rank], out, "sum", warps=1, two_shot=True)
        assert out.isnan().all()
        assert one.failed.item() == 1
        assert looks.call_count == 2 * tiles + 20


@pytest.mark.parametrize("sms", [132, 300])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_programs_of_the_largest_calls_fit(size, sms):
    """Each has an entry in the state, and a multiprocessor for itself."""
    ranks = ranks_of(size, workspaces._slot_bytes(size))
    for reduce, dtype in (("sum", torch.float16), ("max", torch.int64)):
        x = torch.ones(workspaces.most_bytes(size, reduce) // dtype.itemsize, dtype=dtype)
        with mock.patch.object(push, "launch") as launched, mock.patch.object(push, "num_sms", return_value=sms):
            push.push(ranks, x, torch.empty_like(x), reduce)
        assert launched.call_args.args[1][0] <= min(sms, workspaces.PROGRAMS)


def test_maximum_of_more_keys_than_programs_take_at_once():
    """Four programs of 128 keys each, with a last tile that is not full."""
    keys = torch.randint(-(2**62), 2**62, (2, 650), generator=torch.Generator().manual_seed(0))
    for got in run(ranks_of(2), keys, "max"):
        assert torch.equal(got, keys.max(0).values)


def test_bad_input():
    ranks = ranks_of(2, 64)
    x = torch.zeros(2, 1, 48).half()
    for changed, reduce, message in (
        (x.float(), "sum", "must be one of sum: torch.bfloat16, torch.float16; max: torch.int64, got sum of torch.float32"),
        (x, "max", "got max of torch.float16"),
        (x, "sum", "`x` must be of at most 64 bytes, got 96"),
        (x[..., :7].contiguous(), "sum", "must be of a multiple of 16 bytes, got 14"),
        (torch.zeros(2, 5, dtype=torch.int64), "max", "`x` must be of at most 32 bytes, got 40"),
    ):
        with pytest.raises(ValueError, match=message):
            push.push(ranks, changed, torch.empty_like(changed), reduce, local=2)
    with pytest.raises(ValueError, match="all_reduce: `group` must be one whose ranks can write to one another's memory"):
        push.all_reduce(x, "sum", "nobody")
    with mock.patch.dict("spec_ops.backends.push._workspaces", {("two", CPU): ranks}):
        with pytest.raises(ValueError, match="all_reduce_add: the columns of `x` must be a multiple of 16, got 24"):
            push.all_reduce_add(x[0, :, :24], x[0, :, :24], x[0, 0, :24], "two")
        assert push.all_reduce(x[:, :0], "sum", "two").shape == (2, 0, 48)
        elsewhere = x[0].to("meta")
        with pytest.raises(ValueError, match="all_reduce: `x` must be on cpu, where 'two' has its memory, got meta"):
            push.all_reduce(elsewhere, "sum", "two")
        with pytest.raises(ValueError, match="all_reduce_add: `x` must be on cpu, where 'two' has its memory, got meta"):
            push.all_reduce_add(elsewhere, elsewhere, elsewhere[0], "two")
