"""Whole rounds: milliseconds, where they go, other backends, the passes, compile times; and accept lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.published import texts
from benchmarks.published.text import Row, listed, load, load_rounds, paragraph, table, without_empty_columns
from benchmarks.round.report import beside_base, describe_choice, draft_shape

# What the tables call a model; other names stand as they are.
LABELS = {
    "llama-3.1-8b-shape-32-layers": "Llama 8B",
    "deepseek-v3-width-4-layers": "DeepSeek, 4 layers",
    "gpt-oss-20b-type-24-layers": "gpt-oss 20B",
    "llama-3.3-70b-shape-80-layers": "Llama 70B",
    "qwen3-30b-a3b-48-layers": "Qwen3-30B-A3B",
    "gpt-oss-20b-24-layers": "gpt-oss-20b",
    "deepseek-v3-mixtures-2-layers": "DeepSeek-V3, 2 mixture layers",
    "qwen3-8b-shape-36-layers": "Qwen3-8B",
    "mistral-7b-shape-32-layers": "Mistral 7B",
    "deepseek-v3-mixtures-4-layers": "DeepSeek-V3, 4 mixture layers",
}
RANKS = (2, 4)  # GPUs of one host that rounds and sums were measured on
PARTS_ABOVE = ("+ matmul", "+ attention", "+ other", "+ gaps")  # the floor


def label(model: str) -> str:
    """The model's name in tables, without its draft's."""
    name = model.partition("+")[0]
    return LABELS.get(name, name)


def accept(results: Path) -> str:
    lines = []
    for name, draft in (
        ("cpu-plain", "none"),
        ("cpu-chain3", "chain, {steps} steps, greedy"),
        ("cpu-chain3-sampled", "chain, {steps} steps, temperature {temperature}"),
        ("cpu-tree3x4", "tree of width {topk}, {steps} steps, greedy"),
    ):
        (row,) = load(name, results)["rows"]
        lines.append([draft.format(**row), str(row.get("num_tokens", 1)), f"{row['accept_length']:.2f}"])
    sample = f"{row['prompts']} prompts, {row['new_tokens'] // row['prompts']} new tokens each"
    intro = f"Accept length of the shipped pair on files of the standard library it was never trained on ({sample};"
    intro += " `python -m benchmarks accept`, files with commands, machine and commit in `benchmarks/results/`):"
    return paragraph(intro) + "\n\n" + table(("draft", "tokens verified", "accept length, tokens a round"), lines)


def lookup(results: Path) -> str:
    rows = load("cpu-lookup", results)["rows"]
    kinds = {"edit": "edits", "summary": "summaries", "continue": "other text"}
    lines = []
    for draft, told in (
        ("eagle3", "EAGLE-3 head"),
        ("lookup", "prompt lookup"),
        ("lookup, 2 compared", "prompt lookup that compares 2 tokens"),
        ("lookup from 4, else eagle3", "prompt lookup from 4 equal tokens, else the head"),
    ):
        for steps in sorted({row["steps"] for row in rows if row["draft"] == draft}):
            found = {row["kind"]: row["accept_length"] for row in rows if (row["draft"], row["steps"]) == (draft, steps)}
            lines.append([told, str(steps), *(f"{found[kind]:.2f}" for kind in kinds)])
    intro = "Tokens a round with the shipped target, greedy, over held-out files of the standard library"
    intro += " (`python -m benchmarks.lookup`, `benchmarks/results/cpu-lookup.json`). Each text was compared with plain"
    intro += " decoding's."
    return paragraph(intro) + "\n\n" + table(("draft", "steps", *kinds.values()), lines)


def quantized(results: Path) -> str:
    (exact,) = load("cpu-chain3-exact", results)["rows"]
    lines = [["float32", f"{exact['accept_length']:.2f}", ""]]
    for name in ("float8", "float8_dynamic", "float8_block_dynamic", "int8", "int4", "nvfp4", "mxfp4"):
        (row,) = load(f"cpu-chain3-{name}", results)["rows"]
        change = row["accept_length"] / exact["accept_length"] - 1
        lines.append([row["weights"], f"{row['accept_length']:.2f}", f"{change:+.1%}"])
    intro = f"Accept length of the shipped pair, a chain of {exact['steps']} steps, with the weights of target, head and draft"
    intro += f" quantized ({exact['prompts']} prompts, {exact['new_tokens'] // exact['prompts']} new tokens each,"
    intro += " `python -m benchmarks accept --quantize KIND`, files `cpu-chain3-*.json`):"
    return paragraph(intro) + "\n\n" + table(("weights", "accept length, tokens a round", "change"), lines)


def _key(row: Row) -> tuple:
    return row["model"].partition("+")[0], row["bs"], row["context"]


def _above(row: Row) -> list[str]:
    """Milliseconds above the floor: matrix products, attention, other kernels, gaps. Empty for a round without a profile."""
    if "matmul_ms" not in row or "kv_floor_ms" not in row:
        return [""] * 4
    floors = {"matmul": row["weights_floor_ms"], "attention": row["kv_floor_ms"]}
    spent = [row[f"{part}_ms"] - floors.get(part, 0.0) for part in ("matmul", "attention", "other", "gaps")]
    return [f"{round(value, 2) + 0.0:.2f}" for value in spent]  # + 0.0: no "-0.00"


def _beside(found: dict[str, Any]) -> dict[tuple, dict[str, Row]]:
    """The rows of the table of rounds: by case and kind, our passes on, the backend that was chosen."""
    beside: dict[tuple, dict[str, Row]] = {}
    for row in found["rows"]:
        kind = row.get("round", "speculative")
        if kind == "assisted" or (row["passes"] and row["backend"] in ("auto", "triton")):
            beside.setdefault(_key(row), {}).setdefault(kind, row)
    return beside


def rounds(results: Path, name: str = "h200-round") -> str:
    found = load_rounds(name, results)
    beside, lines = _beside(found), []
    for (model, bs, context), kinds in beside.items():
        if (row := kinds.get("speculative")) is None:
            continue
        speeds = [f"{kinds[k]['tokens_per_s']:.0f}" if "tokens_per_s" in kinds.get(k, {}) else "" for k in
                  ("speculative", "plain", "assisted")]  # fmt: skip
        share = f"{row['floor_ms'] / row['ms']:.0%}"
        numbers = [f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", share, *_above(row), f"{row['kernels']:.0f}", *speeds]
        lines.append([label(model), f"{bs}, {context}", *numbers])
    shown = [kinds["speculative"] for kinds in beside.values() if "speculative" in kinds]
    intro = f"Whole rounds on one {found['environment']['machine'].removeprefix('NVIDIA ')}, random weights, chains of"
    intro += f" {listed((row['steps'] for row in shown), str)} steps"
    if all((row["graph_launches"], row["host_launches"], row["host_syncs"]) == (1, 0, 0) for row in shown):
        intro += ", each one graph launch, no other launch and no sync"
    intro += f" (`python -m benchmarks round`, `benchmarks/results/{name}.json`). Milliseconds; the floor is the bytes of"
    intro += " weights and KV over the copy rate."
    if any("matmul_ms" in row for row in shown):
        intro += " The time above the floor goes to matrix products, attention, other kernels and gaps (below zero: kernels"
        intro += " overlap)."
    if lengths := {row["accept_length"] for row in shown if "accept_length" in row}:
        intro += f" Tokens/s assume an accept length of {listed(lengths, '{:g}'.format)}"
        others = {kind for kinds in beside.values() for kind in kinds}
        plain = "plain compiled decoding with the same ops"
        if others >= {"plain", "assisted"}:
            intro += f"; the last columns are {plain}, and transformers' assisted generation at the same accept length"
        elif "plain" in others:
            intro += f"; the last column is {plain}"
        intro += "."
    intro += f" {found['remark']}" if "remark" in found else ""
    header = ("model", "batch, context", "round", "floor", "share", *PARTS_ABOVE, "kernels", "tokens/s", "plain", "assisted")
    return paragraph(intro) + "\n\n" + table(*without_empty_columns(header, lines))


def above(results: Path) -> str:
    """Where the time goes in every profiled round that the table of rounds does not show."""
    found = load_rounds("h200-round", results)
    shown = [kinds["speculative"] for kinds in _beside(found).values() if "speculative" in kinds]
    lines = []
    for row in found["rows"]:
        if row in shown or not any(parts := _above(row)):
            continue
        kind = f"{row.get('round', 'speculative')}, {row['backend']}{'' if row['passes'] else ', passes off'}"
        numbers = [f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['floor_ms'] / row['ms']:.0%}", *parts]
        lines.append([label(row["model"]), f"{row['bs']}, {row['context']}", kind, *numbers])
    intro = "Where the time above the floor goes in the other rounds of that file, milliseconds:"
    header = ("model", "batch, context", "kind, backend", "ms", "floor", "share", *PARTS_ABOVE)
    return paragraph(intro) + "\n\n" + table(header, lines)


def again(results: Path) -> str:
    """The rounds of `h200-round.json` beside those of a later commit."""
    first, second = (_beside(load_rounds(name, results)) for name in ("h200-round", "h200-round-again"))
    lines = []
    for (model, bs, context), kinds in second.items():
        for kind, row in kinds.items():
            if earlier := first.get((model, bs, context), {}).get(kind):
                lines.append([label(model), f"{bs}, {context}", kind, f"{earlier['ms']:.2f}", f"{row['ms']:.2f}"])
    intro = "The same rounds measured twice, in two sessions and with two commits, milliseconds"
    intro += " (`benchmarks/results/h200-round.json`, `benchmarks/results/h200-round-again.json`):"
    return paragraph(intro) + "\n\n" + table(("model", "batch, context", "kind", "first", "again"), lines)


def backends(results: Path) -> str:
    found = load_rounds("h200-round-backends", results)
    rows = [row for row in found["rows"] if row.get("round", "speculative") == "speculative" and row["passes"]]
    names = sorted({row["backend"] for row in rows}, key=lambda name: (name != "auto", name != "triton", name))
    cases: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(_key(row), {})[row["backend"]] = row
    lines = []
    for (model, bs, context), by_name in cases.items():
        if len(by_name) == 1:
            continue
        times = [f"{by_name[name]['ms']:.2f}" if name in by_name else "" for name in names]
        lines.append([label(model), f"{bs}, {context}", *times])
    lost = [v for v in found["auto"] if not v["auto_wins"]]
    intro = "The same rounds with other backends, milliseconds (`benchmarks/results/h200-round-backends.json`, commit"
    intro += f" {found['environment']['commit']}). `auto` is the fastest within 5%"
    whys = "; ".join(
        f"{v['fastest']} is {v['auto_over_fastest']:.2f} times as fast at batch {v['bs']}, context {v['context']} ({v['why']})"
        for v in lost
    )
    intro += f" but for {len(lost)} of {len(found['auto'])} cases: {whys}:" if lost else f" in all {len(found['auto'])} cases:"
    return paragraph(intro) + "\n\n" + table(*without_empty_columns(("model", "batch, context", *names), lines))


def passes(results: Path) -> str:
    rows = load_rounds("h200-round", results)["rows"]
    both = {(*_key(row), row["round"]) for row in rows if not row["passes"] and row.get("round") in ("speculative", "naive")}
    lines = []
    for row in rows:
        if row["backend"] != "auto" or not (row["round"] == "naive" or (*_key(row), row["round"]) in both):
            continue
        counts = [f"{row[name]:g}" for name in ("kernels", "graph_launches", "host_launches", "host_syncs")]
        where = [f"{row['bs']}, {row['context']}", row["round"], "on" if row["passes"] else "off"]
        lines.append([label(row["model"]), *where, f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", *counts])
    intro = "Our round with the graph passes on and off"
    if any(row["round"] == "naive" for row in rows):
        intro += ", and the round as one writes it at first"
    intro += " (`benchmarks/results/h200-round.json`):"
    header = ("model", "batch, context", "round", "passes", "ms", "floor", "kernels", "graphs", "launches", "syncs")
    return paragraph(intro) + "\n\n" + table(header, lines)


def compilation(results: Path) -> str:
    found = load_rounds("h200-round-compile", results)
    lines = [
        [str(row["layers"]), str(row["steps"]), f"{row['compile_cold_s']:.0f}", f"{row['compile_warm_s']:.0f}"]
        for row in sorted(found["rows"], key=lambda row: (row["layers"], row["steps"]))
        if row["round"] == "speculative" and row["passes"]
    ]
    intro = "Seconds to compile a round, in fresh processes with empty and with filled caches"
    intro += " (`benchmarks/results/h200-round-compile.json`)."
    intro += f" {found['remark']}" if "remark" in found else f" {found['jobs']} compiled side by side."
    return paragraph(intro) + "\n\n" + table(("layers", "draft steps", "cold", "warm"), lines)


def _judged(intro: str, files: Sequence[str], results: Path, kinds: Sequence[str] = ("speculative",)) -> str:
    """Rounds of `files` beside the rounds of the same file that they are judged by."""
    lines = []
    for file in files:
        rows = load(file, results)["rows"] if (results / f"{file}.json").exists() else []
        for row, other in beside_base(rows):
            if row["passes"] and row["backend"] in ("auto", "triton") and row.get("round", "speculative") in kinds:
                times = [f"{row['ms']:.2f}", describe_choice(other), f"{other['ms']:.2f}", f"{row['ms'] / other['ms']:.3f}"]
                drafts = "none" if row.get("round") == "plain" else draft_shape(row)
                where = [label(row["model"]), f"{row['bs']}, {row['context']}", drafts, describe_choice(row)]
                lines.append([*where, *times])
    if not lines:
        return paragraph(f"{intro}: not measured yet.")
    header = ("model", "batch, context", "drafts", "variant", "ms", "compared with", "its ms", "ratio")
    return paragraph(f"{intro}:") + "\n\n" + table(header, lines)


def sampled(results: Path) -> str:
    """Rounds that sample, and rounds that change logits, beside those that do not."""
    file = "h200-round-sampled"
    intro = "What sampling adds to a round, and what a bias, penalties and a token bitmask add, milliseconds; each pair"
    intro += f" measured in one call (`python -m benchmarks round --sampled --penalties`, `benchmarks/results/{file}.json`)"
    return _judged(intro, [file], results)


def invariant(results: Path) -> str:
    """Batch-invariant rounds, and a prompt, beside the others."""
    adds = "What batch-invariant arithmetic adds to a round"
    tables = [
        _judged(
            f"{adds} on one {gpu}, milliseconds (`python -m benchmarks round --invariant`, `benchmarks/results/{file}.json`)",
            [file],
            results,
        )
        for gpu in ("H100", "H200")
        if (results / f"{(file := f'{gpu.lower()}-round-invariant')}.json").exists()
    ]
    text = "\n\n".join(tables) or paragraph(f"{adds}: not measured yet.")
    prompts = [row for row in texts.price(results) if row["what"].startswith("prompt")]
    for row in prompts:
        told = f"A {row['what']} tokens takes {row['invariant_ms']:.1f} ms instead of {row['ms']:.1f} ({row['ratio']:.2f}) in a"
        told += f" model of {row['layers']} of Llama 8B's layers (`python -m benchmarks invariance --no-texts`,"
        text += "\n\n" + paragraph(f"{told} `benchmarks/results/{texts.FILE}.json`).")
    return text


def weights(results: Path) -> str:
    """Rounds with weights of 8 and 4 bits, compared with 16 bits."""
    file = "h200-weights"
    intro = "Rounds with weights of 8 and 4 bits, milliseconds (`python -m benchmarks round --plain --weights KIND`,"
    text = _judged(f"{intro} `benchmarks/results/{file}.json`)", [file], results, ("speculative", "plain"))
    lines = [
        [
            label(row["model"]), row["weights"].removesuffix("_experts"), f"{row['bs']}, {row['context']}", row["round"],
            f"{row['touched_experts']:.0f}", f"{row['floor_ms']:.2f}", f"{row['ms']:.2f}", f"{row['ms'] / row['floor_ms']:.2f}",
        ]
        for row in load(file, results)["rows"]
        if row.get("weights") and "touched_experts" in row
    ]  # fmt: skip
    if not lines:
        return text
    header = ("model", "experts", "batch, context", "kind", "touched experts", "floor", "ms", "times the floor")
    intro = (
        f"Mixtures whose experts are stored so (`{file}.json`), beside the floor of the experts that uniform routing touches:"
    )
    return f"{text}\n\n{paragraph(intro)}\n\n{table(header, lines)}"


def ranks(results: Path) -> str:
    """Rounds on several GPUs, compared with one GPU and with NCCL."""
    cases: dict[tuple, dict[str, Row]] = {}
    files = [f"h200x{count}-round" for count in RANKS]
    for count, file in zip(RANKS, files, strict=True):
        for row in load(file, results)["rows"]:
            if row["layers"] == 1:  # a few layers, whose tokens were compared
                continue
            case = (row["model"], row["bs"], row["context"], row["round"], row["path"], count)
            how = "whole experts" if row.get("expert_parallel") else "whole draft" if row.get("whole_draft") else "push"
            cases.setdefault(case, {})["nccl" if row.get("collective") == "nccl" else how if row.get("tp") else "one"] = row
    lines = []
    for (model, bs, context, kind, path, count), found in sorted(
        cases.items(), key=lambda case: (label(case[0][0]), *case[0][1:])
    ):
        shared = found.get("push")
        if shared is None:
            continue
        times = [
            f"{found[way]['ms']:.2f}" if way in found else "" for way in ("one", "push", "nccl", "whole draft", "whole experts")
        ]
        faster = f"{found['one']['ms'] / shared['ms']:.2f}" if "one" in found else ""
        name = label(model) + ("" if path == "own" else ", transformers")
        lines.append([name, f"{bs}, {context}", kind, str(count), *times, faster, f"{shared['floor_ms'] / shared['ms']:.2f}"])
    intro = "Rounds on one GPU and on several, milliseconds (`python -m benchmarks round --tp N --collective push"
    intro += f" --collective nccl`, {' and '.join(f'`benchmarks/results/{file}.json`' for file in files)}): with our sums, with"
    intro += " NCCL's; with our sums and a draft, or with experts, that are not divided. The last column is the bytes floor of"
    intro += " those GPUs, divided by the time with our sums:"
    header = (
        "model", "batch, context", "kind", "GPUs", "one GPU", "our sums", "NCCL's sums", "whole draft", "whole experts",
        "speed-up", "share of the floor",
    )  # fmt: skip
    return paragraph(intro) + "\n\n" + table(header, lines)


def collectives(results: Path) -> str:
    """Sums over ranks, a table for each number of GPUs."""
    text = []
    for count in RANKS:
        file = f"h200x{count}-collectives"
        found: dict[int, dict[str, float]] = {}
        rows = load(file, results)["rows"]
        for row in rows:
            found.setdefault(row["kib"], {})[row["way"]] = row["us"]
        ways = list(dict.fromkeys(row["way"] for row in rows))
        intro = (
            f"A sum over {count} GPUs in a CUDA graph of {rows[0]['calls']}, microseconds (`torchrun --nproc-per-node {count}"
        )
        intro += (
            f" -m benchmarks collectives`, `benchmarks/results/{file}.json`); torch's symmetric memory with the copies into it"
        )
        intro += " and out of it:"
        lines = [[str(kib), *(f"{times[way]:.1f}" if way in times else "" for way in ways)] for kib, times in found.items()]
        text.append(paragraph(intro) + "\n\n" + table(("KiB a rank", *ways), lines))
    return "\n\n".join(text)


def models(results: Path) -> str:
    """Rounds of models of transformers beside those of our own class."""
    file = "h200-models"
    rows = [row for row in load(file, results)["rows"] if row["passes"]]
    place = {(row["model"], row["bs"], row["context"], row["round"], row["path"]): row for row in rows}
    lines = []
    for (model, bs, context, kind, path), row in place.items():
        own = place.get((model, bs, context, kind, "own"))
        if path == "transformers" and own is not None:
            times = [f"{row['ms']:.2f}", f"{own['ms']:.2f}", f"{row['ms'] / own['ms']:.3f}", f"{row['floor_ms']:.2f}"]
            counts = [f"{row['kernels']:.0f}", f"{own['kernels']:.0f}"]
            lines.append([label(model), f"{bs}, {context}", kind, *times, *counts, f"{row['first_call_s']:.0f}"])
    intro = "A model of transformers compared with our own class of the same shape, milliseconds a round (`python -m"
    intro += f" benchmarks round --path own --path transformers --plain`, `benchmarks/results/{file}.json`). The first call"
    intro += " compiles, without a cache and while other rounds compile:"
    names = ("transformers", "own", "ratio", "floor", "its kernels", "own kernels", "first call, s")
    header = ("model", "batch, context", "kind", *names)
    return paragraph(intro) + "\n\n" + table(header, lines)


def mixtures(results: Path) -> str:
    """Rounds of mixtures of experts, with the floor of the touched experts and with another engine's times."""
    file = "h200-models"
    rows = sorted(load(file, results)["rows"], key=lambda row: (label(row["model"]), row["bs"], row["context"], row["round"]))
    lines = [
        [
            label(row["model"]), f"{row['bs']}, {row['context']}", row["round"], f"{row['touched_experts']:.0f}",
            f"{row['floor_ms']:.2f}", f"{row['ms']:.2f}", f"{row['ms'] / row['floor_ms']:.2f}",
            f"{row['peer_ms']:.1f}" if "peer_ms" in row else "",
        ]
        for row in rows
        if row["passes"] and "touched_experts" in row and "weights" not in row
    ]  # fmt: skip
    intro = "Mixtures of experts in our own class, milliseconds a round (`python -m benchmarks round --plain --model"
    intro += (
        f" qwen3-30b-a3b`, `benchmarks/results/{file}.json`), beside the floor of the experts of a layer that random routing"
    )
    intro += " touches. SGLang 0.5.14 with `fa3` was measured in another session, with an accept length that is simulated; with"
    intro += " its dummy weights tokens route alike, so it may touch fewer experts:"
    names = ("touched experts", "floor", "ms", "times the floor", "SGLang")
    return paragraph(intro) + "\n\n" + table(("model", "batch, context", "kind", *names), lines)


def planned(results: Path) -> str:
    """What a round costs with kernels that plan on the host."""
    rows = [row for row in load_rounds("h200-round-backends", results)["rows"] if row["model"].startswith("llama-3.1-8b")]
    rows = [row for row in rows if (row["bs"], row["round"], row["passes"]) == (1, "speculative", True)]
    by_name = {row["backend"]: row for row in rows}
    theirs, ours = by_name["flashinfer-fa2"], by_name["triton"]
    text = f"A round of Llama-3.1-8B's shape at batch 1 takes {theirs['ms']:.0f} ms with fa2, in"
    text += f" {theirs['graph_launches']:g} graphs with {theirs['host_syncs']:g} syncs, where the Triton kernels take"
    text += f" {ours['ms']:.1f} ms in {ours['graph_launches']:g} (H200, `benchmarks/results/h200-round-backends.json`)."
    return paragraph(text)
