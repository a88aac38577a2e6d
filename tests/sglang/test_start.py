"""The plug-in's registration with SGLang, its hooks, and what ends an engine's start."""

from __future__ import annotations

import json

import pytest

from tests.sglang.engines import EAGLE3, MARKS, RELEASES, run, start

pytestmark = MARKS

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


@RELEASES
def test_registration_offers_a_name_and_hooks_nothing(release):
    done = run("-c", REGISTERED, first=release)
    assert "STATE False True True 0" in done.stdout, done.stderr[-3000:]


@RELEASES
def test_every_symbol_is_there(release):
    done = run("-m", "spec_ops", "check", "sglang", first=release)
    assert done.returncode == 0, done.stdout
    assert f"SGLang {'0.5.14' if release is None else '0.5.23'}: in the tested range" in done.stdout


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


WRONG = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
assert "spec_ops" not in ATTENTION_BACKEND_CHOICES
print("REFUSED")
"""


def test_another_release_is_refused_in_words(tmp_path):
    """And the name is none that an engine's user could choose."""
    info = tmp_path / "sglang-0.5.24.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.24\n")
    done = run("-c", WRONG, first=str(tmp_path))
    assert "REFUSED" in done.stdout, done.stderr[-3000:]
    told = "spec_ops does not offer --attention-backend spec_ops: SGLang 0.5.24 was not tested: 0.5.14 to 0.5.23 were"
    assert told in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"page_size": 256}, "pages of 256 tokens are not supported; pass --page-size 64"),
        (
            EAGLE3 | {
                "prefill_attention_backend": "torch_native", "decode_attention_backend": "spec_ops",
                "speculative_attention_mode": "decode",
            },
            "with torch_native for prefill and spec_ops for decode, is not supported; pass --attention-backend spec_ops alone",
        ),
        ({"page_size": 16, "kv_cache_dtype": "fp8_e5m2"}, "float8_e5m2"),
    ],
    ids=["page size", "two backends", "cache"],
)  # fmt: skip
def test_what_is_not_supported_ends_the_start(models, options, told):
    done = start(models, {"attention_backend": "spec_ops"} | options)
    assert told in done.stdout + done.stderr, done.stderr[-3000:]
    assert "RESULT" not in done.stdout


def test_gpt_oss_is_refused_by_sglang_itself(tmp_path):
    """Its list of backends for layers with sinks is closed."""
    (tmp_path / "target").mkdir()
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    done = start(tmp_path, {"attention_backend": "spec_ops", "page_size": 16})
    assert "GptOssForCausalLM requires one of" in done.stdout + done.stderr, done.stderr[-3000:]
    assert "RESULT" not in done.stdout
