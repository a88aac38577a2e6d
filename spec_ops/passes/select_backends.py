"""Choose the kernel of every attention call.

    mha_target_verify(q, ..., backend="auto")   ->   mha_target_verify(q, ..., backend="reference")

`backends.select_backend` selects by the call's fake tensors, for the tensors' device or for a stated architecture. A call that
no backend can run is left as it is: it raises when it runs, with the reasons, which the report has too. A call of dynamic sizes
is left as it is too: its kernel is chosen when it runs.
"""

from __future__ import annotations

from torch import fx

from spec_ops.backends import BackendError, select_backend
from spec_ops.backends.call import AttentionMeta
from spec_ops.backends.registry import (
    available_backends,
    get_backend,
    invariant_backend,
    known_while_compiling,
    warn_once,
    without_kernel,
)
from spec_ops.ops.attention import HOST_PLAN_OPS, OPS
from spec_ops.passes.analysis.graph import ATTENTION_OPS, attention_call, attention_calls, set_arg
from spec_ops.passes.base import GraphPass, PassContext, PassResult


class SelectBackends(GraphPass):
    name = "select_backends"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        for node in attention_calls(graph):
            op = ATTENTION_OPS[node.target]
            call = attention_call(node)
            if call is None:
                result.refuse(node, f"{op}: an input has no fake value to select by")
                continue
            meta = known_while_compiling(call.meta())
            if isinstance(meta, str):
                result.refuse(node, f"{op}: {meta}")
                continue
            arch, missing = context.machine(call.q.device)
            name = call.backend
            others: list[str] = []
            try:
                if context.invariant and name == "auto":
                    name = invariant_backend(arch)
                    others += _of_whole_caches(meta, arch)
                selection = select_backend(meta, arch, name, missing)
            except BackendError as error:
                result.refuse(node, str(error))
                continue
            if text := without_kernel(meta, arch, name, selection):
                result.warn(node, text)
                if context.arch is None:  # not a plan for elsewhere
                    warn_once(meta, arch, text)
            candidates = ((other, why) for other, why in selection.reasons.items() if not why.startswith("has no kernel"))
            others += [f"{other} {why}" for other, why in candidates]
            set_arg(node, "backend", selection.backend.name)
            node.target = (HOST_PLAN_OPS if selection.backend.host_plan else OPS)[op]
            absent = selection.backend.missing()
            here = f", which {absent}" if absent else ""
            result.did(node, f"{op}: {selection.backend.name}{here}", others)


def _of_whole_caches(meta: AttentionMeta, arch: int | None) -> list[str]:
    """What a batch-invariant call could be told to take, by who knows all calls on its cache: a graph may not have them."""
    known = (backend for name in available_backends() if (backend := get_backend(name)) is not None and backend.whole_caches)
    what = "is taken by name, or by a Generator: every call on a cache must go to it"
    return [f"{backend.name} {what}" for backend in known if backend.refuse(meta, arch) is None]
