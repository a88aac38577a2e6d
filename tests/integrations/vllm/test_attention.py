"""Batches shaped as vLLM's against float64: caches of both layouts, chains, prefills, mixtures, padding; what a graph keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spec_ops.integrations.vllm.attention import (
    attend,
    attend_mla,
    check_recordable,
    metadata_of,
    pages,
    query_length,
    scales,
    uniform_requests,
    window_left,
    write,
)
from tests.helpers.dense_attention import attend as dense
from tests.helpers.dense_attention import causal_keys
from tests.helpers.vllm_stand_ins import DIM, HEADS, KV_HEADS, RANK, ROPE, cache, common, layer

CONTEXT, MOST = 48, 4
LAYOUTS = pytest.mark.parametrize("layout", ["HND", "NHD"])


class World:
    """A paged cache, and the keys and values of every request by position."""

    def __init__(self, requests: int, page_size: int = 16, layout: str = "HND", dtype: torch.dtype = torch.float32) -> None:
        width = CONTEXT // page_size
        self.g = torch.Generator().manual_seed(0)
        self.tables = torch.randperm(requests * width, generator=self.g).view(requests, width).to(torch.int32)
        self.cache = cache(requests * width, page_size, layout, dtype)
        self.page_size, self.layer = page_size, layer(*((0.5, 0.25) if dtype == torch.float8_e4m3fn else (1.0, 1.0)))
        self.keys, self.values = (torch.randn(requests, CONTEXT, KV_HEADS, DIM, generator=self.g) for _ in range(2))

    def slot(self, request: int, position: int) -> int:
        return int(self.tables[request, position // self.page_size]) * self.page_size + position % self.page_size

    def store(self, positions: list[tuple[int, int]]) -> None:
        rows = tuple(torch.tensor(x) for x in zip(*positions, strict=True))
        slots = torch.tensor([self.slot(*position) for position in positions])
        padded = torch.cat([slots, torch.tensor([-1, -1])])  # vLLM pads; here slots more than tokens
        write(self.layer, self.keys[rows], self.values[rows], *pages(self.cache, DIM), padded)

    def run(self, query_lens: list[int], seq_lens: list[int], padding: int = 0, **options) -> torch.Tensor:
        """Stores all keys, attends, and checks every token."""
        self.store([(request, at) for request, n in enumerate(seq_lens) for at in range(n)])
        meta = metadata_of(common(query_lens, seq_lens, self.tables[: len(seq_lens)]), MOST)
        tokens = sum(query_lens)
        wide = torch.randn(tokens + padding, HEADS * DIM + 8, generator=self.g)  # queries are a part of a product's rows
        query = wide[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
        out = torch.full((tokens + padding, HEADS, DIM), 7.0)
        given = {"scale": 0.3, "window_left": -1, "softcap": 0.0, "sinks": None} | options
        k_cache, v_cache = pages(self.cache, DIM)
        for part in meta.parts:
            attend(part, query, k_cache, v_cache, out, **given, **scales(self.layer, k_cache))
        assert (out[tokens:] == 7.0).all()
        start = 0
        for request, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            seen = causal_keys(length, count, given["window_left"])
            wanted = dense(
                query[start : start + count], self.seen(self.keys[request], self.layer._k_scale_float),
                self.seen(self.values[request], self.layer._v_scale_float), seen, scale=0.3, softcap=given["softcap"],
                sinks=given["sinks"],
            )  # fmt: skip
            torch.testing.assert_close(out[start : start + count], wanted.out.float(), rtol=1e-4, atol=1e-5)
            start += count
        return out

    def seen(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        """What the cache holds of them."""
        if self.cache.dtype == torch.float32:
            return values.double()
        return (values / scale).to(self.cache.dtype).double() * scale


@LAYOUTS
@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1, 1, 1], [1, 17, 40]),  # decode, or a step of a draft
        ([4, 4, 4], [4, 20, 33]),  # verify
        ([7, 30], [7, 30]),  # prefill
        ([5, 9], [20, 48]),  # prefill with a prefix
        ([4, 4, 11, 2], [9, 44, 30, 2]),  # verify beside prefill
        ([1, 1, 6], [5, 48, 6]),
        ([2, 4, 1], [8, 9, 10]),  # drafts of other lengths
        ([9, 1], [9, 3]),  # not ordered
    ],
)
def test_every_kind_of_batch(query_lens, seq_lens, page_size, layout):
    World(len(query_lens), page_size, layout).run(query_lens, seq_lens, padding=3)


@LAYOUTS
@pytest.mark.parametrize("options", [{"window_left": 6}, {"softcap": 5.0}, {"sinks": torch.randn(HEADS)}])
def test_windows_caps_and_sinks(options, layout):
    World(3, layout=layout).run([4, 4, 10], [12, 30, 31], **options)


@LAYOUTS
def test_fp8_caches_with_scales(layout):
    World(3, layout=layout, dtype=torch.float8_e4m3fn).run([1, 1, 10], [12, 30, 31])


def test_fp8_caches_are_bytes_to_vllm():
    world = World(1, dtype=torch.float8_e4m3fn)
    keys, values = pages(world.cache.view(torch.uint8), DIM)
    assert keys.dtype == values.dtype == torch.float8_e4m3fn
    assert keys.data_ptr() == world.cache.data_ptr()


def test_the_parts_of_a_batch():
    tables = torch.zeros(4, 3, dtype=torch.int32)
    meta = metadata_of(common([4, 4, 11, 2], [9, 44, 30, 2], tables), MOST)
    verify, extend = meta.parts
    assert (verify.step, verify.q_len, verify.tokens, len(verify.seq_lens)) == ("target_verify", 4, slice(0, 8), 2)
    assert (extend.step, extend.q_len, extend.tokens) == ("extend", 11, slice(8, 21))
    assert extend.q_indptr.tolist() == [0, 11, 13]
    (alone,) = metadata_of(common([5, 5], [5, 5], tables[:2]), MOST).parts  # more queries than are verified
    assert alone.step == "extend"


@pytest.mark.parametrize(
    ("query_lens", "most", "count"),
    [([1, 1], 1, 2), ([2, 2], 1, 0), ([4, 4, 1], 4, 2), ([0, 4], 4, 0), ([4, 4, 0, 0], 4, 2), ([5], 4, 0), ([], 4, 0)],
)
def test_requests_that_are_alike(query_lens, most, count):
    assert uniform_requests(query_lens, most) == count


def test_padded_requests_attend_nothing_and_do_not_change_the_length():
    """Requests without tokens, at the end of a batch."""
    world = World(3)
    world.run([4, 4, 0], [9, 30, 0])


def test_a_graph_keeps_the_runners_buffers():
    """What is recorded are views: the buffers' next contents are attended without any more work on the host."""
    world = World(2)
    batch = common([4, 4], [4, 4], world.tables.clone())
    check_recordable(batch, MOST)
    (part,) = metadata_of(batch, MOST).parts
    world.store([(request, at) for request in range(2) for at in range(40)])
    batch.seq_lens.copy_(torch.tensor([40, 0]))
    batch.block_table_tensor.copy_(world.tables)
    query, out = torch.randn(8, HEADS, DIM), torch.full((8, HEADS, DIM), float("nan"))
    attend(part, query, *pages(world.cache, DIM), out, scale=0.3)
    wanted = dense(query[:4], world.keys[0].double(), world.values[0].double(), causal_keys(40, 4, -1), scale=0.3)
    torch.testing.assert_close(out[:4], wanted.out.float(), rtol=1e-4, atol=1e-5)
    assert (out[4:] == 0).all()  # the padded request of a replay


@pytest.mark.parametrize("query_lens", [[4, 1], [8, 8], [4, 0]])
def test_a_graph_of_other_batches_is_refused(query_lens):
    tables = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"a full CUDA graph of requests of \d to \d tokens.*all have one, up to 4.*PIECEWISE"):
        check_recordable(common(query_lens, [8, 8], tables), MOST)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"causal": False}, "not causal.*let the draft use another backend"),
        ({"causal": torch.ones(2, dtype=torch.bool)}, "not causal"),
        ({"rswa_prefix_lens": torch.ones(2)}, "R-SWA"),
        ({"mm_req_doc_ranges": {0: [(0, 3)]}}, "prefix masks of images"),
    ],
)
def test_other_masks_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        metadata_of(common([1, 1], [3, 3], torch.zeros(2, 3, dtype=torch.int32), **changes), MOST)


@pytest.mark.parametrize(("sliding_window", "left"), [(None, -1), (-1, -1), (1, 0), (128, 127)])
def test_windows_count_the_query_in_vllm(sliding_window, left):
    assert window_left(sliding_window) == left


@pytest.mark.parametrize("query_len", [1, 4])
def test_latent_caches(query_len):
    """Decode and verify; a padded request follows, of which vLLM counts no token."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(3, CONTEXT, 1, RANK + ROPE, generator=g)
    tables = torch.randperm(9, generator=g).view(3, 3).to(torch.int32)
    latents = torch.zeros(9, 16, RANK + ROPE)
    latents[tables.long()] = rows.view(3, 3, 16, RANK + ROPE)
    lens = [7, 40, 0]
    starts = [0, query_len, 2 * query_len, 2 * query_len]
    q = torch.randn(2 * query_len, HEADS, RANK + ROPE, generator=g)
    out = attend_mla(q, latents, RANK, tables, torch.tensor(lens, dtype=torch.int32), query_length(starts), scale=0.2)
    assert out.shape == (2 * query_len, HEADS, RANK)
    for request in range(2):
        part = slice(request * query_len, (request + 1) * query_len)
        keys = rows[request].double()
        wanted = dense(q[part], keys, keys[..., :RANK], causal_keys(lens[request], query_len, -1), scale=0.2)
        torch.testing.assert_close(out[part], wanted.out.float(), rtol=1e-4, atol=1e-5)


def test_decodes_of_several_lengths_are_refused():
    assert query_length([0, 0, 0]) == 1
    with pytest.raises(ValueError, match="requests of 3 to 4 tokens are decoded together"):
        query_length([0, 4, 7])


def test_scales_are_read_of_fp8_caches_alone():
    made = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=0.25)
    assert scales(made, torch.zeros(1)) == {}
    assert scales(made, torch.zeros(1).to(torch.float8_e4m3fn)) == {"k_scale": 0.5, "v_scale": 0.25}
