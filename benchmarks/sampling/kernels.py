"""What is measured: the ops of this package, FlashInfer's functions, torch's own, and a kernel that only reads.

Each takes a `Problem` and the index of a buffer set, and returns one tensor that `Expected` can check. All of them start from
logits as a language model's head gives them and end with what the job asks for; FlashInfer's that take float32 convert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.sampling.cases import STEPS, Problem
from spec_ops import ops
from spec_ops.backends import BackendError

READ = "reading alone"
Function = Callable[[Problem, int], torch.Tensor]


class Kernel(NamedTuple):
    """`exact`: it computes as the ops define, with the problem's uniforms. `prepare`: what it needs besides, made untimed."""

    function: Callable[..., torch.Tensor]
    exact: bool = False
    block: bool = False
    prepare: Callable[[Problem, int], Any] | None = None


# This package.


def _draw(problem: Problem, index: int) -> torch.Tensor:
    settings = (problem.temperature, problem.top_k, problem.top_p, problem.min_p)
    return ops.sample_logits(problem.logits[index], problem.uniforms, *settings).tokens


def _support(problem: Problem, index: int) -> torch.Tensor:
    return ops.sampling_support(problem.logits[index], problem.temperature, problem.top_k, problem.top_p, problem.min_p)


def _probs(problem: Problem, index: int) -> torch.Tensor:
    return ops.sampling_probs(problem.logits[index], problem.temperature, problem.top_k, problem.top_p, problem.min_p)


def _target_support(problem: Problem, index: int) -> torch.Tensor:
    return ops.sampling_support(problem.target_logits(index), *problem.by_request())


def _accept(problem: Problem, index: int, support: torch.Tensor, block: bool = False) -> torch.Tensor:
    return ops.accept_sampled_logits(
        problem.candidates[index],
        problem.target_logits(index),
        support,
        problem.uniforms.view(-1, STEPS + 1),
        problem.final_uniforms,
        problem.by_request()[0],
        draft_logits=problem.draft_logits[index],
        draft_support=problem.draft_support[index],
        block=block,
    ).tokens


def _verify(problem: Problem, index: int, block: bool = False) -> torch.Tensor:
    return _accept(problem, index, _target_support(problem, index), block)


def _accept_probs(problem: Problem, index: int, probs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    target, draft = probs
    coins = (problem.uniforms.view(-1, STEPS + 1), problem.final_uniforms)
    return ops.accept_sampled(problem.candidates[index], target, *coins, draft_probs=draft).tokens


def _both_probs(problem: Problem, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    settings = problem.by_request()
    return tuple(ops.sampling_probs(x, *settings) for x in (problem.target_logits(index), problem.draft_logits[index]))  # type: ignore[return-value]


# FlashInfer. Seeds are tensors: numbers would be read from the host's generator, which a graph cannot replay.


def _flashinfer() -> Any:
    import flashinfer.sampling

    return flashinfer.sampling


def _seed(problem: Problem) -> dict[str, torch.Tensor]:
    seed = torch.ones(1, dtype=torch.int64, device=problem.temperature.device)
    return {"seed": seed, "offset": torch.zeros_like(seed)}


def _cooled(problem: Problem, index: int) -> torch.Tensor:
    logits, temperature = problem.logits[index].float(), problem.case.temperature
    return logits if temperature == 1 else logits / problem.temperature[:, None]


def _flashinfer_draw(problem: Problem, index: int, seed: dict[str, torch.Tensor], scalar: bool = False) -> torch.Tensor:
    """With a setting per row, as requests have; or with one number for all, for which FlashInfer has a faster way."""
    sampling, setting = _flashinfer(), problem.case.setting
    top_k, top_p, min_p = problem.top_k, problem.top_p, problem.min_p
    if scalar and not setting.cuts:
        raise BackendError("nothing is set, so nothing is set by one number")
    if not setting.cuts:
        return sampling.sampling_from_logits(_cooled(problem, index), **seed)
    if setting.top_k:
        cuts = (setting.top_k, setting.top_p) if scalar else (top_k, 1.0 if top_p is None else top_p)
        # Release 0.7 can pick the k largest before anything is converted; elsewhere a softmax in bfloat16 would come out wrong.
        picks = getattr(sampling, "_top_k_first_fast_path_applicable", lambda *_: False)
        raw = problem.case.temperature == 1 and picks(problem.logits[index], cuts[0], None)
        logits = problem.logits[index] if raw else _cooled(problem, index)
        return sampling.top_k_top_p_sampling_from_logits(logits, *cuts, **seed)
    probs = sampling.softmax(problem.logits[index], temperature=problem.temperature)
    if setting.min_p:
        return sampling.min_p_sampling_from_probs(probs, setting.min_p if scalar else min_p, **seed)
    return sampling.top_p_sampling_from_probs(probs, setting.top_p if scalar else top_p, **seed)


def _flashinfer_probs(problem: Problem, index: int, logits: torch.Tensor | None = None) -> torch.Tensor:
    """`logits`: default the target's `[rows, V]`."""
    sampling, setting = _flashinfer(), problem.case.setting
    if setting.min_p:
        raise BackendError("FlashInfer has no function for probabilities after min-p")
    logits = problem.logits[index] if logits is None else logits
    rows = len(logits)
    probs = sampling.softmax(logits, temperature=problem.temperature[:rows])
    if problem.top_k is not None:
        probs = sampling.top_k_renorm_probs(probs, problem.top_k[:rows])
    return probs if problem.top_p is None else sampling.top_p_renorm_probs(probs, problem.top_p[:rows])


def _flashinfer_drafted(problem: Problem, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Seeds, drafts, and the distributions that they were drawn from, which drafting left."""
    draft = _flashinfer_probs(problem, index, problem.draft_logits[index].flatten(0, 1)).unflatten(0, (-1, STEPS))
    return _seed(problem), problem.candidates[index][:, 1:].int().contiguous(), draft


def _flashinfer_chain(problem: Problem, target: torch.Tensor, seed, drafts, draft) -> torch.Tensor:
    return _flashinfer().chain_speculative_sampling(draft, drafts, target.view(-1, STEPS + 1, target.shape[-1]), **seed)[0]


def _flashinfer_verify(problem: Problem, index: int, drafted) -> torch.Tensor:
    return _flashinfer_chain(problem, _flashinfer_probs(problem, index), *drafted)


def _flashinfer_given(problem: Problem, index: int):
    return _flashinfer_probs(problem, index), *_flashinfer_drafted(problem, index)


def _flashinfer_accept(problem: Problem, index: int, given) -> torch.Tensor:
    return _flashinfer_chain(problem, *given)


# torch: what engines and transformers do where they have no kernel, by a sort.


def _torch_cut(problem: Problem, logits: torch.Tensor) -> torch.Tensor:
    """Probabilities of `logits [n, V]`, float32, after the settings of the first `n` rows."""
    rows = len(logits)
    logits = logits.float() / problem.temperature[:rows, None]
    if problem.top_k is not None or problem.top_p is not None:
        ordered, ids = logits.sort(descending=True)
        if problem.top_k is not None:
            place = torch.arange(logits.shape[1], device=logits.device)
            ordered = ordered.masked_fill(place >= problem.top_k[:rows, None], float("-inf"))
        if problem.top_p is not None:
            probs = ordered.softmax(-1)
            ordered = ordered.masked_fill(probs.cumsum(-1) - probs >= problem.top_p[:rows, None], float("-inf"))
        logits = ordered.scatter(1, ids, ordered)
    probs = logits.softmax(-1)
    if problem.min_p is not None:
        probs = probs.masked_fill(probs < problem.min_p[:rows, None] * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _race(weights: torch.Tensor) -> torch.Tensor:
    """A token a row, by exponential times: `multinomial` waits for the device."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def _torch_draw(problem: Problem, index: int) -> torch.Tensor:
    return _race(_torch_cut(problem, problem.logits[index]))


def _torch_probs(problem: Problem, index: int) -> torch.Tensor:
    return _torch_cut(problem, problem.logits[index])


def _torch_drafted(problem: Problem, index: int) -> torch.Tensor:
    return _torch_cut(problem, problem.draft_logits[index].flatten(0, 1)).unflatten(0, (-1, STEPS))


def _torch_chain(problem: Problem, index: int, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    target = target.view(-1, STEPS + 1, target.shape[-1])
    drafts = problem.candidates[index][:, 1:, None]
    p, q = (probs.gather(2, drafts)[..., 0] for probs in (target[:, :-1], draft))
    coins = problem.uniforms.view(-1, STEPS + 1)[:, :-1]
    accepted = (coins * q < p).long().cumprod(1).sum(1)[:, None]
    last = accepted[..., None].expand(-1, -1, target.shape[-1])
    before = draft.gather(1, last.clamp(max=STEPS - 1))[:, 0]
    residual = (target.gather(1, last)[:, 0] - torch.where(accepted < STEPS, before, 0.0)).clamp(min=0)
    place = torch.arange(STEPS + 1, device=accepted.device)
    padded = torch.nn.functional.pad(drafts[..., 0], (0, 1), value=-1).masked_fill(place > accepted, -1)
    return padded.scatter(1, accepted, _race(residual)[:, None])


def _torch_verify(problem: Problem, index: int, draft: torch.Tensor) -> torch.Tensor:
    return _torch_chain(problem, index, _torch_probs(problem, index), draft)


def _torch_accept(problem: Problem, index: int, given) -> torch.Tensor:
    return _torch_chain(problem, index, *given)


def read_logits(problem: Problem, index: int) -> torch.Tensor:
    """The largest logit of each stretch of the buffer."""
    logits = problem.logits[index]
    if logits.is_cuda:
        from benchmarks.sampling.read import largest_of_stretches  # it imports triton

        return largest_of_stretches(logits)
    return logits.amax(-1)


OURS = "spec_ops"
KERNELS: dict[str, dict[str, Kernel]] = {
    "draw": {
        READ: Kernel(read_logits),
        OURS: Kernel(_draw, exact=True),
        "flashinfer": Kernel(_flashinfer_draw, prepare=lambda problem, _: _seed(problem)),
        "flashinfer, one number": Kernel(
            lambda problem, index, seed: _flashinfer_draw(problem, index, seed, scalar=True),
            prepare=lambda problem, _: _seed(problem),
        ),
        "torch": Kernel(_torch_draw),
    },
    "support": {
        READ: Kernel(read_logits),
        OURS: Kernel(_support, exact=True),
        "spec_ops, probabilities": Kernel(_probs, exact=True),
        "flashinfer": Kernel(_flashinfer_probs),
        "torch": Kernel(_torch_probs),
    },
    "verify": {
        READ: Kernel(read_logits),
        OURS: Kernel(_verify, exact=True),
        "spec_ops, block": Kernel(lambda problem, index: _verify(problem, index, block=True), exact=True, block=True),
        "flashinfer": Kernel(_flashinfer_verify, prepare=_flashinfer_drafted),
        "torch": Kernel(_torch_verify, prepare=_torch_drafted),
    },
    "accept": {
        OURS: Kernel(_accept, exact=True, prepare=_target_support),
        "spec_ops, block": Kernel(
            lambda problem, index, support: _accept(problem, index, support, block=True),
            exact=True,
            block=True,
            prepare=_target_support,
        ),
        "spec_ops, probabilities": Kernel(_accept_probs, exact=True, prepare=_both_probs),
        "flashinfer": Kernel(_flashinfer_accept, prepare=_flashinfer_given),
        "torch": Kernel(
            _torch_accept, prepare=lambda problem, index: (_torch_probs(problem, index), _torch_drafted(problem, index))
        ),
    },
}
NAMES = list(dict.fromkeys(name for kernels in KERNELS.values() for name in kernels))
