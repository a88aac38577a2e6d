"""The table of symbols against trees of source that have them, and lack one; what registration says then."""

from __future__ import annotations

import logging
import sys

import pytest
from typer.testing import CliRunner

from spec_ops.cli import app
from spec_ops.integrations.engine_symbols import Symbol, read_module
from spec_ops.integrations.sglang import plugin, symbols
from spec_ops.integrations.sglang.symbols import BEFORE_VERIFY_MASK, COMMON, VERIFY_MASK_FILE, WITH_VERIFY_MASK
from tests.helpers.engine_source import write_source

OLD, NEW = COMMON + BEFORE_VERIFY_MASK, COMMON + WITH_VERIFY_MASK
BY_RELEASE = pytest.mark.parametrize(("table", "release"), [(OLD, "0.5.14"), (NEW, "0.5.23")], ids=["0.5.14", "0.5.23"])


@BY_RELEASE
def test_every_symbol_is_there(table, release, tmp_path):
    assert symbols.problems(write_source(tmp_path, table), release) == []


@BY_RELEASE
def test_each_missing_symbol_is_named(table, release, tmp_path):
    for i, symbol in enumerate(table):
        if symbol.file == VERIFY_MASK_FILE:
            continue  # what tells the two releases apart
        read_module.cache_clear()
        (found,) = symbols.problems(write_source(tmp_path / str(i), table, without=symbol), release)[:1]
        assert symbol.file in found
        assert symbol.path in found


def test_a_parameter_of_another_name_is_named(tmp_path):
    symbol = next(s for s in COMMON if s.path == "MHATokenToKVPool.set_kv_buffer")
    other = Symbol(symbol.file, symbol.path, tuple(n for n in symbol.names if n != "k_scale"))
    folder = write_source(tmp_path, tuple(other if s == symbol else s for s in OLD))
    assert symbols.problems(folder, "0.5.14") == [
        "MHATokenToKVPool.set_kv_buffer in sglang/srt/mem_cache/memory_pool.py has no k_scale"
    ]


@pytest.mark.parametrize(
    ("release", "inside"),
    [("0.5.13", False), ("0.5.14", True), ("0.5.14.post1", True), ("0.5.23+cu130", True), ("0.5.24", False), ("0.6.0", False),
     ("0.5.9", False)],
)  # fmt: skip
def test_range_of_releases(release, inside):
    assert symbols.in_range(release) is inside


def test_other_releases_are_refused_in_words(tmp_path):
    assert symbols.problems(write_source(tmp_path, OLD), "0.5.13") == ["SGLang 0.5.13 was not tested: 0.5.14 to 0.5.23 were"]


def test_without_sglang(monkeypatch):
    monkeypatch.setattr(symbols, "root", lambda: None)
    assert symbols.problems() == ["SGLang is not installed"]
    result = CliRunner().invoke(app, ["check", "sglang"])
    assert result.exit_code == 1
    assert result.output == "--attention-backend spec_ops is not offered: SGLang is not installed\n"


def test_files_that_are_missing_or_damaged_are_named_once(tmp_path, monkeypatch):
    folder = write_source(tmp_path, OLD)
    (folder / "plugins/hook_registry.py").write_text("def (:")
    (folder / "mem_cache/memory_pool.py").unlink()
    monkeypatch.setattr(symbols, "root", lambda: folder)
    monkeypatch.setattr(symbols, "version", lambda: "0.5.14")
    read_module.cache_clear()
    result = CliRunner().invoke(app, ["check", "sglang"])
    assert result.exit_code == 1
    first, damaged, missing = result.output.splitlines()
    assert first == "--attention-backend spec_ops is not offered:"
    assert damaged.startswith("  sglang/srt/plugins/hook_registry.py cannot be read: SyntaxError: invalid syntax")
    assert missing == "  sglang/srt/mem_cache/memory_pool.py is not there"


@pytest.mark.parametrize(("table", "version"), [(OLD, "0.5.14"), (NEW, "0.5.23")], ids=["0.5.14", "0.5.23"])
def test_the_check_command_lists_the_symbols(table, version, tmp_path, monkeypatch):
    monkeypatch.setattr(symbols, "root", lambda: write_source(tmp_path, table))
    monkeypatch.setattr(symbols, "version", lambda: version)
    result = CliRunner().invoke(app, ["check", "sglang"])
    assert result.exit_code == 0, result.output
    assert all(f"{symbol.path} ({symbol.file})" in result.output for symbol in table)


def test_registration_outside_the_range_is_one_line_and_imports_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(symbols, "root", lambda: write_source(tmp_path, OLD))
    monkeypatch.setattr(symbols, "version", lambda: "0.6.1")
    with caplog.at_level(logging.WARNING):
        assert plugin.register() is False
    assert [record.getMessage() for record in caplog.records] == [
        "spec_ops does not offer --attention-backend spec_ops: SGLang 0.6.1 was not tested: 0.5.14 to 0.5.23 were"
    ]
    assert "sglang" not in sys.modules


def test_registration_raises_nothing(monkeypatch, caplog):
    def broken():
        raise OSError("unreadable")

    monkeypatch.setattr(plugin, "problems", broken)
    with caplog.at_level(logging.WARNING):
        assert plugin.register() is False
    (record,) = caplog.records
    assert "OSError: unreadable" in record.getMessage()
