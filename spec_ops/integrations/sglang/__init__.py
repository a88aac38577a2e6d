"""spec_ops as an attention backend of SGLang: `--attention-backend spec_ops --page-size 64`.

SGLang finds `register` by the entry point `sglang.srt.plugins`, in every process that it starts. Registration adds a name to
two tables and patches nothing; the hooks of `hooks.py` go in when an engine builds the backend, since its user asked for it.

| module | what |
|---|---|
| `symbols` | every symbol of SGLang that is used, and the versions that were tested; read from its source, without an import |
| `plugin` | `register` |
| `limits` | what the backend refuses when an engine starts |
| `attention` | a forward's metadata, and attention by our ops: knows shapes of SGLang, imports none of it |
| `drafting` | the same for all steps of a draft |
| `backend`, `hooks` | what inherits from SGLang's classes and hooks its functions |
| `ahead` | kernels that are compiled while an engine starts |
"""

from spec_ops.integrations.sglang.plugin import register
from spec_ops.integrations.sglang.symbols import NAME, problems, report

__all__ = ["NAME", "problems", "register", "report"]
