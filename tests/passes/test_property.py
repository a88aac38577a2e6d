"""Random programs over the ops: with the passes and without, outputs and caches are equal."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spec_ops
from tests.helpers.csr_backend import CSR
from tests.helpers.pass_harness import Traced, registered

BS, HEADS, KV_HEADS, DIM, PAGE_SIZE, WIDTH, VOCAB = 2, 4, 2, 16, 4, 48, 11


@dataclass(frozen=True)
class Step:
    """One attention call of a random program; lengths are `base + offset`."""

    kind: str  # the op, without its prefix
    q_len: int
    offset: int
    spelling: str  # how the length is computed
    table: str  # "own", "shared", or "returned": own and also an output
    indices: str  # "none", "kv", "draft"
    host: bool  # pass seq_lens_cpu and max_seq_len
    select: str  # "none", "head": one row of logits, "all": all rows of logits
    layer: int


STEPS = st.builds(
    lambda kind, q_len, extra, **rest: Step(
        kind=kind, q_len=1 if kind == "draft_decode" else q_len, offset=(1 if kind == "draft_decode" else q_len) + extra, **rest
    ),
    kind=st.sampled_from(["draft_decode", "target_verify", "draft_extend", "extend"]),
    q_len=st.integers(2, 4),
    extra=st.integers(0, 3),
    spelling=st.sampled_from(["sum", "sum of sums", "accumulated", "masked", "other base"]),
    table=st.sampled_from(["own", "own", "shared", "returned"]),
    indices=st.sampled_from(["none", "kv", "draft"]),
    host=st.booleans(),
    select=st.sampled_from(["none", "head", "all"]),
    layer=st.integers(0, 1),
)


def length(step: Step, base, other, keep, running):
    if step.spelling == "sum":
        return base + step.offset
    if step.spelling == "sum of sums":
        return base.add(1).add(step.offset - 1)
    if step.spelling == "accumulated":
        for _ in range(step.offset):
            running = running + 1
        return running
    if step.spelling == "masked":
        return torch.where(keep, base + step.offset, 0)
    return other + step.offset


# How caches lie in memory, given `[layers, 2, pages, ...]`: each by itself, all in one storage, or the values of a page
# after its keys.
LAYOUTS = {
    "own": lambda pool, layer, kv: pool[layer, kv].clone(),
    "one pool": lambda pool, layer, kv: pool[layer, kv],
    "interleaved": lambda pool, layer, kv: pool.view(2, -1, 2, *pool.shape[3:])[layer, :, kv],
}


class Program(torch.nn.Module):
    def __init__(self, steps: list[Step], seed: int, layout: str) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.steps = steps

        def buffer(name: str, *shape: int, scale: float = 1.0) -> None:
            self.register_buffer(name, torch.randn(*shape, generator=g) * scale)

        pool = torch.randn(2, 2, BS * WIDTH // PAGE_SIZE, PAGE_SIZE, KV_HEADS, DIM, generator=g)
        for layer in range(2):
            for kv, name in enumerate("kv"):
                self.register_buffer(f"{name}{layer}", LAYOUTS[layout](pool, layer, kv))
        for name, out in (("wq", HEADS * DIM), ("wk", KV_HEADS * DIM), ("wv", KV_HEADS * DIM), ("head", VOCAB)):
            buffer(name, HEADS * DIM, out, scale=(HEADS * DIM) ** -0.5)
        pages = torch.randperm(BS * WIDTH // PAGE_SIZE, generator=g).reshape(BS, -1)
        slots = (pages[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).reshape(BS, WIDTH).to(torch.int32)
        self.register_buffer("req_to_token", slots)
        self.register_buffer("requests", torch.arange(BS))
        self.register_buffer("base", torch.randint(0, 20, (BS,), generator=g, dtype=torch.int32))
        self.register_buffer("other", torch.randint(0, 20, (BS,), generator=g, dtype=torch.int32))
        self.register_buffer("keep", torch.rand(BS, generator=g) < 0.7)
        self.register_buffer("row", torch.randint(0, 2, (BS,), generator=g))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x [bs, 4, heads * dim]`."""
        outputs = []
        widest = self.base + 7
        shared = spec_ops.page_table(self.req_to_token, self.requests, widest, PAGE_SIZE)
        for number, step in enumerate(self.steps):
            lens = length(step, self.base, self.other, self.keep, self.base)
            hidden = x[:, : step.q_len]
            k_cache, v_cache = getattr(self, f"k{step.layer}"), getattr(self, f"v{step.layer}")
            place = (lens[:, None] - step.q_len + torch.arange(step.q_len)).clamp(min=0)
            slots = self.req_to_token.gather(1, place.long())
            # The other base may be longer than the shared table covers.
            own = step.table != "shared" or step.spelling == "other base"
            table = spec_ops.page_table(self.req_to_token, self.requests, lens, PAGE_SIZE) if own else shared
            if step.table == "returned":
                outputs.append(table)
            k = (hidden @ self.wk).unflatten(-1, (KV_HEADS, DIM))
            v = (hidden @ self.wv).unflatten(-1, (KV_HEADS, DIM))
            spec_ops.append_kv(
                k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), torch.where(lens[:, None] > 0, slots, -1).flatten()
            )
            out = self.attend(step, hidden, k_cache, v_cache, table, lens, number)
            logits = out @ self.head
            x = torch.cat([x[:, : step.q_len] + out, x[:, step.q_len :]], 1)
            if step.select == "head":
                row = self.row.clamp(max=step.q_len - 1)
                outputs.append(logits.gather(1, row[:, None, None].expand(-1, 1, VOCAB))[:, 0])
            elif step.select == "all":
                outputs.append(logits)
        return [*outputs, x]

    def attend(self, step: Step, hidden, k_cache, v_cache, table, lens, number: int) -> torch.Tensor:
        options: dict[str, Any] = {}
        if step.indices == "kv" or (step.indices == "draft" and (step.spelling != "sum" or step.kind != "draft_decode")):
            options["kv_indptr"], options["kv_indices"] = spec_ops.kv_indices(self.req_to_token, self.requests, lens)
        elif step.indices == "draft":
            indptr, indices = spec_ops.draft_kv_indices(
                self.req_to_token, self.requests, self.base, step.offset - 1, 5, 1, PAGE_SIZE
            )
            options["kv_indptr"], options["kv_indices"] = indptr, indices
        if step.host:
            options["seq_lens_cpu"] = lens.cpu()
            options["max_seq_len"] = lens.max().item() + 1
        q = (hidden @ self.wq).unflatten(-1, (HEADS, DIM))
        if step.kind == "extend":
            indptr = torch.arange(BS + 1, dtype=torch.int32) * step.q_len
            out = spec_ops.mha_extend(q.flatten(0, 1), k_cache, v_cache, table, lens, indptr, step.q_len, **options)
            return out.unflatten(0, (BS, step.q_len)).flatten(2)
        op = getattr(spec_ops, f"mha_{step.kind}")
        return op(q, k_cache, v_cache, table, lens, **options).flatten(2)


@pytest.mark.slow
@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=1, max_size=4), seed=st.integers(0, 1000), layout=st.sampled_from(sorted(LAYOUTS)))
def test_passes_change_nothing(csr, steps, seed, layout):
    if csr:  # its kernel reads CSR always, and lengths shorter than the queries are not its business
        steps = [Step(**{**vars(s), "indices": "kv" if s.indices == "none" else s.indices, "spelling": "sum"}) for s in steps]
    x = torch.randn(BS, 4, HEADS * DIM, generator=torch.Generator().manual_seed(seed))
    with registered(CSR) if csr else contextlib.nullcontext():
        traced = Traced(Program(steps, seed, layout), x)
        plain, passed = traced.run(on=False), traced.run()
    assert passed.report.matches("select_backends") == len(steps)
    assert passed.report.matches("write_in_place") == (len(steps) if layout == "one pool" else 0)
    # Row selection hoisted above a matrix product changes its shape, hence the order of summation; all else is exact.
    for a, b in zip(passed.results[0], plain.results[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for name, want in plain.buffers.items():
        torch.testing.assert_close(passed.buffers[name], want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
