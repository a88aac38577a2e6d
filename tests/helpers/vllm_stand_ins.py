"""Small objects shaped as vLLM's metadata, caches, layers and configuration, and modules with the names that the plug-in's
classes inherit from, without vLLM."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

HEADS, KV_HEADS, DIM = 4, 2, 16
RANK, ROPE = 16, 8


def cache(num_pages: int, page_size: int, layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[pages, heads, page_size, 2 * dim]`, heads before tokens in memory (HND) or after them."""
    shape = (num_pages, KV_HEADS, page_size, 2 * DIM)
    if layout == "HND":
        return torch.full(shape, float("nan")).to(dtype)
    return torch.full((num_pages, page_size, KV_HEADS, 2 * DIM), float("nan")).to(dtype).transpose(1, 2)


def common(query_lens: list[int], seq_lens: list[int], tables: torch.Tensor, **changes: Any) -> SimpleNamespace:
    """vLLM's `CommonAttentionMetadata`."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return SimpleNamespace(
        **{
            "query_start_loc": starts, "query_start_loc_cpu": starts.clone(), "num_reqs": len(query_lens),
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32), "num_actual_tokens": int(starts[-1]),
            "max_query_len": max(query_lens), "block_table_tensor": tables, "causal": True, **changes,
        }
    )  # fmt: skip


def layer(k_scale: float = 1.0, v_scale: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(_k_scale_float=k_scale, _v_scale_float=v_scale)


def config(impls: list[Any] = (), drafts: int = 0, mla: bool = False, dtype: torch.dtype = torch.float32, **parts: Any) -> Any:
    """vLLM's `VllmConfig`."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        model_config=SimpleNamespace(dtype=dtype, use_mla=mla),
        compilation_config=SimpleNamespace(
            static_forward_context={f"layer.{i}": SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        **parts,
    )


class Backends(enum.Enum):
    """vLLM's `AttentionBackendEnum` before 0.32."""

    TRITON_ATTN = "vllm.TritonAttentionBackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return OVERRIDES[self]


OVERRIDES: dict[Any, str] = {}


class NamedBackends(enum.Enum):
    """The same since 0.32: names can be added."""

    TRITON_ATTN = "vllm.TritonAttentionBackend"
    CUSTOM = None

    @classmethod
    def register(cls, name: str, value: str) -> NamedBackends:
        assert name not in cls.__members__
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        cls._member_map_[name] = member
        return member


def register_backend(backend: Any, class_path: str) -> None:
    if isinstance(backend, str):
        backend = NamedBackends.register(backend, class_path)
    OVERRIDES[backend] = class_path


class _Backend:
    @classmethod
    def validate_configuration(cls, block_size: int | None = None, use_mla: bool = False, **_: Any) -> list[str]:
        reasons = []
        if block_size is not None and not any(block_size % size == 0 for size in cls.get_supported_kernel_block_sizes()):
            reasons.append("block_size not supported")
        return reasons + ["MLA not supported"] * (use_mla and not cls.is_mla())

    @classmethod
    def is_mla(cls) -> bool:
        return False


class _MLABackend(_Backend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


class _Generic:
    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _Builder(_Generic):
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.vllm_config = vllm_config

    def _init_reorder_batch_threshold(self, reorder_batch_threshold: int, supports_spec_as_decode: bool) -> None:
        drafts = self.vllm_config.speculative_config
        self.reorder_batch_threshold = max(reorder_batch_threshold, 1 + drafts.num_speculative_tokens if drafts else 1)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


@dataclass
class _Decode:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


class _MLABuilder(_Builder):
    """Decodes alone, as a batch of a full CUDA graph has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._init_reorder_batch_threshold(1, True)

    def _build_decode(self, block_table_tensor, seq_lens_device, query_start_loc_cpu) -> _Decode:
        return _Decode(block_table_tensor, seq_lens_device, None)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SimpleNamespace:
        given = common_attn_metadata
        decode = self._build_decode(
            block_table_tensor=given.block_table_tensor,
            seq_lens_device=given.seq_lens,
            query_start_loc_cpu=given.query_start_loc_cpu,
        )
        return SimpleNamespace(decode=decode, causal=given.causal)


class _MLAImpl(_Generic):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, *_: Any, **mla_args: Any
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype, self.kv_lora_rank = kv_cache_dtype, mla_args["kv_lora_rank"]


def install(monkeypatch: Any, named: bool = True) -> type:
    """Put modules of these in place of vLLM's, and ours that inherit from them out of the way. The registry's enumeration."""
    for member in [name for name in NamedBackends.__members__ if name == "SPEC_OPS"]:
        del NamedBackends._member_map_[member]
    OVERRIDES.clear()
    registry = NamedBackends if named else Backends
    modules = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.compilation": {},
        "vllm.compilation.backends": {"model_tag": "backbone"},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": registry, "register_backend": register_backend},
        "vllm.v1.attention.backend": {
            "AttentionBackend": _Backend, "AttentionMetadataBuilder": _Builder, "CommonAttentionMetadata": SimpleNamespace,
            "AttentionImpl": type("AttentionImpl", (_Generic,), {}), "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH=2),
        },
        "vllm.model_executor.layers.attention.mla_attention": {
            "MLACommonBackend": _MLABackend, "MLACommonImpl": _MLAImpl, "MLACommonMetadataBuilder": _MLABuilder,
            "MLACommonDecodeMetadata": _Decode, "MLACommonMetadata": SimpleNamespace,
            "QueryLenSupport": SimpleNamespace(UNIFORM="uniform"),
        },
    }  # fmt: skip
    for name in list(modules):
        parts = name.split(".")
        for i in range(1, len(parts)):
            modules.setdefault(".".join(parts[:i]), {})
    for name, members in modules.items():
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    for name in modules:
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], sys.modules[name])
    for name in ("backend", "mla"):
        monkeypatch.delitem(sys.modules, f"spec_ops.integrations.vllm.{name}", raising=False)
    return registry
