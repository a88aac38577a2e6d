"""Who computes the attention steps: declarations of kernel providers and the choice among them.

A backend is a declaration (what it supports, which optional inputs it reads, whether it plans on the host) plus kernels
that are imported the first time they run. `select_backend` is a pure function of trace-time facts.
"""

from spec_ops.backends.call import AttentionCall, AttentionMeta
from spec_ops.backends.registry import (
    Backend,
    BackendError,
    Selection,
    available_backends,
    get_backend,
    missing_backends,
    register_backend,
    select_backend,
    unregister_backend,
)
from spec_ops.backends.warming import warm_up

__all__ = [
    "AttentionCall",
    "AttentionMeta",
    "Backend",
    "BackendError",
    "Selection",
    "available_backends",
    "get_backend",
    "missing_backends",
    "register_backend",
    "select_backend",
    "unregister_backend",
    "warm_up",
]
