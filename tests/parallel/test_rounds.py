"""Ranks decode what one process decodes: 2 and 4 processes, float32, gloo."""

from __future__ import annotations

import functools

import pytest

from spec_ops.decoding import SamplingParams, generate
from spec_ops.models import load_pair
from tests.helpers import world
from tests.parallel.models import BATCH, COMPILED, JOBS, NEW_TOKENS, OF_FOUR, make_draft, make_target


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory) -> list[dict]:
    """What the cases returned, by rank."""
    return world.run(request.param, "tests.parallel.cases", tmp_path_factory)


def of(ranks: list[dict], case: str) -> list[dict]:
    found = [results[case] for results in ranks]
    assert not [result["error"] for result in found if "Traceback" in str(result.get("error"))]
    return found


@functools.cache
def alone(name: str) -> list[list[int]]:
    job = JOBS[name]
    target = make_target(job.kind)
    options = {"max_new_tokens": NEW_TOKENS, "page_size": 4, "sampling": job.sampling}
    return generate(target, make_draft(job, target), BATCH, job.config, **options).tokens


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_tokens_are_those_of_one_process(ranks, job):
    for found in of(ranks, "case_tokens"):
        if len(ranks) == 2 or job in OF_FOUR:
            assert found[job] == alone(job)


@pytest.mark.slow
def test_tokens_of_compiled_rounds(ranks):
    """With our passes and without."""
    if len(ranks) > 2:
        pytest.skip("two processes show it")
    target = make_target(COMPILED.kind)
    options = {"max_new_tokens": NEW_TOKENS, "page_size": 4}
    expected = generate(target, make_draft(COMPILED, target), BATCH, COMPILED.config, **options).tokens
    for found in of(ranks, "case_compiled"):
        assert found["graphs"] == 1
        assert found["passes"] == found["no passes"] == expected


def test_batch_invariant_shares(ranks):
    """One text for all ways to decode, in bfloat16; and no sum of torch's is left, whose order may follow the rows."""
    for result in of(ranks, "case_invariant"):
        assert result["sums"] == 0
        plain, chain, tree = result["tokens"].values()
        assert plain == chain == tree
        assert result["tokens"] == of(ranks, "case_invariant")[0]["tokens"]


def test_sums_of_selected_rows(ranks):
    """One rank is late: what the others have sent is not there before they waited for it."""
    assert all(result == {"of_a_sum": [1, True], "of_all_requests": [1, True]} for result in of(ranks, "case_selected_rows"))


def test_vocabulary_that_the_ranks_do_not_divide(ranks):
    for result in of(ranks, "case_head"):
        for got, expected, equal in result["found"]:
            assert got == expected
            assert equal


def test_shares_of_different_sizes(ranks):
    assert all(result == dict.fromkeys(("1", "3", "5", "13"), True) for result in of(ranks, "case_shares"))


def test_what_is_true_on_every_rank(ranks):
    assert all(result == {"all": True, "none": False, "the first": False} for result in of(ranks, "case_every"))


def test_shipped_pair_from_slices(ranks):
    target, draft, tokenizer = load_pair()
    prompt = [tokenizer.encode("class Matrix:\n    def __init__(self")]
    expected = generate(target, draft, prompt, max_new_tokens=8).tokens
    for result in of(ranks, "case_shipped_pair"):
        assert result["tokens"] == expected
        assert result["share"] < 0.75


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("versions", "package versions"),
        ("target", "target"),
        ("draft", "draft"),
        ("config", "max_batch_size"),
        ("prompts", "prompts"),
        ("seed", "sampling"),
    ],
)
def test_ranks_that_differ_are_told_which_argument(ranks, what, name):
    last = len(ranks) - 1
    for result in of(ranks, "case_ranks_that_differ"):
        assert result[what].startswith("RankError: ")
        assert f"`{name}` must be the same on every rank, but differs on rank {last} from rank 0's" in result[what]
        assert len(result["again"][0]) == 4


def test_rank_0_draws_the_seed(ranks):
    results = of(ranks, "case_drawn_seed")
    assert all(result == results[0] for result in results)
    sampling = SamplingParams(1.0, seed=results[0]["seed"])
    expected = generate(make_target("gqa"), None, [[1, 2]], max_new_tokens=8, sampling=sampling)
    assert results[0]["tokens"] == expected.tokens


def test_rank_0_decides_when_to_stop(ranks):
    for result in of(ranks, "case_clocks"):
        assert len(result["tokens"][0]) == 3


def test_what_raises_on_rank_0_raises_on_all(ranks):
    """Nobody waits for an answer that does not come."""
    first, *others = of(ranks, "case_raised")
    assert (first["raised"], first["calls"]) == ("ValueError: enough", 3)
    for other in others:
        assert (other["raised"], other["calls"]) == ("RankError: generate: `stop_when` raised on rank 0: ValueError: enough", 0)
        assert other["again"] == first["again"]


def test_a_divergence_is_found_at_its_round(ranks):
    for result in of(ranks, "case_divergence"):
        assert "`output of a round` must be the same on every rank, but differs on rank 1 from rank 0's" in result["error"]


def test_sizes_that_the_ranks_do_not_divide(ranks):
    for result in of(ranks, "case_sizes"):
        assert result.pop("target") == "ValueError: shard: `target` must be the share of the target for a Eagle3Draft, got None"
        for name, message in result.items():
            assert message.startswith(f"ValueError: shard: `{name}` must be a multiple"), message
            assert f"{len(ranks)} ranks" in message


def test_a_rank_keeps_its_share_only(ranks):
    assert all(result["kept"] == [] for result in of(ranks, "case_bytes"))
