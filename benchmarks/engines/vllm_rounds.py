"""`python -m benchmarks vllm`: milliseconds of vLLM's rounds by attention backend, ours among them.

vLLM may be installed in another environment than this one (`--python`), together with this package. Weights are dummy. Nothing
simulates acceptance: a round is a draft and its verification, however much of it is accepted.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engines import rounds as engine_rounds
from benchmarks.engines.checkpoints import write_shape
from benchmarks.engines.process import Row, rows_of
from benchmarks.engines.rounds import (
    LIMIT,
    OURS,
    check_options,
    is_case,
    measure_engines,
    parse_backend,
    parse_case,
    parse_option,
    show,
    vocab_size,
)
from spec_ops.cli.options import console

WORKER = Path(__file__).with_name("vllm_worker.py")
BACKENDS = [OURS, "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]
PAGE_SIZE = 16  # vLLM's own


def bench_vllm(
    model: engine_rounds.Model = "llama-8b",
    backend: engine_rounds.Backends = BACKENDS,
    ours: Annotated[str, typer.Option(help=f"vLLM's name for {OURS}; before 0.32 it is CUSTOM.")] = "SPEC_OPS",
    case: engine_rounds.Cases = engine_rounds.CASES,
    layers: engine_rounds.Layers = None,
    steps: engine_rounds.Steps = 3,
    tp: engine_rounds.Ranks = 1,
    rounds: engine_rounds.Rounds = (24, 88),
    repeats: engine_rounds.Repeats = 3,
    seconds: engine_rounds.Seconds = 400,
    total_seconds: engine_rounds.TotalSeconds = None,
    logs: engine_rounds.Logs = None,
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has vLLM.")] = sys.executable,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON: another argument of vllm.LLM; may be repeated.")
    ] = None,
    json: engine_rounds.Json = None,
) -> None:
    """Milliseconds of a round in vLLM engines that differ in their attention backend alone."""
    check_options(model, rounds)
    backends, cases = [parse_backend(text, PAGE_SIZE) for text in backend], [parse_case(text) for text in case]
    options = dict(parse_option(text) for text in engine_option or [])
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_shape(model, Path(folder), layers)

        def engine_of(name: str, page_size: int, limit: float) -> tuple[Row, Generator[Row]]:
            called = ours if name == OURS else name
            job = {
                "engine": engine_arguments(target, draft, called, page_size, cases, steps, tp) | options, "cases": cases,
                "rounds": rounds, "repeats": repeats, "vocab_size": vocab_size(target), "drafts": steps > 0,
            }  # fmt: skip
            common = {"engine": "vllm", "model": model, "layers": layers, "steps": steps, "tp": tp}
            log = None if logs is None else logs / f"{name}-{page_size}.log"
            return common, rows_of(python, WORKER, job, limit, log, results=len(cases), is_result=is_case, limit=LIMIT)

        rows, failed = measure_engines(backends, engine_of, seconds=seconds, total_seconds=total_seconds, json=json)
    show(console, rows)
    if failed:
        raise typer.Exit(1)


def engine_arguments(
    target: Path, draft: Path | None, backend: str, page_size: int, cases: Sequence[tuple[int, int]], steps: int, tp: int
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: dummy weights; for each measured batch size a CUDA graph of what it verifies, and one of a draft
    step."""
    batch_sizes = sorted({batch_size for batch_size, _ in cases})
    graphs = sorted({size * tokens for size in batch_sizes for tokens in (1, steps + 1)})
    arguments: dict[str, Any] = {
        "model": str(target), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 1,
        "attention_backend": backend, "block_size": page_size, "max_num_seqs": batch_sizes[-1],
        "max_model_len": max(context for _, context in cases) + 4096, "max_num_batched_tokens": 8192,
        "compilation_config": {"cudagraph_capture_sizes": graphs}, "tensor_parallel_size": tp, "disable_log_stats": False,
    }  # fmt: skip
    if steps:
        config = {"num_speculative_tokens": steps, "attention_backend": backend}
        head = {"method": "mtp"} if draft is None else {"method": "eagle3", "model": str(draft)}
        arguments["speculative_config"] = config | head
    return arguments
