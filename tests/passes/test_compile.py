"""The round under torch.compile: one full graph, no recompile inside a bucket, the same tokens as eager."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import run_and_get_code

import spec_ops
from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig
from spec_ops.models import CausalLM
from tests.decoding.test_generate import PROMPTS, make_draft, model_config
from tests.helpers.pass_harness import Uncached, cache_copies

OPTIONS = {"max_batch_size": 4, "max_seq_len": 64, "page_size": 4}


def compiled_generator(target, draft, config, backend: str) -> Generator:
    """A generator whose rounds are compiled for `backend`; "inductor" is what `compile=True` gives."""
    generator = Generator(target, draft, config, compile=backend == "inductor", **OPTIONS)
    if backend != "inductor":
        build = generator.buckets.round

        def compiled(*args):
            return torch.compile(build(*args), backend=backend, fullgraph=True, dynamic=False)

        generator.buckets.round = compiled
    return generator


CHAIN, TREE = SpeculationConfig(2), SpeculationConfig(2, 2)


def one_layer(mla: bool) -> CausalLM:
    """A second layer would be the same graph again."""
    torch.manual_seed(1)
    return CausalLM(model_config(mla, 1, aux_layers=(0, 0, 0)))


# Each case costs seconds: every attention kind, draft, shape and acceptance appears, not every product of them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mla", "kind", "config", "sampled"),
    [
        pytest.param(False, "eagle3", CHAIN, True, id="gqa-eagle3-chain-sampled"),
        pytest.param(False, "mtp", TREE, False, id="gqa-mtp-tree-greedy"),
        pytest.param(True, "standalone", CHAIN, False, id="mla-standalone-chain-greedy"),
        pytest.param(True, "eagle3", TREE, True, id="mla-eagle3-tree-sampled"),
    ],
)
def test_round_is_one_graph(mla, kind, config, sampled):
    torch._dynamo.reset()
    target = one_layer(mla)
    draft = make_draft(kind, target)
    sampling = [SamplingParams()] * 4
    if sampled:  # a greedy row among them
        sampling[0] = SamplingParams(1.0, top_k=30, top_p=0.9, seed=0)
        sampling[2:] = [SamplingParams(0.7, min_p=0.05, seed=1)] * 2
    expected = Generator(target, draft, config, **OPTIONS).generate(PROMPTS[:3], max_new_tokens=12, sampling=sampling[:3])
    generator = compiled_generator(target, draft, config, "aot_eager")
    counters.clear()
    assert generator.generate(PROMPTS[:3], max_new_tokens=12, sampling=sampling[:3]).tokens == expected.tokens
    assert counters["stats"]["unique_graphs"] == 1
    with torch._dynamo.config.patch(error_on_recompile=True):  # another batch in the bucket: other lengths, other prompts
        generator.generate(PROMPTS[3:7], max_new_tokens=9, sampling=sampling)
    assert counters["stats"]["unique_graphs"] == 1


def test_plain_round_is_one_graph():
    torch._dynamo.reset()
    target = one_layer(False)
    generator = compiled_generator(target, None, None, "aot_eager")
    counters.clear()
    expected = Generator(target, **OPTIONS).generate(PROMPTS[:3], max_new_tokens=12).tokens
    assert generator.generate(PROMPTS[:3], max_new_tokens=12).tokens == expected
    assert counters["stats"]["unique_graphs"] == 1


def test_more_rounds_than_dynamos_recompile_limit(monkeypatch):
    """Every bucket has a round of its own, and all share one `forward`, of which Dynamo compiles only so many versions."""
    torch._dynamo.reset()
    limit = 2
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda module, inputs, **options: module.forward)
    generator = Generator(one_layer(False), max_batch_size=2**limit, max_seq_len=16, page_size=4, compile=True)
    alone = Generator(generator.target, max_seq_len=16).generate([[1, 2]], max_new_tokens=3).tokens[0]
    with torch._dynamo.config.patch(recompile_limit=limit):
        for size in range(limit + 1):
            assert generator.generate([[1, 2]] * 2**size, max_new_tokens=3).tokens[-1] == alone
    assert len(generator.buckets.rounds) == limit + 1


class Branching(CausalLM):
    """A forward that decides something by its tokens' values, as some models of transformers do."""

    def forward(self, tokens, positions, attention):
        return super().forward(tokens + 1 if tokens.max() > 1000 else tokens, positions, attention)


def test_a_model_that_is_no_graph_says_what_to_do():
    torch._dynamo.reset()
    generator = Generator(Branching(model_config(False)), compile=True, **OPTIONS)
    message = r"generate: the models do not become one graph, .*: Data-dependent branching \(.*test_compile.py:\d+\); pass `"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            generator.generate([[1, 2]], max_new_tokens=3)
    assert Generator(generator.target, **OPTIONS).generate([[1, 2]], max_new_tokens=3).tokens


def has_cpp_compiler() -> bool:
    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


needs_cpp_compiler = pytest.mark.skipif(
    not has_cpp_compiler(), reason="Inductor needs a C++ compiler, which a fresh machine may lack"
)


@pytest.fixture
def without_inductor(monkeypatch):
    """What Dynamo captured runs as it is: seconds less, for tests of what `compile` returns."""
    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda module, inputs, **options: module.forward)


class Scaled(torch.nn.Linear):
    """A module with an attribute of its own, and a method beside `forward`."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor

    def twice(self) -> float:
        return 2 * self.factor


def test_a_compiled_module_is_a_module(without_inductor):
    """With `torch.compile`'s own for comparison."""
    module = Scaled()
    compiled, theirs = spec_ops.compile(module), torch.compile(module)
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
    assert compiled.state_dict().keys() == theirs.state_dict().keys()
    assert dict(compiled.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    assert next(iter(compiled.parameters())) is module.weight
    assert (compiled.factor, compiled.twice(), compiled.in_features) == (2.0, 4.0, 4)
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(1))
    x = torch.ones(2, 4)
    torch.testing.assert_close(compiled(x), module(x))
    assert len(seen) == 2
    compiled.factor = 3.0
    assert module.factor == 3.0
    torch.testing.assert_close(compiled(x), module(x))
    assert compiled.eval() is compiled
    assert not module.training
    assert compiled.to(torch.float64).weight.dtype == torch.float64
    copied = copy.deepcopy(compiled)
    assert copied.weight is not module.weight
    torch.testing.assert_close(copied(x.double()), module(x.double()))
    torch.nn.Sequential(compiled)(x.double())  # as a part of another
    for again in (spec_ops.compile(compiled), spec_ops.compile(theirs)):
        torch.testing.assert_close(again(x.double()), module(x.double()))


def test_as_a_decorator(without_inductor):
    @spec_ops.compile
    def bare(x):
        """Adds one."""
        return x + 1

    @spec_ops.compile(mode="default", fullgraph=False, passes={"split_argmax": False})
    def configured(x):
        torch._dynamo.graph_break()
        return x + 2

    assert (bare(torch.ones(1)), configured(torch.ones(1))) == (2, 3)
    assert (bare.__name__, bare.__doc__) == ("bare", "Adds one.")
    with pytest.raises(TypeError, match=r"compile: `fn` must be a function or a module, got int"):
        spec_ops.compile(3)


@pytest.mark.parametrize(("mode", "resets"), [("reduce-overhead", 1), ("default", 0)])
def test_resetting_dynamo_resets_cuda_graphs(mode, resets, without_inductor, monkeypatch):
    """As for plain `torch.compile`: what the CUDA graphs hold must not outlive the functions."""
    calls: list[int] = []
    monkeypatch.setattr("torch._inductor.cudagraph_trees.reset_cudagraph_trees", lambda: calls.append(1))
    compiled = spec_ops.compile(lambda x: x + 1, mode=mode)
    compiled(torch.ones(1))
    torch._dynamo.reset()
    assert len(calls) == resets


@needs_cpp_compiler
@pytest.mark.parametrize("whole", [False, True], ids=["function", "module"])
def test_what_was_compiled_dies_with_its_function(whole):
    """A `CompiledFxGraph` holds the CUDA graphs; Dynamo by itself keeps it until it is reset."""

    def alive() -> int:
        gc.collect()
        return sum(type(each) is CompiledFxGraph for each in gc.get_objects())

    gc.collect()
    gc.freeze()  # each count collects and looks through all objects, of which earlier tests left many
    before = alive()
    module = torch.nn.Linear(4, 4)
    functions = [spec_ops.compile(module if whole else module.forward) for _ in range(2)]
    spec_ops.compile(module)  # is never called
    with torch.no_grad():
        expected = [function(torch.ones(2, 4)) for function in functions]
        assert alive() == before + 2
        del functions[0]
        assert alive() == before + 1
        torch.testing.assert_close(functions[0](torch.ones(2, 4)), expected[1])  # the other goes on, compiled
        assert alive() == before + 1
    del functions[0]
    assert alive() == before


@pytest.mark.slow
@needs_cpp_compiler
def test_inductor_round_equals_eager(capsys):
    """The real thing, once (tens of seconds): sampled, so that the hash of the uniforms runs through the C++ code generator,
    and with penalties, whose corrections are scatters."""
    torch._dynamo.reset()
    target = one_layer(False)
    draft = make_draft("eagle3", target)
    sampling = SamplingParams(
        temperature=1.0,
        seed=11,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        logit_bias={5: 0.5},
        bad_words_ids=[[1, 2], [7]],
    )
    config = SpeculationConfig(1)
    expected = Generator(target, draft, config, **OPTIONS).generate(PROMPTS[:3], max_new_tokens=12, sampling=sampling).tokens
    generator = compiled_generator(target, draft, config, "inductor")
    with inductor_config.patch(post_grad_custom_post_pass=Uncached()):
        result, code = run_and_get_code(generator.generate, PROMPTS[:3], max_new_tokens=12, sampling=sampling, progress=True)
    assert result.tokens == expected
    assert "compiling the round for batch size 4" in "".join(capsys.readouterr())
    assert any("append_kv" in text for text in code)
    assert not [line for text in code for line in cache_copies(text, generator.target_cache.k0)]


@pytest.mark.slow
@needs_cpp_compiler
def test_a_cache_copy_would_be_seen():
    """The same check on code that does copy: a scatter that is not done in place."""
    torch._dynamo.reset()
    cache = torch.zeros(68, 4, 2, 16)

    def scatter(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return cache.index_put((torch.tensor([1, 2]),), rows)

    with inductor_config.patch(post_grad_custom_post_pass=Uncached()):
        _, code = run_and_get_code(torch.compile(scatter), cache, torch.ones(2, 4, 2, 16))
    assert [line for text in code for line in cache_copies(text, cache)]
