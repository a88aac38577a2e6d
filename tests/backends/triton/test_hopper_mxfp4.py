"""Which calls go to the Hopper kernels of MXFP4 experts, and how they are launched and compiled; what they compute is in
`tests/gpu/test_moe.py`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what is launched")

from spec_ops.backends.triton.moe import experts, hopper_mxfp4  # noqa: E402
from spec_ops.backends.triton.moe.shapes import GPT_OSS, MXFP4, meta_call  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Target, recorded  # noqa: E402

OURS = ["sorted_rows_kernel", "hopper_mxfp4_kernel", "activated_rows_kernel", "hopper_mxfp4_kernel", "summed_rows_kernel"]
FEW = {"ranged_gate_up_kernel", "few_gate_up_kernel"}


def launched(tokens: int, sizes=(32, 4, 2880, 2880), arch: int = 90, change=None, op=experts.moe_experts, **form) -> list[str]:
    call = list(meta_call(tokens, *sizes, **form))
    if change is not None:
        change(call)
    with recorded(Target(arch, 132)) as launches:
        op(*call)
    return [made.kernel.__name__ for made in launches]


@pytest.mark.parametrize("tokens", [6, 16, 64, 65, 256])
@pytest.mark.parametrize("sizes", [(32, 4, 2880, 2880), (128, 4, 2048, 768)])
def test_what_they_take(tokens, sizes):
    assert launched(tokens, sizes, **MXFP4) == OURS
    assert launched(tokens, sizes, bits=4) == OURS


def strided(which: int, *more: int):
    """Makes the stack or scale number `which` a part of a wider one."""

    def change(call: list) -> None:
        wider = [size + extra for size, extra in zip(call[which].shape, more, strict=True)]
        call[which] = torch.empty(wider, dtype=call[which].dtype, device="meta")[tuple(map(slice, call[which].shape))]

    return change


def test_what_they_leave_to_others():
    assert launched(5, **MXFP4)[0] in FEW
    assert launched(257, **MXFP4)[0] == "sort_pairs_kernel"  # more than `MAX_PAIRS`
    assert launched(72, (4, 2, 64, 64), **MXFP4)[0] == "sort_pairs_kernel"  # more than `MOST_ROWS` an expert
    assert launched(16, arch=100, **MXFP4)[0] in FEW
    assert launched(16, arch=89, **MXFP4)[0] == "sort_pairs_kernel"
    assert launched(16, dtype=torch.float16, **MXFP4)[0] in FEW
    assert launched(16, **GPT_OSS)[0] in FEW
    assert launched(16, (32, 4, 2880, 2912), **MXFP4)[0] in FEW  # an odd number of scales
    assert launched(16, change=strided(14, 0, 0, 1), **MXFP4)[0] in FEW
    assert launched(16, change=strided(3, 0, 1, 16), **MXFP4) == OURS
    assert launched(16, change=strided(3, 0, 0, 8), **MXFP4)[0] == "sort_pairs_kernel"  # rows that TMA cannot read
    invariant = launched(16, op=lambda *call: experts.moe_experts(*call, invariant=True), **MXFP4)
    assert "hopper_mxfp4_kernel" not in invariant


def test_tiles():
    """Of 8 rows up to five pairs an expert."""
    for tokens, rows in ((9, 8), (40, 8), (41, 16), (256, 16)):
        with recorded(Target(90, 132)) as launches:
            experts.moe_experts(*meta_call(tokens, 32, 4, 2880, 2880, **MXFP4))
        made = launches[1].arguments
        assert made["x"].block_shape == [rows, 128]
        assert made["weight"].shape == [32 * 5760, 1440]


@pytest.mark.parametrize("variant", [v for v in hopper_mxfp4.ahead() if "gpt-oss" in v.name and "down" not in v.name], ids=str)
def test_machine_code(variant):
    used = ahead.compile_ahead(variant, 90)
    assert used.spill_bytes == 0
    assert not used.serialized
    assert used.registers <= hopper_mxfp4.REGISTERS
    # Four programs share a multiprocessor's memory.
    assert 4 * (used.shared_bytes + 1024) <= 228 * 1024
