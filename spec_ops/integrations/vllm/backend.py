"""Grouped-query attention as vLLM's classes. Imported where an engine makes a layer with it.

https://docs.vllm.ai/en/latest/design/attention_backends.html
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from spec_ops.integrations.vllm import ahead, limits
from spec_ops.integrations.vllm.attention import (
    SpecOpsMetadata,
    attend,
    check_recordable,
    metadata_of,
    pages,
    scales,
    window_left,
    write,
)
from spec_ops.integrations.vllm.symbols import NAME, UNNAMED


def name_in_registry() -> str:
    return NAME if NAME in AttentionBackendEnum.__members__ else UNNAMED


class Limits:
    """What both kinds of attention say of themselves; what vLLM refuses by it gets an advice."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = list(limits.CACHE_DTYPES)
    other: ClassVar[str] = limits.OTHER

    @staticmethod
    def get_name() -> str:
        return name_in_registry()

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return list(limits.BLOCK_SIZES)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Query lengths are read on the host."""
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Reasons; with what to use instead if there are any."""
        reasons = super().validate_configuration(*args, **kwargs)  # type: ignore[misc]
        if "block_size not supported" in reasons:
            reasons.append(f"pass --block-size {', '.join(map(str, limits.BLOCK_SIZES))} or a multiple of 16")
        return [*reasons, cls.other] if reasons else reasons


class SpecOpsBackend(Limits, AttentionBackend):
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_impl_cls() -> type[SpecOpsImpl]:
        return SpecOpsImpl

    @staticmethod
    def get_builder_cls() -> type[SpecOpsMetadataBuilder]:
        return SpecOpsMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Before vLLM 0.29."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Before vLLM 0.29: tokens before heads, or heads before tokens if the engine was told so."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)


class SpecOpsMetadataBuilder(AttentionMetadataBuilder[SpecOpsMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Metadata are the runner's own buffers, which each step of a draft writes anew.
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        limits.check_engine(vllm_config, kv_cache_spec)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = vllm_config.compilation_config.static_forward_context
        metas = [
            meta
            for name in layer_names
            for meta in limits.metas_of_layer(
                layers[name].impl, vllm_config.model_config.dtype, kv_cache_spec.block_size, self._most
            )
        ]
        limits.check_kernels(metas, torch.device(device))
        for name in layer_names:
            ahead.start(layers[name].impl, vllm_config, kv_cache_spec.block_size, torch.device(device))

    @property
    def _most(self) -> int:
        """Queries of a request that are decoded or verified."""
        return self.reorder_batch_threshold or 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SpecOpsMetadata:
        return metadata_of(common_attn_metadata, self._most)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SpecOpsMetadata:
        check_recordable(common_attn_metadata, self._most)
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: SpecOpsMetadata) -> None:
        """Nothing is derived from them."""


class SpecOpsImpl(AttentionImpl[SpecOpsMetadata]):
    is_mla: ClassVar[bool] = False
    supports_pcp: bool = False
    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """As vLLM gives it. Raises ValueError: what is not supported, and what to use instead."""
        limits.check_layer(alibi_slopes=alibi_slopes, attn_type=attn_type, kv_cache_dtype=kv_cache_dtype, others=others)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size = self.v_head_size = head_size
        self.scale, self.softcap = float(scale), float(logits_soft_cap or 0.0)
        self.sliding_window, self.window_left = sliding_window, window_left(sliding_window)
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        ahead.start(self, get_current_vllm_config_or_none())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SpecOpsMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over the cache, which has the batch's keys; None for metadata while vLLM measures memory.

        Args:
            query, output: `[tokens, heads, head_size]`; rows past the batch's tokens are padding.
            kv_cache: `[pages, kv_heads, page_size, 2 * head_size]`, any strides whose last is 1.
        """
        if output_scale is not None or output_block_scale is not None:
            limits.refuse("quantized outputs of attention are not supported", "leave fuse_attn_quant off")
        if attn_metadata is None:
            return output.fill_(0)
        k_cache, v_cache = pages(kv_cache, self.head_size)
        options = scales(layer, k_cache)
        for part in attn_metadata.parts:
            attend(
                part, query, k_cache, v_cache, output, scale=self.scale, window_left=self.window_left, softcap=self.softcap,
                sinks=self.sinks, **options,
            )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Called before `forward`, but for layers that read another layer's cache."""
        write(layer, key, value, *pages(kv_cache, self.head_size), slot_mapping)
