"""The symbols of a serving engine that a plug-in uses, and whether an installed engine has them.

They are looked up in the engine's source: importing its modules takes seconds, and a GPU on some machines, and every engine of
whoever installed spec_ops pays for the check, whether it uses the backend or not.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Symbol(NamedTuple):
    """A function, class or method in a file of the engine, and names that its parameters (a class: its members) hold."""

    file: str
    path: str
    names: tuple[str, ...] = ()


class Engine(NamedTuple):
    """An engine, and which of its releases were tested.

    Attributes:
        name: as its users write it.
        folder: of its files, below `site-packages`; symbols' files are relative to it.
        distributions: names under which it is installed.
        oldest, newest: tested releases. A release is compared by as many numbers as these have.
        offer: what a user asks the backend for with, the name aside.
    """

    name: str
    folder: str
    distributions: tuple[str, ...]
    oldest: str
    newest: str
    offer: str

    def root(self) -> Path | None:
        """The folder of the engine that would be imported; None if there is none."""
        package, *below = self.folder.split("/")
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            return None
        return Path(next(iter(found.submodule_search_locations))).joinpath(*below)

    def version(self) -> str | None:
        """Of the installed engine; None if there is none."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def in_range(self, release: str) -> bool:
        oldest, newest = _numbers(self.oldest), _numbers(self.newest)
        return oldest <= _numbers(release)[: len(oldest)] <= newest

    def problems(self, folder: Path | None, release: str | None, table: Iterable[Symbol]) -> list[str]:
        """Why the plug-in does not fit: the release, or symbols that are missing or changed; empty if it fits.

        Args:
            folder: the engine's files. release: its version. Either is None if it is not installed.
            table: what the plug-in uses; read only where the release was tested.
        """
        if folder is None or release is None:
            return [f"{self.name} is not installed"]
        if not self.in_range(release):
            return [f"{self.name} {release} was not tested: {self.oldest} to {self.newest} were"]
        found = (_problem(folder, self.folder, symbol) for symbol in table)
        return list(dict.fromkeys(problem for problem in found if problem is not None))  # a file that is missing: once

    def report(self, found: list[str], release: str | None, table: Iterable[Symbol], usage: str) -> tuple[str, bool]:
        """What `python -m spec_ops check` prints of `problems`, and whether the plug-in fits."""
        if found:
            told = f" {found[0]}" if len(found) == 1 else "".join(f"\n  {line}" for line in found)
            return f"{self.offer} is not offered:{told}", False
        symbols = tuple(table)
        tested = f"in the tested range ({self.oldest} to {self.newest})"
        lines = [f"{self.name} {release}: {tested}; {len(symbols)} symbols are as expected:"]
        lines += [f"  {symbol.path} ({symbol.file})" for symbol in symbols]
        return "\n".join([*lines, f"Use it: {usage}"]), True


def _numbers(text: str) -> tuple[int, ...]:
    """`0.5.14` as numbers; suffixes of builds (`.post1`, `rc0`, `+cu130`) do not count."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _members(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module or a class defines, also under an `if` or a `try`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _members(node.body + node.orelse)


@functools.cache
def read_module(path: Path) -> dict[str, ast.stmt]:
    """What a file defines, by name; read once."""
    return dict(_members(ast.parse(path.read_text(encoding="utf-8")).body))


def find(folder: Path, symbol: Symbol) -> ast.stmt | None:
    """Where a symbol is defined; None if its file has none.

    Raises:
        OSError, SyntaxError, ValueError: the file cannot be read.
    """
    members, found = read_module(folder / symbol.file), None
    for part in symbol.path.split("."):
        found = members.get(part)
        if found is None:
            return None
        members = dict(_members(found.body)) if isinstance(found, ast.ClassDef) else {}
    return found


def _problem(folder: Path, shown: str, symbol: Symbol) -> str | None:
    """What is wrong with one symbol; None if nothing is."""
    where = f"{shown}/{symbol.file}"
    if not (folder / symbol.file).is_file():
        return f"{where} is not there"
    try:
        found = find(folder, symbol)
    except (SyntaxError, ValueError, OSError) as error:  # of a newer Python, or damaged
        return f"{where} cannot be read: {type(error).__name__}: {error}"
    if found is None:
        return f"{where} has no {symbol.path}"
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = found.args
        known = {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg is not None}
    else:
        known = {name for name, _ in _members(found.body)} if isinstance(found, ast.ClassDef) else set()
    missing = [name for name in symbol.names if name not in known]
    return f"{symbol.path} in {where} has no {', '.join(missing)}" if missing else None
