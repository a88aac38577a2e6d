"""Which batch-invariant kernel each cache of a Generator gets: one for all calls on it, decided by what those will be."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

import spec_ops
from spec_ops.decoding import Generator, PromptLookup, SpeculationConfig, fitting
from spec_ops.decoding.prefill import PromptPiece
from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Eagle3Draft, MTPDraft, StandaloneDraft
from spec_ops.models.target import CausalLM

PIECES, ANY = "triton-mla-pieces", "triton-deterministic"
SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_layers": 1}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16}
GQA = {"num_kv_heads": 2, "head_dim": 16}
CHAIN, TREE = SpeculationConfig(2), SpeculationConfig(2, topk=2, num_draft_tokens=4)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    for module in (fitting, sys.modules["spec_ops.decoding.generate"]):
        monkeypatch.setattr(module, "device_arch", lambda device: 90)


def model(**sizes) -> CausalLM:
    return CausalLM(ModelConfig(**SIZES, aux_layers=(0, 0, 0), **sizes)).bfloat16()


def drafts(target: CausalLM) -> dict:
    return {
        "eagle": Eagle3Draft(ModelConfig(**SIZES, **GQA), target, torch.arange(0, 60, 2)).bfloat16(),
        "mtp": MTPDraft(ModelConfig(**SIZES, **MLA), target).bfloat16(),
        "small": StandaloneDraft(model(**GQA)),
        "lookup": PromptLookup(),
        "none": None,
    }


def made(target, *drafting, **options) -> Generator:
    return Generator(target, *drafting, max_batch_size=2, max_seq_len=64, **{"invariant": True, **options})


def chosen(generator: Generator) -> tuple[str, ...]:
    caches = generator.target_cache, generator.draft_cache
    return tuple(cache.backend for cache in caches if cache is not None)


def in_round(generator: Generator) -> dict[str, set[str]]:
    """The kernels of a round's attention, by kind."""
    plan = spec_ops.explain(generator.round(2), arch=90, invariant=True)
    assert not [
        note for result in plan.results if result.name in ("require_invariance", "select_backends") for note in result.refused
    ]
    found: dict[str, set[str]] = {}
    for kernel in plan.chosen():
        for step in kernel.calls:
            found.setdefault(step[:3], set()).add(kernel.backend)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "config", "backends"),
    [
        ("none", None, (PIECES,)),
        ("lookup", CHAIN, (PIECES,)),
        ("eagle", CHAIN, (PIECES, ANY)),
        ("small", CHAIN, (PIECES, ANY)),
        ("mtp", CHAIN, (PIECES, PIECES)),
        ("mtp", TREE, (PIECES, PIECES)),
        ("eagle", TREE, (PIECES, ANY)),
    ],
)
def test_a_cache_has_one_kernel(draft, config, backends):
    """In prompts, and in every step of a round: of one without drafts, of two kinds of attention, and of a tree."""
    target = model(**MLA)
    generator = made(target, drafts(target)[draft], config)
    assert chosen(generator) == backends
    if (draft, config) in (("none", None), ("eagle", CHAIN), ("mtp", TREE)):  # a trace takes most of a test's time
        of_kind = in_round(generator)
        assert of_kind["mla"] == {backends[0]}
        assert of_kind.get("mha", {ANY}) == {ANY}
        assert len(of_kind) == 1 + (draft == "eagle")
    assert (generator.backend, generator.prefill_backend) == ("auto", "auto")
    rows, tables = torch.arange(1), torch.zeros(1, 2, dtype=torch.int32)
    piece = PromptPiece([[1, 2, 3]], rows, tables, 0, [3], generator.prefill_backend)
    for cache, backend in zip(filter(None, (generator.target_cache, generator.draft_cache)), backends, strict=True):
        assert piece.extend(cache)[1].backend == backend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (MLA, {"cache_dtype": torch.float8_e4m3fn}),
        (MLA | {"sliding_window": 32}, {}),
        (MLA | {"kv_lora_rank": 256}, {}),
        (GQA, {}),
        (MLA, {"prefill_backend": ANY}),
        (MLA, {"backend": ANY}),
    ],
)
def test_what_it_does_not_run_is_whole_on_the_other(sizes, options):
    generator = made(model(**sizes), **options)
    if options:
        assert set(in_round(generator).popitem()[1]) == {ANY}
    assert ANY in (generator.prefill_backend, generator.target_cache.backend)


@pytest.mark.parametrize(("dtype", "backend"), [(torch.float16, PIECES), (torch.float32, ANY)])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_dtypes_and_pages(dtype, backend, page_size):
    assert chosen(made(model(**MLA).to(dtype), page_size=page_size)) == (backend,)


def test_other_architectures(monkeypatch):
    for arch, backend in ((80, ANY), (100, ANY), (120, ANY), (None, "reference-deterministic")):
        monkeypatch.setattr(fitting, "device_arch", lambda device, arch=arch: arch)
        assert chosen(made(model(**MLA))) == (backend,)


def test_sizes_that_do_not_say_what_attends():
    """A target of the user's own."""
    target = model(**MLA)
    sizes = mock.Mock(spec=["kv_rows"], kv_rows=target.config.kv_rows)
    where = torch.bfloat16, torch.bfloat16, torch.device("cpu"), 64, 4, False
    assert fitting.cache_backend(sizes, *where) == ANY
    assert fitting.cache_backend(target.config, *where) == PIECES


def test_without_the_flag_nothing_is_chosen():
    assert chosen(made(model(**MLA), invariant=False)) == ("auto",)


@pytest.mark.slow
def test_named_it_serves_all():
    target = model(**MLA)
    for config in (CHAIN, TREE):
        generator = made(target, drafts(target)["mtp"], config, backend=PIECES)
        assert (generator.backend, generator.prefill_backend) == (PIECES, PIECES)
        assert in_round(generator) == {"mla": {PIECES}}


def test_a_call_alone_does_not_take_it():
    """A program of the user's own may make calls on the same cache that it does not run: `explain` says what to name."""

    def attend(q, cache, tables, lens):
        return spec_ops.mla_target_verify(q, cache, 512, tables, lens, scale=0.1)

    given = torch.randn(2, 4, 8, 576).bfloat16(), torch.zeros(4, 64, 576).bfloat16()
    tables, lens = torch.zeros(2, 2, dtype=torch.int32), torch.full((2,), 70, dtype=torch.int32)
    report = spec_ops.explain(attend, *given, tables, lens, arch=90, invariant=True)
    assert {kernel.backend for kernel in report.chosen()} == {ANY}
    said = f"{PIECES}: is taken by name, or by a Generator: every call on a cache must go to it"
    assert said in report.text(True)
    assert said not in spec_ops.explain(attend, *given, tables, lens, arch=100, invariant=True).text(True)
