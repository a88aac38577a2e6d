"""What the packages export: every name is there, documented and typed; what is not exported has no place beside it."""

from __future__ import annotations

import importlib
import inspect
import types
from collections import Counter

import pytest

PACKAGES = (
    "spec_ops",
    "spec_ops.ops",
    "spec_ops.backends",
    "spec_ops.backends.flashinfer",
    "spec_ops.passes",
    "spec_ops.models",
    "spec_ops.decoding",
    "spec_ops.integrations.transformers",
)


def public(package: str) -> dict[str, object]:
    if package == "spec_ops.integrations.transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(set(module.__all__))
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_documented_and_typed(package):
    for name, thing in public(package).items():
        if not callable(thing):
            continue
        where = f"{package}.{name}"
        doc = thing.__dict__.get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
        assert doc, f"{where} has no docstring"
        assert not doc.startswith(f"{name}("), f"{where} has the docstring that `dataclass` writes"
        function = vars(thing).get("__init__") if inspect.isclass(thing) else thing
        if function is None:
            continue  # made by its base class
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.name == "self" or parameter.annotation is not inspect.Parameter.empty, f"{where}: {parameter}"
        assert inspect.isclass(thing) or "return" in function.__annotations__, f"{where} does not say what it returns"


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_shows_is_exported(package):
    exported = public(package)
    seen = vars(importlib.import_module(package))
    ours = {
        name
        for name, thing in seen.items()
        if not name.startswith("_") and not isinstance(thing, types.ModuleType)
        if str(getattr(thing, "__module__", "")).startswith("spec_ops")
    }
    assert ours <= set(exported) | IMPORTED.get(package, set())


def test_what_several_backends_compute_takes_a_backend():
    import spec_ops
    from spec_ops.backends import available_backends, get_backend

    computed = Counter(op for name in available_backends() for op in get_backend(name).kernels)
    several = {op for op, count in computed.items() if count > 1}
    ops = {name: getattr(spec_ops.ops, name) for name in spec_ops.ops.__all__}
    taking = {name for name, op in ops.items() if inspect.isfunction(op) and "backend" in inspect.signature(op).parameters}
    assert len(several) == 10
    assert taking == several


# Of other packages of ours, for the package's own use.
IMPORTED = {
    "spec_ops.backends.flashinfer": {"AttentionMeta", "Backend", "register_backend"},
    "spec_ops.integrations.transformers": {"install_hint"},
}
