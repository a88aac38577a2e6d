"""Options that several commands share, and what their values become."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from spec_ops._extras import install_hint
from spec_ops.decoding import GenerationStats, SamplingParams, SpeculationConfig
from spec_ops.decoding.config import AUTO_LENGTHS
from spec_ops.models.checkpoint import CheckpointError
from spec_ops.models.drafts import Draft
from spec_ops.models.quantized import quantize
from spec_ops.models.target import Target

console = Console(highlight=False, emoji=False)  # `x[:end:]` is Python, not an emoji


def writable_file(path: Path | None) -> Path | None:
    """Callback of an option: refuses, before anything is measured, a file that could not be written afterwards."""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"must be a file, got the folder {path}")
        _check_place(path)
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Callback of an option: refuses, before anything is measured, a folder that no file could be written to afterwards."""
    if path is not None:
        if path.exists() and not path.is_dir():
            raise typer.BadParameter(f"must be a folder, got the file {path}")
        _check_place(path)
    return path


def _check_place(path: Path) -> None:
    """Raise unless `path` can be written. Folders that are missing are made when something is written."""
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not (nearest.is_dir() or nearest == path):
        raise typer.BadParameter(f"{path} would be in {nearest}, which is a file")
    if not os.access(nearest, os.W_OK):
        raise typer.BadParameter(f"{nearest} cannot be written to")


def plot_file(path: Path | None) -> Path | None:
    """Callback of an option: a file as for `writable_file`, and matplotlib to draw it with."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(f"needs matplotlib, which is not installed: {install_hint('bench')}")
    return writable_file(path)


def local_folder(name: str | None) -> str | None:
    """Callback of an option: a folder on this machine, or how to get one of the Hub's."""
    if name is None or Path(name).is_dir():
        return name
    problem = f"must be a folder, got {name!r}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        problem += f"; a model of the Hub has to be fetched first: hf download {name} --local-dir FOLDER"
    raise typer.BadParameter(problem)


PairPath = Annotated[
    Path | None,
    typer.Option("--pair", exists=True, file_okay=False, help="Folder of a saved pair; default: the shipped one."),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Draft steps S.")]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="auto|0,1,3",
        help="Chain lengths to choose from in each round; auto: 0, 1, 3, 5 and 7. In place of --steps.",
    ),
]
DraftCost = Annotated[
    float | None,
    typer.Option(
        "--draft-cost", help="With --lengths: the share of a round that each draft step adds to it; default: measured."
    ),
]
TopK = Annotated[int, typer.Option("--tree-width", min=1, help="Branches K per draft step; 1 drafts a chain.")]
TreeTokens = Annotated[int | None, typer.Option("--tree-tokens", help="Tokens verified per round in a tree, root included.")]
Blocks = Annotated[
    bool | None,
    typer.Option("--block-verification/--token-verification", help="How a sampled chain is verified; default: as a block."),
]
Temperature = Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 decodes greedily, above 0 samples.")]
KeepK = Annotated[int | None, typer.Option("--top-k", min=0, help="Sample among this many tokens; 0: among all.")]
KeepP = Annotated[
    float | None,
    typer.Option("--top-p", min=0.0, max=1.0, help="Sample among the likeliest tokens whose probabilities add up to this."),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", min=0.0, max=1.0, help="Sample among tokens at least this probable, relative to the likeliest one."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1: tokens of the prompt and the output become less likely."),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Subtracted from the logits of the output's tokens."),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="Subtracted from them once per occurrence."),
]
ModelPath = Annotated[
    str | None,
    typer.Option(
        "--model",
        callback=local_folder,
        help="Folder of a transformers causal language model and its tokenizer, instead of a pair.",
    ),
]
DraftPath = Annotated[
    str | None,
    typer.Option(
        "--draft",
        callback=local_folder,
        help="With --model: folder of a smaller model or an EAGLE-3 head; the same folder again for its MTP layer.",
    ),
]
ModelSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="With --model: a setting of its generation_config to change; may be repeated."
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: cuda if there is one, else cpu.")]
DType = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="Weights of 8 bits: float8, int8 (a scale a row), float8_block (128 x 128), float8_tensor (one); also rows: "
        "float8_dynamic, float8_block_dynamic; weights of 4: int4, nvfp4, mxfp4.",
    ),
]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile rounds (CUDA graphs on a GPU).")]
Invariant = Annotated[
    bool, typer.Option("--invariant", help="Batch-invariant arithmetic: the same text with any draft, in bfloat16 too.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Seed of sampling; default: drawn, and printed so that the run can be repeated.")
]
# Of a `SpeculationConfig`, for messages.
_OPTIONS = {
    "num_steps": "--steps", "topk": "--tree-width", "num_draft_tokens": "--tree-tokens",
    "block_verification": "--block-verification", "lengths": "--lengths", "draft_cost": "--draft-cost",
}  # fmt: skip

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str, known: dict[str, torch.dtype] = DTYPES) -> torch.dtype:
    if name not in known:
        raise typer.BadParameter(f"must be one of {sorted(known)}, got {name!r}", param_hint="--dtype")
    return known[name]


def parse_arch_option(name: str | None) -> int | None:
    """The value of `--arch`; imported late, since the compiler takes a second to import."""
    from spec_ops.passes.plan import parse_arch

    try:
        return parse_arch(name)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("`arch` "), param_hint="--arch") from error


def parse_device(name: str | None) -> torch.device:
    """A device that rounds run on. The CPU has no index: tensors on `cpu:0` are not on `cpu`."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"must be cpu, cuda or cuda:N, got {name!r}", param_hint="--device") from error
    if device.type == "cpu" and device.index in (None, 0):
        return torch.device("cpu")
    if device.type != "cuda":
        raise typer.BadParameter(f"must be cpu, cuda or cuda:N, got {name!r}", param_hint="--device")
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available", param_hint="--device")
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise typer.BadParameter(f"must be one of {count} CUDA devices, got {name!r}", param_hint="--device")
    return device


def parse_config(
    steps: int,
    topk: int,
    tokens: int | None,
    block: bool | None = None,
    lengths: Sequence[int] | None = None,
    draft_cost: float | None = None,
) -> SpeculationConfig:
    if topk == 1 and tokens is not None:
        raise typer.BadParameter("is for trees: a --tree-width above 1", param_hint="--tree-tokens")
    try:
        return SpeculationConfig(steps, topk, tokens, block_verification=block, lengths=lengths, draft_cost=draft_cost)
    except ValueError as error:
        text = str(error).removeprefix("SpeculationConfig: ")
        for name, option in _OPTIONS.items():
            text = text.replace(f"`{name}`", option)
        text = re.sub(r"`lengths(\[\d+\])`", r"--lengths\1", text)
        named = [option for option in _OPTIONS.values() if option in text.split(" must be")[0]]
        raise typer.BadParameter(text, param_hint=" / ".join(named)) from error


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """`auto`, or numbers between commas; which numbers will do, `SpeculationConfig` knows."""
    if text is None or text == "auto":
        return AUTO_LENGTHS if text else None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        wanted = "must be auto, or chain lengths between commas, such as 0,1,3"
        raise typer.BadParameter(f"{wanted}, got {text!r}", param_hint="--lengths") from error


def parse_sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None, seed: int | None
) -> SamplingParams:
    """None is off. Without a seed one is drawn here: torch's own generator starts with the same one in every process."""
    drawn = secrets.randbits(31) if seed is None else seed
    try:
        return SamplingParams(temperature or 0.0, top_k or 0, 1.0 if top_p is None else top_p, drawn, min_p or 0.0)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--temperature / --top-k / --top-p / --min-p / --seed") from error


def parse_penalties(repetition: float | None, presence: float | None, frequency: float | None) -> dict[str, Any]:
    """Those that were given, as fields of `SamplingParams`."""
    values = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**given)
    except ValueError as error:
        hint = " / ".join("--" + name.replace("_", "-") for name in values)
        raise typer.BadParameter(str(error), param_hint=hint) from error
    return given


def check_models(pair: Path | None, model: str | None, draft: str | None, settings: list[str] | None, *, plain: bool) -> None:
    """Refuse options that do not go together: a shipped pair, or a model with its draft and settings."""
    if model is None and (draft is not None or settings):
        raise typer.BadParameter("needs --model", param_hint="--set" if settings else "--draft")
    if model is not None and (pair is not None or (draft is None and not plain)):
        raise typer.BadParameter("needs --draft (or --plain), and no --pair", param_hint="--model")


def parse_setting(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value in JSON if it is that, else a string."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"must be NAME=VALUE, got {text!r}", param_hint="--set")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@contextmanager
def refusing(option: str) -> Iterator[None]:
    """What checkpoints, models and settings are refused for becomes a mistake in `option`."""
    try:
        yield
    except (CheckpointError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise typer.BadParameter(" ".join(str(error).split()), param_hint=option) from error


def quantized(kind: str | None, target: Target, draft: Draft | None) -> None:
    """Do what `--quantize` asks for."""
    if kind is not None:
        with refusing("--quantize"):
            for model in (target, draft) if draft is not None else (target,):
                quantize(model, kind)


def describe(config: SpeculationConfig) -> str:
    if config.lengths is not None:
        return (
            f"chains of {', '.join(map(str, config.lengths[:-1]))} or {config.lengths[-1]} draft steps, chosen for each round"
        )
    shape = "chain" if config.topk == 1 else f"tree of width {config.topk}"
    return f"{shape}, {config.num_steps} draft steps, {config.num_tokens} tokens verified a round"


def describe_sampling(sampling: SamplingParams) -> str:
    penalties = [
        f"{name.replace('_', ' ')} {value:g}"
        for name, off in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))
        if (value := getattr(sampling, name)) != off
    ]
    if sampling.temperature == 0:
        return ", ".join(["greedy", *penalties])
    filters = [f"top-k {sampling.top_k}"] * (sampling.top_k > 0) + [f"top-p {sampling.top_p:g}"] * (sampling.top_p < 1)
    filters += [f"min-p {sampling.min_p:g}"] * (sampling.min_p > 0)
    return ", ".join([f"temperature {sampling.temperature:g}", *filters, *penalties, f"seed {sampling.seed}"])


def describe_acceptance(stats: GenerationStats) -> str:
    """Accept length, how often each draft position was accepted, and the chain lengths that were chosen."""
    shown = f"accept length {stats.accept_length:.2f} tokens a round"
    rates = ", ".join("-" if math.isnan(rate) else f"{rate:.0%}" for rate in stats.acceptance_rates)
    shown += f"; drafts accepted by position: {rates}" if rates else ""
    chosen = ", ".join(f"{length} x{rounds}" for length, rounds in sorted(stats.lengths.items()))
    return f"{shown}; draft steps of rounds: {chosen}" if chosen else shown
