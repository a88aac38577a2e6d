"""`python -m benchmarks sglang-requests`: the shipped pair's texts in SGLang engines, by attention backend and scheduling.

Requests of random lengths join and leave. In bfloat16 a text depends on the batch that it is computed in, with any backend, so
the texts of two engines part where two tokens are nearly tied. A wrong token is told from a tie in float32: the logits of the
two tokens, after the text up to there, differ by no more than bfloat16 rounds.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from benchmarks.engines.process import rows_of
from benchmarks.engines.sglang_rounds import OURS, parse_backend, parse_option
from benchmarks.rows import write_rows
from spec_ops.cli.options import console, writable_file, writable_folder
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.huggingface import export_pair
from spec_ops.models.pretrained import load_pair

WORKER = Path(__file__).with_name("sglang_texts.py")
LONGEST = 256  # tokens of a prompt, and of its continuation
Tokens = list[list[int]]


def bench_requests(
    requests: Annotated[int, typer.Option(min=1, help="Prompts of 2 to 256 tokens, 1 to 256 new ones.")] = 1000,
    backend: Annotated[list[str], typer.Option(help="NAME or NAME:PAGE_SIZE; may be repeated.")] = [OURS, "triton"],  # noqa: B006
    running: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Draft steps of the chain.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="For an engine, its start included.")] = 240,
    logs: Annotated[Path | None, typer.Option(callback=writable_folder, help="Folder to keep each engine's log in.")] = None,
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has SGLang.")] = sys.executable,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON: another argument of sglang.Engine; may be repeated.")
    ] = None,
    json: Annotated[Path | None, typer.Option(callback=writable_file, help="Write the rows.")] = None,
) -> None:
    """Texts of SGLang engines: with overlap scheduling and without, with a draft and plain, by attention backend."""
    from transformers import AutoModelForCausalLM  # slow to import; other commands do without

    backends = [parse_backend(text) for text in backend]
    options = dict(parse_option(text) for text in engine_option or [])
    pair = load_pair()
    tokenizer = pair[2]
    prompts, counts = drawn_requests(tokenizer, requests)
    ways = [(*way, overlap, chain) for way in backends for overlap, chain in ((True, True), (False, True), (True, False))]
    rows: list[dict[str, Any]] = []
    texts: list[Tokens] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        folders = export_pair(Path(folder) / "bfloat16", *load_pair(dtype=torch.bfloat16), context=1024)
        exact = AutoModelForCausalLM.from_pretrained(export_pair(Path(folder) / "float32", *pair, context=1024)[0])
        for name, page_size, overlap, chain in ways:
            row: dict[str, Any] = {"engine": "sglang", "backend": name, "page_size": page_size, "overlap": overlap,
                                   "steps": steps if chain else 0, "requests": requests}  # fmt: skip
            job = {"engine": _arguments(folders, row, running) | options, "prompts": prompts, "new_tokens": counts}
            log = (
                Path(folder if logs is None else logs)
                / f"{name}-{page_size}{'' if overlap else '-no-overlap'}-{row['steps']}.log"
            )
            try:
                with console.status(f"{name}, pages of {page_size}, {'' if overlap else 'no '}overlap, S={row['steps']}"):
                    of_engine = rows_of(
                        python, WORKER, job, seconds, log, results=1, is_result=lambda row: "tokens" in row, limit="--seconds"
                    )
                    found = {name: value for row in of_engine for name, value in row.items()}
            except RuntimeError as error:
                failed = True
                console.print(f"[red]{name}[/red]: {escape(str(error))}", soft_wrap=True)
                continue
            tokens = found.pop("tokens")
            if wrong := [i for i, text in enumerate(tokens) if len(text) != counts[i]]:
                failed = True
                console.print(f"[red]{name}[/red]: {len(wrong)} texts of another length, the first {wrong[0]}")
                continue
            row |= found | compare(exact, prompts, texts[0] if texts else tokens, tokens)
            texts.append(tokens)
            rows.append(row)
            if json is not None:
                write_rows(json, rows)
    show(rows)
    if failed:
        raise typer.Exit(1)


def drawn_requests(tokenizer: ByteTokenizer, count: int) -> tuple[Tokens, list[int]]:
    """Prompts and numbers of new tokens; some prompts are the beginning of another."""
    drawn, texts = random.Random(0), held_out_prompts(tokenizer, 32, LONGEST)
    prompts = [drawn.choice(texts)[: drawn.randint(2, LONGEST)] for _ in range(count)]
    return prompts, [drawn.randint(1, LONGEST) for _ in prompts]


def _arguments(folders: tuple[Path, Path], row: dict[str, Any], running: int) -> dict[str, Any]:
    arguments = {
        "model_path": str(folders[0]), "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": row["backend"],
        "page_size": row["page_size"], "sampling_backend": "pytorch", "grammar_backend": "none", "context_length": 1024,
        "max_running_requests": running, "cuda_graph_backend_prefill": "disabled", "disable_flashinfer_autotune": True,
        "skip_server_warmup": True, "random_seed": 1, "log_level": "info", "disable_overlap_schedule": not row["overlap"],
    }  # fmt: skip
    if row["steps"]:
        arguments |= {
            "speculative_algorithm": "EAGLE3", "speculative_num_steps": row["steps"], "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": row["steps"] + 1, "speculative_draft_model_path": str(folders[1]),
        }  # fmt: skip
    return arguments


@torch.no_grad()
def compare(model: torch.nn.Module, prompts: Tokens, first: Tokens, second: Tokens) -> dict[str, Any]:
    """How many texts are equal, and how far the less likely of two tokens where texts part is below the likeliest (logits)."""
    gaps = []
    parted = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    for i in track(parted, "comparing logits", console=console, transient=True):
        a, b = first[i], second[i]
        at = next(k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = model(torch.tensor([prompts[i] + a[:at]])).logits[0, -1]
        gaps.append(float(logits.max() - torch.minimum(logits[a[at]], logits[b[at]])))
    return {"equal": len(first) - len(parted), "largest_gap": round(max(gaps, default=0.0), 4)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("backend", "overlap", "S", "equal to the first", "largest gap of logits", "rounds", "s")
    for row in rows:
        way = f"{row['backend']}, page {row['page_size']}", "yes" if row["overlap"] else "no", str(row["steps"])
        table.add_row(
            *way, f"{row['equal']} of {row['requests']}", str(row["largest_gap"]), str(row["rounds"]), str(row["seconds"])
        )
    console.print(table)
