"""Which experts a graph sends its tokens to, as a call of `route_experts`.

Routers are written in many ways: a softmax before or after `topk`, groups by masks, sums that are clamped. So a router is known
by what it computes and not by its form. The part of the graph between logits `[tokens, experts]` and what `moe_experts` takes
is run on the CPU with drawn logits and biases, a hundred rows of them, and compared with what the op gives. Rows are drawn so
that what could differ does: close to each other, far apart, and so small that a number added to their sum shows. What acts on
rare values alone, such as a clamp, draws may not meet: a router begins after it, or its weights end before it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from spec_ops.ops.moe import MAX_EXPERTS, MAX_TOP_K, SCORINGS, route_experts_op
from spec_ops.passes.analysis.graph import arg, value
from spec_ops.passes.analysis.norms import is_convert
from spec_ops.passes.analysis.rows import RESHAPES, is_pointwise

aten, prims = torch.ops.aten, torch.ops.prims
_CONSTANTS = (aten.full.default, aten.scalar_tensor.default)
_KNOWN = frozenset((
    *RESHAPES, *_CONSTANTS, aten.expand.default, aten.clone.default, aten.slice.Tensor, aten.select.int, aten.topk.default,
    aten.sort.default, aten.sort.stable, aten.max.dim, aten.gather.default, aten.scatter.value, aten.scatter.src,
    aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.full_like.default, prims.convert_element_type.default,
    operator.getitem,
))  # fmt: skip
# What is the identity, or the same, for most numbers: no draw need meet the others. So a router begins after it, or its weights
# end before it; it is known of a sum alone, of which the draws meet small ones.
_PIECEWISE = frozenset((
    aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.clamp, aten.clamp_min, aten.clamp_max, aten.minimum,
    aten.maximum, aten.fmin, aten.fmax, aten.relu, aten.abs, aten.sign, aten.hardtanh, aten.isnan, aten.isinf, aten.nan_to_num,
    aten.floor, aten.ceil, aten.round, aten.trunc, aten.remainder, aten.fmod,
))  # fmt: skip
_MOST_NODES = 64  # of a router; DeepSeek-V3's has 27
_LEAST_ROWS = 64  # drawn of each kind
_BELOW = (1.0, -8.0)  # scale and shift of a bias with which every choice is below what masks may fill in
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # a rounding more, or another order of a sum


class NotARouterError(Exception):
    """Why experts and weights are no call of `route_experts`."""


class Form(NamedTuple):
    """The arguments of `route_experts` besides tensors, in its order."""

    k: int
    scoring: str
    groups: int
    top_groups: int
    renormalize: bool
    scale: float


class Router(NamedTuple):
    """`ids, weights = route_experts(logits, bias, *form)`; `weights` None: those of the graph are computed in another way."""

    logits: fx.Node
    bias: fx.Node | None
    form: Form
    ids: fx.Node
    weights: fx.Node | None


class _Region(NamedTuple):
    """Nodes from `logits` on, in order, and the one `[experts]` vector besides that they read."""

    logits: fx.Node
    bias: fx.Node | None
    nodes: tuple[fx.Node, ...]


class Routers:
    """Finds routers. Layers whose routers are written alike are compared with the op once."""

    def __init__(self) -> None:
        self._known: dict[tuple, Form | str] = {}

    def find(self, ids: fx.Node, weights: fx.Node) -> Router:
        """The router that gives `ids` and `weights [tokens, k]`.

        Where the weights are not what the op computes, some value `[tokens, k]` that they are computed from is tried, then the
        experts alone.

        Raises:
            NotARouterError: no call of the op gives these experts.
        """
        chosen, why = _chosen(ids), "no `topk` chooses the experts"
        # The experts alone, if their scores come with them from nowhere else: otherwise `topk` would stay.
        topk: Any = chosen.args[0]
        alone = () if any(user.args[1] == 0 and user.users for user in topk.users) else (None,)
        for wanted in (*_weights(weights, chosen), *alone):
            for logits in _logits(chosen):
                try:
                    region = _region(logits, chosen, wanted)
                    return _tidied(Router(region.logits, region.bias, self._form(region, chosen, wanted), chosen, wanted))
                except NotARouterError as error:
                    why = str(error)
        raise NotARouterError(why)

    def _form(self, region: _Region, chosen: fx.Node, weights: fx.Node | None) -> Form:
        key = _spelled(region, chosen, weights)
        if key not in self._known:
            try:
                self._known[key] = _form_of(region, chosen, weights)
            except NotARouterError as error:
                self._known[key] = str(error)
            except Exception as error:  # of what the graph computes, with numbers that it may never meet
                self._known[key] = f"it does not run with drawn numbers: {error}"
        if isinstance(found := self._known[key], str):
            raise NotARouterError(found)
        return found


def _spelled(region: _Region, chosen: fx.Node, weights: fx.Node | None) -> tuple:
    """What a region computes, whatever its nodes are called."""
    names: dict[Any, str] = {region.logits: "logits", region.bias: "bias"}
    names |= {node: str(place) for place, node in enumerate(region.nodes)}
    calls = tuple((str(n.target), str(fx.node.map_arg((n.args, n.kwargs), names.__getitem__))) for n in region.nodes)
    inputs = tuple((tuple(fake.shape), fake.dtype) for fake in map(value, (region.logits, region.bias)) if fake is not None)
    return names[chosen], names.get(weights), inputs, calls


def _chosen(ids: fx.Node) -> fx.Node:
    """The experts as a `topk` gives them, before conversions and masks."""
    node: Any = ids
    for _ in range(8):
        if node.target is operator.getitem and getattr(node.args[0], "target", None) is aten.topk.default:
            return node
        tensors = [source for source in node.all_input_nodes if _is_integer(source) and value(source).shape == value(ids).shape]
        if not (is_convert(node, value(node).dtype) or node.target in RESHAPES or is_pointwise(node.target)) or not tensors:
            break
        node = tensors[0]
    raise NotARouterError("no `topk` chooses the experts")


def _is_integer(node: fx.Node) -> bool:
    fake = value(node)
    return isinstance(fake, torch.Tensor) and not fake.is_floating_point() and fake.dtype != torch.bool


def _weights(weights: fx.Node, chosen: fx.Node) -> Iterator[fx.Node]:
    """What could be the op's weights: `weights`, and what they are computed from, the nearest first. Not what is float32 before
    it is rounded: a factor can be told from float32 alone."""
    node: Any = weights
    for _ in range(8):
        fake = value(node)
        if not isinstance(fake, torch.Tensor) or fake.shape != value(chosen).shape or fake.dtype not in _TOLERANCE:
            return
        alike = [source for source in node.all_input_nodes if getattr(value(source), "shape", None) == fake.shape]
        floats = [source for source in alike if value(source).is_floating_point()]
        rounds = is_convert(node, fake.dtype) and [value(source).dtype for source in floats] == [torch.float32]
        if not rounds:
            yield node
        if len(floats) != 1:
            return
        node = floats[0]


def _logits(chosen: fx.Node) -> Iterator[fx.Node]:
    """Floating-point rows that experts are chosen from: of float32 first, in which more can be drawn, and those that are
    computed first."""
    topk: Any = chosen.args[0]
    rows, experts = value(topk.args[0]).shape[0], value(topk.args[0]).shape[-1]
    found = [node for node in _ancestors(topk) if _is_rows(node, rows, experts)]
    if not found:
        raise NotARouterError("its logits are not `[tokens, experts]`, with sizes known while compiling")
    yield from sorted(found, key=lambda node: value(node).dtype != torch.float32)


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """What `node` is computed from by functions that a router may have, and what those begin with, in order."""
    found, queue = dict.fromkeys([node]), [node]
    for current in queue:
        if not _is_known(current):
            continue
        for source in current.all_input_nodes:
            if source not in found and len(found) < _MOST_NODES:
                found[source] = None
                queue.append(source)
    return [each for each in node.graph.nodes if each in found and each is not node]


def _is_known(node: fx.Node) -> bool:
    if getattr(node.target, "overloadpacket", None) in _PIECEWISE:
        return all(source.target is aten.sum.dim_IntList for source in node.all_input_nodes)
    return node.op == "call_function" and (node.target in _KNOWN or is_pointwise(node.target))


def _is_rows(node: fx.Node, rows: Any, experts: Any) -> bool:
    fake = value(node)
    return (
        isinstance(fake, torch.Tensor)
        and fake.dtype in _TOLERANCE
        and fake.dim() == 2
        and all(isinstance(size, int) for size in fake.shape)
        and tuple(fake.shape) == (rows, experts)
        and node.target not in _CONSTANTS
    )


def _region(logits: fx.Node, chosen: fx.Node, weights: fx.Node | None) -> _Region:
    """What lies between `logits` and the results.

    Raises:
        NotARouterError: it reads something else than logits and one vector.
    """
    experts = value(logits).shape[1]
    found: set[fx.Node] = set()
    outside: set[fx.Node] = set()
    queue = [node for node in (chosen, weights) if node is not None and node is not logits]
    while queue:
        node = queue.pop()
        if node in found or node is logits or node in outside:
            continue
        if not _is_known(node):
            outside.add(node)
        else:
            found.add(node)
            queue += node.all_input_nodes
        if len(found) > _MOST_NODES:
            raise NotARouterError("too much is computed between its logits and the experts")
    bias = next(iter(outside), None)
    if len(outside) > 1 or (bias is not None and not _is_vector(value(bias), experts)):
        raise NotARouterError("it depends on something else than its logits and a bias")
    return _Region(logits, bias, tuple(node for node in logits.graph.nodes if node in found))


def _is_vector(fake: Any, size: int) -> bool:
    """`[size]` or `[1, size]`."""
    return isinstance(fake, torch.Tensor) and fake.is_floating_point() and tuple(fake.shape) in ((size,), (1, size))


def _form_of(region: _Region, chosen: fx.Node, weights: fx.Node | None) -> Form:
    rows, experts = value(region.logits).shape
    topk: Any = chosen.args[0]
    k = arg(topk, "k")
    if not isinstance(k, int) or not 1 <= k <= MAX_TOP_K or experts > MAX_EXPERTS:
        raise NotARouterError(f"{k} of {experts} experts: `route_experts` takes up to {MAX_TOP_K} of {MAX_EXPERTS}")
    if not rows:
        raise NotARouterError("it has no tokens")
    if not arg(topk, "largest"):
        raise NotARouterError("it takes the smallest")
    with torch.no_grad(), _disable_current_modes():
        draws = [(torch.cat(logits), logits, bias) for logits, bias in _draws(region)]
        runs = [_run(region, one, bias, chosen, weights) for _, logits, bias in draws for one in logits]
        ids = torch.cat([ids for ids, _ in runs])
        theirs = None if weights is None else torch.cat([part for _, part in runs])  # type: ignore[misc]
        for scoring in SCORINGS if weights is not None else reversed(SCORINGS):  # alone, as little as possible
            for groups, top_groups in _groups(region, experts, k):
                # Sums of values that may be anything are not all small where one of the draws is.
                for renormalize in (True, False) if weights is not None and scoring != "none" else (False,):
                    form = Form(k, scoring, groups, top_groups, renormalize, 1.0)
                    results = [route_experts_op(logits, bias, *form) for logits, _, bias in draws]
                    our_ids, ours = (torch.cat(parts) for parts in zip(*results, strict=True))
                    if not torch.equal(our_ids.sort(-1).values, ids.sort(-1).values):
                        break
                    if theirs is None:
                        return form
                    ours, wanted = ours.gather(1, our_ids.argsort(-1)), theirs.gather(1, ids.argsort(-1))
                    scale = _factor(ours, wanted)
                    if scale > 0 and torch.allclose(ours * scale, wanted.float(), rtol=_TOLERANCE[wanted.dtype], atol=0.0):
                        return form._replace(scale=scale)
    raise NotARouterError("`route_experts` gives other experts or other weights")


def _groups(region: _Region, experts: int, k: int) -> Iterator[tuple[int, int]]:
    """In how many groups experts may lie, and of how many they may come: as the shapes of the region say."""
    yield 1, 1
    shapes = [tuple(value(node).shape) for node in region.nodes if isinstance(value(node), torch.Tensor)]
    for groups in dict.fromkeys(shape[-2] for shape in shapes if len(shape) == 3 and shape[-2] * shape[-1] == experts):
        for node in region.nodes:
            if node.target is aten.topk.default and value(node.args[0]).shape[-1] == groups:
                top_groups = arg(node, "k")
                if groups < experts and k <= experts // groups * top_groups:
                    yield groups, top_groups


def _draws(region: _Region) -> Iterator[tuple[list[torch.Tensor], torch.Tensor | None]]:
    """Logits without ties, of the dtype and the number of rows of the region's, with the bias for them: as large as their
    scores, so that both count."""
    fake, generator = value(region.logits), torch.Generator("cpu").manual_seed(0)
    rows, experts = fake.shape
    times = range(-(-_LEAST_ROWS // rows))

    def bias(scale: float, shift: float = 0.0) -> torch.Tensor | None:
        if region.bias is None:
            return None
        drawn = torch.randn(experts, generator=generator, device="cpu", dtype=torch.float32) * scale + shift
        return drawn.to(value(region.bias).dtype).float()

    if fake.dtype != torch.float32:
        # All numbers of bfloat16 from 1/64 to 8 and their negatives, which float16 has too.
        some = torch.arange(0x3C80, 0x4100, dtype=torch.int16, device="cpu").view(torch.bfloat16)
        pool = torch.cat((some, -some)).to(fake.dtype)
        for below in (False, True):
            orders = [[torch.randperm(len(pool), generator=generator, device="cpu") for _ in range(rows)] for _ in times]
            yield [pool[torch.stack(order)[:, :experts]] for order in orders], bias(*_BELOW if below else (1 / experts,))
        return
    # The last ones make sigmoids so small that a number added to their sum, or a least sum, shows.
    for factor, shift, scale in ((1.0, 0.0, 1 / experts), (6.0, 0.0, 1.0), (1.0, -30.0, 1e-13)):
        normal = [torch.randn(rows, experts, generator=generator, device="cpu", dtype=torch.float32) for _ in times]
        yield [one * factor + shift for one in normal], bias(scale)
        if region.bias is not None and not shift and factor == 1.0:
            yield normal, bias(*_BELOW)


def _run(
    region: _Region, logits: torch.Tensor, bias: torch.Tensor | None, chosen: fx.Node, weights: fx.Node | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Experts and weights as the region gives them, on the CPU."""
    known: dict[Any, Any] = {region.logits: logits, None: None}
    if region.bias is not None and bias is not None:
        fake = value(region.bias)
        known[region.bias] = bias.to(fake.dtype).view(fake.shape)
    for node in region.nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
        here = {"device": torch.device("cpu")} if "device" in kwargs else {}
        known[node] = node.target(*args, **{**kwargs, **here})  # type: ignore[operator]
    return known[chosen], known[weights]


def _factor(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """What our weights would have to be multiplied with, as short as a program writes such a number; 1 of 16 bits."""
    ratio = ((theirs.double() * ours).sum() / (ours.double() * ours).sum()).item()
    if theirs.dtype != torch.float32:  # many roundings together are less than one
        return 1.0 if abs(ratio - 1) < _TOLERANCE[theirs.dtype] / 4 else 0.0
    shorter = (float(f"{ratio:.{digits}g}") for digits in range(1, 7))
    return next((short for short in shorter if abs(short - ratio) < 1e-6 * abs(ratio)), ratio)


def _tidied(router: Router) -> Router:
    """Logits as they were before an exact conversion to float32, which the op makes itself."""
    source: Any = router.logits.args[0] if is_convert(router.logits, torch.float32) else None
    if source is not None and value(source).dtype in (torch.bfloat16, torch.float16):
        return router._replace(logits=source)
    return router
