"""Prompt lookup against a matcher in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spec_ops

FUZZ = settings(max_examples=300, deadline=None, derandomize=True)


def place(text: list[int], max_ngram: int) -> tuple[int, int]:
    """`(n, end)`: the most last tokens, `max_ngram` at most, that `text` had before, and where they last ended."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return n, end
    return 0, 0


def drafts(text: list[int], steps: int, max_ngram: int, min_ngram: int) -> list[int]:
    n, end = place(text, max_ngram)
    if n < min_ngram:
        return [-1] * steps
    text = list(text)
    for step in range(steps):
        text.append(text[end + step])  # past the end it reads what it has drafted
    return text[-steps:]


@pytest.mark.slow
@FUZZ
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=4),
    spare=st.integers(0, 3),
    steps=st.integers(1, 9),
    max_ngram=st.integers(1, 12),
    data=st.data(),
)
def test_drafts_are_those_of_plain_python(device, texts, spare, steps, max_ngram, data):
    min_ngram = data.draw(st.integers(1, max_ngram))
    width = max(map(len, texts)) + spare
    # What stands after a text would go on with any of them.
    rows = [
        text + data.draw(st.lists(st.integers(0, 2), min_size=width - len(text), max_size=width - len(text))) for text in texts
    ]
    tokens = torch.tensor(rows, device=device, dtype=torch.int64).reshape(len(texts), width)
    lens = torch.tensor([len(text) for text in texts], device=device, dtype=torch.int32)
    got = spec_ops.lookup_drafts(tokens, lens, steps, max_ngram, min_ngram)
    assert got.dtype == torch.int64
    assert got.tolist() == [drafts(text, steps, max_ngram, min_ngram) for text in texts]


def test_the_longest_place_wins_then_the_last(device):
    #       1 2 3 came before 7 8, and after that 2 3 before 9, and 3 alone before 4
    text = [1, 2, 3, 7, 8, 6, 2, 3, 9, 9, 3, 4, 1, 2, 3]
    tokens, lens = torch.tensor([text], device=device), torch.tensor([len(text)], device=device)
    for max_ngram, wanted in ((8, [7, 8]), (3, [7, 8]), (2, [9, 9]), (1, [4, 1])):
        assert spec_ops.lookup_drafts(tokens, lens, 2, max_ngram).tolist() == [wanted]
    assert spec_ops.lookup_drafts(tokens, lens, 2, 8, 3).tolist() == [[7, 8]]
    assert spec_ops.lookup_drafts(tokens, lens, 2, 8, 4).tolist() == [[-1, -1]]


def test_a_text_that_repeats_itself_goes_on_repeating(device):
    tokens = torch.tensor([[5, 1, 2, 3, 1, 2], [0, 0, 4, 4, 4, 9]], device=device)
    got = spec_ops.lookup_drafts(tokens, torch.tensor([6, 5], device=device), 7)
    assert got.tolist() == [[3, 1, 2, 3, 1, 2, 3], [4] * 7]
