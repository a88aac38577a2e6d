"""spec_ops as an attention backend of vLLM: `--attention-backend SPEC_OPS`, and our graph passes in vLLM's compiler.

vLLM finds `register` by the entry point `vllm.general_plugins`, in every process that it starts. Registration adds a name to a
table and patches nothing; what inherits from vLLM's classes is imported when an engine builds the backend.

| module | what |
|---|---|
| `symbols` | every symbol of vLLM that is used, and the versions that were tested; read from its source, without an import |
| `plugin` | `register` |
| `limits` | what the backend refuses when an engine starts |
| `attention` | a batch's metadata, and attention by our ops: knows shapes of vLLM, imports none of it |
| `backend`, `mla` | what inherits from vLLM's classes: grouped-query attention, and multi-head latent attention |
| `choice` | which of the two a model takes |
| `ahead` | kernels that are compiled while an engine starts |
| `passes` | our graph passes, for vLLM's `inductor_compile_config` |
"""

from spec_ops.integrations.vllm.passes import inductor_compile_config
from spec_ops.integrations.vllm.plugin import register
from spec_ops.integrations.vllm.symbols import NAME, problems, report

__all__ = ["NAME", "inductor_compile_config", "problems", "register", "report"]
