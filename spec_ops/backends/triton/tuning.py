"""Block shapes of the attention kernels, per architecture and shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB per SM that programs may use; 99 elsewhere


@dataclass(frozen=True)
class Config:
    """`block_m` query rows by `block_n` keys, `num_stages` blocks in flight; `programs` resident per SM.

    `min_blocks`: shortest range of key blocks; `tma`: read through tensor descriptors where the cache's layout allows;
    `cooperative`: the programs of a tile share the work of combining it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_blocks: int = 1
    tma: bool = True
    cooperative: bool = True

    @property
    def max_registers(self) -> int:
        """Per thread, so that `programs` fit on an SM."""
        return min(255, 65536 // (32 * self.num_warps * self.programs) // 8 * 8)


def choose(arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int, rows: int) -> Config:
    """Settings of the split kernel for `rows` query rows per (request, KV head).

    Few rows are latency: one or two warps need no barriers, and several such programs share an SM. From 64 rows on the tensor
    cores' warpgroup instructions apply. Figures: `docs/decisions.md`.
    """
    if shared_kv:
        config = _mla(arch, rows)
    elif arch >= 120 and head_dim <= 128:  # products come from `mma.sync`: larger tiles spill registers
        config = Config(16, 32, 2, 3, 2) if rows <= 16 else Config(32 if rows <= 32 else 64, 32, 4, 3, 1)
    elif head_dim <= 64:
        config = _by_rows(
            rows, Config(16, 64, 1, 4, 4), Config(32, 64, 2, 3, 4), Config(64, 64, 4, 4, 2), Config(128, 64, 4, 3, 2)
        )
    elif head_dim <= 128:
        config = _by_rows(rows, Config(16, 64, 2, 3, 2), Config(32, 64, 4, 3, 2), Config(64, 64, 4, 4, 1))
    else:
        config = _by_rows(rows, Config(16, 32, 4, 3, 1), Config(32, 32, 4, 3, 1), Config(64, 32, 4, 3, 1))
    return _fitted(config, arch, shared_kv, head_dim, v_dim, kv_bytes)


def _mla(arch: int, rows: int) -> Config:
    if arch >= 120:
        return Config(16, 16, 8, 3, 1)
    if rows <= 16:
        return Config(16, 64, 8, 3, 1)
    # Blackwell's products keep more copies in shared memory: 64 keys would take 345 KiB.
    return Config(64, 32 if arch >= 100 else 64, 8, 2, 1)


def _by_rows(rows: int, *configs: Config) -> Config:
    """The first whose `block_m` holds all rows, else the last."""
    return next((config for config in configs if rows <= config.block_m), configs[-1])


def choose_ragged(arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int, rows: int) -> Config:
    """Settings of the ragged kernel for up to `rows` query rows per (request, KV head)."""
    if shared_kv:
        config = _mla(arch, rows)
    elif head_dim <= 128:
        config = Config(64, 64, 4, 3, 1) if rows <= 64 else Config(128, 64, 8, 3, 1)
    else:
        config = Config(64, 32, 4, 2, 1)
    return _fitted(config, arch, shared_kv, head_dim, v_dim, kv_bytes)


def _fitted(config: Config, arch: int, shared_kv: bool, head_dim: int, v_dim: int, kv_bytes: int) -> Config:
    """The same with fewer programs, stages, keys or rows, where shared memory is smaller than on Hopper (sm_86, sm_12x)."""
    limit = SHARED.get(arch, 99) * 1024

    def needed(c: Config) -> int:
        row = head_dim + (0 if shared_kv else v_dim)
        buffers = c.num_stages if c.block_m >= 64 else c.num_stages - 1  # warpgroup instructions read the block being computed
        return 2 * c.block_m * (head_dim + c.block_n) + buffers * c.block_n * row * kv_bytes + 1024

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
    return config
