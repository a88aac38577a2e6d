"""Latent attention on a CPU: vLLM's prefill for CPUs, whose base class chooses GPU kernels, and our decoding."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from spec_ops.integrations.vllm.mla import SpecOpsMLABackend, SpecOpsMLAImpl


class CpuMLAImpl(CPUMLAImpl):
    is_mla = True
    take_latents = SpecOpsMLAImpl.take_latents
    forward_mqa = SpecOpsMLAImpl.forward_mqa

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_latents()


class CpuMLABackend(SpecOpsMLABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuMLAImpl]:
        return CpuMLAImpl
