"""The ranks that share a model: collectives inside a round, and what the hosts exchange between rounds."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spec_ops._numbers import integer, number
from spec_ops.backends.push import PushWorkspace, connect, most_bytes, without_others
from spec_ops.parallel.fake import fake_group, is_fake

_T = TypeVar("_T")
_SECONDS = "a finite number above 0"
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How the backends say that a peer is gone, in messages of `RuntimeError`; NCCL's are of a type of their own.
_GONE = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Socket", "recvValue", "NCCL")
_made: dict[str, TensorParallel] = {}  # by the name of the group, the last one of each


class RankError(RuntimeError):
    """Ranks do not agree, or one of them is gone. It is raised on every rank that is left."""


class TensorParallel:
    """A group of ranks, one process each, that run the same rounds on their shares of a model.

    The collectives of a round are the functional ones of torch (`_c10d_functional`), which `torch.compile` keeps in the graph.
    On GPUs of one host that can write to one another's memory the pass `lower_all_reduce` puts kernels of ours in their place;
    the memory for these is allocated here. Every rank must make the same calls in the same order.

    Args:
        group: of torch.distributed; default: the whole world, which must be initialized (see `connect`). On GPUs the current
            device must be this rank's.
        timeout: seconds, at least, that a kernel of a round waits for the other ranks before it gives up.
        check_rounds: compare what every round emits on all ranks. It costs an exchange between the hosts per round, and finds
            the round at which ranks begin to differ.

    Attributes:
        rank: this process's place among them.
        size: how many there are.
        device: this rank's GPU, or the CPU.
        alone: this process is a rank without the others: see `fake`.

    Raises:
        ValueError: torch.distributed is not initialized; or naming the argument.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 600.0, check_rounds: bool = False) -> None:
        if not dist.is_available() or (group is None and not dist.is_initialized()):
            raise ValueError(
                "TensorParallel: torch.distributed must be initialized: start the processes with `torchrun --nproc-per-node N` "
                "and call `TensorParallel.connect(device)`"
            )
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, dist.ProcessGroup):
            raise ValueError(f"TensorParallel: `group` must be a process group that has this rank, got {chosen!r}")
        timeout = number("TensorParallel", "timeout", timeout, _SECONDS, _is_seconds)
        self.group, self.check_rounds = chosen, check_rounds
        self.rank, self.size = chosen.rank(), chosen.size()
        self.name: str = chosen.group_name
        self._pushes: PushWorkspace | None = None
        self.device = torch.device("cpu")
        self.alone = is_fake(chosen)
        if not self.alone:
            # What hosts exchange must not come between the collectives of a round.
            self._host = dist.new_group(dist.get_process_group_ranks(chosen), backend="gloo")
            if torch.cuda.is_available() and torch.device("cuda") in chosen._device_types:
                self.device = torch.device("cuda", torch.cuda.current_device())
                self._pushes = self._connect(self.device, timeout)
        _made[self.name] = self

    @classmethod
    def connect(cls, device: torch.device | str, *, timeout: float = 600.0, check_rounds: bool = False) -> TensorParallel:
        """Join the processes that torchrun started, with NCCL for a GPU and gloo for the CPU. A world that this process has
        joined already is taken as it is.

        Args:
            device: "cpu", or "cuda" for the GPU that torchrun's `LOCAL_RANK` says, or a GPU by its index. A GPU becomes the
                process's current one, and `device` of the result.
            timeout: seconds that a rank waits for the others before it raises, on the host and inside a round.
            check_rounds: see the class.

        Raises:
            RankError: the environment of torchrun is missing or says what cannot be, or the other processes do not come.
        """
        device, timeout = torch.device(device), number("TensorParallel", "timeout", timeout, _SECONDS, _is_seconds)
        joined = dist.is_initialized()
        if not joined:
            _check_environment(device)
        if device.type == "cuda" and torch.cuda.is_available():
            index = os.environ.get("LOCAL_RANK") if device.index is None else device.index
            if index is not None:
                torch.cuda.set_device(int(index))
        if joined:
            return cls(timeout=timeout, check_rounds=check_rounds)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # NCCL's watchdog ends a process four times this after a collective that timed out, for others to write down where they
        # were: a minute by default, in which nobody is told anything.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"TensorParallel: the processes did not find one another: {_first_line(error)}") from error
        return cls(timeout=timeout, check_rounds=check_rounds)

    @classmethod
    def fake(cls, size: int, rank: int = 0, *, device: torch.device | str = "cpu") -> TensorParallel:
        """One of `size` ranks without the others, in a process that has joined no world: to plan (`spec_ops.explain`), and to
        time one rank's work. What its rounds compute is wrong: a sum is this rank's part.

        Args:
            size: how many ranks there would be.
            rank: which of them this one is, in [0, size).
            device: a GPU to run rank 0's rounds on. Our kernels then add up its own part `size` times, and of large
                sums its shares: they do their work, but send nothing over links between GPUs, and never wait for anyone.

        Raises:
            ValueError: naming the argument.
        """
        size = integer("TensorParallel", "size", size, 1)
        rank = integer("TensorParallel", "rank", rank, 0, size - 1)
        ranks = cls(fake_group(size, rank))
        ranks.device = torch.device(device)
        if ranks.device == torch.device("cuda") and torch.cuda.is_available():
            ranks.device = torch.device("cuda", torch.cuda.current_device())
        if ranks.device.type == "cuda" and rank == 0 and most_bytes(size) is not None:
            ranks._pushes = without_others(ranks.name, size, ranks.device)
        return ranks

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TensorParallel:
        """The ranks of `group`: those that were made of it last, or new ones. All ranks must call it."""
        made = _made.get(group.group_name)
        return made if made is not None and made.group is group else cls(group)

    def _connect(self, device: torch.device, timeout: float) -> PushWorkspace | None:
        """Memory that all ranks write to; None if there is a rank that cannot, which rank 0 says."""
        found: list[Any] = [None] * self.size
        with self.guard("TensorParallel"):
            dist.all_gather_object(found, (socket.gethostname(), device.index), group=self._host)
            reason = _apart(found, device)
            dist.all_gather_object(found, reason, group=self._host)
        if reasons := [f"rank {rank}: {why}" for rank, why in enumerate(found) if why is not None]:
            if self.rank == 0:
                warnings.warn(
                    f"TensorParallel: sums of ranks are NCCL's, since kernels of ours need {reasons[0]}", stacklevel=3
                )
            return None
        return connect(self.group, device, timeout)

    # Inside a round: in the graph, without the host.

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, the same bits on every rank."""
        reduced = torch.ops._c10d_functional.all_reduce(partial.contiguous(), "sum", self.name)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    def largest(self, keys: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of all ranks' int64 tensors."""
        found = torch.ops._c10d_functional.all_reduce(keys.contiguous(), "max", self.name)
        return torch.ops._c10d_functional.wait_tensor(found)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors `[..., n]` side by side, in the order of the ranks: `[..., size * n]`."""
        rows = part.reshape(-1, part.shape[-1]).contiguous()
        parts = torch.ops._c10d_functional.all_gather_into_tensor(rows, self.size, self.name)
        parts = torch.ops._c10d_functional.wait_tensor(parts).view(self.size, *rows.shape)
        return parts.transpose(0, 1).reshape(*part.shape[:-1], self.size * part.shape[-1])

    def agree(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Rank 0's integers on every rank, in one exchange.

        Args:
            values: integer tensors, of the same shapes on all ranks.

        Returns:
            Tensors of their shapes and dtypes.
        """
        packed = torch.cat([value.reshape(-1).to(torch.int64) for value in values])
        packed = torch.ops._c10d_functional.broadcast(packed, 0, self.name)
        parts = torch.ops._c10d_functional.wait_tensor(packed).split([value.numel() for value in values])
        return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]

    # Between the hosts.

    def first(self, value: _T) -> _T:
        """Rank 0's `value`, which can be pickled, on every rank."""
        if self.alone:
            return value
        with self.guard("exchange"):
            box = [value]
            dist.broadcast_object_list(box, group_src=0, group=self._host)
        return box[0]

    def on_first(self, where: str, make: Callable[[], _T]) -> _T:
        """What `make()` returns on rank 0, on every rank.

        Args:
            where: begins the message of an error.
            make: is called on rank 0 alone; its result can be pickled.

        Raises:
            RankError: on the other ranks, if `make` raised on rank 0, which would leave them waiting. There its own error is
                raised.
        """
        made, error = None, None
        if self.rank == 0:
            try:
                made = make()
            except BaseException as raised:
                error = raised
        made, reason = self.first((made, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if reason is not None:
            raise RankError(f"{where} raised on rank 0: {reason}")
        return made  # type: ignore[return-value]  # what `make` returned there

    def every(self, value: bool) -> bool:
        """Whether `value` is true on every rank."""
        if self.alone:
            return value
        theirs: list[Any] = [None] * self.size
        with self.guard("exchange"):
            dist.all_gather_object(theirs, value, group=self._host)
        return all(theirs)

    def check_same(self, where: str, values: dict[str, Any]) -> None:
        """Compare values on all ranks by their hashes.

        Args:
            where: begins the message.
            values: by name; compared by their `repr`, tensors by their bytes.

        Raises:
            RankError: on every rank, with the first name whose values differ, and the ranks that differ from rank 0.
        """
        if self.alone:
            return
        mine = {name: _digest(value) for name, value in values.items()}
        theirs: list[Any] = [None] * self.size
        with self.guard(where):
            # One exchange of a known size if nothing differs; pickled objects take two, their sizes first.
            together = torch.frombuffer(bytearray(hashlib.sha256(repr(mine).encode()).digest()), dtype=torch.int64)
            found = [torch.empty_like(together) for _ in theirs]
            dist.all_gather(found, together, group=self._host)
            if all(torch.equal(one, together) for one in found):
                return
            dist.all_gather_object(theirs, mine, group=self._host)
        for name in mine | theirs[0]:
            if others := [rank for rank, given in enumerate(theirs) if given.get(name) != theirs[0].get(name)]:
                listed = ", ".join(map(str, others))
                raise RankError(f"{where}: `{name}` must be the same on every rank, but differs on rank {listed} from rank 0's")

    def check_round(self, output: torch.Tensor) -> None:
        """Raise if a round has gone wrong.

        Args:
            output: what it emitted, on the host.

        Raises:
            RankError: a kernel gave up waiting for the other ranks; or `check_rounds`, and another rank emitted something else.
        """
        if self._pushes is not None and self._pushes.failed.item():
            raise RankError(f"generate: another rank of the {self.size} is gone, or waits for something else: a sum timed out")
        if self.check_rounds:
            self.check_same("generate", {"output of a round": output})

    @contextlib.contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """Inside, a collective that fails because a rank is gone raises a RankError that says so in one line."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(word in str(error) for word in _GONE):
                raise RankError(
                    f"{where}: another rank of the {self.size} is gone, or waits for something else: {_first_line(error)}"
                ) from error
            raise


def _check_environment(device: torch.device) -> None:
    """Refuse what would make torch wait for processes that never come, or fail in words that name no variable."""
    needed = [*_ENVIRONMENT, "LOCAL_RANK"] if device.type == "cuda" and device.index is None else _ENVIRONMENT
    started = "start the processes with `torchrun --nproc-per-node N`"
    if missing := [name for name in needed if name not in os.environ]:
        raise RankError(f"TensorParallel: the environment must have {', '.join(missing)}: {started}")
    numbers = {}
    for name in needed:
        if name != "MASTER_ADDR":
            if not (text := os.environ[name]).isdecimal():
                raise RankError(f"TensorParallel: {name} in the environment must be a number, got {text!r}: {started}")
            numbers[name] = int(text)
    if (rank := numbers["RANK"]) >= (size := numbers["WORLD_SIZE"]):
        raise RankError(f"TensorParallel: RANK in the environment must be below WORLD_SIZE, {size}, got {rank}: {started}")
    if device.type == "cuda":
        index, count = numbers.get("LOCAL_RANK", device.index), torch.cuda.device_count()
        if index >= count:
            raise RankError(f"TensorParallel: rank {rank} must have a GPU: cuda:{index} is not among the {count} here")


def _apart(places: list[tuple[str, int]], device: torch.device) -> str | None:
    """Why this rank cannot write to the memory of all others.

    Args:
        places: the host and the device of each rank.
    """
    if most_bytes(len(places)) is None:
        return f"2, 4 or 8 ranks, not {len(places)}"
    hosts, indices = zip(*places, strict=True)
    if len(set(hosts)) > 1:
        return "GPUs of one host"
    if len(set(indices)) == 1:  # each process sees its own GPU only, and cannot ask about the others
        return None
    others = [index for index in indices if index != device.index]
    if len(others) != len(places) - 1:
        return "a GPU for each rank"
    count = torch.cuda.device_count()
    if missing := [index for index in others if index >= count or not torch.cuda.can_device_access_peer(device.index, index)]:
        return f"peer access to cuda:{missing[0]}"
    return None


def _is_seconds(timeout: float) -> bool:
    return 0 < timeout < math.inf


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + data).hexdigest()
    return hashlib.sha256(repr(value).encode()).hexdigest()
