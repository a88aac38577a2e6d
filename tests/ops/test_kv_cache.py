"""Cache writes: which rows land where, which bytes stay as they were, and that compiled code mutates the same caches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import TorchRuntimeError

import spec_ops
from spec_ops.ops.reference.kv_cache import repeated

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8)
PAGES, PAGE_SIZE, HEADS, HEAD_DIM, V_DIM = 6, 4, 2, 16, 8
SLOTS = PAGES * PAGE_SIZE
K_SCALE, V_SCALE = 0.5, 2.0


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The stored bytes: equality that tells NaN payloads and signed zeros apart."""
    return tensor.contiguous().view(torch.uint8).clone()


def random_bytes(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Caches hold anything at first, NaN included: what an op leaves alone must keep its bytes."""
    g = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=g)
    return raw.view(dtype).to(device)


def e4m3_values() -> torch.Tensor:
    """The 127 non-negative e4m3fn values in order of their codes, decoded by hand: 4 exponent bits, 3 mantissa bits, bias 7."""
    values = []
    for code in range(127):  # code 127 is NaN
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(values, dtype=torch.float64)


def quantized(values: torch.Tensor, scale: float) -> torch.Tensor:
    """`value / scale` clamped to e4m3's range and rounded to the nearest, ties to the even code; returned as float64."""
    table = e4m3_values()
    ratio = (values.cpu().float() / scale).double()
    clamped = ratio.abs().clamp(max=448.0)
    distance = (clamped[..., None] - table).abs()
    code = distance.argmin(-1)  # the lower of two equally near codes
    tie = (code + 1 < 127) & (distance.gather(-1, (code + 1).clamp(max=126)[..., None])[..., 0] == distance.amin(-1))
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    return torch.copysign(table[code], ratio)


def mha_caches(dtype: torch.dtype, device: str, layout: str = "separate") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(pool, k_cache, v_cache)`; the pool shows that nothing around the caches is written."""
    if layout == "layers":
        pool = random_bytes(3, 2, PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=dtype, device=device)
        return pool, pool[1, 0], pool[1, 1, ..., :V_DIM]
    if layout == "interleaved":
        pool = random_bytes(PAGES, 2, PAGE_SIZE, HEADS, HEAD_DIM, dtype=dtype, device=device)
        return pool, pool[:, 0], pool[:, 1, ..., :V_DIM]
    pool = random_bytes(PAGES * PAGE_SIZE * HEADS * (HEAD_DIM + V_DIM), dtype=dtype, device=device)
    k, v = pool.split([SLOTS * HEADS * HEAD_DIM, SLOTS * HEADS * V_DIM])
    return pool, k.view(PAGES, PAGE_SIZE, HEADS, HEAD_DIM), v.view(PAGES, PAGE_SIZE, HEADS, V_DIM)


def scales(dtype: torch.dtype, *names: str) -> dict[str, float]:
    return dict(zip(names, (K_SCALE, V_SCALE), strict=False)) if dtype == FP8 else {}


def stored(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    return quantized(values, scale).to(dtype) if dtype == FP8 else values.cpu()


SLOT_LISTS = {
    "scattered": [17, 3, 8, 23, 0],
    "first_dropped": [-1, 3, 8, 23, 0],
    "some_dropped": [17, -1, 8, -(2**31), -7],
    "all_dropped": [-1, -1, -5, -1, -1],
    "one": [22],
    "one_dropped": [-1],
    "none": [],
}


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("layout", ["separate", "layers", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", SLOT_LISTS.values(), ids=SLOT_LISTS.keys())
def test_append_kv(slots, dtype, layout, slot_dtype, device):
    pool, k_cache, v_cache = mha_caches(dtype, device, layout)
    expected_pool, expected_k, expected_v = mha_caches(dtype, "cpu", layout)
    assert torch.equal(as_bytes(pool).cpu(), as_bytes(expected_pool))
    g = torch.Generator().manual_seed(1)
    value_dtype = torch.bfloat16 if dtype == FP8 else dtype
    k = (torch.randn(len(slots), HEADS, HEAD_DIM, generator=g) * 5).to(value_dtype)
    v = (torch.randn(len(slots), HEADS, V_DIM, generator=g) * 5).to(value_dtype)
    for i, slot in enumerate(slots):
        if slot >= 0:
            for cache, value, scale in ((expected_k, k, K_SCALE), (expected_v, v, V_SCALE)):
                cache.view(torch.uint8 if dtype == FP8 else dtype)[slot // PAGE_SIZE, slot % PAGE_SIZE] = (
                    stored(value[i], dtype, scale).view(torch.uint8 if dtype == FP8 else dtype)
                )  # fmt: skip
    indices = torch.tensor(slots, dtype=slot_dtype, device=device)
    assert (
        spec_ops.append_kv(k_cache, v_cache, k.to(device), v.to(device), indices, **scales(dtype, "k_scale", "v_scale")) is None
    )
    assert torch.equal(as_bytes(pool).cpu(), as_bytes(expected_pool))


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "layer_view"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", SLOT_LISTS.values(), ids=SLOT_LISTS.keys())
def test_append_mla_kv(slots, dtype, strided, slot_dtype, device):
    rank, rope = 12, 4
    shape = (PAGES, PAGE_SIZE, 3, rank + rope) if strided else (1, PAGES, PAGE_SIZE, rank + rope)
    pool, expected_pool = (random_bytes(*shape, dtype=dtype, device=where) for where in (device, "cpu"))
    cache, expected = (p[:, :, 1] if strided else p[0] for p in (pool, expected_pool))
    value_dtype = torch.float16 if dtype == FP8 else dtype
    g = torch.Generator().manual_seed(1)
    c_kv = (torch.randn(len(slots), rank, generator=g) * 5).to(value_dtype)
    k_rope = (torch.randn(len(slots), rope, generator=g) * 5).to(value_dtype)
    for i, slot in enumerate(slots):
        if slot >= 0:
            row = torch.cat([c_kv[i], k_rope[i]])
            expected.view(torch.uint8 if dtype == FP8 else dtype)[slot // PAGE_SIZE, slot % PAGE_SIZE] = (
                stored(row, dtype, K_SCALE).view(torch.uint8 if dtype == FP8 else dtype)
            )  # fmt: skip
    indices = torch.tensor(slots, dtype=slot_dtype, device=device)
    spec_ops.append_mla_kv(cache, c_kv.to(device), k_rope.to(device), indices, **scales(dtype, "kv_scale"))
    assert torch.equal(as_bytes(pool).cpu(), as_bytes(expected_pool))


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.013, 3.7])
def test_fp8_rounds_to_nearest_and_clamps(scale, value_dtype, device):
    """Values over the whole range, halves between neighbours, beyond the largest (no infinity in e4m3fn) and subnormals."""
    table = e4m3_values()
    ties = (table[1:] + table[:-1]) / 2
    values = torch.cat([table, ties, torch.tensor([449.0, 464.0, 480.0, 1e4, float("inf"), 1e-9])]) * scale
    values = torch.cat([values, -values]).to(value_dtype)
    values = torch.nn.functional.pad(values, (0, -values.numel() % HEAD_DIM)).reshape(-1, 1, HEAD_DIM)
    cache = random_bytes(len(values), 1, 1, HEAD_DIM, dtype=FP8, device=device)
    other = torch.zeros_like(cache, dtype=torch.uint8).view(FP8)
    slots = torch.arange(len(values), device=device)
    spec_ops.append_kv(cache, other, values.to(device), values.to(device), slots, k_scale=scale, v_scale=1.0)
    got = cache[:, 0].cpu().double()
    # CUDA divides by multiplying with a rounded reciprocal, which may tip a tie unless the scale is a power of two.
    if device == "cpu" or math.frexp(scale)[0] == 0.5:
        assert torch.equal(as_bytes(cache[:, 0].cpu()), as_bytes(quantized(values, scale).to(FP8)))
    assert got.abs().max() == 448
    # Three mantissa bits: half a unit in the last place is 2^-4 of the value; below 2^-6 steps of 2^-9 leave 2^-10.
    # The float32 division (and reciprocal) before it adds up to 2^-22 of the value.
    ratio = values.double() / scale
    inside = ratio.abs() <= 448
    bound = torch.maximum(ratio.abs() * 2**-4, torch.tensor(2.0**-10)) + ratio.abs() * 2**-22
    assert ((got - ratio).abs()[inside] <= bound[inside]).all()


def test_append_keeps_what_it_does_not_own(device):
    """All rows dropped over every byte pattern, NaN payloads included: slot 0, which the scatter touches, keeps its bytes."""
    for dtype in DTYPES:
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(torch.empty((), dtype=dtype).element_size())
        k_cache = codes.view(dtype).reshape(1, 1, 1, -1).to(device)
        before = as_bytes(k_cache)
        rows = torch.zeros(2, 1, k_cache.shape[-1], dtype=torch.float32 if dtype == FP8 else dtype, device=device)
        v_cache, slots = k_cache.view(torch.uint8).clone().view(dtype), torch.tensor([-1, -1], device=device)
        spec_ops.append_kv(k_cache, v_cache, rows, rows, slots, **scales(dtype, "k_scale", "v_scale"))
        assert torch.equal(as_bytes(k_cache), before)
        assert torch.equal(as_bytes(v_cache), before)


MOVES = {
    "shift_up": (list(range(2, 12)), list(range(3, 13))),
    "shift_down": (list(range(3, 13)), list(range(2, 12))),
    "cycle": ([1, 5, 9, 14, 23], [5, 9, 14, 23, 1]),
    "swap": ([0, 23], [23, 0]),
    "fan_out": ([7, 7, 7], [1, 7, 20]),
    "dropped": ([4, -1, 6, -3, 9], [-1, 2, 3, -9, 0]),
    "first_dropped": ([-1, 3, 4], [2, 4, 5]),
    "all_dropped": ([-1, 3, -1], [2, -1, -1]),
    "identity": ([3, 4], [3, 4]),
    "none": ([], []),
}


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("src", "dst"), MOVES.values(), ids=MOVES.keys())
def test_move_kv(src, dst, dtype, slot_dtype, device):
    """K and V of two layers and an MLA cache at once; bytes are moved, so NaN and fp8 codes survive."""
    pool, k_cache, v_cache = mha_caches(dtype, device, "layers")
    latent = random_bytes(PAGES, PAGE_SIZE, 24, dtype=dtype, device=device, seed=2)
    caches = [k_cache, v_cache, pool[2, 0], latent]
    outside = as_bytes(pool[0])
    before = [as_bytes(cache).reshape(SLOTS, -1) for cache in caches]
    index = {"dtype": slot_dtype, "device": device}
    spec_ops.move_kv(caches, torch.tensor(src, **index), torch.tensor(dst, **index))
    for cache, was in zip(caches, before, strict=True):
        expected = was.clone()
        for s, d in zip(src, dst, strict=True):
            if s >= 0 and d >= 0:
                expected[d] = was[s]
        assert torch.equal(as_bytes(cache).reshape(SLOTS, -1), expected)
    assert torch.equal(as_bytes(pool[0]), outside)


def test_move_kv_takes_one_cache_or_a_sequence(device):
    src, dst = torch.tensor([2, 3], device=device), torch.tensor([3, 4], device=device)
    results = []
    for wrap in (lambda cache: cache, lambda cache: [cache], lambda cache: (cache,)):
        cache = random_bytes(PAGES, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device)
        spec_ops.move_kv(wrap(cache), src, dst)
        results.append(as_bytes(cache))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_move_kv_of_caches_with_other_page_sizes(device):
    """Slots are the common measure: the same 24 slots as pages of 4 and as pages of 12."""
    wide, narrow = (random_bytes(pages, SLOTS // pages, 8, dtype=torch.float32, device=device) for pages in (2, 6))
    spec_ops.move_kv([wide, narrow], torch.tensor([13, 0], device=device), torch.tensor([2, 23], device=device))
    assert torch.equal(as_bytes(wide).flatten(), as_bytes(narrow).flatten())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    moves=st.lists(st.tuples(st.integers(-2, SLOTS - 1), st.integers(-2, SLOTS - 1)), max_size=SLOTS, unique_by=lambda m: m[1])
)
def test_move_kv_reads_before_it_writes(moves, device):
    cache = torch.arange(SLOTS, dtype=torch.float32, device=device).reshape(PAGES, PAGE_SIZE, 1).repeat(1, 1, 3)
    expected = list(range(SLOTS))
    for src, dst in moves:
        if src >= 0 and dst >= 0:
            expected[dst] = src
    src, dst = (torch.tensor([m[i] for m in moves], dtype=torch.int64, device=device) for i in range(2))
    spec_ops.move_kv(cache, src, dst)
    assert cache[..., 0].flatten().tolist() == expected


@pytest.mark.parametrize("bad", [SLOTS, 2**31 - 1])
@pytest.mark.parametrize("op", ["append_kv", "append_mla_kv", "move_src", "move_dst"])
def test_out_of_range_slot_raises_before_any_write(op, bad):
    """On CPU only: on a GPU the check would be a sync."""
    pool, k_cache, v_cache = mha_caches(torch.float32, "cpu", "layers")
    before, latent = as_bytes(pool), k_cache[:, :, 0]
    slots, good = torch.tensor([1, bad, 2]), torch.tensor([4, 5, 6])
    calls = {
        "append_kv": lambda: spec_ops.append_kv(
            k_cache, v_cache, torch.ones(3, HEADS, HEAD_DIM), torch.ones(3, HEADS, V_DIM), slots
        ),
        "append_mla_kv": lambda: spec_ops.append_mla_kv(latent, torch.ones(3, HEAD_DIM - 4), torch.ones(3, 4), slots),
        "move_src": lambda: spec_ops.move_kv([k_cache, v_cache], slots, good),
        "move_dst": lambda: spec_ops.move_kv([k_cache, v_cache], good, slots),
    }
    with pytest.raises(IndexError, match=rf"slots` must be below {SLOTS} .*got {bad}"):
        calls[op]()
    assert torch.equal(as_bytes(pool), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_compiled_writes_equal_eager(dtype, device):
    """Functionalization must neither lose a write nor send it to a copy, for views of one pool and for a list of caches."""

    def step(pool, latent, k, v, c_kv, k_rope, slots, src, dst):
        spec_ops.append_kv(pool[0, 0], pool[0, 1], k, v, slots, **scales(dtype, "k_scale", "v_scale"))
        spec_ops.append_kv(pool[1, 0], pool[1, 1], v, k, slots, **scales(dtype, "k_scale", "v_scale"))
        spec_ops.append_mla_kv(latent, c_kv, k_rope, slots, **scales(dtype, "kv_scale"))
        spec_ops.move_kv([pool[0, 0], pool[0, 1], pool[1, 0], pool[1, 1], latent], src, dst)
        return k.float().sum()

    def inputs():
        g = torch.Generator().manual_seed(3)
        pool = random_bytes(2, 2, PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=dtype, device=device)
        latent = random_bytes(PAGES, PAGE_SIZE, 16, dtype=dtype, device=device, seed=4)
        rows = [torch.randn(5, *s, generator=g).bfloat16().to(device) for s in ((HEADS, HEAD_DIM),) * 2 + ((12,), (4,))]
        indices = [torch.tensor(i, device=device) for i in ([3, -1, 9, 20, 4], [9, 3, -1], [3, 21, 5])]
        return pool, latent, *rows, *indices

    eager, compiled = inputs(), inputs()
    torch._dynamo.reset()
    assert torch.equal(step(*eager), torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled))
    for one, other in zip(eager[:2], compiled[:2], strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))
    assert not torch.equal(as_bytes(eager[0]), as_bytes(inputs()[0]))


VIEW_WRITES = {
    "append_kv": lambda pool, x, slots, moved: spec_ops.append_kv(pool[0], pool[1], x, x, slots),
    "rope_append_kv": lambda pool, x, slots, moved: spec_ops.rope_append_kv(
        x, x, x, x[:, 0, :4], x[:, 1, :4], pool[0], pool[1], slots
    ),
    "append_mla_kv": lambda pool, x, slots, moved: spec_ops.append_mla_kv(pool[1].flatten(2), x[:, 0], x[:, 1], slots),
    "move_kv": lambda pool, x, slots, moved: spec_ops.move_kv([pool[0], pool[1]], slots, moved),
}


@pytest.mark.slow
@pytest.mark.parametrize("op", VIEW_WRITES)
def test_views_of_symbolic_place_are_refused(op):
    """Inductor would write at the storage's beginning. With a static pool and a dynamic number of rows, views are right.

    The functions only call ops: C++ would take seconds to build."""

    def fn(pool, x, slots, moved):
        VIEW_WRITES[op](pool, x, slots, moved)
        return x

    pool, x, slots = torch.randn(2, PAGES, PAGE_SIZE, HEADS, V_DIM), torch.randn(3, HEADS, V_DIM), torch.tensor([0, 4, 8])
    argument = {"append_mla_kv": "kv_cache", "move_kv": r"caches\[1\]"}.get(op, "v_cache")
    torch._dynamo.reset()
    with pytest.raises(TorchRuntimeError, match=rf"{op}: `{argument}` must be at a place .*mark_static.* got offset .*s\d+"):
        torch.compile(fn, backend="aot_eager", dynamic=True, fullgraph=True)(pool.clone(), x, slots, slots + 1)
    torch._dynamo.reset()
    compiled = torch.compile(fn, dynamic=True, fullgraph=True)
    for rows in (3, 2):
        want, got = pool.clone(), pool.clone()
        torch._dynamo.mark_static(got)
        rest = (x[:rows], slots[:rows], slots[:rows] + 1)
        fn(want, *rest)
        compiled(got, *rest)
        assert torch.equal(got, want)
        assert not torch.equal(got, pool)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_compiled_attention_sees_rows_appended_in_the_same_graph(kind, device):
    """Two draft steps unrolled: each attends the row it has just written, so a reordered or lost append changes the result."""
    page_size, prefix = 4, 6
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)

    def steps(cache, queries, rows):
        outs = []
        for i in range(2):
            length = torch.tensor([prefix + i + 1], dtype=torch.int32, device=queries.device)
            position = length - 1
            slots = table[0, position // page_size] * page_size + position % page_size
            if kind == "mha":
                k_cache, v_cache = cache[:, 0, :, None], cache[:, 1, :, None]
                spec_ops.append_kv(k_cache, v_cache, rows[i][None], rows[i][None] + 1, slots)
                outs.append(
                    spec_ops.mha_draft_decode(queries[i][None, None], k_cache, v_cache, table, length, backend="reference")
                )
            else:
                spec_ops.append_mla_kv(cache[:, 0], rows[i][:, :12], rows[i][:, 12:], slots)
                q = queries[i][None, None]
                outs.append(spec_ops.mla_draft_decode(q, cache[:, 0], 12, table, length, scale=0.25, backend="reference"))
        return torch.stack(outs)

    g = torch.Generator().manual_seed(5)
    pool = torch.randn(3, 2, page_size, 16, generator=g).to(device)
    queries, rows = torch.randn(2, 4, 16, generator=g).to(device), torch.randn(2, 1, 16, generator=g).to(device)
    eager_pool, compiled_pool, written = pool.clone(), pool.clone(), pool.clone()
    expected = steps(eager_pool, queries, rows)
    torch._dynamo.reset()
    got = torch.compile(steps, backend="aot_eager", fullgraph=True)(compiled_pool, queries, rows)
    assert torch.equal(got, expected)
    assert torch.equal(compiled_pool, eager_pool)

    # By hand for the first step: softmax over the prefix and the new row, in float64.
    for position in range(prefix + 1):
        page, offset = int(table[0, position // page_size]), position % page_size
        if position == prefix:
            written[page, 0, offset], written[page, 1, offset] = rows[0, 0], rows[0, 0] + 1
    order = [(int(table[0, p // page_size]), p % page_size) for p in range(prefix + 1)]
    k = torch.stack([written[page, 0, offset] for page, offset in order]).double()
    v = torch.stack([written[page, 1, offset] for page, offset in order]).double() if kind == "mha" else k[:, :12]
    by_hand = torch.softmax(queries[0].double() @ k.T / math.sqrt(16), -1) @ v
    # 1e-5: some hundred float32 operations on values of order 1; missing the new row shifts the result by more than 1e-2.
    assert (got[0, 0, 0].double() - by_hand).abs().max() < 1e-5
    without = torch.softmax(queries[0].double() @ k[:-1].T / math.sqrt(16), -1) @ v[:-1]
    assert (by_hand - without).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_append_kv_normalizes_heads_first(dtype, device):
    """Against `F.rms_norm` and a complex rotation in float64."""
    g = torch.Generator().manual_seed(3)
    value_dtype = torch.bfloat16 if dtype == FP8 else dtype
    q, k, v = (torch.randn(3, h, HEAD_DIM, generator=g).mul(3).to(value_dtype).to(device) for h in (5, HEADS, HEADS))
    weights = [torch.randn(HEAD_DIM, generator=g).to(value_dtype).to(device) for _ in range(2)]
    angle = torch.randn(3, HEAD_DIM // 2, generator=g).to(device)
    want_q, want_k = (
        rotated_in_float64(torch.nn.functional.rms_norm(x.double(), (HEAD_DIM,), w.double(), 1e-5), angle)
        for x, w in zip((q, k), weights, strict=True)
    )
    factors = scales(dtype, "k_scale", "v_scale")
    _, k_cache, v_cache = mha_caches(dtype, device, "layers")
    slots = torch.tensor([17, -1, 8], device=device)
    norms = {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": 1e-5}
    got = spec_ops.rope_append_kv(q, k, v[..., :V_DIM], angle.cos(), angle.sin(), k_cache, v_cache, slots, **factors, **norms)
    # float32 arithmetic, then one rounding to the dtype.
    bound = 16 * torch.finfo(torch.float32).eps + torch.finfo(value_dtype).eps
    assert (got.double() - want_q).abs().max() <= bound * want_q.abs().max()
    # A key may round to the neighbour of float64's value; in e4m3 a neighbour is an eighth away.
    step = 0.13 if dtype == FP8 else bound
    for row, slot in ((0, 17), (2, 8)):
        key = k_cache[slot // PAGE_SIZE, slot % PAGE_SIZE].double() * factors.get("k_scale", 1.0)
        assert (key - want_k[row]).abs().max() <= step * want_k[row].abs().max()


def rotated_in_float64(x, angle):
    half = angle.shape[1]
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = turned * torch.polar(torch.ones_like(angle).double(), angle.double())[:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], -1)


@pytest.mark.parametrize("half", [HEAD_DIM // 2, HEAD_DIM // 4], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_append_kv_is_rotation_then_append(dtype, half, device):
    """Against a complex rotation in float64 and `append_kv` of the rotated keys."""
    g = torch.Generator().manual_seed(2)
    slots = [17, -1, 8, 23, 0]
    value_dtype = torch.bfloat16 if dtype == FP8 else dtype
    fused = torch.randn(len(slots), (5 + 2 * HEADS) * HEAD_DIM, generator=g).to(value_dtype).to(device)
    parts = fused.split([5 * HEAD_DIM, HEADS * HEAD_DIM, HEADS * HEAD_DIM], 1)  # slices of one projection
    q, k, v = (part.unflatten(1, (-1, HEAD_DIM)) for part in parts)
    v = v[..., :V_DIM]
    angle = torch.randn(len(slots), half, generator=g).to(device) * 5

    def rotated(x):
        return rotated_in_float64(x, angle)

    _, k_cache, v_cache = mha_caches(dtype, device, "layers")
    _, want_k, want_v = mha_caches(dtype, device, "layers")
    indices = torch.tensor(slots, device=device)
    factors = scales(dtype, "k_scale", "v_scale")
    got = spec_ops.rope_append_kv(q, k, v, angle.cos(), angle.sin(), k_cache, v_cache, indices, **factors)
    assert got.is_contiguous()
    # float32 arithmetic, then one rounding to the dtype: half a unit in the last place of the largest entry.
    bound = 8 * torch.finfo(torch.float32).eps + torch.finfo(value_dtype).eps
    assert (got.double() - rotated(q)).abs().max() <= bound * rotated(q).abs().max()
    spec_ops.append_kv(want_k, want_v, rotated(k).to(value_dtype), v, indices, **factors)
    assert torch.equal(as_bytes(v_cache), as_bytes(want_v))
    for slot in set(range(SLOTS)) - {s for s in slots if s >= 0}:
        place = slot // PAGE_SIZE, slot % PAGE_SIZE
        assert torch.equal(as_bytes(k_cache[place]), as_bytes(want_k[place]))
    # A key may round to the neighbour of float64's value; in e4m3 a neighbour is an eighth away.
    step = 0.13 if dtype == FP8 else bound
    for slot in (s for s in slots if s >= 0):
        place = slot // PAGE_SIZE, slot % PAGE_SIZE
        got_row, want_row = k_cache[place].double(), want_k[place].double()
        assert (got_row - want_row).abs().max() <= step * want_row.abs().max()


@pytest.mark.parametrize("slots", [[3, 7, 20], [-1, 7, -1, 20], [-1, -1]], ids=["all", "some", "none"])
def test_what_stands_for_dropped_rows_on_gpus(slots):
    """As many rows, in slots that may be written, and the caches are those of the CPU, which drops rows."""
    slots = torch.tensor(slots)
    rows = torch.randn(len(slots), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    cache = random_bytes(PAGES, PAGE_SIZE, HEADS, HEAD_DIM, dtype=torch.float32, device="cpu")
    places, values = repeated(cache, slots, rows, slots >= 0)
    assert places.shape == slots.shape
    assert (places >= 0).all()
    written, expected = cache.clone(), cache.clone()
    written[places // PAGE_SIZE, places % PAGE_SIZE] = values
    spec_ops.append_kv(expected, cache.clone(), rows, rows, slots)
    assert torch.equal(as_bytes(written), as_bytes(expected))
    assert torch.equal(as_bytes(expected), as_bytes(cache)) == (len(slots) == 2)
