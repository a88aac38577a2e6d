"""Real vLLM engines on a CPU, in environments of their own: `make test-vllm`. Skipped where vLLM is not installed.

On a CPU vLLM takes what is registered as its CPU backends, whatever `--attention-backend` says: `stubs/cpu_engine.py`, a
plug-in, puts ours there. `VLLM_RELEASES` names folders of other releases' sources, for the table of symbols.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_ops.integrations.vllm import symbols

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm installs vLLM")
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RELEASES = [Path(folder) for folder in os.environ.get("VLLM_RELEASES", "").split(os.pathsep) if folder]
BY_RELEASE = pytest.mark.parametrize(
    "folder", [None, *RELEASES], ids=lambda folder: "installed" if folder is None else folder.name
)
EAGLE3, MTP = ({"method": method, "num_speculative_tokens": 3} for method in ("eagle3", "mtp"))


def run(*command: str, ours: bool = False, first: Path | None = None, timeout: int = 400) -> subprocess.CompletedProcess:
    """A process of this environment; with the packages in `first` before all others."""
    path = os.pathsep.join(str(folder) for folder in (first, ROOT, HERE / "stubs") if folder is not None)
    environment = {
        **os.environ, "PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "SPEC_OPS_ON_CPU": "1" if ours else "",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@functools.cache
def models() -> Path:
    import tempfile

    from tests.helpers.engine_checkpoints import write_draft, write_latent_target, write_target

    folder = Path(tempfile.mkdtemp(prefix="spec_ops_vllm_"))
    write_target(folder / "target", dim=32)
    write_draft(folder / "draft", dim=32)
    write_latent_target(folder / "latent")
    return folder


def serve(model: str, ours: bool = True, **options: Any) -> dict[str, Any]:
    options = {"enforce_eager": True} | options
    done = run("-m", "tests.vllm.serve", str(models() / model), json.dumps(options), ours=ours)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    return json.loads(results[0].removeprefix("RESULT "))


@functools.cache
def plain(model: str) -> list[list[int]]:
    """What vLLM's own backend writes."""
    found = serve(model, ours=False)
    assert not found["calls"]
    return found["tokens"]


REGISTERED = """
from vllm.v1.attention.backends.registry import AttentionBackendEnum
before = "SPEC_OPS" in AttentionBackendEnum.__members__ or AttentionBackendEnum.CUSTOM.is_overridden()
from vllm.plugins import load_general_plugins
load_general_plugins()
from spec_ops.integrations.vllm.backend import SpecOpsBackend, name_in_registry
from spec_ops.integrations.vllm.mla import SpecOpsMLABackend
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MLAAttentionImpl
made = AttentionBackendEnum[name_in_registry()].get_class()
from vllm.config import AttentionConfig
chosen = AttentionConfig(backend=name_in_registry()).backend
kinds = all(
    issubclass(backend, AttentionBackend) and not backend.get_impl_cls().__abstractmethods__
    and issubclass(backend.get_builder_cls(), AttentionMetadataBuilder) and not backend.get_builder_cls().__abstractmethods__
    for backend in (SpecOpsBackend, SpecOpsMLABackend)
)
implement = issubclass(SpecOpsBackend.get_impl_cls(), AttentionImpl) and issubclass(
    SpecOpsMLABackend.get_impl_cls(), MLAAttentionImpl
)
print("STATE", before, made.__name__, made.get_name() == chosen.name, kinds, implement)
"""


@BY_RELEASE
def test_registration_offers_a_name(folder):
    """The class under it is one that vLLM's argument, its registry and its layers accept."""
    done = run("-c", REGISTERED, first=folder)
    assert "STATE False SpecOpsBackend True True True" in done.stdout, done.stderr[-3000:]


VALIDATED = """
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.selector import AttentionSelectorConfig
from spec_ops.integrations.vllm.backend import SpecOpsBackend
from spec_ops.integrations.vllm.mla import SpecOpsMLABackend

def reasons(backend, **changes):
    given = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, attn_type="decoder") | changes
    return backend.validate_configuration(
        device_capability=DeviceCapability(9, 0), **AttentionSelectorConfig(**given)._asdict()
    )

latent = dict(head_size=576, use_mla=True)
for block_size in (None, 16, 32, 64, 128, 528):
    assert reasons(SpecOpsBackend, block_size=block_size) == [], reasons(SpecOpsBackend, block_size=block_size)
    assert reasons(SpecOpsMLABackend, block_size=block_size, **latent) == []
assert reasons(SpecOpsBackend, has_sink=True, has_sliding_window=True, kv_cache_dtype="fp8") == []
for changes in (
    dict(block_size=8), dict(kv_cache_dtype="fp8_e5m2"), dict(use_mla=True), dict(use_sparse=True), dict(use_mm_prefix=True),
    dict(use_non_causal=True), dict(use_kv_connector=True), dict(use_batch_invariant=True), dict(attn_type="encoder"),
    dict(use_pcp=True),
):
    found = reasons(SpecOpsBackend, **changes)
    assert len(found) >= 2 and "TRITON_ATTN" in found[-1], (changes, found)
for changes in (dict(use_mla=False), latent | dict(use_sparse=True), latent | dict(has_sink=True)):
    assert "TRITON_MLA" in reasons(SpecOpsMLABackend, **changes)[-1], changes
if "use_adaptive_verification" in AttentionSelectorConfig._fields:
    assert any("adaptive" in reason for reason in reasons(SpecOpsBackend, use_adaptive_verification=True))
print("VALIDATED")
"""


@BY_RELEASE
def test_vllm_refuses_in_words_what_is_not_supported(folder):
    done = run("-c", VALIDATED, first=folder)
    assert "VALIDATED" in done.stdout, done.stderr[-3000:]


@BY_RELEASE
def test_every_symbol_is_there(folder):
    done = run("-m", "spec_ops", "check", "vllm", first=folder)
    assert done.returncode == 0, done.stdout
    assert f"vLLM {symbols.version() if folder is None else folder.name}: in the tested range" in done.stdout


REFUSED = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import AttentionConfig
AttentionConfig(backend="SPEC_OPS")
"""


def test_another_release_is_refused_in_words(tmp_path):
    """And an engine whose user asks for the backend all the same does not start."""
    info = tmp_path / "vllm-0.34.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0\n")
    done = run("-c", REFUSED, first=tmp_path)
    assert "spec_ops does not offer --attention-backend SPEC_OPS: vLLM 0.34.0 was not tested: 0.26 to 0.33 were" in done.stderr
    assert done.returncode != 0
    assert "Unknown attention backend: 'SPEC_OPS'" in done.stderr


def test_plain_decoding():
    found = serve("target")
    assert found["tokens"] == plain("target")
    assert found["calls"]["draft_decode"] > 100
    assert found["calls"]["extend"] > 0


@pytest.mark.parametrize("block_size", [16, 256])
def test_a_chain_of_eagle3(block_size):
    """In float32 the text is plain decoding's. vLLM divides large blocks among smaller pages of ours."""
    found = serve("target", block_size=block_size, speculative_config=EAGLE3 | {"model": str(models() / "draft")})
    assert found["tokens"] == plain("target")
    assert found["calls"]["target_verify"] > 100
    assert found["calls"]["draft_decode"] > 10


def test_prefill_in_chunks_beside_verified_chains():
    found = serve(
        "target", block_size=32, enable_chunked_prefill=True, max_num_batched_tokens=24, max_num_seqs=4,
        speculative_config=EAGLE3 | {"model": str(models() / "draft")},
    )  # fmt: skip
    assert found["tokens"] == plain("target")


def has_latent_attention() -> bool:
    folder = symbols.root()
    return folder is not None and (folder / "v1/attention/backends/mla/cpu_mla.py").is_file()


LATENT = pytest.mark.skipif(not has_latent_attention(), reason="this vLLM has no latent attention on a CPU")


# vLLM's rotary kernel for CPUs takes a slice of the queries for a whole tensor, which makes other texts of other batches.
PLAIN_ROTARY = {"compilation_config": {"custom_ops": ["none"]}}


@functools.cache
def float32_texts() -> list[list[int]]:
    """What transformers writes after the prompts of `serve.py`."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.vllm.serve import PROMPTS

    model = AutoModelForCausalLM.from_pretrained(models() / "latent", dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    sampling = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    written = [model.generate(torch.tensor([prompt]), **sampling)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    return [*written, written[0]]


@LATENT
@pytest.mark.parametrize("options", [{}, {"speculative_config": MTP}], ids=["plain", "mtp"])
def test_latent_attention(options):
    found = serve("latent", **PLAIN_ROTARY, **options)
    assert found["tokens"] == float32_texts()
    assert found["calls"]["mla_target_verify" if options else "mla_draft_decode"] > 10


def test_our_passes_in_vllms_compiler():
    """A product of ours needs bfloat16 and a GPU's rows: here the passes see the graphs, and the tokens stay."""
    found = serve("target", enforce_eager=False, passes={})
    assert found["tokens"] == plain("target")
    assert found["graphs"] > 0


def test_what_is_not_supported_ends_the_start():
    options = {"enforce_eager": True, "kv_cache_dtype": "fp8_e5m2"}
    done = run("-m", "tests.vllm.serve", str(models() / "target"), json.dumps(options), ours=True)
    assert "--kv-cache-dtype fp8_e5m2 is not supported; pass one of auto, " in done.stdout + done.stderr
    assert "RESULT" not in done.stdout
