"""Every Triton kernel compiles for every architecture without a GPU; the hot ones spill nothing."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import re
import subprocess
import types

import pytest
from typer.testing import CliRunner

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

import spec_ops.backends.triton as package  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402

VARIANTS = list(ahead.variants())


# A few seconds each: all of the newer architectures, and of the older ones one in turn.
TAKEN = [(v, arch) for v in ahead.first_of_each_kernel(v for v in VARIANTS if 90 in v.archs) for arch in v.archs if arch >= 90]
for i, v in enumerate(ahead.first_of_each_kernel(v for v in VARIANTS if min(v.archs) < 90)):
    OLDER = [arch for arch in v.archs if arch < 90]
    TAKEN.append((v, OLDER[i % len(OLDER)]))


@pytest.mark.parametrize(("variant", "arch"), TAKEN, ids=lambda part: getattr(part, "name", f"sm_{part}"))
def test_kernel_compiles(variant, arch):
    kernel = ahead.compiled(variant, arch)
    used = ahead.resources(kernel)
    assert 0 < used.registers <= 255
    assert used.shared_bytes <= ahead.SHARED_LIMIT[arch]
    if variant.hot:
        assert used.spill_bytes == 0
    ptx = kernel.asm["ptx"]
    assert waits_first(ptx) if arch >= 90 else "griddepcontrol" not in ptx  # which sm_89 and older do not know


def waits_first(ptx: str) -> bool:
    """Whether a kernel awaits its predecessors before it touches memory that they might (`launch.await_predecessors`). To bring
    something to L2 is not to read it."""
    touch = re.search(r"\b(ld|st|atom|red)\.[\w.:]*global|\bcp\.async|\bprefetch(?!\.global\.L2 )", ptx)
    wait = ptx.find("griddepcontrol.wait")
    assert touch is not None
    return 0 <= wait < touch.start() and ptx.index("griddepcontrol.launch_dependents") > wait


def test_no_kernel_is_left_out():
    """By convention the name of what is launched ends in `_kernel` or `_attention`; other `@triton.jit` functions are called by
    kernels."""
    defined = set()
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        functions = [
            f
            for f in vars(module).values()
            if isinstance(f, triton.JITFunction) and f.__name__.endswith(("_kernel", "_attention"))
        ]
        defined |= {(f.fn.__module__, f.__name__) for f in functions}
    assert defined == {(v.kernel.fn.__module__, v.kernel.__name__) for v in VARIANTS}
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)


@triton.jit
def wasteful_kernel(x, outs, n, BLOCK: tl.constexpr):
    """Many values alive at once: spills when registers are scarce."""
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(x + BLOCK + at)
    for _ in range(n):
        a, b = tl.sqrt(a + b), a * b
    for i in tl.static_range(len(outs)):
        tl.store(outs[i] + at, a - b)


WASTEFUL = ahead.Variant(
    "wasteful", wasteful_kernel, {"x": "*fp32:16", "outs": ("*fp32:16", "*fp32:16"), "n": "i32"}, {"BLOCK": 4096}
)


def test_spills_are_reported():
    plenty = ahead.compile_ahead(WASTEFUL, 90)
    assert (plenty.spill_bytes, plenty.loop_spills) == (0, 0)
    scarce = ahead.compile_ahead(dataclasses.replace(WASTEFUL, options={"maxnreg": 32}), 90)
    assert scarce.registers <= 32
    assert scarce.spill_bytes > 0
    assert scarce.loop_spills > 0


def assembly(*products: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/   HGMMA.64x64x16.F32.BF16 R24, {text} ;\n" for i, text in enumerate(products))


@pytest.mark.parametrize(
    ("products", "serialized"),
    [
        (["gdesc[UR16], RZ, !UPT", "gdesc[UR20], R24", "gdesc[UR24], R24", "gdesc[UR28], R24, gsb0"] * 2, False),
        (["gdesc[UR16], RZ, !UPT, gsb0", "gdesc[UR20], R24, gsb0", "gdesc[UR24], R24, gsb0"], True),
        ([], False),
    ],
)
def test_serialized_products_are_recognized(monkeypatch, products, serialized):
    """`gsb0` ends a group, which a wait is for."""
    monkeypatch.setattr(ahead, "_assembly", lambda path: assembly(*products))
    plain = ahead.compiled(WASTEFUL, 90)
    asm = {"cubin": plain.asm["cubin"], "ptx": "wgmma.mma_async"}
    assert ahead.resources(types.SimpleNamespace(asm=asm, metadata=plain.metadata)).serialized is serialized
    monkeypatch.setattr(ahead, "_assembly", lambda path: pytest.fail("disassembled for nothing"))
    assert not ahead.resources(plain).serialized


def test_a_disassembler_that_does_not_know_the_architecture(monkeypatch):
    """Triton 3.6's says this of sm_103. Any other failure is an error."""
    variant = dataclasses.replace(WASTEFUL, options={"maxnreg": 32})
    run = subprocess.run

    def failing(message: str):
        def disassemble(command, **kwargs):
            if "nvdisasm" not in command[0]:
                return run(command, **kwargs)
            return subprocess.CompletedProcess(command, 1, "", message)

        return disassemble

    monkeypatch.setattr(subprocess, "run", failing("nvdisasm fatal   : Cannot decode architecture 'SM103a'"))
    used = ahead.compile_ahead(variant, 90)
    assert used.spill_bytes > 0
    assert used.loop_spills is None
    monkeypatch.setattr(subprocess, "run", failing("nvdisasm fatal   : Could not open input file"))
    with pytest.raises(subprocess.CalledProcessError):
        ahead.compile_ahead(variant, 90)


def test_shared_memory_is_reported():
    @triton.jit
    def reduce_kernel(x, BLOCK: tl.constexpr):
        tl.store(x, tl.sum(tl.load(x + tl.arange(0, BLOCK))))  # four warps exchange their sums: 4 bytes each

    variant = ahead.Variant("reduce", reduce_kernel, {"x": "*fp32:16"}, {"BLOCK": 1024})
    assert 16 <= ahead.compile_ahead(variant, 90).shared_bytes <= 256
    assert ahead.compile_ahead(dataclasses.replace(variant, num_warps=1), 90).shared_bytes == 0


def test_hint_reaches_the_compiler():
    @triton.jit
    def copy_kernel(x, y, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at))

    def instructions(pointer: str) -> str:
        variant = ahead.Variant("copy", copy_kernel, {"x": pointer, "y": pointer}, {"BLOCK": 1024})
        return ahead.compiled(variant, 90).asm["ptx"]

    assert "v4" in instructions("*fp32:16")
    assert "v4" not in instructions("*fp32")


def test_incomplete_variant_is_refused():
    short = dataclasses.replace(WASTEFUL, constexprs={})
    with pytest.raises(ValueError, match=r"wasteful: `signature` and `constexprs` must name each of .*'BLOCK'.* got .*'n'\]"):
        ahead.compile_ahead(short, 90)
    odd = dataclasses.replace(WASTEFUL, signature={**WASTEFUL.signature, "x": "*fp32:8"})
    with pytest.raises(ValueError, match=r"hint must be ':16', got '\*fp32:8'"):
        ahead.compile_ahead(odd, 90)


def test_cli_prints_the_table(monkeypatch):
    from spec_ops import cli

    named = dataclasses.replace(WASTEFUL, name="wasteful, with a name that 80 columns leave no room for")
    monkeypatch.setattr(ahead, "variants", lambda: [named])
    shown = CliRunner().invoke(cli.app, ["bench", "ahead", "--arch", "90", "--arch", "120"])
    assert shown.exit_code == 0
    assert named.name in shown.output
    assert "sm_90" in shown.output
    assert "sm_120" in shown.output
    assert "wasteful" in shown.output
    # A hot kernel that spills fails the command; one that is not hot may.
    for hot, code in ((True, 1), (False, 0)):
        scarce = dataclasses.replace(WASTEFUL, options={"maxnreg": 32}, hot=hot)
        monkeypatch.setattr(ahead, "variants", lambda scarce=scarce: [scarce])
        assert CliRunner().invoke(cli.app, ["bench", "ahead", "--arch", "90"]).exit_code == code
    assert CliRunner().invoke(cli.app, ["bench", "ahead", "--arch", "75"]).exit_code == 2
    slow = ahead.Resources(64, 0, 0, 0, serialized=True)
    monkeypatch.setattr(ahead, "compile_ahead", lambda variant, arch: slow)
    for hot, code in ((True, 1), (False, 0)):
        monkeypatch.setattr(ahead, "variants", lambda hot=hot: [dataclasses.replace(WASTEFUL, hot=hot)])
        shown = CliRunner().invoke(cli.app, ["bench", "ahead", "--arch", "90"])
        assert shown.exit_code == code
        assert "wgmma serialized" in shown.output
    # Where a launch may be early, room for more programs than the launch counts on fails it too.
    roomy = ahead.Resources(64, 0, 0, 0)
    monkeypatch.setattr(ahead, "compile_ahead", lambda variant, arch: roomy)
    for early, code in ((True, 1), (False, 0)):
        monkeypatch.setattr(ahead, "variants", lambda early=early: [dataclasses.replace(WASTEFUL, early=early)])
        assert CliRunner().invoke(cli.app, ["bench", "ahead", "--arch", "90"]).exit_code == code
