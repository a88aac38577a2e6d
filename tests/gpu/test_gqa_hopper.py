"""The Hopper GQA kernel on a GPU, called directly: every way of cutting and combining tiles, against float64."""

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

AROUND_BLOCKS = [0, 1, 63, 64, 65, 0, 127, 128, 129, 255, 256, 300]


@dataclasses.dataclass
class HopperCase(Case):
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, **changes: Any) -> torch.Tensor:
        from spec_ops.backends.triton.attention.hopper import gqa as gqa_hopper

        call = self.call(**changes)
        assert gqa_hopper.supports(90, call)
        return gqa_hopper.mha(call, **self.options)


def made(q_len: int, group: int = 8, kv_heads: int = 2, tree: bool = True, options: Any = None, **wanted: Any) -> HopperCase:
    """A verify step of `q_len` queries; as a chain without the harness' tree, whose chains have 5 queries."""
    wanted = {"dtype": BF16, "page_size": 64, "heads": group * kv_heads, "kv_heads": kv_heads, **wanted}
    case = make_case("mha", "verify_tree", DEVICE, num_nodes=q_len, **wanted)
    if not tree:
        case = dataclasses.replace(case.but(tree_mask=None, mask_len=None), trees=None)
    return HopperCase(**vars(case), options=options or {})


def check_long(case: HopperCase) -> None:
    """As `check_accuracy`, vectorized: float64 on the GPU, one request at a time.

    Weights are rounded once to the dtype (eps / 2 of each), and so is the result; 2^-11 of the weights is room for float32
    logits of up to about 50, whose products tensor cores truncate.
    """
    a = case.arguments
    out = case.run().double()
    q, group, eps = a["q"], a["q"].shape[2] // a["k_cache"].shape[2], torch.finfo(a["q"].dtype).eps
    q_len = q.shape[1]
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
        pages = a["block_tables"][b, : -(-length // a["k_cache"].shape[1])].long()
        k, v = (
            a[name][pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1).transpose(0, 1)
            for name in ("k_cache", "v_cache")
        )
        logits = q[b][some].double().transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        weights = logits.masked_fill(~seen[some], float("-inf")).softmax(-1)
        exact, bound = ((weights @ x).transpose(0, 1) for x in (v, v.abs()))
        error = (out[b][some] - exact).abs()
        worst = (error - (bound * (eps / 2 + 2**-11) + exact.abs() * eps / 2)).max()
        assert error.isfinite().all(), f"request {b}"
        assert worst <= 0, f"request {b} of {length} keys: {worst:.3g} beyond the bound"


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("q_len", "group"), [(9, 8), (11, 8), (16, 8), (17, 4), (32, 4), (33, 2), (5, 16)])
def test_lengths_around_blocks(q_len, group, tree):
    check_accuracy(made(q_len, group, tree=tree, lens=AROUND_BLOCKS))


@pytest.mark.parametrize("wanted", [{"sinks": True, "page_size": 128}, {"dtype": FP16}, {"page_size": 256}], ids=str)
def test_features(wanted):
    check_accuracy(made(16, lens=[300, 65, 0, 193, 500], **wanted))


@pytest.mark.parametrize("page_size", [1, 16, 24, 32, 48])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_pages_shorter_than_a_block(page_size, tree):
    check_long(made(16, kv_heads=8, tree=tree, page_size=page_size, lens=[*AROUND_BLOCKS, 16, 17, 1000, 5000]))


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
@pytest.mark.parametrize("draft_steps", [2, 4])
def test_slots_of_a_tree_that_no_query_sees(draft_steps, page_size):
    """The last level of a tree asks; dead branches hold NaN, in the last block, the one before it, or both. Their pages may be
    anywhere."""
    tree = {"width": 16, "draft_steps": draft_steps, "heads": 16, "kv_heads": 2, "dtype": BF16, "page_size": page_size}
    lens = [0, 40, 65, 79, 80, 100, 128, 191, 208, 240, 300, 5000]
    case = HopperCase(**vars(make_case("mha", "draft_tree", DEVICE, lens=lens, **tree)))
    assert poison_unseen(case) > 0
    check_accuracy(case)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("q_len", [17, 40])
def test_heads_of_128(q_len, tree, page_size):
    lens = [*AROUND_BLOCKS, 700, 5000]
    check_long(made(q_len, 4, kv_heads=8, tree=tree, page_size=page_size, head_dim=128, v_dim=128, lens=lens))


@pytest.mark.parametrize(("q_len", "group"), [(16, 8), (24, 4), (64, 4)])
@pytest.mark.parametrize("length", [65, 700, 20_000])
def test_one_request_with_heads_of_128(length, q_len, group):
    check_long(made(q_len, group, kv_heads=4, head_dim=128, v_dim=128, lens=[length]))


def test_more_rows_than_a_program_has():
    # 200 rows: two programs, a warpgroup without rows; 120, and one of three has none.
    for q_len, options in ((25, {}), (15, {"tiling": (3, 64, 8)})):
        check_long(made(q_len, lens=[300, 65, 0, 193, 1000], options=options))


# 4, 16 and more splits have each their way of combining.
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 16, 17, 40, 150])
def test_one_request_over_many_programs(blocks, kv_heads):
    check_long(made(16, kv_heads=kv_heads, lens=[128 * blocks - 19]))


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("q_len", "group", "dim"), [(24, 8, 64), (17, 8, 64), (48, 8, 64), (48, 4, 128), (33, 4, 128)])
def test_tiles_of_three_warpgroups(q_len, group, dim, tree, page_size):
    lens = [*AROUND_BLOCKS, 300, 0, 193, 1000, 5000]
    check_long(made(q_len, group, kv_heads=4, tree=tree, page_size=page_size, head_dim=dim, v_dim=dim, lens=lens))


@pytest.mark.parametrize("page_size", [1, 16, 24, 32])
@pytest.mark.parametrize("q_len", [5, 8, 16])
def test_few_rows_of_small_pages(q_len, page_size):
    lens = [*AROUND_BLOCKS, 700, 5000]
    check_long(made(q_len, 4, kv_heads=8, page_size=page_size, head_dim=128, v_dim=128, lens=lens))


@pytest.mark.parametrize(
    "options", [{}, {"min_blocks": 3}, {"tiling": (2, 128, 2)}, {"tiling": (2, 64, 10)}, {"tiling": (3, 64, 8)}], ids=str
)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_ranges_that_begin_and_end_inside_requests(options, tree):
    lens = [300, 64, 700, 0, 130, 65, 4000, 320, 5, 2000, 900, 128, 128, 0, 1]
    check_long(made(16, kv_heads=8, tree=tree, options=options, lens=lens))


def test_more_programs_than_multiprocessors():
    """40 KV heads x 4 row blocks: one range."""
    check_long(made(64, kv_heads=40, lens=[300, 0, 70]))


def test_strided_caches():
    """A layer's view: other layers' NaN must not be read."""
    check_accuracy(made(16, lens=[64, 129], layout="layers"))


def test_random_lengths():
    generator = torch.Generator().manual_seed(1)
    for seed in range(12):
        bs = int(torch.randint(1, 31, (), generator=generator))
        longest = int(2 ** torch.randint(5, 13, (), generator=generator))
        lens = torch.randint(0, longest, (bs,), generator=generator).tolist()
        check_long(made(16, kv_heads=8, tree=seed % 2 == 0, lens=lens, seed=seed))


def test_counters_are_left_at_zero_and_replays_agree():
    case = made(16, kv_heads=8, lens=[300, 64, 700, 5000])
    expected = case.run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = case.run()
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)  # partial results are combined in the order of the ranges
    torch.cuda.synchronize()
    used = [counters for (kernel, *_), counters in workspace._sets.items() if kernel == "gqa_hopper"]
    assert len(used) > 1  # those of a stream, and the graph's
    assert not any(counters.any() for counters in used)


def test_which_calls_the_backend_gives_to_it():
    """The kernel is launched where it says that it serves a call, the other one elsewhere; nothing runs."""
    wanted = {"num_nodes": 16, "dtype": BF16, "page_size": 64, "heads": 16, "lens": [64, 300]}
    for changes, kernel in (
        ({}, "gqa_hopper_attention"),
        ({"page_size": 128, "sinks": True, "dtype": FP16}, "gqa_hopper_attention"),
        ({"num_nodes": 8}, "split_kv_attention_kernel"),
        ({"page_size": 1}, "gqa_hopper_attention"),
        ({"window_left": 100}, "split_kv_attention_kernel"),
        ({"softcap": 3.0}, "split_kv_attention_kernel"),
        ({"kv_dtype": FP8}, "split_kv_attention_kernel"),
        ({"head_dim": 128, "v_dim": 128}, "gqa_hopper_attention"),
        ({"head_dim": 256, "v_dim": 256}, "split_kv_attention_kernel"),
    ):
        case = make_case("mha", "verify_tree", DEVICE, **{**wanted, **changes})
        with recorded() as launches:
            case.run(backend="triton")
        assert [one.kernel.fn.__name__ for one in launches] == [kernel], changes
