"""Batch-invariant MLA in pieces on a Hopper GPU: right, and the same bits however a call is made (`hopper/pieces.py`)."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

import spec_ops  # noqa: E402
from spec_ops.backends.triton.attention.hopper import mla_invariant  # noqa: E402
from spec_ops.decoding import Generator, PromptLookup, SpeculationConfig  # noqa: E402
from spec_ops.models.config import ModelConfig  # noqa: E402
from spec_ops.models.drafts import MTPDraft, StandaloneDraft  # noqa: E402
from spec_ops.models.target import CausalLM  # noqa: E402
from tests.gpu.test_attention import check_accuracy  # noqa: E402
from tests.gpu.test_deterministic import bits, rows  # noqa: E402
from tests.helpers.attention_calls import BF16, DEVICE, FP16  # noqa: E402
from tests.helpers.chains import as_chains  # noqa: E402
from tests.helpers.dense_attention import PREFIX, mask_words  # noqa: E402
from tests.ops.test_attention import make_case, poison_unseen  # noqa: E402

NAME = "triton-mla-pieces"
# Of blocks, pairs of them, and pieces; 6,145 keys and more are a fold of more than four pieces, 17,000 one of more than eight.
LENGTHS = (16, 63, 64, 65, 127, 128, 129, 200, 2047, 2048, 2049, 2063, 2111, 2112, 2113, 4096, 4100, 6145, 8200, 17_000)


def run(step: str, a: dict[str, Any]) -> torch.Tensor:
    return getattr(spec_ops, f"mla_{step}")(**a, backend=NAME)


def made(heads: int, q_len: int, **options: Any) -> dict[str, Any]:
    """`LENGTHS` are of the last query; pages of a request lie anywhere in one pool."""
    g = torch.Generator(DEVICE).manual_seed(heads + q_len)
    bs = len(LENGTHS)
    return {
        "q": torch.randn(bs, q_len, heads, 576, generator=g, device=DEVICE).to(BF16),
        "kv_cache": torch.randn(400, 64, 576, generator=g, device=DEVICE).to(BF16),
        "kv_lora_rank": 512,
        "block_tables": torch.randint(400, (bs, 272), generator=g, device=DEVICE, dtype=torch.int32),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
        "scale": 0.06,
        **options,
    }


@pytest.mark.parametrize("mode", ["draft_chain", "verify_chain", "extend", "verify_tree", "draft_tree"])
@pytest.mark.parametrize(("heads", "sinks", "dtype", "page_size"), [(16, False, BF16, 64), (128, True, FP16, 16)])
def test_accuracy(mode, heads, sinks, dtype, page_size):
    """Slots that no query sees hold NaN, and pages that hold none else are none of the pool's."""
    lens = [0, 1, 63, 64, 65, 127, 300, 2045, 2047, 2048, 2049, 4096, 5000, 17_000]
    q_lens = [min(length, (0, 3, 130)[i % 3]) for i, length in enumerate(lens)] if mode == "extend" else None
    case = make_case(
        "mla", mode, DEVICE, dtype=dtype, head_dim=576, v_dim=512, page_size=page_size, heads=heads, sinks=sinks, lens=lens,
        q_lens=q_lens,
    )  # fmt: skip
    poison_unseen(case)
    check_accuracy(case, NAME)


@pytest.mark.parametrize(("heads", "q_len"), [(128, 4), (128, 1), (16, 4), (16, 16)])
def test_any_batch(heads, q_len):
    """Each request alone, in random batches and at other places; and again while others are on the GPU."""
    a = made(heads, q_len)
    bs = len(LENGTHS)
    expected = bits(run("target_verify", a))
    rng = torch.Generator().manual_seed(1)
    batches = [torch.tensor([b]) for b in range(bs)]
    batches += [torch.randint(bs, (size,), generator=rng) for size in (2,) * 6 + (5,) * 6 + (40,) * 3] + [torch.arange(bs)] * 10
    for index in batches:
        index = index.to(DEVICE)
        assert torch.equal(bits(run("target_verify", rows(a, index))), expected[index]), index.tolist()


@pytest.mark.parametrize("heads", [16, 20, 128])
def test_any_number_of_queries(heads):
    """16 queries verified together, in parts down to one, and as a ragged extend."""
    a = made(heads, 16)
    whole = run("target_verify", a)
    expected = bits(whole)
    for first, last in [(i, i + 1) for i in range(16)] + [(0, 4), (4, 8), (12, 16), (5, 14)]:
        part = {"q": a["q"][:, first:last], "seq_lens": a["seq_lens"] - (16 - last)}
        assert torch.equal(bits(run("draft_decode", a | part)), expected[:, first:last]), (first, last)
    given = torch.randint(17, (len(LENGTHS),), generator=torch.Generator().manual_seed(0)).tolist()
    indptr = torch.tensor([0, *given]).cumsum(0).to(torch.int32).to(DEVICE)
    ragged = {"q": torch.cat([a["q"][b, 16 - n :] for b, n in enumerate(given)]), "q_indptr": indptr, "max_q_len": 16}
    picked = torch.cat([whole[b, 16 - n :] for b, n in enumerate(given)])
    assert torch.equal(bits(run("extend", a | ragged)), bits(picked))


def test_any_page_size():
    a = made(128, 4)
    expected = bits(run("target_verify", a))
    for size in (32, 16, 1):
        parts = 64 // size
        tables = a["block_tables"][:, :, None] * parts + torch.arange(parts, dtype=torch.int32, device=DEVICE)
        smaller = a | {"block_tables": tables.flatten(1), "kv_cache": a["kv_cache"].view(-1, size, 576)}
        assert torch.equal(bits(run("target_verify", smaller)), expected), size


def test_keys_that_are_not_seen():
    """Drafts after a query, of large values: a weight of 0 times those must not move how tensor cores align their sums."""
    a = made(128, 8)
    lengths = [8, 9, 66, 67, 70, 71, 72, 100, 130, 135, 2050, 2055, 2056, 4100]
    for length in lengths:
        one = rows(a, torch.tensor([0], device=DEVICE))
        one["block_tables"] = torch.arange(272, dtype=torch.int32, device=DEVICE)[None]
        one["seq_lens"] = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        first = one | {"q": one["q"][:, :1], "seq_lens": one["seq_lens"] - 7}
        expected = bits(run("draft_decode", first))
        cache = a["kv_cache"].clone()
        cache.flatten(0, 1)[length - 7 : length] = 3e4
        assert torch.equal(bits(run("target_verify", one | {"kv_cache": cache}))[:, :1], expected), length


# Where trees begin: around the ends of blocks, of pairs of them, and of pieces; the first two have less than their slots.
PREFIXES = (-20, -1, 0, 1, 60, 63, 64, 100, 127, 128, 1984, 2000, 2040, 2047, 2048, 2049, 4070, 6200)


def tree_case(rng: random.Random, heads: int, nodes: int, page_size: int, words: list[list[int]] | None = None, **options: Any):
    """The words of random trees, wide and deep ones, unless others are given, and a call of all their nodes."""
    prefixes = [max(prefix, 1 - nodes) for prefix in PREFIXES]
    reach = [rng.choice([1, 2, 4, nodes]) for _ in prefixes]
    trees = [[PREFIX, *(rng.randrange(max(0, node - r), node) for node in range(1, nodes))] for r in reach]
    a = made(heads, 1, **options)
    g = torch.Generator(DEVICE).manual_seed(nodes)
    q = torch.randn(len(prefixes), nodes, heads, 576, generator=g, device=DEVICE).to(a["kv_cache"].dtype)
    cache = a["kv_cache"].view(-1, page_size, 576)
    each = -(-(max(prefixes) + nodes) // page_size)  # requests share pages, but none has a page twice
    tables = torch.stack([torch.randperm(len(cache), generator=g, device=DEVICE)[:each] for _ in prefixes])
    if words is None:
        words = [mask_words(parents, list(range(nodes))) for parents in trees]
    lens = torch.tensor([prefix + nodes for prefix in prefixes], dtype=torch.int32, device=DEVICE)
    more = {"tree_mask": torch.tensor(words, device=DEVICE), "mask_len": nodes, "seq_lens": lens}
    return a | more | {"q": q, "kv_cache": cache, "block_tables": tables.to(torch.int32)}


def nodes_as_chains(a: dict[str, Any]) -> torch.Tensor:
    bs, nodes = a["q"].shape[:2]
    chains = as_chains(a, [(b, i) for b in range(bs) for i in range(nodes)])
    return bits(run("draft_decode", chains)).view(bs, nodes, -1)


@pytest.mark.parametrize(
    ("heads", "nodes", "page_size"),
    [(16, 6, 64), (128, 16, 64), (16, 16, 16), (8, 64, 64), (32, 33, 32), (64, 6, 1), (128, 6, 16), (128, 64, 64), (16, 64, 1),
     (64, 64, 64), (20, 7, 64), (96, 5, 16), (128, 1, 64), (2, 40, 64)],
)  # fmt: skip
def test_paths_are_chains(heads, nodes, page_size):
    """Each node beside the others, of its request and of other ones, and as a chain of its own."""
    rng = random.Random(nodes)
    a = tree_case(rng, heads, nodes, page_size)
    expected = nodes_as_chains(a)
    found = bits(run("target_verify", a)).view_as(expected)
    different = [(PREFIXES[b], i) for b, i in (found != expected).any(-1).nonzero().tolist()]
    assert not different
    some = sorted(rng.sample(range(nodes), min(nodes, 4)))  # a step of a draft: the last level asks, in other tiles than before
    step = {"q": a["q"][:, some], "tree_mask": a["tree_mask"][:, some]}
    assert torch.equal(bits(run("draft_decode", a | step)).view(len(PREFIXES), len(some), -1), expected[:, some])
    for index in ([3], [13], [0, 11, 11, 17], rng.choices(range(len(PREFIXES)), k=30)):
        part = rows(a, torch.tensor(index, device=DEVICE))
        assert torch.equal(bits(run("target_verify", part)).view(len(index), nodes, -1), expected[index]), index


@pytest.mark.parametrize("heads", [16, 128])
def test_masks_of_any_bits(heads):
    """Of no tree: queries that see no draft, not themselves, or what another one sees and more before it. In float16, with
    sinks; slots that no query sees hold NaN."""
    rng = random.Random(heads)
    words = [[rng.getrandbits(rng.choice([3, 23, 63])) & rng.getrandbits(63) for _ in range(23)] for _ in PREFIXES]
    for row in words:
        row[3], row[4], row[5] = 0, row[6] | 1 << 30, row[7] & -8 | 0b101  # a bit from `mask_len` on means nothing
    g = torch.Generator(DEVICE).manual_seed(0)
    cache = torch.randn(400, 64, 576, generator=g, device=DEVICE).to(FP16)
    sinks = torch.randn(heads, generator=g, device=DEVICE)
    for seen in (-1, 0b1011_0111_0110_1101):
        masks = [[word & seen for word in row] for row in words]
        a = tree_case(rng, heads, 23, 64, masks, kv_cache=cache, sinks=sinks)
        unseen = [bit for bit in range(23) if not seen >> bit & 1]
        pages = torch.arange(len(PREFIXES) * 98, device=DEVICE, dtype=torch.int32).view(len(PREFIXES), -1)
        a |= {"block_tables": pages, "kv_cache": cache.repeat(5, 1, 1)[: pages.numel()]}
        poisoned = a["kv_cache"].clone()
        for b, length in enumerate(a["seq_lens"].tolist()):
            slots = torch.tensor([length - 23 + bit for bit in unseen if length - 23 + bit >= 0], dtype=torch.long)
            poisoned[b * 98 + slots // 64, slots % 64] = float("nan")
            poisoned[b * 98 + length // 64, length % 64 :] = float("nan")
        out = run("target_verify", a | {"kv_cache": poisoned})
        expected = nodes_as_chains(a)
        found = bits(out).view_as(expected)
        different = [(PREFIXES[b], i) for b, i in (found != expected).any(-1).nonzero().tolist()]
        assert not different
        assert not out[:, 3][a["seq_lens"] <= 23].any()


@pytest.mark.parametrize(("heads", "q_len"), [(16, 16), (128, 4)])
def test_a_tree_that_is_a_chain(heads, q_len):
    a = made(heads, q_len)
    words = torch.tensor([[(1 << (i + 1)) - 1 for i in range(q_len)]] * len(LENGTHS), device=DEVICE)
    expected = bits(run("target_verify", a))
    assert torch.equal(bits(run("target_verify", a | {"tree_mask": words})), expected)
    # With slots behind the chain's that nobody sees, on pages that are none.
    later = a | {"tree_mask": words, "mask_len": 64, "seq_lens": a["seq_lens"] - q_len + 64}
    later["block_tables"] = torch.nn.functional.pad(a["block_tables"], (0, 1), value=2**31 - 1)
    for b, length in enumerate(LENGTHS):
        later["block_tables"][b, -(-length // 64) :] = 2**31 - 1
    assert torch.equal(bits(run("draft_decode", later)), expected)


def test_batches_of_many_launches(monkeypatch):
    """Where paths and partial results of a batch take more memory than a launch may."""
    a = tree_case(random.Random(0), 16, 16, 64)
    expected = bits(run("target_verify", a))
    monkeypatch.setattr(mla_invariant, "PARTIAL_BYTES", 1 << 25)
    assert torch.equal(bits(run("target_verify", a)), expected)


def history(generator: Generator, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The new tokens, and the bits of the latent rows of each request's committed tokens, of all layers side by side."""
    tokens = generator.generate(prompts, max_new_tokens=new).tokens
    assert generator.target_cache.backend == NAME
    state = generator.buckets.state(generator.bucket(len(prompts)))
    caches = [cache.flatten(0, 1) for cache in generator.target_cache.tensors()]
    found = []
    for row, prompt in enumerate(prompts):
        place = torch.arange(len(prompt) + new - 1, device=DEVICE)
        slots = state.block_tables[row, place // generator.page_size].long() * generator.page_size + place % generator.page_size
        found.append(torch.cat([bits(cache[slots]) for cache in caches], 1))
    return tokens, found


@pytest.mark.parametrize("compiled", [False, True])
def test_texts(compiled):
    """Chosen by a Generator, which names none: with any chain or tree, alone, in pieces of a prompt and on other pages."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_heads": 16}
    sizes |= {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    target = CausalLM(ModelConfig(num_layers=2, **sizes)).to(DEVICE, BF16)
    draft = MTPDraft(ModelConfig(num_layers=1, **sizes), target).to(DEVICE, BF16)
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(512, (length,), generator=rng).tolist() for length in (5, 70, 2040, 2100)]
    options: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 2200, "invariant": True, "compile": compiled}

    tokens, kept = history(Generator(target, **options), prompts, 24)
    ways = [(draft, SpeculationConfig(3), {}), (draft, SpeculationConfig(3, topk=2, num_draft_tokens=6), {})]
    ways += [(StandaloneDraft(target), SpeculationConfig(3, topk=4, num_draft_tokens=16), {})]
    if not compiled:  # compiling takes long
        ways += [(draft, SpeculationConfig(1), {}), (StandaloneDraft(target), SpeculationConfig(3), {})]
        ways += [(PromptLookup(), SpeculationConfig(2), {})]
        ways += [(draft, SpeculationConfig(2, topk=3, num_draft_tokens=8), {"page_size": 16})]
        ways += [(draft, SpeculationConfig(3), more) for more in ({"page_size": 16}, {"prefill_chunk_size": 100})]
    for drafts, config, more in ways:
        found = history(Generator(target, drafts, config, **options | more), prompts, 24)
        assert found[0] == tokens, (config, more)
        assert all(map(torch.equal, found[1], kept)), (config, more)
    one = Generator(target, draft, SpeculationConfig(3), **options | {"max_batch_size": 1})
    for i, prompt in enumerate(prompts):
        alone = history(one, [prompt], 24)
        assert alone[0] == tokens[i : i + 1]
        assert torch.equal(alone[1][0], kept[i])
