"""How to install what is optional."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """The command that installs what `[project.optional-dependencies]` lists under `extra`. No package index has spec_ops."""
    return f'pip install ".[{extra}]" in a checkout of spec_ops'
