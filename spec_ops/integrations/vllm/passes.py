"""Our graph passes where vLLM compiles a model.

vLLM keeps two of Inductor's places for passes to itself; ours is free. In its graphs attention is one opaque op, and norms are
ops of vLLM that are lowered after all passes; no graph has an op of ours, hence `every_graph`. What is left are products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def inductor_compile_config(passes: Mapping[str, bool] | None = None, *, arch: int | None = None) -> dict[str, Any]:
    """For vLLM's `CompilationConfig(inductor_compile_config=...)`: our passes on every graph, and no padded products.

    vLLM hashes it, so that its caches of compiled graphs know our passes. Rows of its graphs are symbolic, and passes that
    choose by the number of rows leave those alone: name sizes in `compile_sizes` to have graphs of these.

    Args:
        passes: pass name to on or off; passes that are not named are on.
        arch: compute capability to plan for; default: that of the tensors' device.

    Raises:
        ValueError: an unknown pass name.
    """
    from spec_ops.passes.manager import SLOT, PassManager  # not where an engine starts without passes

    return {SLOT: PassManager(passes, arch=arch, every_graph=True), "shape_padding": False}
