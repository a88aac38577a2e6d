"""`python -m benchmarks accept` with local checkpoints of transformers: a smaller one, an EAGLE-3 head, prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.helpers.command_line import refusal, run_benchmarks
from tests.helpers.tiny_transformers import EOS, make_model, tokenizer
from tests.integrations.transformers.test_eagle3 import write_sglang

LINES = ["the thing", "in the end, ", "", "1 + 1 = "]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`target` (which samples, by its settings), `small` and `head`, and `lines.txt`."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, layers in (("target", 3), ("small", 1)):
        make_model("llama", layers=layers).save_pretrained(root / name)
    text = tokenizer()
    text.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}> "
    text.save_pretrained(root / "target")
    settings = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "eos_token_id": EOS}
    (root / "target" / "generation_config.json").write_text(json.dumps(settings))
    write_sglang(root / "head")
    (root / "lines.txt").write_text("\n".join(LINES))
    return root


def measure(folders: Path, *options: str, draft: str = "small") -> tuple[dict[str, Any], str]:
    path = folders / "rows.json"
    models = ["--model", str(folders / "target"), "--draft", str(folders / draft), "--device", "cpu", "--json", str(path)]
    result = run_benchmarks("accept", *models, "--max-new-tokens", "24", *options)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    return row, " ".join(result.output.split())


def lines(folders: Path) -> list[str]:
    return ["--prompt-lines", str(folders / "lines.txt")]


def test_a_smaller_model_on_lines_of_a_file(folders):
    row, shown = measure(folders, *lines(folders))
    assert (row["model"], row["draft"], row["prompts"], row["steps"]) == ("target", "small", 3, 3)
    assert row["temperature"] == 0  # the model's settings would sample
    assert "greedy" in shown
    assert "3 prompts of lines.txt" in shown
    assert 1.2 < row["accept_length"] < 4
    assert sum(n * count for n, count in enumerate(row["histogram"], 1)) == row["new_tokens"] - 3


def test_a_head_on_held_out_text_in_trees(folders):
    """Whose every prompt has as many ids as asked for: this tokenizer has a character a token or two."""
    options = ["--prompts", "2", "--prompt-tokens", "16", "--tree-width", "3", "--steps", "2", "--tree-tokens", "7"]
    row, shown = measure(folders, *options, draft="head")
    assert (row["draft"], row["prompts"], row["num_tokens"], row["topk"]) == ("head", 2, 7, 3)
    assert len(row["histogram"]) == 3
    assert "2 prompts from held-out files" in shown


@pytest.mark.slow
def test_sampling_is_what_the_options_say(folders):
    """And nothing of the model's, nor transformers' own top-k of 50."""
    options = [*lines(folders), "--temperature", "0.7", "--top-p", "0.8", "--seed", "5"]
    row, shown = measure(folders, *options)
    assert {name: row.get(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")} == {
        "temperature": 0.7, "top_k": None, "top_p": 0.8, "min_p": None, "seed": 5,
    }  # fmt: skip
    assert "temperature 0.7, top-p 0.8, seed 5" in shown
    again, _ = measure(folders, *options)
    assert again["histogram"] == row["histogram"]
    by_tokens, _ = measure(folders, *options, "--token-verification")
    assert (row["block_verification"], by_tokens["block_verification"]) == (True, False)
    assert by_tokens["histogram"] != row["histogram"]
    more = ["--temperature", "0.7", "--min-p", "0.05", "--set", "top_k=7", "--set", "repetition_penalty=1.2"]
    row, _ = measure(folders, *lines(folders), *more)
    assert {name: row.get(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")} == {
        "top_k": 7, "top_p": None, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": None,
    }  # fmt: skip
    greedy, _ = measure(folders, *lines(folders), "--top-p", "0.5", "--set", "repetition_penalty=1.2")
    assert (greedy["repetition_penalty"], greedy.get("top_p"), greedy.get("seed")) == (1.2, None, None)


def test_chat_prompts_go_through_the_template(folders, monkeypatch):
    from spec_ops.decoding import Generator

    seen: list[list[list[int]]] = []
    generate = Generator.generate
    monkeypatch.setattr(
        Generator, "generate", lambda self, prompts, **how: seen.append(prompts) or generate(self, prompts, **how)
    )
    measure(folders, *lines(folders), "--chat", "--prompts", "2")
    assert [tokenizer().decode(prompt) for prompt in seen[-1]] == [f"<bos>user: {line}> " for line in LINES[:2]]
    measure(folders, *lines(folders), "--prompts", "2")
    assert [tokenizer().decode(prompt) for prompt in seen[-1]] == LINES[:2]


def test_end_tokens_end_a_text(folders):
    """Eight of the tokens that a random model writes often."""
    row, _ = measure(folders, *lines(folders), "--set", f"eos_token_id={list(range(3, 11))}")
    free, _ = measure(folders, *lines(folders))
    assert row["new_tokens"] < free["new_tokens"] == 3 * 24


def test_a_head_is_no_target(folders):
    arguments = ["accept", "--model", str(folders / "head"), "--draft", str(folders / "small"), "--device", "cpu"]
    assert "must be a target, got an EAGLE-3 head" in refusal(run_benchmarks(*arguments), "--model / --draft")
