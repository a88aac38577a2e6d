"""The division of blocks among ranges that the Gluon kernels share, in numpy: Gluon runs on a GPU alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from spec_ops.backends.triton.attention.hopper import program as hopper


@pytest.fixture(autouse=True)
def in_numpy(monkeypatch):
    monkeypatch.setattr(hopper, "gl", SimpleNamespace(minimum=np.minimum, where=np.where))
    for name in ("range_start", "range_of", "tile_splits"):
        monkeypatch.setattr(hopper, name, getattr(hopper, name).fn)


@pytest.mark.parametrize("ranges", [1, 2, 7, 66, 132])
def test_ranges_cover_all_blocks_in_nearly_equal_shares(ranges):
    for total in (*range(ranges, ranges + 300), 10_000, 2**24 + 5):
        share, longer = total // ranges, total % ranges
        starts = hopper.range_start(np.arange(ranges + 1), share, longer)
        assert starts[0] == 0
        assert starts[-1] == total
        sizes = np.diff(starts)
        assert sizes.min() == share
        assert sizes.max() - share == (longer > 0)
        blocks = np.unique(np.concatenate([starts[:-1], starts[1:] - 1, np.arange(min(total, 2000))]))
        held = hopper.range_of(blocks, share, longer)
        assert (starts[held] <= blocks).all()
        assert (blocks < starts[held + 1]).all()


@pytest.mark.parametrize("seed", range(40))
def test_a_range_knows_the_other_ranges_of_its_tiles(seed):
    """Against a list of what every range holds: the tiles it begins and ends in, and who else has parts of them."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, rng.choice([3, 10, 200]), size=rng.integers(1, 9))
    counts[rng.integers(len(counts))] += 1  # at least one block
    total, ranges = counts.sum(), min(int(rng.integers(1, 60)), counts.sum())
    share, longer = total // ranges, total % ranges
    starts = hopper.range_start(np.arange(ranges + 1), share, longer)
    ends = np.cumsum(counts)
    request_of = np.repeat(np.arange(len(counts)), counts)
    range_of = np.repeat(np.arange(ranges), np.diff(starts))
    for index in range(ranges):
        mine = np.unique(request_of[starts[index] : starts[index + 1]])  # requests of which this range has blocks
        tiles = mine if len(mine) == 1 else mine[[0, -1]]
        first, last = tiles[0], tiles[-1]
        for side, b in enumerate(tiles):
            holders = np.unique(range_of[request_of == b])
            found = hopper.tile_splits(
                side, len(tiles), ends[first] - counts[first], ends[last], starts[index + 1], share, longer
            )
            assert tuple(map(int, found)) == (holders[0], len(holders)), (index, side)
