"""The attention kernels on a GPU, where addresses pass 2^31 elements."""

from __future__ import annotations

import math
import os

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from tests.gpu.test_attention import made  # noqa: E402
from tests.helpers.attention_calls import BACKEND, BF16, DEVICE, call  # noqa: E402
from tests.ops.test_attention import STEP_OF_MODE, spread  # noqa: E402


@pytest.mark.parametrize("layout", ["tokens first", "heads first", "latent"])
@pytest.mark.parametrize("mode", ["verify_chain", "extend"])
def test_addresses_past_2_31_elements(mode, layout):
    """The last pages of a cache of more than 2^31 elements, the rest poison: the same bits as from a small cache."""
    page = (64, 576) if layout == "latent" else (64, 8, 128) if layout == "tokens first" else (8, 64, 128)
    pages, few = 2**31 // math.prod(page) + 20, 24
    small = torch.randn(few, *page, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).bfloat16()
    large = torch.full((pages, *page), float("nan"), dtype=BF16, device=DEVICE)
    assert large.numel() > 2**31
    large[-few:] = small
    bs, heads = 3, 16
    tables = torch.randperm(few, generator=torch.Generator().manual_seed(0)).view(bs, 8).to(torch.int32).to(DEVICE)
    seq_lens = torch.tensor([500, 65, 512], dtype=torch.int32, device=DEVICE)
    q = torch.randn(bs * 4, heads, page[-1], device=DEVICE).bfloat16()
    ragged = mode == "extend"
    queries = {"q_indptr": torch.arange(0, 13, 4, dtype=torch.int32, device=DEVICE), "max_q_len": 4} if ragged else {}

    def run(cache: torch.Tensor, first_page: int) -> torch.Tensor:
        common = {"q": q if ragged else q.view(bs, 4, heads, -1), "block_tables": tables + first_page, "seq_lens": seq_lens}
        if layout == "latent":
            return call(
                f"mla_{STEP_OF_MODE[mode]}", {**common, **queries, "kv_cache": cache, "kv_lora_rank": 512, "scale": 0.05}
            )
        cache = cache.transpose(1, 2) if layout == "heads first" else cache
        return call(f"mha_{STEP_OF_MODE[mode]}", {**common, **queries, "k_cache": cache, "v_cache": cache})

    expected = run(small, 0)
    assert expected.isfinite().all()
    assert torch.equal(run(large, pages - few), expected)


@pytest.mark.parametrize("backend", ["triton", "triton-deterministic"])
@pytest.mark.parametrize("mode", ["verify_chain", "verify_tree", "extend"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_strides_of_queries_past_2_31_elements(kind, mode, backend):
    """Of requests, of a request's queries and of heads."""
    case = made(kind, mode, lens=[3, 64, 200], q_lens=[1, 2, 9], heads=8, page_size=64)
    expected = case.run(backend=backend)
    reach = 2**32 if mode == "extend" else 2**31  # the last rows of a ragged call are padding
    for dim in range(case.arguments["q"].dim() - 1):
        assert torch.equal(case.run(backend=backend, q=spread(case.arguments["q"], dim, reach)), expected)


@pytest.mark.parametrize("backend", ["triton", "triton-deterministic"])
@pytest.mark.parametrize("mode", ["verify_chain", "verify_tree", "extend"])
@pytest.mark.parametrize(("kind", "dim"), [("mha", 0), ("mha", 1), ("mha", 2), ("mla", 0), ("mla", 1)])
def test_strides_of_caches_past_2_31_elements(kind, dim, mode, backend):
    """Of pages, of a page's tokens and of KV heads."""
    case = made(kind, mode, lens=[3, 64, 200], q_lens=[1, 2, 9], heads=8, kv_heads=4, page_size=64)
    names = ("k_cache", "v_cache") if kind == "mha" else ("kv_cache",)
    reach = 2**32 if mode == "verify_tree" else 2**31  # no request there has the last page
    far = {name: spread(case.arguments[name], dim, reach) for name in names}
    # Entries along `dim` at some distance: no descriptor reads either cache.
    near = {name: case.arguments[name].movedim(dim, 0) for name in names}
    near = {name: torch.stack([cache, cache], 1)[:, 0].movedim(0, dim) for name, cache in near.items()}
    got, expected = case.run(backend=backend, **far), case.run(backend=backend, **near)
    assert expected.isfinite().all()
    assert torch.equal(got, expected)


def test_strides_of_masks_past_2_31_elements():
    case = made("mha", "verify_tree", lens=[3, 64, 200], page_size=64)
    words = case.arguments["tree_mask"]
    expected = case.run(backend=BACKEND)
    assert torch.equal(case.run(backend=BACKEND, tree_mask=spread(words, 0)), expected)


def test_queries_past_2_31_elements():
    """The last request's queries begin past 2^31 elements of a strided tensor."""
    wide = torch.empty(3, 2**30 + 64, dtype=BF16, device=DEVICE)
    q = wide[:, : 8 * 64].unflatten(1, (1, 8, 64))
    q.copy_(torch.randn(3, 1, 8, 64, device=DEVICE))
    cache = torch.randn(4, 64, 2, 64, device=DEVICE).bfloat16()
    a = {"q": q, "k_cache": cache, "v_cache": cache, "block_tables": torch.arange(3, dtype=torch.int32, device=DEVICE)[:, None],
         "seq_lens": torch.tensor([3, 64, 40], dtype=torch.int32, device=DEVICE)}  # fmt: skip
    assert torch.equal(call("mha_draft_decode", a), call("mha_draft_decode", a | {"q": q.contiguous()}))
