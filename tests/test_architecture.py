"""The package's imports point one way: which module may see which.

The graph is read from the source of every file, not from what happens to be imported: imports at the top of a module, inside
functions and under `TYPE_CHECKING` are arrows alike, and so are kernels named as `"module:function"`, which are imported at
their first call. A lazy or a typing import hides a cycle from the interpreter, not from a reader. Modules that are found by
walking a package's folder (`ahead.variants`) are no arrows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PACKAGE = "spec_ops"
# The layers, lowest first. A module sees its own layer and those below, of several layers in a row only its own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("backends",), ("ops",), ("models", "passes"), ("parallel",), ("decoding",), ("integrations",), ("cli",),
)  # fmt: skip
# Who computes: none knows another. What they share lies in the modules beside them.
PROVIDERS = ("flashinfer", "reference", "tokenspeed", "triton")
REFERENCE = f"{PACKAGE}.ops.reference"
_KERNEL = re.compile(rf"({PACKAGE}(?:\.\w+)+)(?::|\.$)")  # `"module:function"`, or the start of one that is put together

Modules = Mapping[str, tuple[ast.Module, bool]]  # by name: the source, and whether it is a package's `__init__`
Graph = dict[str, set[str]]


def parsed(sources: Mapping[str, str]) -> Modules:
    """Modules by their dotted names, of sources by their paths."""
    found = {}
    for path, text in sources.items():
        parts = Path(path).with_suffix("").parts
        package = parts[-1] == "__init__"
        found[".".join(parts[:-1] if package else parts)] = ast.parse(text), package
    return found


def arrows(modules: Modules, module: str) -> Iterator[tuple[str, str]]:
    """What `module` imports of ours: `(module, name)`, name "" if it is the module itself."""
    for node in ast.walk(modules[module][0]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: line {node.lineno}: imports are absolute"
            if node.module is None or node.module.split(".")[0] != PACKAGE:
                continue
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in modules else (node.module, alias.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (named := _KERNEL.match(node.value)):
            known = named[1]
            while known not in modules:  # "spec_ops.backends.flashinfer." + "gqa:xqa": what is known of it
                known = known.rpartition(".")[0]
            if known.count("."):
                yield known, ""


def graph_of(modules: Modules) -> Graph:
    return {module: {target for target, _ in arrows(modules, module)} - {module} for module in modules}


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that reach one another."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            new = graph.get(pending.pop(), set()) - seen
            seen |= new
            pending.extend(new)
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {frozenset(other for other in reach[m] if m in reach.get(other, ())) for m in graph if m in reach[m]}
    return sorted(sorted(group) for group in groups)


def _layer(module: str) -> int | None:
    """None: the package itself and the small modules beside the layers (version, hints), which have no place in the order."""
    folder = module.split(".")[1] if "." in module else ""
    return next((height for height, names in enumerate(LAYERS) if folder in names), None)


def _provider(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["backends"] and len(parts) > 2 and parts[2] in PROVIDERS else None


def _is_reference(module: str) -> bool:
    return module == REFERENCE or module.startswith(REFERENCE + ".")


def wrong(module: str, target: str) -> str | None:
    """Why `module` must not import `target`; None if it may."""
    if _is_reference(target) and not _is_reference(module):
        # Its backend, and the op that a reference implements on the CPU, in files of one name.
        own = module.rpartition(".")[2] == target.rpartition(".")[2] and module.startswith(f"{PACKAGE}.ops.")
        if not own and module != f"{PACKAGE}.backends.reference":
            return "only the reference backend and the op of the same name see a reference implementation"
        return None
    mine, theirs = _layer(module), _layer(target)
    if theirs is None:
        return "a part sees no whole" if target == PACKAGE and mine is not None else None
    if mine is None:
        return None if module in (PACKAGE, f"{PACKAGE}.__main__") else "it is below all layers"
    if theirs > mine or (theirs == mine and module.split(".")[1] != target.split(".")[1]):
        return f"{'.'.join(target.split('.')[:2])} is not below {'.'.join(module.split('.')[:2])}"
    mine_by, theirs_by = _provider(module), _provider(target)
    if theirs_by is not None and theirs_by != mine_by and module.startswith(f"{PACKAGE}."):
        if mine_by is not None:
            return "no backend sees another"
        if mine == 0:
            return "what backends share sees none of them"
    return None


def private_uses(modules: Modules, module: str) -> Iterator[str]:
    """Uses of names with an underscore outside of the folder (a module's name) or the module (any other) that has them."""
    bound: dict[str, str] = {}
    for target, name in arrows(modules, module):
        folder, _, last = target.rpartition(".")
        if last.startswith("_") and not last.startswith("__") and not f"{module}.".startswith(folder + "."):
            yield target
        if name.startswith("_") and not name.startswith("__"):
            yield f"{target}.{name}"
    for node in ast.walk(modules[module][0]):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(modules[module][0]):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        if (target := bound.get(ast.unparse(node.value), "")) in modules:
            yield f"{target}.{node.attr}"


@pytest.fixture(scope="module")
def modules() -> Modules:
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert len(files) > 100
    return parsed({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files})


def test_no_cycles(modules):
    assert not cycles(graph_of(modules))


def test_no_arrow_against_the_order(modules):
    graph = graph_of(modules)
    assert sum(map(len, graph.values())) > 300
    found = [f"{m} -> {t}: {why}" for m, targets in graph.items() for t in sorted(targets) if (why := wrong(m, t))]
    assert not found, "\n".join(found)


def test_no_private_name_of_another_module(modules):
    found = [f"{module} uses {name}" for module in modules for name in private_uses(modules, module)]
    assert not found, "\n".join(found)


def test_nothing_sees_tests_or_benchmarks(modules):
    for module, (tree, _) in modules.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"tests", "benchmarks", "examples"}, module


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        ("ops.attention", "backends.registry", True),
        ("backends.registry", "ops.attention", False),
        ("passes.select_backends", "ops.attention", True),
        ("passes.plan", "models.target", False),
        ("models.paged", "passes", False),
        ("decoding.buckets", "passes.compile", True),
        ("models.paged", "decoding.state", False),
        ("cli.text", "integrations.transformers.loading", True),
        ("backends.tokenspeed", "backends.flashinfer.provider", False),
        ("backends.flashinfer.gqa", "backends.flashinfer.provider", True),
        ("backends.padding", "backends.triton.runtime.launch", False),
        ("ops.linear", "backends.triton.linear.norm", True),
        ("ops.linear", "ops.reference.linear", True),
        ("ops.linear", "ops.reference.attention", False),
        ("passes.plan", "ops.reference.attention", False),
        ("backends.reference", "ops.reference.attention", True),
        ("backends.triton", "ops.reference.attention", False),
    ],
)
def test_the_order(source, target, allowed):
    assert (wrong(f"{PACKAGE}.{source}", f"{PACKAGE}.{target}") is None) == allowed


def test_every_kind_of_import_is_an_arrow():
    modules = parsed(
        {
            "spec_ops/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from spec_ops.b import B\n",
            "spec_ops/b.py": "def f():\n    import spec_ops.c\n",
            "spec_ops/c.py": "from spec_ops import d\n",
            "spec_ops/d.py": "KERNEL = 'spec_ops.a:f'\nPARTS = f'spec_ops.b.{KERNEL}'\n",
            "spec_ops/e.py": "from spec_ops import a as other\nother._hidden\nfrom spec_ops.sub._inside import name\n",
            "spec_ops/sub/_inside.py": "",
            "spec_ops/sub/f.py": "from spec_ops.sub._inside import name\n",
            "spec_ops/__init__.py": "",
        }
    )
    graph = graph_of(modules)
    assert {m: sorted(graph[f"spec_ops.{m}"]) for m in "abcd"} == {
        "a": ["spec_ops.b"], "b": ["spec_ops.c"], "c": ["spec_ops.d"], "d": ["spec_ops.a", "spec_ops.b"],
    }  # fmt: skip
    assert cycles(graph) == [["spec_ops.a", "spec_ops.b", "spec_ops.c", "spec_ops.d"]]
    assert sorted(private_uses(modules, "spec_ops.e")) == ["spec_ops.a._hidden", "spec_ops.sub._inside"]
    assert not list(private_uses(modules, "spec_ops.sub.f"))
