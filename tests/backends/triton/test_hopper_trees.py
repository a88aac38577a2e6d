"""The walk of the batch-invariant Hopper MLA kernel over trees: which block of which path comes where. What it computes on the
way is in `tests/interpreter/test_hopper_trees.py`."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention import variants
from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
from spec_ops.backends.triton.attention.hopper import mla_invariant, mla_paths
from spec_ops.backends.triton.runtime.launch import Target, recorded
from spec_ops.ops.reference.attention import attention as reference


@pytest.fixture
def in_numpy(monkeypatch):
    gl = SimpleNamespace(minimum=np.minimum, maximum=np.maximum, where=np.where, load=lambda places: places.at())
    monkeypatch.setattr(mla_paths, "gl", gl)


class Plan:
    """A pointer to numbers."""

    def __init__(self, numbers: list[int], place: int = 0) -> None:
        self.numbers, self.place = numbers, place

    def __add__(self, steps: int) -> Plan:
        return Plan(self.numbers, self.place + int(steps))

    def at(self) -> int:
        return self.numbers[self.place]


def visits(prefix: int, slots: int, depths: list[int], piece_blocks: int) -> tuple[list[tuple[int, int, bool, int, int]], int]:
    """What a tile with a turn for each of `depths` walks, in order: piece, block, whether the even warpgroup takes it, turn
    (-1: before the tail) and gathered block. Blocks that nobody sees are left out; and the number of all."""
    tail, last = prefix // 64, -(-(prefix + slots) // 64)
    reaches = int(any(prefix + depth > (tail + 1) * 64 for depth in depths))
    plan = Plan([2 * len(depths) + reaches, *range(100, 100 + len(depths)), *[0] * len(depths)])
    found, places = [], 0
    assert mla_paths.turns_of.fn(plan) == (len(depths), reaches)
    for piece in range(0, last, piece_blocks):
        stop, lonely = mla_paths.walk.fn(piece, min(piece + piece_blocks, last), tail, len(depths), reaches, piece_blocks)
        assert stop > piece  # who loads queries waits for who uses them
        for k in range(piece, int(stop), 2):
            for place in (k, k + 1) if mla_paths.has_partner.fn(k, stop, lonely, True) else (k,):
                places += 1
                for ahead in (0, 2):  # pages of the next blocks are asked for early
                    mla_paths.path_block.fn(plan, place + ahead, tail, reaches)
                if place < tail:
                    found.append((piece, place, place == k, -1, -1))
                    continue
                turn = int(mla_paths.turn_of.fn(place, tail, piece, piece_blocks))
                block = tail + (place - tail) % 2
                if turn >= 0 and (block == tail or reaches):
                    found.append((piece, block, place == k, turn, int(mla_paths.path_block.fn(plan, place, tail, reaches))))
    return found, places


@pytest.mark.parametrize("seed", range(200))
def test_a_path_is_walked_as_its_chain(in_numpy, seed):
    """In the same pieces, by the same warpgroups, in the same order."""
    rng = np.random.default_rng(seed)
    piece_blocks = int(rng.choice([2, 4, 6, 32]))
    slots = int(rng.integers(1, 65))
    prefix = int(rng.integers(0, 64 * 3 * piece_blocks))
    if seed % 3 == 0:
        prefix = 64 * piece_blocks * int(rng.integers(1, 3)) - int(rng.integers(0, 80))
    prefix = max(prefix, 0)
    depths = [int(rng.integers(0, slots + 1)) for _ in range(rng.integers(1, 9))]
    walked, places = visits(prefix, slots, depths, piece_blocks)
    tail, turns = prefix // 64, len(depths)
    for turn, depth in enumerate(depths):
        mine = [visit for visit in walked if visit[3] in (-1, turn)]
        chain = [
            (block // piece_blocks * piece_blocks, block, block % piece_blocks % 2 == 0)
            for block in range(-(-(prefix + depth) // 64))
        ]
        assert [visit[:3] for visit in mine][: len(chain)] == chain
        for _, block, _, of, gathered in mine:
            assert of == -1 or gathered == (100 + turn) * 2 + block - tail
        assert len(mine) - len(chain) <= 2  # whole blocks that it does not see
    reaches = any(prefix + depth > (tail + 1) * 64 for depth in depths)
    split = (tail + 1) % piece_blocks == 0  # a piece ends between first blocks and second ones
    if split:
        beside = turns - 1  # first blocks are in odd places, of which each has an even one before it; second ones are alone
        assert places == tail + turns + beside + (turns if reaches else -(-(prefix + slots) // 64) > tail + 1)
    elif reaches:
        assert places == tail + 2 * turns
    else:
        assert places == tail + (turns if tail % 2 == 0 else 2 * turns - 1)


def test_tiles_hold_so_many_queries():
    for heads in range(1, 130):
        for q_len in (1, 3, 16, 64):
            tiles = [set(range(first, min(first + 64, q_len * heads))) for first in range(0, q_len * heads, 64)]
            most = max(len({row // heads for row in tile}) for tile in tiles)
            room = mla_paths.queries_of_a_tile(q_len, heads)
            assert most <= room
            assert room & (room - 1) == 0
            assert room != 32
            assert mla_paths.plan_width(q_len, heads) == 1 + 2 * room


def test_rows_are_gathered_for_trees_in_pieces_alone():
    def kernels(tree: bool, piece: int) -> list[str]:
        call = variants.call_of(variants.MLA_16, 8, 16, tree)
        with recorded(Target(90, 132)) as launches:
            mla_hopper.mla(call, piece=piece)
        return [launch.kernel.__name__ for launch in launches]

    assert kernels(True, 32) == ["gather_paths_kernel", "mla_hopper_attention"]
    assert kernels(False, 32) == kernels(True, 0) == ["mla_hopper_attention"]


@pytest.mark.parametrize("room", [1 << 29, 1 << 20])
def test_a_batch_of_trees_in_several_launches(monkeypatch, room):
    launches = []

    def uniform(call: AttentionCall, piece: int) -> torch.Tensor:
        launches.append(len(call.q))
        assert call.out is not None
        return call.out.copy_(reference(dataclasses.replace(call, out=None)))

    monkeypatch.setattr(mla_hopper, "mla", uniform)
    monkeypatch.setattr(mla_hopper, "supports", lambda call: True)
    monkeypatch.setattr(mla_invariant, "PARTIAL_BYTES", room)
    g = torch.Generator().manual_seed(0)
    cache = torch.randn(40, 16, 576, generator=g)
    masks = torch.randint(1 << 5, (9, 3), generator=g)  # longer than the batch, as an engine's buffers may be
    call = AttentionCall(
        "mla_draft_decode", torch.randn(7, 3, 4, 576, generator=g), cache, cache, 512,
        torch.randint(40, (7, 5), generator=g, dtype=torch.int32), torch.randint(5, 80, (7,), generator=g).int(), masks, 5,
        scale=0.05,
    )  # fmt: skip
    expected = reference(dataclasses.replace(call, tree_mask=masks[:7]))
    torch.testing.assert_close(mla_invariant.attention(call), expected)
    assert mla_paths.bytes_of(call) == 3 * 128 * 576 * 4
    assert launches == ([7] if room == 1 << 29 else [1] * 7)
