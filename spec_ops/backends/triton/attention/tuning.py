"""Block shapes of the attention kernels, per architecture and shape.

The choices are data: `tuning.json` beside this file, an entry a line. `python -m benchmarks tune` measures on the GPU at
hand how far they are from the best, and with `--write` puts the best there. Nothing is measured when a kernel is called: a
shape that nobody tuned takes the entry of its class, an architecture that nobody tuned that of the range it lies in, with fewer
stages, keys or rows where its shared memory is smaller. Figures: `docs/notebook/products.md`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

PATH = Path(__file__).with_name("tuning.json")
SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB per SM that programs may use; 99 elsewhere


@dataclass(frozen=True)
class Config:
    """`block_m` query rows by `block_n` keys, `num_stages` blocks in flight; `programs` resident per SM.

    `min_blocks`: shortest range of key blocks; `tma`: read through tensor descriptors where the cache's layout allows;
    `cooperative`: the programs of a tile share the work of combining it. `ordered`: how weights are summed (`tile.row_sums`).
    `boxes`: blocks of keys that lie in several pages are read through descriptors too (`tile_boxes.py`), for up to 16 rows of
    16-bit caches. `clear`: the loop over blocks takes a request's last, partly filled one too, and clears the values after its
    end. `full`: no SM has room for more than `programs` that read through descriptors; `operands` asks again where pointers are
    read. `fitted` decides on both.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_blocks: int = 1
    tma: bool = True
    cooperative: bool = True
    ordered: str = ""
    boxes: bool = False
    # These follow from the others and the device.
    clear: bool = field(default=False, compare=False)
    full: bool = field(default=False, compare=False)

    @property
    def max_registers(self) -> int:
        """Per thread, so that `programs` fit on an SM."""
        return min(255, 65536 // (32 * self.num_warps * self.programs) // 8 * 8)


@dataclass(frozen=True)
class Entry:
    """The config of one class of calls.

    Attributes:
        kernel: `"split"` (decode, verify) or `"ragged"` (prefill). attention: `"gqa"` or `"mla"`.
        head_dim, rows: the largest of the class; None for any above the other classes. Rows are query rows per (request, KV
            head).
        arch: first and last architecture, as in `(90, 90)`. config: see there.
        measured: on which machine and with which versions `python -m benchmarks tune` found it; "" if it was entered by hand.
        kv_bytes: 1 for caches of 8-bit numbers alone, 2 for those of 16 bits; None for any.
        window: the longest `window_left` of the class; None for any, and for calls without a window.
        page: the tokens of a page that a tensor descriptor can read; None for any pages.
    """

    kernel: str
    attention: str
    head_dim: int | None
    rows: int | None
    arch: tuple[int, int]
    config: Config
    measured: str = ""
    kv_bytes: int | None = None
    window: int | None = None
    page: int | None = None

    @property
    def class_name(self) -> str:
        """`"split/gqa/64/16"`; `any` and `more` where there is no largest; then `/fp8`, `/window-128` and `/pages-16`."""
        cache = "/fp8" if self.kv_bytes == 1 else ""
        window = "" if self.window is None else f"/window-{self.window}"
        page = "" if self.page is None else f"/pages-{self.page}"
        return f"{self.kernel}/{self.attention}/{self.head_dim or 'any'}/{self.rows or 'more'}{cache}{window}{page}"


def read(path: Path = PATH) -> tuple[Entry, ...]:
    """The entries of a file such as `tuning.json`, in its order."""
    known = Config.__dataclass_fields__
    return tuple(
        Entry(
            arch=(row["arch"][0], row["arch"][1]),
            config=Config(**{name: value for name, value in row.items() if name in known}),
            **{name: value for name, value in row.items() if name not in known and name != "arch"},
        )
        for row in json.loads(path.read_text(encoding="utf-8"))["entries"]
    )


@functools.cache
def table() -> tuple[Entry, ...]:
    """The entries of `tuning.json`."""
    return read()


def lookup(
    entries: Sequence[Entry],
    kernel: str,
    attention: str,
    arch: int,
    head_dim: int,
    rows: int,
    kv_bytes: int = 2,
    window: int = -1,
    page: int = 0,
) -> Entry:
    """The entry of the smallest class that holds the call: by head_dim, rows, window, pages, numbers of the cache; of several
    for one class the one of the fewest architectures. `page`: tokens, 0 if no class of pages is meant.

    Raises:
        ValueError: there is none.
    """

    def order(e: Entry) -> tuple[float, ...]:
        window = math.inf if e.window is None else e.window
        page = math.inf if e.page is None else e.page
        return e.head_dim or math.inf, e.rows or math.inf, window, page, e.kv_bytes or math.inf, e.arch[1] - e.arch[0]

    held = [
        e
        for e in entries
        if (e.kernel, e.attention) == (kernel, attention)
        and e.arch[0] <= arch <= e.arch[1]
        and head_dim <= (e.head_dim or head_dim)
        and rows <= (e.rows or rows)
        and e.kv_bytes in (None, kv_bytes)
        and (e.window is None or 0 <= window <= e.window)
        and e.page in (None, page)
    ]
    if not held:
        call = f"the {kernel} kernel with {attention} on sm_{arch}, head_dim {head_dim}, {rows} rows"
        raise ValueError(f"tuning: the table must have an entry for {call}, got none")
    return min(held, key=order)


@functools.lru_cache(maxsize=1024)  # a launch outside of a graph asks each time
def _choose(
    kernel: str, arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int, rows: int, window: int, page: int
) -> Config:
    entry = lookup(table(), kernel, "mla" if shared_kv else "gqa", arch, head_dim, rows, kv_bytes, window, page)
    return fitted(entry.config, arch, shared_kv, head_dim, v_dim, kv_bytes)


def choose(
    arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int, rows: int, window: int = -1, page: int = 0
) -> Config:
    """Settings of the split kernel for `rows` query rows per (request, KV head), and pages of `page` tokens.

    Few rows are latency: one or two warps need no barriers, and several such programs share an SM. From 64 rows on the tensor
    cores' warpgroup instructions apply.
    """
    return _choose("split", arch, shared_kv, head_dim, v_dim, kv_bytes, rows, window, page)


def choose_ragged(arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int, rows: int) -> Config:
    """Settings of the ragged kernel for up to `rows` query rows per (request, KV head)."""
    return _choose("ragged", arch, shared_kv, head_dim, v_dim, kv_bytes, rows, -1, 0)


def head_parts(head_dim: int) -> tuple[int, int]:
    """A power of two and the padded rest: 192 is 128 + 64, 576 is 512 + 64."""
    first = max(16, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - first
    return first, (max(16, _power_of_2(rest)) if rest > 0 else 0)


def value_width(v_dim: int) -> int:
    """What a row of values takes in registers and shared memory."""
    return max(16, _power_of_2(v_dim))


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def shared_bytes(config: Config, arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int) -> int:
    """Shared memory of a program: a bound, never below what Triton takes.

    While a tile is walked, its queries and weights lie there, and blocks of the cache (`_block_bytes`). After that its output
    passes through, from the layout of a product's result to that of rows; and where partial results are combined, up to four
    warps add up pieces of them.
    """
    width = value_width(v_dim)
    operands = 2 * config.block_m * (sum(head_parts(head_dim)) + config.block_n)
    walking = operands + _block_bytes(config, arch, shared_kv, head_dim, v_dim, kv_bytes)
    output = 4 * config.block_m * width
    piece = min(256 * config.num_warps, config.block_m * width // 2)  # of four results, in `split_kv._combine`
    combining = 4 * piece * min(4, config.num_warps)
    return max(walking, output, combining) + 1024  # barriers, and what warps exchange when they add up rows


def _block_bytes(config: Config, arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int) -> int:
    """Blocks of the cache that are on their way or in use, as they are stored, and copies of some in the layout and dtype of a
    product's operand.

    Two loops take turns, and the larger one counts: the one over whole blocks, some of them ahead, and, with tensor
    descriptors, the one over the last block, which clears values (`tile.attend`).
    """
    keys, values = sum(head_parts(head_dim)), value_width(v_dim)
    block = config.block_n * (keys if shared_kv else keys + values) * kv_bytes
    copied_keys, copied_values = 2 * config.block_n * keys, 2 * config.block_n * values
    on_their_way = (config.num_stages - 1) * block
    tensor_memory = 100 <= arch < 120
    if config.boxes:
        return on_their_way + block
    if config.block_m < 64:  # operands of `mma.sync` are registers: only what is cleared passes through a copy
        if config.clear:
            return on_their_way + config.block_n * values * kv_bytes + copied_values
        return max(on_their_way, block + copied_values) if config.tma else on_their_way
    if kv_bytes == 1 and 90 <= arch < 120:
        # Products read their operands from shared memory, and converted blocks go there. `wgmma` is done with the keys before
        # values are converted; with tensor memory products run on, and both stay.
        if shared_kv:
            return on_their_way + copied_keys
        return on_their_way + (copied_keys + copied_values if tensor_memory else max(copied_keys, copied_values))
    # Products read the block in use itself. With tensor memory a block's second product runs two blocks after its first, and
    # both read MLA's keys, which are its values too.
    return on_their_way + block + (2 * copied_values if shared_kv and tensor_memory else 0)


def fitted(config: Config, arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int) -> Config:
    """The same with fewer programs, stages, keys or rows, where shared memory is smaller than on Hopper (sm_86, sm_12x).

    `clear` where there is room: it saves the latency of loads after the loop, 0.4 us of 9 for one short request, and takes one
    more buffer of values and a copy that brings them back into the operand's layout. Values for `mma.sync`, up to 32 rows, pass
    through registers anyway; `wgmma` reads them from shared memory, and MLA's are its keys.
    """
    if arch < 90:
        config = replace(config, tma=False)  # Triton emulates descriptors there, and their loads take more shared memory
    limit = SHARED.get(arch, 99) * 1024
    needed = functools.partial(shared_bytes, arch=arch, shared_kv=shared_kv, head_dim=head_dim, v_dim=v_dim, kv_bytes=kv_bytes)
    while config.programs > 1 and config.programs * needed(config) > limit:
        config = replace(config, programs=config.programs - 1)
    while needed(config) > limit:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 32:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_m > 16:
            config = replace(config, block_m=config.block_m // 2)
        else:
            config = replace(config, block_n=config.block_n // 2)
    cleared = needed(replace(config, clear=True))
    clear = config.block_m < 64 and not shared_kv and config.programs * cleared <= limit
    config = replace(config, clear=clear)
    return replace(config, full=fills(config, arch, shared_kv, head_dim, v_dim, kv_bytes))


def fills(config: Config, arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int) -> bool:
    """`Config.full` of a config that fits."""
    # Eight warps fill the registers: of at most 255 a thread these kernels take 225 and more. Fp8 may need little for `clear`.
    # What keys in two parts need (head_dim 96, 192) differs between versions of Triton.
    clear = config.clear and config.tma and kv_bytes > 1
    least = shared_bytes(replace(config, clear=clear), arch, shared_kv, head_dim, v_dim, kv_bytes)
    limit = SHARED.get(arch, 99) * 1024
    filled = config.programs * config.num_warps >= 8 or (config.programs + 1) * least > limit + 1024
    return filled and (shared_kv or head_dim.bit_count() == 1)
