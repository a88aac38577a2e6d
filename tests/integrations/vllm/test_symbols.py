"""The table of symbols against trees of source that have them, and lack one; what registration says and does then."""

from __future__ import annotations

import logging
import sys

import pytest
from typer.testing import CliRunner

from spec_ops.cli import app
from spec_ops.integrations.engine_symbols import read_module
from spec_ops.integrations.vllm import plugin, symbols
from spec_ops.integrations.vllm.symbols import COMMON, WITH_LAYOUTS, WITH_NAMES, WITH_SHAPES
from tests.helpers import vllm_stand_ins as stand_ins
from tests.helpers.engine_source import write_source

TABLES = {"0.26.0": COMMON + WITH_SHAPES, "0.29.0": COMMON + WITH_LAYOUTS, "0.33.0": COMMON + WITH_NAMES + WITH_LAYOUTS}
BY_RELEASE = pytest.mark.parametrize("release", TABLES)


@BY_RELEASE
def test_every_symbol_is_there(release, tmp_path):
    folder = write_source(tmp_path, TABLES[release])
    assert symbols.problems(folder, release) == []
    assert symbols.table(folder) == TABLES[release]


@BY_RELEASE
def test_each_missing_symbol_is_named(release, tmp_path):
    told_apart = {*WITH_NAMES, WITH_LAYOUTS[0]}
    for i, symbol in enumerate(TABLES[release]):
        if symbol in told_apart:
            continue
        found = symbols.problems(write_source(tmp_path / str(i), TABLES[release], without=symbol), release)
        assert found, symbol
        assert symbol.file in found[0]
        assert symbol.path in found[0]


def test_a_field_of_another_name_is_named(tmp_path):
    symbol = next(s for s in COMMON if s.path == "CommonAttentionMetadata")
    folder = write_source(tmp_path, TABLES["0.33.0"], without=symbol)
    assert symbols.problems(folder, "0.33.0") == ["vllm/v1/attention/backend.py has no CommonAttentionMetadata"]
    (folder / symbol.file).write_text(
        (folder / symbol.file).read_text() + "\nclass CommonAttentionMetadata:\n" + "".join(
            f"    {name} = 0\n" for name in symbol.names if name != "causal"
        )
    )  # fmt: skip
    read_module.cache_clear()
    assert symbols.problems(folder, "0.33.0") == [
        "CommonAttentionMetadata in vllm/v1/attention/backend.py has no causal"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("release", "inside"),
    [("0.25.9", False), ("0.26.0", True), ("0.26.1rc0", True), ("0.33.0+cu130", True), ("0.33.4", True), ("0.34.0", False),
     ("1.26.0", False)],
)  # fmt: skip
def test_range_of_releases(release, inside):
    assert symbols.in_range(release) is inside


def test_without_vllm(monkeypatch):
    monkeypatch.setattr(symbols, "root", lambda: None)
    assert symbols.problems() == ["vLLM is not installed"]
    result = CliRunner().invoke(app, ["check", "vllm"])
    assert result.exit_code == 1
    assert result.output == "--attention-backend SPEC_OPS is not offered: vLLM is not installed\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretends that a release is installed, with stand-ins for its modules."""

    def pretend(release: str, named: bool = True) -> type:
        folder = write_source(tmp_path, TABLES["0.33.0" if named else "0.26.0"])
        monkeypatch.setattr(symbols, "root", lambda: folder)
        monkeypatch.setattr(symbols, "version", lambda: release)
        return stand_ins.install(monkeypatch, named)

    return pretend


@pytest.mark.parametrize(("release", "named"), [("0.26.0", False), ("0.33.0", True)])
def test_the_check_command_lists_the_symbols_and_the_name(release, named, installed):
    installed(release, named)
    result = CliRunner().invoke(app, ["check", "vllm"])
    assert result.exit_code == 0, result.output
    assert f"vLLM {release}: in the tested range (0.26 to 0.33)" in result.output
    assert all(f"{symbol.path} ({symbol.file})" in result.output for symbol in COMMON)
    assert result.output.endswith(f"--attention-backend {'SPEC_OPS' if named else 'CUSTOM'}\n")


def test_registration_adds_a_name(installed):
    registry = installed("0.33.0")
    assert plugin.register()
    assert plugin.register()  # every process may, again
    assert {registry["SPEC_OPS"]: plugin.CHOICE} == stand_ins.OVERRIDES


def test_registration_takes_the_custom_place_where_there_are_no_names(installed):
    registry = installed("0.26.0", named=False)
    assert plugin.register()
    assert plugin.register()
    assert stand_ins.OVERRIDES == {registry.CUSTOM: plugin.CHOICE}


def logged(caplog) -> str:
    (record,) = caplog.records
    return record.getMessage()


def test_registration_leaves_the_custom_place_to_another_package(installed, caplog):
    registry = installed("0.26.0", named=False)
    stand_ins.OVERRIDES[registry.CUSTOM] = "another.package.Backend"
    with caplog.at_level(logging.WARNING):
        assert plugin.register() is False
    assert stand_ins.OVERRIDES == {registry.CUSTOM: "another.package.Backend"}
    assert "another.package.Backend is registered as CUSTOM" in logged(caplog)


@pytest.mark.parametrize("release", ["0.25.1", "0.34.0"])
def test_other_releases_are_refused_in_one_line(release, installed, caplog, monkeypatch):
    installed(release)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING):
        assert plugin.register() is False
    assert logged(caplog) == (
        f"spec_ops does not offer --attention-backend SPEC_OPS: vLLM {release} was not tested: 0.26 to 0.33 were"
    )
    assert "vllm" not in sys.modules  # nothing is imported


def test_registration_raises_nothing(monkeypatch, caplog):
    def broken():
        raise OSError("unreadable")

    monkeypatch.setattr(plugin, "problems", broken)
    with caplog.at_level(logging.WARNING):
        assert plugin.register() is False
    assert "OSError: unreadable" in logged(caplog)
