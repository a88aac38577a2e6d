"""Every example runs, as a user would run it; each asserts what it shows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.forked import run_ranks, run_script
from tests.helpers.paths import EXAMPLES, ROOT

ARGUMENTS = {
    "attention_ops.py": [],
    "chain_and_tree.py": ["--new-tokens", "32"],
    "compile_your_model.py": ["--backend", "aot_eager"],
    "json_grammar.py": ["--topk", "2"],
    "sampled_decoding.py": ["--draws", "256"],
    "tensor_parallel.py": ["--new-tokens", "16"],
    "transformers_generate.py": ["--new-tokens", "24"],
}
RANKS = {"tensor_parallel.py": 2}
TESTED_ELSEWHERE = {"train_tiny.py", "naive_round.py", "blackwell_eagle3.py", "blackwell_mtp_mla.py"}  # by their own test files


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS) | TESTED_ELSEWHERE


@pytest.mark.slow
def test_the_grammar_example_says_what_to_install(tmp_path):
    (tmp_path / "xgrammar.py").write_text("raise ImportError('hidden')")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "json_grammar.py")], capture_output=True, text=True, check=False, env=os.environ | path
    )
    assert run.returncode == 1
    assert run.stderr.strip() == "this example needs xgrammar: pip install xgrammar"


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_example(name):
    if name == "json_grammar.py":
        pytest.importorskip("xgrammar")
    if name in RANKS:
        run = run_ranks(EXAMPLES / name, *ARGUMENTS[name], size=RANKS[name])
    else:
        run = run_script(EXAMPLES / name, *ARGUMENTS[name])
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
