"""compile_kernels: what it compiles is what the calls launch."""

from __future__ import annotations

import os
from dataclasses import fields, replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

import spec_ops  # noqa: E402
from spec_ops.backends.registry import BackendError, load_kernel  # noqa: E402
from spec_ops.backends.triton.attention import launcher, variants  # noqa: E402
from spec_ops.backends.triton.attention.deterministic import launcher as deterministic  # noqa: E402
from spec_ops.backends.triton.cache.append import append_kv  # noqa: E402
from spec_ops.backends.triton.runtime import background  # noqa: E402
from spec_ops.backends.triton.runtime.launch import Target, compile_in_background, recorded  # noqa: E402
from spec_ops.ops.kernels import has_own_kernel, kernel_of  # noqa: E402
from spec_ops.passes import PassContext, PassResult, compile_kernels  # noqa: E402
from spec_ops.passes.analysis.graph import attention_calls, set_arg  # noqa: E402
from spec_ops.passes.compile_kernels import CompileKernels  # noqa: E402
from spec_ops.passes.row_scatter import register_lowerings  # noqa: E402
from spec_ops.passes.write_in_place import WriteInPlace  # noqa: E402
from tests.helpers.inductor_cuda import cuda_graph  # noqa: E402
from tests.helpers.op_samples import SAMPLES, overload, sample  # noqa: E402
from tests.helpers.pass_harness import capture, texts  # noqa: E402
from tests.helpers.triton_target import choosing_for, keys, pretended_gpu  # noqa: E402

H200, B200 = Target(90, 132), Target(100, 148)
CUDA = torch.device("cuda", 0)


def attempt(call):
    """What a launcher does with arguments that it refuses is the same here and there."""
    try:
        return call()
    except (BackendError, ValueError, TypeError) as error:
        return str(error)


# The samples of attention are too small for our kernels.
@pytest.mark.parametrize("name", [name for name in SAMPLES if has_own_kernel(overload(name))])
def test_keys_are_those_of_the_launches(name):
    """The launchers run on real tensors, which lie on the CPU, up to where Triton looks for a binary."""
    op = overload(name)
    for target in (H200, B200):
        with pretended_gpu(target.arch):
            for seed in range(4):
                args = sample(name, seed, "cpu", fp8=False)
                path, given = kernel_of(op, args, target.arch)
                with keys() as launched, choosing_for(target):
                    refusal = attempt(lambda path=path, given=given: load_kernel(path)(*given))
                meta = tuple(compile_kernels._like(arg, None) for arg in args)
                launches = attempt(lambda meta=meta, target=target: compile_kernels.launches_of(op, meta, target))
                if isinstance(launches, str):
                    assert launches == refusal
                    continue
                with keys() as compiled:
                    compile_in_background(launches, CUDA)
                assert compiled == launched


ATTENTION = [
    (launcher, variants.GQA_128, 4, False, 64),
    (launcher, variants.GQA_64, 16, True, 64),
    (launcher, variants.GQA_64, 1, False, 16),
    (launcher, variants.GQA_FP8, 4, False, 64),
    (launcher, variants.GQA_256, 16, True, 64),
    (launcher, variants.MLA_128, 4, False, 64),
    (launcher, variants.MLA_16, 1, False, 1),
    (deterministic, variants.GQA_128, 4, False, 64),
]


@pytest.mark.parametrize("target", [H200, B200], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize(("steps", "shape", "q_len", "tree", "page_size"), ATTENTION)
def test_keys_of_attention(steps, shape, q_len, tree, page_size, target):
    call = variants.call_of(shape, 4, q_len, tree, page_size=page_size)
    tensors = {f.name: t for f in fields(call) if isinstance(t := getattr(call, f.name), torch.Tensor)}
    real = replace(call, **{name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()})
    with pretended_gpu(target.arch):
        with keys() as launched, choosing_for(target):
            steps.attention(real)
        with recorded(target) as launches:
            steps.attention(call)
        with keys() as compiled:
            compile_in_background(launches, CUDA)
    assert compiled == launched
    assert len(launched) == (2 if steps is deterministic else 1)
    on_hopper = target is H200 and steps is launcher and shape in (variants.GQA_64, variants.MLA_128, variants.MLA_16)
    assert ("hopper" in launched[0][0]) == (on_hopper and (shape is not variants.GQA_64 or q_len == 16))


def test_misaligned_tensors_get_another_binary():
    """Whether an address is a multiple of 16 is a part of the key; that of a view is known by the place where it begins."""
    pool, rows = torch.zeros(2, 4, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.bfloat16)
    seen = []
    for start in (0, 4, 8):
        k = rows[start : start + 384].view(3, 2, 64)
        args = (*pool, k, k, torch.arange(3), 1.0, 1.0)
        with pretended_gpu():
            with keys() as launched:
                append_kv(*args)
            meta = tuple(compile_kernels._like(arg, None) for arg in args)
            with keys() as compiled:
                compile_in_background(compile_kernels.launches_of(overload("append_kv"), meta, H200), CUDA)
        assert compiled == launched
        seen.append(launched)
    assert seen[0] == seen[2] != seen[1]


def layers(q, k_cache, v_cache, rows, slots, tables, lens):
    """Two layers whose calls are alike."""
    for _ in range(2):
        spec_ops.append_kv(k_cache, v_cache, rows, rows, slots)
        q = spec_ops.mha_target_verify(q, k_cache, v_cache, tables, lens)
    return q


def inputs() -> list[torch.Tensor]:
    caches, rows = torch.zeros(2, 8, 64, 2, 128, dtype=torch.bfloat16), torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    tables, lens = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return [torch.zeros(2, 2, 8, 128, dtype=torch.bfloat16), *caches, rows, torch.arange(4), tables, lens]


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: H200))
    with pretended_gpu():
        yield


def graph_of_layers() -> torch.fx.Graph:
    """On CUDA, with its kernels selected."""
    graph = cuda_graph(layers, *inputs()).graph
    for node in attention_calls(graph):
        set_arg(node, "backend", "triton")
    return graph


def run(graph: torch.fx.Graph, arch: int | None = None) -> tuple[PassResult, list[str]]:
    """The result of the pass, and the kernels that it compiles."""
    result, before = PassResult("compile_kernels"), graph.python_code("self").src
    with keys() as compiled:
        CompileKernels().run(graph, PassContext(arch), result)
    assert graph.python_code("self").src == before
    return result, [kernel for kernel, _ in compiled]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "functional"])
def test_kernels_of_a_graph(in_place, on_h200):
    """Each once, also where the call that writes is a functional one still."""
    graph = graph_of_layers()
    if in_place:
        WriteInPlace().run(graph, PassContext(90), PassResult("write_in_place"))
    started: list = []
    result = PassResult("compile_kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background._Collecting, "submit", lambda self, *job: setattr(self, "started", 1) or started.append(self))
        CompileKernels().run(graph, PassContext(), result)
    assert [collecting.kernel.__name__ for collecting in started] == ["append_kv_kernel", "split_kv_attention_kernel"]
    assert (
        texts(result.done)
        == "spec_ops.append_kv.default: 1 of its kernels\nspec_ops.mha_target_verify.default: 1 of its kernels"
    )
    assert (result.matches, result.refused) == (2, [])
    assert run(graph)[1] == ["append_kv_kernel", "split_kv_attention_kernel"]


def test_nothing_for_a_stated_architecture_or_a_cpu(on_h200):
    assert run(graph_of_layers(), arch=90) == (PassResult("compile_kernels"), [])
    assert run(capture(layers, *inputs())[0].graph) == (PassResult("compile_kernels"), [])


def test_calls_that_inductor_generates_code_for_have_no_kernel(on_h200):
    graph = graph_of_layers()
    for node in graph.nodes:
        if node.target is compile_kernels.AUTO_FUNCTIONALIZED:
            node.args = (torch.ops.spec_ops.append_kv_lowered.default,)
    register_lowerings()
    WriteInPlace().run(graph, PassContext(90), PassResult("write_in_place"))
    assert run(graph)[1] == ["split_kv_attention_kernel"]


def test_what_cannot_be_foretold_is_refused(on_h200, monkeypatch):
    """Nothing fails a compilation that would succeed without."""
    graph = graph_of_layers()
    monkeypatch.setattr(compile_kernels, "launches_of", lambda *_: 1 / 0)
    result, compiled = run(graph)
    assert compiled == []
    assert texts(result.refused) == (
        "spec_ops.append_kv.default: division by zero\nspec_ops.mha_target_verify.default: division by zero"
    )


def test_sizes_that_are_not_known(on_h200):
    mode = torch._subclasses.FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    fake = mode.from_tensor(torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"sizes \(s\d+, s?4\S*\), strides .* are not known before it runs"):
        compile_kernels._like(fake, None)


def test_strides_are_those_of_the_users_call():
    """Inductor copies an input that has others."""
    x, wanted = torch.zeros(8, 16)[2:].t(), torch.zeros(16, 6)
    assert compile_kernels._like(x, None).stride() == (1, 16)
    assert compile_kernels._like(x, None).storage_offset() == 32
    assert compile_kernels._like(x, wanted).stride() == (6, 1)
    assert compile_kernels._like(x, wanted).storage_offset() == 0
