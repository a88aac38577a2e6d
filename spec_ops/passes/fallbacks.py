"""Ops that Inductor has no code for are registered before it meets them.

Inductor calls such an op as it is: a fallback, which it registers when it first meets the op. torch 2.11 then writes the op's
arguments into a log message, whatever the log's level. An argument prints all that it was computed from, and prints what two
of its inputs share twice: after 32 layers this does not end.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
from torch._library.utils import get_layout_constraint_tag, is_builtin


def register_fallbacks(graph: fx.Graph) -> None:
    """Register what Inductor would for every custom op of `graph`, without the message."""
    # An op that mutates is the first argument of `auto_functionalized`.
    called = {op for node in graph.nodes for op in (node.target, *node.args[:1]) if isinstance(op, torch._ops.OpOverload)}
    for target in called:
        if target not in lowerings and not is_builtin(target):
            make_fallback(target, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(target)), warn=False)
