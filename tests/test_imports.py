"""How little `import spec_ops` and its first uses import: start-up time, and installs where something is missing or broken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# What each step imports. All in one process, since most of the time is the import of torch.
SCRIPT = """
import json, sys, torch

def imported():
    new = set(sys.modules) - known_before
    known_before.update(new)
    return sorted(new)

known_before, found = set(sys.modules), {}
import spec_ops
found["the package"] = imported()
cache = torch.zeros(2, 4, 1, 8)
spec_ops.append_kv(cache, cache.clone(), torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.tensor([3]))
assert cache[0, 3].eq(1).all()
found["an op on a CPU"] = imported()
import spec_ops.cli, spec_ops.integrations
found["the command line and the integrations"] = imported()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_package_leaves_optional_packages_alone(imported):
    """What only some kernel, model or plot needs."""
    packages = {name.split(".")[0] for name in imported["the package"]}
    assert "spec_ops" in packages
    optional = {"triton", "flashinfer", "tokenspeed_mla", "transformers", "matplotlib", "safetensors", "typer", "rich"}
    assert not packages & optional


def test_the_package_is_cheap(imported):
    """Inductor, Dynamo and Triton cost seconds: they are imported when something needs them."""
    assert not {"torch._inductor", "torch._dynamo", "triton"}.intersection(imported["the package"])


def test_ops_on_a_cpu_import_no_kernels(imported):
    names = {*imported["the package"], *imported["an op on a CPU"]}
    assert not [name for name in names if name.startswith("spec_ops.backends.triton.cache")]


def test_transformers_is_imported_when_its_integration_is_used(imported):
    later = imported["the command line and the integrations"]
    assert "spec_ops.integrations" in later
    assert "transformers" not in later
