"""Who has which blocks of k of a product on Hopper (`linear/hopper_shares.py`)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what is launched")

from spec_ops.backends.triton.attention.hopper import program  # noqa: E402
from spec_ops.backends.triton.linear import hopper_shares  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Target, recorded  # noqa: E402


@pytest.mark.parametrize("sms", [1, 7, 132])
@pytest.mark.parametrize("blocks", [1, 2, 10, 23, 56, 112])
@pytest.mark.parametrize("tiles", [1, 2, 9, 12, 24, 66, 140, 300])
def test_every_block_of_k_has_one_program(tiles, blocks, sms, monkeypatch):
    """None is without a block, and those that are counted at a tile are those that come to it. Programs of which each tile has
    as many have none of another's."""
    for name in ("range_start", "range_of"):
        monkeypatch.setattr(hopper_shares, name, getattr(program, name).fn)
    index = 0
    language = SimpleNamespace(
        num_programs=lambda axis: programs, program_id=lambda axis: index, cdiv=lambda a, b: -(-a // b), minimum=min,
        where=lambda chosen, a, b: a if chosen else b,
    )  # fmt: skip
    for module in (hopper_shares, program):
        monkeypatch.setattr(module, "gl", language)
    for splits in {0, 1, *range(2, min(sms // tiles, blocks) + 1)}:
        with recorded(Target(90, sms)):
            programs, partial, _ = hopper_shares.divided(torch.device("meta"), "test", tiles, blocks, 1, 8, splits)
        assert programs <= sms
        comers: dict[int, list[int]] = {}
        held = []
        for index in range(programs):
            position, stop, share, longer, pitch = hopper_shares.shares.fn(partial, tiles, blocks)
            assert position < stop
            while position < stop:  # as the kernels do
                tile = position // pitch
                first, last = position - tile * pitch, min(pitch, stop - tile * pitch)
                held += [(tile, block) for block in range(first, last)]
                comers.setdefault(tile, []).append(index)
                position = tile * pitch + last
        assert held == [(tile, block) for tile in range(tiles) for block in range(blocks)]
        for tile, who in comers.items():
            if partial is None:
                assert len(who) == 1
            else:
                first = hopper_shares.range_of(tile * pitch, share, longer)
                assert who == list(range(first, hopper_shares.range_of(tile * pitch + pitch - 1, share, longer) + 1))
            if programs % tiles == 0:
                assert len(who) == programs // tiles
