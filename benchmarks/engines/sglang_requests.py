"""`python -m benchmarks sglang-requests`: texts of SGLang engines, by attention backend, scheduling, draft and number of GPUs.

Requests of random lengths join and leave. In bfloat16 a text depends on the batch that it is computed in, with any backend, so
the texts of two engines part where two tokens are nearly tied. A wrong token is told from a tie in float32: the logits of the
two tokens, after the text up to there, differ by no more than bfloat16 rounds.
"""

from __future__ import annotations

import json as json_
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from benchmarks.engines.process import rows_of
from benchmarks.engines.rounds import OURS, parse_backend, parse_option
from benchmarks.round.shapes import SHAPES
from benchmarks.rows import write_rows
from spec_ops.cli.options import console, writable_file, writable_folder
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.huggingface import export_pair
from spec_ops.models.pretrained import load_pair

WORKER = Path(__file__).with_name("sglang_texts.py")
SHIPPED = "shipped"
MODELS = (SHIPPED, "llama-8b")
CONTEXT = 1024
Tokens = list[list[int]]


@dataclass(frozen=True)
class Way:
    """How an engine serves: with drafts or without, and when it prepares the next step's batch.

    Attributes:
        branches: of a draft: 1 is a chain, 0 no draft.
    """

    overlap: bool = True
    branches: int = 1


WAYS = {"chain": Way(), "serial": Way(overlap=False), "plain": Way(branches=0), "tree": Way(branches=4)}
DEFAULT_WAYS = ["chain", "serial", "plain"]  # trees need pages of one token


def bench_requests(
    model: Annotated[str, typer.Option(help="The shipped pair, or llama-8b: its shape, with random weights.")] = SHIPPED,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the target of llama-8b; default all.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
    longest: Annotated[
        int, typer.Option(min=2, max=CONTEXT // 4, help="Prompts of 2 tokens to this, 1 to this many new ones.")
    ] = 256,
    backend: Annotated[list[str], typer.Option(help="NAME or NAME:PAGE_SIZE; may be repeated.")] = [OURS, "triton"],  # noqa: B006
    way: Annotated[
        list[str],
        typer.Option(
            help="chain, plain (no draft), serial (a chain, no overlap scheduling) or tree (of 4 branches; with NAME:1 for a "
            "--backend); may be repeated."
        ),
    ] = DEFAULT_WAYS,
    tp: Annotated[list[int], typer.Option(min=1, help="GPUs of an engine; may be repeated.")] = [1],  # noqa: B006
    running: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Draft steps.")] = 3,
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Tokens of a tree that are verified, its root included.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="For an engine, its start included.")] = 240,
    logs: Annotated[Path | None, typer.Option(callback=writable_folder, help="Folder to keep each engine's log in.")] = None,
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has SGLang.")] = sys.executable,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON: another argument of sglang.Engine; may be repeated.")
    ] = None,
    json: Annotated[Path | None, typer.Option(callback=writable_file, help="Write the rows.")] = None,
    texts: Annotated[
        Path | None, typer.Option(callback=writable_folder, help="Folder for each engine's texts, once it has them.")
    ] = None,
) -> None:
    """Texts of SGLang engines, each compared with the first one's: by attention backend, GPUs, scheduling and draft. Logits are
    compared after the last engine."""
    for option, given, known in (("--model", [model], MODELS), ("--way", way, WAYS)):
        if unknown := [name for name in given if name not in known]:
            raise typer.BadParameter(f"must be one of {list(known)}, got {unknown[0]!r}", param_hint=option)
    if layers is not None and model == SHIPPED:
        raise typer.BadParameter("must not be given with the shipped pair, whose layers are trained", param_hint="--layers")
    backends = [parse_backend(text, 1) for text in backend]
    options = dict(parse_option(text) for text in engine_option or [])
    prompts, counts = drawn_requests(model, requests, longest)
    rows: list[dict[str, Any]] = []
    found: list[Tokens] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        with console.status("writing checkpoints"):
            folders = export_model(model, Path(folder), layers)
        for (name, page_size), gpus, way_name in ((b, n, w) for b in backends for n in tp for w in way):
            chosen = WAYS[way_name]
            row: dict[str, Any] = {
                "engine": "sglang", "backend": name, "page_size": page_size, "model": model, "layers": layers, "tp": gpus,
                "overlap": chosen.overlap, "steps": steps if chosen.branches else 0, "requests": requests, "longest": longest,
            }  # fmt: skip
            if chosen.branches > 1:
                row |= {"branches": chosen.branches, "nodes": nodes}
            job = {"engine": _arguments(folders, row, running) | options, "prompts": prompts, "new_tokens": counts}
            stem = f"{name}-{page_size}-tp{gpus}-{way_name}"
            try:
                with console.status(f"{name}, pages of {page_size}, tp={gpus}, {way_name}"):
                    of_engine = rows_of(
                        python, WORKER, job, seconds, Path(folder if logs is None else logs) / f"{stem}.log", results=1,
                        is_result=lambda row: "tokens" in row, limit="--seconds",
                    )  # fmt: skip
                    told = {name: value for row in of_engine for name, value in row.items()}
            except RuntimeError as error:
                failed = True
                console.print(f"[red]{name}[/red]: {escape(str(error))}", soft_wrap=True)
                continue
            tokens = told.pop("tokens")
            if texts is not None:
                texts.mkdir(parents=True, exist_ok=True)
                (texts / f"{stem}.json").write_text(json_.dumps({"prompts": prompts, "tokens": tokens}))
            if wrong := [i for i, text in enumerate(tokens) if len(text) != counts[i]]:
                failed = True
                console.print(f"[red]{name}[/red]: {len(wrong)} texts of another length, the first {wrong[0]}")
                continue
            if chosen.branches:  # the first token of a text is the prefill's, no round's
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
    show(rows)
    if failed:
        raise typer.Exit(1)


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


def export_model(model: str, folder: Path, layers: int | None) -> tuple[Path, Path]:
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


def _arguments(folders: tuple[Path, Path], row: dict[str, Any], running: int) -> dict[str, Any]:
    arguments = {
        "model_path": str(folders[0]), "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": row["backend"],
        "page_size": row["page_size"], "sampling_backend": "pytorch", "grammar_backend": "none", "context_length": CONTEXT,
        "max_running_requests": running, "cuda_graph_backend_prefill": "disabled", "disable_flashinfer_autotune": True,
        "skip_server_warmup": True, "random_seed": 1, "log_level": "info", "disable_overlap_schedule": not row["overlap"],
        "tp_size": row["tp"],
    }  # fmt: skip
    if row["steps"]:
        arguments |= {
            "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folders[1]),
            "speculative_num_steps": row["steps"], "speculative_eagle_topk": row.get("branches", 1),
            "speculative_num_draft_tokens": row.get("nodes", row["steps"] + 1),
        }  # fmt: skip
    return arguments


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
        way = f"{row['backend']}, page {row['page_size']}", str(row["tp"]), "yes" if row["overlap"] else "no", drafts
        table.add_row(
            *way, f"{row['equal']} of {row['requests']}", str(row["largest_gap"]), str(row["rounds"]), str(row["seconds"])
        )
    console.print(table)
