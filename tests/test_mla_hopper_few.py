"""Which calls go to the Hopper MLA kernel for few rows; `test_mla_hopper_few_gpu.py` has what it computes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

from spec_ops.backends.triton import mla_hopper_few


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
