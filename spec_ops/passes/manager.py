"""Runs the passes inside Inductor: order, switches, counters, cache key.

Inductor calls `PassManager` on every post-grad graph (`post_grad_custom_pre_pass`). Whatever the user installed there stays and
runs first. There is one manager at most.

Where our passes run, Inductor does not pad the sizes of matrix products (`shape_padding`). It would decide before us, by timing
each product. It times even a round's memory-bound products on GPUs that its table of peak rates lacks (H200; B200 before torch
2.15), because it takes their peak for a thousandth of what it is. Compilations that run side by side then decide differently,
and no pass recognizes padded products (`docs/notebook/passes.md`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from spec_ops.backends.push import connected
from spec_ops.backends.registry import declarations
from spec_ops.ops.invariance import NotInvariantError
from spec_ops.passes.analysis.counts import count_nodes
from spec_ops.passes.analysis.graph import drop_unread, op_of
from spec_ops.passes.analysis.outputs import Watch
from spec_ops.passes.base import GraphPass, PassContext, PassResult
from spec_ops.passes.compile_kernels import CompileKernels
from spec_ops.passes.elide_host_syncs import ElideHostSyncs
from spec_ops.passes.elide_unread_inputs import ElideUnreadInputs
from spec_ops.passes.fallbacks import register_fallbacks
from spec_ops.passes.fuse_draft_steps import FuseDraftSteps
from spec_ops.passes.fuse_norm_linear import FuseNormLinear
from spec_ops.passes.fuse_rope_append import FuseRopeAppend
from spec_ops.passes.fuse_rounding import FuseRounding
from spec_ops.passes.fuse_router import FuseRouter
from spec_ops.passes.fuse_topk import FuseTopk
from spec_ops.passes.history import History
from spec_ops.passes.hoist_row_select import HoistRowSelect
from spec_ops.passes.lower_all_reduce import LowerAllReduce
from spec_ops.passes.lower_kv_append import LowerKvAppend
from spec_ops.passes.lower_skinny_mm import LowerSkinnyMm
from spec_ops.passes.merge_linears import MergeLinears
from spec_ops.passes.report import GraphReport, Place
from spec_ops.passes.require_invariance import INDUCTOR, RequireInvariance
from spec_ops.passes.select_backends import SelectBackends
from spec_ops.passes.share_op_inputs import ShareOpInputs
from spec_ops.passes.split_argmax import SplitArgmax
from spec_ops.passes.use_decode_for_extend import UseDecodeForExtend
from spec_ops.passes.whole_concatenations import WholeConcatenations
from spec_ops.passes.write_in_place import WriteInPlace, refuse_misplaced_views

logger = logging.getLogger("spec_ops.passes")

SLOT = "post_grad_custom_pre_pass"

# The order matters. A ragged extend becomes a draft extend before kernels are chosen, and the chosen kernels say which inputs
# can be dropped. Steps are fused when only what is needed is left, and rows are selected when no index input ties an attention
# call to all its rows. The products that are left are merged before their kernels are chosen. After `write_in_place` the graph
# is no longer functional, and its calls are those that will run.
PASSES: tuple[GraphPass, ...] = (
    UseDecodeForExtend(),
    SelectBackends(),
    ElideUnreadInputs(),
    ElideHostSyncs(),
    FuseDraftSteps(),
    HoistRowSelect(),
    MergeLinears(),
    FuseRopeAppend(),
    FuseRouter(),
    FuseTopk(),
    LowerKvAppend(),
    LowerAllReduce(),
    LowerSkinnyMm(),
    FuseNormLinear(),
    FuseRounding(),
    RequireInvariance(),
    SplitArgmax(),
    ShareOpInputs(),
    WholeConcatenations(),
    WriteInPlace(),
    CompileKernels(),
)


def pass_names() -> tuple[str, ...]:
    """The names of the passes, in the order in which they run."""
    return tuple(p.name for p in PASSES)


class PassManager(CustomGraphPass):
    """All enabled passes, as one Inductor graph pass.

    Args:
        switches: pass name to on or off; passes that are not named are on.
        arch: compute capability to plan for, see `PassContext`.
        listener: called with the `GraphReport` of every graph that calls our ops.
        keep_history: whether reports hold what each pass did to each node.
        every_graph: run on graphs too that call none of our ops.
        invariant: let only batch-invariant operations stand.

    Raises (when called):
        NotInvariantError: `invariant`, and operations are left that are not; unless there is a listener, who sees them in the
            report.
    """

    def __init__(
        self,
        switches: Mapping[str, bool] | None = None,
        arch: int | None = None,
        listener: Callable[[GraphReport], None] | None = None,
        keep_history: bool = False,
        every_graph: bool = False,
        invariant: bool = False,
    ) -> None:
        switches = {} if switches is None else switches
        if not isinstance(switches, Mapping) or not all(isinstance(on, bool) for on in switches.values()):
            raise ValueError(f"passes: must map names of passes to True or False, got {switches!r}")
        if unknown := set(switches) - set(pass_names()):
            raise ValueError(f"passes: unknown pass {sorted(unknown)}; there are {list(pass_names())}")
        self.passes = tuple(p for p in PASSES if switches.get(p.name, True))
        if invariant and not switches.get(RequireInvariance.name, True):
            raise ValueError("passes: `require_invariance` must be on with `invariant=True`, got False")
        self.context = PassContext(arch, invariant)
        self.listener, self.keep_history, self.every_graph = listener, keep_history, every_graph or invariant
        # The manager that this one replaces, and Inductor's setting without any manager.
        self.below = next((part for part in _installed() if isinstance(part, PassManager)), None)
        self.shape_padding: bool = self.below.shape_padding if self.below else inductor_config.shape_padding
        self.uninstalled = False

    def __call__(self, graph: fx.Graph) -> None:
        if not self.every_graph and not any(op_of(node) for node in graph.nodes):
            return
        refuse_misplaced_views(graph)
        told = self.listener is not None  # counts are for those who read them
        report = GraphReport(count_nodes(graph) if told else {}, place=Place.of(graph, self.context))
        if self.keep_history:
            report.history = History(graph)
        watch = Watch(graph)
        drop_unread(graph)
        for graph_pass in self.passes:
            result = PassResult(graph_pass.name, about=graph_pass.about())
            nodes = len(graph.nodes)
            graph_pass.run(graph, self.context, result)
            if result.matches or len(graph.nodes) != nodes:
                drop_unread(graph)
            watch.check(result)
            counters["inductor"][f"spec_ops_{graph_pass.name}"] += result.matches
            for note in result.refused:
                logger.debug("%s refused at %s: %s", graph_pass.name, note.where, note.text)
            report.results.append(result)
            if report.history is not None:
                report.history.note(graph, graph_pass.name)
        if report.history is not None:
            report.history.close()
        graph.lint()
        register_fallbacks(graph)
        if self.listener is not None:
            report.after = count_nodes(graph)
            self.listener(report)
        elif self.context.invariant:
            _raise_for_refused(report)

    def uuid(self) -> str | None:
        """Part of Inductor's cache key: our sources, the enabled passes, the target, registered backends and groups of ranks.

        None switches the cache off. That is needed for a listener, because a graph from the cache gives no report.
        """
        if self.listener is not None:
            return None
        state = (_sources_hash(), [p.name for p in self.passes], self.context, self.every_graph, declarations(), connected())
        return hashlib.sha256(repr(state).encode()).hexdigest()


def _raise_for_refused(report: GraphReport) -> None:
    refused = [note for result in report.results if result.name == RequireInvariance.name for note in result.refused]
    if refused:
        lines = dict.fromkeys(f"  {note.where}: {note.text}" for note in refused)
        raise NotInvariantError("\n".join(["invariant=True: these operations are not batch-invariant:", *lines]))


def _sources_hash() -> str:
    """A hash over all files that a rewrite depends on: passes, backend declarations and measured times, op schemas."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("passes", "backends", "ops"):
        for path in sorted(path for kind in ("*.py", "*.json") for path in (package / folder).rglob(kind)):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# Passes that are told whether the graph is for inference. Releases of torch without them call every pass with the graph only.
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class _Chain(_InferenceAware):
    """Several passes in one slot, for torch releases whose slot holds one."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __call__(self, graph: fx.Graph, **told: bool) -> None:
        for part in self.parts:
            part(graph, **told) if isinstance(part, _InferenceAware) else part(graph)

    def uuid(self) -> Any | None:
        ids = [part.uuid() if isinstance(part, CustomGraphPass) else None for part in self.parts]
        # A plain function has no id: Inductor then does not cache, as it would not without us.
        return None if None in ids else tuple(ids)


def chained(parts: list[Any]) -> Any:
    """The contents of a slot that runs `parts` one after another."""
    return None if not parts else parts[0] if len(parts) == 1 else _Chain(parts)


def parts_of(slot: Any) -> list[Any]:
    """The passes in a slot. It holds None, one pass, or a list of them (torch 2.13)."""
    if slot is None:
        return []
    parts = slot.parts if isinstance(slot, _Chain) else slot
    return [p for part in parts for p in parts_of(part)] if isinstance(parts, (list, tuple)) else [parts]


def _installed() -> list[Any]:
    return parts_of(getattr(inductor_config, SLOT))


def _slot(manager: PassManager | None) -> Any:
    """The slot's contents with `manager` as its last pass and no other manager; with None, without any manager."""
    parts = [part for part in _installed() if not isinstance(part, PassManager)] + ([manager] if manager else [])
    return chained(parts)


@contextlib.contextmanager
def enabled(
    switches: Mapping[str, bool] | None = None,
    *,
    arch: int | None = None,
    listener: Callable[[GraphReport], None] | None = None,
    keep_history: bool = False,
    invariant: bool = False,
) -> Iterator[PassManager]:
    """Run our passes in every graph that Inductor compiles inside the `with` block, after passes that the user installed.

    Args:
        switches: pass name to on or off; passes that are not named are on.
        arch: compute capability to plan for (100 for sm_100); default: that of the tensors' device.
        listener: called with the `GraphReport` of every graph that calls our ops.
        keep_history: whether reports hold what each pass did to each node.
        invariant: let only batch-invariant operations stand: see `compile`.

    Raises:
        ValueError: an unknown pass name.
    """
    find_binaries_where_inductor_does()
    manager = PassManager(switches, arch, listener, keep_history, invariant=invariant)
    settings = {SLOT: _slot(manager), "shape_padding": False, **(INDUCTOR if invariant else {})}
    with inductor_config.patch(settings):
        yield manager


def install(switches: Mapping[str, bool] | None = None) -> Callable[[], None]:
    """Run our passes in all later Inductor compilations of this thread, also those of plain `torch.compile`.

    Torch 2.13 keeps its compiler's settings for each thread: every thread that compiles has to call this. (What `compile`
    returns may be called in any.) Passes that the user installed run before ours, and those that are installed afterwards stay.
    Inductor's `shape_padding` is off meanwhile. If ours are installed twice they run once, with the later switches until these
    are undone.

    Args:
        switches: pass name to on or off; passes that are not named are on.

    Returns:
        The function that undoes it, in the same thread.

    Raises:
        ValueError: an unknown pass name.
    """
    find_binaries_where_inductor_does()
    manager = PassManager(switches)
    inductor_config.post_grad_custom_pre_pass = _slot(manager)
    inductor_config.shape_padding = False

    def uninstall() -> None:
        manager.uninstalled = True
        if manager not in _installed():
            return
        below = manager.below
        while below is not None and below.uninstalled:
            below = below.below
        inductor_config.post_grad_custom_pre_pass = _slot(below)
        if below is None:
            inductor_config.shape_padding = manager.shape_padding

    return uninstall


def find_binaries_where_inductor_does() -> None:
    """Set two variables of the environment for this process as Inductor does, if the user has set them neither way.

    TRITON_PTXAS_PATH: torch's own ptxas, if torch has one. Its version is a part of the key under which Triton finds a binary.
    TRITON_CACHE_DIR: a folder in Inductor's cache, if there is a GPU.

    Inductor sets the first when it compiles a kernel in this process, and the second when it makes one; hence neither if its
    caches have all kernels. Triton compiles the ops' kernels elsewhere, so that a process whose other kernels came from
    Inductor's caches would look for them under another key and in another folder, and compile them again (8 s for the round of
    an 8B model).
    """
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    if torch.cuda.is_available():
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device))
