"""Drop the optional inputs that the chosen kernel does not read (sglang#26241).

    indptr, indices = kv_indices(...); host = seq_lens.cpu()
    mha_draft_decode(q, ..., indptr, indices, host, ..., max_seq_len, backend="block_table_kernel")
->
    mha_draft_decode(q, ..., None, None, None, ..., None, backend="block_table_kernel")

Work that only made those inputs (index generation, copies to the host) is then dead, and the manager removes it. An input that
something else uses stays. Each backend declares what its kernels read, so a call that is still "auto" is left alone.
"""

from __future__ import annotations

from torch import fx

from spec_ops.backends import call, get_backend
from spec_ops.passes.analysis.graph import ATTENTION_OPS, arg, attention_calls, set_arg
from spec_ops.passes.base import GraphPass, PassContext, PassResult

OPTIONAL_INPUTS = tuple(sorted(call.OPTIONAL_INPUTS))


class ElideUnreadInputs(GraphPass):
    name = "elide_unread_inputs"

    def run(self, graph: fx.Graph, context: PassContext, result: PassResult) -> None:
        for node in attention_calls(graph):
            op, name = ATTENTION_OPS[node.target], arg(node, "backend")
            given = [i for i in OPTIONAL_INPUTS if arg(node, i) is not None]
            if not given:
                continue
            backend = get_backend(name)
            if backend is None:
                state = "has no backend yet" if name == "auto" else f"names the unknown backend {name!r}"
                result.refuse(node, f"{op} {state}: {', '.join(given)} may be read")
                continue
            for unread in (i for i in given if i not in backend.reads):
                set_arg(node, unread, None)
                result.did(node, f"{op}: {name} does not read {unread}")
