"""The command line, run in process: what it prints, its exit codes, its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_ops
from spec_ops.cli import generate
from spec_ops.cli.options import parse_device
from spec_ops.decoding import Generator
from tests.helpers.command_line import refusal
from tests.helpers.command_line import run_spec_ops as run


def test_help_names_the_commands():
    shown = subprocess.run([sys.executable, "-m", "spec_ops", "--help"], capture_output=True, text=True, check=True).stdout
    assert "generate" in shown
    assert "explain" in shown


@pytest.mark.parametrize("shape", [[], ["--steps", "2", "--tree-width", "3"]], ids=["chain", "tree"])
def test_compare_finds_equal_texts(shape):
    result = run("generate", "--compare", "--max-new-tokens", "12", "--device", "cpu", *shape)
    assert result.exit_code == 0, result.output
    assert "texts are equal" in result.output
    plain, speculative = (int(n) for n in re.search(r"\((\d+) to (\d+)\)", result.output).groups())
    assert plain == 11
    assert speculative < 0.7 * plain
    length, rates = re.search(
        r"accept length ([\d.]+) tokens a round; drafts accepted by position: (.*)", result.output
    ).groups()
    assert float(length) == pytest.approx(plain / speculative, abs=0.01)
    shown = [int(rate) for rate in re.findall(r"(\d+)%", rates)]
    assert len(shown) == (2 if shape else 3)
    assert 100 >= shown[0] >= shown[-1] > 0
    assert result.output.count("class Matrix:") == 2


@pytest.mark.parametrize("lengths", ["auto", "0,2"])
def test_lengths_that_are_chosen(lengths):
    """Costs are given, so that no time decides."""
    options = ["--lengths", lengths, "--draft-cost", "0.1", "--max-new-tokens", "12", "--device", "cpu"]
    result = run("generate", "--compare", *options)
    assert result.exit_code == 0, result.output
    assert "texts are equal" in result.output
    shown = "0, 1, 3, 5 or 7" if lengths == "auto" else "0 or 2"
    assert f"chains of {shown} draft steps, chosen for each round" in " ".join(result.output.split())
    allowed = {"0", "1", "3", "5", "7"} if lengths == "auto" else {"0", "2"}
    chosen = re.search(r"draft steps of rounds: ((?:\d+ x\d+(?:, )?)+)", " ".join(result.output.split())).group(1)
    counts = dict(part.split(" x") for part in chosen.strip(", ").split(", "))
    assert counts.keys() <= allowed
    assert sum(map(int, counts.values())) == int(re.search(r"\(11 to (\d+)\)", result.output).group(1))


def test_compare_fails_on_different_texts(monkeypatch):
    class Wrong(Generator):
        def generate(self, *args, **kwargs):
            result = super().generate(*args, **kwargs)
            if self.draft is not None:
                result.tokens[0][-1] ^= 1
            return result

    monkeypatch.setattr(generate, "Generator", Wrong)
    result = run("generate", "--compare", "--max-new-tokens", "8", "--device", "cpu")
    assert result.exit_code == 1
    assert "texts differ" in result.output


def test_generate_streams_any_prompt(tmp_path):
    """Multi-byte characters, rich markup in the text, a prompt file; plain and sampled."""
    prompt = tmp_path / "prompt.py"
    text = f"# Füße [bold] → x{' ' * 80}long line\nx[:end:] = ["
    prompt.write_text(text, encoding="utf-8")
    for options in (["--plain"], ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--seed", "3"]):
        result = run("generate", "--prompt-file", str(prompt), "--max-new-tokens", "8", "--device", "cpu", *options)
        assert result.exit_code == 0, result.output
        assert text in result.output


@pytest.mark.parametrize(("wanted", "threads"), [(None, [1]), ("2", [])])
def test_the_shipped_pair_takes_one_thread_unless_told_otherwise(wanted, threads, monkeypatch):
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    result = run("generate", "--max-new-tokens", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert given == threads


def test_generate_with_penalties():
    """They arrive in both ways of decoding, and make another text."""
    texts, shown = [], "greedy, repetition penalty 1.5, presence penalty 0.5, frequency penalty 0.1"
    for penalties in ([], ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "0.1"]):
        result = run("generate", "--compare", "--max-new-tokens", "12", "--device", "cpu", *penalties)
        assert result.exit_code == 0, result.output
        assert "texts are equal" in result.output
        assert (shown in result.output) == bool(penalties)
        texts.append(result.output.split("rows, columns):\n")[-1])
    assert texts[0] != texts[1]


def test_prompt_file_that_is_not_text(tmp_path):
    prompt = tmp_path / "prompt.bin"
    prompt.write_bytes(b"\xff\xfe")
    result = run("generate", "--prompt-file", str(prompt), "--device", "cpu")
    assert result.exit_code == 2
    assert "--prompt-file" in result.output


def refused(*args: str, option: str) -> str:
    return refusal(run(*args), option)


@pytest.mark.parametrize(
    ("args", "option", "problem"),
    [
        (["generate", "--dtype", "int8"], "--dtype", "'int8'"),
        (["generate", "--device", "nonsense"], "--device", "must be cpu, cuda or cuda:N, got 'nonsense'"),
        (["generate", "--device", "meta"], "--device", "must be cpu, cuda or cuda:N, got 'meta'"),
        (["generate", "--device", "mps"], "--device", "must be cpu, cuda or cuda:N, got 'mps'"),
        (["generate", "--device", "cpu:1"], "--device", "must be cpu, cuda or cuda:N, got 'cpu:1'"),
        (["explain", "--device", "meta"], "--device", "got 'meta'"),
        (["generate", "--steps", "0"], "--steps", "1"),
        (
            ["generate", "--tree-width", "4", "--tree-tokens", "100"],
            "--tree-tokens",
            "--tree-tokens must be in [2, 37], got 100",
        ),
        (["generate", "--tree-tokens", "4"], "--tree-tokens", "is for trees: a --tree-width above 1"),
        (["generate", "--tree-width", "300", "--steps", "1"], "--tree-width", "the draft's vocabulary of 128, got 300"),
        (["generate", "--lengths", "few"], "--lengths", "must be auto, or chain lengths between commas, such"),
        (["generate", "--lengths", ""], "--lengths", "got ''"),
        (["generate", "--lengths", "3"], "--lengths", "must be a list of 2 to 8 chain lengths, got (3,)"),
        (["generate", "--lengths=-1,3"], "--lengths", "--lengths[0] must be an int of at least 0, got -1"),
        (["generate", "--lengths", "1,3", "--steps", "5"], "--steps", "the longest of --lengths [1, 3], got 5"),
        (["generate", "--lengths", "auto", "--tree-width", "2"], "--lengths", "must be None for a tree, got [0, 1, 3, 5, 7]"),
        (["generate", "--draft-cost", "0.1"], "--draft-cost", "must be None without --lengths, got 0.1"),
        (["generate", "--lengths", "auto", "--draft-cost", "0"], "--draft-cost", "(0, 10], got 0.0"),
        (["generate", "--compare", "--plain"], "--compare", "greedy"),
        (["generate", "--compare", "--dtype", "bfloat16"], "--compare", "float32"),
        (["generate", "--top-p", "1.5"], "--top-p", "1"),
        (["generate", "--top-p", "0"], "--top-p", "0"),
        (["generate", "--repetition-penalty", "0"], "--repetition-penalty", "must be a finite number above 0, got 0.0"),
        (["generate", "--presence-penalty", "3"], "--presence-penalty", "must be a number in [-2, 2], got 3"),
        (["generate", "--frequency-penalty", "nan"], "--frequency-penalty", "must be a number in [-2, 2], got nan"),
        (["generate", "--temperature", "inf"], "--temperature", "inf"),
        (["generate", "--seed", "9" * 20], "--seed", "9" * 20),
        (["generate", "--prompt", "a\udcff"], "--prompt", "surrogates"),
        (["generate", "--prompt-file", "."], "--prompt-file", "is a directory"),
        (["generate", "--prompt-file", "absent"], "--prompt-file", "does not exist"),
        (["generate", "--model", "org/name", "--plain"], "--model", "hf download org/name --local-dir FOLDER"),
        (["generate", "--model", "absent", "--plain"], "--model", "must be a folder, got 'absent'"),
        (["generate", "--model", ".", "--draft", "org/name"], "--draft", "hf download org/name"),
        (["generate", "--model", "."], "--model", "needs --draft"),
        (["generate", "--draft", "."], "--draft", "needs --model"),
        (["generate", "--set", "top_k=3"], "--set", "needs --model"),
        (["generate", "--pair", "absent"], "--pair", "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_before_anything_runs(monkeypatch, args, option, problem):
    def ran(*_args, **_options):
        raise AssertionError("a model ran")

    monkeypatch.setattr(Generator, "generate", ran)
    assert problem in refused(*args, option=option)


def test_the_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"spec-ops {spec_ops.__version__}\n")


def test_the_first_cpu_is_the_cpu():
    assert parse_device("cpu:0") == torch.device("cpu")


def test_a_drawn_seed_repeats_the_text():
    def sampled(*options: str) -> tuple[str, str]:
        result = run("generate", "--temperature", "1", "--max-new-tokens", "12", "--device", "cpu", *options)
        assert result.exit_code == 0, result.output
        header, _, text = result.output.partition("speculative ")
        return re.search(r"seed (\d+)", header).group(1), text.partition("new tokens")[0]

    seed, text = sampled()
    assert sampled("--seed", seed) == (seed, text)
    other, _ = sampled()
    assert other != seed


def test_missing_pair_names_the_file(tmp_path):
    line = refused("generate", "--pair", str(tmp_path), "--device", "cpu", option="--pair")
    assert f"checkpoint {tmp_path / 'config.json'}: no such file" in line


def test_a_damaged_model_is_one_line(tmp_path):
    pytest.importorskip("transformers")
    from tests.helpers.tiny_transformers import make_model, tokenizer

    make_model("llama").save_pretrained(tmp_path)
    arguments = ["generate", "--model", str(tmp_path), "--plain", "--device", "cpu"]
    assert "transformers cannot load it" in refused(*arguments, option="--model")  # it has no tokenizer
    tokenizer().save_pretrained(tmp_path)
    assert "at least one token" in refused(*arguments, "--prompt", "", option="--prompt")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "missing ['model.norm.weight']" in refused(*arguments, "--prompt", "the", option="--model")
    (tmp_path / "config.json").write_text("{")
    assert f"checkpoint {tmp_path / 'config.json'}: must hold JSON" in refused(*arguments, option="--model")


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a tiny model with a tokenizer and a generation_config; returns the arguments that decode with it."""
    pytest.importorskip("transformers")
    from tests.helpers.tiny_transformers import make_model, tokenizer

    def write(**settings) -> list[str]:
        make_model("llama").save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        return ["generate", "--model", str(tmp_path), "--plain", "--device", "cpu", "--prompt", "the thing"]

    return write


def test_the_settings_of_a_checkpoint_are_kept(checkpoint):
    arguments = checkpoint(do_sample=True, temperature=0.7, top_k=9, max_new_tokens=6, eos_token_id=[])
    result = run(*arguments, "--seed", "3")
    assert result.exit_code == 0, result.output
    assert "temperature 0.7, top-k 9, seed 3" in " ".join(result.output.split())
    assert re.search(r"plain\s+│\s+6\s+│", result.output)
    shown = " ".join(run(*arguments, "--temperature", "0.5", "--set", "top_k=0", "--seed", "3").output.split())
    assert "temperature 0.5, seed 3" in shown
    assert "; greedy" in " ".join(run(*arguments, "--temperature", "0").output.split())


def test_what_a_checkpoint_does_to_the_logits(checkpoint):
    """Its penalty is applied, and named; what rounds of the command line do not take is refused and can be switched off."""
    arguments = checkpoint(repetition_penalty=8.0, no_repeat_ngram_size=2, max_new_tokens=48, eos_token_id=[])
    problem = "`repetition_penalty`, `no_repeat_ngram_size` must be off here"
    assert problem in refused(*arguments, option="--model / --set")
    arguments += ["--set", "no_repeat_ngram_size=null"]
    texts = []
    for options, penalized in (([], True), (["--set", "repetition_penalty=1.0"], False)):
        result = run(*arguments, *options)
        assert result.exit_code == 0, result.output
        assert ("repetition penalty 8" in result.output) is penalized
        texts.append(result.output.partition("the thing")[2].partition("new tokens")[0])
    assert texts[0] != texts[1]
    assert "unexpected argument `nonsense`" in refused(*arguments, "--set", "nonsense=1", option="--set")
    assert "must be NAME=VALUE, got 'top_k'" in refused(*arguments, "--set", "top_k", option="--set")
    two = ["--set", "repetition_penalty=null", "--set", "num_return_sequences=2", "--set", "do_sample=true"]
    assert "`num_return_sequences` must be 1" in refused(*arguments, *two, option="--set")


def test_stop_strings_and_limits_of_a_checkpoint(checkpoint):
    arguments = checkpoint(max_new_tokens=12, eos_token_id=[])
    text = run(*arguments).stdout.partition("the thing")[2].partition("\n")[0]
    stopped = run(*arguments, "--set", f"stop_strings={text[2]}").stdout.partition("the thing")[2].partition("\n")[0]
    assert stopped == text[: text.index(text[2]) + 1]


def test_compare_refuses_a_checkpoint_that_samples(checkpoint):
    arguments = [name for name in checkpoint(do_sample=True) if name != "--plain"]
    arguments += ["--draft", arguments[2], "--compare"]
    assert "add --temperature 0" in refused(*arguments, option="--compare")
    assert run(*arguments, "--temperature", "0", "--max-new-tokens", "8").exit_code == 0
