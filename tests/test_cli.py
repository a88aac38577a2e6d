"""The command line, run in process: what it prints, its exit codes, its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from spec_ops import cli
from spec_ops.decoding import Generator


def run(*args: str):
    return CliRunner().invoke(cli.app, list(args))


def test_help_names_the_commands():
    shown = subprocess.run([sys.executable, "-m", "spec_ops", "--help"], capture_output=True, text=True, check=True).stdout
    assert "generate" in shown
    assert "bench" in shown


@pytest.mark.parametrize("shape", [[], ["--steps", "2", "--tree-width", "3"]], ids=["chain", "tree"])
def test_compare_finds_equal_texts(shape):
    result = run("generate", "--compare", "--max-new-tokens", "48", "--device", "cpu", *shape)
    assert result.exit_code == 0, result.output
    assert "texts are equal" in result.output
    plain, speculative = (int(n) for n in re.search(r"\((\d+) to (\d+)\)", result.output).groups())
    assert plain == 47
    assert speculative < 0.7 * plain
    assert result.output.count("class Matrix:") == 2


def test_compare_fails_on_different_texts(monkeypatch):
    class Wrong(Generator):
        def generate(self, *args, **kwargs):
            result = super().generate(*args, **kwargs)
            if self.draft is not None:
                result.tokens[0][-1] ^= 1
            return result

    monkeypatch.setattr(cli, "Generator", Wrong)
    result = run("generate", "--compare", "--max-new-tokens", "8", "--device", "cpu")
    assert result.exit_code == 1
    assert "texts differ" in result.output


def test_generate_streams_any_prompt(tmp_path):
    """Multi-byte characters, rich markup in the text, a prompt file; plain and sampled."""
    prompt = tmp_path / "prompt.py"
    text = f"# Füße [bold] → x{' ' * 80}long line\nx[:end:] = ["
    prompt.write_text(text, encoding="utf-8")
    for options in (["--plain"], ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--seed", "3"]):
        result = run("generate", "--prompt-file", str(prompt), "--max-new-tokens", "16", "--device", "cpu", *options)
        assert result.exit_code == 0, result.output
        assert text in result.output


def test_prompt_file_that_is_not_text(tmp_path):
    prompt = tmp_path / "prompt.bin"
    prompt.write_bytes(b"\xff\xfe")
    result = run("generate", "--prompt-file", str(prompt), "--device", "cpu")
    assert result.exit_code == 2
    assert "--prompt-file" in result.output


def test_held_out_accept_length(tmp_path):
    """A small sample of what `python -m spec_ops bench accept` prints for more prompts; the promise is 2.5."""
    small = ["--prompts", "8", "--prompt-tokens", "128", "--max-new-tokens", "64", "--device", "cpu"]
    path = tmp_path / "figures" / "accept.json"
    result = run("bench", "accept", *small, "--json", str(path))
    assert result.exit_code == 0, result.output
    length = float(re.search(r"accept length ([\d.]+)", result.output).group(1))
    assert length >= 2.5
    figures = json.loads(path.read_text())
    assert figures["rows"][0]["accept_length"] == length
    assert figures["environment"]["torch"] == torch.__version__
    plain = run("bench", "accept", *small, "--plain")
    assert "plain: accept length 1.000" in plain.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["generate", "--dtype", "int8"], "--dtype"),
        (["generate", "--device", "nonsense"], "--device"),
        (["generate", "--steps", "0"], "--steps"),
        (["generate", "--tree-width", "2", "--tree-tokens", "99"], "--tree-tokens"),
        (["generate", "--compare", "--plain"], "--compare"),
        (["generate", "--compare", "--dtype", "bfloat16"], "--compare"),
        (["generate", "--top-p", "1.5"], "--top-p"),
        (["generate", "--top-p", "0"], "--top-p"),
        (["generate", "--temperature", "inf"], "--temperature"),
        (["generate", "--seed", "9" * 20], "--seed"),
        (["bench", "accept", "--prompts", "100000"], "--prompts"),
    ],
)
def test_bad_options_are_named(args, named):
    result = run(*args)
    assert result.exit_code == 2
    assert named in result.output


def test_missing_pair_names_the_file(tmp_path):
    result = run("generate", "--pair", str(tmp_path), "--device", "cpu")
    assert isinstance(result.exception, FileNotFoundError)
    assert "config.json" in str(result.exception)
