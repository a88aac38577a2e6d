"""Files of checkpoints: read, or refused by an error that names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from spec_ops.models.fields import Fields

# The machine's failures, not the file's.
MACHINE_ERRORS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class CheckpointError(ValueError):
    """A file of a checkpoint is missing or damaged, or does not fit.

    Attributes:
        file: its path, or the folder's.
        field: name of the value or tensor at fault; None for the whole file.
    """

    def __init__(self, file: str | Path, problem: str, field: str | None = None) -> None:
        super().__init__(f"checkpoint {file}: {problem if field is None else f'`{field}` {problem}'}")
        self.file, self.field = Path(file), field


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A file of a checkpoint is missing."""


def read_fields(path: Path) -> Fields:
    """The JSON object in a file. Raises CheckpointError for anything else."""
    try:
        values = json.loads(_existing(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(path, f"must hold JSON, got {first_line(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(path, f"must hold a JSON object, got {values!r:.80}")
    return Fields(values, lambda field, problem: CheckpointError(path, problem, field))


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors by name in a safetensors file, or in a pickle that holds nothing else.

    Raises:
        CheckpointError: the file is damaged or holds something else; a missing one is a FileNotFoundError as well.
    """
    _existing(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path, device=str(device))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(path, f"must be a safetensors file, got {first_line(error)}") from error
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except MACHINE_ERRORS:
        raise
    except Exception as error:  # damaged bytes lead the unpickler to an error of almost any type
        raise CheckpointError(path, f"must be a pickle of tensors and nothing else, got {first_line(error)}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(path, f"must map names to tensors, got a {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(path, f"must be a tensor, got a {type(value).__name__}", str(name))
    return dict(state)


class _Slices(Mapping[str, Any]):
    def __init__(self, file: Any) -> None:
        self.file, self.names = file, frozenset(file.keys())

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        return self.file.get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def open_tensors(path: str | Path) -> Mapping[str, Any]:
    """The tensors by name in the safetensors file at `path`, as its slices: what is indexed is read, and nothing else.

    Raises:
        CheckpointError: the file is damaged; a missing one is a FileNotFoundError as well.
    """
    path = _existing(Path(path))
    try:
        return _Slices(safe_open(path, "pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path, f"must be a safetensors file, got {first_line(error)}") from error


def check_tensors(
    path: Path, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], names: Mapping[str, str] | None = None
) -> None:
    """Refuse tensors that are missing, unknown, or of another shape or dtype.

    Args:
        path: the file they come from.
        expected: may be on the meta device. Any floating-point dtype stands for all of them.
        found: what the file holds.
        names: what the file calls them, where that differs.

    Raises:
        CheckpointError: naming the file and the tensor.
    """
    names = names or {}
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(path, f"missing tensors {missing}")
    if unknown := sorted(names.get(name, name) for name in found.keys() - expected.keys()):
        raise CheckpointError(path, f"unknown tensors {unknown}")
    for name, value in expected.items():
        field, got = names.get(name, name), found[name]
        if got.shape != value.shape:
            raise CheckpointError(path, f"must be of shape {list(value.shape)}, got {list(got.shape)}", field)
        check_dtype(path, field, got, _FLOATS if value.is_floating_point() else (value.dtype,))


def check_dtype(path: Path, field: str, tensor: torch.Tensor, known: tuple[torch.dtype, ...] = _FLOATS) -> None:
    if tensor.dtype not in known:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise CheckpointError(path, f"must be {listed}, got {str(tensor.dtype).removeprefix('torch.')}", field)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointNotFoundError(path, "no such file" if not path.exists() else "is not a file")
    return path


def first_line(error: BaseException) -> str:
    """An error of another package in one line: its type, and its first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] += f" {lines[1]}"
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__
