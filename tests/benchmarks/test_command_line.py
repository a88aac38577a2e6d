"""The command line of the benchmarks, run in process: what it prints, its exit codes, its errors."""

from __future__ import annotations

import importlib.util
import json
import os
import re

import pytest
import torch

from spec_ops.decoding import Generator
from tests.helpers.command_line import refusal
from tests.helpers.command_line import run_benchmarks as run


@pytest.mark.slow
def test_held_out_accept_length(tmp_path):
    """A small sample of what `python -m benchmarks accept` prints for more prompts; the promise is 2.5."""
    small = ["--prompts", "8", "--prompt-tokens", "128", "--max-new-tokens", "64", "--device", "cpu"]
    path = tmp_path / "figures" / "accept.json"
    result = run("accept", *small, "--json", str(path))
    assert result.exit_code == 0, result.output
    length = float(re.search(r"accept length ([\d.]+)", result.output).group(1))
    assert length >= 2.5
    figures = json.loads(path.read_text())
    assert figures["rows"][0]["accept_length"] == length
    assert figures["environment"]["torch"] == torch.__version__
    row, shown = figures["rows"][0], result.output
    assert row["accept_length"] == round(
        sum(n * count for n, count in enumerate(row["histogram"], 1)) / sum(row["histogram"]), 3
    )
    assert len(row["accept_lengths"]) == 8
    assert 1 > row["acceptance_rates"][0] > row["acceptance_rates"][2] > 0
    assert len(row["acceptance_rates"]) == 3
    for position, rate in enumerate(row["acceptance_rates"], 1):
        assert f"{position}: {rate:.1%}" in shown
    few = ["--prompts", "2", "--prompt-tokens", "32", "--max-new-tokens", "8", "--device", "cpu"]
    plain = run("accept", *few, "--plain")
    assert "plain: accept length 1.000" in plain.output
    assert "draft: accepted" not in plain.output


@pytest.mark.parametrize(
    ("args", "option", "problem"),
    [
        (["accept", "--device", "meta"], "--device", "got 'meta'"),
        (["kernels", "--device", "mps"], "--device", "got 'mps'"),
        (["accept", "--tree-width", "300", "--steps", "1"], "--tree-width", "the draft's vocabulary of 128, got 300"),
        (["accept", "--tree-width", "2", "--block-verification"], "--block-verification", "must be False or None for a tree"),
        (["accept", "--prompts", "100000"], "--prompts", "at most"),
        (["accept", "--corpus", "absent"], "--corpus", "does not exist"),
        (["accept", "--draft", "."], "--draft", "needs --model"),
        (["accept", "--set", "top_k=3"], "--set", "needs --model"),
        (["accept", "--model", "."], "--model", "needs --draft (or --plain)"),
        (["accept", "--model", "org/name", "--plain"], "--model", "hf download org/name"),
        (["accept", "--model", ".", "--draft", ".", "--pair", "."], "--model", "no --pair"),
        (["accept", "--chat"], "--chat", "needs --model and --prompt-lines"),
        (["accept", "--prompt-lines", "absent"], "--prompt-lines", "does not exist"),
        (["accept", "--prompt-lines", "README.md", "--prompt-tokens", "9"], "--prompt-lines", "leave out"),
        (["accept", "--prompt-lines", os.devnull], "--prompt-lines", "at least one line"),
        (["accept", "--top-p", "0"], "--top-p", "0"),
        (["accept", "--min-p", "2"], "--min-p", "less than or equal to 1"),
        (["accept", "--json", "."], "--json", "must be a file, got the folder ."),
        (["accept", "--json", "/dev/null/x.json"], "--json", "which is a file"),
        (["kernels", "--out", "."], "--out", "must be a file"),
        (["kernels", "--plot", "/dev/null/x.png"], "--plot", "which is a file"),
        (["round", "--json", "."], "--json", "must be a file"),
        (
            ["round", "--device", "cpu", "--weights", "int3"],
            "--weights",
            "must be one of ['float8', 'float8_block', 'float8_dynamic', 'float8_block_dynamic', 'int4', 'nvfp4', 'mxfp4', "
            "'mxfp4_experts']",
        ),
        (["round", "--timeline", "."], "--timeline", "must be a file"),
        (["tune", "--json", "."], "--json", "must be a file"),
        (["ahead", "--kernel", "none", "--hashes", "."], "--hashes", "must be a file"),
        (["ahead", "--kernel", "none", "--hashes", "/dev/null/x.json"], "--hashes", "which is a file"),
        (["sglang", "--backend", "fa3", "--logs", "README.md"], "--logs", "must be a folder, got the file README.md"),
        (["sglang", "--backend", "fa3", "--logs", "/dev/null/x"], "--logs", "which is a file"),
        (["tune", "--table", "absent"], "--table", "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_before_anything_runs(monkeypatch, args, option, problem):
    def ran(*_args, **_options):
        raise AssertionError("a model ran")

    monkeypatch.setattr(Generator, "generate", ran)
    assert problem in refusal(run(*args), option)


@pytest.mark.parametrize("args", [["kernels", "--plot"], ["round", "--timeline"]])
def test_a_plot_needs_matplotlib_before_it_measures(monkeypatch, tmp_path, args):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command, option = args
    line = refusal(run(command, option, str(tmp_path / "x.png")), option)
    assert 'needs matplotlib, which is not installed: pip install ".[bench]" in a checkout of spec_ops' in line


def test_a_file_without_permission_is_found_early(monkeypatch, tmp_path):
    """By `os.access`: for root every file can be written to."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert f"{tmp_path} cannot be written to" in refusal(run("accept", "--json", f"{tmp_path}/a/b.json"), "--json")


def test_few_new_tokens_are_measured():
    """The warm-up asks for no more than the prompts have room for."""
    result = run("accept", "--prompts", "1", "--prompt-tokens", "16", "--max-new-tokens", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
