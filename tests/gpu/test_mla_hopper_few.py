"""The Hopper MLA kernel for few rows on a GPU, called directly: every way of cutting and combining tiles, against float64."""

from __future__ import annotations

import dataclasses
import os
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

from spec_ops.backends.triton.runtime import counters as workspace  # noqa: E402
from spec_ops.backends.triton.runtime.launch import recorded  # noqa: E402
from tests.gpu.test_attention import check_accuracy  # noqa: E402
from tests.helpers.attention_calls import BF16, DEVICE, FP16  # noqa: E402
from tests.helpers.dense_attention import mask_words  # noqa: E402
from tests.ops.test_attention import FP8, Case, make_case, poison_unseen  # noqa: E402

AROUND_BLOCKS = [0, 1, 63, 64, 65, 0, 127, 128, 129, 200, 1000]


@dataclasses.dataclass
class FewCase(Case):
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, **changes: Any) -> torch.Tensor:
        from spec_ops.backends.triton.attention.hopper import mla as mla_hopper
        from spec_ops.backends.triton.attention.hopper import mla_few as mla_hopper_few

        call = self.call(**changes)
        assert mla_hopper.supports(call)
        return mla_hopper_few.mla(call, **self.options)


def made(q_len: int = 1, heads: int = 16, tree: bool = False, options: Any = None, **wanted: Any) -> FewCase:
    """A verify step of `q_len` queries; as a chain without the harness' tree, whose chains have 1, 4 or 5 queries.

    After the last token of a request, and in pages that nobody has, the caches hold NaN.
    """
    wanted = {"dtype": BF16, "page_size": 64, "heads": heads, "head_dim": 576, "v_dim": 512, **wanted}
    case = make_case("mla", "verify_tree", DEVICE, num_nodes=q_len, **wanted)
    if not tree:
        case = dataclasses.replace(case.but(tree_mask=None, mask_len=None), trees=None)
    return FewCase(**vars(case), options=options or {})


def check_long(case: FewCase) -> None:
    """As `check_accuracy`, vectorized: float64 on the GPU, one request at a time.

    Weights are rounded once to the dtype (eps / 2 of each), and so is the result; 2^-11 of the weights is room for float32
    logits of up to about 50, whose products tensor cores truncate.
    """
    a = case.arguments
    out = case.run().double()
    q, q_len, eps = a["q"], a["q"].shape[1], torch.finfo(a["q"].dtype).eps
    for b, length in enumerate(a["seq_lens"].tolist()):
        position = torch.arange(length, device=DEVICE)
        keys = position[None] - (length - q_len)  # negative: before the drafts
        if case.trees is None:
            seen = keys <= torch.arange(q_len, device=DEVICE)[:, None]
        else:
            words = torch.tensor(mask_words(case.trees[b], case.nodes), device=DEVICE)
            seen = (keys < 0) | ((words[:, None] >> keys.clamp(min=0)) & 1 == 1)
        some = seen.any(1)
        assert torch.count_nonzero(out[b][~some]) == 0, f"request {b}: a query that sees nothing must give zeros"
        if not some.any():
            continue
        pages = a["block_tables"][b, : -(-length // a["kv_cache"].shape[1])].long()
        k = a["kv_cache"][pages].flatten(0, 1)[:length].double()
        logits = torch.einsum("qhd,kd->hqk", q[b][some].double(), k) * a["scale"]
        weights = logits.masked_fill(~seen[some], float("-inf")).softmax(-1)
        exact, bound = ((weights @ x).transpose(0, 1) for x in (k[:, :512], k[:, :512].abs()))
        error = (out[b][some] - exact).abs()
        worst = (error - (bound * (eps / 2 + 2**-11) + exact.abs() * eps / 2)).max()
        assert error.isfinite().all(), f"request {b}"
        assert worst <= 0, f"request {b} of {length} keys: {worst:.3g} beyond the bound"


# 16 rows, also of several queries; 12 and 15 rows, after which come the next request's.
@pytest.mark.parametrize(
    ("q_len", "heads", "tree"),
    [(1, 16, False), (2, 8, False), (4, 4, True), (1, 12, False), (5, 3, True)],
)
def test_lengths_around_blocks(q_len, heads, tree):
    check_accuracy(made(q_len, heads, tree, lens=AROUND_BLOCKS))


@pytest.mark.parametrize("wanted", [{"sinks": True, "page_size": 128}, {"dtype": FP16, "page_size": 256}], ids=str)
def test_features(wanted):
    check_accuracy(made(8, 2, True, lens=[300, 65, 0, 193], **wanted).but(kv_scale=1.5))


@pytest.mark.parametrize("page_size", [1, 16, 24, 32, 48])
def test_pages_shorter_than_a_block(page_size):
    check_long(made(2, 8, True, page_size=page_size, lens=[*AROUND_BLOCKS, 16, 17, 5000]))


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_slots_of_a_tree_that_no_query_sees(page_size):
    """The last level of a tree asks; dead branches hold NaN, in the last block, the one before it, or both. Their pages may be
    anywhere."""
    tree = {"width": 2, "draft_steps": 20, "heads": 8, "head_dim": 576, "v_dim": 512, "dtype": BF16, "page_size": page_size}
    case = FewCase(**vars(make_case("mla", "draft_tree", DEVICE, lens=[0, 24, 40, 60, 64, 70, 128, 3000], **tree)))
    assert poison_unseen(case) > 0
    check_accuracy(case)


@pytest.mark.parametrize("offset", [1, 4])
def test_queries_at_any_address(offset):
    case = made(lens=[300, 65])
    q = case.arguments["q"]
    moved = q.new_empty(q.numel() + offset)[offset:].view(q.shape).copy_(q)
    assert moved.is_contiguous()
    assert moved.data_ptr() % 16 != 0
    expected = case.run()
    case.arguments["q"] = moved
    assert torch.equal(case.run(), expected)


# Splits are combined by powers of two up to 64, and more in turns.
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 9, 16, 17, 32, 40, 64, 70, 150, 700])
def test_one_request_over_many_programs(blocks):
    check_long(made(lens=[64 * blocks - 19]))


@pytest.mark.parametrize("options", [{}, {"min_blocks": 3}, {"parts": 4}, {"parts": 7}, {"parts": 8}], ids=str)
def test_ranges_that_begin_and_end_inside_requests(options):
    lens = [300, 64, 700, 0, 130, 65, 4000, 320, 5, 9000, 900, 128, 128, 0, 1, 20000]
    check_long(made(options=options, lens=lens))


def test_more_requests_than_programs():
    """Several whole requests in a program: each one's queries wait for their place."""
    generator = torch.Generator().manual_seed(2)
    check_long(made(lens=torch.randint(0, 300, (400,), generator=generator).tolist()))


def test_unused_rows_of_wide_caches():
    """A layer's view whose rows are wider than 576: other rows' NaN must not be read as part of a row."""
    check_accuracy(made(lens=[64, 129], layout="interleaved"))


def test_random_lengths():
    generator = torch.Generator().manual_seed(1)
    for seed in range(20):
        bs = int(torch.randint(1, 31, (), generator=generator))
        longest = int(2 ** torch.randint(5, 14, (), generator=generator))
        lens = torch.randint(0, longest, (bs,), generator=generator).tolist()
        check_long(made(1 + seed % 2, 16 >> seed % 2, lens=lens, seed=seed))


def test_counters_are_left_at_zero_and_replays_agree():
    case = made(lens=[300, 64, 700, 5000, 20000])
    expected = case.run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = case.run()
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)  # partial results are combined in the order of the ranges
    torch.cuda.synchronize()
    used = [counters for (kernel, *_), counters in workspace._sets.items() if kernel == "mla_hopper_few"]
    assert len(used) > 1  # those of a stream, and the graph's
    assert not any(counters.any() for counters in used)


def test_which_calls_the_backend_gives_to_it():
    """The kernel is launched for few rows, the others elsewhere; nothing runs."""
    wanted = {"num_nodes": 1, "dtype": BF16, "page_size": 64, "heads": 16, "lens": [64, 300], "head_dim": 576, "v_dim": 512}
    for changes, kernel in (
        ({}, "mla_hopper_few_attention"),
        ({"page_size": 128, "sinks": True, "dtype": FP16}, "mla_hopper_few_attention"),
        ({"num_nodes": 8, "heads": 2}, "mla_hopper_few_attention"),
        ({"heads": 128}, "mla_hopper_attention"),
        ({"num_nodes": 4}, "mla_hopper_attention"),
        ({"page_size": 32}, "mla_hopper_few_attention"),
        ({"window_left": 100}, "split_kv_attention_kernel"),
        ({"kv_dtype": FP8}, "split_kv_attention_kernel"),
    ):
        case = make_case("mla", "verify_tree", DEVICE, **{**wanted, **changes})
        with recorded() as launches:
            case.run(backend="triton")
        assert [one.kernel.fn.__name__ for one in launches] == [kernel], changes
