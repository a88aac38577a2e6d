"""Wrong calls of every public op: the exception's type, the argument it names, what it says came, and caches left untouched.

Each case is one change to a call that is valid by itself (`test_the_unchanged_calls_are_valid`), so it fails for that change
alone.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import spec_ops
from tests.helpers.wrong_calls import (
    BS,
    CALLS,
    CASES,
    DIM,
    HEADS,
    INF,
    KV_HEADS,
    NAN,
    PAGE_SIZE,
    PAGES,
    Q_LEN,
    RANK,
    STEPS,
    WIDTH,
    Wrong,
    bad_integer,
    bad_scale,
    bad_tensor,
    int32,
    to_meta,
    transposed,
    wrong,
)

MHA, MLA = ([f"{kind}_{step}" for step in STEPS] for kind in ("mha", "mla"))
UNIFORM, RAGGED = [op for op in MHA + MLA if not op.endswith("_extend") or "draft" in op], ["mha_extend", "mla_extend"]

bad_tensor(MHA + MLA, "q", dtype=torch.float64, device=False)
for ops, cache in ((MHA, "k_cache"), (MHA, "v_cache"), (MLA, "kv_cache")):
    bad_tensor(ops, cache, dtype=None if cache == "k_cache" else torch.float16)
    wrong(ops, cache, "strides", **transposed(cache))
for dtype in (torch.float16, torch.int8):
    both = {c: lambda call, c=c, d=dtype: call[c].to(d) for c in ("k_cache", "v_cache")}
    wrong(MHA, "k_cache", str(dtype).removeprefix("torch."), TypeError, **both)
wrong(MLA, "kv_cache", "float8_e5m2", TypeError, kv_cache=lambda call: call["kv_cache"].to(torch.float8_e5m2))
for page_size in (0, 129):
    caches = {c: torch.zeros(2, page_size, KV_HEADS, DIM) for c in ("k_cache", "v_cache")}
    wrong(MHA, "k_cache", str(page_size), **caches)
    wrong(MLA, "kv_cache", str(page_size), kv_cache=torch.zeros(2, page_size, DIM))
wrong(MHA, "k_cache", "(0, 4, 2, 16)", **{c: torch.zeros(0, PAGE_SIZE, KV_HEADS, DIM) for c in ("k_cache", "v_cache")})
wrong(MLA, "kv_cache", "(0, 4, 16)", kv_cache=torch.zeros(0, PAGE_SIZE, DIM))
wrong(MHA, "k_cache", "shape (7, 4, 2, 15)", k_cache=lambda call: call["k_cache"][..., :-1])
wrong(MLA, "kv_cache", "shape (7, 4, 15)", kv_cache=lambda call: call["kv_cache"][..., :-1])
wrong(MHA, "v_cache", "shape (6, 4, 2, 16)", v_cache=lambda call: call["v_cache"][1:])
wrong(MHA, "v_cache", "shape (7, 4, 1, 16)", v_cache=lambda call: call["v_cache"][:, :, :1])
wrong(MHA, "q", "4 heads", **{c: torch.zeros(PAGES, PAGE_SIZE, 3, DIM) for c in ("k_cache", "v_cache")})
wrong(MHA, "q", "4 heads", **{c: torch.zeros(PAGES, PAGE_SIZE, 0, DIM) for c in ("k_cache", "v_cache")})
# A cache in FlashInfer's and vLLM's other layout, heads before the tokens of a page.
hnd = {c: torch.zeros(PAGES, KV_HEADS, 16, DIM) for c in ("k_cache", "v_cache")}
wrong(MHA, "q", "4 heads", **hnd)
for append in ("append_kv", "rope_append_kv"):
    wrong(append, "k_cache", "shape (7, 2, 16, 16)", **hnd)
bad_integer(MLA, "kv_lora_rank", 1, DIM)
for value in (0.0, -0.5, NAN, INF):
    wrong(MHA + MLA, "scale", value)
for value in (True, "1", int32(1)):
    wrong(MHA + MLA, "scale", value, TypeError)
wrong(MLA, "scale", None, TypeError)
bad_scale(MHA, "k_scale", "k_cache", "v_cache")
bad_scale(MHA, "v_scale", "k_cache", "v_cache")
bad_scale(MLA, "kv_scale", "kv_cache")

bad_tensor(MHA + MLA, "seq_lens", dtype=torch.int64)
bad_tensor(MHA + MLA, "block_tables", dtype=torch.int64)
wrong(MHA + MLA, "block_tables", "float32", TypeError, block_tables=torch.zeros(BS, WIDTH))
wrong(MHA + MLA, "block_tables", "shape (1, 3)", block_tables=lambda call: call["block_tables"][:1])
wrong(UNIFORM, "seq_lens", "shape (2,)", q=torch.zeros(3, Q_LEN, HEADS, DIM))
csr = {"kv_indptr": int32(0, 9, 14), "kv_indices": torch.arange(14)}
wrong(MHA + MLA, "kv_indptr", "only one", kv_indptr=csr["kv_indptr"])
wrong(MHA + MLA, "kv_indptr", "only one", kv_indices=csr["kv_indices"])
wrong(MHA + MLA, "kv_indptr", "int64", TypeError, **{**csr, "kv_indptr": csr["kv_indptr"].long()})
wrong(MHA + MLA, "kv_indices", "float32", TypeError, **{**csr, "kv_indices": csr["kv_indices"].float()})
wrong(MHA + MLA, "kv_indices", "device meta", **{**csr, "kv_indices": csr["kv_indices"].to("meta")})
wrong(MHA + MLA, "kv_indices", "shape (1, 14)", **{**csr, "kv_indices": csr["kv_indices"][None]})
wrong(MHA + MLA, "seq_lens_cpu", "shape (3,)", seq_lens_cpu=torch.zeros(3, dtype=torch.int64))
wrong(MHA + MLA, "seq_lens_cpu", "device meta", seq_lens_cpu=torch.zeros(BS, dtype=torch.int64, device="meta"))
wrong(MHA + MLA, "seq_lens_cpu", [9, 5], TypeError)
bad_integer(MHA + MLA, "max_seq_len", 1)
bad_integer(MHA + MLA, "window_left", -1)
wrong(MHA + MLA, "sinks", "shape (3,)", sinks=torch.zeros(3))
wrong(MHA + MLA, "sinks", "float64", TypeError, sinks=torch.zeros(HEADS, dtype=torch.float64))
wrong(MHA + MLA, "sinks", "device meta", sinks=torch.zeros(HEADS, device="meta"))
for value in (-1.0, NAN, INF):
    wrong(MHA + MLA, "softcap", value)
for value in (True, "30", None):
    wrong(MHA + MLA, "softcap", value, TypeError)
wrong(MHA + MLA, "backend", 3, TypeError)
wrong(MHA + MLA, "backend", None, TypeError)
wrong(MHA + MLA, "backend", "no_such_backend")

mask = torch.ones(BS, Q_LEN, dtype=torch.int64)
wrong(UNIFORM, "mask_len", "3", mask_len=3)
wrong(UNIFORM, "mask_len", "2", tree_mask=mask, mask_len=2)
wrong(UNIFORM, "mask_len", "0", tree_mask=mask, mask_len=0)
wrong(UNIFORM, "mask_len", "65", tree_mask=mask, mask_len=65)
wrong(UNIFORM, "mask_len", "65", tree_mask=torch.ones(BS, 65, dtype=torch.int64), q=torch.zeros(BS, 65, HEADS, DIM))
wrong(UNIFORM, "mask_len", "bool", TypeError, tree_mask=mask, mask_len=True)
wrong(UNIFORM, "tree_mask", "shape (2, 4)", tree_mask=torch.ones(BS, 4, dtype=torch.int64))
wrong(UNIFORM, "tree_mask", "int32", TypeError, tree_mask=mask.int())
wrong(UNIFORM, "tree_mask", "bool", TypeError, tree_mask=mask.bool())
wrong(UNIFORM, "tree_mask", "device meta", tree_mask=mask.to("meta"))
bad_tensor(RAGGED, "q_indptr", dtype=torch.int64)
wrong(RAGGED, "q_indptr", "shape (4,)", q_indptr=int32(0, 1, 2, 3))
bad_integer(RAGGED, "max_q_len", 1)

# Values inside tensors are looked at on CPU, where that needs no sync.
wrong(MHA + MLA, "seq_lens", "[5, 13]", IndexError, seq_lens=int32(13, 5))
wrong(MHA + MLA, "seq_lens", "[-1, 5]", IndexError, seq_lens=int32(-1, 5))
wrong(MHA + MLA, "block_tables", "[0, 7]", IndexError, block_tables=int32([0, 3, 1], [7, 6, 2]))
wrong(MHA + MLA, "block_tables", "[-1, 6]", IndexError, block_tables=int32([0, 3, -1], [5, 6, 2]))
wrong(MHA + MLA, "max_seq_len", "8 for 9", IndexError, max_seq_len=8)
wrong(RAGGED, "q_indptr", "[1, 3, 4]", IndexError, q_indptr=int32(1, 3, 4))
wrong(RAGGED, "q_indptr", "[0, 3, 2]", IndexError, q_indptr=int32(0, 3, 2))
wrong(RAGGED, "q_indptr", "[0, 3, 6]", IndexError, q_indptr=int32(0, 3, 6))
wrong(RAGGED, "max_q_len", "2 for 3", IndexError, max_q_len=2)

for op, caches in (("append_kv", ("k_cache", "v_cache")), ("append_mla_kv", ("kv_cache",))):
    for cache in caches:
        wrong(op, cache, [1.0], TypeError)
        wrong(op, cache, "shape (4,)", **{cache: torch.zeros(4)})
        wrong(op, cache, "float64", TypeError, **{cache: lambda call, c=cache: call[c].double()})
        wrong(op, cache, "strides", **transposed(cache))
        wrong(op, cache, "strides (0,", **{cache: lambda call, c=cache: call[c][:1].expand(PAGES, *call[c].shape[1:])})
        wrong(op, cache, "(7, 0,", **{cache: lambda call, c=cache: call[c][:, :0]})
        wrong(op, cache, "(2, 129,", **{cache: lambda call, c=cache: call[c].new_zeros(2, 129, *call[c].shape[2:])})
        wrong(op, cache, "(0, 4,", **{cache: lambda call, c=cache: call[c][:0]})
        bad_scale(op, cache[0] + "_scale" if op == "append_kv" else "kv_scale", *caches)
    bad_tensor(op, "slots", dtype=torch.int16)
    wrong(op, "slots", "shape (2,)", slots=int32(1, 2))
    wrong(op, "slots", "28", IndexError, slots=int32(1, 28, 2))
    wrong(op, "backend", "int", TypeError, backend=3)
    wrong(op, "backend", "'paper'", backend="paper")
wrong("append_kv", "v_cache", "shape (6, 4, 2, 16)", v_cache=lambda call: call["v_cache"][1:])
wrong("append_kv", "v_cache", "float16", TypeError, v_cache=lambda call: call["v_cache"].half())
wrong("append_kv", "v_cache", "device meta", **to_meta("v_cache"))
for name in ("k", "v"):
    bad_tensor("append_kv", name, dtype=torch.bfloat16)
    wrong("append_kv", name, "shape (3, 2, 15)", **{name: torch.zeros(3, KV_HEADS, DIM - 1)})
wrong("append_kv", "v", "shape (2, 2, 16)", v=torch.zeros(2, KV_HEADS, DIM))
for name in ("k", "v"):
    bad_tensor("rope_append_kv", name, dtype=torch.bfloat16)
    wrong("rope_append_kv", name, "shape (3, 2, 15)", **{name: torch.zeros(3, KV_HEADS, DIM - 1)})
for name in ("cos", "sin"):
    bad_tensor("rope_append_kv", name, dtype=torch.bfloat16)
    wrong("rope_append_kv", name, "shape (2, 8)", **{name: torch.zeros(2, DIM // 2)})
for name in ("q_norm", "k_norm"):
    wrong("rope_append_kv", name, "shape (15,)", **{name: torch.zeros(DIM - 1)})
    wrong("rope_append_kv", name, "float64", TypeError, **{name: torch.zeros(DIM, dtype=torch.float64)})
for value in (-1e-6, float("nan"), float("inf"), "1e-6"):
    wrong("rope_append_kv", "norm_eps", repr(value), norm_eps=value)
wrong("rope_append_kv", "cos", "shape (3, 9)", cos=torch.zeros(3, DIM // 2 + 1))
wrong("rope_append_kv", "sin", "shape (3, 7)", sin=torch.zeros(3, DIM // 2 - 1))
wrong("rope_append_kv", "q", "float64", TypeError, q=torch.zeros(3, HEADS, DIM, dtype=torch.float64))
wrong("rope_append_kv", "k_cache", "float16", TypeError, k_cache=lambda call: call["k_cache"].half())
wrong("rope_append_kv", "v_cache", "shape (6, 4, 2, 16)", v_cache=lambda call: call["v_cache"][1:])
wrong("rope_append_kv", "v_cache", "the same one", v_cache=lambda call: call["k_cache"])
wrong("rope_append_kv", "slots", "28", IndexError, slots=int32(1, 28, 2))
wrong("rope_append_kv", "slots", "shape (2,)", slots=int32(1, 2))
bad_tensor("append_mla_kv", "c_kv", dtype=torch.bfloat16)
bad_tensor("append_mla_kv", "k_rope", dtype=torch.bfloat16)
wrong("append_mla_kv", "c_kv", "shape (3, 17)", c_kv=torch.zeros(3, DIM + 1))
wrong("append_mla_kv", "k_rope", "shape (3, 3)", k_rope=torch.zeros(3, DIM - RANK - 1))
wrong("append_mla_kv", "k_rope", "shape (2, 4)", k_rope=torch.zeros(2, DIM - RANK))

wrong("move_kv", "caches", None, TypeError)
wrong("move_kv", "caches", "an empty", caches=[])
second = {
    "list": ([1.0], TypeError), "shape (28, 16)": (torch.zeros(28, DIM), ValueError),
    "float64": (torch.zeros(PAGES, PAGE_SIZE, DIM, dtype=torch.float64), TypeError),
    "shape (6, 4, 16)": (torch.zeros(6, PAGE_SIZE, DIM), ValueError),
    "strides (0,": (torch.zeros(1, PAGE_SIZE, DIM).expand(PAGES, -1, -1), ValueError),
    "strides": (torch.zeros(PAGES, DIM, PAGE_SIZE).transpose(1, 2), ValueError),
    "(7, 0, 16)": (torch.zeros(PAGES, 0, DIM), ValueError),
    "device meta": (torch.zeros(PAGES, PAGE_SIZE, DIM, device="meta"), ValueError),
}  # fmt: skip
for came, (cache, error) in second.items():
    wrong("move_kv", "caches[1]", came, error, caches=lambda call, cache=cache: [call["caches"][0], cache])
for name in ("src_slots", "dst_slots"):
    bad_tensor("move_kv", name, dtype=torch.uint8)
    wrong("move_kv", name, "28", IndexError, **{name: int32(28, 0)})
wrong("move_kv", "dst_slots", "shape (3,)", dst_slots=int32(4, 5, 6))

POOL = ["page_table", "kv_indices", "draft_kv_indices", "draft_kv_indices_steps"]
bad_tensor(POOL, "req_to_token", dtype=torch.int64, device=False)
bad_tensor(POOL, "req_pool_indices", dtype=torch.float32)
bad_tensor(POOL, "seq_lens", dtype=torch.int16)
wrong(POOL, "seq_lens", "shape (3,)", seq_lens=int32(1, 2, 3))
wrong(POOL, "req_pool_indices", "[3, 5]", IndexError, req_pool_indices=int32(3, 5))
wrong(POOL, "req_pool_indices", "[-1, 0]", IndexError, req_pool_indices=int32(-1, 0))
wrong(POOL, "seq_lens", "[25, 5]", IndexError, seq_lens=int32(25, 5))
wrong(POOL, "seq_lens", "[9, -1]", IndexError, seq_lens=int32(9, -1))
wrong("page_table", "seq_lens", "[9, 5]", IndexError, max_pages=2)
wrong("page_table", "out", "list", TypeError, out=[1])
wrong("page_table", "out", "int64", TypeError, out=torch.zeros(BS, 3).long())
wrong("page_table", "out", "device meta", out=torch.zeros(BS, 3, dtype=torch.int32, device="meta"))
wrong("page_table", "out", "shape (1, 3)", out=torch.zeros(1, 3, dtype=torch.int32))
wrong("page_table", "out", "shape (2, 7)", out=torch.zeros(BS, 7, dtype=torch.int32))
wrong("page_table", "out", "shape (2, 5)", out=torch.zeros(BS, 5, dtype=torch.int32), max_pages=4)
wrong("page_table", "out", "strides (1, 2)", out=torch.zeros(3, BS, dtype=torch.int32).t())
wrong("page_table", "seq_lens", "[9, 5]", IndexError, out=torch.zeros(BS, 2, dtype=torch.int32))
bad_integer(["page_table", *POOL[2:]], "page_size", 1, 128)
bad_integer("page_table", "max_pages", 1, 6)
bad_integer(POOL[1:], "capacity", 0)
wrong(POOL[1:], "capacity", "13", IndexError, capacity=13)
bad_integer(POOL[2:], "num_steps", 1)
bad_integer(POOL[2:], "topk", 1)
bad_integer("draft_kv_indices", "step", 0, 2)
wrong(POOL[2:], "req_to_token", "24", IndexError, topk=6)

ACCEPT = ["accept_greedy", "accept_sampled", "accept_sampled_logits"]
parents = torch.tensor([[-1, 0, 0]] * BS)
bad_tensor(ACCEPT, "candidates", dtype=torch.float32, device=False)
wrong(ACCEPT, "candidates", "shape (2, 0)", candidates=torch.zeros(BS, 0, dtype=torch.int64))
wrong(ACCEPT, "parents", "int32", TypeError, parents=parents.int())
wrong(ACCEPT, "parents", "shape (2, 2)", parents=parents[:, :2])
wrong(ACCEPT, "parents", "device meta", parents=parents.to("meta"))
wrong(ACCEPT, "path_len", "2", path_len=2)
for came, error in ((0, ValueError), (4, ValueError), (True, TypeError), (2.0, TypeError)):
    shown = str(came) if error is ValueError else type(came).__name__
    wrong(ACCEPT, "path_len", shown, error, path_len=came, parents=parents)
bad_tensor("accept_greedy", "target_tokens", dtype=torch.float32)
SAMPLED = ACCEPT[1:]
bad_tensor("accept_sampled", "target_probs", dtype=torch.float16)
bad_tensor("accept_sampled_logits", "target_logits", dtype=torch.float64)
bad_tensor("accept_sampled_logits", "target_support", dtype=torch.int32)
bad_tensor("accept_sampled_logits", "temperature", dtype=torch.float16)
for name in ("uniforms", "final_uniforms"):
    bad_tensor(SAMPLED, name, dtype=torch.float16)
wrong("accept_sampled", "target_probs", "shape (2, 2, 8)", target_probs=torch.zeros(BS, 2, 8))
wrong("accept_sampled_logits", "target_logits", "shape (2, 2, 8)", target_logits=torch.zeros(BS, 2, 8))
wrong("accept_sampled_logits", "target_logits", "shape (2, 3, 0)", target_logits=torch.zeros(BS, Q_LEN, 0))
wrong("accept_sampled_logits", "target_support", "shape (2, 3, 2)", target_support=lambda call: call["target_support"][..., :2])
wrong(
    "accept_sampled_logits",
    "target_support",
    "8 to 8",
    IndexError,
    target_support=torch.tensor([0, 8, 5]).expand(BS, Q_LEN, 3),
)
wrong("accept_sampled_logits", "candidates", "1 to 8", IndexError, candidates=torch.tensor([[1, 1, 8]] * BS))
wrong(SAMPLED, "uniforms", "shape (2, 2)", uniforms=torch.zeros(BS, 2))
draft = {"draft_probs": torch.rand(BS, Q_LEN - 1, 8)}
draft_support = torch.tensor([0, -1, 2**44]).expand(BS, Q_LEN - 1, 3)
drafts = {
    "accept_sampled": draft,
    "accept_sampled_logits": {"draft_logits": torch.rand(BS, Q_LEN - 1, 8), "draft_support": draft_support},
}
for op, given in drafts.items():
    for name in ("threshold_single", "threshold_acc"):
        for value in (0.0, -0.5, 1.5, NAN, INF):
            wrong(op, name, value)
        for value in (True, None, "1"):
            wrong(op, name, value, TypeError)
        wrong(op, name, "0.5", **given, **{name: 0.5})
    rows = next(iter(given))
    wrong(op, rows, "a tensor", **given, parents=parents)
    wrong(op, rows, "shape (2, 3, 8)", **given | {rows: torch.rand(BS, Q_LEN, 8)})
    wrong(op, rows, "shape (2, 2, 7)", **given | {rows: torch.rand(BS, Q_LEN - 1, 7)})
    wrong(op, rows, "float64", TypeError, **given | {rows: torch.rand(BS, Q_LEN - 1, 8).double()})
wrong("accept_sampled", "draft_to_target", "a tensor", draft_to_target=torch.arange(8))
wrong("accept_sampled", "draft_to_target", "shape (7,)", **draft, draft_to_target=torch.arange(7))
wrong("accept_sampled", "draft_to_target", "int32", TypeError, **draft, draft_to_target=torch.arange(8).int())
op, given = "accept_sampled_logits", drafts["accept_sampled_logits"]
wrong(op, "draft_support", "a tensor", draft_support=draft_support)
wrong(op, "draft_support", "NoneType", TypeError, **given | {"draft_support": None})
wrong(op, "draft_support", "int32", TypeError, **given | {"draft_support": draft_support.int()})
wrong(op, "draft_support", "-2 to -2", IndexError, **given | {"draft_support": draft_support - torch.tensor([2, 0, 0])})
wrong(op, "target_to_draft", "a tensor", target_to_draft=torch.arange(8))
wrong(op, "target_to_draft", "shape (7,)", **given, target_to_draft=torch.arange(7))
wrong(op, "target_to_draft", "int32", TypeError, **given, target_to_draft=torch.arange(8).int())
wrong(op, "target_to_draft", "0 to 8", IndexError, **given, target_to_draft=torch.tensor([*range(7), 8]))
wrong(op, "block", "True", block=True)
wrong(op, "block", "int", TypeError, **given, block=1)

bad_tensor("route_experts", "logits", dtype=torch.float64, device=False)
bad_tensor("route_experts", "bias", dtype=torch.float16)
wrong("route_experts", "logits", "(2, 1025)", logits=torch.zeros(BS, 1025))
wrong("route_experts", "logits", "(2, 0)", logits=torch.zeros(BS, 0))
wrong("route_experts", "bias", "shape (7,)", bias=torch.zeros(7))
wrong("route_experts", "scoring", "Softmax")
bad_integer("route_experts", "groups", 1)
wrong("route_experts", "groups", 3)
wrong("route_experts", "groups", "8 groups of one expert", groups=8)
bad_integer("route_experts", "top_groups", 1, 4)
bad_integer("route_experts", "k", 1, 4)
wrong("route_experts", "k", "33", k=33, logits=torch.zeros(BS, 64), bias=None)
wrong("route_experts", "renormalize", 1, TypeError)
wrong("route_experts", "scale", "1", TypeError)
wrong("route_experts", "dtype", torch.float64)
wrong("route_experts", "dtype", "float32", TypeError)
for value in (0.0, -1.0, NAN, INF):
    wrong("route_experts", "scale", value)

bad_tensor("moe_experts", "x", dtype=torch.float64, device=False)
for name, dtype in (("topk_ids", torch.int16), ("topk_weights", torch.float64)):
    bad_tensor("moe_experts", name, dtype=dtype)
for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
    bad_tensor("moe_experts", name, dtype=torch.bfloat16)
wrong("moe_experts", "topk_ids", "shape (3, 2)", topk_ids=torch.zeros(3, 2, dtype=torch.int64))
wrong("moe_experts", "topk_ids", "5", IndexError, topk_ids=int32([0, 5], [2, -1]))
wrong("moe_experts", "topk_weights", "shape (2, 3)", topk_weights=torch.zeros(BS, 3))
wrong("moe_experts", "gate_up", "shape (5, 8, 12)", gate_up=torch.zeros(5, 8, 12))
wrong("moe_experts", "gate_up", "shape (5, 12, 8)", transposed=True)
wrong("moe_experts", "gate_up", "shape (5, 11, 8)", gate_up=torch.zeros(5, 11, 8))
wrong("moe_experts", "gate_up", "shape (0, 12, 8)", gate_up=torch.zeros(0, 12, 8))
wrong("moe_experts", "down", "shape (5, 6, 8)", down=torch.zeros(5, 6, 8))
wrong("moe_experts", "down", "shape (4, 8, 6)", down=torch.zeros(4, 8, 6))
wrong("moe_experts", "down", "shape (5, 8, 6)", gated=False)
wrong("moe_experts", "gate_up_bias", "shape (5, 6)", gate_up_bias=torch.zeros(5, 6))
wrong("moe_experts", "down_bias", "shape (4, 8)", down_bias=torch.zeros(4, 8))
wrong("moe_experts", "activation", "swish")
for name in ("gated", "interleaved", "transposed"):
    wrong("moe_experts", name, 1, TypeError)
plain = {"gated": False, "down": torch.zeros(5, 8, 12)}
wrong("moe_experts", "interleaved", "True", interleaved=True, **plain)
wrong("moe_experts", "limit", "7.0", limit=7.0, **plain)
wrong("moe_experts", "beta", "1.0", beta=1.0, **plain)
wrong("moe_experts", "alpha", "1.5", alpha=1.5, activation="gelu")
for name in ("limit", "alpha", "beta"):
    wrong("moe_experts", name, "1", TypeError)
    for value in (-1.0, NAN, INF):
        wrong("moe_experts", name, value)

eight = {"gate_up": torch.zeros(5, 12, 8).to(torch.float8_e4m3fn), "down": torch.zeros(5, 8, 6).to(torch.float8_e4m3fn)}
eight_scales = {"gate_up_scale": torch.ones(5, 2, 1), "down_scale": torch.ones(5, 1, 1)}
wrong("moe_experts", "gate_up_scale", "a tensor", gate_up_scale=torch.ones(5, 1, 1))
wrong("moe_experts", "gate_up_scale", "None", **eight)
wrong("moe_experts", "gate_up_scale", "int32", TypeError, **eight, gate_up_scale=torch.ones(5, 1, 1, dtype=torch.int32))
wrong("moe_experts", "gate_up_scale", "shape (5, 3, 1)", **eight, gate_up_scale=torch.ones(5, 3, 1))
wrong("moe_experts", "gate_up_scale", "shape (4, 2, 1)", **eight, gate_up_scale=torch.ones(4, 2, 1))
wrong("moe_experts", "down_scale", "shape (5, 2, 1)", **eight, **{**eight_scales, "down_scale": torch.ones(5, 2, 1)})
wrong("moe_experts", "down", "float32", TypeError, **{**eight, **eight_scales, "down": torch.zeros(5, 8, 6)})
four = {"gate_up": torch.zeros(5, 12, 4, dtype=torch.uint8), "down": torch.zeros(5, 8, 3, dtype=torch.uint8)}
wrong("moe_experts", "gate_up_scale", "shape (5, 12, 1)", **four, gate_up_scale=torch.zeros(5, 12, 1, dtype=torch.uint8))
wrong("moe_experts", "gate_up_scale", "float64", TypeError, **four, gate_up_scale=torch.zeros(5, 12, 1, dtype=torch.float64))
wrong("moe_experts", "gate_up_scale", "shape (5, 12, 1)", **four, gate_up_scale=torch.zeros(5, 12, 1))  # of int4

SAMPLING = ["sampling_support", "sample_logits", "sampling_probs"]
bad_tensor(SAMPLING, "logits", dtype=torch.float64, device=False)
bad_tensor(SAMPLING, "temperature", dtype=torch.float16)
bad_tensor("sample_logits", "uniforms", dtype=torch.float64)
wrong(SAMPLING, "logits", "shape (2, 0)", logits=torch.zeros(BS, 0))
wrong(SAMPLING, "logits", "524288", logits=torch.zeros(BS, 1).expand(BS, 2**19))
wrong(SAMPLING, "temperature", "float", TypeError, temperature=1.0)
wrong(SAMPLING, "top_k", "float32", TypeError, top_k=torch.ones(BS))
wrong(SAMPLING, "top_k", "shape (3,)", top_k=torch.ones(3, dtype=torch.int64))
for name in ("top_p", "min_p"):
    wrong(SAMPLING, name, "float64", TypeError, **{name: torch.ones(BS).double()})
    wrong(SAMPLING, name, "device meta", **{name: torch.ones(BS, device="meta")})
wrong("sample_tokens", "probs", "float16", TypeError, probs=torch.rand(BS, 8).half())
wrong("sample_tokens", "probs", "shape (2, 0)", probs=torch.rand(BS, 0))
wrong("sample_tokens", "probs", "shape ()", probs=torch.tensor(1.0))
bad_tensor("sample_tokens", "uniforms", dtype=torch.float64)

bad_tensor("select_draft_tokens", "scores", dtype=torch.float64, device=False)
bad_tensor("select_draft_tokens", "tokens", dtype=torch.float32)
bad_integer("select_draft_tokens", "num_tokens", 1, 6)
wide = {"scores": torch.rand(BS, 100), "tokens": torch.ones(BS, 100, dtype=torch.int64)}
wrong("select_draft_tokens", "num_tokens", "64", num_tokens=64, **wide)
bad_tensor("build_tree", "selected_index", dtype=torch.int32, device=False)
bad_tensor("build_tree", "parent_list", dtype=torch.int32)
bad_tensor("build_tree", "seq_lens", dtype=torch.float32)
bad_integer("build_tree", "topk", 1)
wrong("build_tree", "selected_index", "shape (2, 64)", selected_index=torch.zeros(BS, 64, dtype=torch.int64))
wrong("build_tree", "selected_index", "shape (2, 0)", selected_index=torch.zeros(BS, 0, dtype=torch.int64))
wrong("build_tree", "parent_list", "shape (1, 3)", parent_list=torch.tensor([[-1, 0, 1]]))
wrong("build_tree", "selected_index", "orphan", selected_index=torch.tensor([[0, 4, 5]] * BS))

bad_tensor("lookup_drafts", "tokens", dtype=torch.float32, device=False)
bad_tensor("lookup_drafts", "lens", dtype=torch.int16)
wrong("lookup_drafts", "lens", "shape (3,)", lens=int32(9, 5, 1))
bad_integer("lookup_drafts", "num_steps", 1, 63)
bad_integer("lookup_drafts", "max_ngram", 1, 64)
bad_integer("lookup_drafts", "min_ngram", 1, 8)
for name, lens in (("[10, 5]", int32(10, 5)), ("[9, -1]", int32(9, -1))):
    wrong("lookup_drafts", "lens", name, lens=lens)

bad_tensor("topk_logits", "logits", dtype=torch.float64, device=False)
wrong("topk_logits", "logits", "shape ()", logits=torch.tensor(1.0))
bad_integer("topk_logits", "k", 1, 9)
wrong("topk_logits", "k", "33", logits=torch.randn(BS, 50), k=33)
wrong("topk_logits", "logits", "rows of 1048577", logits=torch.zeros(1, (1 << 20) + 1))
wrong("topk_logits", "scores", "'sigmoid'", scores="sigmoid")
wrong("topk_logits", "dtype", "float64", TypeError, dtype=torch.float64)

for op in ("tree_mask_to_qlen_mask", "tree_mask_to_full_mask"):
    bad_tensor(op, "tree_mask", dtype=torch.int32, device=False)
    wrong(op, "tree_mask", "65", tree_mask=torch.ones(BS, 65, dtype=torch.int64))
bad_tensor("qlen_mask_to_tree_mask", "mask", dtype=torch.int64, device=False)
wrong("qlen_mask_to_tree_mask", "mask", "shape (2, 3, 4)", mask=torch.ones(BS, 3, 4, dtype=torch.bool))
wrong("qlen_mask_to_tree_mask", "mask", "65", mask=torch.ones(BS, 65, 65, dtype=torch.bool))
for op in ("tree_mask_to_full_mask", "full_mask_to_tree_mask"):
    for value in (4, [-1], [2.0], [True], None):
        wrong(op, "prefix_lens", str(value), TypeError, prefix_lens=value)
wrong("tree_mask_to_full_mask", "prefix_lens", "1", prefix_lens=[4])
bad_integer("full_mask_to_tree_mask", "num_tokens", 1, 64)
bad_tensor("full_mask_to_tree_mask", "mask", dtype=torch.int64, device=False)
wrong("full_mask_to_tree_mask", "prefix_lens", "float32", TypeError, prefix_lens=torch.zeros(BS))
wrong("full_mask_to_tree_mask", "prefix_lens", "shape (1, 2)", prefix_lens=int32([2, 0]))
wrong("full_mask_to_tree_mask", "prefix_lens", "device meta", prefix_lens=int32(2, 0).to("meta"))
wrong("full_mask_to_tree_mask", "mask", "11", IndexError, mask=torch.ones(11).bool(), prefix_lens=int32(2, 0))
wrong("full_mask_to_tree_mask", "mask", "strides (2,)", mask=torch.ones(24).bool()[::2], prefix_lens=int32(2, 0))
wrong("full_mask_to_tree_mask", "mask", "shape (11,)", mask=torch.ones(11, dtype=torch.bool))
wrong("full_mask_to_tree_mask", "mask", "a hidden", mask=torch.arange(12) != 2)


def identifier(case: Wrong) -> str:
    return f"{case.op}-{case.arg}-{case.came}"


def tensors(call: dict[str, Any]) -> list[torch.Tensor]:
    items = [item for value in call.values() for item in (value if isinstance(value, list) else [value])]
    return [item for item in items if isinstance(item, torch.Tensor) and item.device.type != "meta"]


def stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def test_the_cases_cover_every_public_op():
    functions = {name for name in spec_ops.ops.__all__ if name not in ("Accepted", "Sampled", "Tree")}
    assert set(CALLS) == functions
    assert {case.op for case in CASES} == functions


@pytest.mark.parametrize("op", CALLS)
def test_the_unchanged_calls_are_valid(op):
    getattr(spec_ops, op)(**CALLS[op]())


@pytest.mark.parametrize("case", CASES, ids=identifier)
def test_wrong_call(case):
    call = case.call()
    before = [stored_bytes(tensor) for tensor in tensors(call)]
    error = case.raised(call)
    assert type(error) is case.error, error
    assert str(error).startswith(f"{case.op}: `{case.arg}` must ")
    _, got, came = str(error).partition(", got ")
    assert got, error
    assert case.came in came
    for tensor, was in zip(tensors(call), before, strict=True):
        assert torch.equal(stored_bytes(tensor), was)


@pytest.mark.parametrize(
    "op", ["mha_target_verify", "mla_extend", "append_kv", "append_mla_kv", "rope_append_kv", "page_table", "build_tree"]
)
def test_checks_are_not_skipped_while_tracing(op):
    """The message reaches the user through Dynamo's, as that of an op of torch does."""
    case = next(c for c in CASES if c.op == op and c.error is TypeError and c.came.startswith(("float", "int")))
    call = case.call()

    def function(**kwargs):
        return getattr(spec_ops, op)(**kwargs)

    for fullgraph in (True, False):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=rf"{op}: `{case.arg}` must .*, got {case.came}"):
            torch.compile(function, backend="eager", fullgraph=fullgraph)(**call)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["mha_draft_decode", "mla_target_verify", "append_kv", "append_mla_kv", "rope_append_kv"])
def test_what_dynamo_leaves_out_the_fake_checks(op):
    """A wrong tensor is refused in a compiled function too, with the message of the uncompiled one: one for each argument."""
    wrong = {c.arg: c for c in CASES if c.op == op and isinstance(c.call().get(c.arg), torch.Tensor)}
    assert len(wrong) > 3
    for case in wrong.values():
        torch._dynamo.reset()
        expected = re.escape(str(case.raised(case.call())))
        with pytest.raises(Exception, match=expected):
            torch.compile(lambda case=case, **kwargs: getattr(spec_ops, op)(**kwargs), backend="eager", fullgraph=True)(
                **case.call()
            )


def test_a_cache_in_another_layout_says_which_is_read():
    pages = {c: torch.zeros(PAGES, KV_HEADS, 16, DIM) for c in ("k_cache", "v_cache")}
    for name, told in (
        ("mha_draft_decode", r"read as \[pages, page_size, heads, dim\] \(NHD\)"),
        ("append_kv", r"2 heads, dim\] \(NHD\)"),
    ):
        with pytest.raises(ValueError, match=told):
            getattr(spec_ops, name)(**{**CALLS[name](), **pages})
