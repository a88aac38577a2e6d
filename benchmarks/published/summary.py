"""The front page's numbers: five claims and the chart's caption; and where every results file comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.published import kernels, peers, texts
from benchmarks.published.text import ROOT, load, load_rounds, paragraph, table

FILES = "benchmarks/results"


def demo(results: Path) -> tuple[float, float, str]:
    """Tokens/s of the shipped pair, plain and speculative, and what they were measured on."""
    text = (results / "h200-demo.txt").read_text(encoding="utf-8")
    speeds = dict(re.findall(r"^(plain|speculative) .* ([\d.]+)$", text, re.MULTILINE))
    return float(speeds["plain"]), float(speeds["speculative"]), text.splitlines()[1]


def families() -> tuple[int, int]:
    """How many model types of transformers run, and of how many, as the table of families says."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    found = re.search(r": (\d+) of (\d+) run", text)
    assert found is not None
    return int(found[1]), int(found[2])


def claims(results: Path) -> str:
    rows = load_rounds("h200-round", results)["rows"]
    case = [row for row in rows if (row["bs"], row["context"]) == (1, 1024) and row["model"] == f"{peers.MODEL}+eagle3"]
    on, off = (next(row for row in case if row["passes"] is passes) for passes in (True, False))
    theirs, sglang = min(peers.sglang(results, 1, 1024)), load("h200-peers", results)["versions"]["sglang"]
    mean, count = kernels.over_fastest(results, "gqa")
    runs, of = families()
    accept = load("cpu-chain3", results)["rows"][0]["accept_length"]
    tree = load("cpu-tree3x4", results)["rows"][0]["accept_length"]
    flag, apart = "in bf16 [with a flag](docs/guides/invariance.md)", "near ties may fall either way"
    source = {None: ", so far on a CPU", True: f" ([{texts.FILE}.json]({FILES}/{texts.FILE}.json))"}
    same = texts.equal(results)
    in_bf16 = f"; in bf16 {apart}" if same is False else f", and {flag}{source[same]}; without it {apart}"
    lines = [
        f"**One CUDA graph a round.** {on['graph_launches']:g} graph launch, {on['host_launches']:g} other launches,"
        f" {on['host_syncs']:g} host syncs ([h200-round.json]({FILES}/h200-round.json)).",
        f"**Close to the memory's limit.** A round of an 8B model takes {on['ms']:.2f} ms at batch 1; reading its weights and"
        f" KV alone would take {on['floor_ms'] / on['ms']:.0%} of that. A round of SGLang {sglang} takes {theirs:.1f}"
        f" ([h200-round.json]({FILES}/h200-round.json), [h200-peers.json]({FILES}/h200-peers.json)).",
        f"**Passes that do what engines do by hand.** The same round is {off['kernels']:.0f} kernels and {off['ms']:.2f} ms"
        f" without them, {on['kernels']:.0f} kernels and {on['ms']:.2f} ms with them"
        f" ([h200-round.json]({FILES}/h200-round.json)).",
        f"**Attention kernels that need no host plan.** Over {count} GQA cases {mean:.2f} times as fast (geometric mean) as the"
        f" fastest FlashInfer kernel of each case ([h200-kernels.json]({FILES}/h200-kernels.json)).",
        f"**The same text.** Greedy speculation gives exactly the tokens of plain decoding in float32{in_bf16}. The shipped"
        f" pair gains {accept:.2f} tokens a round with a chain, {tree:.2f} with a tree"
        f" ([cpu-chain3.json]({FILES}/cpu-chain3.json), [cpu-tree3x4.json]({FILES}/cpu-tree3x4.json)); {runs} of"
        f" {of} model types of transformers run ([docs/models.md](docs/models.md)).",
    ]
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def caption(results: Path) -> str:
    machine = demo(results)[2].split(",")[0]
    text = f"*On one {machine}. Left: a model of Llama-3.1-8B's shape, three draft steps, bf16, random weights, 1024 tokens of"
    text += " context, accept length 3 (SGLang's is simulated; transformers drafts with a one-layer model). Right: the small"
    text += " pair of models in this package, float32. How each number was measured: [performance](docs/performance/index.md).*"
    return paragraph(text)


def provenance(results: Path) -> str:
    """One row per results file: machine, software, commit and command."""
    lines = []
    for path in sorted(results.glob("*.json")):
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        torch = environment["torch"] + (f", triton {environment['triton']}" if "triton" in environment else "")
        commit = environment.get("commit", "")
        lines.append([f"`{path.name}`", environment["machine"], torch, commit, f"`{environment['command']}`"])
    command, setting = (results / "h200-demo.txt").read_text(encoding="utf-8").splitlines()[:2]
    machine, torch, _, commit, *_ = setting.split(", ")
    lines.append(["`h200-demo.txt`", machine, torch.removeprefix("torch "), commit.removeprefix("commit "), f"`{command}`"])
    return table(("file", "machine", "torch", "commit", "command"), lines)
