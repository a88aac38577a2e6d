"""What FlashInfer's and TokenSpeed's kernels are given (`padding.py`) and what they keep between calls (`workspace.py`)."""

from __future__ import annotations

import random

import pytest
import torch
import triton

from spec_ops.backends import AttentionCall, padding, workspace
from spec_ops.backends.flashinfer import page
from spec_ops.backends.triton.runtime.ahead import ARCHS, SHARED_LIMIT, Variant, compile_ahead
from tests.helpers import provider_fakes

UNSEEN = 10**6


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    provider_fakes.interpret_padding(monkeypatch)


def word_of(seen: list[int]) -> int:
    """A signed 64-bit word with the bits of `seen`."""
    word = sum(1 << j for j in seen)
    return word - (1 << 64) if word >= 1 << 63 else word


def bits(mask: torch.Tensor) -> list[list[list[int]]]:
    """Positions set in each row of `[bs, span, words]` uint16, lowest bit first."""
    return [
        [[16 * w + j for w, value in enumerate(row) for j in range(16) if value >> j & 1] for row in b] for b in mask.tolist()
    ]


def random_case(rng: random.Random, tree: bool):
    q_len = rng.choice([1, 2, 5, 31, 32, 33, 64])
    span = rng.randrange(q_len, 65) if tree else q_len
    page_size = rng.choice([1, 2, 16, 64])
    lens = [rng.choice([0, 1, span - 1, span, span + 1, 3 * span + 7]) for _ in range(rng.randrange(1, 4))]
    width = max(-(-max(lens) // page_size) + rng.randrange(3), 1)
    tables = [[rng.randrange(1000) if j * page_size < n else UNSEEN for j in range(width)] for n in lens]
    seen = [[sorted(rng.sample(range(span), rng.randrange(span + 1))) for _ in range(q_len)] for _ in lens]
    return q_len, span, page_size, lens, width, tables, seen


@pytest.mark.parametrize(("tree", "masked"), [(False, False), (False, True), (True, True)])
def test_prepare_against_its_words(tree, masked, device):
    """Every output, position by position, from the definition of what a query sees."""
    for seed in range(40):
        check_case(tree, masked, seed, device)


def check_case(tree: bool, masked: bool, seed: int, device: str) -> None:
    rng = random.Random(f"{tree}{masked}{seed}")
    q_len, span, page_size, lens, width, tables, seen = random_case(rng, tree)
    multiple = rng.choice([1, 2, 8])
    words = torch.tensor([[word_of(row) for row in b] for b in seen], device=device) if tree else None
    call = AttentionCall(
        "mha_target_verify",
        torch.empty(len(lens), q_len, 1, 1),
        torch.empty(1, page_size, 1, 1),
        torch.empty(1, page_size, 1, 1),
        None,
        torch.tensor(tables, dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        tree_mask=words,
        mask_len=span if tree else 0,
    )
    made = padding.prepare(call, width_multiple=multiple, masked=masked)
    assert made.seq_lens.tolist() == [max(n, span) for n in lens]
    assert made.block_tables.shape[1] % multiple == 0
    assert made.block_tables.shape[1] * page_size >= max(*lens, span)
    for b, n in enumerate(lens):
        used = n if masked or n >= span else 0
        expected = [page if j * page_size < used else 0 for j, page in enumerate(tables[b])]
        assert made.block_tables[b].tolist() == expected + [0] * (made.block_tables.shape[1] - width)
    if not masked:
        assert made.mask is None
        assert made.hidden.tolist() == [[n < span] * q_len for n in lens]
        return
    assert made.mask.shape == (len(lens), span, 2 if span <= 32 else 4)
    found = bits(made.mask.cpu())
    for b, n in enumerate(lens):
        for query in range(q_len):
            row = span - q_len + query
            sees = seen[b][query] if tree else range(row + 1)
            # Position j of the span is key n - span + j; in a request shorter than the span the kernel's first key is bit 0.
            keys = [n - span + j for j in sees if n - span + j >= 0]
            assert found[b][row] == [key - max(n - span, 0) for key in keys]
            assert bool(made.hidden[b, query]) == (not keys and n <= span)
        for row in range(span - q_len):
            assert not tree or found[b][row] == []


def test_clear(device):
    hidden = torch.tensor([[True, False], [False, True]], device=device)
    out = torch.full((2, 2, 3, 700), float("nan"), device=device)  # more than one block a row
    out[0, 1], out[1, 0] = 1.0, 2.0
    cleared = padding.clear(out, hidden)
    assert cleared is out
    assert out.amax((2, 3)).tolist() == out.amin((2, 3)).tolist() == [[0.0, 1.0], [2.0, 0.0]]


def variants() -> list[Variant]:
    tables = {"tables": "*i32:16", "lens": "*i32:16", "safe_tables": "*i32:16", "safe_lens": "*i32:16", "hidden": "*i1:16"}
    sizes = {"width": "i32", "safe_width": "i32", "table_stride": "i32"}
    shape = {"Q_LEN": 4, "SPAN": 12, "ROWS": 16, "PAGE": 64, "BLOCK": 1024}
    plain, kernel = {"HAS_WORDS": False, "HAS_MASK": False, "words": None}, padding.prepare_kernel
    tree = {"words": "*i64:16", "mask": "*i32:16"}
    return [
        Variant("prepare", kernel, {**tables, **sizes}, {**shape, **plain, "mask": None}),
        Variant("prepare chain", kernel, {**tables, **sizes, "mask": "*i64:16"}, {**shape, **plain, "HAS_MASK": True}),
        Variant("prepare tree", kernel, {**tables, **sizes, **tree}, {**shape, "HAS_WORDS": True, "HAS_MASK": True}),
        Variant(
            "redirect",
            page.redirect_kernel,
            dict.fromkeys(("first", "second", "first_spare", "second_spare", "first_rows", "second_rows"), "*bf16:16")
            | {"slots": "*i64:16", "places": "*i32:16", "n": "i32", "first_stride": "i64:16", "second_stride": "i64:16"},
            {"slots_stride": 1, "FIRST": 1024, "SECOND": 1024, "PAGE": 64, "BLOCK": 1024},
        ),
        Variant("clear", padding.clear_kernel, {"out": "*bf16:16", "hidden": "*i1:16", "row_size": "i32"}, {"BLOCK": 1024}),
    ]


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_ahead(arch, monkeypatch):
    monkeypatch.undo()  # the compiled kernels, not the interpreted ones
    if not isinstance(padding.prepare_kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set")
    for variant in variants():
        used = compile_ahead(variant, arch)
        assert used.spill_bytes == 0
        assert used.shared_bytes <= SHARED_LIMIT[arch]


@pytest.fixture
def buffers(monkeypatch):
    monkeypatch.setattr(workspace, "_buffers", {})


def test_workspace_is_one_per_use_and_keeps_its_address(device, buffers):
    place = torch.device(device)
    first = workspace.workspace("a", place, 4096)
    assert first.dtype == torch.uint8
    assert first.shape == (4096,)
    assert not first.any()
    first.fill_(7)
    again = workspace.workspace("a", place, 4096)
    assert again.data_ptr() == first.data_ptr()
    assert bool((again == 7).all())
    assert workspace.workspace("a", place, 16).shape == (16,)
    assert workspace.workspace("b", place, 4096).data_ptr() != first.data_ptr()
    with pytest.raises(ValueError, match="workspace 'a': `num_bytes` must be at most 4096, got 4097"):
        workspace.workspace("a", place, 4097)


@pytest.mark.gpu
def test_workspace_belongs_to_a_stream(buffers):
    place = torch.device("cuda", torch.cuda.current_device())
    main = workspace.workspace("a", place, 64)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace.workspace("a", place, 64).data_ptr() != main.data_ptr()
    assert workspace.workspace("a", place, 64).data_ptr() == main.data_ptr()


@pytest.mark.gpu
def test_workspace_survives_cuda_graph_trees(buffers):
    """Made while a compiled function warms up, where the thread's allocations come from the graph's own pool, and while it is
    recorded. Of a buffer whose memory another graph took over, the count would be lost."""
    place = torch.device("cuda", torch.cuda.current_device())
    made = []

    @torch.library.custom_op("spec_ops_test::uses_workspace", mutates_args=())
    def uses_workspace(x: torch.Tensor) -> torch.Tensor:
        buffer = workspace.workspace("trees", place, 1 << 20)
        made.append(buffer)
        buffer[:4].view(torch.int32).add_(1)
        return x + buffer[:4].view(torch.int32)

    uses_workspace.register_fake(torch.empty_like)
    step = torch.compile(lambda x: uses_workspace(x * 2) * 1, mode="reduce-overhead", fullgraph=True)
    other = torch.compile(lambda x: (x * 3).relu() + 1, mode="reduce-overhead", fullgraph=True)
    x, big = torch.zeros(1, device=place), torch.randn(1 << 20, device=place)
    counts = []
    for _ in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        counts.append(int(step(x).item()))
        other(big)
    *warm_ups, recorded = (buffer.data_ptr() for buffer in made)
    warm, replays = range(1, len(warm_ups) + 1), range(1, 8 - len(warm_ups) + 1)
    assert counts == [*warm, *replays]
    assert set(warm_ups) == {made[0].data_ptr()}
    assert recorded != made[0].data_ptr()
    assert int(made[0][:4].view(torch.int32).item()) == len(warm_ups)
    assert {buffer.data_ptr() for buffer in workspace._buffers.values()} == {made[0].data_ptr(), recorded}
