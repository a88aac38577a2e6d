"""Stand-ins for FlashInfer's sampling functions: they bind calls to a release's signature, check what the real ones require,
and compute what those document, densely."""

from __future__ import annotations

import sys
import types

import torch

from tests.helpers.provider_fakes import Fakes

FUNCTIONS = (
    "softmax", "sampling_from_logits", "top_p_sampling_from_probs", "min_p_sampling_from_probs",
    "top_k_top_p_sampling_from_logits", "top_k_renorm_probs", "top_p_renorm_probs", "chain_speculative_sampling",
)  # fmt: skip


def install(monkeypatch, package: str) -> Fakes:
    """`flashinfer.sampling` of `package`, a key of `RECORDED`."""
    fakes = Fakes([package])
    parent, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.sampling")
    parent.sampling = module  # type: ignore[attr-defined]
    for name in FUNCTIONS:
        setattr(module, name, fakes.bound(f"flashinfer.sampling:{name}", globals()[name]))
    monkeypatch.setitem(sys.modules, "flashinfer", parent)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    return fakes


def _column(setting, rows: int):
    """A setting as a number or as one of each row."""
    if not isinstance(setting, torch.Tensor):
        return setting
    assert setting.shape == (rows,)
    return setting[:, None]


def _draw(probs: torch.Tensor, seed, offset) -> torch.Tensor:
    for number in (seed, offset):  # otherwise the host's generator is read
        assert number.dtype == torch.int64
        assert number.shape == (1,)
    assert probs.dtype == torch.float32
    generator = torch.Generator().manual_seed(int(seed) + int(offset))
    return torch.multinomial(probs, 1, generator=generator)[:, 0].int()


def softmax(logits, temperature=None, enable_pdl=None):
    return (logits.float() / _column(temperature, len(logits))).softmax(-1)


def sampling_from_logits(logits, seed=None, offset=None):
    assert logits.dtype == torch.float32
    return _draw(logits.softmax(-1), seed, offset)


def top_k_renorm_probs(probs, top_k):
    """All of the tokens that are as likely as the last are kept."""
    count = _column(top_k, len(probs)) if isinstance(top_k, torch.Tensor) else torch.full((len(probs), 1), top_k)
    least = probs.sort(descending=True).values.gather(1, count.long() - 1)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    ordered = probs.sort(descending=True).values
    count = (ordered.cumsum(-1) < _column(top_p, len(probs))).sum(-1, keepdim=True)
    kept = torch.where(probs >= ordered.gather(1, count.clamp(max=probs.shape[1] - 1)), probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_sampling_from_probs(probs, top_p, seed=None, offset=None):
    return _draw(top_p_renorm_probs(probs, top_p), seed, offset)


def min_p_sampling_from_probs(probs, min_p, seed=None, offset=None):
    return _draw(torch.where(probs >= _column(min_p, len(probs)) * probs.amax(-1, keepdim=True), probs, 0.0), seed, offset)


def top_k_top_p_sampling_from_logits(logits, top_k, top_p, seed=None, offset=None):
    assert logits.dtype == torch.float32, "its softmax is in the dtype of the logits"
    return top_p_sampling_from_probs(top_k_renorm_probs(logits.softmax(-1), top_k), top_p, seed, offset)


def chain_speculative_sampling(draft_probs, draft_token_ids, target_probs, seed=None, offset=None):
    assert draft_probs.dtype == target_probs.dtype == torch.float32
    assert draft_token_ids.dtype == torch.int32
    bs, steps, vocab = draft_probs.shape
    assert target_probs.shape == (bs, steps + 1, vocab)
    generator = torch.Generator().manual_seed(int(seed) + int(offset))
    out = torch.full((bs, steps + 1), -1, dtype=torch.int32)
    for b in range(bs):
        for step in range(steps + 1):
            p = target_probs[b, step]
            if step < steps:
                q, token = draft_probs[b, step], int(draft_token_ids[b, step])
                if float(torch.rand((), generator=generator)) * q[token] < p[token]:
                    out[b, step] = token
                    continue
                p = (p - q).clamp(min=0)
            out[b, step] = torch.multinomial(p, 1, generator=generator)[0]
            break
    return out, torch.zeros(bs, dtype=torch.int32), (out >= 0).sum(1) - 1
