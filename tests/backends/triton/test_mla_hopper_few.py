"""Which calls go to the Hopper MLA kernel for few rows; `test_mla_hopper_few.py` has what it computes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
from spec_ops.backends.triton.attention.hopper import mla_few as mla_hopper_few


@pytest.mark.parametrize(
    ("q_len", "heads", "few"),
    [
        (1, 16, True),
        (2, 8, True),
        (1, 8, True),
        (16, 1, True),
        (1, 17, False),
        (2, 16, False),
        (1, 128, False),
        (16, 16, False),
    ],
)
def test_rows_of_a_request_decide(q_len, heads, few):
    assert mla_hopper_few.preferred(torch.empty(64, q_len, heads, 576, dtype=torch.bfloat16)) == few


def test_queries_are_copied_where_tma_cannot_read_them():
    rows = torch.arange(2 * 3 * 576, dtype=torch.float16).view(2, 1, 3, 576)
    assert mla_hopper.query_rows(rows) is rows
    unaligned = torch.empty(rows.numel() + 1, dtype=torch.float16)[1:].view(rows.shape).copy_(rows)
    strided = rows.repeat(1, 2, 1, 1)[:, ::2]
    for q in (unaligned, strided):
        copy = mla_hopper.query_rows(q)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, rows)
