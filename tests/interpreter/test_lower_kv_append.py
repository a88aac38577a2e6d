"""Inductor's code for lowered appends, generated for CUDA and run by Triton's interpreter: the bytes of the caches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import spec_ops
from tests.helpers.append_models import DIM, FP8, KV_HEADS, PAGE_SIZE, PAGES, as_bytes, gqa, inputs, mla, partial, rotate_half
from tests.helpers.inductor_cuda import copied, generate, launches, run_interpreted
from tests.helpers.pass_harness import cache_copies

DROPPED, NONE = [7, -1, 0, -1, 11], [-1] * 5


def check(fn, args, folder, kernels: int | None = 2, slots: Sequence[list[int]] = ()) -> None:
    """Caches and result are those of the ops, computed in `kernels` launches (None: any number), none of them an append.

    The same code runs once more with each of `slots`.
    """
    generated = generate(fn, *args, passes={"fuse_rope_append": False})  # which would take the append
    assert kernels in (None, len(launches(generated.code)))
    assert "append" not in " ".join(launches(generated.code))
    for given in (args, *([*args[:3], torch.tensor(places), *args[4:]] for places in slots)):
        expected, got = [arg.clone() for arg in given], [arg.clone() for arg in given]
        want = fn(*expected)
        (out,) = run_interpreted(generated, got, folder)
        assert torch.equal(out, want)
        for before, one, other in zip(given, expected, got, strict=True):
            assert torch.equal(as_bytes(one), as_bytes(other)), (before, one, other)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, None), (torch.bfloat16, None), (FP8, 0.25)], ids=str)
def test_gqa(dtype, scale, tmp_path):
    """Keys' and values' kernel, and the queries'."""
    check(gqa(scale=scale), inputs(dtype=dtype), tmp_path, slots=[DROPPED, NONE])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, None), (FP8, 0.25)], ids=str)
def test_mla(dtype, scale, tmp_path):
    """Two scatters into one row: the rotary part after the latent."""
    check(mla(scale), inputs("mla", dtype=dtype, slots=DROPPED), tmp_path)


@pytest.mark.parametrize("rope", [rotate_half, partial])
def test_ways_to_write_rope(rope, tmp_path):
    check(gqa(rope), inputs(slots=DROPPED), tmp_path)


def test_slots_of_int32(tmp_path):
    args = inputs(slots=DROPPED)
    args[3] = args[3].int()
    check(gqa(), args, tmp_path)


def test_layers_of_one_pool(tmp_path):
    """Caches with gaps between pages: layers of a pool for keys and one for values."""
    args = inputs(slots=DROPPED)
    pools = [torch.full((PAGES, 3, PAGE_SIZE, KV_HEADS, DIM), value).bfloat16() for value in (0.5, 1.5)]

    def fn(qkv, cos, sin, slots, k_pool, v_pool):
        return gqa()(qkv, cos, sin, slots, k_pool[:, 1], v_pool[:, 2])

    check(fn, [*args[:4], *pools], tmp_path)


def test_views_of_one_pool(tmp_path):
    """They are inputs of one storage: both are written in place, by the one kernel that computes their rows."""
    args = inputs(slots=DROPPED)
    args[4:] = torch.stack(args[4:]).unbind(0)
    generated = generate(gqa(), *args)
    assert len(launches(generated.code)) == 2
    assert not cache_copies(generated.code, args[-1])
    expected, got = copied(args), copied(args)
    want = gqa()(*expected)
    (out,) = run_interpreted(generated, got, tmp_path)
    assert torch.equal(out, want)
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


def test_rows_computed_from_the_caches_that_they_go_to(tmp_path):
    """Every row is read before any is written."""

    def fn(qkv, cos, sin, slots, k_cache, v_cache):
        rows = k_cache[0], v_cache[0]
        spec_ops.append_kv(k_cache, v_cache, rows[1] * 2, rows[0] + rows[1], slots)
        return qkv + 1

    args = inputs(n=PAGE_SIZE, slots=[1, 2, 3, 0])
    for cache in args[4:]:
        cache[0] = torch.arange(PAGE_SIZE)[:, None, None] + cache[0]
    expected, got = [arg.clone() for arg in args], [arg.clone() for arg in args]
    fn(*expected)
    generated = generate(fn, *args)
    assert "append_kv" not in launches(generated.code)
    run_interpreted(generated, got, tmp_path)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)


def test_attention_between_two_appends_to_the_same_slots(tmp_path):
    """It sees what the first wrote and not what the second does."""

    def fn(qkv, cos, sin, slots, k_cache, v_cache, table, lens):
        q = gqa()(qkv, cos, sin, slots, k_cache, v_cache)[0]
        seen = spec_ops.mha_draft_decode(q[:, None], k_cache, v_cache, table, lens, backend="reference")
        gqa()(qkv * 2, cos, sin, slots, k_cache, v_cache)
        return seen

    slots = [0, 5, 9, -1, 2]
    table = torch.arange(PAGES, dtype=torch.int32).expand(len(slots), -1).clone()
    lens = torch.full((len(slots),), PAGES * PAGE_SIZE, dtype=torch.int32)
    check(fn, [*inputs(slots=slots), table, lens], tmp_path, None)
