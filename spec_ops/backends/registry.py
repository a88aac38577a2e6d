"""Backend declarations, selection, and the dispatch of an attention op to the selected kernel."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from spec_ops._extras import install_hint
from spec_ops.backends import measured
from spec_ops.backends.call import APPENDS, OPTIONAL_INPUTS, RAGGED, STEPS, AttentionCall, AttentionMeta

REFERENCE = "reference"
ANY_Q_LEN = 2**31 - 1  # what an int32 `q_indptr` can say: the bound of a number of queries that nothing else bounds


class BackendError(RuntimeError):
    """No backend, or not the named one, can run a call; the message lists the reason for each candidate."""


_SIZES = tuple(f.name for f in fields(AttentionMeta) if f.type == "int")


@dataclass(frozen=True)
class Backend:
    """Declaration of a kernel provider.

    Attributes:
        name: what users pass as `backend=`.
        kernels: op name (`"mha_draft_decode"`, ..., `"append_kv"`) to `"module:function"`, imported at its first call; the
            function of an attention op takes an `AttentionCall`, and `options`, and returns the op's result; that of an append
            takes the op's arguments without `backend`.
        capabilities: inclusive range of CUDA compute capabilities (`(90, 90)`), or None for every device, CPU included.
        dtypes: of queries.
        kv_dtypes: of caches.
        head_dims: supported head sizes, or None for all.
        page_sizes: supported page sizes, or None for all.
        max_q_len: most queries per request (for `extend` its `max_q_len`), or None.
        tree_mask: whether it honours tree masks.
        window: whether it honours sliding windows.
        sinks: whether it honours attention sinks.
        softcap: whether it honours soft caps.
        reads: the optional inputs its kernels look at; passes drop the others.
        host_plan: needs host-side planning, so its calls cannot live inside a CUDA graph; used only by name.
        by_name: why `"auto"` never picks it, or None.
        deterministic: batch-invariant: a query's result depends on that query and the keys it sees alone, to the last bit;
            calls with `deterministic=True` take that of their device.
        whole_caches: of such a backend: `deterministic=True`, which sees one call, does not take it, since the next one on the
            same cache may be one that it refuses. A `Generator` with `invariant=True` knows all calls on a cache, and takes it
            where it can run each of them.
        tree_paths: besides, a node of a tree has the bits of the same path as a chain, whatever slots it has.
        rank: the lowest eligible rank wins under `"auto"`, as long as no measured times say otherwise (`measured.py`).
        constraint: what the other fields cannot say, as a pure function of the call's facts and the architecture that returns
            the reason to refuse, or None.
        requires: `(module, extra)`: the module that the kernels import, and the extra of this package that installs it.
        options: keyword arguments of its kernels that no op has; `out_dtype` among them is the dtype of results.
    """

    name: str
    kernels: Mapping[str, str]
    capabilities: tuple[int, int] | None
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]
    rank: int
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    max_q_len: int | None = None
    tree_mask: bool = False
    window: bool = False
    sinks: bool = False
    softcap: bool = False
    reads: frozenset[str] = field(default_factory=frozenset)
    host_plan: bool = False
    by_name: str | None = None
    deterministic: bool = False
    whole_caches: bool = False
    tree_paths: bool = False
    constraint: Callable[[AttentionMeta, int | None], str | None] | None = None
    requires: tuple[str, str] | None = None
    options: Mapping[str, float | torch.dtype | None] = field(default_factory=dict)

    def refuse(self, meta: AttentionMeta, arch: int | None) -> str | None:
        """Why this backend cannot run `meta` on `arch` (90 for sm_90, None for CPU); None if it can."""
        if meta.step not in self.kernels:
            return f"has no kernel for {meta.step}"
        if self.capabilities is not None:
            low, high = self.capabilities
            if arch is None:
                return "needs a CUDA device"
            if not low <= arch <= high:
                return f"needs sm_{low} to sm_{high}, not sm_{arch}"
        for what, value, allowed in (
            ("query dtype", meta.dtype, self.dtypes),
            ("cache dtype", meta.kv_dtype, self.kv_dtypes),
            ("head_dim", meta.head_dim, self.head_dims),
            ("page size", meta.page_size, self.page_sizes),
        ):
            if allowed is not None and value not in allowed:
                return f"does not support {what} {value}"
        if self.max_q_len is not None and meta.q_len > self.max_q_len:
            came = "any number of them" if meta.q_len == ANY_Q_LEN else meta.q_len
            return f"supports at most {self.max_q_len} queries per request, not {came}"
        for feature in ("tree_mask", "window", "sinks", "softcap"):
            if getattr(meta, feature) and not getattr(self, feature):
                return f"does not support {feature}"
        return self.constraint(meta, arch) if self.constraint is not None else None

    def missing(self) -> str | None:
        """Why its kernels cannot be imported in this process, found without importing them; None if they can."""
        return None if self.requires is None or _importable(self.requires[0]) else self.install_hint()

    def install_hint(self) -> str:
        module, extra = self.requires or ("its package", "")
        return f"needs {module}, which is not installed: {install_hint(extra)}"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # `sys.modules` holds a stand-in without a spec
        return True


@dataclass(frozen=True)
class Selection:
    """The chosen backend, and for each other candidate why it was not."""

    backend: Backend
    reasons: Mapping[str, str]


_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Add a kernel provider; it then takes part in selection like the built-in ones.

    Raises:
        ValueError: the name is taken or reserved, or the declaration names an unknown op or optional input, or a kernel other
            than as `"module:function"`.
    """
    if backend.name in _BACKENDS or backend.name == "auto":
        raise ValueError(f"register_backend: `name` must be new, got {backend.name!r}")
    if unknown := set(backend.kernels) - {*STEPS, *APPENDS}:
        raise ValueError(f"register_backend: `kernels` must be keyed by attention ops or appends, got {sorted(unknown)}")
    for path in backend.kernels.values():
        if path.count(":") != 1 or not all(path.split(":")):
            raise ValueError(f"register_backend: `kernels` must name each kernel as 'module:function', got {path!r}")
    if unknown := set(backend.reads) - OPTIONAL_INPUTS:
        raise ValueError(f"register_backend: `reads` must be a subset of {sorted(OPTIONAL_INPUTS)}, got {sorted(unknown)}")
    _BACKENDS[backend.name] = backend
    _forget()


def available_backends() -> tuple[str, ...]:
    """Names of the registered backends, best rank first."""
    return tuple(b.name for b in sorted(_BACKENDS.values(), key=lambda b: b.rank))


def get_backend(name: str) -> Backend | None:
    """The declaration registered as `name`; None if there is none."""
    return _BACKENDS.get(name)


def unregister_backend(name: str) -> Backend:
    """Take a provider out, and return its declaration.

    Raises:
        ValueError: no backend has this name.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unregister_backend: `name` must be one of {list(available_backends())}, got {name!r}")
    backend = _BACKENDS.pop(name)
    _forget()  # after it: another thread must not remember a selection of it meanwhile
    return backend


def validate_backend_name(check: Any, name: object) -> None:
    """Fail, by the `Checker` of a call, for a name that no backend has."""
    if not isinstance(name, str):
        check.fail("backend", "a str", type(name).__name__, TypeError)
    if name != "auto" and name not in _BACKENDS:
        check.fail("backend", f"'auto' or one of {list(available_backends())}", repr(name))


def invariant_backend(arch: int | None, calls: Sequence[AttentionMeta] = ()) -> str:
    """The batch-invariant backend of `arch` (None: the CPU), the same for every call: two of them do not agree in their bits.

    Args:
        calls: every call that there will be on a cache, where that is known: backends of whole caches take part.

    Raises:
        BackendError: there is none.
    """
    for backend in _batch_invariant(arch is not None):
        low, high = (0, 0) if backend.capabilities is None else backend.capabilities
        serves = not backend.whole_caches or (bool(calls) and not any(backend.refuse(call, arch) for call in calls))
        if low <= (arch or 0) <= high and serves:
            return backend.name
    known = [b.name for on_gpu in (True, False) for b in _batch_invariant(on_gpu) if not b.whole_caches]
    raise BackendError(f"no batch-invariant attention backend runs on {_place(arch)}; there are {known}")


def _batch_invariant(on_gpu: bool) -> list[Backend]:
    """The batch-invariant backends of GPUs, or of the CPU, the best-ranked first."""
    known = [backend for backend in _BACKENDS.values() if backend.deterministic]
    return sorted((b for b in known if (b.capabilities is not None) == on_gpu), key=lambda b: b.rank)


def attention_backend(check, name: object, deterministic: object, device: torch.device) -> str:
    """The name to select by: `name`, or with `deterministic` the batch-invariant backend of the device."""
    validate_backend_name(check, name)
    assert isinstance(name, str)
    if not isinstance(deterministic, bool):
        check.fail("deterministic", "a bool", type(deterministic).__name__, TypeError)
    if not deterministic or (name != "auto" and _BACKENDS[name].deterministic):
        return name
    if name != "auto":
        known = [known for known in available_backends() if _BACKENDS[known].deterministic]
        check.fail("backend", f"'auto' or one of {known} with `deterministic=True`", repr(name))
    if device.type == "cpu":
        return invariant_backend(None)
    # A plan for a GPU (`explain`) is traced on `meta`; what a GPU cannot run is refused when the kernel is chosen.
    on_gpu = (backend.name for backend in _batch_invariant(True) if not backend.whole_caches)
    return next(on_gpu, None) or invariant_backend(device_arch(device))


def plans_on_host(name: str) -> bool:
    """Whether the named backend needs host-side planning (false for "auto", which never picks such a backend by itself)."""
    return name in _BACKENDS and _BACKENDS[name].host_plan


def select_backend(
    meta: AttentionMeta, arch: int | None, name: str = "auto", missing: frozenset[str] = frozenset()
) -> Selection:
    """Choose who runs `meta` on `arch` (90 for sm_90, None for CPU): a pure function of the declarations.

    A named backend is used or refused, never replaced. `missing` names the backends to refuse because their package is not
    installed: `missing_backends()` to run here and now, none to plan for a machine that has everything.

    Raises:
        BackendError: with the reason for each candidate. ValueError: no backend has this name.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ValueError(f"select_backend: `name` must be 'auto' or one of {list(available_backends())}, got {name!r}")
    return _selection(meta, arch, name, missing)


@functools.cache
def missing_backends() -> frozenset[str]:
    """Names of the backends whose package is not installed. Looked up once: every eager call of an attention op asks."""
    return frozenset(name for name, backend in _BACKENDS.items() if backend.missing() is not None)


def _forget() -> None:
    """Select anew: backends, their packages or the measured times have changed."""
    for clear in (_selection.cache_clear, _kernel.cache_clear, missing_backends.cache_clear, *_of_others):
        clear()


_of_others: list[Callable[[], None]] = []


def forgotten_with_selections(clear: Callable[[], None]) -> None:
    """Call `clear` whenever backends are registered or taken out: of what is remembered elsewhere, and depends on them."""
    _of_others.append(clear)


@functools.lru_cache(maxsize=4096)
def _selection(meta: AttentionMeta, arch: int | None, name: str, missing: frozenset[str]) -> Selection:
    auto = name == "auto"
    candidates = sorted(_BACKENDS.values(), key=lambda b: b.rank) if auto else [_BACKENDS[name]]
    reasons: dict[str, str] = {}
    eligible: list[Backend] = []
    for backend in candidates:
        why = _used_by_name(backend) if auto and meta.step in backend.kernels else None
        why = why or backend.refuse(meta, arch) or (backend.install_hint() if backend.name in missing else None)
        if why is None:
            eligible.append(backend)
        else:
            reasons[backend.name] = why
    times = measured.nearest(meta, arch) if auto else None
    chosen = _fastest_first(eligible, times)[0] if eligible else None
    for backend in eligible:
        if chosen is not None and backend is not chosen:
            compared = times.compare(backend.name, chosen.name) if times else None
            reasons[backend.name] = compared or f"ranks after {chosen.name}"
    if chosen is None:
        listed = "; ".join(f"{n} {why}" for n, why in reasons.items())
        raise BackendError(f"{meta.step}: `backend` {name!r} cannot run this call on {_place(arch)}: {listed}")
    return Selection(chosen, reasons)


def _used_by_name(backend: Backend) -> str | None:
    if backend.host_plan:
        return "plans on the host, which breaks a CUDA graph: name it to use it"
    return None if backend.by_name is None else f"{backend.by_name}: name it to use it"


def _fastest_first(eligible: list[Backend], times: measured.Times | None) -> list[Backend]:
    """`eligible` (by rank), with the places of those that were measured against each other handed out by their times."""
    known = [b for b in eligible if times is not None and b.name in times.mean]
    by_time = iter(sorted(known, key=lambda b: times.mean[b.name] if times else 0.0))
    return [next(by_time) if b in known else b for b in eligible]


def _place(arch: int | None) -> str:
    return "CPU" if arch is None else f"sm_{arch}"


def device_arch(device: torch.device) -> int | None:
    """90 for sm_90, None for CPU."""
    return None if device.type != "cuda" else _cuda_arch(device.index)


@functools.cache
def _cuda_arch(index: int | None) -> int:
    refuse_rocm()
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def refuse_rocm() -> None:
    """Raise on AMD GPUs, which call themselves `cuda` and report capabilities like (9, 4): the kernels are for NVIDIA's."""
    if torch.version.hip is not None:
        raise BackendError(
            f"spec_ops: its GPU kernels are for NVIDIA GPUs, and this PyTorch is built for ROCm {torch.version.hip}: "
            "put the tensors on the CPU"
        )


def known_while_compiling(meta: AttentionMeta) -> AttentionMeta | str:
    """`meta` with the numbers that selection needs, or why they are not known, for a call whose sizes may be symbols.

    No guard is made: it would compile anew for each value, and `torch.export` would bake the first one in. The bound of a
    ragged call's queries may stay open, since backends limit it from above alone; then it is the largest that it can be.
    """
    found: dict[str, int] = {}
    for name in _SIZES:
        if isinstance(size := getattr(meta, name), torch.SymInt):
            if (known := size.node.maybe_as_int()) is None:
                if name != "q_len" or meta.step not in RAGGED:
                    return f"{name} is dynamic ({size}), so the kernel is chosen when the call runs"
                upper = size.node.shape_env.bound_sympy(size.node.expr).upper
                known = int(upper) if upper < ANY_Q_LEN else ANY_Q_LEN
            found[name] = known
    return dataclasses.replace(meta, **found) if found else meta  # type: ignore[arg-type]


def append_meta(op: str, args: tuple) -> AttentionMeta:
    """The facts of a call to `append_kv` or `append_mla_kv` with positional `args` (its schema's order)."""
    cache, mha = args[0], op == "append_kv"
    rows = args[2] if mha else args[1]
    heads = cache.shape[2] if mha else 1
    return AttentionMeta(
        step=op, dtype=rows.dtype, kv_dtype=cache.dtype, num_heads=heads, num_kv_heads=heads, head_dim=cache.shape[-1],
        v_head_dim=args[1].shape[-1] if mha else rows.shape[-1], page_size=cache.shape[1], q_len=1, tree_mask=False,
        window=False, sinks=False, softcap=False,
    )  # fmt: skip


def output_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of an attention call with queries of `dtype` on the backend `name`."""
    found = _BACKENDS[name].options.get("out_dtype") if name in _BACKENDS else None
    return found if isinstance(found, torch.dtype) else dtype


@functools.cache
def load_kernel(path: str) -> Callable:
    """The function at `"module:function"`."""
    module, function = path.split(":")
    return getattr(importlib.import_module(module), function)


def _on_device_of(tensor: torch.Tensor, kernel: Callable, args: tuple, options: Mapping[str, Any]) -> Any:
    """Calls a kernel with the tensor's device current: those of other packages may launch on the one that is."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            return kernel(*args, **options)
    return kernel(*args, **options)


def without_kernel(meta: AttentionMeta, arch: int | None, name: str, selection: Selection) -> str | None:
    """Why `"auto"` gave a call on a GPU to `reference`, which is right and slow; None if it did not."""
    if arch is None or name != "auto" or selection.backend.name != REFERENCE:
        return None
    reasons = "; ".join(f"{n} {why}" for n, why in selection.reasons.items() if not why.startswith("has no kernel"))
    return f"{meta.step} runs on `{REFERENCE}`, slow plain PyTorch, since no kernel can run it on sm_{arch}: {reasons}"


_warned: set[tuple] = set()


def warn_once(meta: AttentionMeta, arch: int | None, text: str) -> None:
    """Warn of `text`, once for calls that differ in their step and number of queries alone."""
    if (key := (dataclasses.replace(meta, step=meta.step[:3], q_len=0), arch)) not in _warned:
        _warned.add(key)
        warnings.warn(text, stacklevel=2)


@functools.lru_cache(maxsize=4096)
def _kernel(
    facts: tuple, arch: int | None, name: str, missing: frozenset[str]
) -> tuple[Callable, Mapping[str, Any], tuple[AttentionMeta, str] | None]:
    """Of an eager call: the kernel, its options, and what to warn of. By `facts` rather than by what they make, since that is
    made anew by each call."""
    meta = AttentionMeta(*facts)
    selection = select_backend(meta, arch, name, missing)
    text = without_kernel(meta, arch, name, selection)
    return load_kernel(selection.backend.kernels[meta.step]), selection.backend.options, None if text is None else (meta, text)


def run_attention(call: AttentionCall) -> torch.Tensor:
    """The implementation of every attention op: select, load, call."""
    arch = device_arch(call.q.device)
    kernel, options, warning = _kernel(call.facts(), arch, call.backend, missing_backends())
    if warning is not None:
        warn_once(warning[0], arch, warning[1])
    result = _on_device_of(call.q, kernel, (call,), options)
    if call.out is not None and result is not call.out:  # some providers' kernels take no place to write to
        call.out.copy_(result)
        return call.out
    return result


def run_append(op: str, args: tuple) -> None:
    """The implementation of an append whose backend is named."""
    backend = select_backend(append_meta(op, args), device_arch(args[0].device), args[-1], missing_backends()).backend
    _on_device_of(args[0], load_kernel(backend.kernels[op]), args[:-1], {})


def declarations() -> str:
    """Every registered declaration, and which lack their package, as text, the same in every process: part of the passes' cache
    key, since selections end up in compiled code."""

    def text(setting: object) -> str:
        if isinstance(setting, Mapping):
            return repr(sorted(setting.items()))
        if callable(setting):
            return f"{setting.__module__}:{getattr(setting, '__qualname__', repr(setting))}"
        return repr(sorted(map(str, setting))) if isinstance(setting, frozenset) else repr(setting)

    declared = [[f"{f.name}={text(getattr(b, f.name))}" for f in fields(b)] for _, b in sorted(_BACKENDS.items())]
    return repr((declared, sorted(missing_backends()), measured.table()))
