"""How programs of a launch wait for one another: an arrival counter (`counters.py`) for each group of them.

Only programs that are all resident at once may wait: a cooperative launch (`cooperative.py`).
"""

import triton
import triton.language as tl


@triton.jit
def arrive(counter, expected):
    """Announce this program's partial result: low half of the counter, its high half counts launches.

    Returns the counter before. The last of `expected` to arrive opens the next generation, so that no launch has to clear it.
    """
    tl.debug_barrier()  # every thread's partial is written before one thread announces it
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if (before & 0xFFFF) == expected - 1:
        tl.atomic_add(counter, 0x10000 - expected, sem="relaxed", scope="gpu")
    return before


@triton.jit
def await_all(counter, before, expected):
    """Wait until `expected` programs have arrived; `before` is what `arrive` returned to this one."""
    now = before + 1
    while ((now & 0xFFFF) != expected) & ((now >> 16) == (before >> 16)):
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@triton.jit
def rendezvous(counters, turn, expected):
    """Wait until `expected` programs have called it for the `turn`-th time in this launch. Loads of what others wrote before
    need `cache_modifier=".cg"`.

    Two counters, used in turn: a program that has gone on already announces itself for the next turn elsewhere, and the one
    after that comes only when all have seen this one.
    """
    counter = counters + turn % 2
    await_all(counter, arrive(counter, expected), expected)
