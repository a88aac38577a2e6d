"""What packages, citations and continuous integration say of versions and files agrees with the package and its constraints."""

from __future__ import annotations

import argparse
import re
import runpy
import sys

import pytest
import yaml

import spec_ops
from tests.conftest import read_seeds
from tests.helpers.paths import ROOT

tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
PINS = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
SETUP = runpy.run_path(str(ROOT / "setup.py"))
long_description = SETUP["long_description"]


def pythons() -> list[str]:
    prefix = "Programming Language :: Python :: 3."
    return ["3." + each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix)]


def test_one_range_of_python_versions():
    """Metadata, classifiers, the Makefile's comment and the workflow."""
    least, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    assert pythons() == [f"3.{minor}" for minor in range(int(least), int(end))]
    assert WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python"] == pythons()
    assert f"({pythons()[0]} to {pythons()[-1]})" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in pythons()


def test_the_oldest_pinned_and_newest_torch_are_tested():
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    (oldest,) = (each.split(">=")[1] for each in PROJECT["dependencies"] if each.startswith("torch>="))
    assert matrix["torch"] == [PINS["torch"]]
    assert [entry["torch"] for entry in matrix["include"]] == [f"{oldest}.0", "newest"]
    conditions = [step["if"] for step in WORKFLOW["jobs"]["test"]["steps"] if "if" in step]
    assert conditions == [f"matrix.torch != '{PINS['torch']}'", "matrix.torch == 'newest'"]
    unpinned = WORKFLOW["jobs"]["test"]["steps"][-2]["run"]
    assert set(re.findall(r"/\^([\w-]+)==/d", unpinned)) == {"transformers", "tokenizers", "huggingface-hub"} <= PINS.keys()


def test_the_workflow_runs_targets_that_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    run = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if step.get("run", "").startswith("make")]
    assert sorted(run) == ["make lint", "make test-all", "make wheel"]
    assert {command.split()[1] for command in run} <= set(targets)


def test_hooks_are_of_the_pinned_versions():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["rev"] for repo in repos if "rev" in repo] == [f"v{PINS['ruff']}"]


def test_issue_forms_are_complete():
    """A form without these keys is ignored by GitHub without a word."""
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(set(ids)) == len(ids)
        assert all(field["attributes"]["label"] for field in form["body"])


def test_the_citation_names_version_and_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == spec_ops.__version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


RELATIVE = re.compile(r"\]\((?!https?://|#|mailto:)[^)]*\)|src=\"(?!https?://)")


def test_the_long_description_needs_no_checkout():
    """No relative image or link, which a package index could not resolve; and all else of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = long_description(readme)
    assert not RELATIVE.findall(text)
    assert [line for line in readme.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("#")
    ]
    assert readme.count("```") == text.count("```")


def test_what_the_long_description_leaves_out():
    given = """# Name

![A chart](docs/chart.png)

See [limits](docs/limits.md), [below](#below) and [torch](https://pytorch.org).

[![Again](docs/chart.png)](docs/page.md)
<img src="docs/chart.png" alt="A chart">
![Badge](https://example.org/badge.svg)
"""
    want = """# Name

See limits, [below](#below) and [torch](https://pytorch.org).

![Badge](https://example.org/badge.svg)
"""
    assert long_description(given) == want


ADDRESS = "https://example.org/us/spec_ops"


def test_the_long_description_with_an_address():
    """Links and images of the README, all of them, absolute: each names a file of the repository."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = long_description(readme, ADDRESS)
    assert not RELATIVE.findall(text)
    found = re.findall(rf"{ADDRESS}/(blob|raw)/HEAD/([^)#\"]*)", text)
    assert found
    assert len(found) == len(RELATIVE.findall(readme))
    assert all((ROOT / path).exists() for _, path in found)
    assert all((kind == "raw") == path.endswith((".svg", ".png")) for kind, path in found)
    given = (
        '[![Again](docs/chart.png)](docs/page.md#part)\n<img src="docs/chart.png" alt="A">\n[below](#below) [t](https://a.b)'
    )
    want = f"[![Again]({ADDRESS}/raw/HEAD/docs/chart.png)]({ADDRESS}/blob/HEAD/docs/page.md#part)\n"
    want += f'<img src="{ADDRESS}/raw/HEAD/docs/chart.png" alt="A">\n[below](#below) [t](https://a.b)'
    assert long_description(given, ADDRESS) == want


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, None),
        ({"SPEC_OPS_REPOSITORY": ""}, None),
        ({"SPEC_OPS_REPOSITORY": ADDRESS}, ADDRESS),
        ({"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "us/spec_ops"}, ADDRESS),
        ({"GITHUB_SERVER_URL": "https://example.org"}, None),
    ],
)
def test_urls_of_the_wheel(environment, address):
    assert SETUP["repository"](environment) == address
    urls = SETUP["project_urls"](address)
    assert list(urls) == (["Source", "Documentation", "Changelog", "Issues"] if address else [])
    paths = [url.removeprefix(f"{ADDRESS}/blob/HEAD/") for url in urls.values() if "/blob/" in url]
    assert all((ROOT / path).is_file() for path in paths)


def test_tests_mirror_what_they_test():
    """A folder of tests has the name of a folder of the package, or of what is no package; every layer has such a folder."""
    others = {"benchmarks", "docs", "examples", "gpu", "helpers", "interpreter", "sglang", "vllm"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and list(path.rglob("*.py"))}
    layers = {path.name for path in (ROOT / "spec_ops").iterdir() if (path / "__init__.py").is_file()}
    assert folders - others == layers
    for folder in ("backends", "integrations", "passes"):
        inner = {path.name for path in (ROOT / "tests" / folder).iterdir() if (path / "__init__.py").is_file()}
        assert all((ROOT / "spec_ops" / folder / name).is_dir() for name in inner), folder


TESTS = ROOT / "tests"
IMPORTS = re.compile(r"^(?:from (tests[\w.]*) import ([\w, ]+)|import (tests[\w.]+))", re.M)


def test_helpers_have_a_folder_of_their_own():
    """A module without tests that several folders use is in `tests/helpers`, which has no tests. A folder may have modules for
    itself."""
    for path in (TESTS / "helpers").rglob("*.py"):
        assert not re.search(r"^def test_", path.read_text(encoding="utf-8"), re.M), path.name
    shared = []
    for path in [*TESTS.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for module, names, alone in IMPORTS.findall(path.read_text(encoding="utf-8")):
            found = [alone] if alone else [module, *(f"{module}.{name.strip()}" for name in names.split(","))]
            files = [ROOT / (each.replace(".", "/") + ".py") for each in found]
            inner = [file for file in files if file.is_file() and not file.stem.startswith("test_")]
            outside = [file for file in inner if file.parent not in (TESTS / "helpers", path.parent)]
            shared += [f"{path.relative_to(ROOT)}: {file.relative_to(ROOT)}" for file in outside]
    assert shared == []


def test_files_of_gpu_tests_alone_are_in_their_folder():
    marks = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    whole = [path for path, text in marks.items() if re.search(r"^pytestmark = \[?\s*pytest\.mark\.gpu", text, re.M)]
    assert len(whole) > 10
    assert [path.name for path in whole if path.parent != TESTS / "gpu"] == []
    assert [path.name for path in (TESTS / "gpu").glob("test_*.py") if "mark.gpu" not in marks[path]] == []


def test_seeds_of_fuzzing_tests():
    assert read_seeds("3") == range(3)
    assert read_seeds("1000-1002") == range(1000, 1003)
    for wrong in ("0", "-1", "3-2", "a", "1-", "1-2-3", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be N, at least 1, or FIRST-LAST, got '{wrong}'"):
            read_seeds(wrong)
