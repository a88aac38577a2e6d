"""`python -m benchmarks accept`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.rows import write_rows
from spec_ops.cli.options import (
    Compile,
    Device,
    DType,
    PairPath,
    Seed,
    Steps,
    TopK,
    TreeTokens,
    console,
    describe,
    describe_sampling,
    parse_config,
    parse_device,
    parse_dtype,
    parse_sampling,
    refusing,
    writable_file,
)
from spec_ops.decoding import Generator
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.pretrained import load_pair


def bench_accept(
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation, to compare the speed.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts; from files of their own where there are as many.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    corpus: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of *.py files; default this Python's standard library."),
    ] = None,
    seed: Seed = None,
    pair: PairPath = None,
    device: Device = None,
    dtype: DType = "float32",
    compile: Compile = False,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Also write the figures, with machine, versions and commit.")
    ] = None,
) -> None:
    """Accept length on text the pair was never trained on: files of the standard library that the split holds out."""
    place, weights, config = parse_device(device), parse_dtype(dtype), parse_config(steps, tree_width, tree_tokens)
    sampling = parse_sampling(temperature, 0, 1.0, seed)
    with refusing("--prompts / --prompt-tokens / --corpus"):
        tokens = held_out_prompts(ByteTokenizer(), prompts, prompt_tokens, corpus)
    with refusing("--pair"):
        target, draft, _ = load_pair(pair, device=place, dtype=weights)
    options: dict[str, Any] = {"max_batch_size": batch_size, "max_seq_len": prompt_tokens + max_new_tokens, "compile": compile}
    with refusing("--tree-width"):
        generator = Generator(target, None if plain else draft, config, **options)
    warm_up = min(8, max_new_tokens)
    generator.generate(tokens[:batch_size], max_new_tokens=warm_up, sampling=sampling, progress=compile)
    stats = generator.generate(tokens, max_new_tokens=max_new_tokens, sampling=sampling, progress=True).stats
    console.print(
        f"{'plain' if plain else describe(config)}: accept length [bold]{stats.accept_length:.3f}[/bold] tokens a round over "
        f"{prompts} prompts from held-out files, {stats.new_tokens} new tokens ({describe_sampling(sampling)}), "
        f"{stats.tokens_per_second:.0f} tokens/s at batch size {batch_size}"
    )
    if json is not None:
        shape = {"steps": 0} if plain else {"steps": steps, "topk": tree_width, "num_tokens": config.num_tokens}
        row = {**shape, "temperature": temperature, "prompts": prompts, "new_tokens": stats.new_tokens, "dtype": dtype}
        row |= {} if temperature == 0 else {"seed": sampling.seed}
        row |= {"accept_length": round(stats.accept_length, 3), "tokens_per_second": round(stats.tokens_per_second, 1)}
        write_rows(json, [row | {"batch_size": batch_size, "device": str(target.embed.weight.device), "compile": compile}])
