"""Linear layers that read one value, with their weights side by side in one storage.

Most models of transformers have a linear layer each for queries, keys and values, and for gate and up. As long as a model is
taken over, the parameters of such siblings are views of one tensor. The copies of these layers that rounds call read rows of
that tensor, which the pass `merge_linears` makes one product of. The model's own modules, parameters and state dict stay, and
whatever writes to a parameter in place writes to the tensor. Of parameters that are divided among processes by rows, the parts
that this process holds lie side by side.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from spec_ops.integrations.transformers.sharing import by_rows, calls_its_class, division, gives_own_rows, own_part

logger = logging.getLogger(__name__)


class SiblingLinears:
    """Watches a forward: which linear layers of one parent read the same value.

    Attributes:
        rowwise: names of layers that are divided among processes and give the product with the rows of this one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
        self._calls: dict[str, list[tuple]] = {}
        self._inputs: list[torch.Tensor] = []  # alive, so that no two share an address
        self.rowwise: frozenset[str] = frozenset()

    def __enter__(self) -> SiblingLinears:
        self._hooks = [
            m.register_forward_pre_hook(lambda _, args, name=name: self._note(name, args)) for name, m in self._linears
        ]
        self._hooks += [
            m.register_forward_hook(lambda module, args, output, name=name: self._look(name, module, args, output))
            for name, m in self._linears
            if division(m.weight) is not None
        ]
        return self

    def __exit__(self, *_exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._inputs.clear()

    def _note(self, name: str, args: Sequence[Any]) -> None:
        x = args[0] if args else None
        if isinstance(x, torch.Tensor):
            self._inputs.append(x)
            version = 0 if x.is_inference() else x._version
            self._calls.setdefault(name, []).append((x.data_ptr(), x.shape, x.stride(), x.dtype, version))

    def _look(self, name: str, linear: nn.Linear, args: Sequence[Any], output: Any) -> None:
        if args and by_rows(linear.weight) and gives_own_rows(linear, args[0], output):
            self.rowwise |= {name}

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of siblings that were called once, in the order of their calls."""
        found: dict[tuple, list[str]] = {}
        for name, calls in self._calls.items():
            if len(calls) == 1:
                found.setdefault((name.rpartition(".")[0], *calls[0]), []).append(name)
        return tuple(tuple(names) for names in found.values() if len(names) > 1)


class _Rows(nn.Linear):
    """A linear layer whose weight and bias are rows of a larger one's. Made of a layer by `_Group.copies`."""

    whole: nn.Parameter
    whole_bias: nn.Parameter | None
    rows: tuple[int, int]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.whole[self.rows[0] : self.rows[1]]

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self.whole_bias is None else self.whole_bias[self.rows[0] : self.rows[1]]


class _Group:
    """Siblings whose parameters are views of `whole` and `whole_bias`."""

    def __init__(self, names: Sequence[str], linears: Sequence[nn.Linear]) -> None:
        self.names, self.linears = tuple(names), tuple(linears)
        self.whole = _side_by_side([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.whole_bias = _side_by_side(biases) if biases else None
        ends = accumulate((len(own_part(linear.weight)) for linear in linears), initial=0)
        self.rows = tuple(pairwise(ends))

    def in_place(self) -> bool:
        """Whether the layers' parameters still are the views."""
        for linear, (start, end) in zip(self.linears, self.rows, strict=True):
            for name, whole in (("weight", self.whole), ("bias", self.whole_bias)):
                parameter = linear._parameters.get(name)
                if (parameter is None) != (whole is None):
                    return False
                if parameter is None or whole is None:
                    continue
                part = own_part(parameter)
                same = part.shape == (end - start, *whole.shape[1:]) and part.is_contiguous()
                if not same or part.dtype != whole.dtype or part.device != whole.device:
                    return False
                if part.data_ptr() != whole.data_ptr() + start * whole.stride(0) * whole.element_size():
                    return False
        return True

    def unfit(self) -> str | None:
        """Why the parameters cannot be laid side by side again; None if they can. Rounds have the rows and the bias that there
        were."""
        if (reason := _unfit(self.linears)) is not None:
            return reason
        if any((linear._parameters.get("bias") is None) != (self.whole_bias is None) for linear in self.linears):
            return "they have a bias now" if self.whole_bias is None else "they have no bias any more"
        for linear, (start, end) in zip(self.linears, self.rows, strict=True):
            if (shape := own_part(linear.weight).shape) != (end - start, *self.whole.shape[1:]):
                return f"a weight is {list(shape)} now, it was {[end - start, *self.whole.shape[1:]]}"
        return None

    def lay(self) -> None:
        """Put the parameters side by side again, after they were replaced or moved."""
        self.whole.data = _side_by_side([linear.weight for linear in self.linears]).data
        if self.whole_bias is not None:
            self.whole_bias.data = _side_by_side([linear.bias for linear in self.linears]).data

    def copies(self) -> dict[str, nn.Module]:
        """The layers that rounds call, by name. They share the hooks of the model's, and call their class."""
        made: dict[str, nn.Module] = {}
        for name, linear, rows in zip(self.names, self.linears, self.rows, strict=True):
            twin = copy.copy(linear)
            twin._parameters = {"whole": self.whole, "whole_bias": self.whole_bias}
            twin.__class__, twin.rows = _Rows, rows  # type: ignore[assignment]
            vars(twin).pop("forward", None)
            made[name] = twin
        return made

    @torch.inference_mode(False)  # parameters made in that mode cannot be trained
    def restore(self) -> None:
        """Give every parameter that still is a view a storage of its own, and free the tensor."""
        for name, whole in (("weight", self.whole), ("bias", self.whole_bias)):
            if whole is None:
                continue
            memory = _storage(whole)
            for linear in self.linears:
                if (parameter := linear._parameters.get(name)) is None:
                    continue
                if _storage(parameter) == memory:  # a quantized weight has none
                    part = own_part(parameter)
                    part.data = part.data.clone()
            whole.data = torch.empty(0, dtype=whole.dtype, device=whole.device)


class _Copied(NamedTuple):
    """A module of the model, the copy of it that rounds call, the children that it had, and its `forward` if the copy does
    without. The copy has children of its own, and is equal in everything else."""

    name: str
    module: nn.Module
    twin: nn.Module
    children: dict[str, nn.Module | None]
    forward: Any

    def follow(self) -> None:
        """Take over attributes that the user has set since, such as a `forward`."""
        kept = ("_modules", "_parameters", "rows") if isinstance(self.twin, _Rows) else ("_modules",)
        theirs, ours = vars(self.module), vars(self.twin)
        if self.forward is not None and theirs.get("forward") is self.forward:
            theirs = {name: value for name, value in theirs.items() if name != "forward"}
        for name in [name for name in ours if name not in theirs and name not in kept]:
            del ours[name]
        for name, value in theirs.items():
            if name not in kept and ours.get(name) is not value:
                ours[name] = value


class MergedLinears:
    """The siblings of a model that were laid side by side.

    Args:
        model: a causal language model.
        groups: names of siblings, see `SiblingLinears.groups`.
        decoder: name of the part that rounds call.
        rowwise: names of layers, see `SiblingLinears`.

    Attributes:
        apart: why layers were left as they are: a reason for each name.
        decoder: that part, of shallow copies whose linear layers read rows of the merged weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Iterable[Sequence[str]],
        decoder: str,
        rowwise: Container[str] = (),
    ) -> None:
        self.apart: dict[str, str] = {}
        self._groups: list[_Group] = []
        self._copied: list[_Copied] = []
        self._closed = False
        used = _Used(model)
        parts: dict[str, nn.Module] = {}
        for names in groups:
            linears = [cast(nn.Linear, model.get_submodule(name)) for name in names]
            reason = used.refusal(linears)
            if reason is None and any(division(m.weight) and n not in rowwise for n, m in zip(names, linears, strict=True)):
                reason = "one is divided among processes, and gives something else than the product with its own rows"
            if reason is None:
                self._groups.append(group := _Group(names, linears))
                parts |= group.copies()
            else:
                self.apart |= dict.fromkeys(names, reason)
        for name, reason in self.apart.items():
            logger.info("%s stays apart: %s", name, reason)
        self.decoder = self._replaced(model.get_submodule(decoder), decoder, parts)
        self._release_memory()

    def _replaced(self, module: nn.Module, name: str, parts: dict[str, nn.Module]) -> nn.Module:
        twin = parts.get(name)
        if twin is None:
            if not any(part.startswith(f"{name}.") for part in parts):
                return module
            twin = copy.copy(module)
            twin._modules = {
                child: None if part is None else self._replaced(part, f"{name}.{child}", parts)
                for child, part in module._modules.items()
            }
        forward = vars(module).get("forward") if isinstance(twin, _Rows) else None
        self._copied.append(_Copied(name, module, twin, dict(module._modules), forward))
        return twin

    def check(self) -> str | None:
        """Follow what was changed of the model since: its attributes, and parameters that were moved or replaced.

        Returns:
            What was changed so that rounds would not see it; None if nothing was.
        """
        for copied in self._copied:
            name, module, children = copied.name, copied.module, copied.children
            if module._modules != children:
                changed = {n for n in {*children, *module._modules} if children.get(n) is not module._modules.get(n)}
                return f"{name}.{min(changed, default='')} was replaced"
            copied.follow()
        for group in self._groups:
            if group.in_place():
                continue
            if (reason := group.unfit()) is not None:
                return f"the parameters of {', '.join(group.names)} were replaced: {reason}"
            group.lay()
        return None

    @property
    def closed(self) -> bool:
        return self._closed

    def restore(self) -> None:
        """Give the parameters storages of their own. The copies cannot be called any more."""
        self._closed = True
        for group in self._groups:
            group.restore()
        self._release_memory()

    def _release_memory(self) -> None:
        """Give the driver back what the allocator holds of the old storages: those of other sizes do not fit in there."""
        devices = {group.whole.device for group in self._groups if group.whole.device.type == "cuda"}
        if devices and not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()


class _Used:
    """How often each parameter and each storage of a model is used."""

    def __init__(self, model: nn.Module) -> None:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.places = Counter(id(tensor) for _, tensor in named)
        distinct = {id(tensor): tensor for _, tensor in named}
        self.storages: Counter[Any] = Counter(storage for tensor in distinct.values() if (storage := _storage(tensor)))

    def refusal(self, linears: Sequence[nn.Linear]) -> str | None:
        """Why layers are left apart; None if they are laid side by side."""
        if any(linear._forward_hooks or linear._forward_pre_hooks or not calls_its_class(linear) for linear in linears):
            return "one has hooks or a `forward` of its own"
        parameters = [p for linear in linears for p in linear._parameters.values() if p is not None]
        if any(self.places[id(parameter)] > 1 for parameter in parameters):
            return "one is tied to another layer"
        if (reason := _unfit(linears)) is not None:
            return reason
        for name in ("weight", "bias"):
            group = [p for linear in linears if (p := linear._parameters[name]) is not None]
            if group and not _adjacent(group) and any(self.storages[_storage(p)] > 1 or not _fills(p) for p in group):
                return f"a {name} shares its storage with other tensors"
        return None


def _unfit(linears: Sequence[nn.Linear]) -> str | None:
    """Why the parameters of layers cannot be views of one tensor; None if they can."""
    biased = {linear._parameters.get("bias") is not None for linear in linears}
    if len(biased) > 1:
        return "one has a bias, another has none"
    for name in ("weight", "bias") if True in biased else ("weight",):
        found = [linear._parameters.get(name) for linear in linears]
        parameters = [parameter for parameter in found if parameter is not None]
        if len(parameters) < len(found) or not all(_plain(p) or by_rows(p) for p in parameters):
            return f"a {name} is no plain tensor"
        if any(division(p) != division(linears[0].weight) for p in parameters):
            return f"a {name} is divided among other processes than another parameter"
        parts = [own_part(p) for p in parameters]
        first = parts[0]
        if any((p.dtype, p.device, p.shape[1:]) != (first.dtype, first.device, first.shape[1:]) for p in parts):
            return f"their {name}s differ in dtype, device or width"
        if first.device.type == "meta":
            return "they are on the device meta"
        if first.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"a {name} is {str(first.dtype).removeprefix('torch.')}"
        if not all(p.is_contiguous() for p in parts):
            return f"a {name} is not contiguous"
    return None


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    """What identifies the storage of what this process holds of a tensor; None if there is none."""
    tensor = own_part(tensor)
    if type(tensor.data) is not torch.Tensor or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()


def _fills(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor is all of its storage. Around a part of a divided one may lie the other parts of a file."""
    return division(tensor) is not None or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors follow one another in one storage."""
    parts = [own_part(tensor) for tensor in tensors]
    after = [(_storage(t), t.storage_offset() + t.numel()) for t in parts[:-1]]
    return after == [(_storage(t), t.storage_offset()) for t in parts[1:]]


@torch.inference_mode(False)
@torch.no_grad()
def _side_by_side(parameters: Sequence[torch.Tensor]) -> nn.Parameter:
    """The rows of `parameters` as one tensor that they are views of from now on. A copy is made unless they lie so already."""
    parts = [own_part(parameter) for parameter in parameters]
    first, count = parts[0].data, sum(map(len, parts))
    if _adjacent(parts):
        return nn.Parameter(first.as_strided((count, *first.shape[1:]), first.stride()), requires_grad=False)
    whole = torch.empty((count, *first.shape[1:]), dtype=first.dtype, device=first.device)
    for part, rows in zip(parts, whole.split(list(map(len, parts))), strict=True):
        rows.copy_(part.data)
        part.data = rows
    return nn.Parameter(whole, requires_grad=False)


def _plain(parameter: torch.Tensor) -> bool:
    return type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor
