"""Accept length and speed of prompt lookup with the shipped pair's target, on texts that quote their prompt and on others:

    python -m benchmarks.lookup                                         # prints
    python -m benchmarks.lookup --json benchmarks/results/cpu-lookup.json

Prompts come from files of the standard library that the split holds out: `edit` is a function, then the same with an argument
renamed, a third of it given; `summary` is a part of a file, then the beginning of a comment that sums it up; `continue` is a
part of a file that goes on. Greedy; every text is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import write_rows
from spec_ops.decoding import Generator, PromptLookup, SpeculationConfig
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts, split_of, stdlib_files
from spec_ops.models.pretrained import load_pair

PROMPTS, NEW_TOKENS, ROOM = 8, 96, 1536
KINDS = ("edit", "summary", "continue")


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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    target, head, _ = load_pair()
    drafts = [("plain", None, 0), ("eagle3", head, 3)]
    drafts += [("lookup, 2 compared", PromptLookup(2), 5)]
    drafts += [("lookup", PromptLookup(), steps) for steps in (3, 5, 8)]
    drafts += [("lookup from 4, else eagle3", PromptLookup(min_ngram=4, otherwise=head), 3)]
    rows = []
    for batch_size in options.batch_size:
        for kind in KINDS:
            texts, plain = prompts(kind), None
            for name, draft, steps in drafts:
                config = SpeculationConfig(max(steps, 1))
                generator = Generator(target, draft, config, max_batch_size=batch_size, max_seq_len=ROOM + NEW_TOKENS)
                generator.generate(texts[:batch_size], max_new_tokens=8)
                result = generator.generate(texts, max_new_tokens=NEW_TOKENS)
                plain = result.tokens if plain is None else plain
                assert result.tokens == plain, (kind, name)
                stats = result.stats
                row = {"kind": kind, "draft": name, "steps": steps, "batch_size": batch_size, "prompts": len(texts)}
                row |= {"new_tokens": stats.new_tokens, "accept_length": round(stats.accept_length, 3)}
                rows.append(row | {"tokens_per_second": round(stats.tokens_per_second, 1)})
                print(*rows[-1].values(), flush=True)
    if options.json is not None:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
