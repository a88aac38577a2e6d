"""FlashInfer's attention kernels: one declaration per kernel family, all from 0.6.12 to 0.7.2.

| name | kernels | runs on |
|---|---|---|
| `flashinfer-trtllm` | trtllm-gen, GQA and MLA, chains, ragged GQA prefill | sm_100, sm_103 |
| `flashinfer-cute-dsl` | CuTe DSL, MLA, chains | sm_100, sm_103 |
| `flashinfer-xqa` | XQA, GQA, chains and trees | sm_90, sm_100, sm_103, sm_120, sm_121 |
| `flashinfer-fa2`, `flashinfer-fa3` | planned wrappers, GQA and MLA, ragged too; fa2 trees on GQA | sm_80 on; sm_90 |
| `flashinfer-page` | `append_kv` and `append_mla_kv`, by name | sm_80 on |

`register_variant` gives trtllm-gen and XQA what their kernels offer beyond the ops. Importing this package imports no
FlashInfer: kernels are imported when they first run. What is declared here comes from the package's own checks and kernel
lists; `tests/backends/flashinfer/test_calls.py` binds every call to its real signatures.
"""

from __future__ import annotations

import torch

from spec_ops.backends.call import APPENDS, STEPS, AttentionMeta
from spec_ops.backends.flashinfer.options import register_variant
from spec_ops.backends.registry import Backend, register_backend

__all__ = ["register_variant"]

_HALVES = frozenset({torch.bfloat16, torch.float16})
_FP8 = torch.float8_e4m3fn
_UNIFORM = ("draft_decode", "target_verify", "draft_extend")
_REQUIRES = ("flashinfer", "flashinfer")
MAX_Q_LEN = 64  # a tree mask has 64 bits, and no chain is longer


def _kernels(kind: str, steps: tuple[str, ...], function: str) -> dict[str, str]:
    return {f"{kind}_{step}": f"spec_ops.backends.flashinfer.{function}" for step in steps}


def _planned_kernels(kernel: str) -> dict[str, str]:
    return dict.fromkeys(STEPS, f"spec_ops.backends.flashinfer.planned:{kernel}")


def _equal_widths(meta: AttentionMeta) -> str | None:
    if not meta.step.startswith("mla_") and meta.v_head_dim != meta.head_dim:
        return f"needs values as wide as keys ({meta.head_dim}), not {meta.v_head_dim}"
    return None


def _mla_widths(meta: AttentionMeta, allowed: tuple[tuple[int, int], ...]) -> str | None:
    widths = (meta.v_head_dim, meta.head_dim - meta.v_head_dim)
    if widths not in allowed:
        return f"supports MLA of (kv_lora_rank, rope) {' or '.join(map(str, allowed))}, not {widths}"
    return None


def _trtllm(meta: AttentionMeta, arch: int | None) -> str | None:
    if meta.step.startswith("mha_"):
        if meta.head_dim not in (64, 128, 256):
            return f"supports head_dim 64, 128 and 256, not {meta.head_dim}"
        return _equal_widths(meta)
    if meta.page_size not in (32, 64):
        return f"supports pages of 32 and 64 for MLA, not {meta.page_size}"
    if 64 < meta.num_heads < 128:
        return f"supports up to 64 or 128 heads for MLA, not {meta.num_heads}"
    if meta.dtype != torch.bfloat16:
        return f"writes bfloat16 for MLA, not {meta.dtype}"
    for feature in ("window", "sinks"):
        if getattr(meta, feature):
            return f"does not support {feature} for MLA"
    return _mla_widths(meta, ((512, 64), (256, 64)))


def _cute_dsl(meta: AttentionMeta, arch: int | None) -> str | None:
    if meta.num_heads > 128:
        return f"supports at most 128 heads, not {meta.num_heads}"
    return _mla_widths(meta, ((512, 64),))


def _xqa(meta: AttentionMeta, arch: int | None) -> str | None:
    if arch is not None and arch // 10 not in (9, 10, 12):
        return f"has no kernels for sm_{arch}"
    if meta.head_dim % 16 or meta.head_dim > 256:
        return f"supports head_dim up to 256 in steps of 16, not {meta.head_dim}"
    if meta.tree_mask and meta.window:
        return "supports no window together with tree_mask: it counts slots, not depth"
    group = meta.num_heads // meta.num_kv_heads
    widest = 8192 // (-(-meta.head_dim // 64) * 64)  # of its query tile: 16 KiB of bfloat16
    if meta.q_len == 1 and -(-group // 16) * 16 > widest:
        return f"supports at most {widest} query heads per KV head at head_dim {meta.head_dim}, not {group}"
    return _equal_widths(meta)


def _planned(meta: AttentionMeta, arch: int | None) -> str | None:
    if meta.step.startswith("mha_"):
        if meta.head_dim not in (64, 128, 256):
            return f"supports head_dim 64, 128 and 256, not {meta.head_dim}"
        return _equal_widths(meta)
    if meta.kv_dtype == _FP8:
        return "supports no fp8 cache for MLA"
    if meta.num_heads & (meta.num_heads - 1) or meta.num_heads > 128:
        return f"supports head counts that divide 128 for MLA, not {meta.num_heads}"
    for feature in ("tree_mask", "window", "softcap"):
        if getattr(meta, feature):
            return f"does not support {feature} for MLA"
    return _mla_widths(meta, ((512, 64),))


def _page(meta: AttentionMeta, arch: int | None) -> str | None:
    if meta.step == "append_mla_kv":
        return _mla_widths(meta, ((512, 64),))
    if meta.head_dim not in (64, 128, 256):
        return f"supports head_dim 64, 128 and 256, not {meta.head_dim}"
    if (threads := meta.num_kv_heads * meta.head_dim // 8) > 1024:
        return f"supports at most {1024 * meta.num_kv_heads // threads} KV heads of {meta.head_dim}, not {meta.num_kv_heads}"
    return _equal_widths(meta)


_TRTLLM = Backend(
    name="flashinfer-trtllm",
    kernels={
        **_kernels("mha", _UNIFORM, "gqa:trtllm"),
        "mha_extend": "spec_ops.backends.flashinfer.gqa:trtllm_extend",
        **_kernels("mla", _UNIFORM, "mla:trtllm"),
    },
    capabilities=(100, 103),
    dtypes=_HALVES,
    kv_dtypes=_HALVES | {_FP8},
    page_sizes=frozenset({16, 32, 64}),
    window=True,
    sinks=True,
    constraint=_trtllm,
    requires=_REQUIRES,
    rank=20,
)
_CUTE_DSL = Backend(
    name="flashinfer-cute-dsl",
    kernels=_kernels("mla", _UNIFORM, "mla:cute_dsl"),
    capabilities=(100, 103),
    dtypes=frozenset({torch.bfloat16}),
    kv_dtypes=frozenset({torch.bfloat16, _FP8}),
    page_sizes=frozenset({2, 4, 8, 16, 32, 64, 128}),  # a tile of 128 keys holds whole pages; TMA refuses pages of 1
    max_q_len=MAX_Q_LEN,
    constraint=_cute_dsl,
    requires=_REQUIRES,
    rank=30,
)
_XQA = Backend(
    name="flashinfer-xqa",
    kernels=_kernels("mha", _UNIFORM, "gqa:xqa"),
    capabilities=(90, 121),
    dtypes=_HALVES,
    kv_dtypes=_HALVES | {_FP8},
    page_sizes=frozenset({16, 32, 64, 128}),
    max_q_len=MAX_Q_LEN,
    tree_mask=True,
    window=True,
    sinks=True,
    constraint=_xqa,
    requires=_REQUIRES,
    rank=150,
)
_FA2 = Backend(
    name="flashinfer-fa2",
    kernels=_planned_kernels("fa2"),
    capabilities=(80, 121),
    dtypes=_HALVES,
    kv_dtypes=_HALVES | {_FP8},
    tree_mask=True,
    window=True,
    softcap=True,
    reads=frozenset({"seq_lens_cpu"}),
    host_plan=True,
    constraint=_planned,
    requires=_REQUIRES,
    rank=200,
)
_FA3 = Backend(
    name="flashinfer-fa3",
    kernels=_planned_kernels("fa3"),
    capabilities=(90, 90),
    dtypes=_HALVES,
    kv_dtypes=_HALVES,
    window=True,
    softcap=True,
    reads=frozenset({"seq_lens_cpu"}),
    host_plan=True,
    constraint=_planned,
    requires=_REQUIRES,
    rank=210,
)
_PAGE = Backend(
    name="flashinfer-page",
    kernels={op: f"spec_ops.backends.flashinfer.page:{op}" for op in APPENDS},
    capabilities=(80, 121),
    dtypes=_HALVES,
    kv_dtypes=_HALVES,
    constraint=_page,
    requires=_REQUIRES,
    rank=220,
)

for _backend in (_TRTLLM, _CUTE_DSL, _XQA, _FA2, _FA3, _PAGE):
    register_backend(_backend)
