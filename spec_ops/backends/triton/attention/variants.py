"""The attention kernels as the usual models launch them, for compilation without a GPU (see `runtime/ahead.py`).

Signatures and constants are not written down a second time: the launch functions run on tensors of the meta device, and what
they would launch is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from spec_ops.backends.call import AttentionCall
from spec_ops.backends.triton.attention import launcher as steps
from spec_ops.backends.triton.attention import tuning
from spec_ops.backends.triton.attention.deterministic import launcher as deterministic_steps
from spec_ops.backends.triton.attention.hopper import gqa as gqa_hopper
from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
from spec_ops.backends.triton.attention.hopper import mla_few as mla_hopper_few
from spec_ops.backends.triton.attention.hopper import mla_invariant
from spec_ops.backends.triton.runtime import ahead as ahead_of_time
from spec_ops.backends.triton.runtime.ahead import ARCHS, FP8_ARCHS, Variant
from spec_ops.backends.triton.runtime.launch import Launch, recorded

BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
HOPPER = tuning.Config(64, 64, 4, 3, 1)  # what a table shows of the Gluon kernels, which have their own pipelines


class Shape(NamedTuple):
    """A model's attention: query heads, KV heads (0: MLA), widths of keys and values, dtype of the cache, window, dtype of
    queries."""

    label: str
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    kv_dtype: torch.dtype = BF16
    window: int = -1
    dtype: torch.dtype = BF16


GQA_128 = Shape("GQA 32/8 D128", 32, 8, 128, 128)
GQA_64 = Shape("GQA 64/8 D64", 64, 8, 64, 64)
GQA_256 = Shape("GQA 16/8 D256", 16, 8, 256, 256)
GQA_64_WINDOW = GQA_64._replace(label="GQA 64/8 D64 window 128", window=128)
GQA_64_FP8 = GQA_64._replace(label="GQA 64/8 D64 fp8", kv_dtype=FP8)
GQA_FP8 = GQA_128._replace(label="GQA 32/8 D128 fp8", kv_dtype=FP8)
MLA_128 = Shape("MLA 128 heads", 128, 0, 576, 512)
MLA_16 = Shape("MLA 16 heads", 16, 0, 576, 512)
MLA_FP8 = MLA_16._replace(label="MLA 16 heads fp8", kv_dtype=FP8)

# The other head sizes of models. In registers and shared memory they are as wide as the next power of two, or as two of them.
WIDTHS = (16, 24, 32, 48, 56, 80, 96, 112, 144, 160, 192, 224)
OTHER_SIZES = [Shape(f"GQA 32/8 D{width}", 32, 8, width, width) for width in WIDTHS]

# (shape, queries, whether they are a tree)
UNIFORM = [
    *((shape, *queries) for shape in (GQA_128, GQA_64) for queries in ((1, False), (4, False), (16, False), (16, True))),
    (GQA_256, 1, False), (GQA_256, 4, False), (GQA_256, 16, True),
    (GQA_64_WINDOW, 16, True), (GQA_64_FP8, 4, False), (GQA_FP8, 1, False), (GQA_FP8, 16, True),
    *((shape, q_len, False) for shape in (MLA_128, MLA_16) for q_len in (1, 4)), (MLA_16, 16, True),
    (MLA_FP8, 1, False),
    *((shape, q_len, False) for shape in OTHER_SIZES for q_len in (1, 16)),
]  # fmt: skip
RAGGED = [GQA_128, GQA_64, GQA_256, GQA_FP8, MLA_128, MLA_16, MLA_FP8, *OTHER_SIZES]
FEW_ROWS = [(GQA_128, 4, False), (GQA_128, 4, True), (GQA_64, 1, False)]  # whose tiles are smaller on sm_90
# Queries and pages of the plain kernel on sm_90, whose blocks of keys lie in several: boxes, then pointers.
SMALL_PAGES = [
    (GQA_128, 1, 16), (GQA_128, 4, 16), (GQA_128, 4, 32), (GQA_64, 1, 32),
    *((GQA_64, q, page) for q in (1, 4) for page in (16, 1)),
]  # fmt: skip
PAGE_SIZES = (64, 16, 1)  # of Hopper's kernels: a block of keys in one piece, in four, row by row
# Queries, pages: tiles of 128 rows, and of 192 in pages of whole blocks.
TREES_ON_HOPPER = [(GQA_128, 24, PAGE_SIZES), (GQA_128, 48, PAGE_SIZES), (GQA_128, 64, PAGE_SIZES), (GQA_64, 24, (64,))]
IN_PIECES = [
    (MLA_128, 4, False, 64), (MLA_16, 1, False, 16), (MLA_128, 6, True, 64), (MLA_16, 16, True, 16), (MLA_16, 16, True, 1),
]  # fmt: skip
DETERMINISTIC = [
    (GQA_64, 16, False), (GQA_64, 16, True), (GQA_128, 4, False), (GQA_128, 16, True), (MLA_128, 1, False), (MLA_16, 16, True),
    *((shape._replace(label=f"{shape.label} float32", kv_dtype=FP32, dtype=FP32), 4, tree)
      for shape in (GQA_64, GQA_128, GQA_256, MLA_16) for tree in (False, True)),
    (GQA_FP8._replace(label="GQA 32/8 D128 float32, fp8 cache", dtype=FP32), 4, False),
]  # fmt: skip


def launches_of(call: Callable[[], Any]) -> list[Launch]:
    """What `call` would launch; nothing runs."""
    with recorded() as launches:
        call()
    return launches


def variant_of(name: str, launch: Launch, config: tuning.Config, archs: tuple[int, ...], hot: bool) -> Variant:
    """What compiles the kernel of `launch`, one recorded with `config` on the meta device."""
    if "COOPERATIVE" in launch.arguments:
        launch.arguments["COOPERATIVE"] = config.cooperative  # the meta device is no CUDA device
    return ahead_of_time.variant_of(
        name,
        launch,
        archs=archs,
        hot=hot and min(archs) >= 90,  # before, 255 registers do not hold all the pointers: some words of a loop's bounds spill
        num_stages=config.num_stages,
        options={n: launch.options[n] for n in ("maxnreg", "enable_fp_fusion") if n in launch.options},
        programs=config.programs,
    )


def _counted_on(shape: Shape, config: tuning.Config, variant: Variant) -> Variant:
    """With the shared memory that `tuning.fitted` takes it to need at most."""
    row = not shape.kv_heads, shape.head_dim, shape.v_dim, shape.kv_dtype.itemsize
    return replace(variant, estimated={arch: tuning.shared_bytes(config, arch, *row) for arch in variant.archs})


def call_of(
    shape: Shape, bs: int, q_len: int, tree: bool = False, *, ragged: int = 0, pages: int = 128, page_size: int = 64
) -> AttentionCall:  # fmt: skip
    """A call on the meta device: `bs` requests of `q_len` queries, or `ragged` rows with `q_len` as their bound."""
    empty = functools.partial(torch.empty, device="meta")
    heads = shape.kv_heads
    step = ("mha_" if heads else "mla_") + ("extend" if ragged else "target_verify")
    widths = (shape.head_dim, shape.v_dim) if heads else (shape.head_dim,)
    caches = [empty(1024, page_size, *([heads] if heads else []), width, dtype=shape.kv_dtype) for width in widths]
    call = AttentionCall(
        step,
        empty(*([ragged] if ragged else [bs, q_len]), shape.heads, shape.head_dim, dtype=shape.dtype),
        caches[0],
        caches[-1],
        None if heads else shape.v_dim,
        empty(bs, pages, dtype=torch.int32),
        empty(bs, dtype=torch.int32),
        scale=0.1,
        window_left=shape.window,
    )
    if tree:
        call.tree_mask, call.mask_len = empty(bs, q_len, dtype=torch.int64), q_len
    if ragged:
        call.q_indptr, call.max_q_len = empty(bs + 1, dtype=torch.int32), q_len
    return call


def _by_config(choose: Any, shape: Shape, rows: int, *window: int) -> Iterator[tuple[tuning.Config, tuple[int, ...], str]]:
    """The distinct choices over the architectures, the architectures of each, and what to add to the variant's name."""
    chosen: dict[tuple[tuning.Config, bool, bool], list[int]] = {}
    for arch in FP8_ARCHS if shape.kv_dtype == FP8 else ARCHS:
        element = shape.kv_dtype.itemsize
        config = choose(arch, not shape.kv_heads, shape.head_dim, shape.v_dim, element, rows, *window)
        chosen.setdefault((config, config.clear, config.full), []).append(arch)
    for (config, *_), archs in chosen.items():
        yield config, tuple(archs), f" on sm_{archs[0]}" if len(chosen) > 1 else ""


def _deterministic() -> Iterator[Variant]:
    """One kernel of a shape serves every number of queries: of chains, and of trees of one `mask_len`."""

    bs = 8
    for shape, q_len, tree in DETERMINISTIC:

        def choose(
            arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int, rows: int, dtype: torch.dtype = shape.dtype
        ) -> tuning.Config:
            if dtype == FP32:
                return deterministic_steps.choose_float32(arch, shared_kv, head_dim, v_dim)
            return deterministic_steps.choose(arch, shared_kv, head_dim, v_dim, kv_bytes, rows)

        call, ragged = call_of(shape, bs, q_len, tree), call_of(shape, bs, 512, ragged=2048)
        for config, archs, suffix in _by_config(choose, shape, deterministic_steps.TILE_ROWS):
            uniform = launches_of(functools.partial(deterministic_steps.attention, call, config))
            extend = launches_of(functools.partial(deterministic_steps.attention, ragged, config))
            steps = "tree attention" if tree else "attention", "combine", "extend"
            for launch, step in zip((*uniform, *extend), steps, strict=True):
                # Merging is the same for all but the width of a row; neither it nor prompts have trees.
                if step.endswith("attention") or (not tree and (step == "extend" or shape is GQA_64)):
                    # What is merged so far waits on the stack while the loop over a chunk's keys runs: only this one is `hot`.
                    hot = step == "combine"
                    # Early or not, a merge is too short to matter where it spreads unevenly.
                    launch = launch._replace(early=launch.early and not hot)
                    yield variant_of(f"deterministic {step}, {shape.label}{suffix}", launch, config, archs, hot)
    for shape, q_len, tree in FEW_ROWS:
        config = deterministic_steps.choose(90, False, shape.head_dim, shape.v_dim, 2, q_len * shape.heads // shape.kv_heads)
        launch, _ = launches_of(functools.partial(deterministic_steps.attention, call_of(shape, bs, q_len, tree), config))
        step = "tree attention" if tree else "attention"
        yield variant_of(f"deterministic {step}, {shape.label}, few rows", launch, config, (90,), False)


def _on_hopper(
    name: str, shape: Shape, bs: int, q_len: int, tree: bool, page_sizes: Sequence[int] = PAGE_SIZES
) -> Iterator[Variant]:
    for page_size in page_sizes:
        call = call_of(shape, bs, q_len, tree, page_size=page_size)
        mla = (mla_hopper_few if mla_hopper_few.preferred(call.q) else mla_hopper).mla
        kernel = mla if call.is_mla else gqa_hopper.mha
        (launch,) = launches_of(functools.partial(kernel, call))
        for striped in (True, False) if "STRIPED" in launch.arguments else (None,):  # by the batch: hopper/combine.py
            if striped is not None:
                launch.arguments["STRIPED"] = striped
            suffix = ", many splits" if striped is False else ""
            suffix += f", pages of {page_size}" if page_size < 64 else ""
            # With 128 keys of head_dim 128 a word lies on the stack (64 keys took longer all the same), with three warpgroups
            # too, in the loop with masks.
            wide = (
                not call.is_mla and shape.head_dim == 128 and launch.arguments["BLOCK_N"] * launch.arguments["WARPGROUPS"] > 128
            )
            yield variant_of(f"Hopper {name}{suffix}", launch, HOPPER, (90,), hot=page_size > 1 and not wide)


def _of_small_pages() -> Iterator[Variant]:
    for shape, q_len, page_size in SMALL_PAGES:
        rows = q_len * shape.heads // shape.kv_heads
        config = tuning.choose(90, False, shape.head_dim, shape.v_dim, shape.kv_dtype.itemsize, rows, -1, page_size)
        call = call_of(shape, 8, q_len, page_size=page_size)
        (launch,) = launches_of(functools.partial(steps.attention, call, config))
        name = f"attention, {shape.label}, {q_len} causal, pages of {page_size}"
        yield _counted_on(shape, config, variant_of(name, launch, config, (90,), hot=True))


def _in_pieces() -> Iterator[Variant]:
    """The batch-invariant variant of Hopper's MLA kernel, and what comes before it for trees."""
    for shape, q_len, tree, page_size in IN_PIECES:
        call = call_of(shape, 8, q_len, tree, page_size=page_size)
        *gather, launch = launches_of(functools.partial(mla_hopper.mla, call, piece=mla_invariant.PIECE))
        name = f"Hopper attention in pieces, {shape.label}, {q_len} {'tree' if tree else 'causal'}, pages of {page_size}"
        yield variant_of(name, launch, HOPPER, (90,), hot=page_size > 1)
        for launch in gather:  # too short to matter where it spreads unevenly
            yield variant_of(f"keys of {name}", launch._replace(early=False), HOPPER, (90,), hot=True)


def ahead() -> Iterator[Variant]:
    yield from _deterministic()
    yield from _in_pieces()
    yield from _of_small_pages()
    for shape, q_len, tree in UNIFORM:
        bs = 8
        call = call_of(shape, bs, q_len, tree)
        name = f"attention, {shape.label}, {q_len} {'tree' if tree else 'causal'}"
        rows = q_len * shape.heads // max(shape.kv_heads, 1)
        gqa_on_hopper = not call.is_mla and gqa_hopper.supports(90, call)
        for config, archs, suffix in _by_config(tuning.choose, shape, rows, shape.window):
            (launch,) = launches_of(functools.partial(steps.attention, call, config))
            # MLA has kernels of its own on Hopper (below) and on Blackwell (other backends'), GQA of many rows on Hopper.
            if gqa_on_hopper and 90 in archs:
                yield _counted_on(shape, config, variant_of(f"{name} on sm_90", launch, config, (90,), hot=False))
                archs = tuple(arch for arch in archs if arch != 90)
                suffix = f" on sm_{archs[0]}" if archs else ""
            if archs:
                hot = not call.is_mla and shape not in OTHER_SIZES  # those were never timed
                yield _counted_on(shape, config, variant_of(f"{name}{suffix}", launch, config, archs, hot))
        if gqa_on_hopper or (call.is_mla and shape.kv_dtype == BF16):
            yield from _on_hopper(name, shape, bs, q_len, tree)
    for shape, q_len, page_sizes in TREES_ON_HOPPER:
        yield from _on_hopper(f"attention, {shape.label}, {q_len} tree", shape, 8, q_len, True, page_sizes)
    for shape in RAGGED:
        bs, most = 8, 512
        call = call_of(shape, bs, most, ragged=2048)
        for config, archs, suffix in _by_config(tuning.choose_ragged, shape, most * shape.heads // max(shape.kv_heads, 1)):
            (launch,) = launches_of(functools.partial(steps.attention, call, config))
            yield _counted_on(
                shape, config, variant_of(f"ragged attention, {shape.label}{suffix}", launch, config, archs, False)
            )
