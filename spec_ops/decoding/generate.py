"""Generation around the round: prefill, batch buckets, stop tokens, streaming, statistics."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.draft import first_drafts
from spec_ops.decoding.round import PlainRound, SpeculativeRound, next_token
from spec_ops.decoding.state import MAX_STOP_TOKENS, RoundState
from spec_ops.models.drafts import Draft
from spec_ops.models.paged import PagedAttention, PagedKVCache
from spec_ops.models.target import Target

OnTokens = Callable[[int, list[int]], None]
StopWhen = Callable[[int, list[int], int], int | None]
_INTEGERS = (int, np.integer)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"SamplingParams: `temperature` must be finite and at least 0, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"SamplingParams: `top_k` must be in [0, 2**31), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams: `top_p` must be in (0, 1], got {self.top_p}")
        # Room for the prompt's index, which is added to it.
        if not isinstance(self.seed, int) or not -(2**62) <= self.seed < 2**62:
            raise ValueError(f"SamplingParams: `seed` must be an int in [-2**62, 2**62), got {self.seed}")


@dataclass
class GenerationStats:
    """Counts over one `generate` call.

    Attributes:
        rounds: target forwards after prefill (batched forwards, whatever the batch size).
        request_rounds: the same counted per unfinished request.
        new_tokens: tokens emitted, the prefill's first tokens included.
        seconds: wall time of prefill and decoding, the compiler's included; decode_seconds: of decoding alone.
    """

    rounds: int = 0
    request_rounds: int = 0
    new_tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens a request gains per round."""
        return (self.new_tokens - self.requests) / self.request_rounds if self.request_rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed over the whole batch, without the prefill and its tokens."""
        return (self.new_tokens - self.requests) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class GenerationResult:
    """`tokens[i]`: the new tokens of prompt `i`, a stop token included if one ended it."""

    tokens: list[list[int]]
    stats: GenerationStats = field(default_factory=GenerationStats)


class Generator:
    """Decodes batches of prompts, speculatively if a draft is given.

    KV pools, state and compiled rounds are made once and reused: batches are padded to the next bucket, so a new batch inside a
    bucket compiles and records nothing.

    Args:
        target: the model whose output is wanted. draft: None for plain decoding.
        config: shape of a round.
        max_batch_size: most requests decoded at once; longer prompt lists run in groups. Buckets: powers of two up to it.
        max_seq_len: longest prompt plus new tokens.
        page_size: KV page size, 1 to 128.
        cache_dtype: default the model's; `torch.float8_e4m3fn` quantizes with scale 1.
        compile: compile rounds with `spec_ops.compile`: the graph passes, and one CUDA graph per bucket.
        backend: of every attention op. `"triton-deterministic"`: batch-invariant attention, see `spec_ops/ops/attention.py`.
        prefill_backend: of the prompts' ragged extend, where it shall differ: not every kernel provider has one.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        config: SpeculationConfig | None = None,
        *,
        max_batch_size: int = 8,
        max_seq_len: int = 2048,
        page_size: int = 16,
        cache_dtype: torch.dtype | None = None,
        compile: bool = False,
        backend: str = "auto",
        prefill_backend: str | None = None,
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_seq_len", max_seq_len)):
            if value < 1:
                raise ValueError(f"Generator: `{name}` must be at least 1, got {value}")
        if not 1 <= page_size <= 128:
            raise ValueError(f"Generator: `page_size` must be in [1, 128], got {page_size}")
        self.target, self.draft = target.eval(), draft.eval() if draft is not None else None
        self.config = config or SpeculationConfig()
        self.max_batch_size, self.max_seq_len, self.page_size = max_batch_size, max_seq_len, page_size
        self.compile, self.backend = compile, backend
        self.prefill_backend = backend if prefill_backend is None else prefill_backend
        weight = target.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        if draft is not None:
            self._check_draft(draft)
        if cache_dtype not in (None, self.dtype, torch.float8_e4m3fn):
            raise ValueError(f"Generator: `cache_dtype` must be the model's {self.dtype} or float8_e4m3fn, got {cache_dtype}")
        reserve = self.config.reserve if draft is not None else 1
        self.max_pages = -(-(max_seq_len + reserve) // page_size)
        pool: dict[str, Any] = {"dtype": cache_dtype or self.dtype, "device": self.device}
        num_pages = self.max_pages * max_batch_size
        self.target_cache = PagedKVCache(target.config, num_pages, page_size, **pool)
        self.draft_cache = PagedKVCache(draft.config, num_pages, page_size, **pool) if draft is not None else None
        self._states: dict[int, RoundState] = {}
        self._rounds: dict[tuple[int, bool], Callable[[], None]] = {}

    def _check_draft(self, draft: Draft) -> None:
        vocab = self.target.config.vocab_size
        if draft.config.vocab_size != vocab:
            raise ValueError(f"Generator: `draft` must know the target's {vocab} tokens, got {draft.config.vocab_size}")
        if self.config.topk > draft.draft_vocab_size:
            raise ValueError(
                f"Generator: `config.topk` must be at most the draft's vocabulary of {draft.draft_vocab_size}, "
                f"got {self.config.topk}"
            )
        for parameter in draft.parameters():
            if (parameter.dtype, parameter.device) != (self.dtype, self.device):
                raise ValueError(
                    f"Generator: `draft` must be {self.dtype} on {self.device}, as the target is, "
                    f"got {parameter.dtype} on {parameter.device}"
                )

    def bucket(self, batch_size: int) -> int:
        """The padded batch size for `batch_size` requests."""
        return min(1 << (batch_size - 1).bit_length(), self.max_batch_size)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        stop_tokens: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        on_tokens: OnTokens | None = None,
        stop_when: StopWhen | None = None,
        progress: bool = False,
    ) -> GenerationResult:
        """Decode every prompt.

        Args:
            prompts: token ids, one non-empty sequence (list, 1-d array or tensor) per request.
            max_new_tokens: for all, or one per prompt; each at least 1.
            stop_tokens: at most 8 ids; a request ends with the first it emits.
            sampling: default greedy. Request `i` uses seed `sampling.seed + i`.
            on_tokens: called as `on_tokens(prompt_index, new_tokens)` whenever a request gains tokens.
            stop_when: called before that as `stop_when(prompt_index, tokens, count)` with all its tokens so far, the last
                `count` of them new; a number ends the request with that many of the new ones.
            progress: show a progress bar of emitted tokens on stderr, and say when a round is being compiled.

        Raises:
            ValueError: naming the argument, before anything runs.
        """
        prompts = [p.tolist() if isinstance(p, torch.Tensor) else p for p in prompts]
        limits = self._check(prompts, max_new_tokens, stop_tokens)
        sampling = sampling or SamplingParams()
        result = GenerationResult([[] for _ in prompts])
        result.stats.requests = len(prompts)
        start = time.perf_counter()
        with tqdm(total=sum(limits), unit="tok", disable=not progress, desc="generate") as bar:
            for first in range(0, len(prompts), self.max_batch_size):
                members = range(first, min(first + self.max_batch_size, len(prompts)))
                group = _Group(members, self._state(self.bucket(len(members))), result, on_tokens, stop_when, bar)
                self._generate_group(prompts, group, limits, stop_tokens, sampling)
        result.stats.seconds = time.perf_counter() - start
        return result

    def _check(self, prompts, max_new_tokens, stop_tokens) -> list[int]:
        vocab = self.target.config.vocab_size
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, _INTEGERS) else list(max_new_tokens)
        if len(limits) != len(prompts):
            raise ValueError(f"generate: `max_new_tokens` must have one entry per prompt ({len(prompts)}), got {len(limits)}")
        for i, prompt in enumerate(prompts):
            if len(prompt) == 0 or not all(isinstance(t, _INTEGERS) and 0 <= t < vocab for t in prompt):
                raise ValueError(
                    f"generate: `prompts[{i}]` must hold token ids in [0, {vocab}), at least one, got {list(prompt)[:8]}"
                )
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if not isinstance(limit, _INTEGERS) or limit < 1:
                raise ValueError(f"generate: `max_new_tokens` must be an int of at least 1, got {limit}")
            if len(prompt) + limit > self.max_seq_len:
                raise ValueError(
                    f"generate: `prompts[{i}]` plus `max_new_tokens` must fit max_seq_len={self.max_seq_len}, "
                    f"got {len(prompt)} + {limit}"
                )
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(f"generate: `stop_tokens` must hold at most {MAX_STOP_TOKENS} ids, got {len(stop_tokens)}")
        for token in stop_tokens:
            if not isinstance(token, _INTEGERS) or not 0 <= token < vocab:
                raise ValueError(f"generate: `stop_tokens` must hold token ids in [0, {vocab}), got {token}")
        return [int(limit) for limit in limits]

    def _generate_group(self, prompts, group: _Group, limits, stop_tokens, sampling) -> None:
        members, state, stats = group.members, group.state, group.result.stats
        self._load(state, [prompts[i] for i in members], [limits[i] for i in members], members, stop_tokens, sampling)
        sampled = sampling.temperature > 0
        self._prefill(state, [list(prompts[i]) for i in members], sampled)
        rows = _OutputReader(state)
        running, _ = group.emit(state.output.cpu())
        step = self._round(state.batch_size, sampled, group.bar)
        start = time.perf_counter()
        while running:
            step()
            # On CUDA one round late: the host handles round n - 1 while the device runs round n. The last launch may thus find
            # every request finished, and emits nothing.
            output = rows.read()
            if output is not None:
                running, gained = group.emit(output)
                stats.rounds += 1
                stats.request_rounds += gained
        rows.drain()
        stats.decode_seconds += time.perf_counter() - start

    def _state(self, bucket: int) -> RoundState:
        if bucket not in self._states:
            draft = self.draft
            sizes = {}
            if draft is not None:
                sizes = {
                    "topk": self.config.topk,
                    "draft_hidden": draft.config.hidden_size,
                    "draft_vocab": draft.draft_vocab_size,
                }
            self._states[bucket] = RoundState(
                bucket,
                self.max_pages,
                path_len=self.config.path_len if draft is not None else 1,
                hidden_dtype=self.dtype,
                device=self.device,
                **sizes,
            )
        return self._states[bucket]

    def round(self, batch_size: int, *, sampled: bool = False) -> torch.nn.Module:
        """A new, uncompiled round over the state and caches of the bucket for `batch_size`: call it without arguments."""
        state = self._state(self.bucket(batch_size))
        if self.draft is None or self.draft_cache is None:
            return PlainRound(self.target, self.target_cache, state, sampled=sampled, backend=self.backend)
        return SpeculativeRound(
            self.target,
            self.draft,
            self.target_cache,
            self.draft_cache,
            state,
            self.config,
            sampled=sampled,
            backend=self.backend,
        )

    def _round(self, bucket: int, sampled: bool, bar: tqdm) -> Callable[[], None]:
        """The bucket's round, built and compiled at its first use."""
        key = (bucket, sampled)
        if key not in self._rounds:
            module = self.round(bucket, sampled=sampled)
            if self.compile:
                from spec_ops.passes import compile as compile_with_passes

                if not bar.disable:
                    message = f"compiling the round for batch size {bucket} (once; later calls reuse it)"
                    bar.write(message, file=sys.stderr)
                self._rounds[key] = compile_with_passes(module)
            else:
                self._rounds[key] = module
        return self._rounds[key]

    def _load(self, state, prompts, limits, members, stop_tokens, sampling) -> None:
        """Fill the bucket's rows: pages, limits, sampling parameters."""
        state.clear()
        count = len(prompts)

        def put(buffer: torch.Tensor, values) -> None:
            buffer[:count].copy_(torch.as_tensor(values, dtype=buffer.dtype))

        pages = torch.arange(count * self.max_pages, dtype=torch.int32).reshape(count, self.max_pages)
        put(state.block_tables, pages)
        put(state.max_lens, [len(p) + n for p, n in zip(prompts, limits, strict=True)])
        if len(stop_tokens):
            state.stop_tokens[:count, : len(stop_tokens)] = torch.as_tensor(list(stop_tokens), device=self.device)
        put(state.temperature, [sampling.temperature] * count)
        put(state.top_k, [sampling.top_k] * count)
        put(state.top_p, [sampling.top_p] * count)
        put(state.seeds, [sampling.seed + i for i in members])
        put(state.finished, [False] * count)
        # Committed so far: all but the last prompt token, so that `commit` below adds the first new token after it.
        put(state.committed_lens, [len(p) - 1 for p in prompts])

    def _ragged(self, cache: PagedKVCache, state: RoundState, lens: list[int]):
        """Positions and attention of a ragged extend that writes the first `lens[b]` slots of each request."""
        device, page_size = self.device, self.page_size
        lengths = torch.tensor(lens + [0] * (state.batch_size - len(lens)))
        starts = torch.zeros(state.batch_size + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=starts[1:])
        positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths)
        request = torch.arange(state.batch_size).repeat_interleave(lengths)
        positions, request = positions.to(device), request.to(device)
        slots = state.block_tables[request, positions // page_size].long() * page_size + positions % page_size
        attention = PagedAttention(
            cache,
            "extend",
            state.block_tables,
            lengths.to(device, torch.int32),
            slots,
            q_indptr=starts.to(device, torch.int32),
            max_q_len=max(lens),
            backend=self.prefill_backend,
        )
        return positions, starts, attention

    def _prefill(self, state: RoundState, prompts: list[list[int]], sampled: bool) -> None:
        """Run the prompts through target and draft: emits each request's first token, drafts the first round's first tokens."""
        lens = [len(p) for p in prompts]
        tokens = torch.tensor([t for p in prompts for t in p], device=self.device)
        positions, starts, attention = self._ragged(self.target_cache, state, lens)
        output = self.target(tokens, positions, attention)
        count = len(prompts)
        last = (starts[1 : count + 1] - 1).to(self.device)
        logits = output.hidden.new_zeros(state.batch_size, self.target.config.vocab_size)
        logits[:count] = self.target.logits(output.hidden[last])
        state.commit(next_token(logits, state, sampled)[:, None], torch.ones_like(state.committed_lens))
        if self.draft is None or self.draft_cache is None:
            return
        features = self.draft.encode(output)
        rows = features.split(lens)
        first = state.last_token[:count].split(1)
        if self.draft.token_offset == 0:  # features at p beside token p + 1
            inputs = [torch.cat([t[1:], f]) for t, f in zip(tokens.split(lens), first, strict=True)]
        else:  # token p itself, the newest included
            inputs = [torch.cat([t, f]) for t, f in zip(tokens.split(lens), first, strict=True)]
            rows = tuple(torch.cat([r, r[-1:]]) for r in rows)
        positions, starts, attention = self._ragged(self.draft_cache, state, [len(i) for i in inputs])
        hidden = self.draft(torch.cat(inputs), torch.cat(rows), positions, attention)
        carried = hidden.new_zeros(state.batch_size, hidden.shape[-1])
        carried[:count] = hidden[(starts[1 : count + 1] - 1).to(self.device)]
        first_drafts(self.draft, state, carried, self.config.topk, sampled)


@dataclass
class _Group:
    """Requests decoded together, and where their tokens go."""

    members: range
    state: RoundState
    result: GenerationResult
    on_tokens: OnTokens | None
    stop_when: StopWhen | None
    bar: tqdm
    stopped: set[int] = field(default_factory=set)  # by `stop_when`: a round already under way may still emit for them

    def emit(self, output: torch.Tensor) -> tuple[int, int]:
        """Hand out one round's tokens; returns how many requests go on, and how many gained tokens."""
        running = gained = 0
        for index, (request, row) in enumerate(zip(self.members, output.tolist(), strict=False)):
            if request in self.stopped:
                continue
            tokens, new = self.result.tokens[request], row[: row[-2]]
            ended = bool(row[-1])
            if new and self.stop_when is not None:
                keep = self.stop_when(request, tokens + new, len(new))
                if keep is not None:
                    new, ended = new[:keep], True
                    self.stopped.add(request)
                    self.state.finished[index].fill_(True)
            running += not ended
            gained += bool(new)
            if new:
                tokens.extend(new)
                self.result.stats.new_tokens += len(new)
                self.bar.update(len(new))
                if self.on_tokens is not None:
                    self.on_tokens(request, new)
        return running, gained


class _OutputReader:
    """Brings `state.output` to the host: at once on CPU, one round late through pinned memory on CUDA."""

    def __init__(self, state: RoundState) -> None:
        self.state = state
        self.late = state.output.is_cuda
        self.pending: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self.spare = [torch.empty_like(state.output, device="cpu", pin_memory=True) for _ in range(2)] if self.late else []

    def read(self) -> torch.Tensor | None:
        """Start copying this round's output; return the previous round's, or this round's on CPU."""
        if not self.late:
            return self.state.output
        host = self.spare.pop(0)
        host.copy_(self.state.output, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        previous, self.pending = self.pending, (host, event)
        return self._finish(previous)

    def drain(self) -> None:
        """Wait for the copy still under way, if any."""
        previous, self.pending = self.pending, None
        self._finish(previous)

    def _finish(self, pending) -> torch.Tensor | None:
        if pending is None:
            return None
        host, event = pending
        event.synchronize()
        self.spare.append(host)
        return host


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    draft: Draft | None = None,
    config: SpeculationConfig | None = None,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    stop_tokens: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    on_tokens: OnTokens | None = None,
    stop_when: StopWhen | None = None,
    progress: bool = False,
    **options,
) -> GenerationResult:
    """Decode `prompts` once; `options` go to `Generator`, which is the thing to keep for more than one call."""
    longest = max((len(p) for p in prompts), default=1)
    most = max_new_tokens if isinstance(max_new_tokens, _INTEGERS) else max(max_new_tokens, default=1)
    options.setdefault("max_seq_len", longest + max(most, 1))
    options.setdefault("max_batch_size", max(1, min(len(prompts), 32)))
    generator = Generator(target, draft, config, **options)
    return generator.generate(
        prompts,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        sampling=sampling,
        on_tokens=on_tokens,
        stop_when=stop_when,
        progress=progress,
    )
