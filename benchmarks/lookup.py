"""Accept length and speed of prompt lookup with the shipped pair's target, on texts that quote their prompt and on others:

    python -m benchmarks.lookup                                         # prints
    python -m benchmarks.lookup --json benchmarks/results/cpu-lookup.json
    python -m benchmarks.lookup --device cuda --draft eagle3 "lookup: 8 steps"

Prompts come from files of the standard library that the split holds out: `edit` is a function, then the same with an argument
renamed, a third of it given; `summary` is a part of a file, then the beginning of a comment that sums it up; `continue` is a
part of a file that goes on. Greedy, in float32; every text is compared with plain decoding's, which is always measured.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.rows import write_rows
from spec_ops.decoding import Generator, PromptLookup, SpeculationConfig
from spec_ops.models import Draft
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts, split_of, stdlib_files
from spec_ops.models.pretrained import load_pair

PROMPTS, NEW_TOKENS, ROOM = 8, 96, 1536
KINDS = ("edit", "summary", "continue")
# From the head: what drafts, and how many steps.
DRAFTS: dict[str, Callable[[Draft], tuple[Draft | PromptLookup | None, int]]] = {
    "plain": lambda head: (None, 0),
    "eagle3": lambda head: (head, 3),
    "lookup, 2 compared": lambda head: (PromptLookup(2), 5),
    **{f"lookup: {steps} steps": lambda head, steps=steps: (PromptLookup(), steps) for steps in (3, 5, 8)},  # type: ignore[misc]
    "lookup from 4, else eagle3": lambda head: (PromptLookup(min_ngram=4, otherwise=head), 3),
}


def _held_out() -> Iterator[tuple[str, ast.Module]]:
    for path in stdlib_files():
        text = path.read_text(encoding="utf-8")
        if split_of(path) == "heldout" and text.isascii():
            try:
                yield text, ast.parse(text)
            except SyntaxError:  # the library's tests have some on purpose
                continue


def _edits() -> Iterator[str]:
    """One a file: the first function of a fitting size."""
    for text, module in _held_out():
        for function in module.body:
            if not isinstance(function, ast.FunctionDef) or not function.args.args:
                continue
            source, name = ast.get_source_segment(text, function) or "", function.args.args[0].arg
            if 300 <= len(source) <= 800:
                edited = re.sub(rf"\b{name}\b", "value", source)
                given = edited[: edited.find("\n", len(edited) // 3) + 1]
                yield f"{source}\n\n\n# The same function, with `{name}` renamed to `value`.\n{given}"
                break


def _summaries() -> Iterator[str]:
    for text, _ in _held_out():
        middle = text.find("\n", len(text) // 2) + 1
        if len(text) - middle > 1200:
            part = text[middle : text.find("\n", middle + 600) + 1]
            yield f"{part}\n\n# In short, the code above\n# "


def prompts(kind: str) -> list[list[int]]:
    """`PROMPTS` of a kind, spread evenly over the held-out files."""
    tokenizer = ByteTokenizer()
    if kind == "continue":
        return held_out_prompts(tokenizer, PROMPTS, 512)
    found = list(_edits() if kind == "edit" else _summaries())
    return [tokenizer.encode(found[i * len(found) // PROMPTS]) for i in range(min(PROMPTS, len(found)))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--draft", nargs="+", choices=DRAFTS, default=list(DRAFTS), metavar="NAME", help="; ".join(DRAFTS))
    parser.add_argument("--device", default="cpu", help="on a GPU rounds are compiled")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    target, head, _ = load_pair(device=device)
    texts = {kind: prompts(kind) for kind in KINDS}
    plain: dict[str, list[list[int]]] = {}
    rows = []
    for batch_size, name in itertools.product(options.batch_size, dict.fromkeys(["plain", *options.draft])):
        draft, steps = DRAFTS[name](head)
        sizes = {"max_batch_size": batch_size, "max_seq_len": ROOM + NEW_TOKENS, "compile": device.type == "cuda"}
        generator = Generator(target, draft, SpeculationConfig(max(steps, 1)), **sizes)
        for kind, given in texts.items():
            generator.generate(given[:batch_size], max_new_tokens=8)
            result = generator.generate(given, max_new_tokens=NEW_TOKENS)
            assert result.tokens == plain.setdefault(kind, result.tokens), (kind, name)
            stats = result.stats
            row = {"kind": kind, "draft": name.partition(":")[0], "steps": steps, "batch_size": batch_size}
            row |= {"prompts": len(given), "new_tokens": stats.new_tokens, "accept_length": round(stats.accept_length, 3)}
            rows.append(row | {"tokens_per_second": round(stats.tokens_per_second, 1)})
            print(*rows[-1].values(), flush=True)
    if options.json is not None:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
