"""`python -m benchmarks accept`: accept length, and how often each draft position is accepted.

Of the shipped pair on files of the standard library that its training never saw; or of local checkpoints of transformers on the
same files or on a file of prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.rows import write_rows
from spec_ops.cli.options import (
    Blocks,
    Compile,
    Device,
    DraftPath,
    DType,
    KeepK,
    KeepP,
    MinP,
    ModelPath,
    ModelSettings,
    PairPath,
    Quantize,
    Seed,
    Steps,
    Temperature,
    TopK,
    TreeTokens,
    check_models,
    console,
    describe,
    describe_sampling,
    parse_config,
    parse_device,
    parse_dtype,
    parse_sampling,
    parse_setting,
    quantized,
    refusing,
    writable_file,
)
from spec_ops.decoding import GenerationStats, Generator, SamplingParams
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts, held_out_texts
from spec_ops.models.drafts import Draft
from spec_ops.models.pretrained import load_pair
from spec_ops.models.target import Target

PROMPT_TOKENS = 256
BYTES_PER_TOKEN = 4  # of Python code in the vocabularies of published models: 3 to 4


@dataclass(frozen=True)
class Source:
    """Where prompts come from: lines of a file, through the model's chat template if `chat`; or held-out files in `corpus`."""

    count: int
    tokens: int
    lines: Path | None
    chat: bool
    corpus: Path | None

    @property
    def about(self) -> str:
        return "from held-out files" if self.lines is None else f"of {self.lines.name}"

    def of_bytes(self) -> list[list[int]]:
        """For the pairs of this package, a byte a token."""
        if self.lines is None:
            return held_out_prompts(ByteTokenizer(), self.count, self.tokens, self.corpus)
        return [ByteTokenizer().encode(line) for line in self._read()]

    def of_model(self, tokenizer: Any) -> list[list[int]]:
        """For a tokenizer of transformers. Held-out prompts have `tokens` ids at most: as many as their bytes give."""
        if self.lines is None:
            texts = held_out_texts(self.count, BYTES_PER_TOKEN * self.tokens, self.corpus)
            return [tokenizer(text.decode(errors="ignore")).input_ids[: self.tokens] for text in texts]
        if not self.chat:
            return [tokenizer(line).input_ids for line in self._read()]
        turns = [[{"role": "user", "content": line}] for line in self._read()]
        # The template writes the special tokens itself.
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
        return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    def _read(self) -> list[str]:
        assert self.lines is not None
        lines = [line for line in self.lines.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{self.lines} must hold at least one line of text")
        return lines[: self.count]


@dataclass(frozen=True)
class Work:
    """What is decoded, and by which models."""

    target: Target
    draft: Draft | None
    prompts: list[list[int]]
    sampling: list[SamplingParams]  # of each prompt
    stop_tokens: list[int]


def bench_accept(
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    block_verification: Blocks = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation, to compare the speed.")] = False,
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts; of held-out text from files of their own where there are as many.")
    ] = 32,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Of a prompt of held-out text; default {PROMPT_TOKENS}.")
    ] = None,
    prompt_lines: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text file with a prompt on each line, instead.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each line into the model's chat template, as a user's turn.")
    ] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of *.py files; default this Python's standard library."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    temperature: Temperature = None,
    top_k: KeepK = None,
    top_p: KeepP = None,
    min_p: MinP = None,
    seed: Seed = None,
    pair: PairPath = None,
    model: ModelPath = None,
    draft_model: DraftPath = None,
    settings: ModelSettings = None,
    device: Device = None,
    dtype: DType = "float32",
    quantize: Quantize = None,
    compile: Compile = False,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Also write the figures, with machine, versions and commit.")
    ] = None,
) -> None:
    """Accept length and acceptance per draft position: of the shipped pair on text it was never trained on, files of the
    standard library that the split holds out; or of any local model and its head or smaller draft.

    Greedy without sampling options: a model's own temperature, top-k, top-p and min-p do not count. Its end tokens end a text.
    """
    place, weights = parse_device(device), parse_dtype(dtype)
    config = parse_config(steps, tree_width, tree_tokens, block_verification)
    sampling = parse_sampling(temperature, top_k, top_p, min_p, seed)
    check_models(pair, model, draft_model, settings, plain=plain)
    if chat and (model is None or prompt_lines is None):
        raise typer.BadParameter("needs --model and --prompt-lines", param_hint="--chat")
    if prompt_lines is not None and (corpus is not None or prompt_tokens is not None):
        raise typer.BadParameter("takes lines whole: leave out --corpus and --prompt-tokens", param_hint="--prompt-lines")
    source = Source(prompts, prompt_tokens or PROMPT_TOKENS, prompt_lines, chat, corpus)
    if model is None:
        work = _of_pair(source, pair, sampling, place, weights)
    else:
        drafting = None if draft_model is None else Path(draft_model)
        work = _of_checkpoints(source, Path(model), drafting, sampling, settings or [], max_new_tokens, place, weights)
    quantized(quantize, work.target, work.draft)
    longest = max(map(len, work.prompts)) + max_new_tokens
    options: dict[str, Any] = {"max_batch_size": batch_size, "max_seq_len": longest, "compile": compile}
    with refusing("--model / --draft / --tree-width / --max-new-tokens"):
        generator = Generator(work.target, None if plain else work.draft, config, **options)
    few = {"sampling": work.sampling[:batch_size], "max_new_tokens": min(8, max_new_tokens), "progress": compile}
    generator.generate(work.prompts[:batch_size], stop_tokens=work.stop_tokens, **few)  # type: ignore[arg-type]
    stats = generator.generate(
        work.prompts, max_new_tokens=max_new_tokens, sampling=work.sampling, stop_tokens=work.stop_tokens, progress=True
    ).stats
    sampling = work.sampling[0]
    console.print(
        f"{'plain' if plain else describe(config)}: accept length [bold]{stats.accept_length:.3f}[/bold] tokens a round over "
        f"{len(work.prompts)} prompts {source.about}, {stats.new_tokens} new tokens ({describe_sampling(sampling)}), "
        f"{stats.tokens_per_second:.0f} tokens/s at batch size {batch_size}"
    )
    if not plain:
        console.print(histogram_table(stats))
    if json is not None:
        shape: dict[str, Any] = {"steps": 0} if plain else {"steps": steps, "topk": tree_width, "num_tokens": config.num_tokens}
        if model is not None:
            shape |= {"model": Path(model).name, "draft": draft_model and Path(draft_model).name}
        if not plain and sampling.temperature > 0:
            shape["block_verification"] = config.verifies_blocks
        row = shape | figures(stats, sampling) | {"prompts": len(work.prompts), "dtype": dtype}
        row |= {} if quantize is None else {"weights": quantize}
        write_rows(json, [row | {"batch_size": batch_size, "device": str(place), "compile": compile}])


def _of_pair(source: Source, pair: Path | None, sampling: SamplingParams, device: torch.device, dtype: torch.dtype) -> Work:
    with refusing("--prompts / --prompt-tokens / --prompt-lines / --corpus"):
        prompts = source.of_bytes()
    with refusing("--pair"):
        target, draft, _ = load_pair(pair, device=device, dtype=dtype)
    return Work(target, draft, prompts, [sampling] * len(prompts), [])


def _of_checkpoints(
    source: Source,
    model: Path,
    draft: Path | None,
    sampling: SamplingParams,
    settings: list[str],
    max_new_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Work:
    with refusing("--model / --draft"):
        from spec_ops.integrations.transformers import loading

        tokenizer = loading.load_tokenizer(model).tokenizer
    with refusing("--prompts / --prompt-tokens / --prompt-lines / --chat / --corpus"):
        prompts = source.of_model(tokenizer)
    # None is off. Without these the model's own count, and transformers' top-k of 50.
    filters = {"top_k": sampling.top_k or None, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
    overrides = {"do_sample": sampling.temperature > 0, "temperature": sampling.temperature or None, **filters}
    with refusing("--model / --set"):
        assert sampling.seed is not None
        resolved = loading.load_settings(model, overrides | dict(map(parse_setting, settings)), sampling.seed)
        each = [loading.plan_sampling(model, resolved, len(prompt), max_new_tokens) for prompt in prompts]
    with refusing("--model / --draft"):
        target, drafting = loading.load_checkpoints(model, draft, device=device, dtype=dtype)
    return Work(target, drafting, prompts, each, resolved.stop_tokens)


def figures(stats: GenerationStats, sampling: SamplingParams) -> dict[str, Any]:
    """What a row says of the rounds, and of the settings that are not off."""
    sampled = sampling.temperature > 0
    unused = () if sampled else ("seed", "top_k", "top_p", "min_p")
    settings = {field.name: getattr(sampling, field.name) for field in fields(sampling) if field.name not in unused}
    on = {name: value for name, value in settings.items() if value != getattr(SamplingParams, name, None)}
    return (
        {"temperature": sampling.temperature}
        | on
        | {
            "new_tokens": stats.new_tokens,
            "accept_length": round(stats.accept_length, 3),
            "accept_lengths": [round(length, 3) for length in stats.accept_lengths],
            "histogram": stats.histogram,
            "acceptance_rates": [None if math.isnan(rate) else round(rate, 4) for rate in stats.acceptance_rates],
            "tokens_per_second": round(stats.tokens_per_second, 1),
        }
    )


def histogram_table(stats: GenerationStats) -> Table:
    """A line per number of tokens that a round gained, with the draft position whose acceptance makes it as many."""
    table = Table("tokens", "rounds", "share", "draft: accepted")
    total, rates = max(stats.request_rounds, 1), stats.acceptance_rates
    for index, count in enumerate(stats.histogram):
        rate = rates[index - 1] if index else math.nan
        shown = f"{index}: {'-' if math.isnan(rate) else f'{rate:.1%}'}" if index else ""
        table.add_row(str(index + 1), str(count), f"{count / total:.1%}", shown)
    return table
