"""Graph passes for Inductor: naive speculative code compiles to one CUDA graph with nothing redundant."""

from spec_ops.passes.analysis.outputs import PassError
from spec_ops.passes.base import GraphPass, Note, PassContext, PassResult
from spec_ops.passes.compile import compile
from spec_ops.passes.manager import PassManager, enabled, install, pass_names
from spec_ops.passes.plan import explain
from spec_ops.passes.report import GraphReport

__all__ = [
    "GraphPass",
    "GraphReport",
    "Note",
    "PassContext",
    "PassError",
    "PassManager",
    "PassResult",
    "compile",
    "enabled",
    "explain",
    "install",
    "pass_names",
]
