"""The bound on shared memory that decides how many programs a cooperative launch counts on holds for whatever is launched.

Too low, and a launch fails or its programs wait for others that never start. Shared memory is known before the assembler runs.
"""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"),
]

from spec_ops.backends.triton.attention import launcher, tuning, variants  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402

BS = 8
FP8 = torch.float8_e4m3fn
MLA_256 = variants.Shape("MLA 256+64", 16, 0, 320, 256)
WIDE_KEYS = variants.Shape("GQA 32/8 D192, values 128", 32, 8, 192, 128)


class Feature(NamedTuple):
    """A call as no variant has it. `q_len` 0 is ragged; `slots` of a tree, 0 for none; `window` -1 for none."""

    name: str
    q_len: int
    slots: int = 0
    window: int = -1
    tma: bool = True


FEATURES = [
    Feature("decode", 1), Feature("verify", 16), Feature("last level of a tree", 4, slots=12),
    Feature("half a tree", 16, slots=48), Feature("window", 1, window=128), Feature("window of many", 16, window=128),
    Feature("pointers", 1, tma=False), Feature("pointers of many", 16, tma=False), Feature("prefill", 0),
    Feature("prefill with a window", 0, window=128), Feature("prefill through pointers", 0, tma=False),
]  # fmt: skip
SHAPES = [variants.GQA_64, variants.GQA_128, variants.GQA_256, variants.MLA_16, MLA_256, WIDE_KEYS]
SHAPES += [shape._replace(label=f"{shape.label} fp8", kv_dtype=FP8) for shape in (*SHAPES, *variants.OTHER_SIZES)]
CASES = [
    (shape, feature, arch)
    for shape in SHAPES
    for feature in FEATURES
    for arch in (ahead.FP8_ARCHS if shape.kv_dtype == FP8 else ahead.ARCHS)
]
# One for each way of taking shared memory that the table's variants lack, on the architecture where it takes most.
SHARE = {
    ("MLA 256+64 fp8", "decode", 120), ("MLA 256+64", "verify", 100), ("MLA 16 heads fp8", "half a tree", 90),
    ("GQA 32/8 D192, values 128 fp8", "window of many", 100), ("MLA 16 heads", "window", 90),
    ("GQA 32/8 D128 fp8", "last level of a tree", 90), ("MLA 16 heads", "pointers", 90),
}  # fmt: skip


def pytest_generate_tests(metafunc):
    if "shape" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-variants")
        chosen = [case for case in CASES if everything or (case[0].label, case[1].name, case[2]) in SHARE]
        assert everything or len(chosen) == len(SHARE)
        ids = ["-".join((shape.label, feature.name, f"sm_{arch}")) for shape, feature, arch in chosen]
        metafunc.parametrize(("shape", "feature", "arch"), chosen, ids=ids)


def test_no_call_takes_more_than_is_counted_on(shape, feature, arch):
    row = not shape.kv_heads, shape.head_dim, shape.v_dim, shape.kv_dtype.itemsize
    group = shape.heads // max(shape.kv_heads, 1)
    shape = shape._replace(window=feature.window)
    if feature.q_len:
        call = variants.call_of(shape, BS, feature.q_len, tree=feature.slots > 0)
        call.mask_len = feature.slots
        config = tuning.choose(arch, *row, feature.q_len * group, feature.window)
    else:
        call = variants.call_of(shape, BS, 512, ragged=2048)
        config = tuning.choose_ragged(arch, *row, 512 * group)
    used = config if feature.tma else dataclasses.replace(config, tma=False)
    (launch,) = variants.launches_of(lambda: launcher.attention(call, used))
    variant = variants.variant_of("a call", launch, used, (arch,), hot=False)
    taken = ahead.lowered(variant, arch, "llir").shared_bytes
    assert taken <= tuning.shared_bytes(config, arch, *row) <= ahead.SHARED_LIMIT[arch]


@pytest.mark.parametrize(("head_dim", "stored"), [(48, 48), (80, 80), (96, 96), (112, 128), (160, 160), (192, 192), (576, 576)])
def test_rows_are_padded(head_dim, stored):
    """Keys lie in two parts of a power of two, values in one."""
    config = tuning.Config(16, 64, 2, 3, 1)
    v_dim = 1 << (head_dim - 1).bit_length()
    needed = tuning.shared_bytes(config, 90, False, head_dim, head_dim, 2)
    assert needed == 2 * 16 * (stored + 64) + 2 * 64 * (stored + v_dim) * 2 + 1024


def test_copies_count_for_each_kind_of_product():
    """Of MLA's 576 + 16 columns of queries and weights; a ring of blocks; copies of 2 bytes a number."""

    def needed(arch: int, kv_bytes: int, block_m: int, block_n: int, **settings) -> int:
        config = dataclasses.replace(tuning.Config(block_m, block_n, 8, 2, 1), **settings)
        return tuning.shared_bytes(config, arch, True, 576, 512, kv_bytes) - 2 * block_m * (576 + block_n) - 1024

    assert needed(90, 2, 64, 32) == 2 * 32 * 576 * 2  # `wgmma` reads the blocks themselves
    assert needed(100, 2, 64, 32) == 2 * 32 * 576 * 2 + 2 * 32 * 512 * 2  # the second product comes two blocks later
    assert needed(90, 1, 64, 32) == 32 * 576 + 32 * 576 * 2  # one block as it is stored, and converted
    assert needed(120, 1, 16, 32) == 32 * 576 + 32 * 512 * 2  # the last block, and its values cleared
    assert needed(120, 1, 16, 32, tma=False) == 32 * 576  # pointers' loads clear them
    assert needed(120, 1, 16, 32, num_stages=5) == 4 * 32 * 576  # the loop before the last block has more


def test_what_comes_after_the_keys_counts():
    """Where blocks are few and short: four of eight warps add up pieces of 2048 numbers, and the output of 32 rows passes."""
    assert tuning.shared_bytes(tuning.Config(16, 16, 8, 3, 1), 120, True, 320, 256, 1) == 4 * 2048 * 4 + 1024
    assert tuning.shared_bytes(tuning.Config(32, 32, 8, 2, 1, tma=False), 89, True, 576, 512, 1) == 32 * 512 * 4 + 1024
