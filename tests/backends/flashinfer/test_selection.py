"""Which of the built-in backends takes which call on which architecture, and what is said when a package is not there."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import spec_ops
from spec_ops import cli
from spec_ops.backends import AttentionMeta, BackendError, get_backend, missing_backends, registry, select_backend, warm_up
from spec_ops.backends.call import STEPS
from spec_ops.backends.table import choices
from spec_ops.models import CausalLM, ModelConfig, MTPDraft
from spec_ops.passes import explain
from spec_ops.passes.analysis.counts import HOST_COPIES, ITEMS
from tests.helpers.forked import run_script
from tests.helpers.paths import DOCS, EXAMPLES, ROOT
from tests.helpers.provider_fakes import FLASHINFER, FP8, Fakes

BF16, HALF = torch.bfloat16, torch.float16
GQA = AttentionMeta(
    step="mha_target_verify", dtype=BF16, kv_dtype=BF16, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128,
    page_size=64, q_len=4, tree_mask=False, window=False, sinks=False, softcap=False,
)  # fmt: skip
MLA = dataclasses.replace(GQA, step="mla_target_verify", num_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512)
PROVIDERS = {"flashinfer-trtllm", "flashinfer-cute-dsl", "flashinfer-xqa", "flashinfer-fa2", "flashinfer-fa3", "tokenspeed"}
MASKLESS = PROVIDERS - {"flashinfer-xqa", "flashinfer-fa2"}
ARCHS = (80, 90, 100, 103, 120, 121)


def chosen(meta: AttentionMeta, arch: int, **changes: Any) -> str:
    return select_backend(dataclasses.replace(meta, **changes), arch).backend.name


@pytest.mark.parametrize("arch", [100, 103])
def test_blackwell_servers_get_their_own_kernels(arch):
    for step in ("draft_decode", "target_verify", "draft_extend", "extend"):
        assert chosen(GQA, arch, step=f"mha_{step}") == "flashinfer-trtllm"
        assert chosen(GQA, arch, step=f"mha_{step}", kv_dtype=FP8, window=True, sinks=True) == "flashinfer-trtllm"
    for step in ("draft_decode", "target_verify", "draft_extend"):
        for kv_dtype in (BF16, FP8):
            meta = dataclasses.replace(MLA, step=f"mla_{step}", kv_dtype=kv_dtype)
            assert select_backend(meta, arch).backend.name == "tokenspeed"
            order = [select_backend(meta, arch, missing=frozenset(gone)).backend.name for gone in (
                {"tokenspeed"}, {"tokenspeed", "flashinfer-trtllm"}
            )]  # fmt: skip
            assert order == ["flashinfer-trtllm", "flashinfer-cute-dsl"]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tree_never_reaches_a_kernel_that_drops_masks(arch):
    """trtllm-gen accepts `mask` and ignores it."""
    for meta in (GQA, MLA):
        for step in ("draft_decode", "target_verify", "draft_extend"):
            tree = dataclasses.replace(meta, step=meta.step[:4] + step, tree_mask=True, q_len=16)
            selection = select_backend(tree, arch)
            assert selection.backend.tree_mask
            assert selection.backend.name not in MASKLESS
            for name in MASKLESS:
                assert get_backend(name).refuse(tree, arch) is not None
                with pytest.raises(BackendError):
                    select_backend(tree, arch, name)


@pytest.mark.parametrize("arch", ARCHS)
def test_host_planning_is_used_by_name_only(arch):
    for row in choices(arch):
        assert row.chosen is not None
        assert row.chosen not in ("flashinfer-fa2", "flashinfer-fa3")
    if arch == 90:
        assert select_backend(MLA, 90, "flashinfer-fa3").backend.host_plan


def test_xqa_where_it_runs():
    xqa = get_backend("flashinfer-xqa")
    taken = [arch for arch in (80, 89, 90, 100, 103, 110, 120, 121) if xqa.refuse(GQA, arch) is None]
    assert taken == [90, 100, 103, 120, 121]


@pytest.mark.parametrize(
    ("name", "meta", "arch", "changes", "reason"),
    [
        ("flashinfer-trtllm", GQA, 90, {}, "needs sm_100 to sm_103, not sm_90"),
        ("flashinfer-trtllm", GQA, 100, {"softcap": True}, "does not support softcap"),
        ("flashinfer-trtllm", GQA, 100, {"page_size": 128}, "does not support page size 128"),
        ("flashinfer-trtllm", GQA, 100, {"head_dim": 96, "v_head_dim": 96}, "supports head_dim 64, 128 and 256, not 96"),
        ("flashinfer-trtllm", GQA, 100, {"v_head_dim": 64}, "needs values as wide as keys (128), not 64"),
        ("flashinfer-trtllm", MLA, 100, {"page_size": 16}, "supports pages of 32 and 64 for MLA, not 16"),
        ("flashinfer-trtllm", MLA, 100, {"num_heads": 96}, "supports up to 64 or 128 heads for MLA, not 96"),
        ("flashinfer-trtllm", MLA, 100, {"dtype": HALF, "kv_dtype": HALF}, "writes bfloat16 for MLA, not torch.float16"),
        ("flashinfer-trtllm", MLA, 100, {"window": True}, "does not support window for MLA"),
        ("flashinfer-trtllm", MLA, 100, {"sinks": True}, "does not support sinks for MLA"),
        ("flashinfer-trtllm", MLA, 100, {"head_dim": 192, "v_head_dim": 128}, "(kv_lora_rank, rope) (512, 64) or (256, 64)"),
        ("flashinfer-trtllm", MLA, 100, {"step": "mla_extend"}, "has no kernel for mla_extend"),
        ("flashinfer-cute-dsl", MLA, 100, {"num_heads": 192}, "supports at most 128 heads, not 192"),
        ("flashinfer-cute-dsl", MLA, 100, {"page_size": 48}, "does not support page size 48"),
        ("flashinfer-cute-dsl", MLA, 100, {"head_dim": 320, "v_head_dim": 256}, "not (256, 64)"),
        ("flashinfer-xqa", GQA, 90, {"page_size": 8}, "does not support page size 8"),
        ("flashinfer-xqa", GQA, 90, {"softcap": True}, "does not support softcap"),
        ("flashinfer-xqa", GQA, 90, {"head_dim": 72, "v_head_dim": 72}, "supports head_dim up to 256 in steps of 16, not 72"),
        ("flashinfer-xqa", GQA, 90, {"tree_mask": True, "window": True}, "supports no window together with tree_mask"),
        ("flashinfer-xqa", GQA, 90, {"q_len": 65}, "supports at most 64 queries per request, not 65"),
        ("flashinfer-xqa", GQA, 90, {"q_len": 1, "num_heads": 520}, "at most 64 query heads per KV head"),
        ("flashinfer-xqa", GQA, 110, {}, "has no kernels for sm_110"),
        ("flashinfer-xqa", GQA, 90, {"v_head_dim": 64}, "needs values as wide as keys (128), not 64"),
        ("flashinfer-xqa", MLA, 90, {}, "has no kernel for mla_target_verify"),
        ("flashinfer-fa2", MLA, 90, {"tree_mask": True}, "does not support tree_mask for MLA"),
        ("flashinfer-fa2", MLA, 90, {"num_heads": 96}, "supports head counts that divide 128 for MLA, not 96"),
        ("flashinfer-fa2", MLA, 90, {"kv_dtype": FP8}, "supports no fp8 cache for MLA"),
        ("flashinfer-fa2", GQA, 90, {"sinks": True}, "does not support sinks"),
        ("flashinfer-fa2", GQA, 90, {"head_dim": 96, "v_head_dim": 96}, "supports head_dim 64, 128 and 256, not 96"),
        ("flashinfer-fa3", GQA, 90, {"tree_mask": True}, "does not support tree_mask"),
        ("flashinfer-fa3", GQA, 90, {"kv_dtype": FP8}, "does not support cache dtype torch.float8_e4m3fn"),
        ("flashinfer-fa3", GQA, 100, {}, "needs sm_90 to sm_90, not sm_100"),
        ("tokenspeed", MLA, 100, {"window": True}, "does not support window"),
        ("tokenspeed", MLA, 100, {"num_heads": 192}, "supports at most 128 heads, not 192"),
        ("tokenspeed", MLA, 100, {"dtype": HALF, "kv_dtype": FP8}, "writes bfloat16 from an fp8 cache, not torch.float16"),
        ("tokenspeed", MLA, 120, {}, "needs sm_100 to sm_103, not sm_120"),
    ],
)  # fmt: skip
def test_limits_are_given_as_reasons(name, meta, arch, changes, reason):
    refused = get_backend(name).refuse(dataclasses.replace(meta, **changes), arch)
    assert refused is not None
    assert reason in refused


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_every_declared_kernel_exists(name):
    """Importing them takes no provider package."""
    for path in get_backend(name).kernels.values():
        assert callable(registry.load_kernel(path))


@pytest.mark.parametrize(("name", "extra"), [("flashinfer-xqa", "flashinfer"), ("tokenspeed", "tokenspeed")])
def test_a_missing_package_is_named_with_its_extra(name, extra, monkeypatch):
    """A named backend raises; `auto` goes to the next one and says why; a plan for a stated machine is not changed."""
    monkeypatch.setitem(sys.modules, get_backend(name).requires[0], None)  # as if not installed
    registry._forget()
    meta, arch = (GQA, 90) if name == "flashinfer-xqa" else (MLA, 100)
    missing = missing_backends()
    assert name in missing
    with pytest.raises(BackendError, match=rf"{name} needs \w+, which is not installed: pip install \"\.\[{extra}\]\""):
        select_backend(meta, arch, name, missing)
    here = select_backend(meta, arch, "auto", missing)
    assert here.backend.name not in missing
    assert here.reasons[name] == get_backend(name).missing()
    assert select_backend(meta, arch, name).backend.name == name
    registry._forget()


def test_extras_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    for name in PROVIDERS:
        module, extra = get_backend(name).requires
        assert f'\n{extra} = ["{module.split("_")[0]}-' in text


def test_the_cache_key_knows_constraints_and_missing_packages(monkeypatch):
    """Selections end up in compiled code: installing a package must not meet a graph that was cached without it."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    registry._forget()
    without = registry.declarations()
    assert "spec_ops.backends.flashinfer:_xqa" in without
    assert " at 0x" not in without
    Fakes([FLASHINFER[-1]]).install(monkeypatch)
    registry._forget()
    assert registry.declarations() != without
    registry._forget()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "options", [{}, {"tree_mask": True, "window": True, "sinks": True, "softcap": True}], ids=["plain", "all"]
)
def test_warm_up_runs_the_call_it_describes(step, options, monkeypatch):
    """On the reference backend: the facts of the call it makes are those it was given, as far as the step has them."""
    seen = []
    run = registry.run_attention

    def spy(call):
        seen.append(call.meta())
        return run(call)

    monkeypatch.setattr("spec_ops.backends.warming.run_attention", spy)
    sizes = (
        {"num_kv_heads": 2, "head_dim": 16, "v_head_dim": 8}
        if step.startswith("mha")
        else {"num_kv_heads": 1, "head_dim": 24, "v_head_dim": 16}
    )
    options = dict(options)
    if step in ("mha_extend", "mla_extend"):
        options.pop("tree_mask", None)
    base = AttentionMeta(
        step=step, dtype=torch.float32, kv_dtype=FP8, num_heads=4, page_size=4, q_len=5, tree_mask=False, window=False,
        sinks=False, softcap=False, **sizes,
    )  # fmt: skip
    meta = dataclasses.replace(base, **options)
    warm_up(meta, batch_size=2, max_pages=3, device="cpu")
    assert seen == [meta]


def test_warm_up_of_a_backend_that_cannot():
    with pytest.raises(BackendError, match="flashinfer-xqa needs a CUDA device"):
        warm_up(GQA, backend="flashinfer-xqa", device="cpu")


def test_backends_command(monkeypatch):
    monkeypatch.setattr(cli.options.console, "width", 200)
    result = CliRunner().invoke(cli.app, ["backends", "--arch", "sm100"])
    assert result.exit_code == 0, result.output
    table = {(r.step, r.kind, r.kv_dtype): r.chosen for r in choices(100)}
    for (step, kind, kv_dtype), name in table.items():
        column = 2 if kv_dtype == torch.bfloat16 else 3
        (cells,) = (c for line in result.output.splitlines() if (c := line.split()[:4])[:2] == [step, kind])
        assert cells[column] == name
    assert "tree_mask" not in result.output
    assert len(result.output.splitlines()) < 24
    assert max(map(len, result.output.splitlines())) < 130
    if importlib.util.find_spec("flashinfer") is None:
        assert 'pip install ".[flashinfer]"' in result.output
    verbose = CliRunner().invoke(cli.app, ["backends", "--arch", "sm100", "--verbose"]).output
    lines = [line.strip() for line in verbose.splitlines()]
    assert lines.index("not flashinfer-trtllm") < next(
        i for i, x in enumerate(lines) if x.startswith("does not support tree_mask:")
    )
    for row in choices(100):
        for name, why in row.reasons.items():
            start = lines.index(f"not {name}")
            assert any(line.startswith(why) for line in lines[start + 1 :]), (name, why)
    wrong = CliRunner().invoke(cli.app, ["backends", "--arch", "hopper"])
    assert wrong.exit_code == 2
    assert "explain" not in wrong.output
    assert "Invalid value for --arch: must be one of sm75" in wrong.output


def test_backends_command_for_this_machine(monkeypatch):
    monkeypatch.setattr(cli.options.console, "width", 200)
    result = CliRunner().invoke(cli.app, ["backends", "--verbose"])
    assert result.exit_code == 0, result.output
    if not torch.cuda.is_available():
        assert "every call: reference" in result.output
        assert "not flashinfer-xqa\n    needs a CUDA device" in result.output


def test_backends_command_of_two_kinds_of_gpu(monkeypatch):
    """A table for each architecture, once where two GPUs are of one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("spec_ops.backends.registry._cuda_arch", lambda index: (90, 80, 90)[index])
    result = CliRunner().invoke(cli.app, ["backends"])
    assert result.exit_code == 0, result.output
    assert re.findall(r"^sm_\d+ \(this machine\)", result.output, re.M) == ["sm_90 (this machine)", "sm_80 (this machine)"]


@pytest.fixture
def naive_round():
    spec = importlib.util.spec_from_file_location("naive_round_for_plans", EXAMPLES / "naive_round.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.PagedKVCache = functools.partial(module.PagedKVCache, dtype=BF16)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        yield module


def plan(module, mla: bool, width: int, arch: str):
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
    if mla:
        sizes |= {"kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16}
    else:
        sizes |= {"num_kv_heads": 1, "head_dim": 128}
    target = CausalLM(ModelConfig(num_layers=1, **sizes))
    draft = MTPDraft(ModelConfig(num_layers=1, **sizes), target)
    made = module.NaiveRound(target.to(BF16), draft.to(BF16), steps=2, width=width).eval()
    made.hidden = made.hidden.to(BF16)
    return explain(made, arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "mla", "width"),
    [
        ("sm100", False, 1),
        ("sm100", True, 4),
        ("sm90", False, 4),
        ("sm90", True, 1),
        ("sm120", False, 4),
    ],
)
def test_plans_hold_what_the_kernels_read_and_nothing_else(mla, width, arch, naive_round):
    """The naive round, which hands every call every input, planned for each architecture."""
    report = plan(naive_round, mla, width, arch)
    steps = {line.split(": ")[0]: line.split(": ")[1].split(" (")[0].split(",")[0] for line in report.kernels()}
    number = int(arch[2:])
    for step, name in steps.items():
        backend = get_backend(name)
        if width > 1 and not step.endswith("extend"):
            assert backend.tree_mask
            assert name not in MASKLESS
        elif number == 100:
            assert name == ("tokenspeed" if mla else "flashinfer-trtllm")
        assert not backend.host_plan
    generations = sum(report.after.get(n, 0) for n in ("kv_indices", "draft_kv_indices", "draft_kv_indices_steps"))
    assert report.before["kv_indices"] > 0
    assert generations == 0
    assert report.after.get(HOST_COPIES, 0) == 0
    if "reference" not in steps.values():  # it reads max_seq_len
        assert report.after.get(ITEMS, 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("example", "width"), [("blackwell_eagle3.py", "1"), ("blackwell_mtp_mla.py", "4")])
def test_blackwell_examples(example, width):
    """Each asserts its plan for sm_100 itself."""
    done = run_script(EXAMPLES / example, "--width", width)
    assert done.returncode == 0, done.stderr
    assert "24 tokens for 2 requests" in done.stdout
    assert "on sm_100 it would be" in done.stdout


def test_auto_goes_on_without_the_package(monkeypatch):
    """At run time, on a machine that could run trtllm-gen but has no FlashInfer."""
    monkeypatch.setattr(registry, "device_arch", lambda device: 100)
    for module in ("flashinfer", "tokenspeed_mla"):
        monkeypatch.setitem(sys.modules, module, None)
    registry._forget()
    q, cache = torch.randn(1, 1, 4, 64).bfloat16(), torch.randn(2, 16, 2, 64).bfloat16()
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    triton = get_backend("triton")
    if triton is not None:  # it needs a GPU, which this test only pretends to have
        spec_ops.backends.unregister_backend("triton")
    try:
        out = spec_ops.mha_draft_decode(q, cache, cache, table, lens)
        assert torch.equal(out, spec_ops.mha_draft_decode(q, cache, cache, table, lens, backend="reference"))
        with pytest.raises(BackendError, match=r"flashinfer-trtllm needs flashinfer, which is not installed"):
            spec_ops.mha_draft_decode(q, cache, cache, table, lens, backend="flashinfer-trtllm")
    finally:
        if triton is not None:
            spec_ops.register_backend(triton)
        registry._forget()


BACKENDS_PAGE, WRITING_PAGE = DOCS / "guides" / "backends.md", DOCS / "guides" / "writing-a-backend.md"


def test_the_table_of_the_docs_is_in_the_order_of_the_ranks():
    rows = [line.split("`")[1] for line in BACKENDS_PAGE.read_text().splitlines() if line.startswith("| `")]
    table = rows[: rows.index("reference-deterministic") + 1]
    assert [name for name in table if name in spec_ops.available_backends()] == list(spec_ops.available_backends())


def test_the_backend_of_the_docs_registers():
    code = WRITING_PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert "register_backend" in code
    exec(code, {})
    try:
        assert select_backend(dataclasses.replace(GQA, step="mha_draft_decode", q_len=1), 100).backend.name == "mine"
    finally:
        spec_ops.backends.unregister_backend("mine")
