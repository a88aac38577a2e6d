"""What a call does to the target's logits before tokens are chosen: bias, penalties, forbidden tokens, a user's function.

At every verified position the logits become what plain decoding would make of them there: the history of node `n` is the
request's tokens and the node's own path, that is its ancestors and itself. They change in float32, in transformers' order:
bias, repetition penalty, frequency and presence penalties (vLLM's place for them), bad words, minimum length, the user's
function. The bitmask comes last: no function can allow again what a grammar forbids.

A dense pass takes the request's own counts, which buffers hold. The few tokens that a path adds are then computed anew and put
in their places; every value that goes to one place is the same, so nothing depends on an order.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from spec_ops.decoding.draft import Drafted
from spec_ops.decoding.sampling import SamplingParams
from spec_ops.decoding.state import ALL_MASKED, RoundState

LogitsProcessor = Callable[..., torch.Tensor]


def identity(processor: LogitsProcessor | None) -> tuple[int, ...]:
    """What tells a user's function apart from all others while somebody refers to it. A bound method is made anew whenever an
    object is asked for it: its object and its function count."""
    return (id(processor.__self__), id(processor.__func__)) if inspect.ismethod(processor) else (id(processor),)


@dataclass(frozen=True)
class LogitsFeatures:
    """Which changes a round makes. Values change from call to call, this makes another round.

    Attributes:
        bias: `logit_bias`, `suppress_tokens`, or bad words of one token.
        repetition: `repetition_penalty`.
        counts: `presence_penalty` or `frequency_penalty`.
        min_new_tokens: of a call with stop tokens.
        bad_words: `(N, M)`, room for `N` bad words a request, of `M` tokens before the last; None for none.
        bitmask: a packed token bitmask.
        processor: a user's function; functions are told apart by identity.
    """

    bias: bool = False
    repetition: bool = False
    counts: bool = False
    min_new_tokens: bool = False
    bad_words: tuple[int, int] | None = None
    bitmask: bool = False
    processor: LogitsProcessor | None = field(default=None, compare=False)
    _identity: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_identity", identity(self.processor))

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], stop_tokens: Sequence[int], processor: LogitsProcessor | None = None
    ) -> LogitsFeatures | None:
        """What a call with these parameters needs; None if it changes nothing."""
        words = [[word for word in p.bad_words_ids if len(word) > 1] for p in params]
        most, longest = max(map(len, words), default=0), max((len(word) for row in words for word in row), default=0)
        features = cls(
            bias=any(p.logit_bias or p.suppress_tokens or any(len(word) == 1 for word in p.bad_words_ids) for p in params),
            repetition=any(p.repetition_penalty != 1 for p in params),
            counts=any(p.presence_penalty or p.frequency_penalty for p in params),
            min_new_tokens=bool(stop_tokens) and any(p.min_new_tokens for p in params),
            # Powers of two, so that other words seldom make another round.
            bad_words=(1 << (most - 1).bit_length(), 1 << (longest - 2).bit_length()) if most else None,
            processor=processor,
        )
        return None if features == cls() else features


class _Paths(NamedTuple):
    """What the verified nodes add to the histories.

    Attributes:
        depth: `[bs, D]` int64, 0 for the root, which ends the history that all nodes share.
        tokens: `[bs, D]` int64, each node's token. A missing draft (-1) is token 0: no node after it can be accepted.
        on_path: bool that broadcasts to `[bs, D, D]`: whether node `j` is node `n` or an ancestor of it.
    """

    depth: torch.Tensor
    tokens: torch.Tensor
    on_path: torch.Tensor


class LogitsChanges(nn.Module):
    """The changes of one variant of a round, over buffers that the bucket's variants share.

    Args:
        state: of the bucket.
        features: which changes.
        vocab_size: `V`.
        num_tokens: tokens verified per request, `D`; 1 for plain decoding.

    Attributes:
        bias: `[bs, V]` float32, -inf for suppressed tokens.
        seen: `[bs, V]` bool, tokens of prompt and output.
        counts: `[bs, V]` int32, occurrences in the output.
        repetition_penalty: `[bs]` float32.
        presence_penalty: `[bs]` float32.
        frequency_penalty: `[bs]` float32.
        prompt_lens: `[bs]` int64, of the prompts.
        min_lens: `[bs]` int32, length (prompt and new tokens) before which no stop token can be chosen.
        bad_prefixes: `[bs, N, M]` int64, what stands before the last token of each bad word; -1 on the left.
        bad_tokens: `[bs, N]` int64, these last tokens; -1 for none.
        bitmask: `[bs, D, ceil(V / 32)]` int32 in xgrammar's layout: bit `v % 32` of word `v // 32` allows token `v` after node
            `n`. Filled by the caller before each round, row 0 also before the prefill.
    """

    bias: torch.Tensor
    seen: torch.Tensor
    counts: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    prompt_lens: torch.Tensor
    min_lens: torch.Tensor
    bad_prefixes: torch.Tensor
    bad_tokens: torch.Tensor
    bitmask: torch.Tensor

    def __init__(self, state: RoundState, features: LogitsFeatures, vocab_size: int, num_tokens: int) -> None:
        super().__init__()
        self.state, self.features, self.vocab_size = state, features, vocab_size
        self.processor = features.processor
        self.names_prompt_lens = names_prompt_lens(features.processor)
        words, length = features.bad_words or (0, 0)
        shapes: dict[str, tuple[bool, tuple[int, ...], torch.dtype]] = {
            "bias": (features.bias, (vocab_size,), torch.float32),
            "seen": (features.repetition, (vocab_size,), torch.bool),
            "repetition_penalty": (features.repetition, (), torch.float32),
            "counts": (features.counts, (vocab_size,), torch.int32),
            "presence_penalty": (features.counts, (), torch.float32),
            "frequency_penalty": (features.counts, (), torch.float32),
            "prompt_lens": (self.names_prompt_lens, (), torch.int64),
            "min_lens": (features.min_new_tokens, (), torch.int32),
            "bad_prefixes": (words > 0, (words, length), torch.int64),
            "bad_tokens": (words > 0, (words,), torch.int64),
            "bitmask": (features.bitmask, (num_tokens, -(-vocab_size // 32)), torch.int32),
        }
        for name, (used, tail, dtype) in shapes.items():
            if used:
                self.register_buffer(name, state.extra_buffer(name, tail, dtype), persistent=False)

    def load(self, rows: torch.Tensor, params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]]) -> None:
        """Begin requests: `params[i]` and `prompts[i]` are those of row `rows[i]`, where `rows` is int64 and on the device. The
        state has their history already."""
        features = self.features

        def put(buffer: torch.Tensor, values: Sequence[Any]) -> None:
            buffer.index_copy_(0, rows, torch.tensor(values, dtype=buffer.dtype, device="cpu").to(buffer.device))

        if features.repetition:
            put(self.repetition_penalty, [p.repetition_penalty for p in params])
            longest = max(map(len, prompts))
            own = torch.tensor([[*p, *[p[0]] * (longest - len(p))] for p in prompts], device="cpu").to(rows.device)
            self.seen.index_fill_(0, rows, False)
            self.seen.index_put_((rows[:, None], own), torch.ones_like(own, dtype=torch.bool))
        if features.counts:
            put(self.presence_penalty, [p.presence_penalty for p in params])
            put(self.frequency_penalty, [p.frequency_penalty for p in params])
            self.counts.index_fill_(0, rows, 0)
        if self.names_prompt_lens:
            put(self.prompt_lens, [len(prompt) for prompt in prompts])
        if features.min_new_tokens:
            lens = [len(prompt) + p.min_new_tokens for p, prompt in zip(params, prompts, strict=True)]
            put(self.min_lens, [min(length, 2**31 - 1) for length in lens])
        if features.bias:
            self.bias.index_fill_(0, rows, 0.0)
            entries = [(row, token, bias) for row, p in enumerate(params) for token, bias in _biases(p).items()]
            if entries:
                chosen, tokens, biases = (torch.tensor(v, device="cpu").to(rows.device) for v in zip(*entries, strict=True))
                self.bias.index_put_((rows[chosen], tokens), biases)
        if features.bad_words is not None:
            words, length = features.bad_words
            table = [[[-1] * (length + 1)] * words for _ in params]
            for row, p in enumerate(params):
                own_words = [word for word in p.bad_words_ids if len(word) > 1]
                table[row] = [[-1] * (length + 1 - len(w)) + list(w) for w in own_words] + table[row][len(own_words) :]
            put(self.bad_prefixes, [[word[:-1] for word in row] for row in table])
            put(self.bad_tokens, [[word[-1] for word in row] for row in table])
        if features.bitmask:
            self.bitmask.index_fill_(0, rows, -1)

    def forward(self, logits: torch.Tensor, drafted: Drafted | None = None) -> torch.Tensor:
        """The changed logits, float32.

        Args:
            logits: `[bs, D, V]` of the target after each node, in any floating dtype; not changed.
            drafted: the nodes; None for the root alone.
        """
        features, state = self.features, self.state
        paths = self._paths(drafted)
        bs, nodes = logits.shape[:2]
        row = torch.arange(bs, device=logits.device)[:, None, None]
        node = torch.arange(nodes, device=logits.device)[None, :, None]
        masked_early = features.bitmask and self.processor is None
        out = self._penalized(
            logits,
            self.bias[:, None] if features.bias else None,
            self.seen[:, None] if features.repetition else None,
            self.counts[:, None] if features.counts else None,
            self._allowed(nodes) if masked_early else None,
        )
        if nodes > 1 and (features.repetition or features.counts):
            self._count_paths(logits, out, paths, (row, node))
        if features.bad_words is not None:
            # A sum, since a token may end several bad words: forbidden by one of them is forbidden.
            banned = torch.where(self._ends_in_bad_prefix(paths), -math.inf, 0.0)
            out.index_put_((row, node, self.bad_tokens.clamp(min=0)[:, None]), banned, accumulate=True)
        if features.min_new_tokens:
            early = (state.committed_lens[:, None] + 1 + paths.depth < self.min_lens[:, None])[:, :, None]
            banned = torch.where(early & (state.stop_tokens >= 0)[:, None], -math.inf, 0.0)
            out.index_put_((row, node, state.stop_tokens.clamp(min=0)[:, None]), banned, accumulate=True)
        if self.processor is not None:
            lengths = state.committed_lens.long()[:, None] + 1 + paths.depth
            out = self._processed(out.flatten(0, 1), self._histories(paths).flatten(0, 1), lengths.flatten()).view_as(out)
            if features.bitmask:
                out = torch.where(self._allowed(nodes), out, -math.inf)
        return out

    def update(self, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Count what was emitted: the first `count [bs]` of `tokens [bs, P]`, after the state's `commit`."""
        features, state = self.features, self.state
        if not (features.repetition or features.counts):
            return
        row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        kept = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        ids = torch.where(kept, tokens, state.last_token[:, None])  # in the text anyway
        if features.repetition:
            self.seen.index_put_((row, ids), torch.ones_like(kept))
        if features.counts:
            self.counts.index_put_((row, ids), kept.to(torch.int32), accumulate=True)

    def _paths(self, drafted: Drafted | None) -> _Paths:
        state = self.state
        if drafted is None:
            root = state.last_token[:, None]
            return _Paths(torch.zeros_like(root), root, torch.ones_like(root, dtype=torch.bool)[:, :, None])
        node = torch.arange(drafted.candidates.shape[1], device=drafted.candidates.device)
        mask = drafted.tree_mask
        on_path = (node[:, None] >= node)[None] if mask is None else ((mask[:, :, None] >> node) & 1) != 0
        depth = drafted.positions.long() - state.committed_lens.long()[:, None]
        return _Paths(depth, drafted.candidates.clamp(min=0), on_path)

    def _allowed(self, nodes: int) -> torch.Tensor:
        """`[bs, nodes, V]` bool: the bitmask, a token each."""
        bits = self.bitmask[:, :nodes, :, None] >> torch.arange(32, dtype=torch.int32, device=self.bitmask.device)
        return (bits & 1).flatten(2)[:, :, : self.vocab_size] != 0

    def _penalized(self, logits, bias, seen, counts, allowed) -> torch.Tensor:
        """Bias, penalties and bitmask on `logits [bs, D, n]`; the others are of this shape too, or broadcast to it. A new
        tensor."""
        out = logits.to(torch.float32, copy=True)
        if bias is not None:
            out = out + bias
        if seen is not None:
            penalty = self.repetition_penalty[:, None, None]
            out = torch.where(seen, torch.where(out > 0, out / penalty, out * penalty), out)
        if counts is not None:
            out = out - self.frequency_penalty[:, None, None] * counts
            out = out - torch.where(counts > 0, self.presence_penalty[:, None, None], 0.0)
        return out if allowed is None else torch.where(allowed, out, -math.inf)

    def _count_paths(self, logits, out, paths: _Paths, places) -> None:
        """Penalize the tokens of each node's path in `out`, now that they have occurred once more."""
        drafts = paths.on_path & (torch.arange(paths.tokens.shape[1], device=out.device) > 0)  # the root is counted already
        # `[bs, D, D]`: the tokens of node n's path, and the root's in the place of all others, again and again.
        tokens = torch.where(drafts, paths.tokens[:, None], paths.tokens[:, :1, None])
        flat = tokens.flatten(1)
        counts = None
        if self.features.counts:
            again = drafts[:, :, None] & (paths.tokens[:, None, None] == tokens[..., None])
            counts = self.counts.gather(1, flat).view_as(tokens) + again.sum(-1, dtype=torch.int32)
        bias = self.bias.gather(1, flat).view_as(tokens) if self.features.bias else None
        seen = torch.ones_like(tokens, dtype=torch.bool) if self.features.repetition else None
        allowed = None
        if self.features.bitmask and self.processor is None:
            words = self.bitmask[:, : tokens.shape[1]].gather(2, tokens // 32)
            allowed = (words >> (tokens % 32).to(torch.int32)) & 1 != 0
        out.index_put_((*places, tokens), self._penalized(logits.gather(2, tokens), bias, seen, counts, allowed))

    def _by_depth(self, paths: _Paths) -> torch.Tensor:
        """`[bs, D, C]` int64: the token at each depth of a node's path, 0 past its own."""
        longest = self.state.output.shape[1] - 2
        depth = torch.arange(longest, device=paths.depth.device)
        here = paths.on_path[:, :, None] & (paths.depth[:, None, None] == depth[:, None])
        return torch.where(here, paths.tokens[:, None, None], 0).sum(-1)

    def _ends_in_bad_prefix(self, paths: _Paths) -> torch.Tensor:
        """`[bs, D, N]` bool: whether a node's history ends with what stands before the last token of a bad word."""
        length = self.bad_prefixes.shape[2]
        back = torch.arange(length - 1, -1, -1, device=paths.depth.device)
        depth = paths.depth[:, :, None] - back  # of the node at which the token stands; up to 0 all share them
        committed = self.state.committed_lens.long()[:, None, None]
        position = (committed + depth).clamp(min=0)
        shared = self.state.tokens.gather(1, position.flatten(1)).view_as(position)
        by_depth = self._by_depth(paths)
        own = by_depth.gather(2, depth.clamp(0, by_depth.shape[2] - 1))
        last = torch.where(depth > 0, own, shared)
        last = torch.where(committed + depth >= 0, last, -2)[:, :, None]  # before the text: no token
        prefix = self.bad_prefixes[:, None]
        return ((prefix == last) | (prefix == -1)).all(-1) & (self.bad_tokens >= 0)[:, None]

    def _histories(self, paths: _Paths) -> torch.Tensor:
        """`[bs, D, L]` int64: each node's history, 0 past its end."""
        state = self.state
        position = torch.arange(state.tokens.shape[1], device=paths.depth.device)
        depth = (position - state.committed_lens.long()[:, None])[:, None].expand(-1, paths.depth.shape[1], -1)
        by_depth = self._by_depth(paths)
        own = by_depth.gather(2, depth.clamp(0, by_depth.shape[2] - 1))
        tokens = torch.where(depth > 0, own, state.tokens[:, None])
        return torch.where(depth <= paths.depth[:, :, None], tokens, 0)

    def _processed(self, logits: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert self.processor is not None
        named = {}
        if self.names_prompt_lens:
            nodes = len(lengths) // len(self.prompt_lens)
            named["prompt_lens"] = self.prompt_lens[:, None].expand(-1, nodes).flatten()
        out = self.processor(logits, history, lengths, **named)
        check_processed(out, logits)
        return out


def _biases(params: SamplingParams) -> dict[int, float]:
    """What is added to the logits at all times."""
    forbidden = [*params.suppress_tokens, *(word[0] for word in params.bad_words_ids if len(word) == 1)]
    return {**(params.logit_bias or {}), **dict.fromkeys(forbidden, -math.inf)}


def masked_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Greedy `tokens [..., n]` of `logits [..., n, V]`, `ALL_MASKED` where the largest logit is -inf."""
    return torch.where(logits.gather(-1, tokens[..., None])[..., 0] == -math.inf, ALL_MASKED, tokens)


def masked_end(support: torch.Tensor, accepted_tokens: torch.Tensor, path: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """A sampled round's tokens, with `ALL_MASKED` in the place of a last -1 if every token was masked there.

    Args:
        support: `[bs, D, 3]` int64 of the target's logits (`ops.sampling_support`).
        accepted_tokens, path: `[bs, P]` int64.
        lens: `[bs]` int32.
    """
    end = (lens - 1).long()[:, None]
    masked = support[:, :, 1].gather(1, path.gather(1, end)) == ALL_MASKED
    place = torch.arange(accepted_tokens.shape[1], device=support.device)
    return torch.where(masked & (place == end) & (accepted_tokens < 0), ALL_MASKED, accepted_tokens)


def names_prompt_lens(processor: LogitsProcessor | None) -> bool:
    """Whether a user's function has a parameter `prompt_lens`."""
    called = processor.forward if isinstance(processor, nn.Module) else processor
    try:
        return called is not None and "prompt_lens" in inspect.signature(called).parameters
    except (TypeError, ValueError):  # of a builtin
        return False


def check_processed(out: Any, logits: torch.Tensor) -> None:
    """Raise a ValueError unless `out` is what a logits processor must return for `logits`."""
    wanted = f"generate: `logits_processor` must return float32 logits of shape {tuple(logits.shape)}"
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"{wanted}, got {type(out).__name__}")
    if out.shape != logits.shape or out.dtype != torch.float32 or out.device != logits.device:
        kind = str(out.dtype).removeprefix("torch.")
        raise ValueError(f"{wanted} on {logits.device}, got {kind} of shape {tuple(out.shape)} on {out.device}")


def check_processor(processor: Any, state: RoundState, vocab_size: int, compiled: bool) -> None:
    """Run a user's function once on rows of zeros, traced if it is to be compiled.

    Raises:
        ValueError: naming `logits_processor`, and what it did.
    """
    rows, device = state.batch_size, state.tokens.device
    logits = torch.zeros(rows, vocab_size, device=device)
    history = torch.zeros(rows, state.tokens.shape[1], dtype=torch.int64, device=device)
    ones = torch.ones(rows, dtype=torch.int64, device=device)
    inputs, named = (logits, history, ones), {"prompt_lens": ones} if names_prompt_lens(processor) else {}
    if not compiled:
        try:
            out = processor(*inputs, **named)
        except Exception as error:
            raise ValueError(f"generate: `logits_processor` raised {type(error).__name__}: {error}") from error
    else:
        from torch._dynamo.exc import TorchDynamoException

        from spec_ops.passes.compile import with_own_code

        try:
            out = torch.compile(with_own_code(processor), backend="eager", fullgraph=True, dynamic=False)(*inputs, **named)
        except TorchDynamoException as error:
            reason = next(line.strip() for line in str(error).splitlines() if line.strip())
            raise ValueError(
                f"generate: `logits_processor` cannot be traced into the round, which `compile=True` needs: {reason}"
            ) from error
        except Exception as error:
            raise ValueError(f"generate: `logits_processor` raised {type(error).__name__}: {error}") from error
    check_processed(out, logits)
