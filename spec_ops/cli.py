"""Command line: `python -m spec_ops generate`, `explain`, `backends` and `bench`."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spec_ops.bench.round_command import bench_round
from spec_ops.bench.tune_command import bench_tune
from spec_ops.decoding import GenerationResult, Generator, SamplingParams, SpeculationConfig
from spec_ops.models.corpus import held_out_prompts
from spec_ops.models.drafts import Draft
from spec_ops.models.pretrained import load_pair
from spec_ops.models.target import Target
from spec_ops.results import write_rows

app = typer.Typer(
    help="Speculative decoding as plain PyTorch.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")
bench.command("round")(bench_round)
bench.command("tune")(bench_tune)
console = Console(highlight=False, emoji=False)  # `x[:end:]` is Python, not an emoji

DEFAULT_PROMPT = '''class Matrix:
    """A dense matrix stored row by row."""

    def __init__(self, rows, columns):
'''

PairPath = Annotated[Path | None, typer.Option("--pair", help="Folder of a saved pair; default the one shipped.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Draft steps S.")]
TopK = Annotated[int, typer.Option("--tree-width", min=1, help="Branches K per draft step; 1 drafts a chain.")]
TreeTokens = Annotated[int | None, typer.Option("--tree-tokens", help="Tokens verified per round in a tree, root included.")]
Device = Annotated[str | None, typer.Option("--device", help="Default: cuda if there is one, else cpu.")]
DType = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile rounds (CUDA graphs on a GPU).")]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _dtype(name: str, known: dict[str, torch.dtype] = _DTYPES) -> torch.dtype:
    if name not in known:
        raise typer.BadParameter(f"must be one of {sorted(known)}, got {name!r}", param_hint="--dtype")
    return known[name]


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available", param_hint="--device")
    return device


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is not UTF-8: {error}", param_hint="--prompt-file") from error


def _config(steps: int, topk: int, tokens: int | None) -> SpeculationConfig:
    try:
        return SpeculationConfig(steps, topk, tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--steps / --tree-width / --tree-tokens") from error


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = DEFAULT_PROMPT,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file instead.", exists=True)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 384,
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Decode both ways; exit code 1 if the texts differ.")] = False,
    pair: PairPath = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a transformers causal language model and its tokenizer, instead of a pair.")
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option("--draft", help="With --model: folder of a smaller model, or of an EAGLE-3 head.")
    ] = None,
    device: Device = None,
    dtype: DType = "float32",
    compile: Compile = False,
) -> None:
    """Continue a prompt with the shipped pair of models (byte-level, trained on Python sources) or with local checkpoints of
    transformers, streaming the text."""
    if compare and (plain or temperature > 0 or dtype != "float32"):
        # In a short format the two ways round differently, and a near tie may rightly fall either way.
        raise typer.BadParameter(
            "compares greedy texts in float32: leave out --plain, --temperature and --dtype", param_hint="--compare"
        )
    place, config = _device(device), _config(steps, tree_width, tree_tokens)
    try:
        sampling = SamplingParams(temperature, top_k, top_p, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--temperature / --top-k / --top-p / --seed") from error
    target: Target
    draft: Draft | None
    tokenizer: Any
    if model is None:
        if draft_model is not None:
            raise typer.BadParameter("needs --model", param_hint="--draft")
        target, draft, tokenizer = load_pair(pair, device=place, dtype=_dtype(dtype))
    else:
        if pair is not None or (draft_model is None and not plain):
            raise typer.BadParameter("needs --draft (or --plain), and no --pair", param_hint="--model")
        from spec_ops.integrations.transformers.loading import load_checkpoints

        target, draft, tokenizer = load_checkpoints(model, draft_model, device=place, dtype=_dtype(dtype))
    tokens = tokenizer.encode(prompt if prompt_file is None else _text(prompt_file))
    console.print(f"[dim]{place}, {dtype}, torch {torch.__version__}; {_describe(config)}[/dim]")

    def run(speculative: bool) -> GenerationResult:
        generator = Generator(
            target,
            draft if speculative else None,
            config,
            max_batch_size=1,
            max_seq_len=len(tokens) + max_new_tokens,
            compile=compile,
        )
        if compile or place.type == "cuda":  # kernels load and graphs record outside the timing
            console.print("[dim]warming up ...[/dim]")
            generator.generate([tokens], max_new_tokens=min(max_new_tokens, 24), sampling=sampling)
        console.rule("speculative" if speculative else "plain", align="left")
        return _stream(generator, tokens, tokenizer, max_new_tokens, sampling)

    kinds = ["plain", "speculative"] if compare else ["plain" if plain else "speculative"]
    runs = {kind: run(kind == "speculative") for kind in kinds}
    console.print(_stats_table(runs))
    if compare:
        first, second = runs["plain"], runs["speculative"]
        saved = 1 - second.stats.rounds / max(first.stats.rounds, 1)
        console.print(
            f"accept length {second.stats.accept_length:.2f} tokens a round; target forwards saved {saved:.0%} "
            f"({first.stats.rounds} to {second.stats.rounds})"
        )
        if first.tokens != second.tokens:
            console.print("[red]texts differ: speculation must not change greedy output[/red]")
            raise typer.Exit(1)
        console.print("[green]texts are equal[/green]")


def _describe(config: SpeculationConfig) -> str:
    shape = "chain" if config.topk == 1 else f"tree of width {config.topk}"
    return f"{shape}, {config.num_steps} draft steps, {config.num_tokens} tokens verified a round"


def _stream(
    generator: Generator, tokens: list[int], tokenizer: Any, max_new_tokens: int, sampling: SamplingParams
) -> GenerationResult:
    stream = tokenizer.stream_decoder()
    console.print(tokenizer.decode(tokens), end="", style="dim", markup=False, soft_wrap=True)
    result = generator.generate(
        [tokens],
        max_new_tokens=max_new_tokens,
        stop_tokens=tokenizer.stop_tokens,
        sampling=sampling,
        on_tokens=lambda _, new: console.print(stream.push(new), end="", markup=False, soft_wrap=True),
    )
    console.print(stream.finish(), markup=False)
    return result


def _stats_table(runs: dict[str, GenerationResult]) -> Table:
    table = Table("", "new tokens", "target forwards", "tokens a forward", "tokens/s")
    for name, run in runs.items():
        stats = run.stats
        table.add_row(
            name, str(stats.new_tokens), str(stats.rounds), f"{stats.accept_length:.2f}", f"{stats.tokens_per_second:.1f}"
        )
    return table


@app.command()
def explain(
    factory: Annotated[
        str | None,
        typer.Argument(
            help="FILE.py:FUNCTION that returns what to compile, or (it, *arguments); default: the shipped pair's round."
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Plan for this architecture, such as sm100; default: this machine's.")
    ] = None,
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    device: Device = None,
) -> None:
    """What the graph passes make of a round: kernels chosen and refused, what was removed, what stays and why. Runs nothing."""
    from spec_ops.passes import explain as explain_graph

    # `.item()` becomes a node that a pass can remove, instead of a graph break.
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        if factory is None:
            target, draft, _ = load_pair(device=_device(device))
            made = Generator(target, draft, _config(steps, tree_width, tree_tokens), max_batch_size=8).round(8)
        else:
            made = _load_factory(factory)()
        parts = made if isinstance(made, tuple) else (made,)
        console.print(str(explain_graph(*parts, arch=arch)), markup=False, soft_wrap=True)


@app.command()
def backends(
    arch: Annotated[
        str | None, typer.Option(help="Choose for this architecture, such as sm100, with every package; default: this machine.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, max=128, help="Tokens a page.")] = 64,
    reasons: Annotated[bool, typer.Option(help="Say why the others were not chosen.")] = True,
) -> None:
    """Which kernel every kind of attention call gets, and why not another: Llama-8B's GQA and DeepSeek-V3's MLA, bfloat16."""
    from spec_ops.backends import get_backend, missing_backends
    from spec_ops.backends.registry import device_arch
    from spec_ops.backends.table import choices
    from spec_ops.passes.compile import parse_arch

    try:
        planned = parse_arch(arch)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from error
    here = planned is None
    rows = choices(device_arch(_device(None)) if here else planned, missing_backends() if here else frozenset(), page_size)
    table = Table("step", "queries", "cache", "kernel", *(["not chosen"] if reasons else []), show_lines=reasons)
    for row in rows:
        why = "\n".join(f"{name} {reason}" for name, reason in row.reasons.items())
        table.add_row(
            row.step, row.kind, str(row.kv_dtype).removeprefix("torch."), row.chosen or "none", *([why] if reasons else [])
        )
    console.print(table)
    for name in sorted({row.chosen for row in rows if row.chosen}):
        backend = get_backend(name)
        if backend is not None and (absent := backend.missing()):
            console.print(f"{name} {absent}", markup=False, soft_wrap=True)


def _load_factory(name: str) -> Callable:
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise typer.BadParameter(f"no such file: {file or name!r}; write FILE.py:FUNCTION", param_hint="FACTORY")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the file's own classes look themselves up
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, function, None)):
        raise typer.BadParameter(f"{file} has no function {function!r}", param_hint="FACTORY")
    return found


@bench.command()
def accept(
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation, to compare the speed.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts; from files of their own where there are as many.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    corpus: Annotated[Path | None, typer.Option(help="Folder of *.py files; default this Python's standard library.")] = None,
    pair: PairPath = None,
    device: Device = None,
    dtype: DType = "float32",
    compile: Compile = False,
    json: Annotated[Path | None, typer.Option(help="Also write the figures, with machine, versions and commit.")] = None,
) -> None:
    """Accept length on text the pair was never trained on: files of the standard library that the split holds out."""
    target, draft, tokenizer = load_pair(pair, device=_device(device), dtype=_dtype(dtype))
    config = _config(steps, tree_width, tree_tokens)
    try:
        tokens = held_out_prompts(tokenizer, prompts, prompt_tokens, corpus)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from error
    options: dict[str, Any] = {"max_batch_size": batch_size, "max_seq_len": prompt_tokens + max_new_tokens, "compile": compile}
    generator = Generator(target, None if plain else draft, config, **options)
    sampling = SamplingParams(temperature)
    generator.generate(tokens[:batch_size], max_new_tokens=8, sampling=sampling, progress=compile)  # warms up
    stats = generator.generate(tokens, max_new_tokens=max_new_tokens, sampling=sampling, progress=True).stats
    console.print(
        f"{'plain' if plain else _describe(config)}: accept length [bold]{stats.accept_length:.3f}[/bold] tokens a round over "
        f"{prompts} prompts from held-out files, {stats.new_tokens} new tokens "
        f"({'greedy' if temperature == 0 else f'temperature {temperature}'}), "
        f"{stats.tokens_per_second:.0f} tokens/s at batch size {batch_size}"
    )
    if json is not None:
        shape = {"steps": 0} if plain else {"steps": steps, "topk": tree_width, "num_tokens": config.num_tokens}
        row = {**shape, "temperature": temperature, "prompts": prompts, "new_tokens": stats.new_tokens, "dtype": dtype}
        row |= {"accept_length": round(stats.accept_length, 3), "tokens_per_second": round(stats.tokens_per_second, 1)}
        write_rows(json, [row | {"batch_size": batch_size, "device": str(target.embed.weight.device), "compile": compile}])


@bench.command("ahead")
def bench_ahead(
    arch: Annotated[list[int], typer.Option(help="90 for sm_90; may be repeated.")] = [90, 100, 103, 120],  # noqa: B006
    kernel: Annotated[str, typer.Option(help="Only variants whose name contains this.")] = "",
) -> None:
    """Compile every Triton kernel ahead of time, without a GPU: registers, shared memory and spills on each architecture.

    Exit code 1 if a hot kernel spills or its wgmma are serialized, one needs more shared memory than the architecture
    has, or fewer blocks fit on a multiprocessor than the launch counts on, or more where they must spread evenly."""
    from spec_ops.backends.triton.ahead import ARCHS, SHARED_LIMIT, compile_ahead, resident_blocks, variants
    from spec_ops.bench.kernel_report import for_tables

    if unknown := sorted(set(arch) - set(ARCHS)):
        raise typer.BadParameter(f"must be one of {list(ARCHS)}, got {unknown}", param_hint="--arch")
    table = Table("kernel", title="registers / shared bytes / spilled bytes / accesses to them in loops")
    for a in arch:
        table.add_column(f"sm_{a}", no_wrap=True)
    failed = False
    chosen = [v for v in variants() if kernel in v.name]
    for variant in track(chosen, "compiling", console=console, transient=True):
        cells = []
        for a in arch:
            if a not in variant.archs:
                cells.append("")
                continue
            used = compile_ahead(variant, a)
            bad = (variant.hot and (used.spill_bytes > 0 or used.serialized)) or used.shared_bytes > SHARED_LIMIT[a]
            fit = resident_blocks(used, variant.num_warps, a)
            bad |= fit < variant.programs or (variant.early and fit > variant.programs)
            failed |= bad
            figures = " / ".join(map(str, used[:4])) + (", wgmma serialized" if used.serialized else "")
            cells.append(("[red]" if bad else "") + figures)
        table.add_row(variant.name + ("" if variant.hot else " (not hot)"), *cells)
    for_tables(console).print(table)
    if failed:
        raise typer.Exit(1)


@bench.command("kernels")
def bench_kernels(
    kind: Annotated[str | None, typer.Option(help="gqa or mla; default both.")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="32/8, 32/8:128 (GQA) or 128 (MLA 512+64); may be repeated.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="8x8192, or 32x512-65536 for log-uniform lengths; may be repeated.")
    ] = None,
    q_len: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help="causal or tree; may be repeated.")] = None,
    window: Annotated[int, typer.Option(min=-1, help="Keys before a query's own that it sees; -1 for all.")] = -1,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; default all that run here but reference; torch-flex compiles anew per case."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the cache; float8_e4m3fn takes bfloat16 queries.")] = "bfloat16",
    page_size: Annotated[int, typer.Option(min=1, max=128)] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="Two batches, q_len 1 and 16, less time for each.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile first; default on CUDA one per processor, 16 at most.")
    ] = None,
    time_budget: Annotated[float | None, typer.Option(min=0, help="Seconds; what is there by then is written.")] = None,
    copy_rate: Annotated[float | None, typer.Option(min=1, help="Bytes a second, read and written; default measured.")] = None,
    matmul_rate: Annotated[float | None, typer.Option(min=1, help="Bfloat16 operations a second; default measured.")] = None,
    device: Annotated[str, typer.Option(help="cpu runs tiny cases by the wall clock.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Write the rows as JSON, with machine, versions and commit.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a roofline plot as PNG; needs matplotlib.")] = None,
) -> None:
    """Correctness and microseconds of every attention kernel, next to each other and to the machine's floor."""
    from spec_ops.bench import kernel_cases, kernel_report, kernels

    place, kv_dtype = _device(device), _dtype(dtype, _DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn})
    try:
        cases = kernel_cases.select(kind, heads, case, q_len, mask, quick, window)
        backends = kernels.check_backends(backend, place)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    fine = kernel_report.run(
        console,
        cases,
        backends,
        device=place,
        dtype=torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        # Each process takes half a gigabyte of the device.
        jobs=(min(os.cpu_count() or 1, 16) if place.type == "cuda" else 0) if jobs is None else jobs,
        copy_rate=copy_rate,
        matmul_rate=matmul_rate,
        min_ms=5.0 if quick else 20.0,
        time_budget=time_budget,
        out=out,
        plot=plot,
    )
    if not fine:
        console.print("[red]some results are wrong or some kernels failed[/red]")
        raise typer.Exit(1)


def main() -> None:
    app()
