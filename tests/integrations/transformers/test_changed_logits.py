"""Settings that change logits, in whole rounds: greedy text is that of `generate`, sampled tokens have its distribution."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.generation import logits_process as theirs

import spec_ops.passes
from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import SpeculativeOutput, TransformersGenerator
from tests.decoding.test_grammar import STOP, ModularMatcher
from tests.helpers.random_transformers import FAMILIES, RandomModel
from tests.helpers.tiny_transformers import VOCAB, batch, eager_model, make_model

CHAIN, TREE = SpeculationConfig(3), SpeculationConfig(3, 2, 6)
NEW = 12


class Texts:
    """A random model, two prompts of different lengths, and settings made from the text that it gives without them."""

    def __init__(self, family: str) -> None:
        rng = random.Random(family)
        self.model = RandomModel(rng, family, 40)
        self.prompts = [[rng.randrange(3, 40) for _ in range(length)] for length in (3, 7)]
        self.free = self.generate(eos_token_id=None)
        self.ends = [self.free[0][2], self.free[1][4]]
        taken = [prompt + text for prompt, text in zip(self.prompts, self.free, strict=True)]
        at = rng.randrange(3, 6)
        words = [taken[0][at : at + 2], taken[1][at + 4 : at + 7], [taken[0][-1]]]
        biases = {tuple(taken[1][8:10]): -4.0, (taken[0][4], taken[1][4]): 6.0, (rng.randrange(40),): 1.5}
        penalties = {"repetition_penalty": 1.2, "suppress_tokens": [self.free[1][1]]}
        in_round = {**penalties, "bad_words_ids": words, "min_new_tokens": 5}
        self.settings: dict[str, dict[str, Any]] = {
            "of the round": {**in_round, "sequence_bias": {(rng.randrange(40),): 2.0}},
            "as steps": {**in_round, "sequence_bias": biases, "no_repeat_ngram_size": 2},
            "others": {
                "encoder_repetition_penalty": 0.8,
                "encoder_no_repeat_ngram_size": 2,
                "begin_suppress_tokens": [self.free[0][0], self.free[1][0]],
                "exponential_decay_length_penalty": (3, 1.3),
                "forced_eos_token_id": rng.randrange(40),
                "remove_invalid_values": True,
                "logits_processor": [theirs.NoRepeatNGramLogitsProcessor(1), down],
            },
        }

    def generate(self, **settings: Any) -> list[list[int]]:
        """What `generate` gives for each prompt by itself."""
        rows = []
        for prompt in self.prompts:
            given = {**settings, "logits_processor": _without_ours(settings.get("logits_processor"), len(prompt))}
            arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **given}
            rows.append(self.model.eager.generate(torch.tensor([prompt]), **arguments)[0, len(prompt) :].tolist())
        return rows


def down(logits: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A function of ours: the third last token of the text is less likely."""
    third = history.gather(1, (lengths[:, None] - 3).clamp(min=0))
    return logits.scatter_add(1, third, torch.full_like(third, -3.0, dtype=torch.float32))


def _without_ours(processors, prompt_len: int):
    """`down`, as `generate` calls processors."""
    if processors is None:
        return None
    lengths = lambda ids: torch.tensor([ids.shape[1]])  # noqa: E731
    return [(lambda ids, scores: down(scores, ids, lengths(ids))) if p is down else p for p in processors]


@pytest.mark.parametrize(("family", "config"), [(family, (CHAIN, TREE)[i % 2]) for i, family in enumerate(FAMILIES)])
def test_greedy_text_is_that_of_generate(family, config):
    """Decoded together with chains, or one after the other in one row with trees; the draft lacks the model's last layer."""
    texts = Texts(family)
    want = {name: texts.generate(eos_token_id=texts.ends, **settings) for name, settings in texts.settings.items()}
    assert sum(rows == texts.free for rows in want.values()) == 0
    accepted = 0
    draft = texts.model.copy(layers=max(1, texts.model.layers - 1))
    sizes = {"max_batch_size": 2 if config is CHAIN else 1, "max_seq_len": 32, "page_size": 4}
    with TransformersGenerator(texts.model.copy(), draft, config, **sizes) as generator:
        for name, settings in texts.settings.items():
            ends = {"eos_token_id": texts.ends, "max_new_tokens": NEW, "return_dict_in_generate": True}
            out = generator.generate(texts.prompts, **ends, **settings)
            assert isinstance(out, SpeculativeOutput)
            assert out.tokens == want[name], name
            accepted += out.stats.new_tokens - out.stats.requests - out.stats.request_rounds
    assert accepted > 0


SAMPLED = {
    "filters": {"typical_p": 0.7, "epsilon_cutoff": 0.03, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3},
    "entropy": {"top_h": 0.5, "eta_cutoff": 0.02, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "top_k": 0},
    "min_p": {"min_p": 0.1, "suppress_tokens": [9], "temperature": 0.9, "sequence_bias": {(70,): 2.0}},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_tokens_have_the_distribution_of_generate(name):
    """The prefill's token and the first of a round, for one prompt in 1500 rows, against the scores of `generate`."""
    ids, rows, settings = batch()[0][1:2], 1500, {"do_sample": True, **SAMPLED[name]}
    generator = TransformersGenerator(
        make_model("llama"), make_model("llama", layers=1), max_batch_size=500, max_seq_len=16, page_size=4
    )
    end = {"eos_token_id": None, "return_dict_in_generate": True}
    result = generator.generate(ids.expand(rows, -1), max_new_tokens=2, seed=5, **end, **settings)
    firsts, seconds = torch.tensor(result.tokens).unbind(1)
    likely = int(firsts.mode().values)

    def probabilities(text: torch.Tensor, new: int) -> torch.Tensor:
        # A first token that is forced makes the second one's scores those of a continued text.
        forced = theirs.SuppressTokensAtBeginLogitsProcessor([t for t in range(VOCAB) if t != likely], ids.shape[1])
        arguments = {"max_new_tokens": new, "output_scores": True, "pad_token_id": 0, **end, **settings}
        out = eager_model("llama").generate(text, logits_processor=[forced] * (new - 1), **arguments)
        return out.scores[new - 1][0].softmax(-1)

    for drawn, probs in ((firsts, probabilities(ids, 1)), (seconds[firsts == likely], probabilities(ids, 2))):
        counts = torch.bincount(drawn, minlength=VOCAB).float()
        assert int(counts[probs == 0].sum()) == 0
        expected = probs * len(drawn)
        frequent = expected >= 5
        chi_square = float(((counts - expected)[frequent] ** 2 / expected[frequent]).sum())
        freedom = int(frequent.sum()) - 1
        assert freedom >= 2
        assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five deviations; the seed is fixed


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_grammar_gives_the_text_of_prefix_allowed_tokens_fn(config):
    ids, new = batch()[0][1:2], 10
    settings = {"max_new_tokens": new, "eos_token_id": STOP, "pad_token_id": 0, "repetition_penalty": 1.2}

    def allowed(_batch: int, text: torch.Tensor) -> list[int]:
        matcher = ModularMatcher(3, 7)
        assert all(matcher.accept_token(token) for token in text[ids.shape[1] :].tolist())
        return matcher.allowed()

    want = eager_model("llama").generate(ids, do_sample=False, prefix_allowed_tokens_fn=allowed, **settings)
    assert want[0, -1] == STOP  # the grammar's end
    with TransformersGenerator(make_model("llama"), make_model("llama", layers=2), config, max_seq_len=40) as generator:
        assert torch.equal(generator.generate(ids, matchers=[ModularMatcher(3, 7)], **settings), want)
        with pytest.raises(ValueError, match=r"^generate: `matchers` must be a list .* per prompt \(1\), got 2"):
            generator.generate(ids, matchers=[None, None], **settings)


def scaled(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, 5] = -torch.inf
    return scores.mul_(0.5)


@pytest.mark.slow
def test_other_numbers_need_no_other_round(monkeypatch):
    """One graph for greedy steps, one for steps with filters, whatever their numbers, with a caller's processor among them."""
    counter = CompileCounter()

    def compiled(module, **_options):
        return torch.compile(module, backend=counter, fullgraph=True, dynamic=False)

    monkeypatch.setattr(spec_ops.passes, "compile", compiled)
    ids, mask = batch()
    target, draft = make_model("llama", layers=2), make_model("llama", layers=1)
    generator = TransformersGenerator(target, draft, SpeculationConfig(1), compile=True, max_seq_len=40, page_size=4)
    for sampled in (False, True):
        frames = counter.frame_count
        for x in (1, 3):
            filters = {"do_sample": True, "typical_p": 0.9 / x, "top_k": 10 * x, "top_p": 1 - 0.1 * x, "seed": x}
            out = generator.generate(
                ids[:, x:],
                mask[:, x:],
                logits_processor=[scaled],
                max_new_tokens=6 + x // 3,
                min_new_tokens=x,
                eos_token_id=[7, 8, 9][:x],
                pad_token_id=0,
                repetition_penalty=1.0 + 0.1 * x,
                no_repeat_ngram_size=x + 1,
                sequence_bias={(4 + x,): float(x), (20, 30 + x): 1.0},
                bad_words_ids=[[11], [12, 13 + x]][:x],
                suppress_tokens=list(range(20, 20 + x)),
                begin_suppress_tokens=[40 + x],
                forced_eos_token_id=50 + x,
                exponential_decay_length_penalty=(x, 1.0 + 0.1 * x),
                **(filters if sampled else {}),
            )
            assert out.shape[0] == 3
        assert counter.frame_count == frames + 1
