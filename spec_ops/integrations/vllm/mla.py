"""Multi-head latent attention as vLLM's classes. Imported where an engine makes a layer with it.

vLLM prefills with dense keys and values, by the backend of `--attention-config '{"mla_prefill_backend": ...}'`, and writes the
cache. Ours are decoding and verifying, absorbed, over the latent cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from spec_ops.backends.call import FP8_DTYPES
from spec_ops.integrations.vllm import ahead, limits
from spec_ops.integrations.vllm.attention import attend_mla, check_recordable, query_length
from spec_ops.integrations.vllm.backend import Limits


class SpecOpsMLABackend(Limits, MLACommonBackend):
    other: ClassVar[str] = limits.OTHER_MLA

    @staticmethod
    def get_impl_cls() -> type[SpecOpsMLAImpl]:
        return SpecOpsMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SpecOpsMLAMetadataBuilder]:
        return SpecOpsMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Before vLLM 0.29."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)


@dataclass
class SpecOpsMLADecode(MLACommonDecodeMetadata):
    """With `q_len`, the queries of each request that has any."""

    q_len: int = 1


class SpecOpsMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    # Metadata of decoding are the runner's own buffers, which each step of a draft writes anew.
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        limits.check_engine(vllm_config, kv_cache_spec, limits.OTHER_MLA)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers, dtype = vllm_config.compilation_config.static_forward_context, vllm_config.model_config.dtype
        metas = [
            meta
            for name in layer_names
            for meta in limits.metas_of_layer(layers[name].impl, dtype, kv_cache_spec.block_size, self.reorder_batch_threshold)
        ]
        limits.check_kernels(metas, torch.device(device), limits.OTHER_MLA)
        for name in layer_names:
            ahead.start(layers[name].impl, vllm_config, kv_cache_spec.block_size, torch.device(device))

    def _build_decode(self, *args: Any, **kwargs: Any) -> SpecOpsMLADecode:
        made = super()._build_decode(*args, **kwargs)
        starts = kwargs["query_start_loc_cpu"]
        return SpecOpsMLADecode(made.block_table, made.seq_lens, made.dcp_tot_seq_lens, query_length(starts.tolist()))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        check_recordable(common_attn_metadata, self.reorder_batch_threshold)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata) -> None:
        """Nothing is derived from them."""


class SpecOpsMLAImpl(MLACommonImpl[MLACommonMetadata]):
    is_mla: ClassVar[bool] = True
    can_return_lse_for_decode: bool = False
    supports_pcp: bool = False
    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        """As vLLM gives it. Raises ValueError: what is not supported, and what to use instead."""
        # Dense prefill, which is vLLM's, has neither windows nor caps.
        others = {"windows": sliding_window, "soft caps": logits_soft_cap, "shared caches": kv_sharing_target_layer_name}
        limits.check_layer(
            alibi_slopes=alibi_slopes, attn_type=attn_type, kv_cache_dtype=kv_cache_dtype,
            others=others | {"sparse indexers": mla_args.get("indexer")}, instead=limits.OTHER_MLA,
        )  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        self.take_latents()
        ahead.start(self, get_current_vllm_config_or_none())

    def take_latents(self) -> None:
        """What decoding needs to know beside vLLM's own attributes."""
        self.v_head_size, self.window_left, self.sinks, self.softcap = self.kv_lora_rank, -1, None, 0.0
        self.supports_quant_query_input = False  # queries stay in the model's dtype over an fp8 cache

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[tokens, heads, kv_lora_rank]` of absorbed queries, and no logarithm of the sum of exponentials."""
        decode, cache = attn_metadata.decode, kv_c_and_k_pe_cache
        assert isinstance(decode, SpecOpsMLADecode)
        if not getattr(attn_metadata, "causal", True):
            limits.refuse("attention that is not causal is not supported", "let the draft use another backend")
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        options = {"kv_scale": layer._k_scale_float} if cache.dtype in FP8_DTYPES else {}
        where = (decode.block_table, decode.seq_lens, decode.q_len)
        return attend_mla(q, cache, self.kv_lora_rank, *where, scale=self.scale, **options), None
