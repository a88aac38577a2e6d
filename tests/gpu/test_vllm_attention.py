"""On a GPU, what vLLM asks of its attention: caches with keys beside values in both layouts, and CUDA graphs of uniform batches
that are replayed with other lengths and tables, and with padded requests."""

from __future__ import annotations

import pytest
import torch

from spec_ops.integrations.vllm.attention import attend, metadata_of, pages, write
from tests.helpers.dense_attention import attend as dense
from tests.helpers.dense_attention import causal_keys
from tests.helpers.vllm_stand_ins import common, layer

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM, PAGE, WIDTH = 8, 2, 128, 16, 16
DEVICE, DTYPE = "cuda", torch.bfloat16


def on_gpu(query_lens: list[int], seq_lens: list[int], tables: torch.Tensor):
    made = common(query_lens, seq_lens, tables)
    made.seq_lens, made.query_start_loc = made.seq_lens.to(DEVICE), made.query_start_loc.to(DEVICE)
    return made


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("queries", "options"), [(1, {}), (4, {}), (4, {"window_left": 63, "softcap": 20.0})])
def test_a_recorded_batch_is_replayed_with_others(queries, options, layout):
    g = torch.Generator(DEVICE).manual_seed(0)
    requests, lens = 4, [200, 17, 100, 0]
    tables = torch.randperm(requests * WIDTH, generator=g, device=DEVICE).view(requests, WIDTH).to(torch.int32)
    shape = (requests * WIDTH, KV_HEADS, PAGE, 2 * DIM) if layout == "HND" else (requests * WIDTH, PAGE, KV_HEADS, 2 * DIM)
    cache = torch.full(shape, float("nan"), device=DEVICE, dtype=DTYPE)
    cache = cache if layout == "HND" else cache.transpose(1, 2)
    k_cache, v_cache = pages(cache, DIM)
    keys, values = (
        torch.randn(requests, PAGE * WIDTH, KV_HEADS, DIM, generator=g, device=DEVICE, dtype=DTYPE) for _ in range(2)
    )
    slots = (tables.long()[..., None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten(1)
    for request, length in enumerate(lens):
        padded = torch.cat([slots[request, :length], torch.full((2,), -1, device=DEVICE)])
        write(layer(), keys[request, :length], values[request, :length], k_cache, v_cache, padded)

    batch = on_gpu([queries] * requests, [queries] * requests, torch.zeros_like(tables))
    wide = torch.randn(requests * queries, HEADS * DIM + 64, generator=g, device=DEVICE, dtype=DTYPE)
    query = wide[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
    out = torch.full((requests * queries, HEADS, DIM), float("nan"), device=DEVICE, dtype=DTYPE)
    (part,) = metadata_of(batch, 4).parts

    def run() -> None:
        attend(part, query, k_cache, v_cache, out, scale=0.09, **options)

    write(layer(), keys[0, :1], values[0, :1], k_cache, v_cache, slots[0, :1])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    batch.seq_lens.copy_(torch.tensor(lens))
    batch.block_table_tensor.copy_(tables)
    graph.replay()
    torch.cuda.synchronize()
    for request, length in enumerate(lens):
        rows = slice(request * queries, (request + 1) * queries)
        if not length:
            assert (out[rows] == 0).all()  # a padded request
            continue
        seen = causal_keys(length, queries, options.get("window_left", -1))
        wanted = dense(
            query[rows], keys[request].cpu().double(), values[request].cpu().double(), seen, scale=0.09,
            softcap=options.get("softcap", 0.0),
        )  # fmt: skip
        # bfloat16 results and weights: eight bits each.
        torch.testing.assert_close(out[rows].cpu().double(), wanted.out, rtol=2**-6, atol=2**-7)
