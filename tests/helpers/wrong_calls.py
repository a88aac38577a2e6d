"""A valid call of every public op, and cases that change one thing of it: the exception's type, the argument it names, and what
it says came."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spec_ops

FP8 = torch.float8_e4m3fn
BS, Q_LEN, HEADS, KV_HEADS, DIM, RANK = 2, 3, 4, 2, 16, 12
PAGES, PAGE_SIZE, WIDTH, ROWS = 7, 4, 3, 5
STEPS = ("draft_decode", "target_verify", "draft_extend", "extend")
NAN, INF = float("nan"), float("inf")


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention_call(kind: str, step: str) -> dict[str, Any]:
    if kind == "mha":
        call = {name: torch.randn(PAGES, PAGE_SIZE, KV_HEADS, DIM) for name in ("k_cache", "v_cache")}
    else:
        call = {"kv_cache": torch.randn(PAGES, PAGE_SIZE, DIM), "kv_lora_rank": RANK, "scale": 0.25}
    call |= {"block_tables": int32([0, 3, 1], [5, 6, 2]), "seq_lens": int32(9, 5)}
    if step == "extend":
        return call | {"q": torch.randn(Q_LEN + 2, HEADS, DIM), "q_indptr": int32(0, 3, 4), "max_q_len": Q_LEN}
    return call | {"q": torch.randn(BS, Q_LEN, HEADS, DIM)}


def append_kv_call() -> dict[str, Any]:
    call = {name: torch.randn(PAGES, PAGE_SIZE, KV_HEADS, DIM) for name in ("k_cache", "v_cache")}
    return call | {"k": torch.randn(3, KV_HEADS, DIM), "v": torch.randn(3, KV_HEADS, DIM), "slots": int32(0, 9, -1)}


def rope_append_kv_call() -> dict[str, Any]:
    angles = {name: torch.randn(3, DIM // 2) for name in ("cos", "sin")}
    return append_kv_call() | {"q": torch.randn(3, HEADS, DIM)} | angles


def append_mla_kv_call() -> dict[str, Any]:
    rows = {"c_kv": torch.randn(3, RANK), "k_rope": torch.randn(3, DIM - RANK)}
    return {"kv_cache": torch.randn(PAGES, PAGE_SIZE, DIM), **rows, "slots": int32(0, 9, -1)}


def move_kv_call() -> dict[str, Any]:
    caches = [torch.randn(PAGES, PAGE_SIZE, DIM) for _ in range(2)]
    return {"caches": caches, "src_slots": int32(1, 2), "dst_slots": int32(2, 3)}


def pool_call(**rest: Any) -> dict[str, Any]:
    table = torch.arange(ROWS * 24, dtype=torch.int32).reshape(ROWS, 24)
    return {"req_to_token": table, "req_pool_indices": int32(3, 0), "seq_lens": int32(9, 5), **rest}


def accept_sampled_call() -> dict[str, Any]:
    probs = torch.softmax(torch.randn(BS, Q_LEN, 8), -1)
    tokens = {"candidates": torch.ones(BS, Q_LEN, dtype=torch.int64), "target_probs": probs}
    return tokens | {"uniforms": torch.rand(BS, Q_LEN), "final_uniforms": torch.rand(BS)}


def accept_sampled_logits_call() -> dict[str, Any]:
    logits, temperature = torch.randn(BS, Q_LEN, 8), torch.ones(BS)
    tokens = {"candidates": torch.ones(BS, Q_LEN, dtype=torch.int64), "target_logits": logits}
    tokens |= {"target_support": spec_ops.sampling_support(logits, temperature), "temperature": temperature}
    return tokens | {"uniforms": torch.rand(BS, Q_LEN), "final_uniforms": torch.rand(BS)}


def moe_experts_call() -> dict[str, Any]:
    """Five experts of 6 rows of gate and up each."""
    routing = {"topk_ids": int32([0, 4], [2, -1]), "topk_weights": torch.rand(BS, 2)}
    stacks = {"gate_up": torch.randn(5, 12, 8), "down": torch.randn(5, 8, 6)}
    return {"x": torch.randn(BS, 8), **routing, **stacks, "gate_up_bias": torch.randn(5, 12), "down_bias": torch.randn(5, 8)}


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"{kind}_{step}": (lambda k=kind, s=step: attention_call(k, s)) for kind in ("mha", "mla") for step in STEPS},
    "append_kv": append_kv_call,
    "rope_append_kv": rope_append_kv_call,
    "append_mla_kv": append_mla_kv_call,
    "move_kv": move_kv_call,
    "page_table": lambda: pool_call(page_size=PAGE_SIZE),
    "kv_indices": pool_call,
    "draft_kv_indices": lambda: pool_call(step=1, num_steps=3, topk=2, page_size=1),
    "draft_kv_indices_steps": lambda: pool_call(num_steps=3, topk=2, page_size=1),
    "accept_greedy": lambda: {name: torch.ones(BS, Q_LEN, dtype=torch.int64) for name in ("candidates", "target_tokens")},
    "accept_sampled": accept_sampled_call,
    "accept_sampled_logits": accept_sampled_logits_call,
    "sampling_support": lambda: {"logits": torch.randn(BS, 8), "temperature": torch.ones(BS)},
    "sample_logits": lambda: {"logits": torch.randn(BS, 8), "temperature": torch.ones(BS), "uniforms": torch.rand(BS)},
    "route_experts": lambda: {"logits": torch.randn(BS, 8), "k": 2, "bias": torch.randn(8), "groups": 4, "top_groups": 2},
    "moe_experts": moe_experts_call,
    "sampling_probs": lambda: {"logits": torch.randn(BS, 8), "temperature": torch.ones(BS)},
    "sample_tokens": lambda: {"probs": torch.rand(BS, 8), "uniforms": torch.rand(BS)},
    "select_draft_tokens": lambda: {
        "scores": torch.rand(BS, 6), "tokens": torch.ones(BS, 6, dtype=torch.int64), "num_tokens": 4
    },
    "build_tree": lambda: {
        "parent_list": torch.tensor([[-1, 0, 1]] * BS), "selected_index": torch.tensor([[0, 1, 3]] * BS),
        "seq_lens": int32(4, 5), "topk": 2,
    },
    "lookup_drafts": lambda: {"tokens": torch.ones(BS, 9, dtype=torch.int64), "lens": int32(9, 5), "num_steps": 3},
    "topk_logits": lambda: {"logits": torch.randn(BS, 9), "k": 3},
    "tree_mask_to_qlen_mask": lambda: {"tree_mask": torch.ones(BS, Q_LEN, dtype=torch.int64)},
    "qlen_mask_to_tree_mask": lambda: {"mask": torch.ones(BS, Q_LEN, Q_LEN, dtype=torch.bool)},
    "tree_mask_to_full_mask": lambda: {"tree_mask": torch.ones(BS, Q_LEN, dtype=torch.int64), "prefix_lens": [2, 0]},
    "full_mask_to_tree_mask": lambda: {
        "mask": torch.ones(2 * (4 + 2), dtype=torch.bool), "prefix_lens": [4], "num_tokens": 2
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Wrong:
    """`changes` to a valid call (a function gets the call) raise `error`, naming `arg` and saying that `came` came."""

    op: str
    arg: str
    came: Any
    error: type[Exception]
    changes: dict[str, Any]

    def call(self) -> dict[str, Any]:
        torch.manual_seed(0)
        call = CALLS[self.op]()
        return call | {name: value(call) if callable(value) else value for name, value in self.changes.items()}

    def raised(self, call: dict[str, Any]) -> Exception:
        with pytest.raises(Exception) as caught:
            getattr(spec_ops, self.op)(**call)
        return caught.value


CASES: list[Wrong] = []


def wrong(ops: str | list[str], arg: str, came: Any, error: type[Exception] = ValueError, **changes: Any) -> None:
    """One case per op; without `changes`, `arg` itself is replaced by `came`."""
    for op in [ops] if isinstance(ops, str) else ops:
        shown = came if isinstance(came, str) and changes else came if changes else type(came).__name__
        if not changes and error is ValueError:
            shown = repr(came) if isinstance(came, str) else str(came)
        CASES.append(Wrong(op, arg, shown, error, changes or {arg: came}))


def to_meta(name: str) -> dict[str, Any]:
    return {name: lambda call: call[name].to("meta")}


def bad_tensor(ops: str | list[str], name: str, *, dtype: torch.dtype | None = None, device: bool = True) -> None:
    """What every tensor argument must refuse: no tensor, another rank, another dtype, another device."""
    wrong(ops, name, [1.0], TypeError)
    wrong(ops, name, "shape (1, 1, 1, 1, 1)", **{name: lambda call: call[name].new_zeros((1,) * 5)})
    if dtype is not None:
        shown = str(dtype).removeprefix("torch.")
        wrong(ops, name, shown, TypeError, **{name: lambda call: call[name].to(dtype)})
    if device:
        wrong(ops, name, "device meta", **to_meta(name))


def bad_integer(ops: str | list[str], name: str, low: int, high: int | None = None) -> None:
    for value in (True, 2.0, "2"):
        wrong(ops, name, value, TypeError)
    wrong(ops, name, low - 1)
    if high is not None:
        wrong(ops, name, high + 1)


def bad_scale(ops: str | list[str], name: str, *caches: str) -> None:
    """Scales belong to fp8 caches, must be given with them, and must be positive finite numbers."""
    fp8 = {cache: lambda call, cache=cache: call[cache].to(FP8) for cache in caches}
    valid = {other: 1.0 for other in ("k_scale", "v_scale") if "k_cache" in caches}
    wrong(ops, name, "0.5", **{name: 0.5})
    wrong(ops, name, "None", **fp8, **{**valid, name: None})
    for value in (0.0, -1.0, NAN, INF):
        wrong(ops, name, str(value), **fp8, **{**valid, name: value})
    for value in (True, "1"):
        wrong(ops, name, type(value).__name__, TypeError, **fp8, **{**valid, name: value})


def transposed(name: str) -> dict[str, Any]:
    return {name: lambda call: call[name].transpose(-1, -2).contiguous().transpose(-1, -2)}
