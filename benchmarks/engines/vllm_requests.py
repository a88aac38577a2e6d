"""`python -m benchmarks vllm-requests`: texts of vLLM engines, by attention backend, draft and number of GPUs.

`texts.py` says what is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engines import texts as engine_texts
from benchmarks.engines.process import Row
from benchmarks.engines.rounds import OURS, parse_backend, parse_option
from benchmarks.engines.texts import CONTEXT, SHIPPED, Engine, Folders, check_options, compare_engines, show
from benchmarks.engines.vllm_rounds import PAGE_SIZE

WORKER = Path(__file__).with_name("vllm_texts.py")
WAYS = {"chain": True, "plain": False}  # whether it drafts


def bench_vllm_requests(
    model: engine_texts.Model = SHIPPED,
    layers: engine_texts.Layers = None,
    requests: engine_texts.Requests = 1000,
    longest: engine_texts.Longest = 256,
    backend: Annotated[list[str], typer.Option(help="NAME or NAME:PAGE_SIZE; may be repeated.")] = [OURS, "FLASH_ATTN"],  # noqa: B006
    ours: Annotated[str, typer.Option(help=f"vLLM's name for {OURS}; before 0.32 it is CUSTOM.")] = "SPEC_OPS",
    way: Annotated[list[str], typer.Option(help="chain or plain (no draft); may be repeated.")] = list(WAYS),  # noqa: B006
    tp: engine_texts.Ranks = [1],  # noqa: B006
    running: engine_texts.Running = 32,
    steps: engine_texts.Steps = 3,
    seconds: engine_texts.Seconds = 240,
    logs: engine_texts.Logs = None,
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has vLLM.")] = sys.executable,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON: another argument of vllm.LLM; may be repeated.")
    ] = None,
    json: engine_texts.Json = None,
    texts: engine_texts.Texts = None,
) -> None:
    """Texts of vLLM engines, each compared with the first one's: by attention backend, GPUs and draft. Logits are compared
    after the last engine."""
    check_options(model, layers, way, WAYS)
    backends = [parse_backend(text, PAGE_SIZE) for text in backend]
    options = dict(parse_option(text) for text in engine_option or [])

    def engines_of(folders: Folders) -> Iterator[Engine]:
        for (name, page_size), gpus, way_name in ((b, n, w) for b in backends for n in tp for w in way):
            row: Row = {
                "engine": "vllm", "backend": name, "page_size": page_size, "tp": gpus, "steps": steps if WAYS[way_name] else 0,
            }  # fmt: skip
            arguments = _arguments(folders, row, ours if name == OURS else name, running)
            yield f"{name}-{page_size}-tp{gpus}-{way_name}", row, arguments | options

    rows, failed = compare_engines(
        engines_of, WORKER, model, layers, requests, longest, python=python, seconds=seconds, logs=logs, texts=texts, json=json
    )
    show(rows)
    if failed:
        raise typer.Exit(1)


def _arguments(folders: Folders, row: Row, backend: str, running: int) -> dict[str, Any]:
    """CUDA graphs of a few batch sizes, so that others are padded to them."""
    tokens = 1 + row["steps"]
    arguments: dict[str, Any] = {
        "model": str(folders[0]), "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 1, "attention_backend": backend,
        "block_size": row["page_size"], "max_num_seqs": running, "max_model_len": CONTEXT, "max_num_batched_tokens": 2048,
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, 4, 4 * tokens, running, running * tokens})},
        "tensor_parallel_size": row["tp"], "disable_log_stats": False,
    }  # fmt: skip
    if row["steps"]:
        arguments["speculative_config"] = {
            "method": "eagle3", "model": str(folders[1]), "num_speculative_tokens": row["steps"], "attention_backend": backend,
        }  # fmt: skip
    return arguments
