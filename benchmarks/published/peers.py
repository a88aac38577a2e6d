"""Beside other engines: what `h200-peers.json` holds of SGLang, transformers and FlashMLA, next to ours; and rounds of SGLang
with attention of ours and of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.published.text import Row, listed, load, load_rounds, paragraph, short, table

MODEL = "llama-3.1-8b-shape-32-layers"
SERVED = {
    "llama-8b": "Llama-3.1-8B with EAGLE-3",
    "mla-stack": "4 layers of DeepSeek-V3's width with NextN",
    "qwen3-30b-a3b": "Qwen3-30B-A3B, plain",
}


def ours(results: Path, bs: int, context: int, name: str = "h200-round") -> Row | None:
    """Our speculative round of the 8B shape, passes on, the backend chosen automatically."""
    for row in load_rounds(name, results)["rows"]:
        case = (row["model"].partition("+")[0], row["bs"], row["context"], row["round"], row["backend"], row["passes"])
        if case == (MODEL, bs, context, "speculative", "auto", True):
            return row
    return None


def sglang(results: Path, bs: int, context: int, backend: str = "fa3") -> list[float]:
    """SGLang's milliseconds a round in this case, one number of each measurement; the fastest counts."""
    rows = load("h200-peers", results)["rounds"]
    return [ms for row in rows if (row["bs"], row["context"], row["backend"]) == (bs, context, backend) for ms in row["ms"]]


def rounds(results: Path) -> str:
    found = load("h200-peers", results)
    cases = dict.fromkeys((row["bs"], row["context"]) for row in found["rounds"])
    lines = []
    for bs, context in cases:
        if (row := ours(results, bs, context)) is None or not (theirs := sglang(results, bs, context)):
            continue
        ratio = f"{min(theirs) / row['ms']:.2f}"
        lines.append([f"{bs}, {context}", f"{row['floor_ms']:.2f}", f"{row['ms']:.2f}", listed(theirs, "{:.1f}".format), ratio])
    assisted = next(row for row in load_rounds("h200-round", results)["rows"] if row["round"] == "assisted")
    intro = "One round of Llama-3.1-8B's shape with an EAGLE-3 head on one H200: three draft steps, four verified tokens, bf16,"
    intro += f" random weights, milliseconds. SGLang is release {found['versions']['sglang']} with its `fa3` attention backend,"
    intro += " the fastest of those that were tried, CUDA graphs and overlap scheduling, and a simulated accept length of"
    intro += (
        f" {found['accept_length']:g}; the table shows its lowest and highest measurements, and the last column compares with"
    )
    intro += " the lowest. The two were measured in different sessions on machines of one kind."
    outro = (
        f"At batch 1 and 1024 tokens, transformers' assisted generation takes {assisted['ms']:.0f} ms a target forward with a"
    )
    outro += " one-layer assistant."
    header = ("batch, context", "floor", "spec_ops", "SGLang fa3", "SGLang / spec_ops")
    return "\n\n".join((paragraph(intro), table(header, lines), paragraph(outro)))


def inside_sglang(results: Path) -> str:
    """SGLang's rounds with this package's attention beside those with its own backends."""
    files, lines = ("h200-sglang", "h200-sglang-triton"), []
    for rows in (load(file, results)["rows"] for file in files):
        times = {_of_engine(row): row["ms_per_round"] for row in rows}
        for (model, bs, context, beside, backend), ms in times.items():
            if backend != "spec_ops" and (mine := times.get((model, bs, context, beside, "spec_ops"))) is not None:
                case = f"{bs}, {context}", "another" if beside else "alone"
                lines.append([SERVED[model], *case, f"{mine:.2f}", backend, f"{ms:.2f}", f"{mine / ms:.2f}"])
    intro = f"Rounds of SGLang {rows[0]['version']} on one H200 with this package's attention, milliseconds, and with its own"
    intro += (
        " backends: chains of three drafts with a simulated accept length of 3 (Qwen3 without drafts), CUDA graphs, overlap"
    )
    intro += (
        " scheduling, pages of 64 tokens with our backend and of 1, SGLang's default, with the others. Where another engine"
    )
    intro += " ran on another GPU of the host, rounds wait longer for the processor"
    named = " and ".join(f"`benchmarks/results/{file}.json`" for file in files)
    intro += f" (`python -m benchmarks sglang`, {named}):"
    header = ("model", "batch, context", "on the host", "spec_ops", "compared with", "its ms", "ratio")
    return paragraph(intro) + "\n\n" + table(header, lines)


def profile_of_sglang(results: Path) -> str:
    """What a profiler counted in a round, by backend."""
    file = "h200-sglang"
    rows = [row for row in load(file, results)["rows"] if "profile" in row]
    names = ("graphs", "copies_to_host", "bytes_to_host", "host_waits")
    lines = [[row["backend"], *(f"{row['profile'][name]:.0f}" for name in names)] for row in rows]
    model, bs, context = SERVED[rows[0]["model"]], rows[0]["bs"], rows[0]["context"]
    intro = f"What torch's profiler counted in a round of {model}, batch {bs}, {context} tokens (`--profile`). With this"
    intro += " package's backend the host gets a round's tokens and their number, and nothing else:"
    header = ("backend", "graphs", "copies to the host", "bytes to the host", "waits of the host")
    return paragraph(intro) + "\n\n" + table(header, lines)


def requests_of_sglang(results: Path) -> str:
    """Texts of requests that join and leave, by scheduling and draft."""
    file = "h200-sglang-requests"
    found = load(file, results)
    overlap, serial, plain = found["rows"]
    intro = f"{overlap['requests']} requests to the shipped pair in bfloat16, prompts of 2 to 256 tokens, 1 to 256 new ones, on"
    intro += (
        f" one H200 (`python -m benchmarks sglang-requests`, `benchmarks/results/{file}.json`): {serial['equal']} texts were"
    )
    intro += f" the same with overlap scheduling and without, and {plain['equal']} the same with a chain of {overlap['steps']}"
    intro += " drafts and plain. Where a draft changed the text, the logits of the two tokens differ by at most"
    intro += f" {plain['largest_gap']:.2f} in float32: near ties."
    return "\n\n".join([paragraph(intro), *_requests_with_trees(results), *_requests_on_several_gpus(results)])


def _requests_on_several_gpus(results: Path) -> Iterator[str]:
    found = False
    for file, gpus, model in (
        ("h100x2-sglang-requests", "H100s", "the shipped pair"),
        ("h200x2-sglang-requests", "H200s", "Llama-3.1-8B's shape with random weights"),
    ):
        if not (results / f"{file}.json").exists():
            continue
        found, rows = True, load(file, results)["rows"]
        first = next(row for row in rows if row["steps"])  # on one GPU, with a chain
        plain = next((row for row in rows if not row["steps"] and row["tp"] == 1), first)
        for row in rows:
            if (row["tp"] > 1, row["steps"]) != (True, first["steps"]):
                continue
            told = f"{model[0].upper()}{model[1:]} on {row['tp']} {gpus} (`--tp`, `benchmarks/results/{file}.json`):"
            if rows[0] is first:
                told += f" {row['equal']} of {row['requests']} texts were the same as on one, with"
                told += f" {row['accept_length']:.2f} tokens a round ({first['accept_length']:.2f} on one)."
            else:  # compared with the plain texts of one
                told += (
                    f" with a chain of {row['steps']} drafts {row['equal']} of {row['requests']} texts are the plain texts of"
                )
                told += f" one GPU. With a chain on one GPU {first['equal']} are."
            gap = max(row["largest_gap"], first["largest_gap"], plain["largest_gap"])
            usual = f"{row['typical_gap']:.{1 if row['typical_gap'] > 1 else 2}f}"
            told += f" Where texts part, the logits of the two tokens differ by at most {gap:.2f}. The two likeliest tokens"
            told += f" usually differ by {usual}."
            yield paragraph(told)
    if found:
        yield paragraph("Several GPUs add up a sum in another order than one does, which decides near ties.")


def _requests_with_trees(results: Path) -> Iterator[str]:
    file = "h200-sglang-trees"
    if not (results / f"{file}.json").exists():
        return
    plain, *drafted = load(file, results)["rows"]
    tree, chain = (next(row for row in drafted if (row.get("branches", 1) > 1) == wide) for wide in (True, False))
    told = f"With trees of {tree['nodes']} tokens ({tree['steps']} steps, {tree['branches']} branches; pages of one token,"
    told += f" `benchmarks/results/{file}.json`) the pair emits {tree['accept_length']:.2f} tokens a round, with chains of"
    told += f" {chain['steps']} drafts {chain['accept_length']:.2f}. {tree['equal']} and {chain['equal']} of"
    told += f" {plain['requests']} texts are the plain ones, and the logits differ by at most"
    told += f" {max(tree['largest_gap'], chain['largest_gap']):.2f} where they part."
    yield paragraph(told)


def _of_engine(row: Row) -> tuple[str, int, int, bool, str]:
    """What is compared differs in the last of these alone, the backend."""
    return row["model"], row["bs"], row["context"], row.get("beside_another_engine", False), row["backend"]


def mla(results: Path) -> str:
    """MLA decoding beside FlashMLA, which is not one of the backends here."""
    theirs = load("h200-peers", results)["mla_kernels"]
    mine = {
        (row["heads"], row["bs"], row["context"], row["q_len"]): row["us"]
        for row in load("h200-kernels", results)["rows"]
        if row["kind"] == "mla" and row["mask"] == "causal" and row["lengths"] == "equal" and row["backend"] == "triton"
    }
    lines = []
    for row in theirs:
        if (us := mine.get((str(row["heads"]), row["bs"], row["context"], row["q_len"]))) is not None:
            lines.append(
                [str(row["heads"]), f"{row['bs']}, {row['context']}", str(row["q_len"]), short(us), short(row["flashmla_us"])]
            )
    intro = "MLA decoding on the same kind of card beside FlashMLA, microseconds a call. FlashMLA was timed over one set of"
    intro += " buffers, so its short cases read from L2, and without its metadata kernel (15 us); our kernels were timed over"
    intro += " rotating buffers, from rest. FlashMLA's cases with 128 heads may have been timed at the card's power limit:"
    return paragraph(intro) + "\n\n" + table(("heads", "batch, context", "queries", "spec_ops", "FlashMLA"), lines)
