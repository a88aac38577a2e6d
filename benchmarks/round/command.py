"""`python -m benchmarks round`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.round.ranks import COLLECTIVES
from benchmarks.round.shapes import SHAPES
from benchmarks.round.stored import KINDS, OF_EXPERTS
from benchmarks.timing import measure_ceilings
from spec_ops.cli.options import KeepK, KeepP, MinP, Temperature, console, parse_sampling, plot_file, writable_file

PATHS = ("own", "transformers")
PASSES = {"both": (True, False), "on": (True,), "off": (False,)}


def bench_round(
    model: Annotated[list[str], typer.Option(help=f"{', '.join(SHAPES)}; may be repeated.")] = ["llama-8b"],  # noqa: B006
    batch_size: Annotated[list[int], typer.Option(min=1, help="May be repeated.")] = [1, 8, 32],  # noqa: B006  typer wants lists
    context: Annotated[list[int], typer.Option(min=1, help="Committed tokens per request; may be repeated.")] = [1024],  # noqa: B006
    layers: Annotated[list[int] | None, typer.Option(min=1, help="Of the target; may be repeated; default all.")] = None,
    steps: Annotated[list[int], typer.Option(min=1, help="Draft steps S; may be repeated.")] = [3],  # noqa: B006
    tree_width: Annotated[int, typer.Option(min=1, help="Branches K per draft step; 1 drafts a chain.")] = 1,
    tree_tokens: Annotated[int | None, typer.Option(help="Tokens verified per round in a tree, root included.")] = None,
    path: Annotated[list[str], typer.Option(help=f"{', '.join(PATHS)}: whose class the target is; may be repeated.")] = ["own"],  # noqa: B006
    backend: Annotated[list[str], typer.Option(help="Of every attention call; may be repeated.")] = ["auto"],  # noqa: B006
    passes: Annotated[str, typer.Option(help="both, on or off: the graph passes.")] = "on",
    naive: Annotated[bool, typer.Option("--naive", help="Also the round as one writes it at first.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Also plain compiled decoding by the same ops.")] = False,
    assisted: Annotated[bool, typer.Option("--assisted", help="Also transformers', batch 1, shortest context.")] = False,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Also drafts by prompt lookup: S steps, and plain steps that look up too.")
    ] = False,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Also rounds that sample, by default at temperature 0.6 with top-p 0.9.")
    ] = False,
    temperature: Temperature = None,
    top_k: KeepK = None,
    top_p: KeepP = None,
    min_p: MinP = None,
    penalties: Annotated[
        bool, typer.Option("--penalties", help="Also rounds with a bias, penalties and a token bitmask, greedy and sampled.")
    ] = False,
    invariant: Annotated[bool, typer.Option("--invariant", help="Also the rounds with batch-invariant arithmetic.")] = False,
    weights: Annotated[
        list[str] | None, typer.Option(help=f"Also the rounds with weights of {', '.join(KINDS)}; may be repeated.")
    ] = None,
    tp: Annotated[list[int], typer.Option(min=1, help="Ranks that share the models; may be repeated.")] = [1],  # noqa: B006
    collective: Annotated[
        list[str], typer.Option(help=f"{', '.join(COLLECTIVES)}: who adds up what ranks have computed; may be repeated.")
    ] = ["push"],  # noqa: B006
    alone: Annotated[
        bool, typer.Option("--alone", help="With --tp on one GPU: the first rank, with its own parts for those of the others.")
    ] = False,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="With --tp: also rounds whose ranks share mixtures by expert.")
    ] = False,
    whole_draft: Annotated[
        bool, typer.Option("--whole-draft", help="With --tp: also rounds whose draft is whole on every rank.")
    ] = False,
    check_rounds: Annotated[
        int, typer.Option(min=0, help="With --tp: also so many rounds whose tokens the ranks compare.")
    ] = 0,
    accept_length: Annotated[
        float | None, typer.Option(min=1, help="Tokens a round for tokens/s; default three quarters of the longest path.")
    ] = None,
    compile_times: Annotated[bool, typer.Option("--compile-times", help="Compile again in a second process: warm.")] = False,
    compile_limit: Annotated[float, typer.Option(min=0, help="Seconds; a case that takes longer is stopped.")] = 900,
    jobs: Annotated[int, typer.Option(min=1, help="Cases that compile side by side; measured one at a time.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds to take the median of.")] = 50,
    bandwidth: Annotated[float | None, typer.Option(min=1, help="Copy bytes a second for the floor; default measured.")] = None,
    device: Annotated[str, typer.Option(help="cpu runs rounds uncompiled by the wall clock, to try the command.")] = "cuda",
    timeline: Annotated[
        Path | None, typer.Option(callback=plot_file, help="PNG of a round of the first case; needs matplotlib.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(callback=writable_file, help="Write the rows, with machine, versions and commit.")
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Keep what other runs wrote to --json.")] = False,
) -> None:
    """Milliseconds of whole rounds on models' shapes with random bfloat16 weights, next to the bytes floor.

    Each case compiles in a process of its own with empty compiler caches."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"must be cuda or cpu, got {device!r}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available", param_hint="--device")
    if timeline is not None and device == "cpu":
        raise typer.BadParameter("needs a CUDA device", param_hint="--timeline")
    if passes not in PASSES:
        raise typer.BadParameter(f"must be one of {list(PASSES)}, got {passes!r}", param_hint="--passes")
    if unknown := sorted(set(model) - set(SHAPES)):
        raise typer.BadParameter(f"must be one of {list(SHAPES)}, got {unknown}", param_hint="--model")
    if unknown := sorted(set(path) - set(PATHS)):
        raise typer.BadParameter(f"must be one of {list(PATHS)}, got {unknown}", param_hint="--path")
    if unknown := sorted(set(weights or []) - set(KINDS)):
        raise typer.BadParameter(f"must be one of {list(KINDS)}, got {unknown}", param_hint="--weights")
    dense = [name for name in model if SHAPES[name].target.mixture is None]
    if dense and (of_experts := [kind for kind in weights or [] if kind.endswith(OF_EXPERTS)]):
        raise typer.BadParameter(f"{of_experts[0]} stores experts alone, of which {dense[0]} has none", param_hint="--weights")
    choices = _choices(sampled, penalties, temperature, top_k, top_p, min_p)
    choices += [choice | {"weights": kind} for kind in weights or [] for choice in choices]
    choices += [choice | {"invariant": True} for choice in choices if invariant]
    others = {"--weights": weights, "--naive": naive, "--assisted": assisted, "--invariant": invariant, "--lookup": lookup}
    _check_ranks(tp, collective, alone, device, others)
    if alone and "transformers" in path:
        raise typer.BadParameter("divides models of spec_ops alone: leave out --path transformers", param_hint="--alone")
    shared: list[dict[str, Any]] = [{"tp": n, "alone": alone, "collective": who} for n in tp if n > 1 for who in collective]
    for option, given in (("--expert-parallel", expert_parallel), ("--whole-draft", whole_draft)):
        if given and not shared:
            raise typer.BadParameter("needs --tp with more ranks than one", param_hint=option)
    if expert_parallel:
        if dense:
            raise typer.BadParameter(
                f"shares mixtures of experts, of which {dense[0]} has none", param_hint="--expert-parallel"
            )
        shared += [ranks | {"expert_parallel": True} for ranks in shared]
    shared += [ranks | {"whole_draft": True} for ranks in shared if whole_draft]
    whole: list[dict[str, Any]] = [{}] if 1 in tp else []
    choices = [choice | ranks for ranks in whole + shared for choice in choices]
    for option, given in (("--naive", naive), ("--lookup", lookup)):
        if given and tree_width > 1:
            raise typer.BadParameter("drafts chains: leave out --tree-width", param_hint=option)
    from benchmarks.round import runner as round_runner  # imports the compiler, which would slow down every command

    place = torch.device(device)
    copy_rate = measure_ceilings(place, bandwidth, matmul=1.0).copy
    try:
        cases = round_runner.plan(
            model=model, batch_size=batch_size, context=context, layers=layers, steps=steps, tree=(tree_width, tree_tokens),
            backend=backend, passes=PASSES[passes], extra=(naive, plain, assisted, lookup), choices=choices,
            accept_length=accept_length, paths=path,
            common={"repeats": repeats, "bandwidth": copy_rate, "device": device, "compiled": device == "cuda",
                    "check_rounds": check_rounds},
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--steps / --tree-width / --tree-tokens / --accept-length") from error
    memory = 0.95 * torch.cuda.get_device_properties(place).total_memory if device == "cuda" else math.inf
    console.print(f"copy {copy_rate / 1e12:.3g} TB/s")
    for name in model:
        console.print(f"{name}: {SHAPES[name].about}", soft_wrap=True)
    report = round_runner.Report(json, append, {"bandwidth": copy_rate, "jobs": jobs})
    rows, notes = round_runner.measure(console, cases, memory, jobs, compile_times, compile_limit, timeline, report)
    round_runner.show(console, rows, notes)
    if any(note.failed for note in notes):
        console.print("[red]some rounds failed[/red]")
        raise typer.Exit(1)


def _check_ranks(tp: list[int], collective: list[str], alone: bool, device: str, others: dict[str, Any]) -> None:
    if unknown := sorted(set(collective) - set(COLLECTIVES)):
        raise typer.BadParameter(f"must be one of {list(COLLECTIVES)}, got {unknown}", param_hint="--collective")
    if alone and "nccl" in collective:
        raise typer.BadParameter("has nobody whom NCCL could reach: leave out --collective nccl", param_hint="--alone")
    if max(tp) > 1 and (given := [name for name, there in others.items() if there]):
        raise typer.BadParameter(f"shares models of spec_ops as they are: leave out {given[0]}", param_hint="--tp")
    if device == "cuda" and not alone and max(tp) > (count := torch.cuda.device_count()):
        raise typer.BadParameter(
            f"must be at most {count}, the number of CUDA devices, got {max(tp)}; --alone times one rank", param_hint="--tp"
        )


def _choices(
    sampled: bool,
    penalties: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> list[dict[str, Any]]:
    """How the rounds of each case choose their tokens, as attributes of a `RoundCase`; the greedy one comes first."""
    given = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p, "--min-p": min_p}
    named = [option for option, value in given.items() if value is not None]
    if named and not sampled:
        raise typer.BadParameter("needs --sampled", param_hint=named[0])
    if temperature == 0:
        raise typer.BadParameter("must be above 0 with --sampled", param_hint="--temperature")
    choices: list[dict[str, Any]] = [{}]
    if sampled:
        # Of Llama 3's generation_config.
        filters = (0.6 if temperature is None else temperature, top_k, 0.9 if top_p is None else top_p, min_p)
        params = parse_sampling(*filters, seed=0)
        choices.append({name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")})
    return choices + [choice | {"penalties": True} for choice in choices if penalties]
