"""`python -m benchmarks vllm`, with a stand-in for vLLM whose calls last as long as a test says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.engines import vllm_worker
from benchmarks.engines.vllm_rounds import engine_arguments
from tests.helpers.command_line import refusal, run_benchmarks

# A round takes 2 ms with our backend and 4 with others, a call 100 ms besides; a draft is accepted every other round.
VLLM = """
import os, time
from types import SimpleNamespace

__version__ = "0.32.0"


class SamplingParams:
    def __init__(self, **given):
        assert given["ignore_eos"] and given["temperature"] == 0.0
        self.max_tokens = given["max_tokens"]


class LLM:
    def __init__(self, **given):
        assert os.path.exists(given["model"] + "/config.json")
        assert given["attention_backend"] != "spec_ops", "a name of this package, not of vLLM"
        print("vLLM logs to stdout")
        if given["attention_backend"] == "BROKEN":
            raise RuntimeError("no kernel image [sm_90]")
        self.ms = 2 if given["attention_backend"] == "SPEC_OPS" else 4
        self.drafts = "speculative_config" in given
        assert not given["disable_log_stats"], "there would be no counters"
        self.counts = {"drafts": 0, "accepted_tokens": 0}

    def reset_prefix_cache(self):
        pass

    def get_metrics(self):
        named = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in self.counts.items()]
        return [*(named if self.drafts else []), SimpleNamespace(name="vllm:other", value=1e9)]

    def generate(self, prompts, sampling, use_tqdm):
        assert len({tuple(prompt["prompt_token_ids"]) for prompt in prompts}) == len(prompts)
        new = sampling.max_tokens - 1
        rounds = new * 2 // 3 if self.drafts else new
        time.sleep((100 + self.ms * rounds) / 1e3)
        self.counts["drafts"] += rounds * len(prompts)
        self.counts["accepted_tokens"] += rounds // 2 * len(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * (new + 1))]) for _ in prompts]
"""
SHORT = ("--rounds", "2", "32", "--repeats", "3", "--case", "2x16")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 3])
def test_rounds_of_two_backends(vllm, tmp_path, steps):
    path = tmp_path / "rows.json"
    way = ("--backend", "spec_ops", "--backend", "BROKEN", "--backend", "FLASH_ATTN", "--steps", str(steps))
    result = run_benchmarks("vllm", *SHORT, *way, "--json", str(path), "--logs", str(tmp_path / "logs"))
    assert result.exit_code == 1
    assert "vLLM logs to stdout" in (tmp_path / "logs" / "BROKEN-16.log").read_text()
    assert "BROKEN: ended with 1 after 0 of 1 cases" in result.output
    assert "no kernel image [sm_90]" in result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["engine"], row["version"], row["backend"], row["page_size"]) for row in rows] == [
        ("vllm", "0.32.0", "spec_ops", 64), ("vllm", "0.32.0", "FLASH_ATTN", 16),
    ]  # fmt: skip
    for row in rows:
        # A sleep is never too short: what a call takes besides is no part of a round.
        assert row["ms_per_round"] == pytest.approx(2 if row["backend"] == "spec_ops" else 4, abs=1.9)
        assert row["accept_length"] == (pytest.approx(1.5, abs=0.1) if steps else None)
    assert "of the time of the fastest other backend" in result.output


@pytest.mark.parametrize("drafts", [False, True])
def test_rounds_are_counted_by_their_drafts(monkeypatch, drafts):
    """By a clock of its own. A round takes 2 s, and gives each of two requests a token, or two if drafts are accepted."""
    now = [0.0]
    counts = {vllm_worker.DRAFTS: 0, vllm_worker.ACCEPTED: 0}

    class Engine:
        def reset_prefix_cache(self):
            pass

        def get_metrics(self):
            return [SimpleNamespace(name=name, value=count) for name, count in counts.items()]

        def generate(self, prompts, sampling, use_tqdm):
            rounds = (sampling.max_tokens - 1) // 2 if drafts else sampling.max_tokens - 1
            now[0] += 100 + 2 * rounds
            counts[vllm_worker.DRAFTS] += rounds * len(prompts)
            counts[vllm_worker.ACCEPTED] += rounds * len(prompts)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * sampling.max_tokens)]) for _ in prompts]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(vllm_worker.time, "perf_counter", lambda: now[0])
    row = vllm_worker.measure(Engine(), {"vocab_size": 99, "rounds": [4, 24], "repeats": 2, "drafts": drafts}, 2, 8)
    assert row["ms_per_round"] == 2000
    assert row["ms_per_round_all"] == [2000, 2000]


def test_arguments_of_an_engine(tmp_path):
    """Graphs of the tokens that each batch verifies, and of a draft step's; an MTP layer is of the target's checkpoint."""
    made = engine_arguments(tmp_path, None, "CUSTOM", 64, [(1, 1024), (8, 2048)], 3, 1)
    assert made["compilation_config"] == {"cudagraph_capture_sizes": [1, 4, 8, 32]}
    assert (made["max_num_seqs"], made["block_size"], made["max_model_len"]) == (8, 64, 2048 + 4096)
    assert made["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    plain = engine_arguments(tmp_path, tmp_path, "CUSTOM", 64, [(2, 64)], 0, 1)
    assert plain["compilation_config"] == {"cudagraph_capture_sizes": [2]}
    assert "speculative_config" not in plain


@pytest.mark.parametrize(
    ("given", "option", "message"),
    [
        (("--model", "gpt-oss"), "--model", "must be one of ['llama-8b'"),
        (("--backend", "FLASH_ATTN:x"), "--backend", "must be NAME or NAME:PAGE_SIZE, got 'FLASH_ATTN:x'"),
        (("--case", "8"), "--case", "must be BATCHxCONTEXT, got '8'"),
        (("--rounds", "9", "9"), "--rounds", "must be a smaller and a larger number, got (9, 9)"),
        (("--engine-option", "tp_size"), "--engine-option", "must be NAME=JSON, got 'tp_size'"),
    ],
)
def test_mistakes(given, option, message):
    assert message in refusal(run_benchmarks("vllm", *given), option)
