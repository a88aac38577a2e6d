"""Writes the measured figures of the README and of docs/ from `benchmarks/results`.

    python benchmarks/readme_tables.py            # rewrites README.md and docs/backends.md
    python benchmarks/readme_tables.py --check    # exit code 1 if one is not up to date

A block of figures stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`; NAME is one of `BLOCKS`. Nothing
between the two is written by hand, and `tests/docs/test_readme.py` finds measured figures that stand elsewhere.
docs/decisions.md is left alone: a record of what was tried, with figures of trees that are gone.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "backends.md")
BLOCK = re.compile(r"^( *)<!-- figures: ([\w-]+) -->\n(.*?)^ *<!-- end of figures -->$", re.MULTILINE | re.DOTALL)
WIDTH = 130
PARTS_ABOVE = ("+ matmul", "+ attention", "+ other", "+ gaps")  # the floor
Row = dict[str, Any]

# Shown of the kernels' results: kind, heads, head_dim, batch, context, queries, mask; all of them are in the file.
KERNELS = (
    ("gqa", "32/8", 128, 1, 4096, 4, "causal"),
    ("gqa", "32/8", 128, 1, 81920, 16, "tree"),
    ("gqa", "32/8", 128, 8, 8192, 4, "causal"),
    ("gqa", "32/8", 128, 64, 8192, 1, "causal"),
    ("gqa", "32/8", 128, 64, 8192, 16, "tree"),
    ("gqa", "32/8", 128, 32, "log-uniform 512-65536", 4, "causal"),
    ("gqa", "64/8", 64, 8, 81920, 4, "causal"),
    ("gqa", "64/8", 64, 64, 8192, 16, "tree"),
    ("mla", "128", 576, 1, 81920, 1, "causal"),
    ("mla", "128", 576, 8, 8192, 1, "causal"),
    ("mla", "128", 576, 8, 81920, 4, "causal"),
    ("mla", "128", 576, 64, 8192, 1, "causal"),
    ("mla", "128", 576, 64, 8192, 16, "tree"),
    ("mla", "16", 576, 1, 81920, 1, "causal"),
    ("mla", "16", 576, 8, 8192, 4, "causal"),
    ("mla", "16", 576, 64, 8192, 1, "causal"),
    ("mla", "16", 576, 32, "log-uniform 512-65536", 4, "causal"),
)


def load(name: str, results: Path) -> dict[str, Any]:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *rest = (f"| {' | '.join(line)} |" for line in [header, *rows])
    return "\n".join([first, "|" + "---|" * len(header), *rest])


def short(value: float) -> str:
    """Three digits where they count: 3.9, 11.9, 78, 503; 0.85."""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def paragraph(text: str) -> str:
    """`text` in lines, code kept whole."""
    whole = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "\0"), text)
    return "\n".join(textwrap.wrap(whole, WIDTH, break_long_words=False, break_on_hyphens=False)).replace("\0", " ")


def without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def listed(values: Iterable[float], form: Callable[[float], str] = short) -> str:
    """The range of `values`: "9 to 14", or one number."""
    low, high = form(min(found := list(values))), form(max(found))
    return low if low == high else f"{low} to {high}"


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


def _kernel_cases(results: Path, name: str = "h200-kernels") -> dict[tuple, dict[str, Row]]:
    """Cases of H200 kernel results by backend; a case of unequal lengths has their range for its context."""
    cases: dict[tuple, dict[str, Row]] = {}
    for row in load(name, results)["rows"]:
        context = row["context"] if row["lengths"] == "equal" else row["lengths"]
        case = (row["kind"], row["heads"], row["head_dim"], row["bs"], context, row["q_len"], row["mask"])
        cases.setdefault(case, {})[row["backend"]] = row
    return cases


def kernels(results: Path) -> str:
    cases, lines = _kernel_cases(results), []
    names = ("flashinfer-xqa", "flashinfer-fa2", "flashinfer-fa3")
    for case in KERNELS:
        kind, heads, head_dim, bs, context, q_len, mask = case
        found = cases[case]
        lengths = str(context).removeprefix("log-uniform ").replace("-", " to ")
        layer = f"{heads}, {head_dim}" if kind == "gqa" else f"MLA {heads}"
        times = [short(found["triton"]["floor_us"]), *(short(found[n]["us"]) if n in found else "" for n in ("triton", *names))]
        lines.append([layer, f"{bs}, {lengths}", f"{q_len}{', tree' * (mask == 'tree')}", *times])
    told = []
    for kind in ("gqa", "mla"):
        both = [found for case, found in cases.items() if case[0] == kind and "triton" in found and {*names} & found.keys()]
        ratios = [min(found[n]["us"] for n in names if n in found) / found["triton"]["us"] for found in both]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        told.append(f"{mean:.2f} times as fast over {len(both)} {kind.upper()} cases ({min(ratios):.2f} to {max(ratios):.1f})")
    everything = [row for row in load("h200-kernels", results)["rows"] if row["backend"] == "triton"]
    worst = max(row["error"] / row["reference_error"] for row in everything if row["reference_error"])
    copy = load("h200-kernels", results)["ceilings"]["copy"] / 1e12
    intro = (
        "Attention on one H200, bf16, pages of 64, CUDA-graph replay over rotating buffers, next to FlashInfer's kernels in one"
    )
    intro += " run (`python -m benchmarks kernels`, `benchmarks/results/h200-kernels.json`); microseconds, floor at"
    intro += f" {copy:.1f} TB/s and the rate of large matrix products. Every measurement starts from rest and is short"
    intro += " (20 ms, or seven replays), since after 40 to 60 ms of MLA with 128 heads the GPU is at its power limit, and its"
    intro += " clocks fall by a fifth:"
    outro = "Next to the fastest of FlashInfer's kernels in each case, the Triton kernels are in the geometric mean"
    outro += (
        f" {' and '.join(told)}; their error is at most {worst:.2f} times that of torch's own attention. fa2 and fa3 need a"
    )
    outro += (
        " plan on the host before every call, which is left out here. The xqa times hold two small launches of ours that make"
    )
    outro += " its inputs safe."
    header = ("heads, head_dim", "batch, context", "queries", "floor", "Triton", "FlashInfer xqa", "fa2", "fa3")
    return "\n\n".join((paragraph(intro), table(header, lines), paragraph(outro)))


def _fp8_over_bf16(results: Path) -> dict[tuple[str, str], list[float]]:
    """Times with fp8 caches over those with bfloat16 ones, 8192 tokens and more; by kind and rows per KV head."""
    bf16, ratios = _kernel_cases(results), {}
    for case, found in _kernel_cases(results, "h200-kernels-fp8").items():
        kind, heads, _, _, context, q_len, _ = case
        queries, _, kv_heads = heads.partition("/")
        rows = int(queries) // int(kv_heads or 1) * q_len
        if context > 4096:
            size = "few" if rows <= 16 else "some" if rows <= 32 else "many"
            ratios.setdefault((kind, size), []).append(found["triton"]["us"] / bf16[case]["triton"]["us"])
    return ratios


def fp8(results: Path) -> str:
    ratios, cases = _fp8_over_bf16(results), _kernel_cases(results, "h200-kernels-window")
    rows = {case: found["triton"] for case, found in _kernel_cases(results, "h200-kernels-fp8").items() if case[0] == "gqa"}
    shares = [row["us"] / row["floor_us"] for case, row in rows.items() if case[4] == 81920 and case[5] == 1]
    both = [(found["triton"]["us"], found["flashinfer-xqa"]["us"]) for found in cases.values() if "flashinfer-xqa" in found]
    text = "Fp8 caches (`benchmarks/results/h200-kernels-fp8.json`): from 8192 tokens on, GQA with up to 16 query rows for a KV"
    fp8_at, bf16_at = (load(name, results)["environment"]["commit"] for name in ("h200-kernels-fp8", "h200-kernels"))
    text += f" head takes {listed(ratios['gqa', 'few'])} of the time of bf16 caches (two runs, at {fp8_at} and {bf16_at}: see"
    text += " the remarks in the files), decoding at 81920 tokens"
    text += f" {listed(shares, '{:.2f}'.format)} times the floor. Layers with a window of 128 (gpt-oss's heads,"
    text += f" `benchmarks/results/h200-kernels-window.json`): {listed(found['triton']['us'] for found in cases.values())} us;"
    text += f" xqa takes {listed((theirs / ours for ours, theirs in both), '{:.1f}'.format)} times as long."
    return paragraph(text)


def limits(results: Path) -> str:
    ours = {
        case[1:]: found["triton"] for case, found in _kernel_cases(results).items() if case[0] == "gqa" and "triton" in found
    }
    one = [row for (_, _, bs, context, _, _), row in ours.items() if (bs, context) == (1, 4096)]
    busy = [row for (_, dim, _, context, q, _), row in ours.items() if (dim, q) == (64, 16) and context != 4096]
    ratios = _fp8_over_bf16(results)
    text = f"On one request of 4096 tokens the Triton attention kernel takes {listed(r['us'] for r in one)} us where the floor"
    text += f" is {listed(r['floor_us'] for r in one)}; with head_dim 64 and 16 queries it is bound by arithmetic, at"
    text += f" {listed(r['us'] / r['floor_us'] for r in busy)} times the floor on longer contexts."
    text += f" With fp8 caches, GQA of 32 rows for a KV head takes {listed(ratios['gqa', 'some'])} of bf16's time and more rows"
    text += f" {listed(ratios['gqa', 'many'])}; MLA of up to 16 rows {listed(ratios['mla', 'few'])}, more rows"
    text += f" {listed(ratios['mla', 'many'])} (the Gluon kernels take no fp8)."
    return paragraph(text)


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


def rounds(results: Path) -> str:
    found = load("h200-round", results)
    beside, lines = _beside(found), []
    for (model, bs, context), kinds in beside.items():
        if (row := kinds.get("speculative")) is None:
            continue
        speeds = [f"{kinds[k]['tokens_per_s']:.0f}" if "tokens_per_s" in kinds.get(k, {}) else "" for k in
                  ("speculative", "plain", "assisted")]  # fmt: skip
        share = f"{row['floor_ms'] / row['ms']:.0%}"
        numbers = [f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", share, *_above(row), f"{row['kernels']:.0f}", *speeds]
        lines.append([model, f"{bs}, {context}", *numbers])
    shown = [kinds["speculative"] for kinds in beside.values() if "speculative" in kinds]
    intro = f"Whole rounds on one {found['environment']['machine'].removeprefix('NVIDIA ')}, random weights, chains of"
    intro += f" {listed((row['steps'] for row in shown), str)} steps"
    if all((row["graph_launches"], row["host_launches"], row["host_syncs"]) == (1, 0, 0) for row in shown):
        intro += ", each one graph launch, no other launch and no sync"
    intro += " (`python -m benchmarks round`, `benchmarks/results/h200-round.json`). Milliseconds; the floor is the bytes of"
    intro += " weights and KV over the copy rate."
    if any("matmul_ms" in row for row in shown):
        intro += " What is above it goes to matrix products, attention, other kernels and gaps (below zero: kernels overlap)."
    if lengths := {row["accept_length"] for row in shown if "accept_length" in row}:
        intro += f" Tokens/s for an accept length of {listed(lengths, '{:g}'.format)}, stated and not measured"
        others = {kind for kinds in beside.values() for kind in kinds}
        if others >= {"plain", "assisted"}:
            intro += "; beside it plain compiled decoding with the same ops, and transformers' assisted generation at the same"
            intro += " accept length"
        intro += "."
    intro += f" {found['remark']}" if "remark" in found else ""
    header = ("model", "batch, context", "round", "floor", "share", *PARTS_ABOVE, "kernels", "tokens/s", "plain", "assisted")
    return paragraph(intro) + "\n\n" + table(*without_empty_columns(header, lines))


def above(results: Path) -> str:
    """Where the time goes in every profiled round that the table of rounds does not show."""
    found = load("h200-round", results)
    shown = [kinds["speculative"] for kinds in _beside(found).values() if "speculative" in kinds]
    lines = []
    for row in found["rows"]:
        if row in shown or not any(parts := _above(row)):
            continue
        kind = f"{row.get('round', 'speculative')}, {row['backend']}{'' if row['passes'] else ', passes off'}"
        numbers = [f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['floor_ms'] / row['ms']:.0%}", *parts]
        lines.append([row["model"].partition("+")[0], f"{row['bs']}, {row['context']}", kind, *numbers])
    intro = "Where the time above the floor goes in the other rounds of that file, milliseconds:"
    header = ("model", "batch, context", "kind, backend", "ms", "floor", "share", *PARTS_ABOVE)
    return paragraph(intro) + "\n\n" + table(header, lines)


def backends(results: Path) -> str:
    found = load("h200-round-backends", results)
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
        lines.append([model, f"{bs}, {context}", *times])
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
    rows = load("h200-round", results)["rows"]
    both = {(*_key(row), row["round"]) for row in rows if not row["passes"] and row.get("round") in ("speculative", "naive")}
    lines = []
    for row in rows:
        if row["backend"] != "auto" or not (row["round"] == "naive" or (*_key(row), row["round"]) in both):
            continue
        counts = [f"{row[name]:g}" for name in ("kernels", "graph_launches", "host_launches", "host_syncs")]
        where = [f"{row['bs']}, {row['context']}", row["round"], "on" if row["passes"] else "off"]
        lines.append([row["model"].partition("+")[0], *where, f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", *counts])
    intro = "Our round with the graph passes on and off"
    if any(row["round"] == "naive" for row in rows):
        intro += ", and the round as one writes it at first"
    intro += " (`benchmarks/results/h200-round.json`):"
    header = ("model", "batch, context", "round", "passes", "ms", "floor", "kernels", "graphs", "launches", "syncs")
    return paragraph(intro) + "\n\n" + table(header, lines)


def compilation(results: Path) -> str:
    found = load("h200-round-compile", results)
    lines = [
        [str(row["layers"]), str(row["steps"]), f"{row['compile_cold_s']:.0f}", f"{row['compile_warm_s']:.0f}"]
        for row in sorted(found["rows"], key=lambda row: (row["layers"], row["steps"]))
        if row["round"] == "speculative" and row["passes"]
    ]
    intro = "Seconds to compile a round, in fresh processes with empty and with filled caches"
    intro += " (`benchmarks/results/h200-round-compile.json`)."
    intro += f" {found['remark']}" if "remark" in found else f" {found['jobs']} compiled side by side."
    return paragraph(intro) + "\n\n" + table(("layers", "draft steps", "cold", "warm"), lines)


def choice(results: Path) -> str:
    """Whether `auto`'s kernel is the fastest, and how near those come that plan on the host."""
    commit = load("h200-kernels", results)["environment"]["commit"]
    cases = {case: found for case, found in _kernel_cases(results).items() if "triton" in found}
    compared = sum(case[0] == "gqa" and "flashinfer-xqa" in found for case, found in cases.items())
    ahead, name, case = max(
        (found["triton"]["us"] / found[name]["us"], name, case)
        for case, found in cases.items()
        for name in ("flashinfer-fa2", "flashinfer-fa3")
        if name in found
    )
    (kind, heads, head_dim, bs, context, q_len, mask), found = case, cases[case]
    text = "Batch size and lengths do not count: one compiled round serves all lengths. In each of the"
    text += f" {compared} measured cases on sm_90 that choice is the fastest within 5% ({commit},"
    text += " `benchmarks/results/h200-kernels.json`; `tests/backends/test_measured.py` holds it to the results; a case that"
    text += (
        " is not would stand here and in the reasons). fa2 and fa3 plan on the host, so `auto` leaves them out. With that plan"
    )
    text += " left out of"
    text += f" their times too, they are at most {max(ahead - 1, 0):.1%} ahead of `triton` in that file: {name} with"
    text += f" {kind.upper()} {heads}, head_dim {head_dim}, {q_len} queries ({mask}) and {bs} requests of {context} tokens"
    text += f" ({found[name]['us']:.0f} us, `triton` {found['triton']['us']:.0f})."
    return paragraph(text)


def planned(results: Path) -> str:
    """What a round costs with kernels that plan on the host."""
    rows = [row for row in load("h200-round-backends", results)["rows"] if row["model"].startswith("llama-3.1-8b")]
    rows = [row for row in rows if (row["bs"], row["round"], row["passes"]) == (1, "speculative", True)]
    by_name = {row["backend"]: row for row in rows}
    theirs, ours = by_name["flashinfer-fa2"], by_name["triton"]
    text = f"A round of Llama-3.1-8B's shape at batch 1 takes {theirs['ms']:.0f} ms with fa2, in"
    text += f" {theirs['graph_launches']:g} graphs with {theirs['host_syncs']:g} syncs, where the Triton kernels take"
    text += f" {ours['ms']:.1f} ms in {ours['graph_launches']:g} (H200, `benchmarks/results/h200-round-backends.json`)."
    return paragraph(text)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "accept": accept,
    "kernels": kernels,
    "fp8": fp8,
    "limits": limits,
    "rounds": rounds,
    "above": above,
    "backends": backends,
    "passes": passes,
    "compilation": compilation,
    "choice": choice,
    "planned": planned,
}


def updated(text: str, results: Path) -> str:
    """`text` with every block written anew.

    Raises:
        ValueError: a block has no such name, or is not closed. FileNotFoundError: a block's results are not there.
    """

    def write(match: re.Match[str]) -> str:
        indent, name = match[1], match[2]
        if name not in BLOCKS:
            raise ValueError(f"readme_tables: blocks are {sorted(BLOCKS)}, got {name!r}")
        body = textwrap.indent(BLOCKS[name](results), indent)
        blank = "" if indent else "\n"  # Markdown wants an empty line between a comment and a table
        return f"{indent}<!-- figures: {name} -->\n{blank}{body}\n{blank}{indent}<!-- end of figures -->"

    found, count = BLOCK.subn(write, text)
    if count != text.count("<!-- figures:") or count != text.count("<!-- end of figures -->"):
        raise ValueError("readme_tables: every block needs its two comments, each on a line of its own")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    parser.add_argument("--document", type=Path, action="append", help="default: README.md and docs/backends.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    stale = []
    for document in options.document or DOCUMENTS:
        old = document.read_text(encoding="utf-8")
        new = updated(old, options.results)
        if new != old:
            stale.append(document.name)
            if not options.check:
                document.write_text(new, encoding="utf-8")
    if options.check:
        print(f"not up to date: {', '.join(stale)}; run python benchmarks/readme_tables.py" if stale else "up to date")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
