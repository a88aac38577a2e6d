"""Measured numbers on README.md and the site are those of `benchmarks/results`, and sizes those of the files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.kernels import roofline
from benchmarks.published import __main__ as published
from benchmarks.published import chart, kernels, peers, rounds, sampling, summary, texts
from benchmarks.published.text import load_rounds

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"

# What no benchmark repeats: how long FlashInfer's compilations take, and the machine's behaviour that the rules of measuring
# are made for. The notebook is a record of what was tried, with numbers of code that is gone.
NOT_FROM_RESULTS = {"backends.md": {"26 s", "165 s", "9 minutes", "40 s"}, "index.md": {"5%"}}
WRITTEN = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if published.NOTEBOOK not in page.parents)]
UNITS = r"ms|us|µs|s|seconds?|minutes?|tokens/s|[TG]B/s|[KMGT]B|times|%"


@pytest.mark.parametrize("path", published.documents(), ids=lambda path: path.name)
def test_figures_come_from_the_results(path):
    text = path.read_text(encoding="utf-8")
    assert published.updated(text, RESULTS) == text, "run python -m benchmarks.published"


def test_every_block_is_published():
    found = [name for page in published.documents() for _, name, _ in published.BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(published.BLOCKS)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_measured_figure_stands_elsewhere(path):
    text = path.read_text(encoding="utf-8")
    by_hand = re.sub(r"```.*?```", "", published.BLOCK.sub("", text), flags=re.DOTALL)
    found = re.findall(rf"\b\d[\d.,]*\s+(?:{UNITS})(?![\w/])|\b\d[\d.]*%", by_hand)
    assert {re.sub(r"\s+", " ", figure) for figure in found} <= NOT_FROM_RESULTS.get(path.name, set())


def test_the_chart_shows_the_results():
    """Drawn by `python -m benchmarks.published`; its description holds the numbers."""
    (held,) = re.findall(r"<dc:description>(.*?)</dc:description>", chart.PATH.read_text(encoding="utf-8"))
    assert json.loads(held.replace("&quot;", '"')) == chart.data()


def test_the_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    chart.draw(tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert "<dc:description>" in text


def test_the_title_of_the_picture_is_that_of_its_file():
    """Redrawn from the file (`python -m benchmarks.kernels.roofline`), whose commit may have been stated after the run."""
    image = pytest.importorskip("PIL.Image")
    found = json.loads((RESULTS / "h200-kernels.json").read_text(encoding="utf-8"))
    with image.open(DOCS / "images" / "h200-kernels.png") as picture:
        assert picture.text["Title"] == roofline.title(found["environment"])
    assert "modified" not in roofline.title(found["environment"])


def test_sizes_of_the_pair():
    folder = ROOT / "spec_ops" / "pretrained"

    def parameters(name: str) -> int:
        with safe_open(folder / f"{name}.safetensors", "pt") as file:
            return sum(file.get_tensor(key).numel() for key in file.keys() if file.get_tensor(key).is_floating_point())  # noqa: SIM118

    start = " ".join((DOCS / "index.md").read_text(encoding="utf-8").split())
    assert f"a byte-level target with {parameters('target') / 1e6:.1f} million parameters" in start


def row(model: str = "m+eagle3", bs: int = 1, **more) -> dict:
    same = {"model": model, "bs": bs, "context": 1024, "layers": 32, "steps": 3, "round": "speculative", "backend": "auto"}
    same |= {"passes": True, "ms": 5.0, "floor_ms": 4.1, "weights_floor_ms": 4.0, "kv_floor_ms": 0.1, "kernels": 421.0}
    same |= {
        "matmul_ms": 4.3,
        "attention_ms": 0.4,
        "other_ms": 0.2,
        "gaps_ms": 0.1,
        "accept_length": 3.0,
        "tokens_per_s": 600.0,
    }
    same |= {"graph_launches": 1.0, "host_launches": 0.0, "host_syncs": 0.0, "compile_cold_s": 55.3, "compile_warm_s": 12.2}
    return same | more


def write(folder: Path, name: str, rows: list[dict], **more) -> None:
    text = json.dumps({"environment": {"machine": "NVIDIA H200", "commit": "0123abc"}, "jobs": 6, **more, "rows": rows})
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def lines(text: str) -> list[list[str]]:
    """Cells of a block's table, without its header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")][2:]


def test_rounds_stand_beside_plain_and_assisted_ones(tmp_path):
    assisted = {
        key: value for key, value in row("m+one-layer", round="assisted", tokens_per_s=15.2).items() if "matmul" not in key
    }
    others = [
        row("m", round="plain", tokens_per_s=250.0),
        assisted,
        row(backend="flashinfer-xqa", ms=9.0),
        row(passes=False, ms=9.0),
    ]
    write(tmp_path, "h200-round", [row(), *others, row(bs=8, ms=6.0, graph_launches=2.0)])
    text = rounds.rounds(tmp_path)
    one = ["m", "1, 1024", "5.00", "4.10", "82%", "0.30", "0.30", "0.20", "0.10", "421", "600", "250", "15"]
    assert lines(text) == [one, ["m", "8, 1024", "6.00", "4.10", "68%", *one[5:11], "", ""]]
    assert "accept length of 3; the last columns are plain" in " ".join(text.split())
    assert "no sync" not in text  # two graphs at batch size 8
    write(tmp_path, "h200-round", [row()])
    assert "no sync" in rounds.rounds(tmp_path)


def test_rounds_that_sample_have_a_table_of_their_own(tmp_path):
    """Beside the greedy ones, which all other tables go on showing."""
    sampled = {"sampled": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    tree = {"topk": 4, "num_tokens": 16}
    others = [row(topk=1, ms=5.2, **sampled), row(topk=1, ms=5.1, penalties=True), row(ms=6.0, **tree)]
    others += [row(ms=6.3, **tree, **sampled), row(topk=1, ms=9.9, passes=False, **sampled)]
    write(tmp_path, "h200-round", [*others, row(topk=1)])  # first, where a table that takes the first row would find them
    write(tmp_path, "h200-round-sampled", [*others, row(topk=1)])
    assert lines(rounds.sampled(tmp_path)) == [
        ["m", "1, 1024", "S=3", "temperature 0.6, top-p 0.9", "5.20", "greedy", "5.00", "1.040"],
        ["m", "1, 1024", "S=3", "greedy, penalties, bias, bitmask", "5.10", "greedy", "5.00", "1.020"],
        ["m", "1, 1024", "S=3, K=4, 16 tokens", "temperature 0.6, top-p 0.9", "6.30", "greedy", "6.00", "1.050"],
    ]
    (line,) = lines(rounds.rounds(tmp_path))
    assert line[2] == "5.00"
    assert lines(rounds.above(tmp_path)) == []
    write(tmp_path, "h200-round-sampled", [row(topk=1)])
    assert "not measured yet" in rounds.sampled(tmp_path)


def test_texts_with_the_flag_and_without(tmp_path):
    """What is claimed of them follows the file."""
    assert "not measured yet" in texts.texts(tmp_path)
    assert texts.equal(tmp_path) is None
    row = {"model": "pair", "way": "chain", "texts": 512, "tokens": 9000, "accept_length": 3.4}
    rows = [
        row | {"invariant": True, "differ": 0, "logits_differ": 0},
        row | {"invariant": True, "way": "alone", "differ": 0},
        row | {"invariant": False, "differ": 90},
        {"model": "pair", "way": "tree", "invariant": True, "error": "none"},
    ]
    for logits, equal in ((0, True), (3, False)):
        rows[0]["logits_differ"] = logits
        (tmp_path / "h200-invariance.json").write_text(json.dumps({"rows": rows}))
        table = texts.texts(tmp_path)
        assert f"| shipped pair | chain | 0 of 512 | {logits} of 9000 | 90 of 512 | 3.40 |" in table
        assert "| shipped pair | alone | 0 of 512 |  |  | 3.40 |" in table
        assert texts.equal(tmp_path) is equal


def test_what_the_flag_costs_a_prompt(tmp_path):
    assert rounds.invariant(tmp_path).endswith("not measured yet.")
    times = {"layers": 8, "ms": 80.0, "invariant_ms": 90.0, "ratio": 1.125}
    told = [{"what": what, **times} for what in ("prompt of 8192", "round")]
    (tmp_path / "h200-invariance.json").write_text(json.dumps({"rows": [], "price": told}))
    text = rounds.invariant(tmp_path)
    assert text.count("90.0 ms instead of 80.0 (1.12) in a model of 8") == 1
    assert "A prompt of 8192 tokens takes" in text


def test_requests_on_several_gpus(tmp_path):
    rows = [{"requests": 1000, "equal": equal, "steps": 3, "largest_gap": 0.1} for equal in (1000, 1000, 956)]
    (tmp_path / "h200-sglang-requests.json").write_text(json.dumps({"rows": rows}))
    assert "H100s" not in peers.requests_of_sglang(tmp_path)
    row = {"requests": 400, "steps": 3, "tp": 1, "accept_length": 3.29, "equal": 400, "largest_gap": 0.0}
    two = row | {"tp": 2, "accept_length": 3.31, "equal": 294, "largest_gap": 0.271, "typical_gap": 5.25}
    rows = [row, row | {"steps": 0}, two, two | {"steps": 0, "equal": 7}]
    (tmp_path / "h100x2-sglang-requests.json").write_text(json.dumps({"rows": rows}))
    text = " ".join(peers.requests_of_sglang(tmp_path).split())
    assert text.count("The shipped pair on 2 H100s (`--tp`") == 1
    assert "294 of 400 texts were the same as on one, with 3.31 tokens a round (3.29 on one)" in text
    assert "differ by at most 0.27" in text
    assert "H200s" not in text
    plain = row | {"steps": 0, "requests": 100, "equal": 100}
    rows = [plain, row | {"equal": 53, "largest_gap": 0.3}, two | {"requests": 100, "steps": 0}]
    rows += [two | {"requests": 100, "equal": 44, "largest_gap": 0.1}]
    (tmp_path / "h200x2-sglang-requests.json").write_text(json.dumps({"rows": rows}))
    text = " ".join(peers.requests_of_sglang(tmp_path).split())
    assert "with a chain of 3 drafts 44 of 100 texts are the plain texts of one GPU. With a chain on one GPU 53 are." in text
    assert text.count("Several GPUs add up") == 1
    assert "differ by at most 0.30" in text


def test_requests_with_trees(tmp_path):
    rows = [{"requests": 1000, "equal": equal, "steps": 3, "largest_gap": 0.1} for equal in (1000, 1000, 956)]
    (tmp_path / "h200-sglang-requests.json").write_text(json.dumps({"rows": rows}))
    assert "trees" not in peers.requests_of_sglang(tmp_path)
    row = {"requests": 200, "steps": 0, "equal": 200, "largest_gap": 0.0}
    chain = row | {"steps": 4, "accept_length": 3.8, "equal": 185, "largest_gap": 0.1}
    tree = chain | {"branches": 4, "nodes": 12, "accept_length": 4.4, "equal": 168, "largest_gap": 0.2}
    (tmp_path / "h200-sglang-trees.json").write_text(json.dumps({"rows": [row, tree, chain]}))
    text = " ".join(peers.requests_of_sglang(tmp_path).split())
    assert "emits 4.40 tokens a round, with chains of 4 drafts 3.80. 168 and 185 of 200 texts are the plain ones" in text
    assert "differ by at most 0.20 where they part" in text


def test_sampling_stands_beside_the_fastest_of_flashinfer(tmp_path):
    assert "not measured yet" in sampling.sampling(tmp_path)

    def one(kernel: str, us: float, **more) -> dict:
        case = {"job": "draw", "vocab": 128256, "rows": 4, "setting": "top-p", "logits": "peaked", "floor_us": 0.25}
        return case | {"kernel": kernel, "us": us} | more

    rows = [one("reading alone", 2.0), one("spec_ops", 10.0), one("flashinfer", 50.0), one("flashinfer, one number", 30.0)]
    rows += [one("torch", 200.0), one("spec_ops", 8.0, vocab=32000), one("flashinfer", 16.0, vocab=32000)]
    rows += [one("spec_ops", 9.0, job="accept", rows=32), one("spec_ops, block", 11.0, job="accept", rows=32)]
    write(tmp_path, "h200-sampling", rows)
    text = sampling.sampling(tmp_path)
    assert lines(text) == [
        ["draw", "4", "top-p", "0.25", "2.0", "10.0", "30", "200"],
        ["accept", "32", "top-p", "0.25", "", "9.0", "", ""],
    ]
    assert "draw 2.45 (2.00 to 3.0 over 2 cases)." in " ".join(text.split())


def test_small_pages_stand_beside_pages_of_64(tmp_path):
    def one(us: float, page_size: int, bs: int = 1, **more) -> dict:
        case = {"kind": "gqa", "heads": "64/8", "head_dim": 64, "q_len": 1, "mask": "causal", "lengths": "equal"}
        return case | {"context": 4096, "us": us, "page_size": page_size, "bs": bs} | more

    rows = [one(12.0, 16), one(10.0, 64), one(20.0, 64, 8), one(20.0, 16, 8), one(15.0, 1), one(30.0, 1, 8)]
    write(tmp_path, "h100-kernels-pages", rows)
    rows = [one(us, page_size, kind="mla", heads="16", q_len=16, mask="tree") for us, page_size in ((5.0, 64), (5.5, 1))]
    write(tmp_path, "h200-kernels-pages", rows)
    text = kernels.pages(tmp_path)
    assert lines(text) == [["64/8, 64", "1", "1.10, 1.20", "1.50, 1.50"], ["MLA 16", "16, tree", "", "1.10, 1.10"]]
    assert "over 1 to 2 batches" in " ".join(text.split())


def test_every_profiled_round_says_where_its_time_goes(tmp_path):
    unprofiled = {key: value for key, value in row("m+one-layer", round="assisted").items() if "matmul" not in key}
    others = [row("m", round="plain", gaps_ms=-0.001), row(backend="flashinfer-xqa", attention_ms=0.9), row(passes=False)]
    write(tmp_path, "h200-round", [row(), unprofiled, *others, row(bs=8)])
    same = ["5.00", "4.10", "82%", "0.30"]
    assert lines(rounds.above(tmp_path)) == [
        ["m", "1, 1024", "plain, auto", *same, "0.30", "0.20", "0.00"],
        ["m", "1, 1024", "speculative, flashinfer-xqa", *same, "0.80", "0.20", "0.10"],
        ["m", "1, 1024", "speculative, auto, passes off", *same, "0.30", "0.20", "0.10"],
    ]
    found = load_rounds("h200-round", RESULTS)["rows"]
    told = lines(rounds.rounds(RESULTS)) + lines(rounds.above(RESULTS))
    assert len(told) == sum("matmul_ms" in one for one in found)
    assert all(all(line) for line in lines(rounds.above(RESULTS)))


def test_backends_beside_each_other(tmp_path):
    rows = [row(), row(backend="triton", ms=5.1), row(backend="flashinfer-xqa", ms=4.0)]
    verdict = {"fastest": "flashinfer-xqa", "auto_over_fastest": 1.25, "bs": 1, "context": 1024, "why": "its rank"}
    write(tmp_path, "h200-round-backends", rows, auto=[verdict | {"auto_wins": False}, verdict | {"auto_wins": True}])
    text = rounds.backends(tmp_path)
    assert lines(text) == [["m", "1, 1024", "5.00", "5.10", "4.00"]]
    assert "commit 0123abc" in text
    flat = " ".join(text.split())
    assert "but for 1 of 2 cases: flashinfer-xqa is 1.25 times as fast at batch 1, context 1024 (its rank)" in flat


def test_passes_and_compile_times(tmp_path):
    write(tmp_path, "h200-round", [row(round="naive", passes=False, ms=9.5, host_syncs=8.0), row(round="naive")])
    assert lines(rounds.passes(tmp_path)) == [
        ["m", "1, 1024", "naive", "off", "9.50", "4.10", "421", "1", "0", "8"],
        ["m", "1, 1024", "naive", "on", "5.00", "4.10", "421", "1", "0", "0"],
    ]
    write(tmp_path, "h200-round-compile", [row(), row(layers=8, compile_cold_s=14.6), row(round="naive")])
    assert lines(rounds.compilation(tmp_path)) == [["8", "3", "15", "12"], ["32", "3", "55", "12"]]


def test_an_old_figure_is_found_and_rewritten(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("# x\n\n<!-- figures: accept -->\nold\n<!-- end of figures -->\n\n- y\n  <!-- figures: limits -->\n"
                      "  <!-- end of figures -->\n", encoding="utf-8")  # fmt: skip
    assert published.main(["--check", "--document", str(readme)]) == 1
    assert "old" in readme.read_text(encoding="utf-8")
    assert published.main(["--document", str(readme)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert "old" not in text
    assert lines(text)[1][1:] == ["4", "3.42"]
    assert "\n  On one request" in text
    assert published.main(["--check", "--document", str(readme)]) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["<!-- figures: accept -->\n", "<!-- figures: accept -->\n<!-- figures: accept -->\n<!-- end of figures -->\n",
     "<!-- figures: nonsense -->\n<!-- end of figures -->\n"],
)  # fmt: skip
def test_broken_blocks(text):
    with pytest.raises(ValueError, match="published"):
        published.updated(text, RESULTS)


def test_sglangs_fastest_measurement_counts(tmp_path):
    found = {
        "rounds": [
            {"bs": 1, "context": 8, "backend": "fa3", "ms": [7.0, 6.0]},
            {"bs": 1, "context": 8, "backend": "x", "ms": [1.0]},
        ]
    }
    (tmp_path / "h200-peers.json").write_text(json.dumps(found), encoding="utf-8")
    assert sorted(peers.sglang(tmp_path, 1, 8)) == [6.0, 7.0]
    assert min(peers.sglang(RESULTS, 1, 1024)) == chart.data()["ms a round"]["batch 1"][chart.SGLANG]


def test_mixtures_stand_beside_their_floor_and_another_engine(tmp_path):
    case = {"context": 8, "round": "plain", "passes": True, "ms": 3.0, "floor_ms": 2.0}
    dense = case | {"model": "dense", "bs": 1}
    big, small = (case | {"model": "m+eagle3", "bs": bs, "touched_experts": 7.6} for bs in (16, 2))
    stored = small | {"weights": "float8_block"}
    slow = small | {"passes": False, "ms": 9.0}
    write(tmp_path, "h200-models", [dense, big, stored, slow, small | {"peer": "an engine", "peer_ms": 4.04}])
    assert lines(rounds.mixtures(tmp_path)) == [
        ["m", "2, 8", "plain", "8", "2.00", "3.00", "1.50", "4.0"],
        ["m", "16, 8", "plain", "8", "2.00", "3.00", "1.50", ""],
    ]


def test_claims_link_to_their_files():
    text = summary.claims(RESULTS)
    assert len(re.findall(r"^\d\. ", text, re.MULTILINE)) == 5
    for line in text.splitlines():
        links = re.findall(r"\]\((benchmarks/results/[^)]+)\)", line)
        assert links
        assert all((ROOT / link).is_file() for link in links)
