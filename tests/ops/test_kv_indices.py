"""Page tables and CSR kv-indices against loops written from SGLang's layout (`cache_locs.py`), one entry at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spec_ops

MAX_CONTEXT = 160
INT32 = torch.int32


def request_pool(rows: int, page_size: int, device: str, seed: int = 0, context: int = MAX_CONTEXT) -> torch.Tensor:
    """`req_to_token` of an allocator that hands out whole pages: consecutive slots inside a page, pages in random order."""
    g = torch.Generator().manual_seed(seed)
    pages_per_row = math.ceil(context / page_size)
    pages = torch.randperm(rows * pages_per_row + 5, generator=g)[: rows * pages_per_row].reshape(rows, pages_per_row)
    tokens = torch.arange(context)
    return (pages[:, tokens // page_size] * page_size + tokens % page_size).to(INT32).to(device)


def expected_page_table(
    table: list[list[int]], rows: list[int], lens: list[int], page_size: int, width: int
) -> list[list[int]]:
    out = []
    for row, length in zip(rows, lens, strict=True):
        entries = []
        for page in range(width):
            live = page < math.ceil(length / page_size)
            entries.append(table[row][page * page_size] // page_size if live else 0)
        out.append(entries)
    return out


def expected_kv_indices(table: list[list[int]], rows: list[int], lens: list[int], capacity: int) -> tuple[list[int], list[int]]:
    indptr, indices = [0], []
    for row, length in zip(rows, lens, strict=True):
        for token in range(length):
            indices.append(table[row][token])
        indptr.append(len(indices))
    return indptr, indices + [0] * (capacity - len(indices))


def branch_start(length: int, branch: int, num_steps: int, topk: int, page_size: int) -> int:
    """Column of `req_to_token` where a branch's own drafts begin."""
    if page_size == 1 or topk == 1:
        return length + branch * num_steps
    filled = length % page_size  # of the partial page, which is duplicated into each branch's first page
    pages_per_branch = math.ceil((filled + num_steps) / page_size)
    return (length // page_size + branch * pages_per_branch) * page_size + filled


def expected_draft_kv_indices(
    table: list[list[int]],
    rows: list[int],
    lens: list[int],
    step: int,
    num_steps: int,
    topk: int,
    page_size: int,
    capacity: int,
) -> tuple[list[int], list[int]]:
    indptr, indices = [0], []
    for row, length in zip(rows, lens, strict=True):
        for branch in range(topk):
            for token in range(length):
                indices.append(table[row][token])
            start = branch_start(length, branch, num_steps, topk, page_size)
            for draft in range(step + 1):
                indices.append(table[row][start + draft])
            indptr.append(len(indices))
    return indptr, indices + [0] * (capacity - len(indices))


# Rows repeat and skip: neither the identity nor a permutation would do for `req_pool_indices`.
BATCHES = {
    "uneven": ([3, 0, 4], [17, 64, 5]),
    "with_empty": ([1, 2, 0, 1], [0, 16, 0, 15]),
    "first_and_last_empty": ([2, 4, 0], [0, 33, 0]),
    "all_empty": ([4, 1], [0, 0]),
    "no_requests": ([], []),
    "one": ([2], [1]),
}


def tensors(rows: list[int], lens: list[int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows, dtype=dtype, device=device), torch.tensor(lens, dtype=dtype, device=device)


def assert_csr(result: tuple[torch.Tensor, torch.Tensor], expected: tuple[list, list], device: str) -> None:
    for got, want in zip(result, expected, strict=True):
        assert (got.dtype, got.device.type) == (INT32, device)
        assert got.tolist() == want


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize(("rows", "lens"), BATCHES.values(), ids=BATCHES.keys())
def test_page_table(rows, lens, page_size, dtype, device):
    pool = request_pool(5, page_size, device)
    widest = math.ceil(MAX_CONTEXT / page_size)
    needed = max(1, *(math.ceil(length / page_size) for length in lens)) if lens else 1
    for width in {needed, min(needed + 1, widest), None}:
        got = spec_ops.page_table(pool, *tensors(rows, lens, dtype, device), page_size, width)
        width = widest if width is None else width
        assert (got.shape, got.dtype, got.device.type) == ((len(rows), width), INT32, device)
        assert got.tolist() == expected_page_table(pool.tolist(), rows, lens, page_size, width)


def test_page_table_of_a_context_that_is_no_multiple_of_the_page(device):
    """The last page is partial in the table; its id comes from its first token."""
    pool = request_pool(2, 16, device, context=41)
    got = spec_ops.page_table(pool, *tensors([1, 0], [41, 33], INT32, device), 16)
    assert got.shape == (2, 3)
    assert got.tolist() == expected_page_table(pool.tolist(), [1, 0], [41, 33], 16, 3)


def test_page_table_ignores_dead_tokens(device):
    """Entries past a request's length may be anything, -1 included; the tail is 0, always a valid page."""
    pool = request_pool(3, 4, device)
    expected = expected_page_table(pool.tolist(), [0, 2], [5, 8], 4, 40)
    pool[0, 8:], pool[2, 8:], pool[1] = -1, -(2**31), 2**31 - 1
    assert spec_ops.page_table(pool, *tensors([0, 2], [5, 8], INT32, device), 4).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("spare", [0, 7, None], ids=["exact", "spare", "default"])
@pytest.mark.parametrize(("rows", "lens"), BATCHES.values(), ids=BATCHES.keys())
def test_kv_indices(rows, lens, spare, dtype, device):
    pool = request_pool(5, 16, device)
    capacity = None if spare is None else sum(lens) + spare
    got = spec_ops.kv_indices(pool, *tensors(rows, lens, dtype, device), capacity)
    capacity = len(rows) * MAX_CONTEXT if capacity is None else capacity
    assert_csr(got, expected_kv_indices(pool.tolist(), rows, lens, capacity), device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 5), (3, 4), (4, 1), (2, 17)])
@pytest.mark.parametrize(("rows", "lens"), BATCHES.values(), ids=BATCHES.keys())
def test_draft_kv_indices(rows, lens, topk, num_steps, page_size, dtype, device):
    """Each step by itself, and all steps in one launch: the rows of one are the results of the other."""
    pool = request_pool(5, page_size, device, context=320)
    inputs = tensors(rows, lens, dtype, device)
    capacity = topk * (sum(lens) + len(lens) * num_steps) + 3
    every = spec_ops.draft_kv_indices_steps(pool, *inputs, num_steps, topk, page_size, capacity)
    assert every[0].shape == (num_steps, len(rows) * topk + 1)
    assert every[1].shape == (num_steps, capacity)
    first = spec_ops.draft_kv_indices_steps(pool, *inputs, num_steps, topk, page_size, capacity, rows=(num_steps + 1) // 2)
    for some, whole in zip(first, every, strict=True):
        assert torch.equal(some, whole[: (num_steps + 1) // 2])
    for step in range(num_steps):
        expected = expected_draft_kv_indices(pool.tolist(), rows, lens, step, num_steps, topk, page_size, capacity)
        assert_csr(spec_ops.draft_kv_indices(pool, *inputs, step, num_steps, topk, page_size, capacity), expected, device)
        assert_csr((every[0][step], every[1][step]), expected, device)


def test_draft_branches_do_not_overlap(device):
    """With pages, every branch owns whole pages: no slot of one branch's drafts lies in a page of another's."""
    page_size, topk, num_steps, length = 4, 3, 5, 10
    pool = request_pool(1, page_size, device)
    indptr, indices = spec_ops.draft_kv_indices(pool, *tensors([0], [length], INT32, device), 4, num_steps, topk, page_size)
    pages = []
    for branch in range(topk):
        segment = indices[indptr[branch] : indptr[branch + 1]].tolist()
        assert len(segment) == length + num_steps
        pages.append({slot // page_size for slot in segment[length:]})
    assert sum(map(len, pages)) == len(set.union(*pages))
    assert len(pages[1] & {slot // page_size for slot in pool[0, :length].tolist()}) == 0


def test_draft_default_capacity(device):
    pool = request_pool(2, 1, device)
    inputs = tensors([1, 0], [9, 2], INT32, device)
    indptr, indices = spec_ops.draft_kv_indices(pool, *inputs, 1, 3, 2)
    assert_csr((indptr, indices), expected_draft_kv_indices(pool.tolist(), [1, 0], [9, 2], 1, 3, 2, 1, 4 * MAX_CONTEXT), device)
    assert spec_ops.draft_kv_indices_steps(pool, *inputs, 3, 2)[1].shape == (3, 4 * MAX_CONTEXT)


def test_index_tables_address_beyond_int32_sums(device):
    """Slots near 2^31 stay exact: nothing on the way is a float or wraps."""
    pool = torch.arange(2**31 - 64, 2**31, device=device, dtype=torch.int64).to(INT32).reshape(1, 64)
    inputs = tensors([0], [61], INT32, device)
    assert spec_ops.kv_indices(pool, *inputs, 61)[1].tolist() == list(range(2**31 - 64, 2**31 - 3))
    assert spec_ops.page_table(pool, *inputs, 16).tolist() == [[(2**31 - 64) // 16 + i for i in range(4)]]
    assert spec_ops.draft_kv_indices(pool, *inputs, 2, 3)[1][:64].tolist() == list(range(2**31 - 64, 2**31))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_layouts(data, device):
    page_size = data.draw(st.integers(1, 20))
    topk, num_steps = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    batch = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=5))
    rows, lens = [row for row, _ in batch], [length for _, length in batch]
    spare = data.draw(st.integers(0, 9))
    context = 30 + topk * (num_steps + 2 * page_size)
    pool = request_pool(4, page_size, device, seed=data.draw(st.integers(0, 99)), context=context)
    inputs, table = tensors(rows, lens, INT32, device), pool.tolist()
    width = math.ceil(context / page_size)
    assert spec_ops.page_table(pool, *inputs, page_size).tolist() == expected_page_table(table, rows, lens, page_size, width)
    capacity = sum(lens) + spare
    assert_csr(spec_ops.kv_indices(pool, *inputs, capacity), expected_kv_indices(table, rows, lens, capacity), device)
    step = data.draw(st.integers(0, num_steps - 1))
    capacity = topk * (sum(lens) + len(lens) * (step + 1)) + spare
    got = spec_ops.draft_kv_indices(pool, *inputs, step, num_steps, topk, page_size, capacity)
    assert_csr(got, expected_draft_kv_indices(table, rows, lens, step, num_steps, topk, page_size, capacity), device)


@pytest.mark.parametrize("capacity", [0, 36])
def test_capacity_too_small_raises_on_cpu(capacity):
    """17 + 20 committed tokens; two branches and two of three steps make it 82."""
    pool, inputs = request_pool(3, 1, "cpu"), tensors([2, 0], [17, 20], INT32, "cpu")
    with pytest.raises(IndexError, match=rf"^kv_indices: `capacity` must hold 37 indices, got {capacity}$"):
        spec_ops.kv_indices(pool, *inputs, capacity)
    with pytest.raises(IndexError, match=rf"^draft_kv_indices: `capacity` must hold 82 indices, got {capacity}$"):
        spec_ops.draft_kv_indices(pool, *inputs, 1, 3, 2, 1, capacity)
    # The last step, the longest, counts: 37 * 2 + 4 * 3 = 86.
    with pytest.raises(IndexError, match=r"^draft_kv_indices_steps: `capacity` must hold 86 indices, got 85$"):
        spec_ops.draft_kv_indices_steps(pool, *inputs, 3, 2, 1, 85)
    assert spec_ops.draft_kv_indices_steps(pool, *inputs, 3, 2, 1, 86)[0][:, -1].tolist() == [78, 82, 86]


def test_drafts_beyond_the_context_raise_on_cpu():
    pool, inputs = request_pool(1, 4, "cpu", context=40), tensors([0], [30], INT32, "cpu")
    spec_ops.draft_kv_indices(pool, *inputs, 1, 2, 3, 4)  # the last branch ends at 28 + 2 * 4 + 2 + 2 = 40
    with pytest.raises(IndexError, match=r"^draft_kv_indices: `req_to_token` must be at least 44 tokens wide.*got 40$"):
        spec_ops.draft_kv_indices(pool, *inputs, 1, 2, 4, 4)
    with pytest.raises(IndexError, match=r"^draft_kv_indices_steps: `req_to_token` must be at least 44 tokens wide.*got 40$"):
        spec_ops.draft_kv_indices_steps(pool, *inputs, 2, 4, 4)
