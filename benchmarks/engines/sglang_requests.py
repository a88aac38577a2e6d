"""`python -m benchmarks sglang-requests`: texts of SGLang engines, by attention backend, scheduling, draft and number of GPUs.

`texts.py` says what is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engines import texts as engine_texts
from benchmarks.engines.process import Row
from benchmarks.engines.rounds import OURS, parse_backend, parse_option
from benchmarks.engines.texts import CONTEXT, SHIPPED, Engine, Folders, check_options, compare_engines, show

WORKER = Path(__file__).with_name("sglang_texts.py")


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
    model: engine_texts.Model = SHIPPED,
    layers: engine_texts.Layers = None,
    requests: engine_texts.Requests = 1000,
    longest: engine_texts.Longest = 256,
    backend: Annotated[list[str], typer.Option(help="NAME or NAME:PAGE_SIZE; may be repeated.")] = [OURS, "triton"],  # noqa: B006
    way: Annotated[
        list[str],
        typer.Option(
            help="chain, plain (no draft), serial (a chain, no overlap scheduling) or tree (of 4 branches; with NAME:1 for a "
            "--backend); may be repeated."
        ),
    ] = DEFAULT_WAYS,
    tp: engine_texts.Ranks = [1],  # noqa: B006
    running: engine_texts.Running = 32,
    steps: engine_texts.Steps = 3,
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Tokens of a tree that are verified, its root included.")] = 8,
    seconds: engine_texts.Seconds = 240,
    logs: engine_texts.Logs = None,
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has SGLang.")] = sys.executable,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON: another argument of sglang.Engine; may be repeated.")
    ] = None,
    json: engine_texts.Json = None,
    texts: engine_texts.Texts = None,
) -> None:
    """Texts of SGLang engines, each compared with the first one's: by attention backend, GPUs, scheduling and draft. Logits are
    compared after the last engine."""
    check_options(model, layers, way, WAYS)
    backends = [parse_backend(text, 1) for text in backend]
    options = dict(parse_option(text) for text in engine_option or [])

    def engines_of(folders: Folders) -> Iterator[Engine]:
        for (name, page_size), gpus, way_name in ((b, n, w) for b in backends for n in tp for w in way):
            chosen = WAYS[way_name]
            row: Row = {
                "engine": "sglang", "backend": name, "page_size": page_size, "tp": gpus, "overlap": chosen.overlap,
                "steps": steps if chosen.branches else 0,
            }  # fmt: skip
            if chosen.branches > 1:
                row |= {"branches": chosen.branches, "nodes": nodes}
            yield f"{name}-{page_size}-tp{gpus}-{way_name}", row, _arguments(folders, row, running) | options

    rows, failed = compare_engines(
        engines_of, WORKER, model, layers, requests, longest, python=python, seconds=seconds, logs=logs, texts=texts, json=json
    )
    show(rows)
    if failed:
        raise typer.Exit(1)


def _arguments(folders: Folders, row: dict[str, Any], running: int) -> dict[str, Any]:
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
