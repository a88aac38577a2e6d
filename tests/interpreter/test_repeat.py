"""Eager calls that repeat, in Triton's interpreter: a second call of the same sizes launches what the first one did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton comes for Linux only")

import triton
import triton.language as tl

from spec_ops import ops
from spec_ops.backends.triton.attention import launcher
from spec_ops.backends.triton.cache import append, rope_append
from spec_ops.backends.triton.runtime import cooperative, repeat
from spec_ops.backends.triton.runtime.launch import Target, recorded
from tests.ops.test_attention import KINDS, Case, check, make_case


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cooperative, "_refused", set())
    repeat._plans.clear()
    yield
    repeat._plans.clear()


def case_of(kind: str, mode: str, seed: int, **wanted: Any) -> Case:
    widths = {"head_dim": 32, "v_dim": 32} if kind == "mha" else {"head_dim": 48, "v_dim": 32}
    lens = {"lens": [26, 69], "q_lens": [4, 5]} | wanted
    return make_case(
        kind, mode, "cpu", **{"heads": 2, "kv_heads": 1, "num_nodes": 6, "page_size": 64, "seed": seed, **widths, **lens}
    )


def attend(case: Case, out: torch.Tensor | None = None, **changes: Any) -> torch.Tensor:
    call = case.call(**changes)
    call.out = out
    return launcher.attention(call)


def plans() -> list[Any]:
    return list(repeat._plans.values())


@pytest.mark.parametrize("mode", ["draft_chain", "verify_chain", "verify_tree", "extend"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_launches_what_the_first_did(kind: str, mode: str) -> None:
    first, second = (case_of(kind, mode, seed) for seed in (1, 2))
    one = attend(first)
    (plan,) = plans()
    assert plan is not None
    with mock.patch.object(launcher, "run", side_effect=AssertionError("the launcher was asked again")):
        other = attend(second)
    assert one.data_ptr() != other.data_ptr()
    check(first, one)
    check(second, other)


def test_a_result_goes_where_the_caller_wants_it() -> None:
    cases = [case_of("mha", "verify_chain", seed) for seed in (1, 2)]
    for case in cases:
        out = torch.full_like(attend(case), 7.0)
        assert attend(case, out=out) is out
        check(case, out)
    assert len(plans()) == 2
    assert None not in plans()


@pytest.mark.parametrize(
    "changes", [{"softcap": 3.0}, {"window_left": 5}, {"scale": 0.3}], ids=["soft cap", "window", "softmax scale"]
)
def test_another_number_is_another_call(changes: dict[str, Any]) -> None:
    case = case_of("mha", "verify_chain", 1)
    before = attend(case)
    changed = attend(case, **changes)
    assert len(plans()) == 2
    assert not torch.equal(before, changed)
    assert torch.equal(attend(case), before)
    assert torch.equal(attend(case, **changes), changed)


def test_other_strides_are_another_call() -> None:
    case = case_of("mha", "verify_chain", 1)
    call = case.call()
    wanted = launcher.attention(call)
    wide = torch.zeros(*call.q.shape[:-1], 2 * call.q.shape[-1])
    wide[..., : call.q.shape[-1]] = call.q
    for _ in range(2):
        assert torch.equal(attend(case, q=wide[..., : call.q.shape[-1]]), wanted)
    assert len(plans()) == 2


def test_a_tensor_that_starts_elsewhere_is_another_call() -> None:
    """Caches that no descriptor can read, since they do not start at a multiple of 16 bytes."""
    case = case_of("mha", "verify_chain", 1)
    call = case.call()
    wanted = launcher.attention(call)
    shifted = torch.zeros(call.k_cache.numel() + 2)[2:].view(call.k_cache.shape)
    shifted.copy_(call.k_cache)
    for _ in range(2):
        torch.testing.assert_close(attend(case, k_cache=shifted), wanted)
    assert len(plans()) == 2
    assert None not in plans()


def test_copies_are_never_repeated() -> None:
    """A launch reads a copy that the launcher made of the lengths: a later call must make its own."""
    first, second = (case_of("mha", "verify_chain", seed, lens=lens) for seed, lens in ((1, [26, 69]), (2, [60, 31])))
    for case in (first, second):
        lens = torch.zeros(4, dtype=torch.int32)
        lens[::2] = case.call().seq_lens
        check(case, attend(case, seq_lens=lens[::2]))
    assert set(plans()) == {None}


def test_one_tensor_in_two_places_is_never_repeated() -> None:
    """Of a launch that reads it nobody can say which of the two it would be in another call."""
    case = case_of("mha", "verify_chain", 1)
    keys, values = case.call().k_cache, case.call().v_cache
    shared = attend(case, v_cache=keys)
    assert plans() == [None]
    assert not torch.equal(shared, attend(case, v_cache=values))
    assert torch.equal(shared, attend(case, v_cache=keys))


def test_fp8_caches_that_are_read_as_pairs() -> None:
    cases = [case_of("mha", "verify_chain", seed, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn) for seed in (1, 2)]
    results = [attend(case) for case in cases]
    (plan,) = plans()
    assert plan is not None
    repeat._plans.clear()
    for case, result in zip(cases, results, strict=True):
        assert torch.equal(launcher.run(case.call(), launcher.SPLIT), result)


def _appended(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    drawn = torch.Generator().manual_seed(seed)
    caches = [torch.zeros(4, 16, 2, 32).to(dtype) for _ in range(2)]
    rows = [torch.randn(5, 2, 32, generator=drawn) for _ in range(2)]
    return (*caches, *rows, torch.randperm(64, generator=drawn)[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_appends(dtype: torch.dtype) -> None:
    scale = 1.0 if dtype == torch.float32 else 0.5
    for seed in (1, 2, 3):
        k_cache, v_cache, k, v, slots = _appended(dtype, seed)
        with mock.patch.object(append, "launch", side_effect=append.launch) as launches:
            append.append_kv(k_cache, v_cache, k, v, slots, scale, scale)
        assert launches.called == (seed == 1)
        with mock.patch.object(append, "repeated", side_effect=lambda _what, _given, _device, start: start()):
            wanted = [torch.zeros_like(cache) for cache in (k_cache, v_cache)]
            append.append_kv(*wanted, k, v, slots, scale, scale)
        for cache, other in zip((k_cache, v_cache), wanted, strict=True):
            assert cache.float().any()
            assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


def test_mla_appends() -> None:
    for seed in (1, 2):
        drawn = torch.Generator().manual_seed(seed)
        cache, rows, slots = (
            torch.zeros(4, 16, 48),
            torch.randn(5, 48, generator=drawn),
            torch.randperm(64, generator=drawn)[:5],
        )
        append.append_mla_kv(cache, rows[:, :32], rows[:, 32:], slots, 1.0)
        assert torch.equal(cache.view(64, 48)[slots], rows)
    assert len(plans()) == 1
    assert None not in plans()


def test_rope_and_append() -> None:
    for seed in (1, 2):
        k_cache, v_cache, k, v, slots = _appended(torch.float32, seed)
        q, angles = torch.randn(5, 4, 32), torch.rand(5, 16)
        found = [cache.clone() for cache in (k_cache, v_cache)]
        rotated = rope_append.rope_append_kv(q, k, v, angles.cos(), angles.sin(), *found, slots, 1.0, 1.0)
        wanted = ops.rope_append_kv(q, k, v, angles.cos(), angles.sin(), k_cache, v_cache, slots)
        for one, other in ((rotated, wanted), (found[0], k_cache), (found[1], v_cache)):
            torch.testing.assert_close(one, other)
    assert len(plans()) == 1
    assert None not in plans()


def test_launches_that_are_only_noted_are_left_alone() -> None:
    case = case_of("mha", "verify_chain", 1)
    attend(case)
    with recorded(Target(80, 108)) as launches:
        attend(case)
    assert len(launches) == 1


def test_a_part_of_the_gpu_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses a cooperative launch in a context with fewer multiprocessors than the first call had; inside of a capture
    that may end it."""
    case = case_of("mha", "verify_chain", 1)
    wanted = attend(case)
    (plan,) = plans()
    context, refused = [1], []

    def refuse(*_: Any) -> None:
        refused.append(context[0])
        raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    plan.starts[0] = plan.starts[0]._replace(run=refuse)
    monkeypatch.setattr(cooperative, "current_context", lambda: context[0])
    for context[0] in (1, 1, 2, 2, 1):
        assert torch.equal(attend(case), wanted)
    assert refused == [1, 2]
    attend(case, window_left=5)
    with mock.patch.object(launcher, "run", side_effect=AssertionError("another call was not refused")):
        attend(case, window_left=5)


def test_other_failures_of_a_launch_are_raised() -> None:
    case = case_of("mha", "verify_chain", 1)
    attend(case)
    (plan,) = plans()
    plan.starts[0] = plan.starts[0]._replace(run=mock.Mock(side_effect=RuntimeError("out of memory")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            attend(case)


def test_every_thread_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has called nothing of CUDA, and launches what another thread has noted."""
    case = case_of("mha", "extend", 1)
    out = attend(case)
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: made.append(threading.get_ident()))
    for _ in range(2):
        thread = threading.Thread(target=attend, args=(case, out))
        thread.start()
        thread.join()
    assert len(made) == 2


@pytest.mark.parametrize(
    ("knobs", "name", "value"),
    [
        (triton.knobs.runtime, "debug", not triton.knobs.runtime.debug),
        (triton.knobs.compilation, "instrumentation_mode", "consan"),
        (triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
    ],
    ids=["debug", "instrumentation", "stages"],
)
def test_other_settings_of_triton_are_another_call(
    knobs: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them Triton launches another binary, which it has to be asked for."""
    case = case_of("mha", "verify_chain", 1)
    with mock.patch.object(launcher, "run", side_effect=launcher.run) as asked:
        for _ in range(2):
            attend(case)
            with monkeypatch.context() as patch:
                patch.setattr(knobs, name, value)
                attend(case)
        attend(case)
    assert asked.call_count == (3 if name == "add_stages_inspection_hook" else 2)


@triton.jit
def _count_kernel(x, out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), tl.load(x + tl.arange(0, SIZE)) + 1)


def _counted(x: torch.Tensor, rows: int, result: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A result whose last row alone is written, in memory of several rows."""

    def run() -> torch.Tensor:
        out = repeat.empty((rows, 4), torch.float32, x.device)
        arguments = (x, out[-1], 4)
        repeat.launched(_count_kernel, _count_kernel[(1,)](*arguments), (1,), arguments, {})
        return result(out)

    return repeat.repeated(("counted", rows), (x,), x.device, run)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_parts_of_what_a_call_makes(rows: int, whole: bool) -> None:
    """A place in flat memory is known by its number, and a result by being what was made."""
    result: Callable[[torch.Tensor], torch.Tensor] = lambda out: out if whole else out[-1:]  # noqa: E731
    for value in (1.0, 2.0):
        found = _counted(torch.full((4,), value), rows, result)
        assert found.shape == (rows if whole else 1, 4)
        assert found[-1].tolist() == [value + 1] * 4
    assert (plans() != [None]) == (whole and rows == 1)


@pytest.mark.parametrize("failing", [True, False])
def test_a_call_that_fails_is_not_remembered(failing: bool) -> None:
    def run() -> torch.Tensor:
        if failing:
            raise ValueError
        return repeat.empty((2,), torch.float32, torch.device("cpu"))

    run_it: Callable[[], Any] = lambda: repeat.repeated("failing", (), torch.device("cpu"), run)  # noqa: E731
    if failing:
        with pytest.raises(ValueError):
            run_it()
        assert not plans()
    else:
        run_it()
        assert plans() == [None]  # it launched nothing
    assert repeat._notes.now is None


def test_no_more_calls_are_remembered_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "MOST", 2)
    for rows in range(1, 6):
        cache, c_kv = torch.zeros(4, 16, 48), torch.randn(rows, 48)
        append.append_mla_kv(cache, c_kv[:, :32], c_kv[:, 32:], torch.arange(rows), 1.0)
        assert torch.equal(cache.view(64, 48)[:rows], c_kv)
        assert len(repeat._plans) <= 2
