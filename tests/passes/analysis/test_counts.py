"""What is counted, on graphs small enough to count by hand."""

from __future__ import annotations

import pytest
import torch

import spec_ops
from spec_ops.ops.linear import skinny_mm_op
from spec_ops.passes.analysis import counts
from spec_ops.passes.analysis.counts import count_nodes
from tests.helpers.pass_harness import capture, capture_for_cuda, using_provider

BS, PAGE, WIDTH, DIM, VOCAB = 2, 4, 16, 8, 11


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(BS, 3, DIM, generator=g),
        "k": torch.randn(8, PAGE, 1, DIM, generator=g),
        "v": torch.randn(8, PAGE, 1, DIM, generator=g),
        "table": torch.arange(8, dtype=torch.int32).reshape(BS, 4),
        "base": torch.tensor([3, 6], dtype=torch.int32),
        "head": torch.randn(DIM, VOCAB, generator=g),
        "embed": torch.randn(VOCAB, DIM, generator=g),
    }


def attend(t: dict[str, torch.Tensor], x: torch.Tensor, step: str, lens: torch.Tensor, **options) -> torch.Tensor:
    op = getattr(spec_ops, f"mha_{step}")
    return x + op(x[:, :, None], t["k"], t["v"], t["table"], lens, **options)[:, :, 0]


def counted(fn, on_cuda: bool = False) -> dict[str, int]:
    if on_cuda:
        return count_nodes(capture_for_cuda(fn, tensors()).graph)
    return count_nodes(capture(fn, tensors())[0].graph)


def logits_of(step: str, choose=lambda logits: logits.argmax(-1)):
    return lambda t: choose(attend(t, t["x"], step, t["base"] + 3) @ t["head"])


def two_rounds(t):
    """An extend, and the next draft step, which reads the hidden rows and the token of the extend."""
    hidden = attend(t, t["x"], "draft_extend", t["base"] + 3)
    token = (hidden @ t["head"]).argmax(-1)[:, -1:]
    hidden = attend(t, hidden[:, -1:] + t["embed"][token], "draft_decode", t["base"] + 4)
    return (hidden @ t["head"]).argmax(-1)


HEADS = {
    "argmax": (logits_of("draft_extend"), BS * 3),
    "topk of a softmax": (logits_of("draft_extend", lambda x: torch.log_softmax(x, -1).topk(2)), BS * 3),
    "one row": (logits_of("draft_extend", lambda x: x[:, -1].argmax(-1)), BS * 3),
    "sampled": (
        logits_of("draft_extend", lambda x: spec_ops.sampling_probs(x[:, 0], torch.full((BS,), 0.5))),
        BS * 3,
    ),
    "drawn": (
        logits_of("draft_extend", lambda x: spec_ops.sample_logits(x, torch.full((BS, 3), 0.5), torch.full((BS,), 0.5)).tokens),
        BS * 3,
    ),
    "verify": (logits_of("target_verify"), 0),
    "returned logits": (logits_of("draft_extend", lambda x: x), 0),
    "the next round's head is a draft's": (two_rounds, BS * 3),
    "selected before": (
        lambda t: (attend(t, t["x"], "draft_extend", t["base"] + 3)[:, -1] @ t["head"]).argmax(-1),
        BS,
    ),
    "other products": (
        lambda t: ((attend(t, t["x"], "draft_extend", t["base"] + 3) @ t["head"]).relu() @ t["embed"] @ t["head"]).argmax(-1),
        BS * 3,
    ),
}


def skinny_products(t):
    """As `lower_skinny_mm` leaves them: in front of the head, and the head itself."""
    hidden = attend(t, t["x"], "draft_extend", t["base"] + 3).flatten(0, 1)
    hidden = skinny_mm_op(hidden, t["embed"][:DIM], None)
    return (hidden @ t["head"]).argmax(-1), skinny_mm_op(hidden, t["embed"], None).argmax(-1)


HEADS["skinny products"] = (skinny_products, 2 * BS * 3)


@pytest.mark.parametrize("case", HEADS)
def test_rows_of_the_lm_head(case):
    fn, rows = HEADS[case]
    assert counted(fn)[counts.HEAD_ROWS] == rows


def test_metadata_launches():
    def fn(t):
        lens, slots = t["base"] + 1, (t["base"] * 2)[:, None].flatten()
        first = attend(t, t["x"][:, :1], "draft_decode", lens)
        spec_ops.append_kv(t["k"], t["v"], first, first, slots)
        spec_ops.append_kv(t["k"], t["v"], first, first, slots.view(BS))  # the same buffer again
        return attend(t, first, "draft_decode", t["base"])  # an input is no launch

    assert counted(fn)[counts.METADATA_LAUNCHES] == 2


def test_host_copies_and_items_end_a_graph():
    def fn(t):
        x = attend(t, t["x"], "target_verify", t["base"], seq_lens_cpu=(t["base"] + 0 * t["base"]).cpu())
        return attend(t, x.exp(), "target_verify", t["base"], max_seq_len=t["base"].max().item())

    found = counted(fn, on_cuda=True)
    assert (found[counts.HOST_COPIES], found[counts.ITEMS]) == (1, 1)
    assert found[counts.CUDA_GRAPHS] == 2  # both read lengths, which are there before any attention
    assert counts.cuda_graphs(capture_for_cuda(fn, tensors()).graph) == 3  # in the order of the program
    assert counted(fn)[counts.HOST_COPIES] == 0


def test_a_copy_of_what_was_computed_cannot_be_moved_before_it():
    def fn(t):
        x = attend(t, t["x"], "target_verify", t["base"])
        return attend(t, x, "target_verify", t["base"], max_seq_len=x.argmax().item())

    assert counted(fn, on_cuda=True)[counts.CUDA_GRAPHS] == 2

    def thrice(t):
        x = attend(t, fn(t), "target_verify", t["base"])
        return attend(t, x, "target_verify", t["base"], max_seq_len=x.argmax().item())

    assert counted(thrice, on_cuda=True)[counts.CUDA_GRAPHS] == 3


def test_memory_that_is_written_in_place_keeps_its_order():
    """The host reads the lengths, then a kernel changes them, then the host reads them again."""

    def fn(t):
        first = t["base"][0].item()
        t["base"].add_(1)
        x = attend(t, t["x"], "target_verify", t["base"], max_seq_len=first)
        return attend(t, x, "target_verify", t["base"], max_seq_len=t["base"][0].item())

    graph = capture_for_cuda(fn, tensors()).graph
    assert any(node.target is torch.ops.aten.add_.Tensor for node in graph.nodes)
    assert counts.fewest_cuda_graphs(graph) == 2


def test_host_planned_calls_split_the_graph():
    def fn(t):
        x = t["x"]
        for _ in range(3):
            x = attend(t, x @ t["head"] @ t["embed"], "target_verify", t["base"], backend="provider")
        return x

    with using_provider(host_plan=True):
        found = counted(fn)
    assert (found[counts.HOST_PLANNED], found[counts.CUDA_GRAPHS]) == (3, 4)
    with using_provider():
        found = counted(fn)
    assert (found[counts.HOST_PLANNED], found[counts.CUDA_GRAPHS]) == (0, 1)


def test_back_to_back_calls_need_no_graph_between():
    def fn(t):
        x = t["x"][:, :, None]
        for _ in range(2):
            x = spec_ops.mha_target_verify(x, t["k"], t["v"], t["table"], t["base"], backend="provider")
        return x

    with using_provider(host_plan=True):
        found = counted(fn)
    assert (found[counts.HOST_PLANNED], found[counts.CUDA_GRAPHS]) == (2, 0)
