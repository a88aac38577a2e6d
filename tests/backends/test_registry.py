"""Selection among backends: pure, explained, and never silently another than the named one.

Also that `import spec_ops` needs torch alone.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import spec_ops
from spec_ops.backends import AttentionCall, AttentionMeta, Backend, BackendError, Selection, registry, select_backend
from spec_ops.backends.call import STEPS
from spec_ops.ops._library import imported_at_first_call
from spec_ops.ops.reference import attention as reference_attention

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
FP8 = torch.float8_e4m3fn
META = AttentionMeta(
    step="mha_target_verify", dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_heads=8, num_kv_heads=2, head_dim=128,
    v_head_dim=128, page_size=64, q_len=4, tree_mask=False, window=False, sinks=False, softcap=False,
)  # fmt: skip
FEATURES = ("tree_mask", "window", "sinks", "softcap")

RAN: list[str] = []


def verify_recorder(call: AttentionCall) -> torch.Tensor:
    """A kernel as a provider would write it; it says that it ran and adds 1 so that its result is its own."""
    RAN.append("verify")
    return reference_attention.attention(call) + 1


def provider(name: str = "provider", **changes: Any) -> Backend:
    """A backend that takes anything on any device, for as long as `changes` do not limit it."""
    fields: dict[str, Any] = {
        "kernels": {step: f"{__name__}:verify_recorder" for step in STEPS},
        "capabilities": None,
        "dtypes": FLOATS,
        "kv_dtypes": FLOATS | {FP8},
        "rank": 5,
        **dict.fromkeys(FEATURES, True),
    }
    return Backend(name=name, **{**fields, **changes})


@pytest.fixture
def register() -> Iterator[Callable[[Backend], Backend]]:
    """Registers backends for one test; the registry has no public way back, since nothing but a test needs one."""
    before = dict(registry._BACKENDS)
    RAN.clear()

    def add(backend: Backend) -> Backend:
        spec_ops.register_backend(backend)
        return backend

    yield add
    registry._BACKENDS.clear()
    registry._BACKENDS.update(before)
    registry._forget()


def verify_call(device: str, q_len: int = 3) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    q, k_cache, v_cache = (torch.randn(*s, generator=g) for s in ((2, q_len, 4, 16), (4, 4, 2, 16), (4, 4, 2, 16)))
    tables, lens = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32), torch.tensor([7, 5], dtype=torch.int32)
    call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables, "seq_lens": lens}
    return {name: tensor.to(device) for name, tensor in call.items()}


def test_selection_is_pure_and_repeats(register):
    """The same facts give the same answer, for an `arch` this machine lacks as well, and asking changes nothing."""
    register(provider("hopper", capabilities=(90, 90), rank=1))
    listed = spec_ops.available_backends()
    for _ in range(2):
        assert select_backend(META, 90).backend.name == "hopper"
        assert select_backend(META, 100).backend.name != "hopper"
        assert select_backend(META, None).reasons["hopper"] == "needs a CUDA device"
    assert select_backend(META, 90) == select_backend(dataclasses.replace(META), 90)
    assert spec_ops.available_backends() == listed
    with pytest.raises(dataclasses.FrozenInstanceError):
        META.page_size = 1  # type: ignore[misc]


def test_registration_is_seen_by_cached_selections(register):
    first = select_backend(META, None).backend.name
    register(provider(rank=-1))
    assert (first, select_backend(META, None).backend.name) == ("reference", "provider")


def test_what_depends_on_backends_is_forgotten_once_they_have_changed(register, monkeypatch):
    """What another thread remembers until then is forgotten too."""
    there: list[bool] = []
    monkeypatch.setattr(registry, "_of_others", [lambda: there.append(registry.get_backend("provider") is not None)])
    register(provider())
    registry.unregister_backend("provider")
    assert there == [True, False]


def test_packages_are_looked_for_once(register, monkeypatch):
    """Not at every eager call, where it took most of the time; anew when a backend is added."""
    asked: list[str] = []
    monkeypatch.setattr(registry, "_importable", lambda module: asked.append(module) or module != "absent")
    register(provider(rank=1, requires=("present", "extra")))
    call = verify_call("cpu")
    for _ in range(3):
        spec_ops.mha_target_verify(**call)
    assert asked.count("present") == 1
    register(provider("second", rank=0, requires=("absent", "extra")))
    spec_ops.mha_target_verify(**call)
    assert asked.count("absent") == 1
    assert RAN == ["verify"] * 4


@pytest.fixture
def unwarned(monkeypatch):
    """Nothing has been warned of yet."""
    monkeypatch.setattr(registry, "_warned", set())


def test_auto_without_a_kernel_on_a_gpu_warns_once(unwarned, monkeypatch):
    """It would be slow and silent. Another number of queries is no news, another dtype is."""
    monkeypatch.setattr(registry, "device_arch", lambda device: 75)
    with pytest.warns(UserWarning, match="sm_75: .*triton needs sm_80 to sm_121, not sm_75") as seen:
        [spec_ops.mha_target_verify(**verify_call("cpu", q_len)) for q_len in (3, 3, 4)]
    assert len(seen) == 1
    monkeypatch.setattr(registry, "device_arch", lambda device: 90)
    for change in ("named", "auto"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            spec_ops.mha_target_verify(**verify_call("cpu"), backend="reference" if change == "named" else "auto")
        texts = [str(warning.message) for warning in seen]
        assert len(texts) == (change == "auto")
        assert all("triton does not support query dtype torch.float32" in text for text in texts)


@pytest.mark.parametrize(
    ("facts", "arch", "reason"),
    [
        ({"head_dim": 320, "v_head_dim": 320}, 90, "triton supports head_dim up to 256, not 320"),
        ({"q_len": 65}, 90, "triton supports at most 64 queries per request, not 65"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, 100, "triton does not support query dtype torch.float32"),
        ({}, 75, "triton needs sm_80 to sm_121, not sm_75"),
    ],
)
def test_the_reason_for_no_kernel(facts, arch, reason):
    meta = dataclasses.replace(META, **facts)
    selection = select_backend(meta, arch)
    assert selection.backend.name == "reference"
    assert reason in registry.without_kernel(meta, arch, "auto", selection)
    assert registry.without_kernel(meta, arch, "reference", selection) is None
    assert registry.without_kernel(meta, None, "auto", select_backend(meta, None)) is None
    assert registry.without_kernel(META, 90, "auto", select_backend(META, 90)) is None


def test_amd_gpus_are_refused(monkeypatch):
    """They report (9, 4) and would get kernels with PTX in them."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 4))
    registry._cuda_arch.cache_clear()
    with pytest.raises(BackendError, match=r"for NVIDIA GPUs, and this PyTorch is built for ROCm 6\.4"):
        registry.device_arch(torch.device("cuda", 0))
    with pytest.raises(BackendError, match="for NVIDIA GPUs"):
        imported_at_first_call("append_kv", "spec_ops.backends.triton.cache.append:append_kv")()
    assert registry.device_arch(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("limit", "facts", "arch", "reason"),
    [
        ({"kernels": {"mla_extend": "m:f"}}, {}, None, "has no kernel for mha_target_verify"),
        ({"capabilities": (90, 103)}, {}, None, "needs a CUDA device"),
        ({"capabilities": (90, 103)}, {}, 80, "needs sm_90 to sm_103, not sm_80"),
        ({"capabilities": (90, 103)}, {}, 120, "needs sm_90 to sm_103, not sm_120"),
        ({"dtypes": frozenset({torch.float16})}, {}, None, "does not support query dtype torch.bfloat16"),
        ({"kv_dtypes": FLOATS}, {"kv_dtype": FP8}, None, "does not support cache dtype torch.float8_e4m3fn"),
        ({"head_dims": frozenset({64, 256})}, {}, None, "does not support head_dim 128"),
        ({"page_sizes": frozenset({16, 32})}, {}, None, "does not support page size 64"),
        ({"max_q_len": 3}, {}, None, "supports at most 3 queries per request, not 4"),
        *(({feature: False}, {feature: True}, None, f"does not support {feature}") for feature in FEATURES),
    ],
)
def test_every_limit_is_given_as_the_reason(limit, facts, arch, reason, register):
    backend, meta = register(provider(rank=1, **limit)), dataclasses.replace(META, **facts)
    assert backend.refuse(meta, arch) == reason
    selection = select_backend(meta, arch)
    assert selection.backend.name != "provider"
    assert selection.reasons["provider"] == reason
    with pytest.raises(BackendError) as caught:
        select_backend(meta, arch, "provider")
    place = "CPU" if arch is None else f"sm_{arch}"
    assert str(caught.value) == f"mha_target_verify: `backend` 'provider' cannot run this call on {place}: provider {reason}"


@pytest.mark.parametrize("edge", [90, 103])
def test_limits_are_inclusive(edge, register):
    fits = {
        "capabilities": (90, 103), "max_q_len": META.q_len, "head_dims": frozenset({128}), "page_sizes": frozenset({64}),
        "dtypes": frozenset({META.dtype}), "kv_dtypes": frozenset({META.kv_dtype}), **dict.fromkeys(FEATURES, False),
    }  # fmt: skip
    register(provider(rank=-1, **fits))
    assert select_backend(META, edge).backend.name == "provider"


def test_the_other_candidates_say_why_they_lost(register):
    register(provider("second", rank=2))
    register(provider("refused", rank=1, softcap=False))
    register(provider("best", rank=1))
    selection = select_backend(dataclasses.replace(META, softcap=True), None)
    assert isinstance(selection, Selection)
    assert selection.backend.name == "best"
    assert set(selection.reasons) == set(spec_ops.available_backends()) - {"best"}
    assert selection.reasons["refused"] == "does not support softcap"
    assert selection.reasons["second"] == selection.reasons["reference"] == "ranks after best"
    assert spec_ops.available_backends().index("best") < spec_ops.available_backends().index("second")


def test_no_candidate_at_all_lists_every_reason(register):
    register(provider("narrow", head_dims=frozenset({64})))
    with pytest.raises(BackendError) as caught:
        select_backend(dataclasses.replace(META, dtype=torch.float64), None)
    for name in spec_ops.available_backends():
        assert f"{name} " in str(caught.value)
    assert "`backend` 'auto' cannot run this call on CPU" in str(caught.value)
    assert "reference does not support query dtype torch.float64" in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_backend", ""])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=r"^select_backend: `name` must be 'auto' or one of \['.*\], got '" + name):
        select_backend(META, None, name)


def test_a_registered_backend_takes_part_in_auto(register, device):
    """Ranked first, its kernel runs for the step and features it declares; all else goes where it went before."""
    call, mask = verify_call(device), torch.tensor([[1, 3, 7]] * 2, device=device)
    expected = spec_ops.mha_target_verify(**call, backend="reference")
    other_step, with_mask = spec_ops.mha_draft_extend(**call), spec_ops.mha_target_verify(**call, tree_mask=mask)
    register(provider(rank=-1, kernels={"mha_target_verify": f"{__name__}:verify_recorder"}, tree_mask=False))
    assert torch.equal(spec_ops.mha_target_verify(**call), expected + 1)
    assert RAN == ["verify"]
    assert torch.equal(spec_ops.mha_draft_extend(**call), other_step)
    assert torch.equal(spec_ops.mha_target_verify(**call, tree_mask=mask), with_mask)
    assert RAN == ["verify"]


def test_a_worse_ranked_backend_is_only_used_by_name(register, device):
    register(provider(rank=2000))
    call = verify_call(device)
    spec_ops.mha_target_verify(**call)
    assert RAN == []
    expected = spec_ops.mha_target_verify(**call, backend="reference")
    assert torch.equal(spec_ops.mha_target_verify(**call, backend="provider"), expected + 1)
    assert RAN == ["verify"]


@pytest.mark.parametrize(
    ("limit", "changes", "reason"),
    [
        ({"max_q_len": 2}, {}, "supports at most 2 queries per request, not 3"),
        ({"window": False}, {"window_left": 0}, "does not support window"),
        ({"softcap": False}, {"softcap": 30.0}, "does not support softcap"),
        ({"sinks": False}, {"sinks": torch.zeros(4)}, "does not support sinks"),
        ({"tree_mask": False}, {"tree_mask": torch.ones(2, 3, dtype=torch.int64)}, "does not support tree_mask"),
        ({"page_sizes": frozenset({16})}, {}, "does not support page size 4"),
        ({"dtypes": frozenset({torch.bfloat16})}, {}, "does not support query dtype torch.float32"),
        ({"kernels": {"mla_extend": "m:f"}}, {}, "has no kernel for mha_target_verify"),
    ],
)
def test_a_named_backend_never_falls_back(limit, changes, reason, register, device):
    register(provider(rank=-1, **limit))
    changes = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    call = {**verify_call(device), **changes}
    spec_ops.mha_target_verify(**call)  # the reference takes it under "auto"
    with pytest.raises(
        BackendError, match=f"^mha_target_verify: `backend` 'provider' cannot run this call on .*: provider {reason}$"
    ):
        spec_ops.mha_target_verify(**call, backend="provider")
    assert RAN == []


def test_a_named_cuda_backend_on_the_cpu(register):
    register(provider(capabilities=(80, 200)))
    with pytest.raises(BackendError, match="cannot run this call on CPU: provider needs a CUDA device"):
        spec_ops.mha_target_verify(**verify_call("cpu"), backend="provider")


def test_kernels_are_imported_at_their_first_call(register):
    """A declaration may name a module that is not there: only a call finds out."""
    register(provider(kernels={"mha_target_verify": "spec_ops_absent_module:kernel"}))
    with pytest.raises(ModuleNotFoundError, match="spec_ops_absent_module"):
        spec_ops.mha_target_verify(**verify_call("cpu"), backend="provider")


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("step", ["draft_decode", "target_verify", "draft_extend", "extend"])
def test_meta_holds_the_facts_of_the_call(kind, step, register):
    """Each fact from another size or option, so that no two can be mixed up."""
    name = f"{kind}_{step}"
    metas: list[AttentionMeta] = []

    class Spy(Backend):
        def refuse(self, meta, arch):
            metas.append(meta)
            return "only looks"

    register(Spy(**{f.name: getattr(provider(rank=-1), f.name) for f in dataclasses.fields(Backend)}))
    q_shape = (7, 6, 40) if step == "extend" else (2, 5, 6, 40)
    call: dict[str, Any] = {
        "q": torch.zeros(q_shape, dtype=torch.float16),
        "block_tables": torch.zeros(2, 1, dtype=torch.int32),
    }
    call |= {"seq_lens": torch.tensor([3, 1], dtype=torch.int32), "window_left": 0, "sinks": torch.zeros(6)}
    if kind == "mha":
        call |= {"k_cache": torch.zeros(4, 8, 3, 40).to(FP8), "v_cache": torch.zeros(4, 8, 3, 24).to(FP8)}
        call |= {"k_scale": 1.0, "v_scale": 1.0}
    else:
        call |= {"kv_cache": torch.zeros(4, 8, 40).to(FP8), "kv_lora_rank": 24, "kv_scale": 1.0, "scale": 0.1}
    ragged = {"q_indptr": torch.tensor([0, 3, 4], dtype=torch.int32), "max_q_len": 5}
    tree = {"tree_mask": torch.ones(2, 5, dtype=torch.int64)}
    function = getattr(spec_ops, name)
    function(**call, **(ragged if step == "extend" else tree))
    expected = AttentionMeta(
        step=name, dtype=torch.float16, kv_dtype=FP8, num_heads=6, num_kv_heads=3 if kind == "mha" else 1, head_dim=40,
        v_head_dim=24, page_size=8, q_len=5, tree_mask=step != "extend", window=True, sinks=True, softcap=False,
    )  # fmt: skip
    assert metas == [expected]
    plain = {**call, "window_left": -1, "sinks": None, "softcap": 4.0}
    function(**plain, **(ragged if step == "extend" else {}))
    assert metas[1] == dataclasses.replace(expected, tree_mask=False, window=False, sinks=False, softcap=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "reference"}, "`name` must be new, got 'reference'"),
        ({"name": "auto"}, "`name` must be new, got 'auto'"),
        ({"kernels": {"mha_decode": "m:f"}}, "`kernels` must be keyed by attention ops or appends, got ['mha_decode']"),
        ({"kernels": {"mha_extend": "m.f"}}, "`kernels` must name each kernel as 'module:function', got 'm.f'"),
        ({"reads": frozenset({"max_seq_len", "tree_mask"})}, "got ['tree_mask']"),
    ],
)
def test_bad_declarations(changes, message, register):
    before = spec_ops.available_backends()
    with pytest.raises(ValueError) as caught:
        register(provider(**changes))
    assert str(caught.value).startswith("register_backend: ")
    assert message in str(caught.value)
    assert spec_ops.available_backends() == before


def test_the_reference_declares_everything():
    """It is what `auto` falls to, so nothing that validation lets through may be refused."""
    chosen = select_backend(dataclasses.replace(META, **dict.fromkeys(FEATURES, True)), None)
    assert chosen.backend.name == "reference"
    for step in STEPS:
        for arch in (None, 90, 100, 120):
            for dtype in FLOATS:
                for kv_dtype in (dtype, FP8):
                    meta = dataclasses.replace(
                        META, step=step, dtype=dtype, kv_dtype=kv_dtype, head_dim=7, page_size=3, q_len=64
                    )
                    assert select_backend(meta, arch, "reference").backend.name == "reference"


IMPORT_SCRIPT = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
import torch
import spec_ops
q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 1, 8)
table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
spec_ops.append_kv(cache, cache.clone(), q[0, :, :1], q[0, :, :1], lens)
assert spec_ops.mha_draft_decode(q, cache, cache, table, lens).shape == q.shape
assert "reference" in spec_ops.available_backends()
for name in spec_ops.__all__:
    getattr(spec_ops, name)
"""


@pytest.mark.slow
def test_import_needs_torch_alone():
    """In a fresh interpreter with every optional package blocked: import, the whole public surface, one append and one step."""
    blocked = ("triton", "flashinfer", "tokenspeed_mla", "transformers", "matplotlib")
    script = IMPORT_SCRIPT.format(blocked=blocked)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
