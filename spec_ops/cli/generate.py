"""`python -m spec_ops generate`."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from spec_ops.cli.options import (
    Compile,
    Device,
    DraftCost,
    DraftPath,
    DType,
    FrequencyPenalty,
    Invariant,
    KeepK,
    KeepP,
    Lengths,
    MinP,
    ModelPath,
    ModelSettings,
    PairPath,
    PresencePenalty,
    Quantize,
    RepetitionPenalty,
    Seed,
    Steps,
    Temperature,
    TopK,
    TreeTokens,
    check_models,
    console,
    describe,
    describe_acceptance,
    describe_sampling,
    parse_config,
    parse_device,
    parse_dtype,
    parse_lengths,
    parse_penalties,
    parse_sampling,
    parse_setting,
    quantized,
    refusing,
)
from spec_ops.cli.ranks import Ranks, check_shares, join, start
from spec_ops.cli.speed import show_speed, show_texts, warm_up
from spec_ops.cli.text import Text, from_checkpoints, from_pair, read_prompt
from spec_ops.decoding import GenerationResult, Generator
from spec_ops.parallel import TensorParallel

DEFAULT_PROMPT = '''class Matrix:
    """A dense matrix stored row by row."""

    def __init__(self, rows, columns):
'''


def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.", show_default="the start of a Python class")] = DEFAULT_PROMPT,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, readable=True, help="Read the prompt from a file instead.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: the model's setting, else 384.")] = None,
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    lengths: Lengths = None,
    draft_cost: DraftCost = None,
    temperature: Temperature = None,
    top_k: KeepK = None,
    top_p: KeepP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Decode both ways; exit code 1 if the texts differ. On a GPU also time compiled bfloat16 rounds, and compare "
            "texts in bfloat16 with batch-invariant arithmetic.",
        ),
    ] = False,
    pair: PairPath = None,
    model: ModelPath = None,
    draft_model: DraftPath = None,
    settings: ModelSettings = None,
    device: Device = None,
    dtype: DType = "float32",
    quantize: Quantize = None,
    compile: Compile = False,
    invariant: Invariant = False,
    tp: Ranks = 1,
) -> None:
    """Continue a prompt with the shipped pair of models (byte-level, trained on Python sources) or with local checkpoints of
    transformers, streaming the text. A sampling option that is not given is the model's setting, else off."""
    if compare and (plain or (temperature or 0.0) > 0 or (dtype != "float32" and not invariant)):
        # In a short format the two ways round differently, and a near tie may rightly fall either way.
        raise typer.BadParameter(
            "compares greedy texts in float32, or with --invariant: leave out --plain, --temperature and --dtype",
            param_hint="--compare",
        )
    place, weights = parse_device(device), parse_dtype(dtype)
    config = parse_config(steps, tree_width, tree_tokens, None, parse_lengths(lengths), draft_cost)
    sampling = parse_sampling(temperature, top_k, top_p, min_p, seed)
    penalties = parse_penalties(repetition_penalty, presence_penalty, frequency_penalty)
    check_models(pair, model, draft_model, settings, plain=plain)
    words = read_prompt(prompt, prompt_file)
    ranks: TensorParallel | None = None
    if tp > 1:
        others = {"--model": model is not None, "--quantize": quantize is not None}
        check_shares(tp, place, pair, others)
        start(tp)
        ranks, place = join(place)
        sampling = ranks.first(sampling)  # whose seed was drawn

    def read(weights: torch.dtype) -> Text:
        text = unquantized(weights)
        quantized(quantize, text.target, text.draft)
        return dataclasses.replace(text, sampling=dataclasses.replace(text.sampling, **penalties))

    def unquantized(weights: torch.dtype) -> Text:
        if model is None:
            return from_pair(words, pair, sampling, max_new_tokens, device=place, dtype=weights, ranks=ranks)
        given = {"max_new_tokens": max_new_tokens, "temperature": temperature or None}
        given |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        overrides = {name: value for name, value in given.items() if value is not None}
        overrides |= {} if temperature is None else {"do_sample": temperature > 0}
        overrides |= dict(map(parse_setting, settings or ()))
        drafting = None if draft_model is None else Path(draft_model)
        assert sampling.seed is not None
        return from_checkpoints(words, Path(model), drafting, overrides, sampling.seed, device=place, dtype=weights)

    if model is None and pair is None and place.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # The pair's products are small: threads wait for one another, and on a busy machine for processors.
        torch.set_num_threads(1)
    text = read(weights)
    if compare and text.sampling.temperature > 0:
        raise typer.BadParameter(
            "compares greedy texts, the model's settings sample: add --temperature 0", param_hint="--compare"
        )

    kinds = ["plain", "speculative"] if compare else ["plain" if plain else "speculative"]
    options: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": len(text.tokens) + text.max_new_tokens, "compile": compile}
    options["invariant"] = invariant
    # On a GPU float32 has no kernel, and "auto" would warn of it: equal texts are what it is for here.
    options |= {"backend": "reference"} if compare and place.type == "cuda" and not invariant else {}
    # Both before the first runs: what is refused is found early.
    with refusing("--model / --draft / --tree-width / --max-new-tokens"):
        generators = {k: Generator(text.target, None if k == "plain" else text.draft, config, **options) for k in kinds}
    how = f"{describe(config)}; {describe_sampling(text.sampling)}"
    stored = dtype if quantize is None else f"{dtype}, weights {quantize}"
    shared = "" if ranks is None else f"{ranks.size} ranks, "
    console.print(f"[dim]{shared}{place}, {stored}, torch {torch.__version__}; {how}[/dim]")

    def decode(kind: str, tokens: int) -> None:
        generators[kind].generate([text.tokens], max_new_tokens=tokens, sampling=text.sampling)

    def run(kind: str) -> GenerationResult:
        if compile or place.type == "cuda":  # kernels load and graphs record outside the timing
            console.print("[dim]warming up ...[/dim]")
            warm_up(generators[kind], functools.partial(decode, kind), text.max_new_tokens)
        console.rule(kind, align="left")
        return _stream(generators[kind], text)

    runs = {kind: run(kind) for kind in kinds}
    console.print(_stats_table(runs))
    if "speculative" in runs:
        console.print(describe_acceptance(runs["speculative"].stats))
    if compare:
        first, second = runs["plain"], runs["speculative"]
        saved = 1 - second.stats.rounds / max(first.stats.rounds, 1)
        console.print(f"target forwards saved {saved:.0%} ({first.stats.rounds} to {second.stats.rounds})")
        if first.tokens != second.tokens:
            console.print("[red]texts differ: speculation must not change greedy output[/red]")
            raise typer.Exit(1)
        console.print("[green]texts are equal[/green]")
        if ranks is None and shows_speed(place, compile):
            fast = read(torch.bfloat16)
            if not show_texts(fast, config, show_speed(fast, config)):
                raise typer.Exit(1)


def shows_speed(place: torch.device, compile: bool) -> bool:
    """Whether a comparison goes on to compiled rounds: on a GPU, unless the comparison itself was of compiled rounds."""
    return place.type == "cuda" and not compile


def _stream(generator: Generator, text: Text) -> GenerationResult:
    stream = text.tokenizer.stream_decoder()
    console.print(text.tokenizer.decode(text.tokens), end="", style="dim", markup=False, soft_wrap=True)
    result = generator.generate(
        [text.tokens],
        max_new_tokens=text.max_new_tokens,
        stop_tokens=text.stop_tokens,
        stop_when=text.stop_when(),
        sampling=text.sampling,
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
