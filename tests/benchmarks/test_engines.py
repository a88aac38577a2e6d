"""`python -m benchmarks sglang`, with a stand-in for SGLang whose calls last as long as a test says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.engines import process as engine_process
from benchmarks.engines import rounds as engine_rounds
from benchmarks.engines import sglang_rounds, sglang_worker
from benchmarks.engines import texts as texts_module
from benchmarks.engines.checkpoints import MODELS, write_shape
from benchmarks.engines.rounds import over_fastest
from benchmarks.round.shapes import SHAPES
from tests.helpers.command_line import refusal, run_benchmarks

# A round takes 2 ms with our backend and 4 with others, a call 100 ms besides.
SGLANG = """
import gzip, json, os, signal, time

__version__ = "0.5.14"


class Engine:
    def __init__(self, **given):
        assert os.path.exists(given["model_path"] + "/config.json")
        if given["attention_backend"] == "broken":
            raise RuntimeError("no kernel image [sm_90]")
        self.ms = 2 if given["attention_backend"] == "spec_ops" else 4
        self.simulated = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", 0))
        self.given = given

    def flush_cache(self):
        pass

    def generate(self, input_ids, sampling_params):
        if self.given["attention_backend"] == "terminated":
            os.kill(os.getppid(), signal.SIGTERM)
        if self.given["attention_backend"] in ("slow", "terminated"):
            time.sleep(60)
        if isinstance(sampling_params, list):
            return self.texts(input_ids, sampling_params)
        assert len({tuple(ids) for ids in input_ids}) == len(input_ids)
        tokens = sampling_params["max_new_tokens"]
        rounds = round((tokens - 1) / (self.simulated or 1))
        time.sleep((100 + self.ms * rounds) / 1e3)
        about = {"completion_tokens": tokens, "cached_tokens": len(input_ids[0]) - 1}
        if self.given.get("speculative_algorithm"):
            about |= {"spec_verify_ct": rounds, "spec_accept_length": self.simulated}
        return [{"meta_info": about} for _ in input_ids]

    def texts(self, prompts, sampling):
        told = []  # tokens go by the prompt; an engine without overlap ends its third text otherwise, one of two GPUs its first
        for i, (prompt, one) in enumerate(zip(prompts, sampling)):
            ids = [(sum(prompt) + k) % 200 for k in range(one["max_new_tokens"])]
            if (i == 2 and self.given["disable_overlap_schedule"]) or (i == 0 and self.given["tp_size"] == 2):
                ids[-1] += 1
            told.append({"output_ids": ids, "meta_info": {"spec_verify_ct": (len(ids) - 1) / 2}})
        return told

    def start_profile(self, output_dir, **options):
        self.folder = output_dir

    def stop_profile(self):
        if self.given["attention_backend"] == "silent":
            return
        os.makedirs(self.folder)
        with gzip.open(self.folder + "/1-TP-0.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": TRACE * 12}, file)

    def shutdown(self):
        pass


# A round: a graph, a copy to the host that is waited for, one to the GPU.
TRACE = [
    {"cat": "cuda_runtime", "name": "cudaGraphLaunch"},
    {"cat": "kernel", "name": "a"},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 32}},
    {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 8}},
    {"cat": "cuda_runtime", "name": "cudaEventSynchronize"},
    {"cat": "cpu_op", "name": "aten::add"},
]
"""


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang.py").write_text(SGLANG)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))


SHORT = ("--rounds", "2", "12", "--repeats", "1", "--case", "2x16")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 3])
def test_rounds_of_two_backends(sglang, tmp_path, steps):
    path = tmp_path / "rows.json"
    way = ("--backend", "spec_ops", "--backend", "fa3", "--backend", "triton:16", "--steps", str(steps))
    # The fastest of three: others may be held up.
    result = run_benchmarks("sglang", *SHORT, "--repeats", "3", *way, "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["backend"], row["page_size"]) for row in rows] == [("spec_ops", 64), ("fa3", 1), ("triton", 16)]
    for row in rows:
        assert (row["engine"], row["version"], row["model"], row["bs"], row["context"]) == (
            "sglang",
            "0.5.14",
            "llama-8b",
            2,
            16,
        )
        assert row["accept_length"] == (3.0 if steps else None)
        # A sleep is never too short: what a call takes besides is no part of a round.
        assert row["ms_per_round"] == pytest.approx(2 if row["backend"] == "spec_ops" else 4, abs=1.9)
    assert over_fastest(rows) < 1
    assert "of the time of the fastest other backend" in result.output


def test_a_case_in_which_short_calls_were_held_up_counts_for_nothing():
    rows = [
        {"backend": name, "bs": bs, "context": 8, "ms_per_round": ms}
        for bs, times in ((1, (1.0, 2.0)), (2, (-0.4, 2.0)), (4, (1.0, 0.0)))
        for name, ms in zip(("spec_ops", "fa3"), times, strict=True)
    ]
    assert over_fastest(rows) == pytest.approx(0.5)
    assert over_fastest(rows[2:]) is None


def test_what_a_profile_counts(sglang, tmp_path):
    path = tmp_path / "rows.json"
    way = ("--case", "3x16", "--backend", "silent", "--backend", "spec_ops", "--profile")
    result = run_benchmarks("sglang", *SHORT, *way, "--json", str(path))
    assert result.exit_code == 1
    assert "silent: --profile: the engine wrote no *TP-0*.trace.json.gz" in result.output
    rows = {(row["backend"], row["bs"]): row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {(backend, bs) for backend in ("silent", "spec_ops") for bs in (2, 3)}
    assert rows["spec_ops", 2]["profile"] == {
        "graphs": 1, "copies_to_host": 1, "bytes_to_host": 32, "host_waits": 1,
    }  # fmt: skip
    assert "profile" not in rows["spec_ops", 3]


def test_an_engine_that_does_not_start_leaves_the_others(sglang, tmp_path):
    path = tmp_path / "rows.json"
    result = run_benchmarks("sglang", *SHORT, "--backend", "broken", "--backend", "fa3", "--json", str(path))
    assert result.exit_code == 1
    assert "no kernel image [sm_90]" in result.output
    assert "ended with 1 after 0 of 1 cases" in result.output
    assert [row["backend"] for row in json.loads(path.read_text())["rows"]] == ["fa3"]


def test_an_engine_that_takes_too_long(sglang):
    result = run_benchmarks("sglang", *SHORT, "--backend", "slow", "--seconds", "3")
    assert result.exit_code == 1
    assert "took longer than 3 s (--seconds, --total-seconds) after 0 of 1 cases" in result.output


@pytest.mark.slow
def test_engines_share_the_time_that_there_is(sglang):
    """What one leaves, the next have."""
    slow = ("--backend", "fa3", "--backend", "slow", "--backend", "slow")
    result = run_benchmarks("sglang", *SHORT, *slow, "--total-seconds", "9")
    assert result.exit_code == 1
    limits = [float(limit) for limit in re.findall(r"took longer than ([\d.]+) s", result.output)]
    assert len(limits) == 2
    assert 3 < limits[0] <= limits[1] + 0.2 < 4.7, limits


def test_logs_are_kept(sglang, tmp_path):
    folder = tmp_path / "logs"
    way = ("--backend", "broken", "--backend", "fa3", "--backend", "triton:16")
    result = run_benchmarks("sglang", *SHORT, *way, "--logs", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["broken-1.log", "fa3-1.log", "triton-16.log"]
    assert "no kernel image [sm_90]" in (folder / "broken-1.log").read_text()
    assert "no kernel image [sm_90]" in result.output


def test_a_short_call_that_was_held_up_makes_no_round_faster():
    """It would, by 20 ms here, if each short call counted beside the long one after it."""

    class Engine:
        seconds = iter([0, 0, 0.3, 0.6, 0.1, 0.6, 0.1, 0.7])

        def flush_cache(self):
            pass

        def generate(self, input_ids, sampling_params):
            time.sleep(next(self.seconds))
            return [{"meta_info": {"completion_tokens": sampling_params["max_new_tokens"]}}]

    job = {"vocab_size": 99, "rounds": [1, 11], "repeats": 3, "tokens_per_round": 1.0}
    row = sglang_worker.measure(Engine(), job, 1, 4)
    assert row["ms_per_round"] == pytest.approx(50, abs=4)
    assert row["ms_per_round_all"] == pytest.approx([30, 50, 60], abs=4)


def test_no_such_interpreter(tmp_path):
    result = run_benchmarks("sglang", *SHORT, "--backend", "fa3", "--python", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "no engine starts with --python" in result.output


@pytest.mark.parametrize("garbage", ["{half", "3", '{"bs": 2}'])
def test_lines_that_are_no_rows(sglang, tmp_path, garbage):
    with (tmp_path / "sglang.py").open("a") as file:
        file.write(f"\nprint('ROW ' + {garbage!r}, flush=True)\n")
    result = run_benchmarks("sglang", *SHORT, "--backend", "fa3")
    assert result.exit_code == 0, result.output


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The engines' processes that were ended."""
    processes: list[subprocess.Popen] = []
    end = engine_process._end
    monkeypatch.setattr(engine_process, "_end", lambda process: (end(process), processes.append(process)))
    return processes


def bench(backend: str) -> None:
    sglang_rounds.bench_sglang(
        backend=[backend], case=["2x16"], layers=1, rounds=(2, 12), repeats=1, steps=0, total_seconds=None, logs=None,
        engine_option=None, json=None,
    )  # fmt: skip


def test_sigterm_ends_the_engine(sglang, ended):
    """As `timeout` sends it; and it does afterwards what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        bench("terminated")
    assert error.value.code == 143
    assert [process.returncode is not None for process in ended] == [True]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("late", ["Popen", "Timer"])
def test_sigterm_while_the_engine_starts(sglang, ended, monkeypatch, late):
    """Before anything would end it: it is ended all the same."""
    module = subprocess if late == "Popen" else threading
    made = getattr(module, late)

    def interrupted(*args, **kwargs):
        result = made(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(module, late, interrupted)
    with pytest.raises(SystemExit) as error:
        bench("slow")
    assert error.value.code == 143
    assert [process.returncode is not None for process in ended] == [True]


def test_an_interrupt_ends_the_engine(sglang, ended, monkeypatch):
    """At once, not when Python ends."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_rounds.console, "print", interrupted)
    with pytest.raises(KeyboardInterrupt) as error:
        bench("fa3")
    assert error.tb is not None
    assert [process.returncode is not None for process in ended] == [True]


@pytest.mark.parametrize(
    ("given", "option", "message"),
    [
        (("--model", "gpt-oss"), "--model", "must be one of ['llama-8b'"),
        (("--backend", "fa3:x"), "--backend", "must be NAME or NAME:PAGE_SIZE, got 'fa3:x'"),
        (("--backend", "fa3:0"), "--backend", "must be NAME or NAME:PAGE_SIZE, got 'fa3:0'"),
        (("--case", "8"), "--case", "must be BATCHxCONTEXT, got '8'"),
        (("--rounds", "9", "9"), "--rounds", "must be a smaller and a larger number, got (9, 9)"),
        (("--accept-length", "5"), "--accept-length", "must be at most 4 with 3 steps, got 5"),
        (("--engine-option", "tp_size"), "--engine-option", "must be NAME=JSON, got 'tp_size'"),
    ],
)
def test_mistakes(given, option, message):
    assert message in refusal(run_benchmarks("sglang", *given), option)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_knows_the_shape(name, tmp_path):
    target, draft = write_shape(name, tmp_path, layers=3)
    config, shape = AutoConfig.from_pretrained(target), SHAPES[name].target
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (3, shape.hidden_size, shape.vocab_size)
    if shape.is_mla:
        assert draft is None
        assert (config.kv_lora_rank, config.qk_rope_head_dim, config.first_k_dense_replace) == (512, 64, 3)
    else:
        head = json.loads((draft / "config.json").read_text())
        assert (head["num_hidden_layers"], head["draft_vocab_size"], head["hidden_size"]) == (1, 32000, shape.hidden_size)
        assert config.num_key_value_heads == shape.num_kv_heads == head["num_key_value_heads"]
    if shape.mixture is not None:
        assert (config.num_experts, config.moe_intermediate_size) == (128, 768)


def test_texts_of_requests(sglang, tmp_path):
    """Where texts part, float32 tells how far apart the two tokens are: these are no ties."""
    path = tmp_path / "rows.json"
    way = ("--backend", "spec_ops", "--backend", "broken", "--requests", "5", "--running", "2", "--json", str(path))
    result = run_benchmarks("sglang-requests", *way)
    assert result.exit_code == 1
    assert result.output.count("broken: ended with 1 after 0 of 1 cases") == 3
    rows = json.loads(path.read_text())["rows"]
    assert [(row["backend"], row["tp"], row["overlap"], row["steps"]) for row in rows] == [
        ("spec_ops", 1, True, 3), ("spec_ops", 1, False, 3), ("spec_ops", 1, True, 0),
    ]  # fmt: skip
    assert [row["equal"] for row in rows] == [5, 4, 5]
    assert rows[0]["largest_gap"] == rows[2]["largest_gap"] == 0
    assert rows[1]["largest_gap"] > rows[1]["typical_gap"] > 0.5
    assert [row.get("accept_length") for row in rows] == [2, 2, None]


def test_texts_of_trees_are_kept_before_logits_are_compared(sglang, tmp_path, monkeypatch):
    """A run that is cut off while it compares has lost nothing that an engine wrote."""

    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(texts_module.Exact, "logits", cut_off)
    with (tmp_path / "sglang.py").open("a") as file:
        file.write(SEEN_DRAFTS)
    path, texts, logs = tmp_path / "rows.json", tmp_path / "texts", tmp_path / "logs"
    run_benchmarks(
        "sglang-requests", "--backend", "spec_ops:1", "--requests", "4", "--longest", "8", "--way", "serial", "--way", "tree",
        "--nodes", "6", "--texts", str(texts), "--logs", str(logs), "--json", str(path),
    )  # fmt: skip
    rows = json.loads(path.read_text())["rows"]
    assert [(row["steps"], row.get("branches"), row.get("nodes"), row["equal"]) for row in rows] == [
        (3, None, None, 4), (3, 4, 6, 3),
    ]  # fmt: skip
    assert "SEEN (1, 3, 4)" in (logs / "spec_ops-1-tp1-serial.log").read_text()
    assert "SEEN (4, 3, 6)" in (logs / "spec_ops-1-tp1-tree.log").read_text()
    serial, tree = (json.loads((texts / f"spec_ops-1-tp1-{way}.json").read_text()) for way in ("serial", "tree"))
    assert serial["prompts"] == tree["prompts"]
    assert sum(a == b for a, b in zip(serial["tokens"], tree["tokens"], strict=True)) == 3


# Appended to the stand-in: the shape of its drafts.
SEEN_DRAFTS = """

def texts(self, prompts, sampling, before=Engine.texts):
    import sys

    names = ("eagle_topk", "num_steps", "num_draft_tokens")
    print("SEEN", tuple(self.given["speculative_" + name] for name in names), file=sys.stderr)
    return before(self, prompts, sampling)


Engine.texts = texts
"""


@pytest.fixture
def small_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["llama-8b"]
    target = replace(
        shape.target,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_layers=9,
    )
    monkeypatch.setitem(SHAPES, "llama-8b", replace(shape, target=target, draft_vocab=40))


def test_texts_of_random_weights_over_gpus(sglang, small_llama, tmp_path):
    """Every engine has the same checkpoint, in bfloat16, however many GPUs share it."""
    path, logs = tmp_path / "rows.json", tmp_path / "logs"
    with (tmp_path / "sglang.py").open("a") as file:
        file.write(SEEN)
    given = ("--tp", "2", "--tp", "1", "--way", "chain", "--way", "plain", "--requests", "4", "--longest", "8")
    result = run_benchmarks(
        "sglang-requests", "--model", "llama-8b", "--layers", "8", "--backend", "spec_ops", *given, "--logs", str(logs),
        "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["tp"], row["steps"], row["equal"]) for row in rows] == [(2, 3, 4), (2, 0, 4), (1, 3, 3), (1, 0, 3)]
    assert {(row["model"], row["layers"], row["longest"]) for row in rows} == {("llama-8b", 8, 8)}
    assert rows[2]["largest_gap"] == rows[3]["largest_gap"] > 0
    seen = {
        name: (logs / f"spec_ops-64-{name}.log").read_text() for name in ("tp2-chain", "tp2-plain", "tp1-chain", "tp1-plain")
    }
    assert len({text.partition("SEEN ")[2] for text in seen.values()}) == 1
    assert "(8, 300, 'bfloat16', 4)" in seen["tp2-chain"]


# Appended to the stand-in: what the engine was given to load.
SEEN = """

def texts(self, prompts, sampling, before=Engine.texts):
    import hashlib, sys

    folder = self.given["model_path"]
    config = json.load(open(folder + "/config.json"))
    weights = hashlib.sha256(open(folder + "/model.safetensors", "rb").read()).hexdigest()
    seen = config["num_hidden_layers"], config["vocab_size"], config["torch_dtype"], len(prompts)
    assert max(map(len, prompts)) <= 8 and max(one["max_new_tokens"] for one in sampling) <= 8
    print("SEEN", seen, weights, file=sys.stderr)
    return before(self, prompts, sampling)


Engine.texts = texts
"""


@pytest.mark.parametrize(
    ("given", "option", "message"),
    [
        (("--model", "gpt-oss"), "--model", "must be one of ['shipped', 'llama-8b'], got 'gpt-oss'"),
        (("--way", "bush"), "--way", "must be one of ['chain', 'serial', 'plain', 'tree'], got 'bush'"),
        (("--nodes", "65"), "--nodes", "less than or equal to 64"),
        (("--layers", "2"), "--layers", "must not be given with the shipped pair"),
        (("--tp", "0"), "--tp", "greater than or equal to 1"),
        (("--longest", "257"), "--longest", "less than or equal to 256"),
    ],
)
def test_mistakes_in_requests(given, option, message):
    assert message in refusal(run_benchmarks("sglang-requests", *given), option)
