"""On a CPU vLLM does not read `--attention-backend`: it takes what is registered as `CPU_ATTN` and `CPU_MLA`. A plug-in that
puts ours there, as `SPEC_OPS_ON_CPU` says."""

from __future__ import annotations

import os


def register() -> None:
    if not os.environ.get("SPEC_OPS_ON_CPU"):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "spec_ops.integrations.vllm.backend.SpecOpsBackend")
    if "CPU_MLA" in AttentionBackendEnum.__members__:
        register_backend(AttentionBackendEnum.CPU_MLA, "cpu_mla.CpuMLABackend")
