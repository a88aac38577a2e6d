"""Command line: `python -m spec_ops generate`, `explain`, `backends`, `export` and `check`; a module for each command."""

from __future__ import annotations

from typing import Annotated

import typer

from spec_ops._version import __version__
from spec_ops.cli import backends, check, explain, export, generate

# Without rich markup: it would break an error's line into the lines of a box, paths too.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(short_help="Continue a prompt, plainly or speculatively.")(generate.generate)
app.command(short_help="What the graph passes make of a model's round.")(explain.explain)
app.command(short_help="Which kernel runs which attention call.")(backends.backends)
app.command(short_help="Write a pair for transformers, SGLang and vLLM.")(export.export)
app.command(short_help="Whether the plug-in fits the serving engine that is installed.")(check.check)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"spec-ops {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Speculative decoding as plain PyTorch."""


def main() -> None:
    app()
