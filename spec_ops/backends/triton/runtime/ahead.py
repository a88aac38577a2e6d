"""Ahead-of-time compilation of the Triton kernels, without a GPU, and what each takes of a multiprocessor.

A kernel module exposes `ahead() -> Iterable[Variant]`. Spills cost a hot kernel more than any tuning gains, and a kernel that
needs more shared memory than an architecture has fails at its first launch there: both show here on any machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from spec_ops.backends.triton.attention.tuning import SHARED
from spec_ops.backends.triton.runtime.launch import Launch, knows_pdl

ARCHS = (80, 86, 89, 90, 100, 103, 120)
# Bytes that one block may use: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
SHARED_LIMIT = {arch: SHARED.get(arch, 99) * 1024 for arch in ARCHS}

FP8_ARCHS = tuple(arch for arch in ARCHS if arch >= 89)  # that convert to and from e4m3

ArgType = str | tuple["ArgType", ...]
Stage = Literal["ttgir", "llir", "ptx"]
_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv", torch.float32: "fp32", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel.

    Attributes:
        name: of the table's row, such as `"append_kv bf16"`; unique.
        kernel: the `@triton.jit` (or Gluon) function.
        signature: Triton type of each argument that is no constant: `"*bf16"`, `"i32"`, `"fp32"`, a tuple of types for a tuple
            argument. `":16"` at the end (`"*bf16:16"`, `"i64:16"`) promises a multiple of 16, as a launch finds for aligned
            pointers and for strides; without it nothing is vectorized.
        constexprs: value of each constexpr (but `PDL`: `launch.knows_pdl`), and of each other argument
            that a launch makes a constant: None, and integers of value 1 such as the stride of a last dimension.
        num_warps, num_stages: as in the launch.
        hot: on the path of a decode step, where no spill is tolerated.
        archs: architectures it is launched on.
        options: further compile options, such as `{"maxnreg": 168}`.
        programs: blocks that must be resident on a multiprocessor at once, as a cooperative launch relies on; None if nothing
            relies on a count.
        early: as in `launch`: then no more than `programs` may fit, or they would not spread evenly.
        serialized: whether its `wgmma` are known to wait for one another on sm_90 (`Resources`).
        estimated: most bytes of shared memory that a block may take, which the launch counts on (`tuning.shared_bytes`), for
            each of `archs`; None if nothing is counted on.
    """

    name: str
    kernel: Any
    signature: Mapping[str, ArgType]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    hot: bool = True
    archs: tuple[int, ...] = ARCHS
    options: Mapping[str, Any] = field(default_factory=dict)
    programs: int | None = None
    early: bool = False
    serialized: bool = False
    estimated: Mapping[int, int] | None = None


def _type(value: Any) -> ArgType | None:
    """Triton's type of an argument as a launch would specialize it; None if it becomes a constant."""
    if isinstance(value, (TensorDescriptor, GluonDescriptor)):
        layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
        return f"tensordesc<{_NAMES[value.base.dtype]}{list(value.block_shape)}{layout}>"
    if isinstance(value, torch.Tensor):
        return f"*{_NAMES[value.dtype]}:16"
    if isinstance(value, float):
        return "fp32"
    if value is None or value == 1:
        return None
    return ("i64" if abs(value) >= 2**31 else "i32") + (":16" if value % 16 == 0 else "")


def variant_of(name: str, launch: Launch, *, archs: tuple[int, ...] = ARCHS, hot: bool = True, **more: Any) -> Variant:
    """What compiles the kernel of `launch`, one recorded (`launch.recorded`) on tensors of the meta device.

    Args:
        more: further attributes of the variant.
    """
    kernel, given, options, early = launch
    constants = {p.name for p in kernel.params if p.is_constexpr}
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    anywhere = {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
    types = {n: None if n in constants or v is None else "i32" if n in plain else _type(v) for n, v in given.items()}
    for parameter in anywhere & types.keys():
        if isinstance(kind := types[parameter], str):
            types[parameter] = kind.removesuffix(":16")
    return Variant(
        name,
        kernel,
        signature={n: t for n, t in types.items() if t is not None},
        constexprs={n: given[n] for n, t in types.items() if t is None},
        hot=hot,
        archs=archs,
        early=early,
        **{"num_warps": options["num_warps"], "num_stages": options.get("num_stages", 3), **more},
    )


class Resources(NamedTuple):
    """What a kernel takes, and what keeps it from being fast.

    Attributes:
        registers: per thread. shared_bytes: per block.
        spill_bytes: of registers (stack frame), per thread.
        loop_spills: how many instructions of innermost loops access such bytes; None if Triton's disassembler does not know
            the architecture (3.6's not sm_103).
        serialized: whether each `wgmma` waits for the one before (sm_90). ptxas does that to a whole kernel where it cannot
            tell that nothing else touches their registers, and says so only in its log.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    loop_spills: int | None
    serialized: bool = False


def resident_blocks(used: Resources, num_warps: int, arch: int) -> int:
    """How many blocks of a kernel fit on a multiprocessor of `arch` at once.

    By the occupancy calculator's rules: registers go to warps in units of 8 a thread, out of a quarter of 65,536 for each of
    the four schedulers; a block takes 1 KB of shared memory more than it asks for.
    """
    most = 12 if arch in (86, 89, 120) else 16
    warps_per_scheduler = min(16384 // (32 * -(-used.registers // 8) * 8), most)
    by_shared = (SHARED_LIMIT[arch] + 1024) // (used.shared_bytes + 1024)
    return min(4 * warps_per_scheduler // num_warps, by_shared)


def as_counted_on(variant: Variant, used: Resources, arch: int) -> bool:
    """Whether a multiprocessor of `arch` holds as many blocks as a launch of `variant` counts on, and no more where they would
    not spread evenly."""
    fit = resident_blocks(used, variant.num_warps, arch)
    if variant.programs is None:
        return fit >= 1
    return fit == variant.programs if variant.early else fit >= variant.programs


def variants() -> Iterator[Variant]:
    """The variants that the kernel modules of this package declare."""
    package = importlib.import_module("spec_ops.backends.triton")
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        if callable(declared := getattr(module, "ahead", None)):
            yield from declared()


def first_of_each_kernel(all_variants: Iterable[Variant]) -> list[Variant]:
    """The first variant declared of every kernel: what there is time for in CI."""
    return list({id(v.kernel): v for v in reversed(list(all_variants))}.values())[::-1]


def compile_ahead(variant: Variant, arch: int) -> Resources:
    """What the variant takes on `arch` (90 for sm_90).

    Raises:
        ValueError: the signature and the constants do not cover the kernel's arguments; the kernel is an interpreted one.
    """
    return resources(compiled(variant, arch))


def compiled(variant: Variant, arch: int) -> triton.compiler.CompiledKernel:
    """The variant, compiled by triton with the assembler that comes with it; raises as `compile_ahead` does."""
    kernel = variant.kernel
    if not isinstance(kernel, triton.JITFunction):
        raise ValueError(
            f"compile_ahead: `variant.kernel` must be a compiled @triton.jit function, got {type(kernel).__name__}; "
            "unset TRITON_INTERPRET"
        )
    constexprs = dict(variant.constexprs) | ({"PDL": knows_pdl(arch)} if "PDL" in kernel.arg_names else {})
    given = [*variant.signature, *constexprs]
    if sorted(given) != sorted(kernel.arg_names):
        wanted = f"must name each of {kernel.arg_names} once"
        raise ValueError(f"compile_ahead: {variant.name}: `signature` and `constexprs` {wanted}, got {given}")
    types: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list] = {}
    for position, name in enumerate(kernel.arg_names):
        declared = variant.signature.get(name, "constexpr")
        types[name] = _without_hints(declared, (position,), attrs)
    source = _source_class(kernel)(kernel, types, constexprs, attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


class Lowered(NamedTuple):
    """What is known of a variant before the assembler runs.

    Attributes:
        ttgir: Triton's intermediate code, in which values have layouts.
        ptx: its code, without line information; "" if less was asked for.
        shared_bytes: per block; 0 if only `ttgir` was asked for.
    """

    ttgir: str
    ptx: str
    shared_bytes: int


def lowered(variant: Variant, arch: int, last: Stage = "ptx") -> Lowered:
    """The variant without the assembler's part; raises as `compile_ahead` does.

    Args:
        last: of Triton's stages, which take seconds each: "ttgir" for that alone, "llir" for `shared_bytes` beside it.
    """
    with _until(last):
        kernel = compiled(variant, arch)
    return Lowered(kernel.asm["ttgir"], kernel.asm["ptx"], kernel.metadata.shared)


@contextlib.contextmanager
def _until(last: Stage) -> Iterator[None]:
    """Compilations inside take no part in the stages after this one, nor do they carry line information."""
    skipped = {"ttgir": ("llir", "ptx", "cubin"), "llir": ("ptx", "cubin"), "ptx": ("cubin",)}[last]
    key = f"without {skipped} and lines"  # results of cut compilations have cache entries of their own

    def hook(backend=None, stages=None, options=None, language=None, capability=None) -> tuple[str, str]:
        def skip(source: Any, metadata: dict[str, Any]) -> str | bytes:
            metadata.setdefault("name", "")  # what `ptx` leaves there, and `shared` what `llir` does: a kernel must have both
            metadata.setdefault("shared", 0)
            return b""

        if stages is not None:
            stages.update((stage, skip) for stage in skipped)
        return key, hashlib.sha256(key.encode()).hexdigest()

    knobs = triton.knobs
    with (
        knobs.runtime.scope(),
        knobs.compilation.scope(),
        _without_llvm_passes() if last == "llir" else contextlib.nullcontext(),
    ):
        knobs.runtime.add_stages_inspection_hook = hook
        knobs.compilation.disable_line_info = True
        yield


@contextlib.contextmanager
def _without_llvm_passes() -> Iterator[None]:
    """What is read before them they cannot change. No knob: Triton's C++ reads the environment."""
    name = "DISABLE_LLVM_OPT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def ptx_hash(ptx: str) -> str:
    """SHA-256 of the code alone: comments and what debuggers read change no instruction."""
    ptx = re.sub(r"(?m)^\s*\.(loc|file)\b.*$", "", ptx)
    ptx = re.sub(r"(?s)\.section\s+\.debug.*", "", ptx)
    return hashlib.sha256(re.sub(r"//.*", "", ptx).encode()).hexdigest()


def _without_hints(declared: ArgType, path: tuple[int, ...], attrs: dict) -> ArgType:
    """The type without its `":16"`, which goes to `attrs`."""
    if isinstance(declared, tuple):
        return tuple(_without_hints(part, (*path, i), attrs) for i, part in enumerate(declared))
    name, hint, multiple = declared.partition(":")
    if hint:
        if multiple != "16":
            raise ValueError(f"compile_ahead: a type's hint must be ':16', got {declared!r}")
        attrs[path] = [["tt.divisibility", 16]]
    return name


def _source_class(kernel) -> type:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def resources(kernel: triton.compiler.CompiledKernel) -> Resources:
    """What a compiled kernel takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        used = {name: int(amount) for name, amount in re.findall(r"(REG|STACK):(\d+)", report)}
        assembly = _assembly(file.name) if used["STACK"] or "wgmma.mma_async" in kernel.asm["ptx"] else ""
    loop_spills = None if assembly is None else _loop_spills(assembly)
    # Not the binary's SHARED: triton's shared memory is dynamic, which the binary does not know of.
    return Resources(used["REG"], kernel.metadata.shared, used["STACK"], loop_spills, _serialized(assembly or ""))


def _assembly(path: str) -> str | None:
    """`nvdisasm`'s output, None if it does not know the architecture."""
    read = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", path], capture_output=True, text=True)
    if "Cannot decode architecture" in read.stderr:
        return None
    read.check_returncode()
    return read.stdout


def _serialized(assembly: str) -> bool:
    """Whether a wait follows most `wgmma` before the next one begins."""
    found = re.findall(r"\b[HQ]GMMA\b|\bWARPGROUP\.DEPBAR\b", assembly)
    waits = [a != "WARPGROUP.DEPBAR" and b == "WARPGROUP.DEPBAR" for a, b in itertools.pairwise(found)]
    return 2 * sum(waits) > sum(name != "WARPGROUP.DEPBAR" for name in found)


def _loop_spills(assembly: str) -> int:
    """Accesses to local memory in the innermost loops of `nvdisasm`'s output: backward branches that span no other."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4,}\*/\s+\S", line):
            instructions.append(line)
    loops = {
        (labels[target[1]], at)
        for at, line in enumerate(instructions)
        if (target := re.search(r"\bBRA\b.*(\.L_x_\d+)", line)) and labels[target[1]] <= at
    }
    innermost = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for first, last in innermost for line in instructions[first : last + 1])
