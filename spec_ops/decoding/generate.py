"""Generation: prefill, rounds in batch buckets, stop tokens, streaming, statistics."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from spec_ops._numbers import integer, is_integer
from spec_ops.decoding.arguments import ArgumentNames, Requests, TokenChoice, check_requests, check_sampling
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.drafter import draft_model, make_drafter
from spec_ops.decoding.logits import LogitsChanges, LogitsFeatures, LogitsProcessor, check_processor
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.decoding.random import row_seeds
from spec_ops.decoding.round import PlainRound, SpeculativeRound, commit_next
from spec_ops.decoding.sampling import SamplingParams
from spec_ops.decoding.state import BROKEN, MASKED, RoundState
from spec_ops.decoding.stats import GenerationStats
from spec_ops.models.drafts import Draft
from spec_ops.models.paged import PagedAttention, PagedKVCache, refuse_autocast
from spec_ops.models.target import Target

OnTokens = Callable[[int, list[int]], None]
StopWhen = Callable[[int, list[int], int], int | None]
MAX_PROCESSORS = 8  # functions whose rounds a generator keeps


@dataclass
class GenerationResult:
    """What `generate` returns.

    Attributes:
        tokens: `tokens[i]` are the new tokens of prompt `i`, a stop token included if one ended it.
        stats: counts and times.
        seed: the seed of sampling; `SamplingParams(seed=...)` repeats the run with it. With several `SamplingParams`, the one
            that those without a seed drew, or that all have in common, else None. None for greedy decoding.
    """

    tokens: list[list[int]]
    stats: GenerationStats = field(default_factory=GenerationStats)
    seed: int | None = None


class Generator:
    """Decodes batches of prompts, speculatively if there is a draft.

    KV pools, state and compiled rounds are made once and reused. Batches are padded to the next bucket, so that another batch
    of a bucket neither compiles nor records anything. A `Generator` serves one call at a time: every thread needs its own.

    Args:
        target: the model whose output is wanted, on any device.
        draft: the model that drafts, on the target's device and in its dtype; a `PromptLookup`, which drafts without a model;
            None for plain decoding.
        config: shape of a round; default `SpeculationConfig()`.
        max_batch_size: most requests decoded at once; longer lists of prompts run in groups. Buckets are the powers of two up
            to it.
        max_seq_len: most tokens of a request, prompt and new ones.
        page_size: tokens per KV page, 1 to 128.
        cache_dtype: default the model's; `torch.float8_e4m3fn` quantizes with scale 1.
        compile: compile rounds with `spec_ops.compile`: the graph passes, and one CUDA graph per bucket.
        backend: of every attention op. `"triton-deterministic"`: batch-invariant attention, see `spec_ops/ops/attention.py`.
        prefill_backend: of the prompts' ragged extend; default `backend`. Not every kernel provider has one.

    Raises:
        ValueError: naming the argument: of another kind or range, or a draft that does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | PromptLookup | None = None,
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
        max_batch_size = integer("Generator", "max_batch_size", max_batch_size, 1)
        max_seq_len = integer("Generator", "max_seq_len", max_seq_len, 1)
        page_size = integer("Generator", "page_size", page_size, 1, 128)
        _check_kinds(target, draft, config)
        self.target, self.draft = target.eval(), draft
        self.config = config or SpeculationConfig()
        self.max_batch_size, self.max_seq_len, self.page_size = max_batch_size, max_seq_len, page_size
        self.compile, self.backend = compile, backend
        self.prefill_backend = backend if prefill_backend is None else prefill_backend
        weight = target.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        if isinstance(draft, PromptLookup):
            draft.check(self.config, max_seq_len)
        model = draft_model(draft)
        if model is not None:
            self._check_draft(model.eval())
        if cache_dtype not in (None, self.dtype, torch.float8_e4m3fn):
            raise ValueError(f"Generator: `cache_dtype` must be the model's {self.dtype} or float8_e4m3fn, got {cache_dtype}")
        reserve = self.config.reserve if draft is not None else 1
        self.max_pages = -(-(max_seq_len + reserve) // page_size)
        pool: dict[str, Any] = {"dtype": cache_dtype or self.dtype, "device": self.device}
        num_pages = self.max_pages * max_batch_size
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
            self.target_cache = PagedKVCache(target.config, num_pages, page_size, **pool)
            self.draft_cache = None if model is None else PagedKVCache(model.config, num_pages, page_size, **pool)
        self._states: dict[int, RoundState] = {}
        self._rounds: dict[tuple[int, bool, LogitsFeatures | None], Callable[[], None]] = {}
        self._changes: dict[tuple[int, LogitsFeatures], LogitsChanges] = {}
        self._processors: list[LogitsProcessor] = []
        self._running = threading.Lock()

    def _check_draft(self, draft: Draft) -> None:
        vocab = self.target.config.vocab_size
        if draft.config.vocab_size != vocab:
            raise ValueError(f"Generator: `draft` must know the target's {vocab} tokens, got {draft.config.vocab_size}")
        if self.config.topk > draft.draft_vocab_size:
            raise ValueError(
                f"Generator: `config.topk` must be at most the draft's vocabulary of {draft.draft_vocab_size}, "
                f"got {self.config.topk}"
            )
        target = {id(parameter) for parameter in self.target.parameters()}
        sizes: Counter[torch.dtype] = Counter()  # of the draft's own parameters, without quantized weights
        for parameter in draft.parameters():
            if parameter.device != self.device:
                raise ValueError(f"Generator: `draft` must be on {self.device}, as the target is, got {parameter.device}")
            if parameter.is_floating_point() and parameter.itemsize > 1 and id(parameter) not in target:
                sizes[parameter.dtype] += parameter.numel()
        # A few parameters may be of another type, such as a router in float32.
        for dtype, _ in sizes.most_common(1):
            if dtype != self.dtype:
                raise ValueError(f"Generator: `draft` must be {self.dtype}, as the target is, got {dtype}")

    def bucket(self, batch_size: int) -> int:
        """The padded batch size for `batch_size` requests. Raises a ValueError if they are too many."""
        batch_size = integer("Generator", "batch_size", batch_size, 1, self.max_batch_size)
        return min(1 << (batch_size - 1).bit_length(), self.max_batch_size)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        stop_tokens: Sequence[int] = (),
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        logits_processor: LogitsProcessor | None = None,
        on_tokens: OnTokens | None = None,
        stop_when: StopWhen | None = None,
        progress: bool = False,
    ) -> GenerationResult:
        """Decode every prompt. The tokens of a prompt do not depend on its neighbours, except for rounding.

        Args:
            prompts: token ids, one non-empty sequence (list, array or tensor) per request.
            max_new_tokens: one for all prompts, or one per prompt; at least 1.
            stop_tokens: at most 8 ids. A request ends with the first of them that it emits.
            sampling: one for all prompts, or one per prompt; default: greedy decoding.
            logits_processor: the last change to the target's logits before a temperature divides them, as
                `logits_processor(logits, history, lengths)`: logits `[rows, V]` float32, `history [rows, L]` int64, of which a
                row has the first `lengths` (`[rows]` int64, prompt and output) and 0 after them. It returns the new logits,
                of the same shape and dtype. A row is a request at one position; drafted tokens before it are in its history.
                If the function has a parameter `prompt_lens`, it gets `[rows]` int64, how much of each history is the prompt.
                A generator that compiles traces it into the round, once for every function: keep it, and let it read nothing
                but its arguments and tensors that stay where they are.
            on_tokens: called as `on_tokens(prompt_index, new_tokens)` whenever a request gains tokens.
            stop_when: called before `on_tokens`, as `stop_when(prompt_index, tokens, count)`, with all tokens that the request
                has emitted, the last `count` of them new. A number in `[0, count]` ends the request and keeps that many of the
                new tokens. None lets it go on.
            progress: show a progress bar of emitted tokens on stderr, and say when a round is being compiled.

        Returns:
            Tokens, counts and the seed.

        Raises:
            ValueError: naming the argument, before anything runs; naming `stop_when`, when it returns something else.
            RuntimeError: another call is running, in another thread or around a callback; autocast is enabled; nothing can be
                sampled, because the target's logits hold a NaN; or every token is masked.
        """
        requests = check_requests(prompts, max_new_tokens, stop_tokens, self.target.config.vocab_size, self.max_seq_len)
        for name, hook in (("on_tokens", on_tokens), ("stop_when", stop_when)):
            if hook is not None and not callable(hook):
                raise ValueError(f"generate: `{name}` must be a function, got {hook!r}")
        return self._run(requests, sampling, on_tokens, stop_when, progress, logits_processor)

    def _run(
        self,
        requests: Requests,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        on_tokens: OnTokens | None,
        stop_when: StopWhen | None,
        progress: bool,
        logits_processor: LogitsProcessor | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> GenerationResult:
        """`generate`, its prompts, limits and hooks checked. `prepare` is called once no other call can be running."""
        requests.check_positions(self.target.position_limit)
        choice = check_sampling(sampling, requests, self.target.config.vocab_size, logits_processor)
        with self._exclusive(), tqdm(total=sum(requests.limits), unit="tok", disable=not progress, desc="generate") as bar:
            if prepare is not None:
                prepare()
            path_len = self.config.path_len if self.draft is not None else 1
            stats = GenerationStats.of(len(requests.prompts), path_len)
            result = GenerationResult([[] for _ in requests.prompts], stats, choice.seed)
            start = time.perf_counter()
            for first in range(0, len(requests.prompts), self.max_batch_size):
                members = range(first, min(first + self.max_batch_size, len(requests.prompts)))
                state = self._state(self.bucket(len(members)))
                group = _Group(members, state, result, on_tokens, stop_when, bar, requests.names)
                self._generate_group(requests, group, choice)
            result.stats.seconds = time.perf_counter() - start
        return result

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the state and caches for one call, with the models' device as the current one: streams, events and CUDA graphs
        belong to the current device."""
        refuse_autocast("generate", self.device)
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "generate: this Generator is already running, in another thread, or this call comes from one of its callbacks; "
                "it serves one call at a time: make another Generator, or wait"
            )
        try:
            current = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
            # Not in inference mode, because the state's tensors outlive this call. Leaving the mode switches gradients on.
            with current, torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            self._running.release()

    def _generate_group(self, requests: Requests, group: _Group, choice: TokenChoice) -> None:
        state, stats = group.state, group.result.stats
        changes = None if choice.features is None else self._logits_changes(state.batch_size, choice.features)
        self._load(requests, group, choice, changes)
        self._prefill(state, [requests.prompts[i] for i in group.members], choice.sampled, changes)
        rows = _OutputReader(state)
        running = group.emit(state.output.cpu(), of_round=False)
        step = self._round(state.batch_size, choice, group.bar)
        start = time.perf_counter()
        while running:
            step()
            # On CUDA this is one round late: the host handles round n - 1 while the device runs round n. The last round may
            # thus find every request finished; it emits nothing.
            output = rows.read()
            if output is not None:
                running = group.emit(output)
                stats.rounds += 1
        rows.drain()
        stats.decode_seconds += time.perf_counter() - start

    def _state(self, bucket: int) -> RoundState:
        if bucket not in self._states:
            model, sizes = draft_model(self.draft), {}
            if model is not None:
                sizes = {
                    "topk": self.config.topk,
                    "draft_hidden": model.config.hidden_size,
                    "draft_vocab": model.draft_vocab_size,
                }
            self._states[bucket] = RoundState(
                bucket,
                self.max_pages,
                max_len=self.max_seq_len,
                path_len=self.config.path_len if self.draft is not None else 1,
                hidden_dtype=self.dtype,
                device=self.device,
                **sizes,
            )
        return self._states[bucket]

    def _logits_changes(self, bucket: int, features: LogitsFeatures) -> LogitsChanges:
        """The changes that the bucket's rounds with these features make. A function of the user's is tried out first."""
        state, vocab = self._state(bucket), self.target.config.vocab_size
        if features.processor is not None:
            self._remember(features.processor, state)
        if (bucket, features) not in self._changes:
            num_tokens = self.config.num_tokens if self.draft is not None else 1
            self._changes[bucket, features] = LogitsChanges(state, features, vocab, num_tokens)
        return self._changes[bucket, features]

    def _remember(self, processor: LogitsProcessor, state: RoundState) -> None:
        """Check a function that is new, and forget the rounds of the one used longest ago if there are too many."""
        others = [known for known in self._processors if known is not processor]
        if len(others) == len(self._processors):
            check_processor(processor, state, self.target.config.vocab_size, self.compile)
        self._processors = [*others, processor]
        if len(self._processors) > MAX_PROCESSORS:
            self._forget(self._processors.pop(0))

    def _forget(self, processor: LogitsProcessor) -> None:
        def keep(features: LogitsFeatures | None) -> bool:
            return features is None or features.processor is not processor

        self._changes = {key: made for key, made in self._changes.items() if keep(key[-1])}
        self._rounds = {key: made for key, made in self._rounds.items() if keep(key[-1])}

    def round(
        self, batch_size: int, *, sampled: bool = False, features: LogitsFeatures | None = None
    ) -> SpeculativeRound | PlainRound:
        """A new, uncompiled round over the state and caches of the bucket for `batch_size` requests. It is called without
        arguments; `sampled` makes it sample instead of decoding greedily, `features` are the changes to the target's logits."""
        bucket = self.bucket(batch_size)
        options: dict[str, Any] = {"sampled": sampled, "backend": self.backend}
        if features is not None:
            options["changes"] = self._logits_changes(bucket, features)
        state = self._state(bucket)
        if self.draft is None:
            return PlainRound(self.target, self.target_cache, state, **options)
        caches = self.target_cache, self.draft_cache
        return SpeculativeRound(self.target, self.draft, *caches, state, self.config, **options)

    def _round(self, bucket: int, choice: TokenChoice, bar: tqdm) -> Callable[[], None]:
        """The round of a bucket, built and compiled when it is first used."""
        key = (bucket, choice.sampled, choice.features)
        if key not in self._rounds:
            module = self.round(bucket, sampled=choice.sampled, features=choice.features)
            if self.compile:
                from spec_ops.passes import compile as compile_with_passes

                if not bar.disable:
                    message = f"compiling the round for batch size {bucket} (once; later calls reuse it)"
                    bar.write(message, file=sys.stderr)
                self._rounds[key] = compile_with_passes(module)
            else:
                self._rounds[key] = module
        return self._rounds[key]

    def _load(self, requests: Requests, group: _Group, choice: TokenChoice, changes: LogitsChanges | None = None) -> None:
        """Fill the rows of the bucket with pages, limits and sampling parameters."""
        state, members = group.state, group.members
        state.clear()
        count, stops = len(members), requests.stop_tokens
        prompts = [requests.prompts[i] for i in members]
        lens = [len(prompt) for prompt in prompts]

        def put(buffer: torch.Tensor, values) -> None:
            buffer[:count].copy_(torch.as_tensor(values, dtype=buffer.dtype, device="cpu"))

        pages = torch.arange(count * self.max_pages, dtype=torch.int32, device="cpu").reshape(count, self.max_pages)
        put(state.block_tables, pages)
        put(state.max_lens, [length + requests.limits[i] for length, i in zip(lens, members, strict=True)])
        if stops:
            state.stop_tokens[:count, : len(stops)] = torch.as_tensor(stops, device=self.device)
        params = [choice.params[i] for i in members]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            put(getattr(state, name), [getattr(p, name) for p in params])
        if choice.sampled:
            put(state.seeds, row_seeds([choice.seeds[i] for i in members], members))
        put(state.finished, [False] * count)
        longest = max(lens)
        state.tokens[:count, :longest] = torch.tensor(
            [prompt + [-1] * (longest - len(prompt)) for prompt in prompts], device="cpu"
        ).to(self.device)
        put(state.last_token, [prompt[-1] for prompt in prompts])
        # All prompt tokens but the last one are committed, so that the prefill's `commit` adds the first new token after it.
        put(state.committed_lens, [length - 1 for length in lens])
        if changes is not None:
            changes.load(params, prompts)

    def _ragged(self, cache: PagedKVCache, state: RoundState, lens: list[int]):
        """A ragged extend that writes the first `lens[b]` slots of each request: positions `[total]`, starts `[bs + 1]` int64
        on the CPU, and the attention."""
        device, page_size = self.device, self.page_size
        lengths = torch.tensor(lens + [0] * (state.batch_size - len(lens)), device="cpu")  # whatever the default device is
        starts = torch.zeros(state.batch_size + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(lengths, 0, out=starts[1:])
        positions = torch.arange(int(starts[-1]), device="cpu") - starts[:-1].repeat_interleave(lengths)
        request = torch.arange(state.batch_size, device="cpu").repeat_interleave(lengths)
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

    def _prefill(
        self, state: RoundState, prompts: list[list[int]], sampled: bool, changes: LogitsChanges | None = None
    ) -> None:
        """Run the prompts through target and draft. Emits each request's first token, and drafts the first tokens of the first
        round."""
        lens = [len(p) for p in prompts]
        tokens = torch.tensor([t for p in prompts for t in p], device=self.device)
        positions, starts, attention = self._ragged(self.target_cache, state, lens)
        output = self.target(tokens, positions, attention)
        count = len(prompts)
        last = (starts[1 : count + 1] - 1).to(self.device)
        logits = output.hidden.new_zeros(state.batch_size, self.target.config.vocab_size)
        logits[:count] = self.target.logits(output.hidden[last])
        commit_next(logits, state, sampled, changes)
        if self.draft is not None:
            drafter = make_drafter(self.draft, self.draft_cache, state, self.config, sampled=sampled, backend=self.backend)
            drafter.prefill(tokens, lens, output, lambda cache, lens: self._ragged(cache, state, lens))


def _check_kinds(target: Any, draft: Any, config: Any) -> None:
    """Refuse models of another kind, swapped ones, and another kind of configuration."""
    if config is not None and not isinstance(config, SpeculationConfig):
        raise ValueError(f"Generator: `config` must be a SpeculationConfig, got {type(config).__name__}")
    for name, model, kind in (("target", target, Target), ("draft", draft, Draft)):
        if isinstance(model, kind) or (name == "draft" and (model is None or isinstance(model, PromptLookup))):
            continue
        hint = ""
        if hasattr(model, "generation_config"):
            hint = ": models of transformers need `spec_ops.integrations.transformers.TransformersGenerator`"
        elif isinstance(target, Draft):
            hint = ": are `target` and `draft` swapped?"
        elif isinstance(model, (list, tuple)):
            hint = ": prompts come after it, `generate(target, draft, prompts)`, where None is no draft"
        elif isinstance(model, Target):
            hint = ": a language model drafts as `StandaloneDraft(model)`"
        elif model is PromptLookup or isinstance(model, str):
            hint = ": drafts without a model are `PromptLookup()`"
        raise ValueError(
            f"Generator: `{name}` must be a {kind.__module__}.{kind.__qualname__}, got {type(model).__name__}{hint}"
        )


@dataclass
class _Group:
    """Requests that are decoded together, and what becomes of their tokens."""

    members: range
    state: RoundState
    result: GenerationResult
    on_tokens: OnTokens | None
    stop_when: StopWhen | None
    bar: tqdm
    names: ArgumentNames = field(default_factory=ArgumentNames)
    stopped: set[int] = field(default_factory=set)  # ended by `stop_when`; the round under way may still emit for them

    def emit(self, output: torch.Tensor, *, of_round: bool = True) -> int:
        """Hand out the tokens of one round, or of the prefill. Returns how many requests go on."""
        running = 0
        for index, (request, row) in enumerate(zip(self.members, output.tolist(), strict=False)):
            if request in self.stopped:
                continue
            tokens, new = self.result.tokens[request], row[: row[-2]]
            if row[-1] == MASKED:
                raise RuntimeError(
                    f"generate: every token is masked for `{self.names.prompt(request)}` after {len(tokens) + len(new)} new "
                    "tokens: `suppress_tokens`, `bad_words_ids`, `min_new_tokens`, a bitmask and `logits_processor` leave none"
                )
            if row[-1] == BROKEN:
                raise RuntimeError(
                    f"generate: nothing can be sampled for `{self.names.prompt(request)}` after {len(tokens) + len(new)} new "
                    "tokens: the target's logits hold a NaN or an infinity, or no finite number at all"
                )
            ended = bool(row[-1])
            if new and self.stop_when is not None:
                keep = self.stop_when(request, tokens + new, len(new))
                if keep is not None:
                    if not is_integer(keep) or not 0 <= keep <= len(new):
                        raise ValueError(
                            f"generate: `{self.names.stop_when}` must return None or how many of the {len(new)} new tokens to "
                            f"keep, got {keep!r}"
                        )
                    new, ended = new[:keep], True
                    self.stopped.add(request)
                    self.state.finished[index].fill_(True)
            running += not ended
            if new:
                tokens.extend(new)
                self.result.stats.new_tokens += len(new)
                if of_round:
                    self.result.stats.add_round(request, len(new), ended)
                self.bar.update(len(new))
                if self.on_tokens is not None:
                    self.on_tokens(request, new)
        return running


class _OutputReader:
    """Brings `state.output` to the host: immediately on the CPU, one round late through pinned memory on CUDA."""

    def __init__(self, state: RoundState) -> None:
        self.state = state
        self.late = state.output.is_cuda
        self.pending: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self.spare = [torch.empty_like(state.output, device="cpu", pin_memory=True) for _ in range(2)] if self.late else []

    def read(self) -> torch.Tensor | None:
        """Start copying this round's output. Returns the previous round's, or on the CPU this round's."""
        if not self.late:
            return self.state.output
        host = self.spare.pop(0)
        source = self.state.output
        host.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(source.device))
        previous, self.pending = self.pending, (host, event)
        return self._finish(previous)

    def drain(self) -> None:
        """Wait for the copy that is still under way, if there is one."""
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
    draft: Draft | PromptLookup | None,
    prompts: Sequence[Sequence[int]],
    config: SpeculationConfig | None = None,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    stop_tokens: Sequence[int] = (),
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    logits_processor: LogitsProcessor | None = None,
    on_tokens: OnTokens | None = None,
    stop_when: StopWhen | None = None,
    progress: bool = False,
    **options: Any,
) -> GenerationResult:
    """Decode `prompts` once. For more than one call, keep a `Generator`: it reuses caches and compiled rounds.

    Args:
        target, draft, config, options: see `Generator`; `draft` is None for plain decoding. Default sizes are those that the
            prompts need.
        prompts, max_new_tokens, stop_tokens, sampling, logits_processor, on_tokens, stop_when, progress: see
            `Generator.generate`.

    Raises:
        ValueError: naming the argument.
        RuntimeError: see `Generator.generate`.
    """
    _check_kinds(target, draft, config)
    vocab = target.config.vocab_size
    bound = integer("generate", "max_seq_len", options["max_seq_len"], 1) if "max_seq_len" in options else sys.maxsize
    requests = check_requests(prompts, max_new_tokens, stop_tokens, vocab, bound)
    longest = max((len(p) + n for p, n in zip(requests.prompts, requests.limits, strict=True)), default=1)
    options.setdefault("max_seq_len", longest)
    options.setdefault("max_batch_size", max(1, min(len(requests.prompts), 32)))
    generator = Generator(target, draft, config, **options)
    return generator.generate(
        requests.prompts,
        max_new_tokens=requests.limits,
        stop_tokens=requests.stop_tokens,
        sampling=sampling,
        logits_processor=logits_processor,
        on_tokens=on_tokens,
        stop_when=stop_when,
        progress=progress,
    )
