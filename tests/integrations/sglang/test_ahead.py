"""Kernels that are compiled while an engine starts are those that its forwards launch."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

from spec_ops import ops  # noqa: E402
from spec_ops.backends.call import RAGGED, AttentionCall  # noqa: E402
from spec_ops.backends.triton.attention import launcher  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Target, compile_in_background  # noqa: E402
from spec_ops.integrations import ahead  # noqa: E402
from spec_ops.integrations.sglang import ahead as ours  # noqa: E402
from spec_ops.integrations.sglang import attention  # noqa: E402
from spec_ops.integrations.sglang.attention import SpecOpsAttention  # noqa: E402
from spec_ops.integrations.sglang.drafting import SpecOpsDraftSteps  # noqa: E402
from tests.helpers.triton_target import choosing_for, keys, pretended_gpu  # noqa: E402
from tests.integrations.sglang import stand_ins  # noqa: E402
from tests.integrations.sglang.stand_ins import Mode, WriteLoc, batch  # noqa: E402

H200, CUDA, BF16 = Target(90, 132), torch.device("cuda", 0), torch.bfloat16
REQUESTS, NODES, STEPS = 9, 4, 3
EAGLE = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": NODES, "speculative_num_steps": STEPS}
CHAIN, TREE = EAGLE | {"speculative_eagle_topk": 1}, EAGLE | {"speculative_eagle_topk": 2}


@pytest.fixture(autouse=True)
def sizes(monkeypatch) -> None:
    """Heads that kernels take."""
    for name, value in {"HEADS": 16, "KV_HEADS": 4, "DIM": 64, "RANK": 512, "ROPE": 64}.items():
        monkeypatch.setattr(stand_ins, name, value)
    monkeypatch.setattr(attention, "ops", SimpleNamespace(
        page_table=ops.page_table, qlen_mask_to_tree_mask=ops.qlen_mask_to_tree_mask,
        **{f"{kind}_{step}": compute(f"{kind}_{step}") for kind in ("mha", "mla")
           for step in ("draft_decode", "target_verify", "draft_extend", "extend")},
    ))  # fmt: skip


def compute(step: str) -> Any:
    """What the op of this name does on a GPU, here on a CPU's tensors."""

    def call(q, *given, mask_len=None, scale=1.0, kv_scale=1.0, k_scale=1.0, v_scale=1.0, **options):
        caches, where = ((given[0], given[0], given[1]), given[2:]) if step[:3] == "mla" else ((*given[:2], None), given[2:])
        made = AttentionCall(step, q, *caches, *where[:2], **options)
        if step in RAGGED:
            made.q_indptr, made.max_q_len = where[2:]
        elif made.tree_mask is not None:
            made.mask_len = q.shape[1] if mask_len is None else mask_len
        return launcher.attention(made)

    return call


def runner(page_size: int, mla: bool, layers: list[dict[str, Any]], **arguments: Any) -> SimpleNamespace:
    pool = (stand_ins.MLATokenToKVPool if mla else stand_ins.MHATokenToKVPool)(
        stand_ins.slots_of(page_size), page_size, dtype=BF16
    )
    made = stand_ins.runner(page_size, mla=mla, pool=pool, requests=REQUESTS, chunked_prefill_size=200, **arguments)
    made.dtype, made.max_running_requests = BF16, REQUESTS
    modules = [stand_ins.layer(mla, **changes) for changes in layers]
    made.model = SimpleNamespace(modules=lambda: [SimpleNamespace(), *modules])
    return made


def forward(backend: SpecOpsAttention, fb: SimpleNamespace, tokens: int, layer: SimpleNamespace) -> None:
    q = torch.zeros(tokens, stand_ins.HEADS * layer.qk_head_dim, dtype=BF16)
    k = torch.zeros(tokens, 1, 1, dtype=BF16)
    call = backend.forward_decode if fb.forward_mode is Mode.DECODE else backend.forward_extend
    call(q, k, k, layer, fb, save_kv_cache=False)


def launched(given: SimpleNamespace, lens: list[int]) -> set[tuple[str, str]]:
    """Keys of the binaries that all forwards of these many requests look for."""
    args, found = given.server_args, set()
    speculates = args.speculative_algorithm is not None

    def batch_of(mode: Mode, bs: int, **more: Any) -> SimpleNamespace:
        return batch(mode, [1] * bs, [8] * bs, torch.zeros(1), **more)

    with pretended_gpu(), choosing_for(H200):
        for layer in given.model.modules()[1:]:
            backend = SpecOpsAttention(given, WriteLoc)
            for bs in lens:
                with keys() as seen:
                    if given.is_draft_worker:
                        steps = SpecOpsDraftSteps(
                            given, args.speculative_eagle_topk, STEPS, lambda runner: SpecOpsAttention(runner, WriteLoc)
                        )
                        fb = batch_of(Mode.DECODE, bs)
                        steps.init_forward_metadata(fb)
                        forward(steps.attn_backends[0], fb, bs * args.speculative_eagle_topk, layer)
                    mode = Mode.DRAFT_EXTEND_V2 if given.is_draft_worker else Mode.TARGET_VERIFY
                    fb = batch_of(mode if speculates else Mode.DECODE, bs)
                    backend.init_forward_metadata(fb)
                    forward(backend, fb, bs * (NODES if speculates else 1), layer)
                    for most in (1, 40, 200):
                        fb = batch_of(Mode.EXTEND, bs, extend_seq_lens=torch.full((bs,), most), extend_seq_lens_cpu=[most] * bs)
                        backend.init_forward_metadata(fb)
                        forward(backend, fb, most * bs, layer)
                found.update(seen)
    return found


WINDOWS = [{}, {"sliding_window_size": 7}, {"sliding_window_size": None, "logit_cap": 5.0}, {}]
MLA = pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])


@MLA
@pytest.mark.parametrize("draft", [False, True], ids=["target", "draft"])
@pytest.mark.parametrize(("page_size", "arguments"), [(16, {}), (64, CHAIN), (1, TREE)], ids=["plain", "chain", "tree"])
def test_what_is_compiled_is_what_forwards_launch(page_size, arguments, draft, mla):
    if draft and not arguments:
        pytest.skip("no draft")
    given = runner(page_size, mla, [{}] if mla else WINDOWS, **arguments)
    given.is_draft_worker = draft
    with pretended_gpu(), keys() as compiled:
        for layer, batches in ours.needed(given):
            compile_in_background(ahead.launches(layer, batches, H200), CUDA)
    assert len(list(ours.needed(given))) == (1 if mla else 3)
    binaries = launched(given, list(range(1, REQUESTS + 1)))
    assert binaries <= set(compiled), {name for name, _ in binaries - set(compiled)}
    assert len(set(compiled)) <= len(binaries) + 1


def test_batches_that_no_graph_serves_are_left_out():
    given = runner(64, False, WINDOWS)
    given.max_running_requests = 4096
    assert ours.batches(given).requests == 256
    given.server_args.cuda_graph_config = SimpleNamespace(decode=SimpleNamespace(bs=[1, 2, 8]))
    assert ours.batches(given).requests == 8
    given.max_running_requests = 3
    assert ours.batches(given).requests == 3
    assert ours.batches(given).prompt == 200
    given.server_args.chunked_prefill_size = -1
    assert ours.batches(given).prompt == 8192


def test_a_backend_begins_when_it_is_made(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(attention.ahead, "start", seen.append)
    given = runner(64, False, WINDOWS, **CHAIN)
    SpecOpsAttention(given, WriteLoc)
    assert seen == [given]


def test_what_is_begun_is_for_the_runner_s_device(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(ahead, "_start", lambda *given: seen.append(given) or 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    given = runner(64, False, WINDOWS, **CHAIN)
    assert ours.start(given) == 0  # a CPU's
    given.device = "cuda"
    assert ours.start(given) == 3
    assert {device for _, _, device in seen} == {torch.device("cuda", 1)}
    del given.model
    assert ours.start(given) == 0
