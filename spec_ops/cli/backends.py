"""`python -m spec_ops backends`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from spec_ops.cli.options import console, parse_arch_option


def backends(
    arch: Annotated[
        str | None,
        typer.Option(
            help="Choose for this architecture, such as sm100, as if every package were installed; default: this machine."
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, max=128, help="Tokens in a page.")] = 64,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say for every call why the others were not chosen.")
    ] = False,
) -> None:
    """Which kernel every kind of attention call gets, and why not another: Llama-8B's GQA and DeepSeek-V3's MLA, bfloat16."""
    from spec_ops.backends import get_backend, missing_backends
    from spec_ops.backends.registry import device_arch
    from spec_ops.backends.table import choices, compact, reasons

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    planned = parse_arch_option(arch)
    missing = missing_backends() if planned is None else frozenset()
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    here = dict.fromkeys(map(device_arch, gpus)) or {None: None}
    for architecture in here if planned is None else (planned,):
        rows = choices(architecture, missing, page_size)
        where = "the CPU" if architecture is None else f"sm_{architecture}"
        say(f"{where}{' (this machine)' if planned is None else ''}, bf16, pages of {page_size} tokens")
        for line in compact(rows):
            say(f"  {line}")
        for line in reasons(rows) if verbose else ():
            say(f"  {line}")
        for name in sorted({row.chosen for row in rows if row.chosen}):
            backend = get_backend(name)
            if backend is not None and (absent := backend.missing()):
                say(f"  {name} {absent}")
    if not verbose:
        say(
            "--verbose says why not another kernel" + ("; --arch sm100 plans for a GPU" if planned is None and not gpus else "")
        )
