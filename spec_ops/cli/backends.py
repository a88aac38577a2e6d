"""`python -m spec_ops backends`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from spec_ops.cli.options import console, parse_device


def backends(
    arch: Annotated[
        str | None, typer.Option(help="Choose for this architecture, such as sm100, with every package; default: this machine.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, max=128, help="Tokens a page.")] = 64,
    reasons: Annotated[bool, typer.Option(help="Say why the others were not chosen.")] = True,
) -> None:
    """Which kernel every kind of attention call gets, and why not another: Llama-8B's GQA and DeepSeek-V3's MLA, bfloat16."""
    from spec_ops.backends import get_backend, missing_backends
    from spec_ops.backends.registry import device_arch
    from spec_ops.backends.table import choices
    from spec_ops.passes.plan import parse_arch

    try:
        planned = parse_arch(arch)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from error
    here = planned is None
    rows = choices(device_arch(parse_device(None)) if here else planned, missing_backends() if here else frozenset(), page_size)
    table = Table("step", "queries", "cache", "kernel", *(["not chosen"] if reasons else []), show_lines=reasons)
    for row in rows:
        why = "\n".join(f"{name} {reason}" for name, reason in row.reasons.items())
        table.add_row(
            row.step, row.kind, str(row.kv_dtype).removeprefix("torch."), row.chosen or "none", *([why] if reasons else [])
        )
    console.print(table)
    for name in sorted({row.chosen for row in rows if row.chosen}):
        backend = get_backend(name)
        if backend is not None and (absent := backend.missing()):
            console.print(f"{name} {absent}", markup=False, soft_wrap=True)
