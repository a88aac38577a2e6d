"""Small objects shaped as SGLang's `ForwardMode`, `ForwardBatch`, pools, `RadixAttention` and `ModelRunner`, without SGLang."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

HEADS, KV_HEADS, DIM, CONTEXT = 4, 2, 16, 48
RANK, ROPE = 16, 8


class Mode(enum.Enum):
    EXTEND, DECODE, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, SPLIT_PREFILL = range(6)

    def is_idle(self) -> bool:
        return self is Mode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (Mode.DECODE, Mode.IDLE)

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is Mode.DRAFT_EXTEND_V2

    def is_extend(self) -> bool:
        return self in (Mode.EXTEND, Mode.TARGET_VERIFY)


class WriteLoc(NamedTuple):
    loc: torch.Tensor
    swa_loc: torch.Tensor | None


class MHATokenToKVPool:
    """`[slots, heads, dim]`, or with `hnd` pages of `[heads, tokens, dim]`; divides by scales where it stores another dtype."""

    def __init__(self, slots: int, page_size: int, dtype: torch.dtype = torch.float32, hnd: bool = False) -> None:
        self.dtype, self.page_size, self.head_num, self.head_dim = dtype, page_size, KV_HEADS, DIM
        self.rows = [torch.full((slots, KV_HEADS, DIM), float("nan")).to(dtype) for _ in range(2)]
        self.hnd = hnd

    def set_kv_buffer(self, layer: Any, loc: WriteLoc, k: torch.Tensor, v: torch.Tensor, k_scale=None, v_scale=None) -> None:
        for rows, new, scale in zip(self.rows, (k, v), (k_scale, v_scale), strict=True):
            rows[loc.loc] = (new / scale if scale is not None and new.dtype != self.dtype else new).to(self.dtype)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        if not self.hnd:
            return tuple(self.rows)
        return tuple(rows.view(-1, self.page_size, KV_HEADS, DIM).transpose(1, 2).contiguous() for rows in self.rows)


class MLATokenToKVPool:
    def __init__(self, slots: int, page_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.page_size = dtype, page_size
        self.rows = torch.full((slots, 1, RANK + ROPE), float("nan")).to(dtype)

    def set_kv_buffer(self, layer: Any, loc: WriteLoc, k: torch.Tensor, v: torch.Tensor) -> None:
        self.rows[loc.loc] = k.to(self.dtype)

    def set_mla_kv_buffer(self, layer: Any, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
        self.rows[loc] = torch.cat([k_nope, k_rope], -1).to(self.dtype)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.rows


def runner(page_size: int = 4, *, mla: bool = False, pool: Any = None, requests: int = 6, **arguments: Any) -> SimpleNamespace:
    """A `ModelRunner`; row 0 of its table and page 0 are SGLang's sink, requests have pages of their own in a random order."""
    width = -(-CONTEXT // page_size)
    order = torch.randperm(requests * width, generator=torch.Generator().manual_seed(0)) + 1
    table = (order.view(requests, width, 1) * page_size + torch.arange(page_size)).flatten(1)
    table = torch.cat([torch.zeros(1, table.shape[1]), table]).to(torch.int32)
    slots = (requests * width + 1) * page_size
    if pool is None:
        pool = (MLATokenToKVPool if mla else MHATokenToKVPool)(slots, page_size)
    speculation = {
        "speculative_algorithm": None, "speculative_num_draft_tokens": None, "speculative_eagle_topk": None,
        "speculative_num_steps": None, "speculative_attention_mode": "prefill",
        "get_attention_backends": lambda: ("spec_ops", "spec_ops"),
    }  # fmt: skip
    config = SimpleNamespace(
        context_len=CONTEXT, is_encoder_decoder=False, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
    )  # fmt: skip
    return SimpleNamespace(
        device="cpu", page_size=page_size, dtype=torch.float32, use_mla_backend=mla, is_draft_worker=False, tp_size=1,
        token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table), model_config=config,
        server_args=SimpleNamespace(**{**speculation, **arguments}),
        model=SimpleNamespace(modules=lambda: [SimpleNamespace(), layer(mla)]),
    )  # fmt: skip


def slots_of(page_size: int, requests: int = 6) -> int:
    return (requests * -(-CONTEXT // page_size) + 1) * page_size


def layer(mla: bool = False, **changes: Any) -> SimpleNamespace:
    dims = (RANK + ROPE, RANK) if mla else (DIM, DIM)
    return SimpleNamespace(
        **{
            "layer_id": 0, "tp_q_head_num": HEADS, "tp_k_head_num": 1 if mla else KV_HEADS, "qk_head_dim": dims[0],
            "v_head_dim": dims[1], "scaling": 0.3, "sliding_window_size": -1, "logit_cap": 0.0, "logit_capping_method": "tanh",
            "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder"), "xai_temperature_len": -1,
            "k_scale": None, "v_scale": None, "k_scale_float": None, "v_scale_float": None, **changes,
        }
    )  # fmt: skip


def batch(mode: Mode, rows: list[int], seq_lens: list[int], slots: torch.Tensor, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(rows), req_pool_indices=torch.tensor(rows), seq_lens=torch.tensor(seq_lens),
        out_cache_loc=slots.long(), spec_info=None, **more,
    )  # fmt: skip
