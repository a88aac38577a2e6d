"""Speculative decoding as plain PyTorch: ops, models and rounds that compile to one CUDA graph."""

import spec_ops.backends.flashinfer
import spec_ops.backends.reference
import spec_ops.backends.tokenspeed
import spec_ops.backends.triton  # noqa: F401  each registers itself
from spec_ops._version import __version__
from spec_ops.backends import BackendError, available_backends, register_backend, select_backend
from spec_ops.ops import *  # noqa: F403
from spec_ops.ops import __all__ as _ops

_PASSES = ("compile", "explain", "install")
__all__ = ["BackendError", "__version__", "available_backends", "register_backend", "select_backend", *_PASSES, *_ops]


def __getattr__(name: str):
    """The passes import Inductor, which costs a second: only when they are asked for."""
    if name == "passes" or name in _PASSES:
        import importlib

        passes = importlib.import_module("spec_ops.passes")
        return passes if name == "passes" else getattr(passes, name)
    raise AttributeError(f"module 'spec_ops' has no attribute {name!r}")
