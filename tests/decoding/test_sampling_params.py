"""What `SamplingParams` takes and refuses."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from spec_ops.decoding import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_p": -0.1}, r"`min_p` must be a number in \[0, 1\], got -0.1"),
        ({"min_p": 1.5}, "`min_p`"),
        ({"min_p": NAN}, "`min_p`"),
        ({"min_p": None}, "`min_p`"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be a finite number above 0, got 0.0"),
        ({"repetition_penalty": -1.2}, "`repetition_penalty`"),
        ({"repetition_penalty": NAN}, "`repetition_penalty`"),
        ({"repetition_penalty": INF}, "`repetition_penalty`"),
        ({"repetition_penalty": 1e-300}, "`repetition_penalty`"),  # 0 in float32
        ({"repetition_penalty": "1.2"}, "`repetition_penalty`"),
        ({"presence_penalty": 2.5}, r"`presence_penalty` must be a number in \[-2, 2\], got 2.5"),
        ({"presence_penalty": NAN}, "`presence_penalty`"),
        ({"frequency_penalty": -3}, r"`frequency_penalty` must be a number in \[-2, 2\], got -3"),
        ({"frequency_penalty": True}, "`frequency_penalty`"),
        ({"logit_bias": {3: NAN}}, "`logit_bias` must be a dict of token ids to finite numbers .*, got 3: nan"),
        ({"logit_bias": {3: -INF}}, "`logit_bias` .*suppress_tokens.*, got 3: -inf"),
        ({"logit_bias": {3: 1e300}}, "`logit_bias`"),
        ({"logit_bias": {-1: 1.0}}, "`logit_bias` .*, got -1: 1.0"),
        ({"logit_bias": {"3": 1.0}}, "`logit_bias` .*, got '3': 1.0"),
        ({"logit_bias": {True: 1.0}}, "`logit_bias`"),
        ({"logit_bias": {3: None}}, "`logit_bias`"),
        ({"logit_bias": [(3, 1.0)]}, "`logit_bias`"),
        ({"min_new_tokens": -1}, "`min_new_tokens` must be an int in"),
        ({"min_new_tokens": 1.0}, "`min_new_tokens`"),
        ({"min_new_tokens": None}, "`min_new_tokens`"),
        ({"bad_words_ids": [[1], []]}, "`bad_words_ids` must be a list of non-empty lists of token ids.*, got an empty one"),
        ({"bad_words_ids": [1, 2]}, "`bad_words_ids` .*, got 1"),
        ({"bad_words_ids": [[1, -2]]}, r"`bad_words_ids` .*, got \[-2\]"),
        ({"bad_words_ids": ["word"]}, "`bad_words_ids` .*, got 'word'"),
        ({"bad_words_ids": "word"}, "`bad_words_ids`"),
        ({"bad_words_ids": None}, "`bad_words_ids`"),
        ({"suppress_tokens": 3}, "`suppress_tokens` must be a list of token ids, .*, got 3"),
        ({"suppress_tokens": [3, 1.5]}, r"`suppress_tokens` .*, got \[1.5\]"),
        ({"suppress_tokens": [[3]]}, "`suppress_tokens`"),
        ({"suppress_tokens": {3: 1}}, "`suppress_tokens`"),
    ],
)
def test_a_wrong_value_is_named(kwargs, message):
    with pytest.raises(ValueError, match=f"SamplingParams: {message}"):
        SamplingParams(**kwargs)


def test_other_kinds_of_numbers_and_lists():
    given = SamplingParams(
        min_p=np.float64(0.1),
        repetition_penalty=2,
        logit_bias={np.int64(3): np.float32(1.5)},
        min_new_tokens=np.int32(4),
        bad_words_ids=np.array([[1, 2], [3, 4]]),
        suppress_tokens=torch.tensor([5, 6]),
    )
    same = SamplingParams(
        min_p=0.1, repetition_penalty=2.0, logit_bias={3: 1.5}, min_new_tokens=4, bad_words_ids=[(1, 2), [3, 4]],
        suppress_tokens=range(5, 7),
    )  # fmt: skip
    assert given == same
    assert hash(given) == hash(same)
    assert given == copy.deepcopy(given) == pickle.loads(pickle.dumps(given))
    assert given != SamplingParams(logit_bias={3: 1.0})


def test_a_bias_that_is_changed_later_changes_nothing():
    bias = {3: 1.0}
    sampling = SamplingParams(logit_bias=bias)
    bias[3] = float("nan")
    assert sampling.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"logit_bias": {5: 1.0, 10: 1.0}}, r"`sampling.logit_bias` must hold token ids in \[0, 10\), got \[10\]"),
        ({"bad_words_ids": [[1, 11], [2]]}, r"`sampling.bad_words_ids` .*, got \[11\]"),
        ({"suppress_tokens": [12, 3]}, r"`sampling.suppress_tokens` .*, got \[12\]"),
    ],
)
def test_ids_outside_the_vocabulary(kwargs, message):
    SamplingParams(**kwargs).check_ids(13)
    with pytest.raises(ValueError, match=message):
        SamplingParams(**kwargs).check_ids(10)
