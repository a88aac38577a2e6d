"""Writes every measured number of README.md and docs/ from `benchmarks/results`, and draws the chart.

    python -m benchmarks.published            # rewrites the documents and docs/images/chart.svg
    python -m benchmarks.published --check    # exit code 1 if a document is not up to date; draws nothing

A block of numbers stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; NAME is one of `BLOCKS`. Nothing
between the two is written by hand, and `tests/docs/test_figures.py` finds measured numbers that stand elsewhere. The notebook
is left alone: it is a record of what was tried, with numbers of code that is gone.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.published import kernels, peers, products, rounds, sampling, summary, texts
from benchmarks.published.text import RESULTS, ROOT

BLOCK = re.compile(r"^( *)<!-- figures: ([\w-]+) -->\n(.*?)^ *<!-- end of figures -->$", re.MULTILINE | re.DOTALL)
NOTEBOOK = ROOT / "docs" / "notebook"

BLOCKS: dict[str, Callable[[Path], str]] = {
    "accept": rounds.accept,
    "quantized": rounds.quantized,
    "lookup": rounds.lookup,
    "kernels": kernels.kernels,
    "fp8": kernels.fp8,
    "pages": kernels.pages,
    "deterministic": kernels.deterministic,
    "limits": kernels.limits,
    "choice": kernels.choice,
    "sampling": sampling.sampling,
    "products": products.products,
    "rounds": rounds.rounds,
    "rounds-h100": functools.partial(rounds.rounds, name="h100-round"),
    "above": rounds.above,
    "again": rounds.again,
    "backends": rounds.backends,
    "passes": rounds.passes,
    "sampled": rounds.sampled,
    "invariant": rounds.invariant,
    "texts": texts.texts,
    "models": rounds.models,
    "mixtures": rounds.mixtures,
    "weights": rounds.weights,
    "ranks": rounds.ranks,
    "collectives": rounds.collectives,
    "planned": rounds.planned,
    "compilation": rounds.compilation,
    "peers": peers.rounds,
    "peer-kernels": peers.mla,
    "sglang": peers.inside_sglang,
    "sglang-profile": peers.profile_of_sglang,
    "sglang-requests": peers.requests_of_sglang,
    "claims": summary.claims,
    "caption": summary.caption,
    "provenance": summary.provenance,
}


def documents() -> list[Path]:
    """The files that have blocks: README.md, and pages of docs/ but the notebook's."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if NOTEBOOK not in page.parents and "<!-- figures:" in page.read_text(encoding="utf-8")]


def updated(text: str, results: Path) -> str:
    """`text` with every block written anew.

    Raises:
        ValueError: a block has no such name, or is not closed. FileNotFoundError: a block's results are not there.
    """

    def write(match: re.Match[str]) -> str:
        indent, name = match[1], match[2]
        if name not in BLOCKS:
            raise ValueError(f"published: blocks are {sorted(BLOCKS)}, got {name!r}")
        body = textwrap.indent(BLOCKS[name](results), indent)
        blank = "" if indent else "\n"  # Markdown wants an empty line between a comment and a table
        return f"{indent}<!-- figures: {name} -->\n{blank}{body}\n{blank}{indent}<!-- end of figures -->"

    found, count = BLOCK.subn(write, text)
    if count != text.count("<!-- figures:") or count != text.count("<!-- end of figures -->"):
        raise ValueError("published: every block needs its two comments, each on a line of its own")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    parser.add_argument("--document", type=Path, action="append", help="default: README.md and the pages of docs/; no chart")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    stale = []
    for document in options.document or documents():
        old = document.read_text(encoding="utf-8")
        new = updated(old, options.results)
        if new != old:
            stale.append(document.name)
            if not options.check:
                document.write_text(new, encoding="utf-8")
    if options.check:
        print(f"not up to date: {', '.join(stale)}; run python -m benchmarks.published" if stale else "up to date")
    elif options.document is None:
        from benchmarks.published import chart  # needs matplotlib

        chart.draw(chart.PATH, options.results)
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
