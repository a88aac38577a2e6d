"""Every Triton kernel compiles for every architecture without a GPU; the hot ones spill nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402

import spec_ops.backends.triton as package  # noqa: E402
from benchmarks.__main__ import app  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402
from tests.backends.triton.test_attention_ahead import RESIDENT  # noqa: E402
from tests.helpers.selection import pairs, parametrize_pairs  # noqa: E402

VARIANTS = list(ahead.variants())
NEWER = {arch for arch in ahead.ARCHS if arch >= 90}
OLDER = set(ahead.ARCHS) - NEWER

# Of every kernel the first variant on one of the newer architectures, and the last on one of the older ones, in turn: a second
# each. Attention takes longer: of its kernels, what `test_attention_ahead.py` compiles. So do draws that search for a
# threshold, which the newer architecture has; on the older one a draw that counts.
COUNTING = "sample_logits, 512 rows, bf16, min_p"
TAKEN = []
for archs, order in ((NEWER, VARIANTS), (OLDER, sorted(VARIANTS[::-1], key=lambda v: v.name != COUNTING))):
    for i, v in enumerate(ahead.first_of_each_kernel(v for v in order if archs.intersection(v.archs))):
        mine = sorted(archs.intersection(v.archs))
        others = [pair for pair in RESIDENT if pair[0].kernel is v.kernel and pair[1] in archs]
        TAKEN.append(others[0] if others else (v, mine[i % len(mine)]))


def pytest_generate_tests(metafunc):
    if metafunc.function is test_kernel_compiles:
        parametrize_pairs(metafunc, pairs(VARIANTS), TAKEN)


def test_kernel_compiles(variant, arch):
    kernel = ahead.compiled(variant, arch)
    used = ahead.resources(kernel)
    assert 0 < used.registers <= 255
    assert used.shared_bytes <= ahead.SHARED_LIMIT[arch]
    if variant.hot:
        assert used.spill_bytes == 0
    ptx = kernel.asm["ptx"]
    if arch < 90:
        assert "griddepcontrol" not in ptx  # which sm_89 and older do not know
    elif variant.kernel.__name__ == "deterministic_combine_kernel":  # which reads lengths first, and nothing else: it says why
        assert waits_first(ptx, list(variant.signature).index("seq_lens"))
    else:
        assert waits_first(ptx)


def test_the_architectures_are_those_of_the_docs():
    limits = Path(__file__).parents[3] / "docs" / "limits.md"
    (named,) = re.findall(r"compiles ahead of time for ([\w, \n]*?),? but", limits.read_text(encoding="utf-8"))
    assert tuple(map(int, re.findall(r"sm_(\d+)", named))) == ahead.ARCHS


def waits_first(ptx: str, early: int | None = None) -> bool:
    """Whether a kernel awaits its predecessors before it touches memory that they might (`launch.await_predecessors`). To bring
    something to L2 is not to read it. Of argument number `early` it may read."""
    wait = ptx.find("griddepcontrol.wait")
    touches = list(re.finditer(r"\b(ld|st|atom|red)\.[\w.:]*global|\bcp\.async|\bprefetch(?!\.global\.L2 )", ptx))
    assert touches
    before = [touch for touch in touches if touch.start() < wait]
    allowed = early is not None and all(touch[1] == "ld" and arguments_read(ptx, touch.start()) == {early} for touch in before)
    return wait >= 0 and (not before or allowed) and ptx.index("griddepcontrol.launch_dependents") > wait


def arguments_read(ptx: str, at: int) -> set[int]:
    """The pointers among a kernel's arguments that the address of the load at `at` is made of, by their numbers."""
    text, found, seen = ptx[:at], set(), set()
    registers = re.findall(r"\[ *(%rd\d+)", ptx[at : ptx.index(";", at)])
    assert registers
    while registers:
        register = registers.pop()
        seen.add(register)
        for line in re.findall(rf"^\s*[\w.]+\s+{register}, (.*);", text, re.MULTILINE):
            found |= {int(number) for number in re.findall(r"_param_(\d+)\]", line)}
            registers += [name for name in re.findall(r"%rd\d+", line) if name not in seen]
    return found


def jitted_functions():
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        yield from (f for f in vars(module).values() if isinstance(f, triton.JITFunction))


def test_no_default_is_a_string():
    """Triton 3.6 compiles no call of a function that has one; newer releases do."""
    defaults = [(f, parameter) for f in jitted_functions() for parameter in inspect.signature(f.fn).parameters.values()]
    assert [(f.__name__, p.name) for f, p in defaults if isinstance(p.default, str)] == []
    assert any(p.default is not p.empty for _, p in defaults)


def test_no_kernel_is_left_out():
    """By convention the name of what is launched ends in `_kernel` or `_attention`; other `@triton.jit` functions are called by
    kernels."""
    launched = {f for f in jitted_functions() if f.__name__.endswith(("_kernel", "_attention"))}
    defined = {(f.fn.__module__, f.__name__) for f in launched}
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


def assembly(instruction: str, *products: str) -> str:
    """A product each, and a wait for each `"wait"`."""
    named = ("WARPGROUP.DEPBAR.LE gsb0, 0x0" if text == "wait" else f"{instruction} R24, {text}" for text in products)
    return "".join(f"        /*{16 * i:04x}*/   {text} ;\n" for i, text in enumerate(named))


@pytest.mark.parametrize(
    ("products", "serialized"),
    [
        (["gdesc[UR16], RZ, !UPT", "gdesc[UR20], R24", "gdesc[UR24], R24", "gdesc[UR28], R24, gsb0", "wait"] * 2, False),
        (["gdesc[UR16], RZ, !UPT, gsb0", "wait", "gdesc[UR20], R24, gsb0", "wait", "gdesc[UR24], R24, gsb0", "wait"], True),
        (["gdesc[UR16], RZ, !UPT, gsb0", "gdesc[UR20], RZ, !UPT, gsb0", "gdesc[UR24], RZ, !UPT, gsb0", "wait"], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("instruction", ["HGMMA.64x64x16.F32.BF16", "QGMMA.64x64x32.F32.E4M3.E4M3"])
def test_serialized_products_are_recognized(monkeypatch, instruction, products, serialized):
    """`gsb0` ends a group, which a wait is for. Groups of one product each are not serialized by themselves."""
    monkeypatch.setattr(ahead, "_assembly", lambda path: assembly(instruction, *products))
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
    assert ahead.lowered(variant, 90, "llir").shared_bytes == ahead.compile_ahead(variant, 90).shared_bytes
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


def _scale(folder, text: str):
    """The kernel `scale_kernel` in a module of its own below `folder`."""
    folder.mkdir()
    path = folder / "scale.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n{text}")
    spec = importlib.util.spec_from_file_location(f"scale_{folder.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"x": "*fp32:16"}
    return ahead.Variant("scale", module.scale_kernel, signature, {"BLOCK": 128})


SCALE = """@triton.jit
def scale_kernel(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) * 3.0)
"""


def test_hash_is_that_of_the_code_alone(tmp_path):
    """A kernel that moved to another file and another line keeps its hash; one that computes something else does not."""
    commented = SCALE.replace("    at =", "    # why\n\n    at =")

    def hashed(name: str, text: str) -> str:
        return ahead.ptx_hash(ahead.lowered(_scale(tmp_path / name, text), 90).ptx)

    first = hashed("first", SCALE)
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert hashed("moved", "# a line more\n\n" + commented) == first
    assert hashed("changed", SCALE.replace("3.0", "5.0")) != first


def test_hash_ignores_what_debuggers_read(tmp_path):
    """PTX from a compilation with line information, whose paths and line numbers differ."""
    first, second = (_scale(tmp_path / name, "# a line more\n" * i + SCALE) for i, name in enumerate(("first", "second")))
    texts = [ahead.compiled(variant, 90).asm["ptx"] for variant in (first, second)]
    assert ".loc" in texts[0]
    assert texts[0] != texts[1]
    assert ahead.ptx_hash(texts[0]) == ahead.ptx_hash(texts[1])


def test_lowered_runs_no_assembler(monkeypatch):
    plain = ahead.compiled(WASTEFUL, 90)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *args: pytest.fail("ran the assembler"))
    fresh = dataclasses.replace(WASTEFUL, constexprs={"BLOCK": 2048})
    assert ".entry" in ahead.lowered(fresh, 90).ptx
    assert ahead.lowered(WASTEFUL, 90).shared_bytes == plain.metadata.shared
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *args: pytest.fail("made PTX"))
    cut = ahead.lowered(fresh, 100, "llir")
    assert (cut.ptx, cut.shared_bytes) == ("", 0)
    assert "#ttg.blocked" in cut.ttgir
    monkeypatch.setattr(CUDABackend, "make_llir", lambda *args: pytest.fail("left Triton's own code"))
    assert "#ttg.blocked" in ahead.lowered(fresh, 103, "ttgir").ttgir
    assert "DISABLE_LLVM_OPT" not in os.environ
    assert triton.knobs.runtime.add_stages_inspection_hook is None


def test_cli_compares_hashes(tmp_path, monkeypatch):
    def run(*options: str):
        return CliRunner().invoke(app, ["ahead", "--arch", "90", *options])

    hashes, other = tmp_path / "made" / "hashes.json", tmp_path / "other.json"
    monkeypatch.setattr(ahead, "variants", lambda: [WASTEFUL])
    assert run("--hashes", str(hashes)).exit_code == 0
    assert list(json.loads(hashes.read_text())) == ["wasteful sm_90"]
    same = run("--compare", str(hashes))
    assert (same.exit_code, same.output.strip()) == (0, "0 of 1 differ")

    larger = dataclasses.replace(WASTEFUL, constexprs={"BLOCK": 2048})
    monkeypatch.setattr(ahead, "variants", lambda: [larger, dataclasses.replace(WASTEFUL, name="another")])
    changed = run("--compare", str(hashes), "--hashes", str(other))
    assert changed.exit_code == 1
    assert changed.output.strip() == "new: another sm_90\nchanged: wasteful sm_90\n2 of 2 differ"
    assert run("--compare", str(hashes), "--kernel", "another").output.strip() == "new: another sm_90\n1 of 1 differ"

    monkeypatch.setattr(ahead, "variants", lambda: [WASTEFUL])
    assert "missing: another sm_90" in run("--compare", str(other)).output
    other.write_text("[]")
    assert run("--compare", str(other)).exit_code == 2
    assert run("--compare", str(tmp_path / "absent.json")).exit_code == 2


@pytest.mark.slow
def test_cli_prints_the_table(monkeypatch):
    named = dataclasses.replace(WASTEFUL, name="wasteful, with a name that 80 columns leave no room for")
    monkeypatch.setattr(ahead, "variants", lambda: [named])
    shown = CliRunner().invoke(app, ["ahead", "--arch", "90", "--arch", "120"])
    assert shown.exit_code == 0
    assert named.name in shown.output
    assert "sm_90" in shown.output
    assert "sm_120" in shown.output
    assert "wasteful" in shown.output
    # A hot kernel that spills fails the command; one that is not hot may.
    for hot, code in ((True, 1), (False, 0)):
        scarce = dataclasses.replace(WASTEFUL, options={"maxnreg": 32}, hot=hot)
        monkeypatch.setattr(ahead, "variants", lambda scarce=scarce: [scarce])
        assert CliRunner().invoke(app, ["ahead", "--arch", "90"]).exit_code == code
    assert CliRunner().invoke(app, ["ahead", "--arch", "75"]).exit_code == 2
    slow = ahead.Resources(64, 0, 0, 0, serialized=True)
    monkeypatch.setattr(ahead, "compile_ahead", lambda variant, arch: slow)
    for changes, code in (({}, 1), ({"hot": False}, 0), ({"serialized": True}, 0)):
        monkeypatch.setattr(ahead, "variants", lambda changes=changes: [dataclasses.replace(WASTEFUL, **changes)])
        shown = CliRunner().invoke(app, ["ahead", "--arch", "90"])
        assert shown.exit_code == code
        assert "wgmma serialized" in shown.output
    # A variant that is no longer serialized must not be said to be.
    monkeypatch.setattr(ahead, "compile_ahead", lambda variant, arch: slow._replace(serialized=False))
    assert CliRunner().invoke(app, ["ahead", "--arch", "90"]).exit_code == 1
    # Where a launch may be early, room for more programs than the launch counts on fails it too.
    roomy = ahead.Resources(64, 0, 0, 0)
    monkeypatch.setattr(ahead, "compile_ahead", lambda variant, arch: roomy)
    for early, programs, code in ((True, 1, 1), (False, 1, 0), (True, None, 0)):
        changed = dataclasses.replace(WASTEFUL, early=early, programs=programs)
        monkeypatch.setattr(ahead, "variants", lambda changed=changed: [changed])
        assert CliRunner().invoke(app, ["ahead", "--arch", "90"]).exit_code == code
