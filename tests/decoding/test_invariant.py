"""Batch-invariant generation: in bfloat16 too, the text and its keys and values are those of plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import pytest
import torch

from spec_ops.backends import get_backend, register_backend, unregister_backend
from spec_ops.decoding import Generator, PromptLookup, SpeculationConfig
from spec_ops.decoding.fitting import check_invariant
from spec_ops.models.config import ModelConfig
from spec_ops.models.drafts import Eagle3Draft, StandaloneDraft
from spec_ops.models.pretrained import load_pair
from spec_ops.models.target import CausalLM
from spec_ops.ops.invariance import NotInvariantError

SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "rms_norm_eps": 1e-6}
GQA = {**SIZES, "num_kv_heads": 2, "head_dim": 16}
PROMPTS = [[5, 9, 2, 40, 7], [1, 2, 3], list(range(20, 37))]
NEW = 8


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def history(generator: Generator, prompts=PROMPTS, new: int = NEW) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The new tokens, and the bits of the keys and values of each request's committed tokens, of all layers side by side."""
    tokens = generator.generate(prompts, max_new_tokens=new).tokens
    state = generator.buckets.state(generator.bucket(min(len(prompts), generator.max_batch_size)))
    caches = [cache.flatten(0, 1).flatten(1) for cache in generator.target_cache.tensors()]
    found = []
    for row, prompt in enumerate(prompts):
        place = torch.arange(len(prompt) + new - 1)
        slots = state.block_tables[row, place // generator.page_size].long() * generator.page_size + place % generator.page_size
        found.append(torch.cat([bits(cache[slots]) for cache in caches], 1))
    return tokens, found


@pytest.fixture(scope="module")
def target() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(ModelConfig(num_layers=2, aux_layers=(0, 1, 1), **GQA)).bfloat16()


def options(**more):
    return {"max_seq_len": 48, "max_batch_size": 4, "page_size": 4, "invariant": True, **more}


def same(first, second) -> bool:
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


def eagle(target: CausalLM) -> Eagle3Draft:
    torch.manual_seed(1)
    config = ModelConfig(num_layers=1, **GQA)
    return Eagle3Draft(config, target, torch.arange(0, 60, 2)).bfloat16()


@pytest.mark.slow
def test_any_draft_and_length(target):
    want = history(Generator(target, **options()))
    torch.manual_seed(2)
    small = StandaloneDraft(CausalLM(ModelConfig(num_layers=1, **GQA)).bfloat16())
    ways = [
        (eagle(target), SpeculationConfig(1)),
        (eagle(target), SpeculationConfig(4)),
        (eagle(target), SpeculationConfig(3, topk=3, num_draft_tokens=8)),
        (small, SpeculationConfig(2)),
        (PromptLookup(), SpeculationConfig(3)),
        (StandaloneDraft(target), SpeculationConfig(3)),  # all accepted
    ]
    for draft, config in ways:
        assert same(history(Generator(target, draft, config, **options())), want), (type(draft), config)


@pytest.mark.slow
def test_neighbours_pieces_and_pages(target):
    """Alone, beside others, as rows become free, in pieces of a prompt, on other pages."""
    want = history(Generator(target, **options()))
    speculative = eagle(target), SpeculationConfig(2)
    for one, draft in itertools.product(range(3), ((), speculative)):
        tokens, kv = history(Generator(target, *draft, **options(max_batch_size=1)), PROMPTS[one : one + 1])
        assert tokens == want[0][one : one + 1]
        assert torch.equal(kv[0], want[1][one])
    for changes in ({"prefill_chunk_size": 4}, {"page_size": 16}, {"page_size": 1}):
        assert same(history(Generator(target, *speculative, **options(**changes))), want), changes
    refilled = Generator(target, *speculative, **options(max_batch_size=2))
    assert refilled.generate(PROMPTS, max_new_tokens=NEW).tokens == want[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(num_layers=1, aux_layers=(0, 0, 0), **GQA)).to(dtype)
    draft = eagle(target).to(dtype)
    assert same(history(Generator(target, draft, SpeculationConfig(3), **options())), history(Generator(target, **options())))


def test_mla_and_fp8_caches():
    mla = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24}
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(num_layers=2, aux_layers=(0, 1, 1), **SIZES, **mla)).bfloat16()
    draft = eagle(target)
    for more in ({}, {"cache_dtype": torch.float8_e4m3fn}):
        want = history(Generator(target, **options(**more)))
        assert same(history(Generator(target, draft, SpeculationConfig(3), **options(**more))), want)


def test_sampling_does_not_see_neighbours(target):
    from spec_ops.decoding import SamplingParams

    sampling = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in (3, 4, 5)]
    for draft in ((), (eagle(target), SpeculationConfig(3))):
        together = Generator(target, *draft, **options()).generate(PROMPTS, max_new_tokens=NEW, sampling=sampling)
        alone = Generator(target, *draft, **options()).generate(PROMPTS[:1], max_new_tokens=NEW, sampling=sampling[:1])
        assert together.tokens[0] == alone.tokens[0]


def test_shipped_pair():
    """Trained weights; the whole promise of the README."""
    target, draft, tokenizer = load_pair(dtype=torch.bfloat16)
    prompts = [tokenizer.encode(text) for text in ("def read(path):\n    ", "class Node:")]
    want = history(Generator(target, **options(max_seq_len=64)), prompts, 10)
    for config in (SpeculationConfig(3), SpeculationConfig(3, topk=2, num_draft_tokens=6)):
        assert same(history(Generator(target, draft, config, **options(max_seq_len=64)), prompts, 10), want)


def test_trees_need_a_backend_whose_paths_are_chains(target):
    """On the GPU too: there it is `triton-deterministic`, which declares that."""
    tree = eagle(target), SpeculationConfig(3, topk=2, num_draft_tokens=6)
    assert get_backend("triton-deterministic").tree_paths
    on_gpu = mock.Mock(ranks=None)
    for dtype in (torch.bfloat16, torch.float32):
        on_gpu.embed.weight = mock.Mock(device=torch.device("cuda"), dtype=dtype)
        check_invariant(on_gpu, True, tree[1], "triton-deterministic", None)
    plain = dataclasses.replace(get_backend("reference-deterministic"), name="chains-only", tree_paths=False)
    register_backend(plain)
    try:
        Generator(target, eagle(target), SpeculationConfig(3), **options(backend="chains-only"))
        with pytest.raises(ValueError, match="must be 1 with `invariant=True` and the backend 'chains-only'"):
            Generator(target, *tree, **options(backend="chains-only"))
    finally:
        unregister_backend("chains-only")


def test_shares_that_have_no_sums_in_one_order(target):
    """Of GPUs that do not see one another's memory, and of models whose weights are DTensors."""
    shared = mock.Mock(ranks=mock.Mock(), parameters=target.parameters)
    shared.embed.weight = mock.Mock(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    shared.ranks.name = "nobody"
    with pytest.raises(ValueError, match="`target` must be shared by 2, 4 or 8 GPUs that can write to one another's memory"):
        check_invariant(shared, False, SpeculationConfig(), "auto", None)
    shared.embed.weight = target.embed.weight
    check_invariant(shared, False, SpeculationConfig(), "auto", None)
    divided = mock.patch("torch.distributed.tensor.DTensor", torch.nn.Parameter)
    with divided, pytest.raises(ValueError, match="got one that transformers has divided"):
        check_invariant(shared, False, SpeculationConfig(), "auto", None)


def test_refused(target):
    with pytest.raises(ValueError, match="Generator: `backend` must be batch-invariant with `invariant=True`, got 'reference'"):
        Generator(target, **options(backend="reference"))
    with pytest.raises(ValueError, match="`prefill_backend` must be batch-invariant"):
        Generator(target, **options(prefill_backend="triton"))

    def mixing(logits, history, lengths):
        return logits - logits.mean(0)

    with pytest.raises(NotInvariantError, match=r"aten.mean.dim is over dimension 0 of \[1, 61\], so that it mixes rows"):
        Generator(target, **options()).generate(PROMPTS[:1], max_new_tokens=2, logits_processor=mixing)
