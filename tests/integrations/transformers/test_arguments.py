"""The arguments of `speculative_generate`: what `model.generate` makes of them, we make of them."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig, StoppingCriteria

from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, speculative_generate, stopping
from spec_ops.models.target import PositionLimit
from tests.helpers.tiny_transformers import PAD, VOCAB, batch, eager_tokens, make_model, tokenizer


def both(ids=None, mask=None, *, settings=None, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and `generate`'s, for a model whose `generation_config` has `settings`."""
    default_ids, default_mask = batch()
    ids, mask = (default_ids, default_mask) if ids is None else (ids, mask)
    target, eager = make_model("llama"), make_model("llama", "eager")
    for name, value in (settings or {}).items():
        setattr(target.generation_config, name, value)
        setattr(eager.generation_config, name, value)
    masked = {} if mask is None else {"attention_mask": mask}
    ours = speculative_generate(target, make_model("llama", layers=1), ids, mask, config=SpeculationConfig(3), **arguments)
    return ours, eager.generate(ids, **masked, **arguments)


@pytest.mark.filterwarnings("ignore:generate. nothing limits:UserWarning", "ignore:Using the model-agnostic:UserWarning")
@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {}),
        ({}, {"max_length": 14}),
        ({}, {"max_length": np.int64(14), "max_new_tokens": None}),
        ({}, {"max_length": 14, "max_new_tokens": np.int32(3)}),
        ({"max_length": 16}, {}),
        ({"max_length": 16}, {"max_new_tokens": 3}),
        ({"max_new_tokens": 4}, {}),
        ({"max_new_tokens": 4}, {"max_length": 16}),
        ({"max_new_tokens": 4}, {"generation_config": GenerationConfig(max_new_tokens=6)}),
        ({"max_new_tokens": 4}, {"generation_config": GenerationConfig(max_length=15)}),
        ({"max_new_tokens": 4}, {"generation_config": GenerationConfig(max_new_tokens=6), "max_new_tokens": 5}),
    ],
    ids=str,
)
def test_lengths(settings, arguments):
    ours, theirs = both(settings={"eos_token_id": None, **settings}, **arguments)
    assert torch.equal(ours, theirs)


def test_without_any_limit_generate_stops_where_positions_end():
    ids = torch.randint(3, 60, (1, 247), generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="nothing limits the new tokens; the default is 9"):
        ours, theirs = both(ids, eos_token_id=None)
    assert ours.shape == (1, 256)
    assert torch.equal(ours, theirs)


def test_max_length_without_room():
    with pytest.raises(ValueError, match="`max_length` must be above the input's 9 tokens, got 9"):
        both(max_length=9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_id_0_is_a_token_where_no_padding_is_set(side):
    """Nor where it ends rows as well. Prompts that hold zeros, without and with a mask."""
    ids, mask = batch(side)
    ids = torch.where((ids == PAD) & (mask == 1), 5, ids)
    ids[1, 2] = ids[1, 5] = 0
    none = {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    for settings in (none, {**none, "pad_token_id": 0, "eos_token_id": 0}, {**none, "pad_token_id": 0, "eos_token_id": [2, 0]}):
        ours, theirs = both(ids[1:2], settings=settings, max_new_tokens=8)
        assert torch.equal(ours, theirs)
    if side == "left":
        for settings in (none, {**none, "eos_token_id": 0}, {**none, "pad_token_id": 4}):
            ours, theirs = both(ids, mask, settings=settings, max_new_tokens=8)
            assert torch.equal(ours, theirs)


def test_the_end_token_can_be_switched_off_or_be_a_tensor():
    full = eager_tokens("llama")
    end = full[0][3]
    for given in (torch.tensor(end), torch.tensor([end, 2]), np.int64(end), [np.int64(end), 2], np.array([end]), None, []):
        arguments = {"eos_token_id": given, "max_new_tokens": 9, "do_sample": False}
        target = make_model("llama")
        target.generation_config.eos_token_id = full[0][5]
        out = speculative_generate(target, make_model("llama", layers=1), *batch(), **arguments)
        off = given is None or (isinstance(given, list) and not given)
        assert out[0, 9:].tolist() == (full[0][:9] if off else full[0][: full[0].index(end) + 1] + [PAD] * 5)


def test_end_tokens_outside_the_vocabulary_end_nothing():
    """Tiny test checkpoints have them, and -1 for none."""
    with pytest.warns(UserWarning, match=rf"`eos_token_id` holds \[-1, {VOCAB}\], which ends nothing"):
        ours, theirs = both(eos_token_id=[-1, VOCAB], max_new_tokens=5)
    assert torch.equal(ours, theirs)


def test_lists_and_arrays_of_token_ids():
    ids, mask = batch()
    rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    generator = TransformersGenerator(make_model("llama"), make_model("llama", layers=1), max_seq_len=40, page_size=4)
    want = generator.generate(ids, mask, max_new_tokens=6, eos_token_id=None)
    for given in (
        (rows,),
        (rows, [[1] * len(row) for row in rows]),
        (ids.tolist(), mask.tolist()),
        (ids.numpy(), mask.numpy()),
        (ids.numpy()[:, ::-1].copy()[:, ::-1], np.asfortranarray(mask.numpy())),  # rows backwards in memory; column by column
        (ids.numpy().astype(">i8"), mask.numpy().astype(">i4")),
        (ids.numpy().astype(object), mask.numpy().astype(np.uint16)),
        ([torch.tensor(row) for row in rows],),
        ([np.array(row) for row in rows],),
        (ids.int(), mask.bool()),
    ):
        out = generator.generate(*given, max_new_tokens=6, eos_token_id=None)
        assert out.dtype == torch.int64
        assert torch.equal(out, want)
    # Rows of one length may be padded, as a tensor's may. The zeros of others are tokens.
    assert torch.equal(generator.generate(ids.tolist(), max_new_tokens=6, eos_token_id=None), want)
    zeros = [[5, 0, 6], [7, 8]]
    for prompt in zeros:
        single = generator.generate([prompt], [[1] * len(prompt)], max_new_tokens=6, eos_token_id=None)[0, -6:]
        assert torch.equal(generator.generate(zeros, max_new_tokens=6, eos_token_id=None)[zeros.index(prompt), -6:], single)


def test_num_return_sequences_expands_every_row():
    ids, mask = batch()
    generator = TransformersGenerator(make_model("llama"), make_model("llama", layers=1), max_seq_len=40, page_size=4)
    out = generator.generate(
        ids, mask, do_sample=True, num_return_sequences=4, max_new_tokens=[9, 8, 7], seed=3, eos_token_id=None, temperature=1.5
    )
    assert torch.equal(out[:, :9], ids.repeat_interleave(4, 0))
    assert len({tuple(row.tolist()) for row in out}) == 12  # rows of one prompt are drawn apart
    assert ((out[:, 9:] == PAD).sum(1) >= torch.tensor([0, 1, 2]).repeat_interleave(4)).all()
    greedy = generator.generate(ids, mask, do_sample=True, top_k=1, num_return_sequences=2, max_new_tokens=9, eos_token_id=None)
    assert greedy[::2, 9:].tolist() == greedy[1::2, 9:].tolist() == [row[:9] for row in eager_tokens("llama")]
    with pytest.raises(ValueError, match="do not support `num_return_sequences`"):
        generator.generate(ids, mask, num_return_sequences=2)


def test_without_a_seed_torch_manual_seed_governs_sampling():
    generator = TransformersGenerator(make_model("llama"), make_model("llama", layers=1), max_seq_len=40, page_size=4)

    def run(**arguments) -> list[list[int]]:
        return generator.generate(*batch(), do_sample=True, temperature=1.5, max_new_tokens=12, **arguments).tolist()

    output = generator.generate(*batch(), do_sample=True, temperature=1.5, max_new_tokens=12, return_dict_in_generate=True)
    assert run(seed=output.seed) == output.sequences.tolist()
    torch.manual_seed(7)
    first, second = run(), run()
    torch.manual_seed(7)
    assert [run(), run()] == [first, second]
    assert first != second
    assert run(seed=np.int64(5)) == run(seed=5) != run(seed=6)


class _EndsAfter(StoppingCriteria):
    """Ends a row with the first token divisible by `number` at or after `length`."""

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length = number, length

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        return (input_ids[:, -1] % self.number == 0) & (input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 2, 6)], ids=["chain", "tree"])
def test_stopping_criteria_of_rows(config):
    ids, mask = batch()
    arguments = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": [_EndsAfter(3, 13), _EndsAfter(7, 11)]}
    ours = speculative_generate(make_model("llama"), make_model("llama", layers=1), ids, mask, config=config, **arguments)
    theirs = make_model("llama", "eager").generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(ours, theirs)
    assert PAD in ours[:, -1]
    assert ours.shape[1] < 29  # rows really ended, and at different tokens


@pytest.mark.gpu
def test_arguments_on_cuda():
    """Criteria may hold tensors on the prompts' device; prompts and masks may be on the host or be lists."""
    ids, mask = batch()
    full = eager_tokens("llama")
    ends = torch.tensor([full[0][4], full[1][7]], device="cuda")

    def criterion(input_ids, scores):
        return torch.isin(input_ids[:, -1], ends)

    models = [make_model("llama", **layers).cuda() for layers in ({}, {"layers": 1})]
    generator = TransformersGenerator(*models, max_seq_len=40, page_size=4, compile=False)
    arguments = {"max_new_tokens": 9, "eos_token_id": None, "stopping_criteria": [criterion]}
    want = generator.generate(ids.cuda(), mask, **arguments)
    assert want.is_cuda
    firsts = [min((row.index(end) for end in ends.tolist() if end in row), default=8) for row in full]
    assert [row[: first + 1] for row, first in zip(want[:, 9:].tolist(), firsts, strict=True)] == [
        row[: first + 1] for row, first in zip(full, firsts, strict=True)
    ]
    assert want.shape[1] == 9 + max(firsts) + 1
    ends = ends.cpu()
    for given in ((ids, mask.cuda()), (ids.tolist(), mask.tolist())):
        assert torch.equal(generator.generate(*given, **arguments), want.cpu())


@pytest.mark.parametrize(
    "criterion",
    [
        transformers.MaxLengthCriteria(31),
        transformers.EosTokenCriteria([eager_tokens("llama")[0][4], eager_tokens("llama")[1][7]]),
        transformers.MaxTimeCriteria(100.0),
        transformers.StopStringCriteria(tokenizer(), tokenizer().decode(eager_tokens("llama")[0])[5:7]),
    ],
    ids=lambda criterion: type(criterion).__name__,
)
def test_a_criterion_stands_for_the_setting_of_its_kind(criterion):
    """As in `generate`: the settings below would end rows elsewhere."""
    full = eager_tokens("llama")
    settings = {
        "MaxLengthCriteria": {"max_new_tokens": 5},
        "EosTokenCriteria": {"eos_token_id": full[0][2]},
        "MaxTimeCriteria": {"max_time": 0.0},
        "StopStringCriteria": {"stop_strings": [tokenizer().decode(full[0])[2:4]]},
    }[type(criterion).__name__]
    arguments = {"max_new_tokens": 12, "tokenizer": tokenizer(), "stopping_criteria": [criterion], **settings}
    ours, theirs = both(**arguments)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length", [3, 9, 10, 12])
def test_a_criterion_of_length_lets_every_row_have_a_token(length):
    """`generate` asks criteria after a token, so that there is one, whatever they say."""
    criteria = [transformers.MaxLengthCriteria(length)]
    ours, theirs = both(max_new_tokens=5, eos_token_id=None, stopping_criteria=criteria)
    assert torch.equal(ours, theirs)
    assert ours.shape[1] == max(10, length)


def test_padding_goes_by_the_settings_where_a_criterion_ends_rows():
    full = eager_tokens("llama")
    settings = {"pad_token_id": None, "eos_token_id": [60, 61]}
    criteria = [transformers.EosTokenCriteria([full[0][2]])]
    ours, theirs = both(*batch(), settings=settings, max_new_tokens=6, stopping_criteria=criteria)
    assert torch.equal(ours, theirs)
    assert ours[0, 12:].tolist() == [60] * (ours.shape[1] - 12)


def test_end_tokens_of_a_criterion_outside_the_vocabulary_end_nothing():
    criteria = [transformers.EosTokenCriteria([VOCAB + 1, eager_tokens("llama")[0][2]])]
    with pytest.warns(UserWarning, match=rf"`stopping_criteria` holds \[{VOCAB + 1}\], which ends nothing"):
        ours, theirs = both(max_new_tokens=5, stopping_criteria=criteria)
    assert torch.equal(ours, theirs)


class _Stream:
    """A CUDA stream, as far as criteria use one."""

    def __init__(self, device: object = None) -> None:
        self.device, self.waited = device, []

    def wait_stream(self, other) -> None:
        self.waited.append(other)


def test_criteria_run_on_a_stream_of_their_own(monkeypatch):
    """Otherwise the host would wait for the round under way before it could launch the next one."""
    rounds, entered = _Stream(), []

    @contextmanager
    def stream(chosen):
        entered.append(chosen)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: rounds)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    side = stopping._SideStream(torch.device("cuda", 0))
    assert side.stream.waited == [rounds]  # tensors of the criteria may still be made there
    with side.current():
        assert entered == [side.stream]
        assert not rounds.waited
    assert entered == [side.stream, None]
    assert rounds.waited == [side.stream]


@pytest.mark.gpu
def test_criteria_do_not_wait_for_the_round():
    """A criterion that reads its tensors returns while the round's stream is still busy."""
    side = stopping._SideStream(torch.device("cuda"))
    with side.current():
        assert bool(torch.ones((), device="cuda"))  # memory is allocated, which may wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    done = torch.cuda.Event()
    done.record()
    with side.current():
        assert bool(torch.ones((), device="cuda"))
        assert not done.query()
    torch.cuda.synchronize()


def test_max_time_ends_rows_after_a_round(monkeypatch):
    ids, mask = batch()
    generator = TransformersGenerator(make_model("llama"), max_seq_len=40, page_size=4)
    clock = iter(range(1000))
    monkeypatch.setattr("spec_ops.integrations.transformers.stopping.time.monotonic", lambda: next(clock) / 3)
    # Asked once for each of three rows: the second round ends after 4/3, 5/3 and 6/3 seconds.
    out = generator.generate(ids, mask, max_new_tokens=20, eos_token_id=None, max_time=1.0)
    assert out[:, 9:].tolist() == [row[:2] for row in eager_tokens("llama")]
    monkeypatch.undo()
    assert generator.generate(ids, mask, max_new_tokens=20, eos_token_id=None, max_time=0).shape == (3, 10)


def test_settings_in_a_generation_config_are_honoured():
    settings = {"max_new_tokens": 7, "do_sample": True, "top_k": 1, "eos_token_id": [], "return_dict_in_generate": True}
    config = GenerationConfig(**settings, chat_format="chatml")  # which transformers does not know, and ignores
    out = speculative_generate(make_model("llama"), None, *batch(), generation_config=config)
    assert out.tokens == [row[:7] for row in eager_tokens("llama")]
    with pytest.raises(ValueError, match=r"`guidance_scale` must be 1.0, got 1.2"):
        speculative_generate(make_model("llama"), None, *batch(), generation_config=GenerationConfig(guidance_scale=1.2))
    with pytest.raises(TypeError, match=r"`generation_config` must be a transformers.GenerationConfig, got dict"):
        speculative_generate(make_model("llama"), None, *batch(), generation_config={"max_new_tokens": 7})


def test_settings_in_the_models_config_are_refused_as_generate_refuses_them():
    model = make_model("llama")
    model.config.repetition_penalty = 1.2
    with pytest.raises(ValueError, match=r"must be in the target's `generation_config`, its `config` holds .*1.2"):
        speculative_generate(model, None, *batch(), max_new_tokens=2)


def test_temperature_without_sampling_warns_as_transformers_does():
    class Seen(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    for call in (
        lambda: speculative_generate(make_model("llama"), None, *batch(), max_new_tokens=2, temperature=0.7),
        lambda: make_model("llama", "eager").generate(*batch()[:1], max_new_tokens=2, temperature=0.7),
    ):
        messages: list[str] = []
        handler, logger = Seen(), logging.getLogger("transformers.generation.configuration_utils")
        transformers.utils.logging.warning_once.cache_clear()
        logger.addHandler(handler)
        call()
        logger.removeHandler(handler)
        assert any("generation flags are not valid and may be ignored: ['temperature']" in message for message in messages)


def test_neutral_values_of_everything():
    neutral = {
        "num_beams": 1,
        "num_return_sequences": 1,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "min_new_tokens": None,
        "logits_processor": [],
        "stopping_criteria": [],
        "assistant_model": None,
        "synced_gpus": False,
        "use_cache": True,
        "token_type_ids": None,
        "max_time": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = speculative_generate(make_model("llama"), None, *batch(), max_new_tokens=4, eos_token_id=None, **neutral)
    assert out[:, 9:].tolist() == [row[:4] for row in eager_tokens("llama")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [[5], [6, VOCAB]]}, rf"`input_ids\[1\]` must hold token ids in \[0, {VOCAB}\), .*got \[{VOCAB}\]"),
        ({"input_ids": [[5], [-100]]}, r"`input_ids\[1\]` must hold token ids"),
        (
            {"input_ids": [[5], [VOCAB]], "do_sample": True, "num_return_sequences": 3},
            r"`input_ids\[1\]` must hold token ids",
        ),
        ({"max_new_tokens": [2, 40, 2]}, r"`input_ids\[1\]` plus `max_new_tokens` must fit max_seq_len=40, got 9 \+ 40"),
        ({"max_length": 60}, r"`input_ids\[0\]` plus its new tokens up to `max_length` must fit max_seq_len=40, got 5 \+ 51"),
        (
            {"max_new_tokens": 2, "stopping_criteria": [transformers.EosTokenCriteria(list(range(9)))]},
            "`stopping_criteria` must hold",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value)),
)
def test_what_a_generator_refuses_is_named_as_the_caller_calls_it(arguments, message):
    ids, mask = batch()
    generator = TransformersGenerator(make_model("llama"), max_seq_len=40, page_size=4)
    mask = None if "input_ids" in arguments else mask
    arguments = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": 4 if "max_length" not in arguments else None,
        **arguments,
    }
    with pytest.raises(ValueError, match=f"^generate: {message}"):
        generator.generate(**arguments)


@pytest.mark.filterwarnings("ignore:generate. nothing limits:UserWarning")
def test_limits_of_the_model_name_the_callers_arguments():
    generator = TransformersGenerator(make_model("llama"), max_seq_len=40)
    generator.target.position_limit = PositionLimit(12, "its table ends there")
    for limit, words in (({"max_new_tokens": 9}, "`max_new_tokens`"), ({}, "the default of new tokens")):
        with pytest.raises(ValueError, match=rf"^generate: `input_ids\[0\]` plus {words} must be at most 13 tokens"):
            generator.generate([[5, 6, 7, 8, 9]], **limit)


def test_nothing_to_sample_names_the_prompt():
    target = make_model("llama")
    generator = TransformersGenerator(target, max_seq_len=40)
    with torch.no_grad():
        target.model.embed_tokens.weight[6] = float("nan")
    with pytest.raises(RuntimeError, match=r"^generate: nothing can be sampled for `input_ids\[1\]`"):
        generator.generate([[5], [6]], [[1], [1]], do_sample=True, num_return_sequences=2, max_new_tokens=[1, 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"prefix_allowed_tokens_fn": print},
            "`prefix_allowed_tokens_fn` is .*because .*pass grammars as `matchers`",
        ),
        (
            {"assistant_model": object()},
            "`assistant_model` is not supported, because the smaller model is the generator's `draft`",
        ),
        ({"position_ids": torch.zeros(3, 9)}, "`position_ids` is not supported, because"),
        ({"stopping_criteria": print}, "`stopping_criteria` must be a StoppingCriteriaList"),
        (
            {"stopping_criteria": [transformers.generation.stopping_criteria.ConfidenceCriteria(0.5)]},
            "`stopping_criteria` must not read scores: not supported, because",
        ),
        ({"max_new_tokens": 2.0}, "`max_new_tokens` must be .*, got 2.0"),
        ({"max_new_tokens": True}, "`max_new_tokens` must be .*, got True"),
        ({"max_new_tokens": "8"}, "`max_new_tokens` must be .*, got '8'"),
        ({"max_new_tokens": torch.tensor(2.0)}, "`max_new_tokens` must be .*, got 2.0"),
        ({"max_new_tokens": [2, None, 2]}, "`max_new_tokens` must be .*, got None"),
        ({"max_new_tokens": [2, 2]}, r"`max_new_tokens` must have one entry per row of `input_ids` \(3\), got 2"),
        ({"max_length": 12.5}, "`max_length` must be .*, got 12.5"),
        ({"num_return_sequences": 0}, "`num_return_sequences` must be .*, got 0"),
        ({"eos_token_id": [None]}, r"`eos_token_id` must be a token id or a list of them, got \[None\]"),
        ({"eos_token_id": 2.0}, "`eos_token_id` must be a token id or a list of them, got 2.0"),
        ({"eos_token_id": True}, "`eos_token_id` must be a token id or a list of them, got True"),
        ({"eos_token_id": torch.tensor([2.0])}, "`eos_token_id` must be a token id or a list of them"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` must be a token id or a list of them, got '</s>'"),
        ({"eos_token_id": list(range(9))}, "`eos_token_id` must hold at most 8 ids, got 9"),
        ({"pad_token_id": [1, 2]}, "`pad_token_id` must be one token id"),
        ({"do_sample": "false"}, "`do_sample` must be True or False, got 'false'"),
        ({"do_sample": True, "temperature": "hot"}, "`temperature` must be above 0 .*, got 'hot'"),
        ({"do_sample": True, "top_k": 2.5}, "`top_k` must be .*, got 2.5"),
        ({"do_sample": True, "seed": 1.5}, "`seed` must be .*, got 1.5"),
        ({"streamer": print}, "`streamer` must have `put` and `end`"),
        ({"max_time": "1"}, "`max_time` must be a number of seconds, got '1'"),
        ({"stop_strings": [1]}, r"`stop_strings` must be a string or a list of them, got \[1\]"),
        ({"attention_mask": None, "input_ids": "text"}, "`input_ids` must be .*, got text: encode it first"),
        ({"attention_mask": None, "input_ids": ["text"]}, "`input_ids` must be .*, got text: encode it first"),
        ({"attention_mask": None, "input_ids": np.array([["text"]])}, "`input_ids.*` must be a list of integers"),
        ({"attention_mask": None, "input_ids": {"input_ids": [[1]]}}, r"got a mapping .* `generate\(\*\*inputs\)`"),
        ({"attention_mask": None, "input_ids": [5, 6]}, r"got one flat list: pass `\[input_ids\]`"),
        (
            {"attention_mask": None, "input_ids": torch.zeros(1, 0, dtype=torch.long)},
            r"at least one row and one token, got \[1, 0\]",
        ),
        ({"attention_mask": None, "input_ids": torch.tensor([5, 6])}, r"got \[2\]: pass `input_ids\[None\]`"),
        ({"attention_mask": None, "input_ids": [[5], []]}, r"`input_ids\[1\]` must be a list of integers, at least one"),
        ({"attention_mask": None, "input_ids": [[5], [True]]}, r"`input_ids\[1\]` must be a list of integers"),
        ({"attention_mask": [[1, 1], [1]], "input_ids": [[5], [6, 7]]}, "`attention_mask` must be of shape"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value)),
)
def test_wrong_values_are_named(arguments, message):
    ids, mask = batch()
    with pytest.raises(ValueError, match=message):
        speculative_generate(make_model("llama"), None, **{"input_ids": ids, "attention_mask": mask, **arguments})


def test_a_misspelt_argument():
    with pytest.raises(TypeError, match="unexpected argument `temprature`"):
        speculative_generate(make_model("llama"), None, *batch(), temprature=0.7)
