"""`python -m spec_ops check`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class Engine(str, enum.Enum):
    sglang = "sglang"
    vllm = "vllm"


def check(engine: Annotated[Engine, typer.Argument(help="The serving engine.")]) -> None:
    """Whether the installed engine is of a tested version and has every symbol that the plug-in uses; exit code 1 if not."""
    from spec_ops.integrations import sglang, vllm

    text, fits = {Engine.sglang: sglang, Engine.vllm: vllm}[engine].report()
    typer.echo(text)
    if not fits:
        raise typer.Exit(1)
