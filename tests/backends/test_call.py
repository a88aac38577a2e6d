"""An attention call as one value: the arguments of every op under their names, and the facts that select its backend."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from spec_ops.backends import AttentionCall, AttentionMeta
from spec_ops.backends.call import RAGGED, STEPS
from spec_ops.ops.attention import HOST_PLAN_OPS, OPS

# What the ops call otherwise, or MLA's op has one of where GQA's has two.
NAMES = {"kv_cache": ("k_cache", "v_cache"), "kv_scale": ("k_scale", "v_scale")}


@pytest.mark.parametrize("ops", [OPS, HOST_PLAN_OPS], ids=["plain", "host_plan"])
@pytest.mark.parametrize("step", STEPS)
def test_every_argument_of_an_op_is_under_its_name(step, ops):
    names = [argument.name for argument in ops[step]._schema.arguments]
    given = {name: object() for name in names}
    call = AttentionCall.of(step, tuple(given.values()))
    found = {"step"}
    for name in names:
        for field in NAMES.get(name, (name,)):
            assert getattr(call, field) is given[name]
            found.add(field)
    left = {field.name: getattr(call, field.name) for field in fields(call) if field.name not in found}
    absent = {"tree_mask": None, "mask_len": 0} if step in RAGGED else {"q_indptr": None, "max_q_len": 0}
    absent["out"] = None  # of the ops of the name `_out` alone
    assert left == absent | ({} if step.startswith("mla_") else {"kv_lora_rank": None})


def test_facts():
    """Also that they are in the order of `AttentionMeta`, which is made of them by place."""
    call = AttentionCall(
        "mha_draft_decode", torch.zeros(2, 3, 8, 16), torch.zeros(5, 32, 4, 16).half(), torch.zeros(5, 32, 4, 24).half(), None,
        torch.zeros(2, 1), torch.zeros(2), tree_mask=torch.zeros(2, 3), softcap=1.0,
    )  # fmt: skip
    expected = AttentionMeta(
        step="mha_draft_decode", dtype=torch.float32, kv_dtype=torch.float16, num_heads=8, num_kv_heads=4, head_dim=16,
        v_head_dim=24, page_size=32, q_len=3, tree_mask=True, window=False, sinks=False, softcap=True,
    )  # fmt: skip
    assert call.meta() == expected
    assert (call.q_len, call.page_size, call.num_kv_heads, call.v_head_dim) == (3, 32, 4, 24)
    assert not call.is_mla
    assert not call.is_ragged


def test_facts_of_a_ragged_mla_call():
    cache = torch.zeros(5, 64, 24)
    call = AttentionCall(
        "mla_extend", torch.zeros(7, 8, 24), cache, cache, 16, torch.zeros(2, 1), torch.zeros(2), max_q_len=6,
        q_indptr=torch.zeros(3), window_left=0, sinks=torch.zeros(8),
    )  # fmt: skip
    expected = AttentionMeta(
        step="mla_extend", dtype=torch.float32, kv_dtype=torch.float32, num_heads=8, num_kv_heads=1, head_dim=24,
        v_head_dim=16, page_size=64, q_len=6, tree_mask=False, window=True, sinks=True, softcap=False,
    )  # fmt: skip
    assert call.meta() == expected
    assert (call.q_len, call.page_size, call.num_kv_heads, call.v_head_dim) == (6, 64, 1, 16)
    assert call.is_mla
    assert call.is_ragged
