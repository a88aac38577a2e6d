"""What the loading warps of Hopper's Gluon kernels read, in numpy: Gluon runs on a GPU alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.attention import variants
from spec_ops.backends.triton.attention.hopper import gqa, mla, mla_few, pages

TABLE = np.array([5, -1, 7, 2**31 - 1, 0, -(2**31), 3, 8], dtype=np.int32)  # of a pool of 8 pages


def pages_of(key: int, end: int, pool: int | None, page_size: int, monkeypatch) -> list[int]:
    """Of the 8 keys from `key` on, row by row."""

    def load(at, mask, other):
        assert (at[mask] < len(TABLE)).all()
        return np.where(mask, TABLE[np.where(mask, at, 0)], other)

    monkeypatch.setattr(pages, "gl", SimpleNamespace(load=load, where=np.where))
    monkeypatch.setattr(pages, "_keys", np.arange)
    (found,) = pages.pages_of.fn(0, key, end, pool, page_size, 8, 1)
    return found.tolist()


@pytest.mark.parametrize(("page_size", "expected"), [(1, [5, 0, 7, 0, 0, 0, 3, 0]), (2, [5, 5, 0, 0, 7, 7, 0, 0])])
def test_no_page_outside_of_the_pool_is_followed(page_size, expected, monkeypatch):
    """Where a query may see no key of a page its id may be anything, and `cp.async` would read there."""
    assert pages_of(0, 8, 8, page_size, monkeypatch) == expected


def test_no_page_from_the_end_on_is_looked_up(monkeypatch):
    assert pages_of(0, 3, 8, 1, monkeypatch) == [5, 0, 7, 0, 0, 0, 0, 0]
    assert pages_of(8, 3, None, 1, monkeypatch) == [0] * 8


@pytest.mark.parametrize(
    ("kernel", "shape", "q_len"),
    [(gqa.mha, variants.GQA_64, 16), (mla.mla, variants.MLA_128, 4), (mla_few.mla, variants.MLA_16, 1)],
    ids=["gqa", "mla", "few"],
)  # fmt: skip
def test_a_kernel_knows_the_pool_where_it_reads_pages_that_no_query_may_see(kernel, shape, q_len):
    for page_size, slots, pool in ((1, 1, 1024), (8, 1, 1024), (1, 0, None), (16, 1, None), (64, 1, None)):
        call = variants.call_of(shape, 8, q_len, True, page_size=page_size)
        call.mask_len += slots
        (launch,) = variants.launches_of(lambda call=call: kernel(call))
        assert launch.arguments["pool"] == pool
