"""Real SGLang engines on a CPU, in an environment of their own: `make test-sglang`. Skipped where SGLang is not installed.

Engines are processes (`serve.py`); their own Triton kernels run in the interpreter, kernels that SGLang has for GPUs alone in
the plug-in `stubs/cpu_engine.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="make test-sglang installs SGLang")
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NEWEST = os.environ.get("SGLANG_NEWEST")  # a folder with SGLang's newest tested release, unpacked
EAGLE3 = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}  # fmt: skip


def run(*command: str, first: str | None = None, timeout: int = 300) -> subprocess.CompletedProcess:
    path = os.pathsep.join(p for p in (first, str(ROOT), str(HERE / "stubs")) if p)
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    from tests.helpers.engine_checkpoints import write_draft, write_target

    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target")
    write_draft(folder / "draft")
    return folder


def serve(models: Path, **options: Any) -> dict[str, Any]:
    if "speculative_algorithm" in options:
        options["speculative_draft_model_path"] = str(models / "draft")
    done = run("-m", "tests.sglang.serve", str(models), json.dumps(options))
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    return json.loads(results[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def plain(models) -> list[list[int]]:
    """What SGLang's own backend writes."""
    return serve(models, attention_backend="torch_native", page_size=1)["tokens"]


REGISTERED = """
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
before = "spec_ops" in ATTENTION_BACKEND_CHOICES
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins.hook_registry import HookRegistry
ours = [target for target, hooks in HookRegistry._hooks.items() if any("spec_ops" in hook.__module__ for _, hook, _ in hooks)]
print("STATE", before, "spec_ops" in ATTENTION_BACKENDS, "spec_ops" in ATTENTION_BACKEND_CHOICES, len(ours))
"""


@pytest.mark.parametrize("release", ["installed", "newest"])
def test_registration_offers_a_name_and_hooks_nothing(release):
    if release == "newest" and NEWEST is None:
        pytest.skip("SGLANG_NEWEST is not set")
    done = run("-c", REGISTERED, first=NEWEST if release == "newest" else None)
    assert "STATE False True True 0" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("release", ["installed", "newest"])
def test_every_symbol_is_there(release):
    if release == "newest" and NEWEST is None:
        pytest.skip("SGLANG_NEWEST is not set")
    done = run("-m", "spec_ops", "check", "sglang", first=NEWEST if release == "newest" else None)
    assert done.returncode == 0, done.stdout
    assert f"SGLang {'0.5.23' if release == 'newest' else '0.5.14'}: in the tested range" in done.stdout


HOOKED = """
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from spec_ops.integrations.sglang import backend, hooks

def steps_of(runner, topk, steps):
    return SimpleNamespace(attn_backends=[], made=(topk, steps))


hooks.install(backend.SpecOpsAttnBackend, steps_of, uses_mla=True)
hooks.install(backend.SpecOpsAttnBackend, None, uses_mla=True)  # once
assert issubclass(backend.SpecOpsAttnBackend, TritonAttnBackend)


def factory(name, steps=3):
    arguments = SimpleNamespace(
        speculative_draft_attention_backend=None, attention_backend=name, decode_attention_backend=None,
        prefill_attention_backend=None, speculative_attention_mode="prefill", get_attention_backends=lambda: (name, name),
    )
    return DraftBackendFactory(arguments, None, 1, steps)


made = factory("spec_ops").create_decode_backend()
assert made.made == (1, 3) and made.decode_attention_backend_str == "spec_ops"
assert factory("spec_ops", steps=1).create_decode_backend() is None
try:
    factory("no_such_backend").create_decode_backend()
except ValueError as error:  # SGLang's own
    assert "EAGLE is not supported" in str(error)
    print("HOOKED")
"""


def test_the_draft_factory_makes_ours_where_it_is_asked_for():
    done = run("-c", HOOKED)
    assert "HOOKED" in done.stdout, done.stderr[-3000:]


def test_plain_decoding(models, plain):
    assert serve(models, attention_backend="spec_ops", page_size=16)["tokens"] == plain


def test_a_chain_of_eagle3(models, plain):
    """Prefill, draft steps, verify and draft extend; in float32 the text is plain decoding's."""
    found = serve(models, attention_backend="spec_ops", page_size=16, **EAGLE3)
    assert found["tokens"] == plain


def test_a_tree_of_eagle3(models, plain):
    tree = EAGLE3 | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    assert serve(models, attention_backend="spec_ops", page_size=1, **tree)["tokens"] == plain


def test_what_is_not_supported_ends_the_start(models):
    done = run("-m", "tests.sglang.serve", str(models), json.dumps({"attention_backend": "spec_ops", "page_size": 256}))
    assert "pages of 256 tokens are not supported; pass --page-size 64" in done.stdout + done.stderr
    assert "RESULT" not in done.stdout
