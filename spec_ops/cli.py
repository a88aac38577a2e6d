"""Command line: `python -m spec_ops generate` and `python -m spec_ops bench accept`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from spec_ops.decoding import GenerationResult, Generator, SamplingParams, SpeculationConfig
from spec_ops.models.corpus import ByteTokenizer, split_of, stdlib_files
from spec_ops.models.pretrained import load_pair
from spec_ops.results import write_rows

app = typer.Typer(
    help="Speculative decoding as plain PyTorch.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(bench, name="bench")
console = Console(highlight=False)

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


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise typer.BadParameter(f"must be one of {sorted(_DTYPES)}, got {name!r}", param_hint="--dtype")
    return _DTYPES[name]


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available", param_hint="--device")
    return device


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
    device: Device = None,
    dtype: DType = "float32",
    compile: Compile = False,
) -> None:
    """Continue a prompt with the shipped pair of models (byte-level, trained on Python sources), streaming the text."""
    if compare and (plain or temperature > 0):
        raise typer.BadParameter("compares greedy texts: leave out --plain and --temperature", param_hint="--compare")
    place = _device(device)
    target, draft, tokenizer = load_pair(pair, device=place, dtype=_dtype(dtype))
    config = _config(steps, tree_width, tree_tokens)
    text = prompt_file.read_text() if prompt_file is not None else prompt
    tokens = tokenizer.encode(text)
    sampling = SamplingParams(temperature, top_k, top_p, seed)
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
    generator: Generator, tokens: list[int], tokenizer: ByteTokenizer, max_new_tokens: int, sampling: SamplingParams
) -> GenerationResult:
    stream = tokenizer.stream_decoder()
    console.print(tokenizer.decode(tokens), end="", style="dim", markup=False)
    result = generator.generate(
        [tokens],
        max_new_tokens=max_new_tokens,
        stop_tokens=[tokenizer.EOS],
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


@bench.command()
def accept(
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation, to compare the speed.")] = False,
    files: Annotated[int, typer.Option(min=1, help="Held-out files to take a prompt from.")] = 32,
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
    prompts = _held_out_prompts(tokenizer, files, prompt_tokens, corpus)
    options: dict[str, Any] = {"max_batch_size": batch_size, "max_seq_len": prompt_tokens + max_new_tokens, "compile": compile}
    generator = Generator(target, None if plain else draft, config, **options)
    sampling = SamplingParams(temperature)
    generator.generate(prompts[:batch_size], max_new_tokens=8, sampling=sampling, progress=compile)  # warms up
    stats = generator.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling, progress=True).stats
    console.print(
        f"{'plain' if plain else _describe(config)}: accept length [bold]{stats.accept_length:.3f}[/bold] tokens a round over "
        f"{len(prompts)} held-out files, {stats.new_tokens} new tokens "
        f"({'greedy' if temperature == 0 else f'temperature {temperature}'}), "
        f"{stats.tokens_per_second:.0f} tokens/s at batch size {batch_size}"
    )
    if json is not None:
        shape = {"steps": 0} if plain else {"steps": steps, "topk": tree_width, "num_tokens": config.num_tokens}
        row = {**shape, "temperature": temperature, "files": len(prompts), "new_tokens": stats.new_tokens, "dtype": dtype}
        row |= {"accept_length": round(stats.accept_length, 3), "tokens_per_second": round(stats.tokens_per_second, 1)}
        write_rows(json, [row | {"batch_size": batch_size, "device": str(target.embed.weight.device), "compile": compile}])


def _held_out_prompts(tokenizer: ByteTokenizer, count: int, length: int, corpus: Path | None) -> list[list[int]]:
    """`count` prompts of `length` tokens from the middle of held-out files, spread evenly over the list of files."""
    texts = [path.read_bytes() for path in stdlib_files(corpus) if split_of(path) == "heldout"]
    texts = [text for text in texts if len(text) >= 4 * length]
    if len(texts) < count:
        raise typer.BadParameter(f"only {len(texts)} held-out files are long enough", param_hint="--files")
    chosen = [texts[i * len(texts) // count] for i in range(count)]
    starts = [
        text.index(b"\n", len(text) // 2 - length) + 1 if b"\n" in text[len(text) // 2 - length :] else 0 for text in chosen
    ]
    return [[tokenizer.BOS, *text[start : start + length - 1]] for text, start in zip(chosen, starts, strict=True)]


def main() -> None:
    app()
