"""What `python -m benchmarks sglang-requests` and `vllm-requests` share: requests, checkpoints, engines one after another, and
the comparison of their texts.

Requests of random lengths join and leave. In bfloat16 a text depends on the batch that it is computed in, with any backend, so
the texts of two engines part where two tokens are nearly tied. A wrong token is told from a tie in float32: the logits of the
two tokens, after the text up to there, differ by no more than bfloat16 rounds.
"""

from __future__ import annotations

import json as json_
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from benchmarks.engines.process import Row, rows_of
from benchmarks.round.shapes import SHAPES
from benchmarks.rows import write_rows
from spec_ops.cli.options import console, writable_file, writable_folder
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.huggingface import export_pair
from spec_ops.models.pretrained import load_pair

SHIPPED = "shipped"
MODELS = (SHIPPED, "llama-8b")
CONTEXT = 1024
Tokens = list[list[int]]
Folders = tuple[Path, Path]  # of a target and its head
Engine = tuple[str, Row, dict[str, Any]]  # a name for files, what its row has, and the engine's arguments

# Options of both commands.
Model = Annotated[str, typer.Option(help="The shipped pair, or llama-8b: its shape, with random weights.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Of the target of llama-8b; default all.")]
Requests = Annotated[int, typer.Option(min=1, help="How many.")]
Longest = Annotated[int, typer.Option(min=2, max=CONTEXT // 4, help="Prompts of 2 tokens to this, 1 to this many new ones.")]
Ranks = Annotated[list[int], typer.Option(min=1, help="GPUs of an engine; may be repeated.")]
Running = Annotated[int, typer.Option(min=1, help="Requests that run at once.")]
Steps = Annotated[int, typer.Option(min=1, help="Draft steps.")]
Seconds = Annotated[float, typer.Option(min=1, help="For an engine, its start included.")]
Logs = Annotated[Path | None, typer.Option(callback=writable_folder, help="Folder to keep each engine's log in.")]
Json = Annotated[Path | None, typer.Option(callback=writable_file, help="Write the rows.")]
Texts = Annotated[Path | None, typer.Option(callback=writable_folder, help="Folder for each engine's texts, once it has them.")]


def check_options(model: str, layers: int | None, way: Sequence[str], ways: Iterable[str]) -> None:
    for option, given, known in (("--model", [model], MODELS), ("--way", way, ways)):
        if unknown := [name for name in given if name not in known]:
            raise typer.BadParameter(f"must be one of {list(known)}, got {unknown[0]!r}", param_hint=option)
    if layers is not None and model == SHIPPED:
        raise typer.BadParameter("must not be given with the shipped pair, whose layers are trained", param_hint="--layers")


def compare_engines(
    engines_of: Callable[[Folders], Iterable[Engine]],
    worker: Path,
    model: str,
    layers: int | None,
    requests: int,
    longest: int,
    *,
    python: str,
    seconds: float,
    logs: Path | None,
    texts: Path | None,
    json: Path | None,
) -> tuple[list[Row], bool]:
    """Serve the same requests with one engine after another, and compare each one's texts with the first one's: logits after
    the last engine.

    Args:
        engines_of: of the checkpoints' folders.
        worker: a script that starts an engine in a process of its own, and reports its `tokens` and `rounds`.
        Others as the options.

    Returns:
        The rows, and whether an engine failed.
    """
    prompts, counts = drawn_requests(model, requests, longest)
    rows: list[Row] = []
    found: list[Tokens] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        with console.status("writing checkpoints"):
            folders = export_model(model, Path(folder), layers)
        for stem, row, arguments in engines_of(folders):
            row = {**row, "model": model, "layers": layers, "requests": requests, "longest": longest}
            job = {"engine": arguments, "prompts": prompts, "new_tokens": counts}
            try:
                with console.status(stem):
                    of_engine = rows_of(
                        python, worker, job, seconds, Path(folder if logs is None else logs) / f"{stem}.log", results=1,
                        is_result=lambda row: "tokens" in row, limit="--seconds",
                    )  # fmt: skip
                    told = {name: value for row in of_engine for name, value in row.items()}
            except RuntimeError as error:
                failed = True
                console.print(f"[red]{row['backend']}[/red]: {escape(str(error))}", soft_wrap=True)
                continue
            tokens = told.pop("tokens")
            if texts is not None:
                texts.mkdir(parents=True, exist_ok=True)
                (texts / f"{stem}.json").write_text(json_.dumps({"prompts": prompts, "tokens": tokens}))
            if wrong := [i for i, text in enumerate(tokens) if len(text) != counts[i]]:
                failed = True
                console.print(f"[red]{row['backend']}[/red]: {len(wrong)} texts of another length, the first {wrong[0]}")
                continue
            if row["steps"]:  # the first token of a text is the prefill's, no round's
                told["accept_length"] = round((sum(counts) - requests) / max(told["rounds"], 1), 3)
            found.append(tokens)
            rows.append(row | told | {"equal": sum(a == b for a, b in zip(found[0], tokens, strict=True))})
            if json is not None:
                write_rows(json, rows)
        exact = Exact(folders[0])
        for row, tokens in zip(rows, found, strict=True):
            row |= gaps(exact, prompts, found[0], tokens)
            if json is not None:
                write_rows(json, rows)
    return rows, failed


def drawn_requests(model: str, count: int, longest: int) -> tuple[Tokens, list[int]]:
    """Prompts and numbers of new tokens; some prompts of the shipped pair are the beginning of another."""
    drawn = random.Random(0)
    if model == SHIPPED:
        texts = held_out_prompts(ByteTokenizer(), 32, longest)
        prompts = [drawn.choice(texts)[: drawn.randint(2, longest)] for _ in range(count)]
    else:
        ids = SHAPES[model].target.vocab_size
        prompts = [[drawn.randrange(10, ids) for _ in range(drawn.randint(2, longest))] for _ in range(count)]
    return prompts, [drawn.randint(1, longest) for _ in prompts]


def export_model(model: str, folder: Path, layers: int | None) -> Folders:
    """Checkpoints in bfloat16 of a target and its head; the same random weights however many GPUs share them."""
    if model == SHIPPED:
        return export_pair(folder, *load_pair(dtype=torch.bfloat16), context=CONTEXT)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = SHAPES[model].with_layers(layers).build(device, torch.bfloat16)
    folders = export_pair(folder, target, draft, context=CONTEXT)  # type: ignore[arg-type]
    del target, draft
    if device == "cuda":
        torch.cuda.empty_cache()
    return folders


class Exact:
    """A target in float32, of a folder's weights in bfloat16. It is loaded when a logit is asked for, and keeps a GPU's memory:
    no engine runs any more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device = "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def _model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM  # slow to import; other commands do without

        there = {"device_map": "cuda:0"} if self._device == "cuda" else {}  # as fast as the GPU takes them
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32, **there)

    def logits(self, texts: Tokens) -> Iterator[torch.Tensor]:
        """`[tokens, vocab]` for each text, one at a time."""
        for text in track(texts, "comparing logits", console=console, transient=True):
            with torch.no_grad():
                yield self._model(torch.tensor([text], device=self._device)).logits[0]


def gaps(exact: Exact, prompts: Tokens, first: Tokens, second: Tokens) -> dict[str, float]:
    """How far the less likely of two tokens where texts part is below the likeliest (logits): the largest of the texts.

    `typical_gap` is what a gap between arbitrary tokens would be at least: the median, over the same texts up to there, of how
    far the second likeliest token is below the likeliest.
    """
    parted = [
        (i, next(k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y))
        for i, (a, b) in enumerate(zip(first, second, strict=True))
        if a != b
    ]
    if not parted:
        return {"largest_gap": 0.0}
    below, margins = [], []
    for (i, at), logits in zip(parted, exact.logits([prompts[i] + first[i][:at] for i, at in parted]), strict=True):
        last = logits[-1]
        below.append(float(last.max() - torch.minimum(last[first[i][at]], last[second[i][at]])))
        likeliest = logits[len(prompts[i]) - 1 :].topk(2).values
        margins += (likeliest[:, 0] - likeliest[:, 1]).tolist()
    return {"largest_gap": round(max(below), 4), "typical_gap": round(statistics.median(margins), 4)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("backend", "GPUs", "overlap", "S", "equal to the first", "largest gap of logits", "rounds", "s")
    for row in rows:
        drafts = f"{row['steps']} x {row['branches']}" if "branches" in row else str(row["steps"])
        way = f"{row['backend']}, page {row['page_size']}", str(row["tp"]), "yes" if row.get("overlap", True) else "no", drafts
        table.add_row(
            *way, f"{row['equal']} of {row['requests']}", str(row["largest_gap"]), str(row["rounds"]), str(row["seconds"])
        )
    console.print(table)
