"""The backend's methods on objects shaped as SGLang's, each forward mode against float64: without graphs, and as graphs call
them, with static buffers that are longer than the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_ops.integrations.sglang.attention import SpecOpsAttention
from spec_ops.integrations.sglang.drafting import SpecOpsDraftSteps, tree_words
from tests.helpers.dense_attention import attend, causal_keys, mask_words, tree_keys
from tests.integrations.sglang.stand_ins import (
    DIM,
    HEADS,
    KV_HEADS,
    RANK,
    ROPE,
    MHATokenToKVPool,
    MLATokenToKVPool,
    Mode,
    WriteLoc,
    batch,
    layer,
    runner,
    slots_of,
)  # fmt: skip

NODES = 4
ROWS = [3, 1, 5]
EAGLE = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": NODES, "speculative_num_steps": 3}
CHAIN, TREE = EAGLE | {"speculative_eagle_topk": 1}, EAGLE | {"speculative_eagle_topk": 2}


class World:
    """A backend, and the keys and values of every request by position."""

    def __init__(self, page_size: int = 4, mla: bool = False, pool: Any = None, **arguments: Any) -> None:
        self.runner, self.mla, self.page_size = runner(page_size, mla=mla, pool=pool, **arguments), mla, page_size
        self.backend = SpecOpsAttention(self.runner, WriteLoc)
        self.table = self.runner.req_to_token_pool.req_to_token
        self.g = torch.Generator().manual_seed(1)
        widths = (1, RANK + ROPE) if mla else (KV_HEADS, DIM)
        self.keys, self.values = (torch.randn(*self.table.shape, *widths, generator=self.g) for _ in range(2))
        if mla:
            self.values = self.keys[..., :RANK]

    def slots(self, positions: list[tuple[int, int]]) -> torch.Tensor:
        return torch.tensor([int(self.table[row, at]) for row, at in positions])

    def write(self, positions: list[tuple[int, int]], layer) -> None:
        """What earlier forwards wrote."""
        rows = tuple(torch.tensor(x) for x in zip(*positions, strict=True))
        self.backend._write_kv(layer, self.slots(positions), self.keys[rows], self.values[rows], None)

    def forward(self, fb: SimpleNamespace, new: list[tuple[int, int]], layer, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and results of the tokens at `new`."""
        rows = tuple(torch.tensor(x) for x in zip(*new, strict=True))
        q = torch.randn(len(new), HEADS, self.keys.shape[-1], generator=self.g)
        call = self.backend.forward_decode if fb.forward_mode is Mode.DECODE else self.backend.forward_extend
        out = call(q.flatten(1), self.keys[rows], self.values[rows], layer, fb, **more)
        assert out.shape == (len(new), HEADS * layer.v_head_dim)
        return q, out.view(len(new), HEADS, -1)

    def check(self, row: int, q: torch.Tensor, out: torch.Tensor, seen: list[list[int]], layer, **options: Any) -> None:
        wanted = attend(
            q, self.keys[row].double(), self.values[row].double(), seen, scale=layer.scaling, softcap=layer.logit_cap, **options
        )
        torch.testing.assert_close(out, wanted.out.to(out.dtype), rtol=1e-4, atol=1e-5)


def planned(world: World, mode: Mode, lens: list[int], new: list[tuple[int, int]], **more: Any) -> SimpleNamespace:
    fb = batch(mode, ROWS, lens, world.slots(new), **more)
    world.backend.init_forward_metadata(fb)
    return fb


def replayed(world: World, mode: Mode, lens: list[int], new: list[tuple[int, int]], **more: Any) -> SimpleNamespace:
    """As SGLang captures with other lengths, and replays: tensors are buffers of the largest batch."""
    buffers = batch(mode, [*ROWS, 0, 0], [*lens, 1, 1], world.slots(new), **more)
    buffers.batch_size = len(ROWS)
    captured = batch(mode, [0, 0, 0], [1, 1, 1], world.slots(new), **more)
    world.backend.init_cuda_graph_state(5, 5 * NODES)
    world.backend.init_forward_metadata_out_graph(captured, in_capture=True)
    world.backend.init_forward_metadata_in_graph(captured)
    attended = world.backend.forward_metadata
    world.backend.init_forward_metadata_out_graph(buffers)
    if mode is Mode.TARGET_VERIFY:  # the graph's own launches
        world.backend.init_forward_metadata_in_graph(buffers)
    else:
        assert world.backend.forward_metadata is attended
    # The captured launches have these addresses.
    assert world.backend.forward_metadata.block_tables.data_ptr() == attended.block_tables.data_ptr()
    assert world.backend.forward_metadata.seq_lens.data_ptr() == attended.seq_lens.data_ptr()
    return buffers


PLANS = pytest.mark.parametrize("plan", [planned, replayed])
MLA = pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])


@PLANS
@MLA
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode(plan, mla, page_size):
    world, lens = World(page_size, mla), [1, 17, 30]
    made, new = layer(mla), [(row, n - 1) for row, n in zip(ROWS, [1, 17, 30], strict=True)]
    world.write([(row, at) for row, n in zip(ROWS, lens, strict=True) for at in range(max(n - 1, 1))], made)
    q, out = world.forward(plan(world, Mode.DECODE, lens, new), new, made)
    for i, (row, n) in enumerate(zip(ROWS, lens, strict=True)):
        world.check(row, q[i : i + 1], out[i : i + 1], causal_keys(n, 1, -1), made)


@PLANS
@MLA
@pytest.mark.parametrize("mode", [Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2])
def test_verify_and_draft_extend_of_a_chain(plan, mla, mode):
    """For SGLang, verify's lengths are committed ones, and draft extend's have the drafts in them."""
    world, lens, made = World(4, mla, **CHAIN), [1, 17, 30], layer(mla)
    world.write([(row, at) for row, n in zip(ROWS, lens, strict=True) for at in range(n)], made)
    new = [(row, n + i) for row, n in zip(ROWS, lens, strict=True) for i in range(NODES)]
    given = lens if mode is Mode.TARGET_VERIFY else [n + NODES for n in lens]
    q, out = world.forward(plan(world, mode, given, new), new, made)
    for i, (row, n) in enumerate(zip(ROWS, lens, strict=True)):
        part = slice(i * NODES, (i + 1) * NODES)
        world.check(row, q[part], out[part], causal_keys(n + NODES, NODES, -1), made)


@PLANS
@MLA
def test_verify_of_trees(plan, mla):
    """The mask that SGLang's tree kernel left in our buffer, other trees in each request."""
    world, lens, made = World(1, mla, **TREE), [1, 17, 30], layer(mla)
    parents = [[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]]
    world.write([(row, at) for row, n in zip(ROWS, lens, strict=True) for at in range(n)], made)
    mask, _ = world.backend.get_verify_buffers_to_fill_after_draft()
    square = torch.tensor(
        [[[bool(word >> j & 1) for j in range(NODES)] for word in mask_words(p, list(range(NODES)))] for p in parents]
    )
    mask[: square.numel()] = square.flatten()
    new = [(row, n + i) for row, n in zip(ROWS, lens, strict=True) for i in range(NODES)]
    q, out = world.forward(plan(world, Mode.TARGET_VERIFY, lens, new), new, made)
    for i, (row, n) in enumerate(zip(ROWS, lens, strict=True)):
        part = slice(i * NODES, (i + 1) * NODES)
        world.check(row, q[part], out[part], tree_keys(n + NODES, parents[i], list(range(NODES)), -1), made)


@MLA
@pytest.mark.parametrize("prefix", [[0, 0, 0], [5, 0, 20]])
def test_ragged_extend(mla, prefix):
    """Prefill, with prefixes in the cache and without; of MLA too."""
    world, counts, made = World(4, mla), [7, 1, 12], layer(mla)
    if any(prefix):
        world.write([(row, at) for row, n in zip(ROWS, prefix, strict=True) for at in range(n)], made)
    lens = [p + n for p, n in zip(prefix, counts, strict=True)]
    new = [(row, p + i) for row, p, n in zip(ROWS, prefix, counts, strict=True) for i in range(n)]
    fb = planned(world, Mode.EXTEND, lens, new, extend_seq_lens=torch.tensor(counts), extend_seq_lens_cpu=counts)
    q, out = world.forward(fb, new, made)
    start = 0
    for row, n, length in zip(ROWS, counts, lens, strict=True):
        world.check(row, q[start : start + n], out[start : start + n], causal_keys(length, n, -1), made)
        start += n


def steps_of(world: World, topk: int) -> SpecOpsDraftSteps:
    return SpecOpsDraftSteps(world.runner, topk, 3, lambda runner: SpecOpsAttention(runner, WriteLoc))


@MLA
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("topk", "page_size"), [(1, 4), (1, 1), (2, 1)])
def test_steps_of_a_draft(topk, page_size, graph, mla):
    """Step i of a chain sees i + 1 drafts; of a tree, each branch its own in SGLang's slots."""
    world, lens, made = World(page_size, mla, **(CHAIN if topk == 1 else TREE)), [2, 17, 30], layer(mla)
    world.write([(row, at) for row, n in zip(ROWS, lens, strict=True) for at in range(n)], made)
    steps = steps_of(world, topk)
    assert len(steps.attn_backends) == 2
    fb = batch(Mode.DECODE, [*ROWS, 0], [*lens, 1], torch.zeros(1))
    fb.batch_size = len(ROWS)
    if graph:
        steps.init_cuda_graph_state(4, 16)
        steps.init_forward_metadata_out_graph(fb, in_capture=True)
        steps.init_forward_metadata_in_graph(fb)
    else:
        steps.init_forward_metadata(fb)
    for step, backend in enumerate(steps.attn_backends):
        world.backend = backend
        new = [(row, n + branch * 3 + step) for row, n in zip(ROWS, lens, strict=True) for branch in range(topk)]
        fb.out_cache_loc = world.slots(new)
        q, out = world.forward(fb, new, made)
        for i, (row, n) in enumerate((row, n) for row, n in zip(ROWS, lens, strict=True) for _ in range(topk)):
            own = n + i % topk * 3
            world.check(row, q[i : i + 1], out[i : i + 1], [[*range(n), *range(own, own + step + 1)]], made)


def test_words_of_a_draft_tree():
    assert tree_words(2, 3, 1) == [0b000011, 0b011000]
    assert tree_words(8, 8, 7)[7] == -(1 << 56)  # bit 63 is the sign


@pytest.mark.parametrize("window", [None, 0, 6])
def test_windows_caps_and_sinks_of_a_layer(window):
    world, made = World(4, **CHAIN), layer(sliding_window_size=window, logit_cap=5.0)
    world.write([(row, at) for row in ROWS for at in range(20)], made)
    new = [(row, 20 + i) for row in ROWS for i in range(NODES)]
    sinks = torch.randn(HEADS, generator=world.g).to(torch.bfloat16)
    q, out = world.forward(planned(world, Mode.TARGET_VERIFY, [20] * 3, new), new, made, sinks=sinks)
    for i, row in enumerate(ROWS):
        part = slice(i * NODES, (i + 1) * NODES)
        world.check(row, q[part], out[part], causal_keys(20 + NODES, NODES, window or -1), made, sinks=sinks.float())


@MLA
def test_scales_of_an_fp8_cache(mla):
    """Values are read as they were written: divided by the layer's scale, by the pool (of MLA by us)."""
    pool = (MLATokenToKVPool if mla else MHATokenToKVPool)(slots_of(4), 4, torch.float8_e4m3fn)
    world = World(4, mla, pool)
    scales = {"k_scale": torch.tensor(0.05), "v_scale": torch.tensor(0.2), "k_scale_float": 0.05, "v_scale_float": 0.2}
    made, new = layer(mla, **scales), [(row, 20) for row in ROWS]
    world.write([(row, at) for row in ROWS for at in range(20)], made)
    q, out = world.forward(planned(world, Mode.DECODE, [21] * 3, new), new, made)
    steps = [0.05, 0.05 if mla else 0.2]
    for i, row in enumerate(ROWS):
        keys, values = (
            (x[row] / s).to(torch.float8_e4m3fn).double() * s for x, s in zip((world.keys, world.values), steps, strict=True)
        )
        wanted = attend(q[i : i + 1], keys, values, causal_keys(21, 1, -1), scale=made.scaling)
        torch.testing.assert_close(out[i : i + 1], wanted.out.float(), rtol=1e-4, atol=1e-5)


def test_pages_with_heads_before_tokens():
    world, made = World(4, pool=MHATokenToKVPool(slots_of(4), 4, hnd=True)), layer()
    world.write([(row, at) for row in ROWS for at in range(20)], made)
    new = [(row, 20) for row in ROWS]
    q, out = world.forward(planned(world, Mode.DECODE, [21] * 3, new), new, made)
    for i, row in enumerate(ROWS):
        world.check(row, q[i : i + 1], out[i : i + 1], causal_keys(21, 1, -1), made)


def test_mla_in_two_parts():
    """As SGLang hands them to backends that it knows: latents and rotary parts apart."""
    world, made, new = World(4, mla=True), layer(mla=True), [(row, 20) for row in ROWS]
    world.write([(row, at) for row in ROWS for at in range(20)], made)
    fb = planned(world, Mode.DECODE, [21] * 3, new)
    rows = (torch.tensor(ROWS), torch.tensor([20] * 3))
    q, k = torch.randn(3, HEADS, RANK + ROPE, generator=world.g), world.keys[rows]
    parts = q[..., :RANK].flatten(1), k[..., :RANK], k[..., :RANK]
    out = world.backend.forward_decode(*parts, made, fb, q_rope=q[..., RANK:], k_rope=k[..., RANK:]).view(3, HEADS, -1)
    for i, row in enumerate(ROWS):
        world.check(row, q[i : i + 1], out[i : i + 1], causal_keys(21, 1, -1), made)


def test_a_layer_that_writes_nothing():
    """Layers may share another one's cache."""
    world, made, new = World(4), layer(), [(row, 20) for row in ROWS]
    world.write([(row, at) for row in ROWS for at in range(21)], made)
    fb = planned(world, Mode.DECODE, [21] * 3, new)
    world.runner.token_to_kv_pool.set_kv_buffer = None  # would raise
    q, out = world.forward(fb, new, made, save_kv_cache=False)
    world.check(3, q[:1], out[:1], causal_keys(21, 1, -1), made)


def test_no_host_lengths_are_asked_for():
    """The batches here have none: `seq_lens_cpu`, `seq_lens_sum` would be an AttributeError."""
    assert not SpecOpsAttention.needs_cpu_seq_lens
    assert not SpecOpsDraftSteps.needs_cpu_seq_lens


def test_idle_and_unknown_forwards():
    world = World(4)
    world.backend.init_forward_metadata(batch(Mode.IDLE, ROWS, [1, 1, 1], torch.zeros(0)))
    assert world.backend.forward_metadata is None
    with pytest.raises(NotImplementedError, match="SPLIT_PREFILL"):
        world.backend.init_forward_metadata(batch(Mode.SPLIT_PREFILL, ROWS, [1, 1, 1], torch.zeros(0)))
    with pytest.raises(NotImplementedError, match="prefill CUDA graphs"):
        world.backend.init_forward_metadata_out_graph(batch(Mode.EXTEND, ROWS, [1, 1, 1], torch.zeros(0)))


def test_an_argument_that_nobody_knows_is_refused():
    world, new = World(4), [(row, 1) for row in ROWS]
    fb = planned(world, Mode.DECODE, [2] * 3, new)
    with pytest.raises(NotImplementedError, match="cos_sin_cache"):
        world.forward(fb, new, layer(), cos_sin_cache=torch.zeros(1))
