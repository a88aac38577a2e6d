"""`python -m benchmarks vllm-requests`, with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.command_line import refusal, run_benchmarks

# Tokens go by the prompt; FlashAttention ends the second text otherwise. A round takes two tokens.
VLLM = """
import json, os, sys
from types import SimpleNamespace

__version__ = "0.26.0"


class SamplingParams:
    def __init__(self, **given):
        assert given["ignore_eos"] and given["temperature"] == 0.0
        self.max_tokens = given["max_tokens"]


class LLM:
    def __init__(self, **given):
        assert os.path.exists(given["model"] + "/model.safetensors")
        print("vLLM logs to stdout")
        print("GIVEN", json.dumps(given), file=sys.stderr)
        if given["attention_backend"] == "BROKEN":
            raise RuntimeError("no kernel image [sm_90]")
        self.given, self.drafts = given, 0

    def get_metrics(self):
        return [SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
                SimpleNamespace(name="vllm:other", value=1e9)]

    def generate(self, prompts, sampling, use_tqdm):
        told = []
        for i, (prompt, one) in enumerate(zip(prompts, sampling)):
            ids = [(sum(prompt["prompt_token_ids"]) + k) % 200 for k in range(one.max_tokens)]
            if i == 1 and self.given["attention_backend"] == "FLASH_ATTN":
                ids[-1] += 1
            if "speculative_config" in self.given:
                self.drafts += (len(ids) - 1) / 2
            told.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]))
        return told
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))


def test_texts_of_requests(vllm, tmp_path):
    path, logs, texts = tmp_path / "rows.json", tmp_path / "logs", tmp_path / "texts"
    result = run_benchmarks(
        "vllm-requests", "--backend", "spec_ops", "--backend", "FLASH_ATTN", "--backend", "BROKEN", "--ours", "CUSTOM",
        "--requests", "4", "--longest", "8", "--running", "6", "--steps", "2", "--engine-option", "enforce_eager=true",
        "--json", str(path), "--logs", str(logs), "--texts", str(texts),
    )  # fmt: skip
    assert result.exit_code == 1
    assert result.output.count("BROKEN: ended with 1 after 0 of 1 cases") == 2
    rows = json.loads(path.read_text())["rows"]
    assert [(row["backend"], row["page_size"], row["tp"], row["steps"], row["equal"]) for row in rows] == [
        ("spec_ops", 64, 1, 2, 4), ("spec_ops", 64, 1, 0, 4), ("FLASH_ATTN", 16, 1, 2, 3), ("FLASH_ATTN", 16, 1, 0, 3),
    ]  # fmt: skip
    assert {(row["engine"], row["version"], row["model"], row["requests"], row["longest"]) for row in rows} == {
        ("vllm", "0.26.0", "shipped", 4, 8)
    }
    assert rows[2]["largest_gap"] == rows[3]["largest_gap"] > 0 == rows[1]["largest_gap"]
    accepted = [row.get("accept_length") for row in rows]
    assert accepted[0] == accepted[2] == pytest.approx(2, abs=0.2)  # half a round of each text is rounded away
    assert accepted[1] is accepted[3] is None
    assert len(list(texts.iterdir())) == 4
    given = {
        way: json.loads((logs / f"spec_ops-64-tp1-{way}.log").read_text().partition("GIVEN ")[2].splitlines()[0])
        for way in ("chain", "plain")
    }
    assert given["chain"]["attention_backend"] == given["chain"]["speculative_config"]["attention_backend"] == "CUSTOM"
    assert given["chain"]["speculative_config"]["num_speculative_tokens"] == 2
    assert given["chain"]["compilation_config"] == {"cudagraph_capture_sizes": [1, 4, 6, 12, 18]}
    assert given["plain"]["compilation_config"] == {"cudagraph_capture_sizes": [1, 4, 6]}
    assert "speculative_config" not in given["plain"]
    assert given["plain"]["enforce_eager"]


@pytest.mark.parametrize(
    ("given", "option", "message"),
    [
        (("--way", "tree"), "--way", "must be one of ['chain', 'plain'], got 'tree'"),
        (("--model", "gpt-oss"), "--model", "must be one of ['shipped', 'llama-8b'], got 'gpt-oss'"),
        (("--backend", "FLASH_ATTN:x"), "--backend", "must be NAME or NAME:PAGE_SIZE"),
    ],
)
def test_mistakes(given, option, message):
    assert message in refusal(run_benchmarks("vllm-requests", *given), option)
