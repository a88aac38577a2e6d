"""The support of a row of logits, and the draw from it: one launch.

Where a program has a long row to itself, it counts how many tokens have each value (bfloat16: `counted.py`) or about the same
(float32 and float16: `narrowed.py`). Otherwise, and where counts do not decide, the programs of a row weigh its tokens
(`search.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from spec_ops.backends.triton.runtime.ahead import ARCHS, Variant
from spec_ops.backends.triton.runtime.cooperative import resident_or_none
from spec_ops.backends.triton.runtime.counters import arrival_counters
from spec_ops.backends.triton.runtime.launch import await_predecessors, device_guard, launch, num_sms, on_gpu
from spec_ops.backends.triton.sampling.bins import BINS
from spec_ops.backends.triton.sampling.candidates import sizes
from spec_ops.backends.triton.sampling.counted import settle_by_counts
from spec_ops.backends.triton.sampling.narrowed import NEAR, settle_by_ranges
from spec_ops.backends.triton.sampling.search import search_support
from spec_ops.backends.triton.sampling.shared import INTERPRETED, MANY_WORDS, shared_words
from spec_ops.backends.triton.sampling.weights import KEY_SHIFT

LANE = 8  # neighbouring tokens of a thread: 16 bytes of bfloat16
PIVOTS = 8  # keys that a pass counts, or sums, at: more would narrow faster, with more instructions and registers
# CUDA refuses a launch of more than 48 KB ("invalid argument") unless it was asked for more, which Triton does only if what it
# allocates is more: it knows nothing of the bins. What is left for Triton:
SHARED_BESIDE_BINS = 48 * 1024 - 4 * BINS.value
LEAST_WARPS = 8  # of a program: in fewer, a thread's share of a list spills, and takes several times as long to compile
COUNTED_VOCAB = BINS.value  # tokens of a row from which on they are counted: with fewer there is more to do in bins
COUNTED_ROWS = 32  # from which on a row has one program, which counts, if `prefers_counts`
COUNTED_STEPS = 4  # tiles of a pass that are counted at once
LISTED = 128  # tokens that are few enough to compare each with each
VALUE_PASSES = 3  # whose pivots divide values evenly; those of later ones divide keys, which ends in any case
ROWS_AT_ONCE = 8192  # of a launch, whose rows have up to 12 KB of workspace each; more than any GPU takes at once
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_PASSES = 32  # 11 with 8 pivots each narrow 2**32 keys to one; as many for top-k as for top-p, and those above


# A batch of one has any stride. Triton 3.6 fails to compile a vocabulary that is the constant 1.
@triton.jit(do_not_specialize=["uniform_row_stride", "uniform_stride", "vocab"])
def sampling_support_kernel(
    logits, uniforms, temperatures, top_k, top_p, min_p, support, tokens, workspace, counters, words,
    row_stride, inner_stride, stride, uniform_row_stride, uniform_stride, temperature_stride, k_stride, p_stride, min_stride,
    inner, vocab, steps, workspace_stride, list_words,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GUIDES: tl.constexpr, ROWS: tl.constexpr, LANE: tl.constexpr,
    LISTED: tl.constexpr, VALUE_PASSES: tl.constexpr, MAX_PASSES: tl.constexpr, CANDIDATES: tl.constexpr, GROUPS: tl.constexpr,
    SHIFT: tl.constexpr, EVEN: tl.constexpr, ANY_TOP: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `(row, chunk)`, with `steps` tiles of `ROWS * LANE` ids. With `CHUNKS > 1` all programs are resident at once.

    `workspace`, of a row: the list, what its programs tell one another, and `MAX_PASSES` tallies of each. `tokens` is None
    where nothing is drawn. `EVEN`: `vocab` is a multiple of 16. `ANY_TOP`: `top` also of rows that are no distribution, their
    first NaN if they have one. `COUNTS`: values are counted, `TILE` at once. `words` stands for shared memory in the
    interpreter.
    """
    await_predecessors(PDL)
    if EVEN:
        vocab = vocab // 16 * 16  # what its specialization would tell
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    request = row // inner
    logits += request * row_stride + (row % inner) * inner_stride
    support += row * 3
    temperature = tl.load(temperatures + request * temperature_stride)
    uniform, k, p, least_p = None, None, None, None
    if uniforms is not None:
        uniform = tl.load(uniforms + request * uniform_row_stride + (row % inner) * uniform_stride)
    if top_k is not None:
        k = tl.load(top_k + request * k_stride).to(tl.int64)
    if top_p is not None:
        p = tl.load(top_p + request * p_stride)
    if min_p is not None:
        least_p = tl.load(min_p + request * min_stride)
    if COUNTS or (top_k is not None) or (top_p is not None):
        words = shared_words(words, COUNTS)
    decided = False
    if COUNTS and SHIFT != 16:
        decided = settle_by_ranges(
            logits, uniform, temperature, k, p, least_p, support, tokens, workspace, words, row, stride, vocab, steps,
            workspace_stride, SHIFT, TILE, ROWS, LANE,
        )  # fmt: skip
    elif COUNTS:
        decided = settle_by_counts(
            logits, uniform, temperature, k, p, least_p, support, tokens, words, row, stride, vocab, steps, SHIFT, TILE,
            ROWS, LANE,
        )  # fmt: skip
    if decided == 0:
        search_support(
            logits, uniform, temperature, k, p, least_p, support, tokens, words, workspace, counters, row, chunk, stride, vocab,
            steps, workspace_stride, list_words, CHUNKS, PIVOTS, GUIDES, ROWS, LANE, LISTED, VALUE_PASSES, MAX_PASSES,
            CANDIDATES, GROUPS, SHIFT, ANY_TOP,
        )  # fmt: skip


class Shares(NamedTuple):
    """How rows are divided among programs.

    Attributes:
        chunks: programs of a row. tiles: of each of them. rows, lane: of a tile, which has `rows * lane` ids.
    """

    chunks: int
    tiles: int
    rows: int
    lane: int
    num_warps: int

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "CHUNKS": self.chunks,
            "PIVOTS": PIVOTS if self.chunks > 1 else min(PIVOTS, 2),  # fewer registers, and a bound to begin with
            "GUIDES": PIVOTS,
            "ROWS": self.rows,
            "LANE": self.lane,
            "LISTED": LISTED,
            "VALUE_PASSES": VALUE_PASSES,
            "MAX_PASSES": MAX_PASSES,
            **sizes(self.chunks),
            "num_warps": self.num_warps,
            "maxnreg": min(65536 // (32 * self.num_warps), 255),  # ptxas saves some at the price of spills
        }


def tile_size(vocab: int, threads: int, lane: int, least: int = 32) -> int:
    """Ids of a tile: a power of two, at least what `least` threads read, so that small vocabularies share a variant."""
    return min(max(triton.next_power_of_2(vocab), least * lane), threads * lane)


def shares(rows: int, vocab: int, programs: int, filtered: bool = True, lane: int = LANE, any_p: bool = False) -> Shares:
    """For `rows` rows of `vocab` tokens, on `programs` that are resident at once; one a row where rows are more. `any_p`: top-p
    is given."""
    most = min(max(programs // max(rows, 1), 1), 128)
    # A row to itself fills a multiprocessor: with a second one its L1 cache would hold neither.
    num_warps = 8 if most > 1 else 16 if filtered else 32
    tile = tile_size(vocab, 32 * num_warps, lane, 32 * LEAST_WARPS)
    if any_p and most > 1 and tile == 256 * lane and triton.cdiv(triton.cdiv(vocab, tile), most) == 2:
        # One tile a pass instead of two: 4 rows of 128,256 took 1.2 to 1.8 us less of 18 to 20, and 0.7 more of 49 where top-p
        # keeps many (H200). Of more tiles, and of top-k alone, nothing was measured.
        num_warps, tile = 16, 2 * tile
    tiles = triton.cdiv(vocab, tile)
    each = triton.cdiv(tiles, most)
    chunks = triton.cdiv(tiles, each)
    return Shares(chunks, each, tile // lane, lane, min(num_warps, tile // lane // 32))


def prefers_counts(dtype: torch.dtype, any_k: bool, any_p: bool) -> bool:
    """Whether `COUNTED_ROWS` rows are faster with a program each, which counts, than with several that search.

    32 rows of 128,256 tokens on an H200, supports: top-p of bfloat16 took 25 to 26 us (31 to 32 searched), with top-k 26 to 28
    (31 to 35). float32 took 50 to 53 whatever rows look like; top-p alone searched 34 if few tokens are likely, but 122 if many
    are. Nobody knows before which they are, so the lesser worst case is chosen. With top-k the search takes 28 in both cases:
    then its list nearly always has what decides.
    """
    return any_p and (dtype == torch.bfloat16 or not any_k)


def support_of_rows(logits, uniforms, temperature, top_k, top_p, min_p, any_top: bool = False):
    """`(support, tokens)`, without tokens if `uniforms` is None."""
    support = logits.new_empty((*logits.shape[:-1], 3), dtype=torch.int64)
    tokens = None if uniforms is None else logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    if not support.numel():
        return support, tokens
    given = logits if logits.dim() == 3 else logits[:, None]
    bs, inner, vocab = given.shape
    coins = (0, 0) if uniforms is None else (uniforms.stride(0), uniforms.stride(1) if uniforms.dim() == 2 else 0)
    settings = [0 if x is None else x.stride(0) for x in (temperature, top_k, top_p, min_p)]
    tops = top_k is not None or top_p is not None
    filtered = tops or min_p is not None
    by_values = logits.dtype == torch.bfloat16  # otherwise min-p alone takes fewer passes without counts
    countable = filtered and vocab >= COUNTED_VOCAB and (by_values or tops)

    def start(share: Shares) -> bool:
        counts = countable and share.chunks == 1
        constants = share.constants
        listed = max(LISTED, triton.next_power_of_2(share.chunks) * constants["CANDIDATES"], NEAR.value * counts)
        list_words = listed * filtered
        tallies = 2 * constants["PIVOTS"] * MAX_PASSES
        row_words = list_words + (8 + tallies * filtered) * share.chunks
        step = min(bs, max(ROWS_AT_ONCE // inner, 1))
        workspace = None
        if filtered or share.chunks > 1:
            workspace = torch.empty(step * inner * row_words, dtype=torch.int64, device=logits.device)
        cooperative = share.chunks > 1
        counters = arrival_counters(logits.device, 2 * bs * inner, "sampling_support") if cooperative else None
        for first in range(0, bs, step):
            part = slice(first, first + step)
            words = None
            if INTERPRETED.value:
                words = logits.new_empty(step * inner * share.chunks * MANY_WORDS.value, dtype=torch.int32)
            launch(
                sampling_support_kernel, (min(step, bs - first) * inner * share.chunks,),
                given[part], *(x if x is None else x[part] for x in (uniforms, temperature, top_k, top_p, min_p)),
                support[part], tokens if tokens is None else tokens[part], workspace, counters, words,
                *given.stride(), *coins, *settings, inner, vocab, share.tiles, row_words, list_words,
                SHIFT=KEY_SHIFT[logits.dtype], EVEN=vocab % 16 == 0, ANY_TOP=any_top, COUNTS=counts,
                TILE=COUNTED_STEPS * share.rows * share.lane, **constants,
                launch_cooperative_grid=cooperative,
            )  # fmt: skip
        return True

    with device_guard(logits):
        # Triton's interpreter runs one program after another.
        lane = LANE * 2 // logits.element_size()  # of float32 half as many, of twice the registers
        programs = num_sms(logits.device) if on_gpu(logits) else 1
        if countable and bs * inner >= COUNTED_ROWS and prefers_counts(logits.dtype, top_k is not None, top_p is not None):
            programs = 1
        share = shares(bs * inner, vocab, programs, filtered, lane, top_p is not None)
        grid = ("sampling_support", bs * inner, share)
        if share.chunks == 1 or resident_or_none(grid, lambda: start(share)) is None:
            start(shares(bs * inner, vocab, 1, filtered, lane, top_p is not None))  # which wait for nobody
    return support, tokens


def sampling_support(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    return support_of_rows(logits, None, temperature, top_k, top_p, min_p)[0]


def sample_logits(logits, uniforms, temperature, top_k, top_p, min_p) -> tuple[torch.Tensor, torch.Tensor]:
    support, tokens = support_of_rows(logits, uniforms, temperature, top_k, top_p, min_p)
    return tokens, support


def ahead() -> Iterator[Variant]:
    outputs = {"support": "*i64:16", "tokens": "*i64:16"}
    settings = {"top_k": "*i32:16", "top_p": "*fp32:16", "min_p": "*fp32:16"}
    strides = {"top_k": "k_stride", "top_p": "p_stride", "min_p": "min_stride"}
    for rows, vocab, dtype, given in (
        (1, 128_256, "bf16", ("top_k", "top_p", "min_p")),
        (4, 128_256, "bf16", ("top_k", "top_p", "min_p")),
        (4, 128_256, "fp32", ("top_k", "top_p")),
        (4, 128_256, "bf16", ()),
        *((4, 128_256, "bf16", (name,)) for name in settings),
        (512, 128_256, "bf16", ("top_k", "top_p")),
        (512, 128_256, "bf16", ("top_p",)),
        (512, 128_256, "bf16", ("min_p",)),
        (512, 128_256, "bf16", ()),
        (512, 50_257, "bf16", ("top_k", "top_p", "min_p")),
        (128, 128_256, "fp32", ("top_p",)),
        (128, 128_256, "fp32", ("top_k", "top_p", "min_p")),
        (512, 50_257, "fp32", ("top_p",)),
        (128, 128_256, "fp16", ("top_p",)),
    ):
        even = vocab % 16 == 0
        tops = bool({"top_k", "top_p"} & set(given))
        constants = shares(rows, vocab, 132, bool(given), LANE // 2 if dtype == "fp32" else LANE, "top_p" in given).constants
        several = constants["CHUNKS"] > 1
        counts = (tops or (dtype == "bf16" and bool(given))) and not several
        num_warps, options = constants.pop("num_warps"), {"maxnreg": constants.pop("maxnreg")}
        absent = [name for name in settings if name not in given]
        kept = ({"workspace": "*i64:16"} if several or given else {}) | ({"counters": "*i32:16"} if several else {})
        yield Variant(
            f"sample_logits, {rows} rows, {dtype}, {' and '.join(given) or 'nothing cut'}{'' if even else ', odd vocabulary'}",
            sampling_support_kernel,
            {"logits": f"*{dtype}:16", "uniforms": "*fp32:16", "temperatures": "*fp32:16"}
            | dict.fromkeys(("row_stride", "inner_stride"), "i32:16" if even else "i32")
            | {"uniform_row_stride": "i32", "uniform_stride": "i32", "vocab": "i32"}
            | {"steps": "i32", "workspace_stride": "i32", "list_words": "i32"}
            | outputs
            | kept
            | {name: settings[name] for name in given}
            | {strides[name]: "i32" for name in absent},
            {"stride": 1, "temperature_stride": 1, "inner": 1, "ANY_TOP": False, "EVEN": even}
            | {"SHIFT": KEY_SHIFT[DTYPES[dtype]]}
            | {strides[name]: 1 for name in given}
            | {"COUNTS": counts, "TILE": COUNTED_STEPS * constants["ROWS"] * constants["LANE"]}
            | dict.fromkeys([*absent, "words", *({"workspace", "counters"} - set(kept))])
            | constants,
            num_warps=num_warps,
            hot=not (given and num_warps == 16),  # which leave 128 registers a thread: some bytes spill, mostly in the search
            options=options,
            estimated=dict.fromkeys(ARCHS, SHARED_BESIDE_BINS) if counts else None,
        )
