"""`speculative_generate`: the tokens of `generate` with eager attention, arguments, the compiled round, the command line."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter
from typer.testing import CliRunner

from spec_ops import cli
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, TransformersModel, speculative_generate
from spec_ops.integrations.transformers.loading import TextTokenizer
from spec_ops.models import Eagle3Draft, ModelConfig, MTPDraft
from tests.decoding.test_refill import LateReader
from tests.helpers.inductor_unbuilt import unbuilt
from tests.helpers.pairs import pairwise
from tests.helpers.tiny_transformers import (
    CHARACTERS,
    CONFIGS,
    EOS,
    PAD,
    VOCAB,
    batch,
    eager_model,
    eager_tokens,
    make_model,
    tokenizer,
)
from tests.passes.test_compile import has_cpp_compiler

CHAIN, TREE = SpeculationConfig(3), SpeculationConfig(3, 2, 6)
SHAPES = pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
NEW = {"max_new_tokens": 20, "eos_token_id": (), "return_dict_in_generate": True}
SIZES = {"max_batch_size": 3, "max_seq_len": 40, "page_size": 4}


@pytest.mark.parametrize("drafts", ["model", "prompt-lookup"])
def test_lengths_that_the_generator_chooses(drafts):
    """With the costs given it goes up to the longest chains for a draft that is the target, and the text stays."""
    target = make_model("llama")
    draft = make_model("llama") if drafts == "model" else drafts
    ids, mask = batch()
    with TransformersGenerator(
        target, draft, SpeculationConfig.auto(draft_cost=0.05), max_batch_size=3, max_seq_len=40
    ) as generator:
        result = generator.generate(ids, mask, max_new_tokens=20, eos_token_id=(), return_dict_in_generate=True)
    assert result.tokens == eager_tokens("llama")
    assert sum(result.stats.lengths.values()) == result.stats.rounds
    if drafts == "model":
        assert max(result.stats.lengths) == 7


@pairwise(name=CONFIGS, config=[CHAIN, TREE], layers=[1, 2])
def test_greedy_tokens_equal_eager_generate(name, config, layers):
    ids, mask = batch()
    generator = TransformersGenerator(make_model(name), make_model(name, layers=layers), config, **SIZES)
    result = generator.generate(ids, mask, **NEW)
    assert result.tokens == eager_tokens(name)
    assert torch.equal(result.sequences[:, :9], ids)
    assert result.sequences[:, 9:].tolist() == result.tokens
    assert result.stats.accept_length > 1.3  # drafts were accepted, and some were not
    assert result.stats.accept_length < config.path_len


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_plain_decoding(name):
    ids, mask = batch("right")
    result = TransformersGenerator(make_model(name), **SIZES).generate(ids, mask, **NEW)
    assert result.tokens == eager_tokens(name)
    assert result.stats.accept_length == 1


def _heads(target: TransformersModel) -> dict[str, torch.nn.Module]:
    torch.manual_seed(4)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return {
        "eagle3": Eagle3Draft(ModelConfig(**sizes, num_layers=1), target, torch.arange(0, VOCAB, 2)),
        "eagle3 of two layers": Eagle3Draft(ModelConfig(**sizes, num_layers=2), target, None, norm_before_residual=True),
        "mtp": MTPDraft(ModelConfig(**sizes, num_layers=1), target),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@SHAPES
def test_our_heads_on_transformers_targets(name, config):
    ids, mask = batch()
    target = TransformersModel(make_model(name), aux_layers=(0, 2, 3))
    for draft in _heads(target).values():
        assert TransformersGenerator(target, draft, config, **SIZES).generate(ids, mask, **NEW).tokens == eager_tokens(name)


def test_aux_layers_are_layer_inputs_and_the_last_output():
    model = make_model("qwen3")
    target = TransformersModel(model, aux_layers=(0, 2, 3))
    seen = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    generator = TransformersGenerator(target, _heads(target)["eagle3"], **SIZES)
    features = []
    encode, generator.generator.draft.encode = generator.generator.draft.encode, lambda out: features.append(out) or encode(out)
    ids = batch()[0][1:2]
    generator.generate(ids, max_new_tokens=1)
    with torch.no_grad():
        states = eager_model("qwen3")(input_ids=ids, output_hidden_states=True).hidden_states
    want = torch.cat([states[0][0], states[2][0], seen[0][0]], -1)
    torch.testing.assert_close(features[0].aux, want, rtol=1e-4, atol=1e-4)  # fp32, another order of sums
    torch.testing.assert_close(features[0].hidden, states[3][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_logits_are_the_models_own(name):
    """With what its source does after the LM head: a soft cap moves no argmax, but every probability."""
    ids = batch()[0][1:2]
    with torch.no_grad():
        want = eager_model(name)(input_ids=ids, output_hidden_states=True)
        got = TransformersModel(make_model(name)).logits(want.hidden_states[-1][0])
    torch.testing.assert_close(got, want.logits[0], rtol=1e-4, atol=1e-4)  # fp32, another order of sums


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "mistral"])
def test_the_round_is_one_graph_and_never_recompiles(name):
    """Traced by Dynamo with `fullgraph=True`; also when another model is made in between: transformers keeps count of them.
    Plain rounds of other models: `test_tokens_stay_those_of_generate`."""
    torch._dynamo.reset()  # rounds of earlier tests count towards the limit of their code object
    ids, mask = batch()
    config = SpeculationConfig(2, 2, 5) if name == "mistral" else SpeculationConfig(1)
    generator = TransformersGenerator(make_model(name, layers=2), make_model(name, layers=1), config, **SIZES)
    inner, counter = generator.generator, CompileCounter()
    inner.buckets.rounds[3, False, None] = torch.compile(inner.round(3), backend=counter, fullgraph=True, dynamic=False)
    first = generator.generate(ids[:, 2:], mask[:, 2:], max_new_tokens=2, eos_token_id=())
    assert first.shape == (3, 9)
    assert counter.frame_count == 1
    other = make_model("llama")
    assert generator.generate(ids, mask, **NEW).tokens == eager_tokens(name, layers=2)
    assert counter.frame_count == 1, other


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor asks which C++ compiler there is")
def test_the_round_compiles_with_our_passes(capsys):
    """Inductor's passes too, with a step of each kind, and the message that says what takes so long."""
    ids, mask = batch()
    token = eager_tokens("llama", layers=2)[0][0]
    arguments = {
        "max_new_tokens": 12,
        "eos_token_id": None,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2,
        "sequence_bias": {(token,): -3.0, (int(ids[1, -1]), 40): 9.0},
        "bad_words_ids": [[token, 5], [6]],
        "begin_suppress_tokens": [token],
    }
    models = make_model("llama", layers=2), make_model("llama", layers=1)
    options = {"config": SpeculationConfig(1), "compile": True, "progress": True, **arguments}
    with unbuilt(lowered=False):
        out = speculative_generate(*models, ids, mask, **options)
    assert "compiling the round for batch size 3" in capsys.readouterr().err
    eager = make_model("llama", "eager", layers=2)
    for row, keep, got in zip(ids, mask.bool(), out, strict=True):
        want = eager.generate(row[keep][None], do_sample=False, pad_token_id=PAD, **arguments)
        assert torch.equal(got[9:], want[0, int(keep.sum()) :])


def test_end_tokens_limits_and_padding():
    ids, mask = batch()
    full = eager_tokens("llama")
    ends = [full[0][6], full[1][9]]
    result = TransformersGenerator(make_model("llama"), make_model("llama", layers=1), **SIZES).generate(
        ids, mask, max_new_tokens=[20, 15, 4], eos_token_id=ends, return_dict_in_generate=True
    )
    for row, limit in enumerate((20, 15, 4)):
        want = full[row][:limit]
        first = min([want.index(end) for end in ends if end in want], default=limit - 1)
        assert result.tokens[row] == want[: first + 1]
        assert result.sequences[row, 9:].tolist() == result.tokens[row] + [PAD] * (result.sequences.shape[1] - 9 - first - 1)


def test_defaults_come_from_the_generation_config():
    ids, mask = batch()
    model, full = make_model("llama"), eager_tokens("llama")
    model.generation_config.eos_token_id = [full[0][3], EOS]
    eager = make_model("llama", "eager")
    eager.generation_config = model.generation_config
    for pad in (None, 7):  # None: the first end token
        model.generation_config.pad_token_id = pad
        out = speculative_generate(model, make_model("llama", layers=1), ids, mask, max_new_tokens=20)
        assert torch.equal(out, eager.generate(ids, attention_mask=mask, max_new_tokens=20))
    model.generation_config.do_sample = True
    model.generation_config.top_k = 1
    out = speculative_generate(model, make_model("llama", layers=1), ids, mask, max_new_tokens=20)
    assert torch.equal(out, eager_with_end(full, model.generation_config.eos_token_id, ids))


def eager_with_end(full, ends, ids) -> torch.Tensor:
    rows = [row[: min([row.index(e) for e in ends if e in row], default=len(row) - 1) + 1] for row in full]
    longest = max(map(len, rows))
    return torch.cat([ids, torch.tensor([row + [7] * (longest - len(row)) for row in rows])], 1)


def test_the_mask_is_inferred_from_padding_as_generate_does():
    ids, mask = batch()
    draft = make_model("llama", layers=1)
    out = speculative_generate(make_model("llama"), draft, ids, max_new_tokens=6, eos_token_id=())
    assert torch.equal(out, speculative_generate(make_model("llama"), draft, ids, mask, max_new_tokens=6, eos_token_id=()))


@SHAPES
def test_stop_strings_as_generate_has_them(config):
    ids, mask = batch()
    full = eager_tokens("llama")
    texts = [tokenizer().decode(row) for row in full]
    stops = [texts[0][4:7], texts[1][8:10]]
    out = speculative_generate(
        make_model("llama"),
        make_model("llama", layers=1),
        ids,
        mask,
        config=config,
        max_new_tokens=20,
        stop_strings=stops,
        tokenizer=tokenizer(),
    )
    arguments = {"max_new_tokens": 20, "do_sample": False, "stop_strings": stops}
    eager = eager_model("llama").generate(ids, attention_mask=mask, tokenizer=tokenizer(), **arguments)
    assert torch.equal(out, eager)
    assert any(PAD in row[-3:] for row in out.tolist())  # some row really stopped early


@pytest.mark.parametrize("late", [False, True])
def test_a_stopped_request_gains_nothing_more(monkeypatch, late):
    if late:
        monkeypatch.setattr(sys.modules[Generator.__module__], "OutputReader", LateReader)
    ids, mask = batch()
    generator = TransformersGenerator(make_model("llama"), make_model("llama", layers=1), **SIZES).generator
    prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    seen = []

    def stop_when(request: int, tokens: list[int], count: int) -> int | None:
        seen.append((request, len(tokens), count))
        return max(0, 5 - (len(tokens) - count)) if request == 1 and len(tokens) >= 5 else None

    full = eager_tokens("llama")
    assert generator.generate(prompts, max_new_tokens=20, stop_when=stop_when).tokens == [full[0], full[1][:5], full[2]]
    for request in range(3):
        lengths = [(length, count) for r, length, count in seen if r == request]
        assert [length for length, _ in lengths] == [sum(c for _, c in lengths[: i + 1]) for i in range(len(lengths))]
    assert sum(r == 1 and length >= 5 for r, length, _ in seen) == 1  # it is not asked again
    assert int(generator.buckets.state(3).committed_lens[1]) < 9 + 14  # and its rounds have ended on the device too


class _Streamer(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.chunks, self.ended = [], 0

    def put(self, value):
        self.chunks.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def test_streamer():
    ids = batch()[0][1:2]
    generator = TransformersGenerator(make_model("llama"), make_model("llama", layers=1), **SIZES)
    streamer = _Streamer()
    result = generator.generate(ids, streamer=streamer, **NEW)
    assert streamer.chunks[0] == ids[0].tolist()
    assert [token for chunk in streamer.chunks[1:] for token in chunk] == result.tokens[0] == eager_tokens("llama")[1]
    assert len(streamer.chunks) - 1 == result.stats.rounds + 1  # the prefill's token, then round by round
    assert streamer.ended == 1
    with pytest.raises(ValueError, match="`streamer` needs batch size 1, got 3"):
        generator.generate(*batch(), streamer=_Streamer())


@SHAPES
def test_sampling_repeats_by_seed_and_top_k_1_is_greedy(config):
    ids, mask = batch()
    generator = TransformersGenerator(make_model("qwen3"), make_model("qwen3", layers=1), config, **SIZES)

    def run(**arguments):
        return generator.generate(ids, mask, do_sample=True, **{**NEW, "max_new_tokens": 10, **arguments}).tokens

    hot, usual = run(seed=1, temperature=1.5), run(seed=1)
    assert hot == run(seed=1, temperature=1.5)
    assert hot != run(seed=2, temperature=1.5)
    assert run(top_k=1) == run(top_p=1e-6) == [tokens[:10] for tokens in eager_tokens("qwen3")]
    assert usual == run(seed=1, top_k=50, temperature=1.0, top_p=1.0)  # transformers' defaults
    assert usual != run(seed=1, top_k=0)


def test_sampled_tokens_have_the_targets_distribution():
    """The prefill's token and the first of a round, for one prompt in 1500 rows, against the target's probabilities."""
    ids = batch()[0][1:2]
    generator = TransformersGenerator(
        make_model("llama"), make_model("llama", layers=1), max_batch_size=500, max_seq_len=16, page_size=4
    )
    rows = 1500
    result = generator.generate(
        ids.expand(rows, -1), max_new_tokens=2, do_sample=True, top_k=4, eos_token_id=(), return_dict_in_generate=True
    )
    with torch.no_grad():
        logits = eager_model("llama")(input_ids=ids).logits[0, -1]
    firsts, seconds = torch.tensor(result.tokens).unbind(1)
    likely = int(firsts.mode().values)
    with torch.no_grad():
        after = eager_model("llama")(input_ids=torch.cat([ids, torch.tensor([[likely]])], 1)).logits[0, -1]
    for drawn, values in ((firsts, logits), (seconds[firsts == likely], after)):
        top = values.topk(4)
        expected = torch.softmax(top.values, 0) * len(drawn)
        counts = torch.tensor([(drawn == token).sum() for token in top.indices], dtype=torch.float32)
        assert int(counts.sum()) == len(drawn)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 16.3  # 3 degrees of freedom, 1 in 1000; the seeds are fixed


def test_attention_implementations_are_restored():
    ids = batch()[0][1:2]
    target, draft = make_model("llama", "sdpa"), make_model("llama", "eager", layers=1)
    assert speculative_generate(target, draft, ids, **NEW).tokens == eager_tokens("llama")[1:2]
    assert target.config._attn_implementation == "sdpa"
    assert draft.config._attn_implementation == "eager"
    assert (
        target.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 9:].tolist() == eager_tokens("llama")[1]
    )


def test_more_rows_than_the_pool_holds_run_in_groups():
    ids, mask = batch()
    generator = TransformersGenerator(
        make_model("llama"), make_model("llama", layers=1), max_batch_size=2, max_seq_len=40, page_size=4
    )
    assert generator.generate(ids, mask, **NEW).tokens == eager_tokens("llama")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"`input_ids` must be .*\[bs, length\]"),
        ({"input_ids": torch.ones(1, 3)}, "`input_ids` must be integers"),
        ({"attention_mask": torch.ones(3, 4)}, r"`attention_mask` must be of shape \[3, 9\], got \[3, 4\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1] * 3] * 3)}, "row 0 has 4"),
        ({"attention_mask": torch.zeros(3, 9)}, "row 0 has 0"),
        ({"stop_strings": "x"}, "`stop_strings` needs `tokenizer`"),
        ({"do_sample": True, "temperature": 0.0}, "`temperature` must be above 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p"),
        ({"eos_token_id": list(range(9))}, "at most 8"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_arguments(arguments, message):
    ids, mask = batch()
    given = {"input_ids": ids, **({} if "input_ids" in arguments else {"attention_mask": mask}), **arguments}
    with pytest.raises(ValueError, match=message):
        speculative_generate(make_model("llama"), make_model("llama", layers=1), **given)


@pytest.mark.parametrize(("setting", "value"), [("guidance_scale", 1.3), ("num_beams", 4)])
def test_settings_that_the_round_does_not_compute_are_refused(setting, value):
    ids, mask = batch()
    model = make_model("llama")
    setattr(model.generation_config, setting, value)
    with pytest.raises(ValueError, match=rf"`{setting}` must be .*, got {value}: not supported, because"):
        speculative_generate(model, None, ids, mask)


def test_models_that_do_not_fit_are_refused():
    target = make_model("llama")
    small = transformers.LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "vocab_size": VOCAB - 1})
    with pytest.raises(ValueError, match=f"must know the target's {VOCAB} tokens, got {VOCAB - 1}"):
        TransformersGenerator(target, transformers.LlamaForCausalLM(small))
    with pytest.raises(TypeError, match="`target` must be a causal language model of transformers, got LlamaModel"):
        TransformersGenerator(target.model)
    with pytest.raises(ValueError, match=r"`aux_layers` must lie in \[0, 3\]"):
        TransformersModel(target, aux_layers=(1, 4))
    head = _heads(TransformersModel(target, aux_layers=(1,)))["eagle3"]
    with pytest.raises(ValueError, match="must be the one that `load_eagle3` returned"):
        TransformersGenerator(target, head)
    target.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(ValueError, match="must be on one device"):
        TransformersGenerator(target)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, layers in (("target", 3), ("draft", 1)):
        make_model("llama", layers=layers).save_pretrained(folder / name)
    tokenizer().save_pretrained(folder / "target")
    return folder


def run(*args: str):
    return CliRunner().invoke(cli.app, ["generate", "--device", "cpu", "--max-new-tokens", "24", *args])


def test_command_line_with_local_checkpoints(checkpoints):
    """Offline: nothing but the folders is read. Prints what `generate` makes, both ways."""
    models = ["--model", str(checkpoints / "target"), "--draft", str(checkpoints / "draft")]
    result = run(*models, "--prompt", "the thing", "--compare")
    assert result.exit_code == 0, result.output
    assert "texts are equal" in result.output
    rounds, fewer = (int(n) for n in re.search(r"\((\d+) to (\d+)\)", result.output).groups())
    assert fewer < rounds
    ids = tokenizer()("the thing", return_tensors="pt").input_ids
    out = eager_model("llama").generate(ids, max_new_tokens=24, do_sample=False)[0]
    text = tokenizer().decode(out, skip_special_tokens=True)
    assert result.output.count(text.split("\n")[0]) == 2
    plain = run("--model", str(checkpoints / "target"), "--plain", "--prompt", "the thing")
    assert plain.exit_code == 0, plain.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--draft", "."], "needs --model"),
        (["--model", "."], "needs --draft"),
        (["--model", ".", "--draft", ".", "--pair", "."], "no --pair"),
    ],
)
def test_command_line_options_that_do_not_fit(args, named):
    result = run(*args)
    assert result.exit_code == 2
    assert named in re.sub(r"[\s│]+", " ", result.output)


def test_command_line_names_a_missing_folder(tmp_path, checkpoints):
    result = run("--model", str(checkpoints / "target"), "--draft", str(tmp_path))
    assert result.exit_code == 2
    assert f"checkpoint {tmp_path / 'config.json'}: no such file" in result.output


def test_streamed_characters_come_whole():
    """With tokens of one byte each; a character that never ends comes with the rest."""

    class Bytes:
        def decode(self, tokens, skip_special_tokens):
            return bytes(tokens).decode(errors="replace")

    stream = TextTokenizer(Bytes()).stream_decoder()
    assert [stream.push([byte]) for byte in "aé→".encode()] == ["a", "", "é", "", "", "→"]
    assert stream.push(["é".encode()[0]]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_streamed_text_is_the_decoded_text():
    text = TextTokenizer(tokenizer())
    tokens = text.encode("the " + CHARACTERS)
    stream = text.stream_decoder()
    assert "".join(stream.push(tokens[i : i + 3]) for i in range(0, len(tokens), 3)) + stream.finish() == "the " + CHARACTERS


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "deepseek_v3"])
@SHAPES
def test_compiled_round_on_cuda(name, config):
    """One CUDA graph per bucket, and the tokens of eager attention."""
    from torch._dynamo.utils import counters

    ids, mask = (x.cuda() for x in batch())
    want = (
        make_model(name, "eager")
        .cuda()
        .generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    )
    counters.clear()
    models = [make_model(name, **kwargs).cuda() for kwargs in ({}, {"layers": 1})]
    generator = TransformersGenerator(*models, config, **SIZES)
    assert generator.generator.compile
    for _ in range(2):
        assert torch.equal(generator.generate(ids, mask, max_new_tokens=20, eos_token_id=()), want)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
