"""`attn_implementation="spec_ops"` with `SpecCache`: the tokens of eager attention, padding, rollback, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from spec_ops.integrations.transformers import SpecCache, register
from spec_ops.integrations.transformers.attention import NAME
from tests.helpers.tiny_transformers import CONFIGS, VOCAB, batch, eager_model, eager_tokens, make_model

# fp32; another order of sums, and for MLA another order of matrix products
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def real_logits(model, ids, mask, **kwargs) -> list[torch.Tensor]:
    """Logits of each row's real tokens, with positions counted over them."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **kwargs).logits
    return [row[keep.bool()] for row, keep in zip(logits, mask, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_gives_the_tokens_of_eager_attention(name):
    ids, mask = batch()
    model = make_model(name)
    cache = SpecCache(model, 3, 40, page_size=4)
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **arguments)
    assert out[:, 9:].tolist() == eager_tokens(name)
    assert cache.lengths.tolist() == (mask.sum(1) + 19).tolist()
    cache.reset()
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **arguments), out)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_padding_takes_no_slot(name, side):
    """Logits of the real tokens, then of a second chunk that is padded itself."""
    ids, mask = batch(side)
    model = make_model(name)
    cache = SpecCache(model, 3, 40, page_size=4)
    for pages in cache.pool.tensors():
        pages.fill_(torch.nan)  # nothing unwritten may be read
    got = real_logits(model, ids, mask, past_key_values=cache)
    assert cache.lengths.tolist() == mask.sum(1).tolist()
    more = torch.tensor([[11, 12, 13], [14, 15, 0], [0, 16, 17]])
    both = torch.cat([mask, (more > 0).long()], 1)
    positions = (both.cumsum(-1) - 1).clamp(min=0)[:, -3:]
    with torch.no_grad():
        second = model(input_ids=more, attention_mask=both, position_ids=positions, past_key_values=cache).logits
    for row in range(3):
        text = torch.cat([ids[row][mask[row] == 1], more[row][more[row] > 0]])[None]
        with torch.no_grad():
            want = eager_model(name)(input_ids=text).logits[0]
        torch.testing.assert_close(torch.cat([got[row], second[row][more[row] > 0]]), want, **TOLERANCE)


def test_pages_hold_latents_for_mla():
    """DeepSeek-V3 caches 16 + 8 numbers a token and layer, not 4 heads of 24 + 12."""
    assert SpecCache(make_model("deepseek_v3"), 1, 16).spec.kv_rows == (((24,),),) * 3
    assert SpecCache(make_model("qwen3"), 1, 16).spec.kv_rows == (((2, 16), (2, 16)),) * 3


def test_mla_that_is_not_a_plain_projection_caches_heads():
    """A bias keeps the layer out of the absorbed form; heads of unequal key and value size are cached instead."""
    models = [make_model("deepseek_v3"), make_model("deepseek_v3", "eager")]
    for model in models:
        for layer in model.model.layers:
            projection = layer.self_attn.kv_b_proj
            projection.bias = torch.nn.Parameter(torch.linspace(-1, 1, projection.out_features))
    ids, mask = batch()
    cache = SpecCache(models[0], 3, 40, page_size=4)
    assert cache.spec.kv_rows == (((4, 24), (4, 12)),) * 3
    outs = [
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **kwargs)
        for model, kwargs in zip(models, ({"past_key_values": cache}, {}), strict=True)
    ]
    assert torch.equal(*outs)


def test_rollback_per_row_and_crop():
    model, (ids, _) = make_model("mistral"), batch()
    cache = SpecCache(model, 3, 40, page_size=4)
    full = torch.ones_like(ids)
    first = real_logits(model, ids, full, past_key_values=cache)
    cache.rollback(torch.tensor([2, 0, 5]))
    assert cache.lengths.tolist() == [7, 9, 4]
    for row, forgotten in enumerate((2, 0, 5)):
        full[row, 9 - forgotten :] = 0
    more = torch.tensor([[11, 12]] * 3)
    both = torch.cat([full, torch.ones_like(more)], 1)
    positions = cache.lengths[:, None] + torch.arange(2)
    with torch.no_grad():
        got = model(input_ids=more, attention_mask=both, position_ids=positions, past_key_values=cache).logits
    for row in range(3):
        text = torch.cat([ids[row][full[row] == 1], more[row]])[None]
        with torch.no_grad():
            want = eager_model("mistral")(input_ids=text).logits[0, -2:]
        torch.testing.assert_close(got[row], want, **TOLERANCE)

    cache.reset()
    real_logits(model, ids, torch.ones_like(ids), past_key_values=cache)
    cache.crop(-4)
    assert int(cache.get_seq_length()) == 5
    assert cache.lengths.tolist() == [5, 5, 5]
    with torch.no_grad():
        again = model(input_ids=ids[:, 5:], past_key_values=cache).logits
    for row in range(3):
        torch.testing.assert_close(again[row], first[row][5:], **TOLERANCE)


def test_transformers_own_assisted_generation_rolls_back():
    """It crops the cache after every round."""
    ids = batch()[0][1:2]
    model = make_model("gpt_oss")
    cache = SpecCache(model, 1, 40, page_size=4)
    assistant = make_model("gpt_oss", "eager", layers=1)
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "assistant_model": assistant}
    out = model.generate(ids, past_key_values=cache, **arguments)
    assert out[0, 9:].tolist() == eager_tokens("gpt_oss")[1]


def test_rollback_reads_nothing_on_the_host():
    """Traced in one graph: what `torch.compile` cannot read, a CUDA graph need not wait for."""
    cache = SpecCache(make_model("llama"), 2, 16)
    cache.lengths.fill_(6)
    torch.compile(cache.rollback, backend="eager", fullgraph=True)(torch.tensor([1, 4]))
    assert cache.lengths.tolist() == [5, 2]


def test_generate_compiles_its_decoding_steps_once():
    """As `generate` does by itself on a GPU, since the cache is static: one graph for all lengths."""
    ids, mask = batch()
    model = make_model("gpt_oss")
    compile_config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
    compile_config._compile_all_devices = True
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "compile_config": compile_config}
    torch._dynamo.reset()
    counters.clear()
    out = model.generate(ids, attention_mask=mask, past_key_values=SpecCache(model, 3, 40, page_size=4), **arguments)
    assert out[:, 9:].tolist() == eager_tokens("gpt_oss")
    assert counters["stats"]["unique_graphs"] == 1


def test_register_is_idempotent():
    before = transformers.AttentionInterface._global_mapping[NAME]
    register()
    assert transformers.AttentionInterface._global_mapping[NAME] is before


def test_without_a_spec_cache_the_model_says_what_it_needs():
    model, (ids, _) = make_model("llama"), batch()
    with torch.no_grad():
        for kwargs in ({}, {"use_cache": False}, {"past_key_values": transformers.DynamicCache()}):
            with pytest.raises(RuntimeError, match="past_key_values=SpecCache"):
                model(input_ids=ids, **kwargs)


def test_one_forwards_cache_never_reaches_another():
    """Neither after a forward that ran (one layer: the last note is for layer 0 again), nor after one that failed anywhere."""
    model, other, ids = make_model("llama", layers=1), make_model("qwen3"), batch()[0]
    cache = SpecCache(model, 3, 40)

    def nothing_left() -> None:
        for reader in (other, model):
            with torch.no_grad(), pytest.raises(RuntimeError, match="past_key_values=SpecCache"):
                reader(input_ids=ids)

    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    nothing_left()
    with pytest.raises(ValueError, match="made for batch size 3, got 2"):
        model(input_ids=ids[:2], past_key_values=cache)
    nothing_left()
    cache.update(torch.zeros(3, 2, 9, 16), torch.zeros(3, 2, 9, 16), 2)  # and the forward failed before it attended
    nothing_left()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_cache_of_another_number_of_layers_is_refused(layers):
    """One of more would never count its tokens, one of fewer would run into its end in the midst of a forward."""
    ids = batch()[0]
    for cached, running in ((3, layers), (layers, 3)):
        cache = SpecCache(make_model("llama", layers=cached), 3, 40)
        with torch.no_grad(), pytest.raises(ValueError, match=f"made for a model of {cached} layers, got one of {running}"):
            make_model("llama", layers=running)(input_ids=ids, past_key_values=cache)
        assert cache.lengths.tolist() == [0, 0, 0]


def _refuse(message: str, ids=None, mask=None, name="llama", **kwargs) -> None:
    model = make_model(name)
    ids = batch()[0] if ids is None else ids
    cache = SpecCache(model, ids.shape[0], 12, page_size=4)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(input_ids=ids, attention_mask=mask, past_key_values=cache, **kwargs)


def test_masks_that_would_be_dropped_are_refused():
    ids = batch()[0]
    hole = torch.ones_like(ids)
    hole[1, 4] = 0
    _refuse("left or the right only", mask=hole)
    _refuse(r"must be of shape \[3, past \+ 9\], got \(3, 5\)", mask=torch.ones(3, 5))
    _refuse("ready-made 4-D masks are not supported", mask=torch.ones(3, 1, 9, 9, dtype=torch.bool).tril())
    _refuse("is not understood, got a tensor", position_bias=torch.zeros(1))
    _refuse("`output_attentions` must be False", output_attentions=True)
    _refuse("must fit max_seq_len=12", ids=torch.ones(1, 13, dtype=torch.long))


def test_masks_that_a_model_builds_of_its_own_are_refused():
    """Images in a prompt seen both ways, a prefix: transformers hands such masks to our mask function."""
    config = make_model("mistral").config
    arguments = {"config": config, "inputs_embeds": torch.zeros(1, 4, 0), "attention_mask": None, "past_key_values": None}
    extra = {
        "or_mask_function": lambda batch, head, query, key: query >= 0,
        "and_mask_function": lambda batch, head, query, key: query >= 0,
        "block_sequence_ids": torch.tensor([[0, 0, 1, 1]]),
    }
    for create in (create_causal_mask, create_sliding_window_causal_mask):
        assert create(**arguments) is None
        for name, value in extra.items():
            with pytest.raises(ValueError, match="masks must be causal"):
                create(**arguments, **{name: value})


def test_attention_that_the_ops_do_not_compute_is_refused():
    model, (ids, _) = make_model("llama"), batch()
    cache = SpecCache(model, 3, 12)
    attention = model.model.layers[0].self_attn
    attention.attention_dropout = 0.5
    with pytest.raises(ValueError, match=r"`dropout` must be 0 .*, got 0.5"):
        model.train()(input_ids=ids, past_key_values=cache)
    attention.is_causal = False
    with pytest.raises(ValueError, match="LlamaAttention is not causal"):
        model.eval()(input_ids=ids, past_key_values=cache)


def test_a_mask_that_hides_cached_tokens_is_refused():
    model, (ids, _) = make_model("llama"), batch()
    cache = SpecCache(model, 3, 12)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        for mask in (torch.ones(3, 1), torch.cat([torch.zeros(3, 2), torch.ones(3, 8)], 1)):
            with pytest.raises(ValueError, match="show every cached token"):
                model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)
        model(input_ids=ids[:, :1], attention_mask=torch.ones(3, 10), past_key_values=cache)
    assert cache.lengths.tolist() == [10, 10, 10]


def _tiny(config_class, **sizes):
    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = config_class(**{**common, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, **sizes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_model("llama", "eager"), 'attn_implementation="spec_ops".*got .eager'),
        (
            lambda: _tiny(transformers.MptConfig, d_model=32, n_heads=4, n_layers=2),
            "interface; MptForCausalLM does not",
        ),
        (lambda: make_model("llama").train(), "evaluation mode"),
        (
            lambda: _tiny(transformers.Qwen3NextConfig, layer_types=["linear_attention", "full_attention"]),
            "full or sliding .*'linear_",
        ),
        (lambda: _tiny(transformers.Llama4TextConfig, layer_types=["chunked_attention"] * 2), "full or sliding .*'chunked_"),
        (lambda: _tiny(transformers.GemmaConfig, is_causal=False, head_dim=8), "masks must be causal.*a mask function"),
    ],
    ids=["eager", "no interface", "training", "linear", "chunked", "bidirectional"],
)
def test_models_that_cannot_run_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        SpecCache(make(), 1, 16)


def test_a_window_that_the_attention_is_not_told_about_is_refused():
    """The mask alone says it here, and it would be dropped."""
    model = make_model("mistral")
    model.config.sliding_window = None
    SpecCache(model, 1, 16)
    model = make_model("llama")
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(
        ValueError, match="layer 1 of LlamaForCausalLM is sliding_attention, but the attention gets the window 0"
    ):
        SpecCache(model, 1, 16)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [((0, 16, 4), "batch_size"), ((1, 0, 4), "max_seq_len"), ((1, 16, 129), "page_size")],
)
def test_bad_cache_sizes(sizes, named):
    with pytest.raises(ValueError, match=named):
        SpecCache(make_model("llama"), *sizes[:2], page_size=sizes[2])


def test_bad_rollbacks_and_beams():
    cache = SpecCache(make_model("llama"), 2, 16)
    for count in (torch.tensor([1]), torch.tensor([0.0, 0.0])):
        with pytest.raises(ValueError, match=r"`count` must be integers of shape \[2\]"):
            cache.rollback(count)
    with pytest.raises(ValueError, match=r"`count` must be in \[0, length\]"):
        cache.rollback(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="`tokens_to_remove` must be negative"):
        cache.crop(1)
    with pytest.raises(NotImplementedError, match="beam search"):
        cache.reorder_cache(torch.tensor([0, 0]))


@pytest.mark.gpu
def test_rollback_on_cuda_does_not_sync():
    cache = SpecCache(make_model("llama").cuda(), 2, 16)
    cache.lengths.fill_(6)
    count = torch.tensor([1, 4], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.rollback(count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == [5, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_generate_on_cuda_where_transformers_compiles_the_decoding_steps(name):
    ids, mask = (x.cuda() for x in batch())
    model = make_model(name).cuda()
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    out = model.generate(ids, attention_mask=mask, past_key_values=SpecCache(model, 3, 40), **arguments)
    eager = make_model(name, "eager").cuda().generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(out, eager)
