"""Real SGLang engines on a CPU, in an environment of their own: `make test-sglang`. Skipped where SGLang is not installed.

Engines are processes (`serve.py`); their own Triton kernels run in the interpreter, kernels that SGLang has for GPUs alone in
the plug-in `stubs/cpu_engine.py`. With `GRAPHS`, SGLang's runners of CUDA graphs capture and replay too, by
`stubs/cpu_graphs.py`. A few start as a user's engine does (`fresh`), the others as forks of a process that has imported SGLang
(`warm.py`): 3 seconds in place of 31.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 1200  # seconds, of an engine on a busy machine
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="make test-sglang installs SGLang"),
    pytest.mark.timeout(2 * TIMEOUT),
]
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NEWEST = os.environ.get("SGLANG_NEWEST")  # a folder with SGLang's newest tested release, unpacked
EAGLE3 = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}  # fmt: skip


NEXTN = EAGLE3 | {"speculative_algorithm": "NEXTN"}  # of the target's own folder
DRAFTS = {"EAGLE3": "draft", "EAGLE": "first_draft"}  # folders beside the target's
TREE = EAGLE3 | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
# Batches of 1 to 8 requests run as 3 or 8, so that rows of padding are replayed too.
GRAPHS = {"disable_cuda_graph": False, "cuda_graph_backend_prefill": "disabled", "cuda_graph_bs_decode": [3, 8]}


def environment(first: str | None = None) -> dict[str, str]:
    """Of an engine. `first`: a folder before all others on Python's path."""
    newest = str(HERE / "stubs_newest") if first is not None and first == NEWEST else None
    path = os.pathsep.join(p for p in (first, newest, str(ROOT), str(HERE / "stubs")) if p)
    return {
        **os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def run(*command: str, first: str | None = None, timeout: int = TIMEOUT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(first),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Warm:
    """Runs `serve.py` as forks of one process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, graphs: bool, timeout: int) -> subprocess.CompletedProcess:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.warm"], cwd=ROOT, env=environment(), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
            late = threading.Timer(timeout, self.close)
            late.start()
            try:
                print(json.dumps({"arguments": arguments, "graphs": graphs, **files}), file=process.stdin, flush=True)
                status = process.stdout.readline()
            finally:
                late.cancel()
            assert status, f"no engine, or none within {timeout} s"
            found = {name: Path(file).read_text() for name, file in files.items()}
        return subprocess.CompletedProcess(arguments, int(status), **found)

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


WARM = Warm()


@pytest.fixture(scope="module", autouse=True)
def _end_of_warm() -> Iterator[None]:
    yield
    WARM.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    from tests.helpers.engine_checkpoints import write_draft, write_first_draft, write_target

    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target")
    write_draft(folder / "draft")
    write_first_draft(folder / "first_draft")
    return folder


def serve(
    models: Path,
    work: dict[str, Any] | None = None,
    *,
    fresh: bool = False,
    first: str | None = None,
    timeout: int = TIMEOUT,
    **options: Any,
) -> dict[str, Any]:
    """Args: fresh: in a process that nothing was imported in before."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(work or {}, file)
        file.flush()
        done = start(models, options, file.name, fresh=fresh or first is not None, first=first, timeout=timeout)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    found = json.loads(results[0].removeprefix("RESULT "))
    return found | {"graphs": done.stdout.count("CPU graph of")}


def start(
    models: Path,
    options: dict[str, Any],
    *work: str,
    fresh: bool = False,
    first: str | None = None,
    timeout: int = TIMEOUT,
) -> subprocess.CompletedProcess:
    if (draft := DRAFTS.get(options.get("speculative_algorithm", ""))) is not None:
        options = options | {"speculative_draft_model_path": str(models / draft)}
    arguments = (str(models), json.dumps(options), *work)
    graphs = not options.get("disable_cuda_graph", True)
    if fresh:
        assert not graphs
        return run("-m", "tests.sglang.serve", *arguments, first=first, timeout=timeout)
    return WARM.run(*arguments, graphs=graphs, timeout=timeout)


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
    assert serve(models, fresh=True, attention_backend="spec_ops", page_size=16)["tokens"] == plain


@pytest.mark.parametrize(
    ("page_size", "speculation", "graphs"),
    [(16, {}, 2), (16, EAGLE3, 6), (1, TREE, 6)],
    ids=["plain", "chain", "tree"],
)
def test_graphs(models, plain, page_size, speculation, graphs):
    """Of decode; of verify, draft steps and draft extend."""
    found = serve(models, attention_backend="spec_ops", page_size=page_size, **speculation, **GRAPHS)
    assert found["tokens"] == plain
    assert found["graphs"] == graphs


@pytest.mark.skipif(NEWEST is None, reason="SGLANG_NEWEST is not set")
@pytest.mark.parametrize(("page_size", "speculation"), [(16, {}), (16, EAGLE3), (1, TREE)], ids=["plain", "chain", "tree"])
def test_the_newest(models, plain, page_size, speculation):
    assert serve(models, first=NEWEST, attention_backend="spec_ops", page_size=page_size, **speculation)["tokens"] == plain


def test_a_chain_of_eagle3(models, plain):
    """Prefill, draft steps, verify and draft extend; in float32 the text is plain decoding's."""
    found = serve(models, fresh=True, attention_backend="spec_ops", page_size=16, **EAGLE3)
    assert found["tokens"] == plain


def test_a_tree_of_eagle3(models, plain):
    assert serve(models, attention_backend="spec_ops", page_size=1, **TREE)["tokens"] == plain


@pytest.mark.parametrize(("page_size", "speculation"), [(16, EAGLE3), (1, TREE)], ids=["chain", "tree"])
def test_eagles_first_heads(models, plain, page_size, speculation):
    """They take hidden states of the target's last layer, after its norm."""
    speculation = speculation | {"speculative_algorithm": "EAGLE"}
    assert serve(models, attention_backend="spec_ops", page_size=page_size, **speculation)["tokens"] == plain


def written(folder: Path, cache: Callable[[], Any] | None = None, **changes: Any) -> list[list[int]]:
    """What transformers writes with a target in float32, over a `cache` of its own, or with `changes` to its configuration:
    SGLang's own backends for a CPU have neither MLA nor windows nor caches of 8 bits."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.sglang.serve import PROMPTS

    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, **changes)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}

    def text(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache and cache(), **options)
        return made[0, len(prompt) :].tolist()

    return [text(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A target with windows that are shorter than most texts, its EAGLE-3 head, and its texts."""
    from tests.helpers.engine_checkpoints import write_draft, write_windowed_target

    folder = tmp_path_factory.mktemp("windowed")
    write_windowed_target(folder / "target", window=12)
    write_draft(folder / "draft")
    texts = written(folder)
    # A model that repeats one token shows nothing, and one that windows do not change shows nothing of windows. Of a prompt of
    # one token sixteen times both are so.
    assert sum(len(set(text)) > 3 for text in texts) == len(texts) - 1
    assert sum(a != b for a, b in zip(texts, written(folder, sliding_window=512), strict=True)) == len(texts) - 1
    return folder, texts


@pytest.mark.parametrize(("page_size", "speculation"), [(16, {}), (16, EAGLE3), (1, TREE)], ids=["plain", "chain", "tree"])
def test_windows(windowed, page_size, speculation):
    folder, texts = windowed
    found = serve(folder, {"alone": 0}, attention_backend="spec_ops", page_size=page_size, **speculation)
    assert found["tokens"] == texts


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A target with MLA and an MTP layer, which SGLang takes with experts alone, an EAGLE-3 head, and its texts."""
    from tests.helpers.engine_checkpoints import LAYERS, YARN, write_draft, write_latent_target

    folder = tmp_path_factory.mktemp("latent")
    write_latent_target(folder / "target", layers=LAYERS, experts=4, rope_scaling=YARN)
    write_draft(folder / "draft")
    return folder, written(folder)


@pytest.mark.parametrize("speculation", [{}, EAGLE3, EAGLE3 | GRAPHS, NEXTN], ids=["plain", "eagle3", "graphs", "mtp"])
def test_latent_attention(latent, speculation):
    """Prefill without a prefix too, over the cache."""
    folder, texts = latent
    assert serve(folder, {"alone": 0}, attention_backend="spec_ops", page_size=16, **speculation)["tokens"] == texts


@pytest.fixture(scope="module")
def rounded(models) -> list[list[int]]:
    """What a target writes that attends to keys and values of 8 bits, a prompt's own tokens too."""
    import torch
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, key_states, value_states, *args, **kwargs):
            of_8_bits = (x.to(torch.float8_e4m3fn).float() for x in (key_states, value_states))
            return super().update(*of_8_bits, *args, **kwargs)

    return written(models, Rounded)


@pytest.mark.parametrize(("page_size", "speculation"), [(16, {}), (16, EAGLE3), (1, TREE)], ids=["plain", "chain", "tree"])
def test_a_cache_of_8_bits(models, plain, rounded, page_size, speculation):
    options: dict[str, Any] = {"attention_backend": "spec_ops", "page_size": page_size, "kv_cache_dtype": "fp8_e4m3"}
    assert serve(models, {"alone": 0}, **options, **speculation)["tokens"] == rounded != plain[: len(rounded)]


@pytest.fixture(scope="module")
def rounded_latent(latent) -> list[list[int]]:
    """As `rounded`, of latents and their rotated keys."""
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    from tests.helpers.engine_checkpoints import RANK

    def of_8_bits(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    rotate, norm = deepseek.apply_rotary_pos_emb_interleave, deepseek.DeepseekV3RMSNorm.forward

    def rotated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = rotate(*args, **kwargs)
        return queries, of_8_bits(keys)

    def normed(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = norm(layer, x)
        return of_8_bits(y) if y.shape[-1] == RANK else y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepseek, "apply_rotary_pos_emb_interleave", rotated)
        patch.setattr(deepseek.DeepseekV3RMSNorm, "forward", normed)
        return written(latent[0])


@pytest.mark.parametrize("speculation", [{}, EAGLE3, NEXTN], ids=["plain", "eagle3", "mtp"])
def test_a_latent_cache_of_8_bits(latent, rounded_latent, speculation):
    folder, texts = latent
    options: dict[str, Any] = {"attention_backend": "spec_ops", "page_size": 16, "kv_cache_dtype": "fp8_e4m3"}
    assert serve(folder, {"alone": 0}, **options, **speculation)["tokens"] == rounded_latent != texts


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Path:
    """The pair that the package ships, as SGLang loads it."""
    from spec_ops.models import export_pair, load_pair

    folder = tmp_path_factory.mktemp("shipped")
    export_pair(folder, *load_pair(), context=1024)
    return folder


def test_the_shipped_pair(shipped):
    """Its head is accepted as often as in our own rounds, and the text is plain decoding's."""
    from spec_ops.decoding import Generator, SpeculationConfig
    from spec_ops.models import load_pair
    from spec_ops.models.corpus import held_out_prompts

    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, 6, 64)
    work = {"prompts": prompts, "new_tokens": 48, "alone": 0}
    ours = Generator(target, draft, SpeculationConfig(3), max_batch_size=6, max_seq_len=128).generate(
        prompts, max_new_tokens=48
    )
    found = serve(shipped, work, attention_backend="spec_ops", page_size=16, **EAGLE3)
    assert found["tokens"] == serve(shipped, work, attention_backend="spec_ops", page_size=16)["tokens"]
    assert found["tokens"] == ours.tokens
    assert sum(found["rounds"]) == ours.stats.request_rounds
    assert ours.stats.accept_length > 3


REQUESTS = int(os.environ.get("SGLANG_REQUESTS", "60"))
LONG = max(TIMEOUT, 20 * REQUESTS)


@pytest.fixture(scope="module")
def requests() -> dict[str, Any]:
    """Of random lengths, so that they join and leave one by one, some with the beginning of another."""
    from spec_ops.models.corpus import ByteTokenizer, held_out_prompts

    rng, texts = random.Random(0), held_out_prompts(ByteTokenizer(), 16, 80)
    prompts = [rng.choice(texts)[: rng.randint(2, 80)] for _ in range(REQUESTS)]
    return {"prompts": prompts, "new_tokens": [rng.randint(1, 32) for _ in prompts], "alone": 0}


@pytest.fixture(scope="module")
def stock(shipped, requests) -> list[list[int]]:
    """What SGLang's own backend writes for them, plainly."""
    return serve(shipped, requests, timeout=LONG, attention_backend="torch_native", page_size=1)["tokens"]


@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
def test_requests_that_join_and_leave(shipped, requests, stock, overlap, graphs):
    options: dict[str, Any] = EAGLE3 | {"attention_backend": "spec_ops", "page_size": 16} | graphs
    found = serve(shipped, requests, timeout=LONG, disable_overlap_schedule=not overlap, **options)
    assert [len(tokens) for tokens in found["tokens"]] == requests["new_tokens"]
    assert found["tokens"] == stock
    assert sum(filter(None, found["rounds"])) < 0.4 * sum(requests["new_tokens"])  # one token takes no round; drafts are good


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
