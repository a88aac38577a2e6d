"""The README's code block runs, its measured figures are those of `benchmarks/results`, and its sizes those of the files."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.kernels import roofline

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"

spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme_tables.py")
readme_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme_tables)

# What no benchmark repeats: how long the test suite, training and FlashInfer's compilations take, and the size of the pair,
# checked below. docs/decisions.md is a record of what was tried, with figures of trees that are gone.
NOT_FROM_RESULTS = {
    "README.md": {"11 minutes", "8 minutes", "15 MB"},
    "backends.md": {"26 s", "165 s", "9 minutes", "40 s"},
}
WRITTEN = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "decisions.md")]
UNITS = r"ms|us|µs|s|seconds?|minutes?|tokens/s|[TG]B/s|[KMGT]B|times|%"


def test_code_block_runs():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert "tokens a round" in run.stdout


@pytest.mark.parametrize("path", readme_tables.DOCUMENTS, ids=lambda path: path.name)
def test_figures_come_from_the_results(path):
    text = path.read_text(encoding="utf-8")
    blocks = {"README.md": {"accept", "kernels", "limits", "rounds"}, "backends.md": {"choice", "planned"}}[path.name]
    assert blocks <= {name for _, name, _ in readme_tables.BLOCK.findall(text)}
    assert readme_tables.updated(text, RESULTS) == text, "run python benchmarks/readme_tables.py"


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_no_measured_figure_stands_elsewhere(path):
    text = path.read_text(encoding="utf-8")
    by_hand = re.sub(r"```.*?```", "", readme_tables.BLOCK.sub("", text), flags=re.DOTALL)
    found = re.findall(rf"\b\d[\d.,]*\s+(?:{UNITS})(?![\w/])|\b\d[\d.]*%", by_hand)
    assert {re.sub(r"\s+", " ", figure) for figure in found} <= NOT_FROM_RESULTS.get(path.name, set())


def test_the_title_of_the_picture_is_that_of_its_file():
    """Redrawn from the file (`python -m benchmarks.kernels.roofline`), whose commit may have been stated after the run."""
    image = pytest.importorskip("PIL.Image")
    found = json.loads((RESULTS / "h200-kernels.json").read_text(encoding="utf-8"))
    with image.open(RESULTS / "h200-kernels.png") as picture:
        assert picture.text["Title"] == roofline.title(found["environment"])
    assert "modified" not in roofline.title(found["environment"])


def test_sizes_of_the_pair():
    folder = ROOT / "spec_ops" / "pretrained"

    def parameters(name: str) -> int:
        with safe_open(folder / f"{name}.safetensors", "pt") as file:
            return sum(file.get_tensor(key).numel() for key in file.keys() if file.get_tensor(key).is_floating_point())  # noqa: SIM118

    text = (
        f"byte-level target ({parameters('target') / 1e6:.1f}M parameters) and EAGLE-3 head ({parameters('draft') / 1e6:.1f}M)"
    )
    assert text in README
    assert f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.0f} MB" in README


def test_no_install_command_names_a_package_that_no_index_has():
    """The hint of messages is made in one place, `spec_ops/_extras.py`; docs and examples say the same."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    files += (ROOT / "spec_ops").rglob("*.py")
    wrong = re.compile(r"pip\s+install\s+['\"]?spec[-_]ops|\bspec-ops\[")
    assert [path.name for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []


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
    text = readme_tables.rounds(tmp_path)
    one = ["m", "1, 1024", "5.00", "4.10", "82%", "0.30", "0.30", "0.20", "0.10", "421", "600", "250", "15"]
    assert lines(text) == [one, ["m", "8, 1024", "6.00", "4.10", "68%", *one[5:11], "", ""]]
    assert "accept length of 3," in text
    assert "no sync" not in text  # two graphs at batch size 8
    write(tmp_path, "h200-round", [row()])
    assert "no sync" in readme_tables.rounds(tmp_path)


def test_every_profiled_round_says_where_its_time_goes(tmp_path):
    unprofiled = {key: value for key, value in row("m+one-layer", round="assisted").items() if "matmul" not in key}
    others = [row("m", round="plain", gaps_ms=-0.001), row(backend="flashinfer-xqa", attention_ms=0.9), row(passes=False)]
    write(tmp_path, "h200-round", [row(), unprofiled, *others, row(bs=8)])
    same = ["5.00", "4.10", "82%", "0.30"]
    assert lines(readme_tables.above(tmp_path)) == [
        ["m", "1, 1024", "plain, auto", *same, "0.30", "0.20", "0.00"],
        ["m", "1, 1024", "speculative, flashinfer-xqa", *same, "0.80", "0.20", "0.10"],
        ["m", "1, 1024", "speculative, auto, passes off", *same, "0.30", "0.20", "0.10"],
    ]
    found = json.loads((RESULTS / "h200-round.json").read_text(encoding="utf-8"))["rows"]
    told = lines(readme_tables.rounds(RESULTS)) + lines(readme_tables.above(RESULTS))
    assert len(told) == sum("matmul_ms" in one for one in found)
    assert all(all(line) for line in lines(readme_tables.above(RESULTS)))


def test_backends_beside_each_other(tmp_path):
    rows = [row(), row(backend="triton", ms=5.1), row(backend="flashinfer-xqa", ms=4.0)]
    verdict = {"fastest": "flashinfer-xqa", "auto_over_fastest": 1.25, "bs": 1, "context": 1024, "why": "its rank"}
    write(tmp_path, "h200-round-backends", rows, auto=[verdict | {"auto_wins": False}, verdict | {"auto_wins": True}])
    text = readme_tables.backends(tmp_path)
    assert lines(text) == [["m", "1, 1024", "5.00", "5.10", "4.00"]]
    assert "commit 0123abc" in text
    flat = " ".join(text.split())
    assert "but for 1 of 2 cases: flashinfer-xqa is 1.25 times as fast at batch 1, context 1024 (its rank)" in flat


def test_passes_and_compile_times(tmp_path):
    write(tmp_path, "h200-round", [row(round="naive", passes=False, ms=9.5, host_syncs=8.0), row(round="naive")])
    assert lines(readme_tables.passes(tmp_path)) == [
        ["m", "1, 1024", "naive", "off", "9.50", "4.10", "421", "1", "0", "8"],
        ["m", "1, 1024", "naive", "on", "5.00", "4.10", "421", "1", "0", "0"],
    ]
    write(tmp_path, "h200-round-compile", [row(), row(layers=8, compile_cold_s=14.6), row(round="naive")])
    assert lines(readme_tables.compilation(tmp_path)) == [["8", "3", "15", "12"], ["32", "3", "55", "12"]]


def test_an_old_figure_is_found_and_rewritten(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("# x\n\n<!-- figures: accept -->\nold\n<!-- end of figures -->\n\n- y\n  <!-- figures: limits -->\n"
                      "  <!-- end of figures -->\n", encoding="utf-8")  # fmt: skip
    assert readme_tables.main(["--check", "--document", str(readme)]) == 1
    assert "old" in readme.read_text(encoding="utf-8")
    assert readme_tables.main(["--document", str(readme)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert "old" not in text
    assert lines(text)[1][1:] == ["4", "3.42"]
    assert "\n  On one request" in text
    assert readme_tables.main(["--check", "--document", str(readme)]) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["<!-- figures: accept -->\n", "<!-- figures: accept -->\n<!-- figures: accept -->\n<!-- end of figures -->\n",
     "<!-- figures: nonsense -->\n<!-- end of figures -->\n"],
)  # fmt: skip
def test_broken_blocks(text):
    with pytest.raises(ValueError, match="readme_tables"):
        readme_tables.updated(text, RESULTS)
