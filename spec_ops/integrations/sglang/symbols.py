"""The symbols of SGLang that the plug-in uses, and whether an installed SGLang has them.

They are looked up in the source: importing the modules takes seconds, and a GPU on some machines, and every engine of whoever
installed spec_ops pays for the check, whether it uses the backend or not.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAME = "spec_ops"
OLDEST, NEWEST = "0.5.14", "0.5.23"
VERIFY_MASK_FILE = "layers/attention/verify_mask.py"  # since some release between the two: backends declare their mask's layout


class Symbol(NamedTuple):
    """A function, class or method in a file under `sglang/srt`, and names that its parameters (a class: its members) hold."""

    file: str
    path: str
    names: tuple[str, ...] = ()


_BACKEND = "layers/attention/base_attn_backend.py"
_FACTORY = "speculative/draft_utils.py"
COMMON = (
    Symbol("plugins/hook_registry.py", "HookRegistry.register", ("target", "hook", "hook_type")),
    Symbol("plugins/hook_registry.py", "HookRegistry.apply_hooks"),
    Symbol("plugins/hook_registry.py", "HookType", ("AROUND",)),
    Symbol("layers/attention/attention_registry.py", "register_attention_backend", ("name",)),
    Symbol("layers/attention/triton_backend.py", "TritonAttnBackend"),
    Symbol(_BACKEND, "AttentionBackend.init_forward_metadata", ("forward_batch",)),
    Symbol(_BACKEND, "AttentionBackend.init_forward_metadata_out_graph", ("forward_batch", "in_capture")),
    Symbol(_BACKEND, "AttentionBackend.init_forward_metadata_in_graph", ("forward_batch",)),
    Symbol(_BACKEND, "AttentionBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens")),
    Symbol(_BACKEND, "AttentionBackend.get_cuda_graph_seq_len_fill_value"),
    Symbol(_BACKEND, "AttentionBackend.update_verify_buffers_to_fill_after_draft", ("spec_info", "cuda_graph_bs")),
    Symbol(_BACKEND, "AttentionBackend.forward_decode", ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs")),
    Symbol(_BACKEND, "AttentionBackend.forward_extend", ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs")),
    Symbol(_BACKEND, "AttentionBackend", ("needs_cpu_seq_lens",)),
    Symbol(_FACTORY, "DraftBackendFactory.create_decode_backend"),
    Symbol(_FACTORY, "DraftBackendFactory.create_draft_extend_backend"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_decode_or_idle"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_target_verify"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_draft_extend_v2"),
    Symbol("model_executor/forward_batch_info.py", "ForwardMode.is_extend", ("include_draft_extend_v2",)),
    Symbol("mem_cache/memory_pool.py", "KVWriteLoc", ("loc", "swa_loc")),
    Symbol("mem_cache/memory_pool.py", "MHATokenToKVPool.get_kv_buffer", ("layer_id",)),
    Symbol(
        "mem_cache/memory_pool.py",
        "MHATokenToKVPool.set_kv_buffer",
        ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
    ),
    Symbol("mem_cache/memory_pool.py", "MLATokenToKVPool.get_key_buffer", ("layer_id",)),
    Symbol("mem_cache/memory_pool.py", "MLATokenToKVPool.set_kv_buffer", ("layer", "loc_info", "cache_k", "cache_v")),
    Symbol("mem_cache/memory_pool.py", "MLATokenToKVPool.set_mla_kv_buffer", ("layer", "cache_k_nope", "cache_k_rope")),
    Symbol(
        "models/deepseek_common/attention_backend_handler.py",
        "AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
    ),
    Symbol("models/deepseek_common/attention_forward_methods/forward_methods.py", "AttnForwardMethod", ("MLA",)),
)
BEFORE_VERIFY_MASK = (
    Symbol("server_args.py", "add_attention_backend_choices", ("choices",)),
    Symbol("server_args.py", "ServerArgs.get_attention_backends"),
    Symbol(_BACKEND, "AttentionBackend.get_verify_buffers_to_fill_after_draft"),
    Symbol(_FACTORY, "DraftBackendFactory.__init__", ("server_args", "draft_model_runner", "topk", "speculative_num_steps")),
    Symbol(
        "speculative/eagle_utils.py", "build_tree_kernel_efficient", ("num_verify_tokens", "tree_mask_mode", "tree_mask_buf")
    ),
    Symbol("speculative/eagle_utils.py", "TreeMaskMode", ("QLEN_ONLY",)),
)
WITH_VERIFY_MASK = (
    Symbol("arg_groups/choices.py", "add_attention_backend_choices"),
    Symbol("runtime_context.py", "attention_backends"),
    Symbol("runtime_context.py", "get_spec"),
    Symbol(_BACKEND, "AttentionBackend.verify_mask"),
    Symbol(_FACTORY, "DraftBackendFactory.__init__", ("draft_model_runner", "topk", "speculative_num_steps")),
    Symbol(VERIFY_MASK_FILE, "VerifyMask", ("buffer", "mode", "max_bs", "is_read")),
    Symbol("speculative/eagle_utils.py", "TreeMaskMode"),
)


def root() -> Path | None:
    """The folder `sglang/srt` of the SGLang that would be imported; None if there is none."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))) / "srt"


def version() -> str | None:
    """Of the installed SGLang; None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_verify_mask(folder: Path) -> bool:
    return (folder / VERIFY_MASK_FILE).is_file()


def table(folder: Path) -> tuple[Symbol, ...]:
    """What the plug-in uses of the SGLang in `folder`."""
    return COMMON + (WITH_VERIFY_MASK if has_verify_mask(folder) else BEFORE_VERIFY_MASK)


def _numbers(text: str) -> tuple[int, ...]:
    """`0.5.14` as numbers; suffixes of builds (`.post1`, `rc0`, `+cu130`) do not count."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def in_range(text: str) -> bool:
    return _numbers(OLDEST) <= _numbers(text)[:3] <= _numbers(NEWEST)


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
def _module(path: Path) -> dict[str, ast.stmt]:
    return dict(_members(ast.parse(path.read_text(encoding="utf-8")).body))


def _problem(folder: Path, symbol: Symbol) -> str | None:
    """What is wrong with one symbol; None if nothing is."""
    where = f"sglang/srt/{symbol.file}"
    if not (folder / symbol.file).is_file():
        return f"{where} is not there"
    found: ast.stmt | None = None
    try:
        members = _module(folder / symbol.file)
    except (SyntaxError, ValueError, OSError) as error:  # of a newer Python, or damaged
        return f"{where} cannot be read: {type(error).__name__}: {error}"
    for part in symbol.path.split("."):
        found = members.get(part)
        if found is None:
            return f"{where} has no {symbol.path}"
        members = dict(_members(found.body)) if isinstance(found, ast.ClassDef) else {}
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = found.args
        known = {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg is not None}
    else:
        known = set(members)
    missing = [name for name in symbol.names if name not in known]
    return f"{symbol.path} in {where} has no {', '.join(missing)}" if missing else None


def problems(folder: Path | None = None, release: str | None = None) -> list[str]:
    """Why the plug-in does not fit an SGLang: its version, or symbols of it that are missing or changed; empty if it fits.

    Args:
        folder: its `sglang/srt`; default: of the installed one, as `release` is.
        release: its version.
    """
    folder = root() if folder is None else folder
    release = version() if release is None else release
    if folder is None or release is None:
        return ["SGLang is not installed"]
    if not in_range(release):
        return [f"SGLang {release} was not tested: {OLDEST} to {NEWEST} were"]
    found = (_problem(folder, symbol) for symbol in table(folder))
    return list(dict.fromkeys(problem for problem in found if problem is not None))  # a file that is missing: once


def report() -> tuple[str, bool]:
    """What `python -m spec_ops check sglang` prints, and whether the plug-in fits."""
    folder, found = root(), problems()
    if found:
        told = f" {found[0]}" if len(found) == 1 else "".join(f"\n  {line}" for line in found)
        return f"--attention-backend {NAME} is not offered:{told}", False
    assert folder is not None
    lines = [f"SGLang {version()}: in the tested range ({OLDEST} to {NEWEST}); {len(table(folder))} symbols are as expected:"]
    lines += [f"  {symbol.path} ({symbol.file})" for symbol in table(folder)]
    return "\n".join([*lines, f"Use it: sglang serve ... --attention-backend {NAME} --page-size 64"]), True
