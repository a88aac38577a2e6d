"""Sizes that kernels compute while they are compiled.

Not `triton.next_power_of_2`: SGLang puts a plain function in its place (`sglang/srt/utils/common.py`), for which Triton refuses
to compile a kernel in SGLang's processes. The host may call that one.
"""

from __future__ import annotations

from triton.runtime.jit import constexpr_function


@constexpr_function
def next_power_of_2(n):
    """The least power of two that is not below `n`, 1 at least."""
    return 1 << (max(n, 1) - 1).bit_length()
