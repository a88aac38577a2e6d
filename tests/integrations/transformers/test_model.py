"""A transformers model as a target: it gets back what was changed, hooks run or are refused, and models that the ops cannot
compute are refused."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, TransformersModel, speculative_generate
from spec_ops.integrations.transformers.attention import NoUpdate, attention_forward
from spec_ops.integrations.transformers.probe import extend_from_start
from spec_ops.models import Eagle3Draft, ModelConfig, PagedKVCache
from spec_ops.models.config import LayerAttention
from tests.helpers.tiny_transformers import CONFIGS, VOCAB, batch, eager_tokens, make_model

NEW = {"max_new_tokens": 20, "eos_token_id": (), "return_dict_in_generate": True}
SIZES = {"max_batch_size": 3, "max_seq_len": 40, "page_size": 4}


@pytest.fixture
def dynamo():
    """Its limit of recompilations counts those of all tests in a process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def own_tokens(model) -> list[list[int]]:
    ids, mask = batch()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    return out[:, ids.shape[1] :].tolist()


def test_a_cache_goes_by_the_name_that_the_model_has_for_it(monkeypatch):
    """`cache` from transformers 5.24 on, where a decorator still takes `past_key_values`; rounds call what it decorates."""
    expected = eager_tokens("llama")

    def renamed(own):
        def forward(self, *, cache=None, **kwargs):
            assert "past_key_values" not in kwargs
            return own(self, past_key_values=cache, **kwargs)

        @functools.wraps(forward)
        def either(self, **kwargs):
            if "past_key_values" in kwargs:
                kwargs["cache"] = kwargs.pop("past_key_values")
            return forward(self, **kwargs)

        return either

    for part in (transformers.LlamaForCausalLM, transformers.LlamaModel):
        monkeypatch.setattr(part, "forward", renamed(part.forward))
    ids, mask = batch()
    with TransformersGenerator(make_model("llama"), make_model("llama", layers=1), **SIZES) as generator:
        assert generator.generate(ids, mask, **NEW).tokens == expected


def test_leaving_the_generator_gives_the_models_back():
    ids, mask = batch()
    target, draft = make_model("llama", "sdpa").train(), make_model("llama", "eager", layers=1)
    with TransformersGenerator(target, draft, **SIZES) as generator:
        assert generator.generate(ids, mask, **NEW).tokens == eager_tokens("llama")
        assert not target.training
    assert target.config._attn_implementation == "sdpa"
    assert draft.config._attn_implementation == "eager"
    assert target.training
    assert target.model.layers[0].training
    assert not draft.training
    assert own_tokens(target.eval()) == eager_tokens("llama")
    generator.close()  # once more does nothing
    with pytest.raises(ValueError, match=r"`target`: was given back by `close\(\)`.*make a new generator"):
        generator.generate(ids, mask, **NEW)


def test_a_generator_that_cannot_be_made_gives_the_models_back():
    target = make_model("llama", "sdpa")
    small = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**target.config.to_dict(), "vocab_size": VOCAB - 1}))
    with pytest.raises(ValueError, match="must know the target's"):
        TransformersGenerator(target, small)
    with pytest.raises(ValueError, match="`aux_layers`"):
        TransformersModel(target, aux_layers=(9,))
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("first", [0, 1])
def test_a_model_of_two_generators_is_given_back_by_the_last(first):
    ids, mask = batch()
    model = make_model("llama", "sdpa").train()
    generators = [TransformersGenerator(model, **SIZES) for _ in range(2)]
    generators[first].close()
    generators[first].close()  # once more does nothing
    assert generators[1 - first].generate(ids, mask, **NEW).tokens == eager_tokens("llama")
    generators[1 - first].close()
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert own_tokens(model.eval()) == eager_tokens("llama")
    with TransformersGenerator(model, **SIZES) as again:
        assert again.generate(ids, mask, **NEW).tokens == eager_tokens("llama")
    assert model.config._attn_implementation == "sdpa"


def _other_layers(model):
    model.config.layer_types = ["chunked_attention"] * 3
    return model


def _hooked(model):
    model.register_forward_hook(lambda *_: None)
    return model


def test_a_generator_that_is_dropped_holds_nothing():
    """As where a cell of a notebook runs twice."""
    model = make_model("llama", "sdpa")
    generator = TransformersGenerator(model, **SIZES)
    generator = TransformersGenerator(model, **SIZES)
    gc.collect()
    generator.close()
    assert model.config._attn_implementation == "sdpa"


def test_a_generator_that_is_dropped_keeps_no_model_alive():
    model = make_model("llama", "sdpa")
    generators = [TransformersGenerator(model, **SIZES) for _ in range(2)]
    generators[0].close()
    alive = weakref.ref(model)
    del model, generators
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: "gpt2", "must be a causal language model of transformers, got str"),
        (lambda model: model.model, "must be a causal language model of transformers, got LlamaModel"),
        (_other_layers, ": layers must be of full or sliding attention"),
        (_hooked, r" \(LlamaForCausalLM\) must not have forward hooks"),
    ],
    ids=["text", "no head", "layers", "hook"],
)
@pytest.mark.parametrize("name", ["target", "draft"])
def test_messages_name_the_argument_that_the_model_came_in(name, change, message):
    models = {"target": make_model("llama"), "draft": make_model("llama", layers=3)}
    models[name] = change(models[name])
    if models["draft"] == "gpt2":
        message = "must be a model, a PromptLookup, 'prompt-lookup' or None, got 'gpt2'"
    for make in (
        TransformersGenerator,
        lambda **models: speculative_generate(**models, input_ids=batch()[0], max_new_tokens=2),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^TransformersGenerator: `{name}`\s?{message}"):
            make(**models)


def test_an_attention_module_without_an_index_attends_without_a_cache():
    """Modules around the decoder layers, such as poolers, may go through the interface too."""
    module = torch.nn.Module()
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NoUpdate, match="Module attends without a `SpecCache`"):
        attention_forward(module, query, query, query, None)


def test_threads_may_share_a_target():
    """As generators of two threads share what `load_eagle3` returned: a forward runs inside another one here."""
    model = make_model("llama")
    target = TransformersModel(model, aux_layers=(0, 2, 3))
    texts = torch.tensor([[5, 6, 7], [8, 9, 10]])

    @torch.no_grad()
    def features(text: torch.Tensor) -> torch.Tensor:
        step = extend_from_start(PagedKVCache(target.config, 1, 3), 3, backend="reference")
        return target(text, torch.arange(3), step).aux

    want, got = [features(text) for text in texts], {}

    def meanwhile(*_) -> None:
        hook.remove()
        thread = threading.Thread(target=lambda: got.update({1: features(texts[1])}))
        thread.start()
        thread.join()

    hook = model.model.layers[1].register_forward_pre_hook(meanwhile)
    got[0] = features(texts[0])
    for i in (0, 1):
        torch.testing.assert_close(got[i], want[i], rtol=0, atol=0)


def test_generate_meanwhile_names_the_way_back():
    model = make_model("llama", "sdpa")
    generator = TransformersGenerator(model, **SIZES)
    with pytest.raises(RuntimeError, match=r'SpecCache.*set_attn_implementation\("sdpa"\).*close\(\)'):
        own_tokens(model)
    generator.close()
    assert own_tokens(model) == eager_tokens("llama")


def test_another_attention_while_a_generator_is_kept_is_refused():
    ids, mask = batch()
    for switched in (0, 1):
        models = [make_model("llama"), make_model("llama", layers=1)]
        generator = TransformersGenerator(*models, **SIZES)
        models[switched].set_attn_implementation("eager")
        with pytest.raises(ValueError, match=r"must stay 'spec_ops', got 'eager'.*set_attn_implementation\(\"spec_ops\"\)"):
            generator.generate(ids, mask, **NEW)
        models[switched].set_attn_implementation("spec_ops")
        assert generator.generate(ids, mask, **NEW).tokens == eager_tokens("llama")


def test_one_model_as_target_and_draft_is_given_back():
    ids, mask = batch()
    model = make_model("llama", "sdpa")
    out = speculative_generate(model, model, ids, mask, **NEW)
    assert out.tokens == eager_tokens("llama")
    assert model.config._attn_implementation == "sdpa"


def collapsed_embedding(model) -> None:
    """Token 0, which is padding, has the embedding zero, as published models have."""
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_the_probe_looks_at_tokens_that_show_something(name):
    """A forward that the ops know nothing of, on a model whose token 0 embeds to zero."""
    model = make_model(name)
    collapsed_embedding(model)
    projection = model.model.layers[1].self_attn
    if name == "deepseek_v3":
        projection = projection.kv_b_proj
        plain = projection.forward
        projection.forward = lambda x: plain(x).roll(1, -1)  # other weights than the absorbed form reads
        cache = TransformersModel(model).spec.kv_rows
        assert [len(rows) for rows in cache] == [1, 2, 1]  # heads are cached where latents would be wrong
        return
    attend = projection.o_proj.forward
    projection.o_proj.forward = lambda x: attend(x + x.mean(1, keepdim=True))  # reads other tokens than attention shows it
    with pytest.raises(ValueError, match="gives other logits with these ops than with eager attention"):
        TransformersModel(model)
    assert model.config._attn_implementation == "spec_ops"


def test_a_model_with_several_end_tokens():
    """Llama 3's instruction models have a list in their configuration."""
    model = make_model("llama")
    model.config.eos_token_id = [1, 2]
    assert TransformersModel(model).spec.kv_rows


def test_a_model_without_weights_is_refused():
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    with pytest.raises(ValueError, match="embeddings of LlamaForCausalLM are zero"):
        TransformersModel(model)
    with pytest.raises(ValueError, match="`model` must have its weights loaded, got LlamaForCausalLM on the device meta"):
        TransformersModel(model.to("meta"))


def _roll_output(_module, _args, output):
    hidden = output[0] if isinstance(output, tuple) else output
    return hidden.roll(1, -1)


def _instance_forward(module) -> None:
    """As accelerate installs its hooks."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: _roll_output(module, args, forward(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["model.layers.1", "model.layers.2.mlp", "lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("kind", ["hook", "forward"])
def test_hooks_and_forwards_inside_the_model_run(where, kind):
    """Installed before and after the generator is made; with and without watched layers."""
    ids, mask = batch()
    tokens = []
    for late in (False, True):
        aux_layers = (1, 2, 3) if late == (kind == "hook") else ()
        model = make_model("llama", "eager")
        module = model.get_submodule(where)

        def install(module=module):
            module.register_forward_hook(_roll_output) if kind == "hook" else _instance_forward(module)

        if not late:
            install()
        generator = TransformersGenerator(TransformersModel(model, aux_layers), **SIZES)
        if late:
            install()
        tokens.append(generator.generate(ids, mask, **NEW).tokens)
        generator.target.close()
        tokens.append(own_tokens(model))
    assert all(each == tokens[0] for each in tokens)
    assert tokens[0] != eager_tokens("llama")


def test_a_hook_on_the_decoder_runs():
    ids, mask = batch()
    model = make_model("llama", "eager")
    seen = []
    model.model.register_forward_hook(lambda _module, _args, output: seen.append(output.last_hidden_state.shape))
    generator = TransformersGenerator(model, **SIZES)
    seen.clear()
    assert generator.generate(ids, mask, **NEW).tokens == eager_tokens("llama")
    assert seen[:2] == [(1, 22, 32), (3, 1, 32)]


def test_what_would_be_passed_over_is_refused():
    """The whole model's hooks, and forwards of its own and of the decoder: installed before, or while a generator is kept."""
    ids, mask = batch()
    changes = {
        r"`target` \(LlamaForCausalLM\) must not have forward hooks": lambda m: m.register_forward_hook(_roll_output),
        r"`target` \(LlamaForCausalLM\) must not have forward hooks.*": lambda m: m.register_forward_pre_hook(lambda *_: None),
        r"`target` \(LlamaForCausalLM\) must not have a `forward` of its own": lambda m: setattr(m, "forward", m.forward),
        r"`target.model` \(LlamaModel\) must not have a `forward` of its own.*accelerate": lambda m: setattr(
            m.model, "forward", m.model.forward
        ),
    }
    for message, change in changes.items():
        model = make_model("llama")
        generator = TransformersGenerator(model, **SIZES)
        change(model)
        with pytest.raises(ValueError, match=message):
            generator.generate(ids, mask, **NEW)
        with pytest.raises(ValueError, match=message):
            TransformersGenerator(model, **SIZES)


def test_constructions_leave_nothing_on_the_model():
    model = make_model("llama")
    for _ in range(3):
        TransformersModel(model, aux_layers=(0, 1, 3))
    for name, module in model.named_modules():
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
        assert "forward" not in vars(module), name


@pytest.mark.usefixtures("dynamo")
def test_watched_layers_are_one_graph():
    ids, mask = batch()
    model = make_model("qwen3")
    target = TransformersModel(model, aux_layers=(0, 2, 3))
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    generator = TransformersGenerator(target, Eagle3Draft(ModelConfig(**sizes, num_layers=1), target, None), **SIZES)
    inner, counter = generator.generator, CompileCounter()
    inner.buckets.rounds[3, False, None] = torch.compile(inner.round(3), backend=counter, fullgraph=True, dynamic=False)
    assert generator.generate(ids, mask, **NEW).tokens == eager_tokens("qwen3")
    assert counter.frame_count == 1


ORIGINAL = 24
LONG_ROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 4.0, 9.0, 16.0]}
MOVING_ROPE = {
    "longrope": (
        transformers.Phi3Config,
        {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **LONG_ROPE},
        {"max_position_embeddings": 4 * ORIGINAL, "original_max_position_embeddings": ORIGINAL},
    ),
    "dynamic": (transformers.LlamaConfig, {"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": ORIGINAL}),
}


def _moving(kind: str, attention: str):
    config_class, rope, sizes = MOVING_ROPE[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, **sizes}
    config = config_class(vocab_size=VOCAB, rope_parameters={"rope_theta": 1e4, **rope}, pad_token_id=0, **sizes)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("kind", MOVING_ROPE)
@pytest.mark.parametrize("config", [None, SpeculationConfig(3), SpeculationConfig(3, 2, 6)], ids=["plain", "chain", "tree"])
def test_rope_by_the_longest_position(kind, config):
    """Up to the original length the angles are constant: each row gets its own tokens to the last one, though drafts reach
    past the end. Longer requests are refused by the setting's name."""
    ids, mask = batch()
    own, model = _moving(kind, "eager"), _moving(kind, "eager")
    limits = [ORIGINAL + 1 - int(length) for length in mask.sum(1)]
    want = []
    for row, keep, new in zip(ids, mask.bool(), limits, strict=True):
        prompt = row[keep][None]
        want.append(own.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :].tolist())
    long = torch.randint(3, VOCAB, (1, ORIGINAL + 9))
    own.generate(long, max_new_tokens=2, do_sample=False)  # the model's own angles may be those of a long sequence
    model.generate(long, max_new_tokens=2, do_sample=False)
    generator = TransformersGenerator(model, config and model, config, max_batch_size=3, max_seq_len=64, page_size=4)
    new = {"eos_token_id": (), "return_dict_in_generate": True}
    assert generator.generate(ids, mask, max_new_tokens=limits, **new).tokens == want
    with pytest.raises(ValueError, match=rf'at most {ORIGINAL + 1} tokens.*rope_type="{kind}".*longest position'):
        generator.generate(ids, mask, max_new_tokens=[*limits[:2], limits[2] + 1], **new)
    generator.close()
    for each in (own, model):
        each.generate(ids[:1], max_new_tokens=1)  # transformers keeps the angles of the longest sequence since a short one
    assert torch.equal(model.generate(long, max_new_tokens=5), own.generate(long, max_new_tokens=5))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("kind", MOVING_ROPE)
def test_rope_by_the_longest_position_needs_no_look_at_it(kind):
    """The round is one graph: nothing is read on the host."""
    ids, mask = batch()
    model = _moving(kind, "eager")
    generator = TransformersGenerator(model, model, SpeculationConfig(1), max_batch_size=3, max_seq_len=25, page_size=4)
    eager = generator.generate(ids, mask, max_new_tokens=14, eos_token_id=())
    inner, counter = generator.generator, CompileCounter()
    inner.buckets.rounds[3, False, None] = torch.compile(inner.round(3), backend=counter, fullgraph=True, dynamic=False)
    assert torch.equal(generator.generate(ids, mask, max_new_tokens=14, eos_token_id=()), eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 2, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["CTRL", "GPT2", "OPT"])
def test_a_table_of_positions_is_used_to_its_end(family, config):
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48}
    if family == "OPT":
        sizes = {
            "max_position_embeddings": 16,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
        }
        sizes |= {"word_embed_proj_dim": 32}
    torch.manual_seed(5)
    made = getattr(transformers, f"{family}Config")(vocab_size=VOCAB, pad_token_id=0, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    prompt = torch.randint(3, VOCAB, (2, 9))
    want = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    generator = TransformersGenerator(model, model, config, max_batch_size=2, max_seq_len=64, page_size=4)
    assert torch.equal(generator.generate(prompt, max_new_tokens=8, eos_token_id=()), want)
    with pytest.raises(ValueError, match="at most 17 tokens: the target has 16 positions; its table of position embeddings"):
        generator.generate(prompt, max_new_tokens=9, eos_token_id=())


def test_a_draft_may_have_parameters_of_other_types():
    """A quantized matrix, a float32 router: what the target may have, the draft may."""

    class Quantized(torch.nn.Module):
        def __init__(self, plain: torch.nn.Linear) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(plain.weight.abs().amax().float() / 127)
            self.weight = torch.nn.Parameter((plain.weight / self.scale).round().to(torch.int8), requires_grad=False)
            # In such a model most numbers are of 8 bits.
            self.others = torch.nn.Parameter(torch.zeros(1 << 16, dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            return torch.nn.functional.linear(x, (self.weight * self.scale).to(x.dtype))

    ids, mask = batch()
    target, draft = make_model("llama").bfloat16(), make_model("llama", layers=1).bfloat16()
    draft.model.layers[0].mlp.up_proj = Quantized(draft.model.layers[0].mlp.up_proj)
    plain = TransformersGenerator(target, **SIZES).generate(ids, mask, **NEW)
    result = TransformersGenerator(target, draft, **SIZES).generate(ids, mask, **NEW)
    assert result.tokens == plain.tokens
    with pytest.raises(ValueError, match=r"`draft` must be torch.bfloat16, as the target is, got torch.float32"):
        TransformersGenerator(target, make_model("llama", layers=1), **SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_rounding_is_no_reason_to_refuse(name, dtype):
    assert TransformersModel(make_model(name).to(dtype)).embed.weight.dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*MOVING_ROPE, "table"])
def test_the_end_of_the_positions_on_cuda(kind):
    """Drafts past it are neither an assertion on the device nor a look at the host: one CUDA graph."""
    from torch._dynamo.utils import counters

    if kind == "table":
        sizes = {"n_positions": ORIGINAL, "n_embd": 32, "n_layer": 2, "n_head": 4}
        torch.manual_seed(5)
        config = transformers.GPT2Config(vocab_size=VOCAB, pad_token_id=0, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    else:
        model = _moving(kind, "eager")
    model, prompt = model.cuda(), batch()[0][1:2].cuda()
    new = ORIGINAL + 1 - prompt.shape[1]
    want = model.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None)
    counters.clear()
    with TransformersGenerator(model, model, SpeculationConfig(3), max_batch_size=1, max_seq_len=64) as generator:
        for _ in range(2):
            assert torch.equal(generator.generate(prompt, max_new_tokens=new, eos_token_id=()), want)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


def test_what_layers_attend_with():
    """By which kernels are chosen: as the layers' calls have it, not the configuration."""
    gemma, gpt_oss, deepseek = (TransformersModel(make_model(name)).config for name in ("gemma2", "gpt_oss", "deepseek_v3"))
    assert [layer.window for layer in gemma.attention] == [True, False, True]
    assert all(layer.softcap and not layer.sinks for layer in gemma.attention)
    assert all(layer.sinks and not layer.softcap for layer in gpt_oss.attention)
    for config in (gemma, gpt_oss):
        assert all(layer.v_head_dim == rows[1][1] for layer, rows in zip(config.attention, config.kv_rows, strict=True))
    own = make_model("deepseek_v3").config
    assert deepseek.attention == (LayerAttention(own.num_attention_heads, own.kv_lora_rank),) * 3
