"""Both command lines, run in process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks
from spec_ops import cli


def run_spec_ops(*args: str) -> Result:
    """`python -m spec_ops ARGS`."""
    return CliRunner().invoke(cli.app, list(args))


def run_benchmarks(*args: str) -> Result:
    """`python -m benchmarks ARGS`."""
    return CliRunner().invoke(benchmarks.app, list(args))


def refusal(result: Result, option: str) -> str:
    """The one line of a mistake in `option`, with nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: Invalid value for ")
    assert option in line.removeprefix("Error: Invalid value for ").partition(": ")[0]
    return line
