"""`generate --tp`: processes that share a pair, and what they cannot share."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import spec_ops
from tests.helpers.command_line import refusal
from tests.helpers.command_line import run_spec_ops as run
from tests.helpers.forked import run_ranks

SMALL = ("generate", "--device", "cpu", "--max-new-tokens", "8")


@pytest.mark.slow
def test_two_processes_print_the_text_of_one(monkeypatch, capfd):
    """Once, and in the colours of nobody: the second one is silent. Of torchrun's processes."""
    options = (*SMALL, "--tp", "2")
    monkeypatch.setattr(sys, "argv", ["spec-ops", *options])
    started = run(*options)
    shared = capfd.readouterr()
    assert started.exit_code == 0, shared.err
    alone = run(*SMALL)

    def text(printed: str) -> str:
        return re.search(r"^speculative.*?\n(.*?)\n[^\n]*┏", printed, re.DOTALL | re.MULTILINE)[1]

    assert shared.out.startswith("2 ranks, cpu, float32")
    assert shared.out.count("class Matrix:") == 1
    assert text(shared.out) == text(alone.stdout)


def test_batch_invariant_texts_of_two_processes():
    """Of processes that torchrun could have started."""
    few = ("--max-new-tokens", "6", "--prompt", "x = ")
    options = ("generate", "--device", "cpu", *few, "--tp", "2", "--invariant", "--dtype", "bfloat16", "--compare")
    done = run_ranks(Path(spec_ops.__file__).with_name("__main__.py"), *options, size=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks, cpu, bfloat16")
    assert "texts are equal" in done.stdout


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--tp", "2", "--quantize", "int8"), "leave out --quantize"),
        (("--tp", "3"), "`num_heads` must be a multiple of the 3 ranks"),
    ],
)
def test_what_is_not_shared(options, line):
    assert line in refusal(run(*SMALL, *options), "--tp")


def test_torchrun_with_another_number(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "must be the number of torchrun's processes, 4, got 2" in refusal(run(*SMALL, "--tp", "2"), "--tp")


def test_half_of_torchruns_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert "the environment must have RANK" in refusal(run(*SMALL, "--tp", "2"), "--tp")
