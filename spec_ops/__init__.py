"""Speculative decoding as plain PyTorch: ops, models and rounds that compile to one CUDA graph."""

import spec_ops.backends.reference  # noqa: F401  registers itself
from spec_ops._version import __version__
from spec_ops.backends import BackendError, available_backends, register_backend, select_backend
from spec_ops.ops import *  # noqa: F403
from spec_ops.ops import __all__ as _ops

__all__ = ["BackendError", "__version__", "available_backends", "register_backend", "select_backend", *_ops]
