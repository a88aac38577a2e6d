"""`python -m benchmarks sglang`: milliseconds of SGLang's rounds by attention backend, `spec_ops` among them.

SGLang may be installed in another environment than this one (`--python`), together with this package. Weights are dummy, and
accepted lengths are simulated, so that every backend does the same work.
"""

from __future__ import annotations

import os
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
from benchmarks.engines.sglang_profile import per_round
from spec_ops.cli.options import console

WORKER = Path(__file__).with_name("sglang_worker.py")
BACKENDS = [OURS, "fa3", "triton", "flashinfer"]


def bench_sglang(
    model: engine_rounds.Model = "llama-8b",
    backend: engine_rounds.Backends = BACKENDS,
    case: engine_rounds.Cases = engine_rounds.CASES,
    layers: engine_rounds.Layers = None,
    steps: engine_rounds.Steps = 3,
    accept_length: Annotated[float, typer.Option(min=1, help="Tokens a round, simulated.")] = 3.0,
    tp: engine_rounds.Ranks = 1,
    rounds: engine_rounds.Rounds = (24, 88),
    repeats: engine_rounds.Repeats = 3,
    seconds: engine_rounds.Seconds = 240,
    total_seconds: engine_rounds.TotalSeconds = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also count graphs, copies and waits of the first case's rounds.")
    ] = False,
    logs: engine_rounds.Logs = None,
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has SGLang.")] = sys.executable,
    engine_option: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON: another argument of sglang.Engine; may be repeated.")
    ] = None,
    json: engine_rounds.Json = None,
) -> None:
    """Milliseconds of a round in SGLang engines that differ in their attention backend alone."""
    check_options(model, rounds)
    if steps and accept_length > steps + 1:
        raise typer.BadParameter(
            f"must be at most {steps + 1} with {steps} steps, got {accept_length:g}", param_hint="--accept-length"
        )
    backends, cases = [parse_backend(text, 1) for text in backend], [parse_case(text) for text in case]
    options = dict(parse_option(text) for text in engine_option or [])
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_shape(model, Path(folder), layers)

        def engine_of(name: str, page_size: int, limit: float) -> tuple[Row, Generator[Row]]:
            engine = engine_arguments(target, draft, name, page_size, cases, steps, tp) | options
            job = {
                "engine": engine, "cases": cases, "rounds": rounds, "repeats": repeats, "vocab_size": vocab_size(target),
                "tokens_per_round": accept_length if steps else 1.0,
            }  # fmt: skip
            if profile:
                job["profile"] = str(Path(folder) / f"profile-{name}-{page_size}")
            common = {
                "engine": "sglang", "model": model, "layers": layers, "steps": steps, "tp": tp,
                "simulated_accept_length": accept_length if steps else None,
            }  # fmt: skip
            log = None if logs is None else logs / f"{name}-{page_size}.log"
            return common, run(python, job, limit, accept_length if steps else None, log)

        def keep(rows: list[Row], row: Row) -> bool:
            if "profiled" in row:
                _add_profile(rows, row, Path(folder) / f"profile-{row['backend']}-{row['page_size']}")
            return "profiled" in row

        rows, failed = measure_engines(backends, engine_of, seconds=seconds, total_seconds=total_seconds, json=json, keep=keep)
    show(console, rows)
    if failed:
        raise typer.Exit(1)


def _add_profile(rows: Sequence[Row], told: Row, folder: Path) -> None:
    """To the row of the case that was profiled: what the trace says of a round of the first rank."""
    traces = sorted(folder.glob("*TP-0*.trace.json.gz"))
    if not traces:
        raise RuntimeError(f"--profile: the engine wrote no *TP-0*.trace.json.gz to {folder}")
    found = per_round(traces[0], told["rounds"])
    bs, context = told["profiled"]
    for row in rows:
        if (row["backend"], row["page_size"], row["bs"], row["context"]) == (told["backend"], told["page_size"], bs, context):
            row["profile"] = found
    console.print(f"{told['backend']}, a round of {bs} x {context}: {found}", soft_wrap=True, highlight=False)


def engine_arguments(
    target: Path, draft: Path | None, backend: str, page_size: int, cases: Sequence[tuple[int, int]], steps: int, tp: int
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: dummy weights, greedy, CUDA graphs of the batch sizes that are measured."""
    batch_sizes = sorted({batch_size for batch_size, _ in cases})
    longest = max(context for _, context in cases)
    arguments = {
        "model_path": str(target), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "attention_backend": backend, "page_size": page_size, "sampling_backend": "pytorch", "grammar_backend": "none",
        "context_length": longest + 4096, "max_running_requests": batch_sizes[-1], "cuda_graph_bs_decode": batch_sizes,
        "cuda_graph_backend_prefill": "disabled", "disable_flashinfer_autotune": True,  # no part of a round, and long to start
        "chunked_prefill_size": 8192, "skip_server_warmup": True, "random_seed": 1, "log_level": "info", "tp_size": tp,
    }  # fmt: skip
    if steps:
        arguments |= {
            "speculative_algorithm": "EAGLE" if draft is None else "EAGLE3", "speculative_num_steps": steps,
            "speculative_eagle_topk": 1, "speculative_num_draft_tokens": steps + 1,
        }  # fmt: skip
        if draft is not None:
            arguments["speculative_draft_model_path"] = str(draft)
    return arguments


def run(
    python: str, job: dict[str, Any], seconds: float, accept_length: float | None, log_file: Path | None = None
) -> Generator[Row]:
    """The rows of one engine, as they come; what it says besides goes to `log_file`.

    Raises:
        RuntimeError: as `rows_of` does.
    """
    environment = {**os.environ, "SGLANG_SIMULATE_ACC_LEN": str(accept_length)}
    if accept_length is None:
        del environment["SGLANG_SIMULATE_ACC_LEN"]
    return rows_of(
        python, WORKER, job, seconds, log_file, results=len(job["cases"]), is_result=is_case,
        limit=LIMIT, environment=environment,
    )  # fmt: skip
