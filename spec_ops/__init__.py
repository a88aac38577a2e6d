"""Speculative decoding as plain PyTorch: ops, models and rounds that compile to one CUDA graph."""

from typing import TYPE_CHECKING

from spec_ops._version import __version__
from spec_ops.backends import BackendError, available_backends, register_backend, select_backend
from spec_ops.backends import flashinfer as _flashinfer  # noqa: F401  each registers itself
from spec_ops.backends import reference as _reference  # noqa: F401
from spec_ops.backends import tokenspeed as _tokenspeed  # noqa: F401
from spec_ops.backends import triton as _triton  # noqa: F401
from spec_ops.ops import *  # noqa: F403
from spec_ops.ops import __all__ as _ops

_PASSES = ("compile", "explain", "install")
__all__ = ["BackendError", "__version__", "available_backends", "register_backend", "select_backend", *_PASSES, *_ops]

if TYPE_CHECKING:
    from spec_ops import passes as passes
    from spec_ops.passes import compile as compile
    from spec_ops.passes import explain as explain
    from spec_ops.passes import install as install
else:

    def __getattr__(name: str):
        """The passes import Inductor, which costs a second: only when they are asked for."""
        if name == "passes" or name in _PASSES:
            import importlib

            passes = importlib.import_module("spec_ops.passes")
            return passes if name == "passes" else getattr(passes, name)
        raise AttributeError(f"module 'spec_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "passes"} - {"TYPE_CHECKING"})
