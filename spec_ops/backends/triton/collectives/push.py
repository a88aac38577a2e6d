"""Sums over the ranks of one host in one kernel: every rank writes its part into the memory of all, and adds up what it gets.
Of a large sum it writes to each rank what that one is to add up, its share, and then the sum of its own share to all.

Data is its own signal. A rank's buffer has a slot for each rank and is zero before a call; a word that is no longer zero has
arrived, so nobody waits for a flag or a fence. A word of data that is zero is sent as a pair of negative zeros, and sums start
at +0.0, which takes the sign back.

An all-reduce of several steps still is one kernel, since each of them waits for its data only.

Three buffers take turns. A rank ends call `e` when it has all parts of it, so every other rank has begun call `e`, and ended
`e - 1`. What it pushes in call `e + 1` lands in the third buffer, which the others zeroed in call `e - 1`. Which buffer's turn
it is, and how much the previous call left to be zeroed, stands in device memory: replays of CUDA graphs of any sizes may follow
one another. All ranks must make the same calls in the same order.

The protocol is the one of TensorRT-LLM's one-shot all-reduce ("Lamport"):
https://github.com/NVIDIA/TensorRT-LLM/blob/main/cpp/tensorrt_llm/kernels/communicationKernels/allReduceFusionKernels.cu
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from spec_ops.backends.push import PROGRAMS, STATE, PushWorkspace, workspace_of
from spec_ops.backends.squares import SUM_COLUMNS, sums_of
from spec_ops.backends.triton.runtime.ahead import Variant
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms

WARPS = 4
GROUP = tl.constexpr(SUM_COLUMNS // 2)  # words of a sum of squares
WORDS = 128  # of 32 bits that a warp works on: 16 bytes a thread
ARCHS = (90, 100, 103)  # of the GPUs with NVLink
NEGATIVE_ZEROS = tl.constexpr(0x80008000 - (1 << 32))  # two of them, in bfloat16 and in float16
ZERO_SUMS = tl.constexpr(-1)  # two zeros of a sum that is done: two NaN, of which no arithmetic gives such bits


@triton.jit
def send(place, first, second, third, fourth, mask):
    """Write 16 bytes, which may be another GPU's, to each `place`. All tensors but the places are int32; shapes broadcast."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
        "=r,l,r,r,r,r,r", [place, first, second, third, fourth, mask], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def send_long(place, first, second, mask):
    """Write two int64 to each `place`. Each of them arrives as a whole, not both together."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.relaxed.sys.global.v2.b64 [$1], {$2, $3}; mov.u32 $0, 0; }",
        "=r,l,l,l,r", [place, first, second, mask], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read_again(slots, mask):
    """What has arrived by now; 1 where nothing is expected."""
    return tl.load(slots, mask=mask, other=1, volatile=True)


@triton.jit
def arrived(slots, mask, limit):
    """Wait until no word is zero.

    Returns the words, and whether some were still missing after `limit` further looks.
    """
    words = read_again(slots, mask)
    missing = tl.max((words == 0).to(tl.int32))
    looks = limit
    while (missing != 0) & (looks > 0):
        words = read_again(slots, mask)
        missing = tl.max((words == 0).to(tl.int32))
        looks -= 1
    return words, missing != 0


@triton.jit
def begin(state, limit, PROGRAMS: tl.constexpr):
    """Which buffer's turn it is, how many words of a slot the previous call wrote, and how often to look: once after a failure,
    since nobody is left to wait for."""
    program = tl.program_id(0)
    turn, left = tl.load(state + program), tl.load(state + PROGRAMS + program)
    failed = tl.load(state + 2 * PROGRAMS)
    return turn, left, tl.where(failed != 0, 0, limit)


@triton.jit
def clear(buffers, turn, left, W: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the `left` words of each slot that the previous call wrote."""
    previous = buffers + (turn + 2) % 3 * (W * SLOT)
    for start in range(tl.program_id(0) * BLOCK, left, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        for slot in tl.static_range(W):
            tl.store(previous + slot * SLOT + at, tl.zeros([BLOCK], tl.int32), mask=at // 4 < left // 4)


@triton.jit
def end(state, addresses, turn, words, late, W: tl.constexpr, PROGRAMS: tl.constexpr):
    """Leave word for the next call. Every program has an entry of its own, which it alone reads: none has to wait until all
    have read. Those of programs that this launch does not have are written by others, so that the next may have more."""
    if late:
        tl.store(state + 2 * PROGRAMS, 1)
        tl.store(tl.load(addresses + W).to(tl.pointer_type(tl.int32)), 1)
    tl.debug_barrier()  # every warp has read the entry
    entry = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, PROGRAMS)
    tl.store(state + entry, tl.zeros([PROGRAMS], tl.int32) + (turn + 1) % 3, mask=entry < PROGRAMS)
    tl.store(state + PROGRAMS + entry, tl.zeros([PROGRAMS], tl.int32) + words, mask=entry < PROGRAMS)


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The two numbers of each word, in float32."""
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return low.to(DTYPE, bitcast=True).to(tl.float32), high.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def packed(low, high, DTYPE: tl.constexpr):
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def with_residual(low, high, other, weight, z, mask, DTYPE: tl.constexpr):
    """The sum with a residual, of which `z` gets the product with the norm's weight.

    Rounded as the sum of the ranks, then as the sum with the residual, as two kernels would.
    """
    a, b = halves(other, DTYPE)
    low, high = rounded(rounded(low, DTYPE) + a, DTYPE), rounded(rounded(high, DTYPE) + b, DTYPE)
    a, b = halves(weight, DTYPE)
    tl.store(z, packed(low * a, high * b, DTYPE), mask=mask)
    return low, high


@triton.jit(do_not_specialize=["rank", "limit"])
def sum_kernel(
    x, out, addresses, state, vectors, rank, limit, residual, norm_weight, z, squares, columns,
    DTYPE: tl.constexpr, W: tl.constexpr, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, STATE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`x` and `out`: `vectors` times 16 bytes, as int32, like all of the others. With a `residual` of their size, `out` is the
    sum with it, `z` that times `norm_weight [columns]`, and `squares` are float32.

    The launch's second dimension counts the ranks in it, from `rank` on: one, except in tests of the protocol on one GPU.
    """
    await_predecessors(PDL)
    local = tl.program_id(1)
    rank += local
    state += local * STATE
    x += local * vectors * 4
    out += local * vectors * 4
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(vectors * 4, BLOCK)
    turn, left, limit = begin(state, limit, PROGRAMS)
    start = turn * (W * SLOT)
    vector = tl.arange(0, BLOCK // 4)
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(x + at, mask=at // 4 < vectors, other=0)
        words = tl.where(words == 0, NEGATIVE_ZEROS, words)
        even, odd = tl.split(tl.reshape(words, [BLOCK // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        place = tile * (BLOCK // 4) + vector
        for i in tl.static_range(W):
            peer = tl.load(addresses + (rank + i) % W).to(tl.pointer_type(tl.int32)) + (start + rank * SLOT)
            send(peer + place * 4, first, second, third, fourth, (place < vectors).to(tl.int32))
    buffers = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
    clear(buffers, turn, left, W, SLOT, BLOCK)
    slot = tl.arange(0, W)[:, None]
    late = False
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        mask = at // 4 < vectors
        if residual is not None:
            other = tl.load(residual + local * vectors * 4 + at, mask=mask, other=0)
            weight = tl.load(norm_weight + at % (columns // 2), mask=mask, other=0)
        words, missing = arrived(buffers + start + slot * SLOT + at[None, :], mask[None, :], limit)
        late |= missing
        limit = tl.where(missing, 0, limit)
        low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(W):
            a, b = halves(tl.sum(tl.where(slot == i, words, 0), 0), DTYPE)
            low += a
            high += b
        low, high = tl.where(missing, float("nan"), low), tl.where(missing, float("nan"), high)
        if residual is not None:
            low, high = with_residual(low, high, other, weight, z + local * vectors * 4 + at, mask, DTYPE)
            sums = tl.sum(tl.reshape(low * low + high * high, [BLOCK // GROUP, GROUP]), 1)
            group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            count = vectors * 4 // GROUP
            tl.store(squares + local * count + group, sums, mask=group < count)
        tl.store(out + at, packed(low, high, DTYPE), mask=mask)
    end(state, addresses, turn, vectors * 4, late, W, PROGRAMS)


@triton.jit(do_not_specialize=["rank", "limit"])
def two_shot_kernel(
    x, out, addresses, state, vectors, share, rank, limit, residual, norm_weight, z, squares, columns,
    DTYPE: tl.constexpr, W: tl.constexpr, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, STATE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `sum_kernel`, whose arguments it has, and `share`: how many vectors a rank adds up, an even number.

    A slot's first `share` vectors are for a part of what the rank adds up, the next for the sum of the slot's rank. All shares
    travel whole, with zeros past the end: no two ranks differ in how much they wait for, as one without the others would. A
    sum that lacks a part is sent to nobody, who would take it for one: they give up too.
    """
    await_predecessors(PDL)
    local = tl.program_id(1)
    rank += local
    state += local * STATE
    first = local * vectors * 4
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(share * 4, BLOCK)
    turn, left, limit = begin(state, limit, PROGRAMS)
    start = turn * (W * SLOT)
    of_rank = tl.arange(0, W)[:, None]
    column, vector = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK // 4)
    # Not all ranks begin with the same one.
    owner = (rank + of_rank) % W
    owners = tl.load(addresses + owner).to(tl.pointer_type(tl.int32)) + (start + rank * SLOT)
    for tile in range(program, tiles, programs):
        within = tile * BLOCK + column
        mask = (within // 4 < share) & (owner * share + within // 4 < vectors)
        words = tl.load(x + first + owner * share * 4 + within, mask=mask, other=0)
        words = tl.where(words == 0, NEGATIVE_ZEROS, words)
        even, odd = tl.split(tl.reshape(words, [W, BLOCK // 4, 2, 2]))
        first_word, third = tl.split(even)
        second, fourth = tl.split(odd)
        place = tile * (BLOCK // 4) + vector[None, :]
        send(owners + place * 4, first_word, second, third, fourth, (place < share).to(tl.int32))
    buffers = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
    clear(buffers, turn, left, W, SLOT, BLOCK)
    late = False
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        words, missing = arrived(buffers + start + of_rank * SLOT + at[None, :], (at // 4 < share)[None, :], limit)
        late |= missing
        limit = tl.where(missing, 0, limit)
        low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(W):
            a, b = halves(tl.sum(tl.where(of_rank == i, words, 0), 0), DTYPE)
            low += a
            high += b
        summed = packed(low, high, DTYPE)
        summed = tl.where(summed == 0, ZERO_SUMS, summed)
        even, odd = tl.split(tl.reshape(summed, [BLOCK // 4, 2, 2]))
        first_word, third = tl.split(even)
        second, fourth = tl.split(odd)
        place = tile * (BLOCK // 4) + vector
        complete = tl.where(missing, 0, (place < share).to(tl.int32))
        for i in tl.static_range(W):
            peer = tl.load(addresses + (rank + i) % W).to(tl.pointer_type(tl.int32)) + (start + rank * SLOT + share * 4)
            send(peer + place * 4, first_word, second, third, fourth, complete)
    for tile in range(program, tiles, programs):
        within = tile * BLOCK + column
        at = of_rank * share * 4 + within
        mask = (within // 4 < share) & (at // 4 < vectors)
        if residual is not None:
            other = tl.load(residual + first + at, mask=mask, other=0)
            weight = tl.load(norm_weight + at % (columns // 2), mask=mask, other=0)
        words, missing = arrived(buffers + start + of_rank * SLOT + share * 4 + within, within // 4 < share, limit)
        late |= missing
        limit = tl.where(missing, 0, limit)
        low, high = halves(tl.where(words == ZERO_SUMS, 0, words), DTYPE)
        low, high = tl.where(missing, float("nan"), low), tl.where(missing, float("nan"), high)
        if residual is not None:
            low, high = with_residual(low, high, other, weight, z + first + at, mask, DTYPE)
            sums = tl.sum(tl.reshape(low * low + high * high, [W, BLOCK // GROUP, GROUP]), 2)
            within_group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[None, :]
            group = of_rank * (share * 4 // GROUP) + within_group
            count = vectors * 4 // GROUP
            there = (within_group < share * 4 // GROUP) & (group < count)
            tl.store(squares + local * count + group, sums, mask=there)
        tl.store(out + first + at, packed(low, high, DTYPE), mask=mask)
    end(state, addresses, turn, 2 * share * 4, late, W, PROGRAMS)


@triton.jit(do_not_specialize=["keys", "rank", "limit"])
def max_kernel(
    x, out, addresses, state, keys, rank, limit,
    W: tl.constexpr, SLOT: tl.constexpr, PROGRAMS: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`x` and `out [keys]` int64. The rest: see `sum_kernel`.

    A key travels as its two halves, each with a bit that says it is there.
    """
    await_predecessors(PDL)
    local = tl.program_id(1)
    rank += local
    state += local * STATE
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(keys, BLOCK)
    turn, left, limit = begin(state, limit, PROGRAMS)
    start = turn * (W * SLOT)
    there = tl.full([BLOCK], 1 << 32, tl.int64)
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        mine = tl.load(x + local * keys + at, mask=at < keys, other=0)
        low, high = (mine & 0xFFFFFFFF) | there, ((mine >> 32) & 0xFFFFFFFF) | there
        for i in tl.static_range(W):
            peer = tl.load(addresses + (rank + i) % W).to(tl.pointer_type(tl.int32)) + (start + rank * SLOT)
            send_long(peer + at * 4, low, high, (at < keys).to(tl.int32))
    buffers = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
    clear(buffers, turn, left, W, SLOT, BLOCK)
    slot = tl.arange(0, W)[:, None]
    late = False
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        place = tile * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        parts = (buffers + start).to(tl.pointer_type(tl.int64)) + slot * (SLOT // 2) + place[None, :]
        found, missing = arrived(parts, (place // 2 < keys)[None, :], limit)
        late |= missing
        limit = tl.where(missing, 0, limit)
        low, high = tl.split(tl.reshape(found, [W, BLOCK, 2]))
        tl.store(out + local * keys + at, tl.max((high << 32) | (low & 0xFFFFFFFF), 0), mask=at < keys)
    end(state, addresses, turn, keys * 4, late, W, PROGRAMS)


def all_reduce(x: torch.Tensor, reduce: str, group: str) -> torch.Tensor:
    """See `spec_ops.ops.collectives`.

    Raises:
        ValueError: the ranks have no buffers that each other can write to, or not on the device of `x`; more bytes than these
            hold, or no multiple of 16; another dtype or reduction.
    """
    ranks = workspace_of("all_reduce", group, x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        push(ranks, x.contiguous(), out, reduce)
    return out


def all_reduce_add(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `spec_ops.ops.collectives`; raises as `all_reduce` does, and ValueError for a number of columns that 16 does not
    divide."""
    ranks = workspace_of("all_reduce_add", group, x.device)
    m, n = x.shape
    if n % SUM_COLUMNS:
        raise ValueError(f"all_reduce_add: the columns of `x` must be a multiple of {SUM_COLUMNS}, got {n}")
    y, z = x.new_empty(m, n), x.new_empty(m, n)
    squares = x.new_empty(m, sums_of(n), dtype=torch.float32)
    if x.numel():
        added = residual.contiguous(), norm_weight.contiguous(), z, squares, n
        push(ranks, x.contiguous(), y, "sum", added)
    return y, z, squares


def push(
    ranks: PushWorkspace, x: torch.Tensor, out: torch.Tensor, reduce: str, added: tuple[Any, ...] | None = None, *,
    warps: int | None = None, local: int = 1, two_shot: bool | None = None,
) -> None:  # fmt: skip
    """Launch one call.

    Args:
        x, out: contiguous.
        added: residual, weight of the norm, z, squares and columns of `all_reduce_add`.
        warps: of a program; default as is fast.
        local: how many ranks there are in this process, from `ranks.rank` on; of each its `x`, one after another.
        two_shot: whether each rank adds up a share of the sum; default by the number of bytes.
    """
    size = x.numel() * x.element_size() // local
    of_max = reduce == "max"
    ranks.check("all_reduce" if added is None else "all_reduce_add", x.dtype, reduce, size)
    if two_shot is None:
        two_shot = not of_max and size > ranks.one_shot_bytes
    if not two_shot and size > ranks.slot_bytes:
        raise ValueError(f"all_reduce: `x` must be of at most {ranks.slot_bytes} bytes in one shot, got {size}")
    # A rank's share of the sum in vectors of 16 bytes, of which two are a whole number of sums of squares.
    share = 2 * triton.cdiv(size // 16, 2 * ranks.size)
    if warps is None:
        warps = 1 if two_shot and share * 4 <= num_sms(x.device) * 2 * WORDS else WARPS
    block = WORDS * warps
    options: dict[str, Any] = {
        "W": ranks.size, "SLOT": ranks.slot_bytes // 4, "PROGRAMS": PROGRAMS, "STATE": STATE,
        "BLOCK": block, "num_warps": warps, "early": True,
    }  # fmt: skip
    with device_guard(x):
        tiles = triton.cdiv(size // 8 if of_max else share * 4 if two_shot else size // 4, block)
        # Programs wait for those of other ranks: all of them must fit on the GPU.
        grid = (min(tiles, PROGRAMS, num_sms(x.device)), local)
        counts = (size // 8,) if of_max else (size // 16, share) if two_shot else (size // 16,)
        given = (ranks.addresses, ranks.state, *counts, ranks.rank, ranks.looks)
        if of_max:
            launch(max_kernel, grid, x, out, *given, **options)
            return
        others = (None, None, None, None, 2) if added is None else added
        residual, norm_weight, z, squares, columns = others
        words = [None if t is None else _words(t) for t in (residual, norm_weight, z)]
        options["DTYPE"] = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
        kernel = two_shot_kernel if two_shot else sum_kernel
        launch(kernel, grid, _words(x), _words(out), *given, *words, squares, columns, **options)


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Contiguous numbers of 16 bits as int32: a view, or a copy if they begin in the middle of one."""
    flat = numbers.view(-1)
    return (flat.clone() if flat.storage_offset() % 2 else flat).view(torch.int32)


def ahead() -> Iterator[Variant]:
    for size in (2, 4, 8):
        constants = {"W": size, "SLOT": 1 << 18, "PROGRAMS": PROGRAMS, "STATE": STATE, "BLOCK": WORDS * WARPS}
        common = {"addresses": "*i64:16", "state": "*i32:16", "rank": "i32", "limit": "i32"}
        for added in (False, True):
            pointers = dict.fromkeys(("x", "out", *(("residual", "norm_weight", "z") if added else ())), "*i32:16")
            of_sums = {"squares": "*fp32:16", "columns": "i32:16"} if added else {}
            absent = {} if added else dict.fromkeys(("residual", "norm_weight", "z", "squares"), None) | {"columns": 2}
            for kernel, counts in ((sum_kernel, ("vectors",)), (two_shot_kernel, ("vectors", "share"))):
                two_shot = kernel is two_shot_kernel
                for warps in (1, WARPS) if two_shot else (WARPS,):
                    if size == 2 and two_shot:
                        continue
                    yield Variant(
                        f"all_reduce{'_add' * added} of {size} ranks{f', two-shot, {warps} warps' * two_shot}",
                        kernel,
                        {**pointers, **common, **of_sums, **dict.fromkeys(counts, "i32:16")},
                        {**constants, **absent, "BLOCK": WORDS * warps, "DTYPE": tl.bfloat16},
                        num_warps=warps,
                        archs=ARCHS,
                    )
        yield Variant(
            f"maximum of {size} ranks",
            max_kernel,
            {"x": "*i64:16", "out": "*i64:16", **common, "keys": "i32"},
            constants,
            num_warps=WARPS,
            archs=ARCHS,
        )
