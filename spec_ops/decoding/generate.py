"""Generation: prefill, rounds in batch buckets, stop tokens, streaming, statistics."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from spec_ops._numbers import integer, shown
from spec_ops._version import __version__
from spec_ops.backends.registry import available_backends, device_arch, invariant_backend
from spec_ops.decoding.admission import begin
from spec_ops.decoding.arguments import Requests, TokenChoice, check_kinds, check_requests, check_sampling
from spec_ops.decoding.batch import Batch, OnTokens, StopWhen, on_first
from spec_ops.decoding.buckets import Buckets
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.draft import HeldDrafts
from spec_ops.decoding.drafter import draft_model
from spec_ops.decoding.fitting import cache_backend, check_draft, check_invariant, check_lookup
from spec_ops.decoding.grammar import Grammars, Matcher, check_matchers
from spec_ops.decoding.logits import LogitsFeatures, LogitsProcessor
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.decoding.output import OutputReader
from spec_ops.decoding.pages import PagePool
from spec_ops.decoding.round import PlainRound, SpeculativeRound
from spec_ops.decoding.sampling import SamplingParams
from spec_ops.decoding.stats import GenerationResult, GenerationStats
from spec_ops.models.config import ModelSizes
from spec_ops.models.drafts import Draft
from spec_ops.models.paged import DEFAULT_PAGE_SIZE, PagedKVCache, refuse_autocast
from spec_ops.models.target import Target


class Generator:
    """Decodes batches of prompts, speculatively if there is a draft.

    KV pools, state and compiled rounds are made once and reused. Batches are padded to the next bucket, so that another batch
    of a bucket neither compiles nor records anything. A `Generator` serves one call at a time: every thread needs its own.

    Args:
        target: the model whose output is wanted, on any device.
        draft: the model that drafts, on the target's device and in its dtype; a `PromptLookup`, which drafts without a model;
            None for plain decoding.
        config: shape of a round; default `SpeculationConfig()`. With `SpeculationConfig.auto()`, or `lengths` of its own, each
            round's length is chosen from what recent rounds accepted and how long they took (`LengthChooser`); each length is
            compiled when it is first chosen. With `matchers`, rounds have the longest.
        max_batch_size: most requests decoded at once; of a longer list of prompts, the next one takes the row of one that has
            ended. Buckets are the powers of two up to it.
        max_seq_len: most tokens of a request, prompt and new ones.
        page_size: tokens per KV page, 1 to 128. The default is what the fast kernels take.
        num_pages: pages of the KV pools, which requests share: one begins when the pages for its prompt and its most new tokens
            are free. Default: enough for `max_batch_size` requests of `max_seq_len`.
        prefill_chunk_size: prompts run through the models in pieces of at most so many tokens; short ones together.
        cache_dtype: default the model's; `torch.float8_e4m3fn` quantizes with scale 1.
        compile: compile rounds with `spec_ops.compile`: the graph passes, and one CUDA graph per bucket.
        backend: of every attention op. `"triton-deterministic"`: batch-invariant attention, see `spec_ops/ops/attention.py`.
        prefill_backend: of the prompts' ragged extend; default `backend`. Not every kernel provider has one.
        invariant: batch-invariant: the tokens of a prompt are the same bits of arithmetic alone, beside others, in pieces, and
            with any draft, so that greedy speculation gives the text of plain decoding in bfloat16 and float16 too
            (`docs/guides/invariance.md`). An operation that has no such form is refused where it is first called. Unless
            `backend` or `prefill_backend` names one, each cache has a batch-invariant backend by what is called on it.

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
        page_size: int = DEFAULT_PAGE_SIZE,
        num_pages: int | None = None,
        prefill_chunk_size: int = 8192,
        cache_dtype: torch.dtype | None = None,
        compile: bool = False,
        backend: str = "auto",
        prefill_backend: str | None = None,
        invariant: bool = False,
    ) -> None:
        max_batch_size = integer("Generator", "max_batch_size", max_batch_size, 1)
        max_seq_len = integer("Generator", "max_seq_len", max_seq_len, 1)
        page_size = integer("Generator", "page_size", page_size, 1, 128)
        if num_pages is not None:
            num_pages = integer("Generator", "num_pages", num_pages, 1)
        self.prefill_chunk_size = integer("Generator", "prefill_chunk_size", prefill_chunk_size, 1)
        check_kinds(target, draft, config)
        for name, value in (("backend", backend), ("prefill_backend", prefill_backend)):
            if value not in ("auto", *available_backends()) and not (value is None and name == "prefill_backend"):
                raise ValueError(f"Generator: `{name}` must be 'auto' or one of {list(available_backends())}, got {value!r}")
        self.target, self.draft = target.eval(), draft
        self.config = config or SpeculationConfig()
        self.max_batch_size, self.max_seq_len, self.page_size = max_batch_size, max_seq_len, page_size
        weight = target.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.compile, self.invariant = compile, bool(invariant)
        if invariant:
            check_invariant(target, draft is not None, self.config, backend, prefill_backend)
            if backend == "auto" and prefill_backend not in (None, "auto"):  # bits of prompts must be those of rounds
                backend = invariant_backend(device_arch(self.device))
        self.backend = backend
        self.prefill_backend = backend if prefill_backend in (None, "auto") and invariant else prefill_backend or backend
        if isinstance(draft, PromptLookup):
            check_lookup(draft, self.config, max_seq_len)
        model = draft_model(draft)
        if model is not None:
            check_draft(model.eval(), target, self.config)
        if cache_dtype not in (None, self.dtype, torch.float8_e4m3fn):
            raise ValueError(f"Generator: `cache_dtype` must be the model's {self.dtype} or float8_e4m3fn, got {cache_dtype}")
        self.max_pages = self._pool(0).needed(max_seq_len)
        self.num_pages = self.max_pages * max_batch_size if num_pages is None else num_pages
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
            self.target_cache = self._cache(target.config, cache_dtype or self.dtype)
            self.draft_cache = None if model is None else self._cache(model.config, cache_dtype or self.dtype)
        self.buckets = Buckets(
            target, draft, self.config, self.target_cache, self.draft_cache, max_pages=self.max_pages, max_seq_len=max_seq_len,
            compile=compile, backend=self.backend, invariant=self.invariant,
        )  # fmt: skip
        self._running = threading.Lock()
        self.ranks = target.ranks
        self._check_ranks(model)

    def _cache(self, sizes: ModelSizes, dtype: torch.dtype) -> PagedKVCache:
        backend, config = "auto", self.config
        if self.invariant and self.backend == "auto":
            tokens, tree = (config.num_tokens, config.topk > 1) if self.draft is not None else (1, False)
            backend = cache_backend(sizes, self.dtype, dtype, self.device, self.page_size, tokens, tree)
        return PagedKVCache(sizes, self.num_pages, self.page_size, dtype=dtype, device=self.device, backend=backend)

    def _pool(self, count: int) -> PagePool:
        return PagePool(count, self.page_size, self.config.reserve if self.draft is not None else 1)

    def _check_ranks(self, draft: Draft | None) -> None:
        """Refuse a draft of other ranks than the target's, and ranks that are about to do different things."""
        if draft is not None and draft.ranks not in (None, self.ranks):
            raise ValueError("Generator: `draft` must be shared by the ranks of the target, or be whole on each of them")
        if self.ranks is None:
            return
        same: dict[str, Any] = {
            "package versions": (__version__, torch.__version__),
            "target": (type(self.target).__name__, self.target.config, self.dtype),
            "draft": self.draft if draft is None else (type(draft).__name__, draft.config, draft.ranks is None),
            "config": self.config,
            "compile": (self.compile, self.invariant),
        }
        for name in ("max_batch_size", "max_seq_len", "page_size", "num_pages", "prefill_chunk_size"):
            same[name] = getattr(self, name)
        caches = [cache.backend for cache in (self.target_cache, self.draft_cache) if cache is not None]
        same |= {"backend": (self.backend, self.prefill_backend, *caches), "cache_dtype": self.target_cache.layer(0)[0].dtype}
        self.ranks.check_same("Generator", same)

    def bucket(self, batch_size: int) -> int:
        """The padded batch size for `batch_size` requests. Raises a ValueError if they are too many."""
        batch_size = integer("Generator", "batch_size", batch_size, 1, self.max_batch_size)
        return min(1 << (batch_size - 1).bit_length(), self.max_batch_size)

    def round(
        self,
        batch_size: int,
        *,
        sampled: bool = False,
        features: LogitsFeatures | None = None,
        drafts: HeldDrafts | None = None,
        length: int | None = None,
    ) -> SpeculativeRound | PlainRound:
        """A new, uncompiled round over the state and caches of the bucket for `batch_size` requests. It is called without
        arguments; `sampled` makes it sample instead of decoding greedily, `features` are the changes to the target's logits.
        With `drafts` it verifies what they hold, and drafts at its end, for the next round. `length` is its chain's, at
        most `config.num_steps`, for which state and pages have room; rounds of several lengths may follow each other. Raises a
        ValueError that names the argument."""
        if length is not None:
            if self.draft is None or self.config.topk > 1:
                why = "without a draft" if self.draft is None else "with a tree"
                raise ValueError(f"Generator: `length` must be None {why}, got {shown(length)}")
            length = integer("Generator", "length", length, 0, self.config.num_steps)
        options: dict[str, Any] = {"sampled": sampled, "features": features, "drafts": drafts, "length": length}
        return self.buckets.build(self.bucket(batch_size), **options)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        stop_tokens: Sequence[int] = (),
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        logits_processor: LogitsProcessor | None = None,
        matchers: Sequence[Matcher | None] | None = None,
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
            logits_processor: changes the target's logits before a temperature divides them, as
                `logits_processor(logits, history, lengths)`: logits `[rows, V]` float32, `history [rows, L]` int64, of which a
                row has the first `lengths` (`[rows]` int64, prompt and output) and 0 after them. It returns the new logits,
                of the same shape and dtype. A row is a request at one position; drafted tokens before it are in its history.
                It comes after all other changes but the masks of `matchers`.
                If the function has a parameter `prompt_lens`, it gets `[rows]` int64, how much of each history is the prompt.
                A generator that compiles traces it into the round, once for every function: keep it, and let it read nothing
                but its arguments and tensors that stay where they are.
            matchers: a grammar matcher, such as `xgrammar.GrammarMatcher`, or None for each prompt: which tokens may come next.
                Between two rounds the host then waits for the drafts, and fills the masks of what is verified next. A request
                ends where its grammar does.
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
                sampled, because the target's logits hold a NaN; or every token is masked. With a target that ranks share, a
                `RankError` if their arguments differ, or one of them is gone.
        """
        requests = check_requests(prompts, max_new_tokens, stop_tokens, self.target.config.vocab_size, self.max_seq_len)
        for name, hook in (("on_tokens", on_tokens), ("stop_when", stop_when)):
            if hook is not None and not callable(hook):
                raise ValueError(f"generate: `{name}` must be a function, got {hook!r}")
        grammars = check_matchers(matchers, len(requests.prompts))
        return self._run(requests, sampling, on_tokens, stop_when, progress, logits_processor, grammars=grammars)

    def _run(
        self,
        requests: Requests,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        on_tokens: OnTokens | None,
        stop_when: StopWhen | None,
        progress: bool,
        logits_processor: LogitsProcessor | None = None,
        prepare: Callable[[], None] | None = None,
        grammars: Grammars | None = None,
    ) -> GenerationResult:
        """`generate`, its prompts, limits and hooks checked. `prepare` is called once no other call can be running."""
        requests.check_positions(self.target.position_limit)
        requests.check_pages(self._pool(self.num_pages))
        if self.ranks is not None:
            same = {"prompts": requests.prompts, "max_new_tokens": requests.limits, "stop_tokens": requests.stop_tokens}
            same |= {"sampling": sampling, "logits_processor": logits_processor is None, "matchers": grammars is None}
            self.ranks.check_same("generate", {**same, "stop_when": stop_when is None})
            stop_when = None if stop_when is None else on_first(self.ranks, stop_when, requests.names.stop_when)
        choice = check_sampling(sampling, requests, self.target.config.vocab_size, logits_processor, grammars, self.ranks)
        with self._exclusive(), tqdm(total=sum(requests.limits), unit="tok", disable=not progress, desc="generate") as bar:
            if prepare is not None:
                prepare()
            path_len = self.config.path_len if self.draft is not None else 1
            stats = GenerationStats.of(len(requests.prompts), path_len)
            result = GenerationResult([[] for _ in requests.prompts], stats, choice.seed)
            start = time.perf_counter()
            if requests.prompts:
                state = self.buckets.state(self.bucket(min(len(requests.prompts), self.max_batch_size)))
                pool = self._pool(self.num_pages)
                batch = Batch(requests, state, pool, result, on_tokens, stop_when, bar, grammars, self.compile)
                self._decode(batch, choice)
            stats.seconds = time.perf_counter() - start
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
            peers = contextlib.nullcontext() if self.ranks is None else self.ranks.guard("generate")
            # Not in inference mode, because the state's tensors outlive this call. Leaving the mode switches gradients on.
            with peers, current, torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            self._running.release()

    def _decode(self, batch: Batch, choice: TokenChoice) -> None:
        """Rounds until every request has ended. Rows that become free are filled between them."""
        state, stats = batch.state, batch.result.stats
        changes = None if choice.features is None else self.buckets.changes(state.batch_size, choice.features)
        state.clear()
        plan = self.buckets.plan(state.batch_size, choice)
        reader = OutputReader(state, at_once=choice.grammars is not None, timed=plan.chooser is not None)
        step: Callable[[], None] | None = None
        prefill_seconds, start = 0.0, time.perf_counter()
        while True:
            if batch.should_admit():
                last = reader.drain()
                began = time.perf_counter()
                if last is not None:  # rows in it may have ended
                    plan.read(batch, last, reader.seconds)
                while batch.has_room():
                    begin(batch, choice, changes, self.buckets, self.prefill_chunk_size, self.prefill_backend)
                prefill_seconds += time.perf_counter() - began
                continue
            if not batch.members:
                break
            length = plan.next(batch)
            if step is None or length is not None:
                step = self.buckets.round(state.batch_size, choice, batch.bar, length)
            if choice.grammars is not None and changes is not None:
                rows = [(member.row, member.request) for member in batch.members.values()]
                choice.grammars.fill(changes.bitmask, rows, self.buckets.held_drafts(state.batch_size, choice))
            reader.begin()
            step()
            # The last round may find every request finished; it emits nothing.
            output = reader.read()
            if output is not None:
                if self.ranks is not None:
                    self.ranks.check_round(output)
                plan.read(batch, output, reader.seconds)
        reader.drain()
        stats.decode_seconds += time.perf_counter() - start - prefill_seconds


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
    matchers: Sequence[Matcher | None] | None = None,
    on_tokens: OnTokens | None = None,
    stop_when: StopWhen | None = None,
    progress: bool = False,
    **options: Any,
) -> GenerationResult:
    """Decode `prompts` once. For more than one call, keep a `Generator`: it reuses caches and compiled rounds.

    Args:
        target, draft, config, options: see `Generator`; `draft` is None for plain decoding. Default sizes are those that the
            prompts need.
        prompts, max_new_tokens, stop_tokens, sampling, logits_processor, matchers, on_tokens, stop_when, progress: see
            `Generator.generate`.

    Raises:
        ValueError: naming the argument.
        RuntimeError: see `Generator.generate`.
    """
    check_kinds(target, draft, config)
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
        matchers=matchers,
        on_tokens=on_tokens,
        stop_when=stop_when,
        progress=progress,
    )
