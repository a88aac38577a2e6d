"""Models that transformers has divided among processes: `from_pretrained(distributed_config=DistributedConfig(tp_size=N))`.

Its weights are DTensors, and its linear layers add up what ranks have computed by torch's functional collectives, as our own
shares do: in a compiled round the DTensors are gone, and the passes see the same graph.

transformers puts a `forward` of its own around that of a linear layer. What the layer then does is not read from its names,
which change between releases, but from a call.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from spec_ops.models.layers import DividedHead
from spec_ops.parallel import TensorParallel
from spec_ops.parallel.layers import likeliest_of_shares

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TOLERANCE = 0.01  # of a product's size: what rounding may differ between two ways to compute it


def ranks_of(model: nn.Module) -> TensorParallel | None:
    """The ranks that share `model`; None if no weight is divided.

    All of them must call it: the first call for a group lets them meet.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    found = [divided for p in model.parameters() if (divided := as_divided(p)) is not None]
    meshes = {p.device_mesh for p in found if not all(placement.is_replicate() for placement in p.placements)}
    if not meshes:
        return None
    if len(meshes) > 1 or (mesh := meshes.pop()).ndim > 1:
        raise ValueError(f"{type(model).__name__} must be divided along one dimension of ranks (`tp_size`), got {meshes}")
    return TensorParallel.of(mesh.get_group())


def as_divided(tensor: torch.Tensor) -> DTensor | None:
    """`tensor` if it is a DTensor, otherwise None."""
    if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter or not dist.is_available():
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of `tensor`. To set its `data` changes `tensor`."""
    if (divided := as_divided(tensor)) is None:
        return tensor
    names, _ = divided.__tensor_flatten__()  # `to_local` of a parameter is another tensor in every call
    (part,) = (each for name in names if isinstance(each := getattr(divided, name), torch.Tensor))
    return part


def all_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, of whose parts all ranks get a copy; they must all call it."""
    return tensor if (divided := as_divided(tensor)) is None else divided.full_tensor()


def division(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """How `tensor` is divided, to be compared; None if it is not."""
    return None if (divided := as_divided(tensor)) is None else (divided.device_mesh, tuple(divided.placements))


def by_rows(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is divided, and each process holds rows of it."""
    if (divided := as_divided(tensor)) is None:
        return False
    return len(divided.placements) == 1 and divided.placements[0].is_shard(0)


def calls_its_class(linear: nn.Linear) -> bool:
    """Whether a call of `linear` is that of its class: it has no `forward` of its own, or one of transformers' around it."""
    forward = vars(linear).get("forward")
    if forward is None:
        return True
    module = getattr(forward, "__globals__", {}).get("__name__", "")
    if division(linear.weight) is None or not module.startswith("transformers."):
        return False
    inside = [cell.cell_contents for cell in forward.__closure__ or ()]
    called = [each for each in inside if callable(each) and not isinstance(each, nn.Module)]
    return [(getattr(each, "__func__", None), getattr(each, "__self__", None)) for each in called] == [
        (type(linear).forward, linear)
    ]


@torch.no_grad()
def gives_own_rows(linear: nn.Linear, x: Any, output: Any) -> bool:
    """Whether `output`, of a call with `x`, is the product with this process's rows of the weight, and nothing else."""
    if type(x) is not torch.Tensor or type(output) is not torch.Tensor:
        return False
    return _alike(output, _own_product(linear, x))


def _own_product(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = linear.bias
    return F.linear(x, own_part(linear.weight), None if bias is None else own_part(bias))


def _alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    got, want = got.double(), want.double()
    return bool((got - want).norm() <= _TOLERANCE * want.norm())


class HeadCalls:
    """Watches the LM head in a call of what is around it."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> HeadCalls:
        self._hook = self._head.register_forward_hook(self._note)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._hook.remove()

    def _note(self, _head: nn.Module, args: Sequence[Any], output: Any) -> None:
        if args and type(args[0]) is torch.Tensor and type(output) is torch.Tensor:
            self._calls.append((args[0], output, output.clone()))

    def alone(self, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether it read `hidden` and gave `logits`, and nothing was computed before or after it."""
        if len(self._calls) != 1:
            return False
        read, gave, values = self._calls[0]
        if read.numel() != hidden.numel() or gave.data_ptr() != logits.data_ptr() or gave.numel() != logits.numel():
            return False
        return torch.equal(read.view_as(hidden), hidden) and torch.equal(values.view_as(logits), logits)


class ExchangedHead(DividedHead):
    """The LM head of a model that transformers has divided by tokens. A call is that of the model's own, which gathers all
    logits; `argmax` exchanges 8 bytes a row. Made by `exchanged`."""

    first: torch.Tensor
    ranks: TensorParallel
    own: tuple[nn.Linear]  # in a tuple, so that it is no child
    called: Any  # its `forward`, as it was looked at

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.own[0](hidden)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self.own[0]
        if own._forward_hooks or own._forward_pre_hooks or vars(own).get("forward") is not self.called:
            return own(hidden).argmax(-1)  # what the user has added since may change the logits
        divided: Any = own  # compiled, `own_part` would not do
        weight, bias = divided.weight.to_local(), None if own.bias is None else divided.bias.to_local()
        return likeliest_of_shares(F.linear(hidden, weight, bias), self.first, self.ranks)


@torch.no_grad()
def exchanged(head: nn.Linear, ranks: TensorParallel, hidden: torch.Tensor) -> ExchangedHead | None:
    """`head` with an `argmax` by an exchange; None if it must gather its logits: it is not divided by rows, or it has hooks or
    a `forward` of the user's.

    All of `ranks` must call it.

    Args:
        head: the model's.
        hidden: `[n, hidden_size]` to try it with.
    """
    made = _exchanged(head, ranks, hidden)
    return made if ranks.every(made is not None) else None


def _exchanged(head: nn.Linear, ranks: TensorParallel, hidden: torch.Tensor) -> ExchangedHead | None:
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks or not calls_its_class(head):
        return None
    if not by_rows(head.weight) or (head.bias is not None and division(head.bias) != division(head.weight)):
        return None
    if not head.weight.is_floating_point() or head.weight.itemsize > 4:  # a key has room for 32 bits
        return None
    share = -(-len(head.weight) // ranks.size)  # as `torch.chunk` divides
    first = min(ranks.rank * share, len(head.weight))
    logits, part = head(hidden), _own_product(head, hidden)
    if type(logits) is not torch.Tensor or logits.shape[-1] != len(head.weight):
        return None
    if not _alike(logits[..., first : first + part.shape[-1]], part):
        return None
    twin: Any = copy.copy(head)
    twin.__class__, twin.own, twin.ranks, twin.called = ExchangedHead, (head,), ranks, vars(head).get("forward")
    vars(twin).pop("forward", None)
    twin._buffers, twin._non_persistent_buffers_set = {}, set()
    # A buffer, so that all ranks compile one and the same graph.
    twin.register_buffer("first", torch.tensor(first, device=part.device), persistent=False)
    return twin
