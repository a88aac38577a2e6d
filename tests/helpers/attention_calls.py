"""Random calls of the attention ops on a GPU: families of them, each of one kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import spec_ops
from tests.helpers.dense_attention import mask_words
from tests.ops.test_attention import FP8, OUTSIDE_POOL, STEP_OF_MODE, TREE_MODES, verify_tree

DEVICE, BACKEND = "cuda", "triton"
BF16, FP16 = torch.bfloat16, torch.float16


class Family(NamedTuple):
    """What a kernel is compiled for; batch sizes of one power-of-two bucket."""

    kind: str
    mode: str
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    page_size: int
    q_len: int
    batches: range
    mask_len: int = 0
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    window_left: int = -1
    sinks: bool = False
    softcap: float = 0.0
    heads_first: bool = False


SHAPES_PER_FAMILY = 84
FAMILIES = {
    "one request": Family("mha", "verify_chain", 32, 8, 128, 128, 64, 1, range(1, 2)),
    "chain of 4": Family("mha", "verify_chain", 32, 8, 128, 128, 64, 4, range(5, 9)),
    "tree of 16": Family("mha", "verify_tree", 32, 8, 128, 128, 64, 16, range(5, 9), mask_len=16),
    "tree step": Family("mha", "draft_tree", 32, 8, 128, 128, 64, 4, range(5, 9), mask_len=12),
    "tree of 64": Family("mha", "verify_tree", 8, 8, 64, 64, 64, 64, range(3, 5), mask_len=64, dtype=FP16),
    "many requests": Family("mha", "draft_chain", 8, 2, 128, 128, 64, 1, range(65, 80)),
    "D64": Family("mha", "verify_chain", 64, 8, 64, 64, 64, 4, range(9, 16)),
    "windowed tree": Family("mha", "verify_tree", 8, 2, 64, 64, 16, 4, range(5, 9), mask_len=4, window_left=30, dtype=FP16),
    "sinks, soft cap": Family("mha", "verify_chain", 8, 8, 96, 96, 1, 3, range(5, 9), sinks=True, softcap=9.0, dtype=FP16),
    "window and sinks": Family("mha", "draft_chain", 64, 8, 64, 64, 64, 1, range(9, 16), sinks=True, window_left=127),
    "D256": Family("mha", "verify_chain", 16, 8, 256, 256, 32, 2, range(5, 9)),
    "D192/128": Family("mha", "verify_tree", 8, 4, 192, 128, 64, 8, range(5, 9), mask_len=8),
    "fp8": Family("mha", "verify_chain", 32, 8, 128, 128, 64, 4, range(5, 9), kv_dtype=FP8),
    "fp8 tree of 16": Family("mha", "verify_tree", 32, 8, 128, 128, 64, 16, range(5, 9), mask_len=16, kv_dtype=FP8),
    "fp8 D256": Family("mha", "verify_chain", 16, 8, 256, 256, 32, 8, range(5, 9), kv_dtype=FP8),
    "chain of 16, D64": Family("mha", "verify_chain", 64, 8, 64, 64, 64, 16, range(5, 9)),
    "short window": Family("mha", "verify_tree", 64, 8, 64, 64, 64, 16, range(5, 9), mask_len=16, window_left=127, sinks=True),
    "fp8, heads first": Family(
        "mha", "draft_chain", 8, 2, 64, 64, 16, 1, range(5, 9), kv_dtype=FP8, dtype=FP16, heads_first=True
    ),
    "pages of 128": Family("mha", "verify_chain", 8, 2, 128, 128, 128, 5, range(5, 9), dtype=FP16),
    "ragged": Family("mha", "extend", 8, 2, 128, 128, 64, 0, range(5, 9)),
    "ragged, windowed": Family("mha", "extend", 8, 2, 64, 64, 16, 0, range(5, 9), window_left=50, sinks=True, dtype=FP16),
    "ragged fp8": Family("mha", "extend", 8, 2, 128, 128, 64, 0, range(5, 9), kv_dtype=FP8),
    "MLA": Family("mla", "draft_chain", 16, 0, 576, 512, 64, 1, range(5, 9)),
    "MLA 128 heads": Family("mla", "verify_chain", 128, 0, 576, 512, 64, 4, range(5, 9)),
    "MLA tree": Family("mla", "verify_tree", 16, 0, 576, 512, 64, 8, range(5, 9), mask_len=8, dtype=FP16),
    "MLA 256": Family("mla", "verify_chain", 32, 0, 320, 256, 16, 4, range(5, 9)),
    "MLA fp8": Family("mla", "verify_chain", 16, 0, 576, 512, 64, 4, range(5, 9), kv_dtype=FP8),
    "MLA ragged": Family("mla", "extend", 16, 0, 576, 512, 64, 0, range(5, 9)),
}


def random_length(rng: torch.Generator, page_size: int) -> int:
    """Empty, around a boundary of pages or blocks, or anything up to 700."""

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=rng))

    edge = (page_size, 32, 64, 128)[below(4)] * below(6)
    return max(0, (0, 1, edge + below(3) - 1, below(700))[below(4)])


def random_call(family: Family, seed: int) -> tuple[str, dict[str, Any]]:
    """An op's name and its arguments, poisoned as in `make_case`."""
    f, rng = family, torch.Generator().manual_seed(seed)
    bs = f.batches[int(torch.randint(len(f.batches), (), generator=rng))]
    lens = [random_length(rng, f.page_size) for _ in range(bs)]
    live = [-(-length // f.page_size) for length in lens]
    pages, width = sum(live) + 2, max(live) // 16 * 16 + 17
    ids = torch.randperm(pages, generator=rng).to(torch.int32)
    tables = torch.tensor(OUTSIDE_POOL, dtype=torch.int32)[torch.arange(bs * width) % 3].view(bs, width)
    slots, start = [], 0
    for b, (length, count) in enumerate(zip(lens, live, strict=True)):
        tables[b, :count] = mine = ids[start : start + count]
        start += count
        slots.append((mine[:, None] * f.page_size + torch.arange(f.page_size)).flatten()[:length])
    owned = torch.cat(slots).long().to(DEVICE)

    generator = torch.Generator(DEVICE).manual_seed(seed)
    kv_dtype = f.kv_dtype or f.dtype

    def cache(*row: int) -> torch.Tensor:
        made = torch.full((pages * f.page_size, *row), float("nan"), device=DEVICE)
        made[owned] = torch.randn(len(owned), *row, generator=generator, device=DEVICE)
        made = made.to(kv_dtype).view(pages, f.page_size, *row)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if f.heads_first else made

    q_lens = [int(torch.randint(length + 3, (), generator=rng)) for length in lens]
    rows = (sum(q_lens) + 5,) if f.mode == "extend" else (bs, f.q_len)
    a: dict[str, Any] = {
        "q": torch.randn(*rows, f.heads, f.head_dim, generator=generator, device=DEVICE).to(f.dtype),
        "block_tables": tables.to(DEVICE),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        "scale": f.head_dim**-0.5,
        "window_left": f.window_left,
        "softcap": f.softcap,
        "sinks": torch.randn(f.heads, generator=generator, device=DEVICE) if f.sinks else None,
    }
    if f.kind == "mha":
        a |= {"k_cache": cache(f.kv_heads, f.head_dim), "v_cache": cache(f.kv_heads, f.v_dim)}
        a |= {"k_scale": 0.7, "v_scale": 1.3} if f.kv_dtype else {}
    else:
        a |= {"kv_cache": cache(f.head_dim), "kv_lora_rank": f.v_dim} | ({"kv_scale": 0.7} if f.kv_dtype else {})
    if f.mode == "extend":
        indptr = torch.tensor([0, *q_lens]).cumsum(0)
        a |= {"q_indptr": indptr.to(torch.int32).to(DEVICE), "max_q_len": max(*q_lens, 1)}
    elif f.mode in TREE_MODES:
        nodes = range(f.mask_len - f.q_len, f.mask_len)
        words = [mask_words(verify_tree(rng, f.mask_len), list(nodes)) for _ in lens]
        a |= {"tree_mask": torch.tensor(words, device=DEVICE), "mask_len": f.mask_len}
    return f"{f.kind}_{STEP_OF_MODE[f.mode]}", a


def in_float32(name: str, a: dict[str, Any], absolute_values: bool = False) -> torch.Tensor:
    """The reference on the same numbers in float32; on the absolute values, what a rounding of the weights is relative to."""
    a = {n: x.float() if isinstance(x, torch.Tensor) and x.dtype in (BF16, FP16) else x for n, x in a.items()}
    if absolute_values:
        if name.startswith("mla_"):  # keys keep their signs: as MHA of one KV head
            cache, scale = a.pop("kv_cache")[:, :, None], a.pop("kv_scale", None)
            a |= {"k_cache": cache, "v_cache": cache[..., : a.pop("kv_lora_rank")], "k_scale": scale, "v_scale": scale}
            name = name.replace("mla", "mha")
        a["v_cache"] = a["v_cache"].float().abs().to(a["v_cache"].dtype)
    return getattr(spec_ops, name)(**a, backend="reference")


SERVED = ("chain of 4", "tree of 16", "MLA", "MLA 128 heads", "ragged")  # families that serve as calls of a server


def static_call(family: str, bs: int, seed: int) -> tuple[str, dict[str, Any], list[dict[str, torch.Tensor]]]:
    """An op, its arguments, and 10 sets of lengths and tables for them over one cache without poison."""
    f = FAMILIES[family]._replace(batches=range(bs, bs + 1))
    name, a = random_call(f, seed)
    rng = torch.Generator(DEVICE).manual_seed(seed)
    for key in ("k_cache", "v_cache", "kv_cache"):
        if key in a:
            a[key] = torch.randn(64, *a[key].shape[1:], generator=rng, device=DEVICE).to(a[key].dtype)
    a["q"] = torch.randn(*((bs * 16,) if f.mode == "extend" else a["q"].shape[:2]), *a["q"].shape[-2:], generator=rng,
                         device=DEVICE).to(f.dtype)  # fmt: skip
    if f.mode == "extend":
        a["q_indptr"], a["max_q_len"] = torch.arange(0, 15 * bs + 1, 15, dtype=torch.int32, device=DEVICE), 15
    sets = []
    for i in range(10):
        longest = (1, 64, 700, 1500)[i % 4]
        lens = torch.randint(0, longest + 1, (bs,), generator=rng, device=DEVICE, dtype=torch.int32)
        tables = torch.randint(0, 64, (bs, 33), generator=rng, device=DEVICE, dtype=torch.int32)
        sets.append({"seq_lens": lens, "block_tables": tables})
    a |= {key: value.clone() for key, value in sets[0].items()}
    return name, a, sets


def call(name: str, a: dict[str, Any]) -> torch.Tensor:
    return getattr(spec_ops, name)(**a, backend=BACKEND)
