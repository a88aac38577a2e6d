"""README.md: short, its blocks run, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.forked import run_code

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

TINY_CHECKPOINTS = """
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = {chr(code): code for code in range(256)}
tokenizer = Tokenizer(models.BPE(words, []))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
torch.manual_seed(0)
for name, layers in (("target", 2), ("draft", 1)):
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers)).save_pretrained(f"path/to/{name}")
    tokenizer.save_pretrained(f"path/to/{name}")
"""


def run(code: str, folder: Path) -> str:
    done = run_code(code, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_is_short_and_holds_no_run_logistics():
    assert len(README.splitlines()) <= 120
    assert not re.findall(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,10}\b", README), "commit ids belong into docs/performance"


@pytest.mark.slow
def test_hugging_face_block_runs(tmp_path):
    """With tiny checkpoints in place of the reader's, and on the CPU."""
    pytest.importorskip("transformers")
    block = next(block for block in BLOCKS if "from_pretrained" in block)
    assert len(block.strip().splitlines()) <= 10
    run(TINY_CHECKPOINTS, tmp_path)
    out = run(f"{block.replace('cuda', 'cpu')}\nprint(ids.shape)", tmp_path)
    assert "torch.Size([1, 139])" in out  # 11 characters, 128 new tokens


def test_ops_block_runs(tmp_path):
    block = next(block for block in BLOCKS if "mha_target_verify" in block)
    assert len(block.strip().splitlines()) <= 10
    assert "torch.Size([2, 4, 8, 64])" in run(block, tmp_path)


def test_the_versions_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    least, end = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project).groups()
    assert f"| 3.{least} to 3.{int(end) - 1} |" in README
    for package in ("torch", "transformers"):
        (version,) = set(re.findall(rf'"{package}>=([\d.]+)"', project))
        assert re.search(rf"^\| {package} \|.*\| {version} and newer \|$", README, re.MULTILINE), package


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert len(links) > 15
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_no_install_command_names_a_package_that_no_index_has():
    """The hint of messages is made in one place, `spec_ops/_extras.py`; docs and examples say the same."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    files += (ROOT / "spec_ops").rglob("*.py")
    wrong = re.compile(r"pip\s+install\s+['\"]?spec[-_]ops|\bspec-ops\[")
    assert [path.name for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []


def test_the_page_has_its_parts_in_order():
    """What it is, a picture, two commands; then from the first use to where to read on."""
    sections = ["Install", "Hugging Face models", "The operators", "What it gives", "What runs where", "Supported models"]
    sections += ["When not to use it", "Read on", "Licence and citation"]
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == sections
    opening = README[: README.index("\n## ")]
    assert opening.index("docs/images/chart.svg") < opening.index("```bash")
    assert re.findall(r"^make (\w+)", opening, re.MULTILINE) == ["demo", "test"]
    first = README.split("\n\n")[1]
    assert len(re.findall(r"[.!?](?:\s|$)", first)) == 1, "one sentence"
