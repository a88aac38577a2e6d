"""What a generator makes once for each batch bucket and reuses: state, logits changes, compiled rounds, choosers of lengths."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from tqdm.auto import tqdm

from spec_ops.decoding.arguments import TokenChoice
from spec_ops.decoding.config import SpeculationConfig
from spec_ops.decoding.draft import HeldDrafts
from spec_ops.decoding.drafter import Drafter, draft_model, make_drafter
from spec_ops.decoding.lengths import LengthChooser
from spec_ops.decoding.logits import LogitsChanges, LogitsFeatures, LogitsProcessor, check_processor, identity
from spec_ops.decoding.lookup import PromptLookup
from spec_ops.decoding.plan import RoundPlan
from spec_ops.decoding.round import PlainRound, SpeculativeRound
from spec_ops.decoding.state import RoundState
from spec_ops.models.drafts import Draft
from spec_ops.models.paged import PagedKVCache
from spec_ops.models.target import Target
from spec_ops.ops.eager_invariance import BatchInvariant

MAX_PROCESSORS = 8  # functions whose rounds are kept


class Buckets:
    """Rounds over one pair of models and caches, by batch bucket and by what a call asks for.

    Args:
        target, draft, config, compile, backend, invariant: of the generator.
        target_cache, draft_cache: the second is None where no model drafts.
        max_pages, max_seq_len: most of a request.

    Attributes:
        states: by bucket.
        rounds: what runs a round, compiled or not, by bucket, whether it samples, chain length if rounds differ in it, and
            features of the logits.
        choosers: of chain lengths, by bucket, whether rounds sample, and features.
        made_changes: by bucket and features.
        processors: the user's functions, the one used last at the end.
        drafts: between rounds that follow grammars, by bucket and whether they sample.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | PromptLookup | None,
        config: SpeculationConfig,
        target_cache: PagedKVCache,
        draft_cache: PagedKVCache | None,
        *,
        max_pages: int,
        max_seq_len: int,
        compile: bool,
        backend: str,
        invariant: bool,
    ) -> None:
        self.target, self.draft, self.config = target, draft, config
        self.target_cache, self.draft_cache = target_cache, draft_cache
        self.max_pages, self.max_seq_len = max_pages, max_seq_len
        weight = target.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.compile, self.backend, self.invariant = compile, backend, invariant
        self.states: dict[int, RoundState] = {}
        self.rounds: dict[tuple[Any, ...], Callable[[], None]] = {}
        self.choosers: dict[tuple[Any, ...], LengthChooser] = {}
        self.made_changes: dict[tuple[int, LogitsFeatures], LogitsChanges] = {}
        self.processors: list[LogitsProcessor] = []
        self.drafts: dict[tuple[int, bool], HeldDrafts] = {}

    def eagerly(self) -> contextlib.AbstractContextManager[Any]:
        """Around what runs without being compiled."""
        return BatchInvariant() if self.invariant else contextlib.nullcontext()

    def state(self, bucket: int) -> RoundState:
        """The state of the bucket's rounds."""
        if bucket not in self.states:
            model, sizes = draft_model(self.draft), {}
            if model is not None:
                sizes = {
                    "topk": self.config.topk,
                    "draft_hidden": model.config.hidden_size,
                    "draft_vocab": model.draft_vocab_size,
                }
            self.states[bucket] = RoundState(
                bucket,
                self.max_pages,
                max_len=self.max_seq_len,
                path_len=self.config.path_len if self.draft is not None else 1,
                hidden_dtype=self.dtype,
                device=self.device,
                **sizes,
            )
        return self.states[bucket]

    def drafter(self, bucket: int, sampled: bool) -> Drafter | None:
        """A new drafter over the bucket's state; None for plain decoding."""
        if self.draft is None:
            return None
        state = self.state(bucket)
        return make_drafter(self.draft, self.draft_cache, state, self.config, sampled=sampled, backend=self.backend)

    def held_drafts(self, bucket: int, choice: TokenChoice) -> HeldDrafts | None:
        """Where rounds that follow grammars hold what the next one verifies; None for rounds that draft first, or never."""
        if choice.grammars is None or self.draft is None:
            return None
        return self.drafts.setdefault((bucket, choice.sampled), HeldDrafts())

    def plan(self, bucket: int, choice: TokenChoice) -> RoundPlan:
        """How long the chains of a call's rounds are."""
        config, key = self.config, (bucket, choice.sampled, choice.features)
        if config.lengths is None or self.draft is None or choice.grammars is not None:
            return RoundPlan(None)
        if key not in self.choosers:
            sees_first = not choice.sampled or isinstance(self.draft, PromptLookup)
            self.choosers[key] = LengthChooser(config.lengths, config.draft_cost, sees_first=sees_first)
        return RoundPlan(self.choosers[key], self.target.ranks)

    def changes(self, bucket: int, features: LogitsFeatures) -> LogitsChanges:
        """The changes that the bucket's rounds with these features make. A function of the user's is tried out first."""
        state, vocab = self.state(bucket), self.target.config.vocab_size
        if features.processor is not None:
            self._remember(features.processor, state)
        if (bucket, features) not in self.made_changes:
            num_tokens = self.config.num_tokens if self.draft is not None else 1
            self.made_changes[bucket, features] = LogitsChanges(state, features, vocab, num_tokens)
        return self.made_changes[bucket, features]

    def _remember(self, processor: LogitsProcessor, state: RoundState) -> None:
        """Check a function that is new, and forget the rounds of the one used longest ago if there are too many."""
        others = [known for known in self.processors if identity(known) != identity(processor)]
        if len(others) == len(self.processors):
            check_processor(processor, state, self.target.config.vocab_size, self.compile)
        self.processors = [*others, processor]
        if len(self.processors) > MAX_PROCESSORS:
            self._forget(self.processors.pop(0))

    def _forget(self, processor: LogitsProcessor) -> None:
        def keep(features: LogitsFeatures | None) -> bool:
            return features is None or identity(features.processor) != identity(processor)

        self.made_changes = {key: made for key, made in self.made_changes.items() if keep(key[-1])}
        self.rounds = {key: made for key, made in self.rounds.items() if keep(key[-1])}
        self.choosers = {key: made for key, made in self.choosers.items() if keep(key[-1])}

    def build(
        self,
        bucket: int,
        *,
        sampled: bool = False,
        features: LogitsFeatures | None = None,
        drafts: HeldDrafts | None = None,
        length: int | None = None,
    ) -> SpeculativeRound | PlainRound:
        """A new, uncompiled round: see `Generator.round`."""
        options: dict[str, Any] = {"sampled": sampled, "backend": self.backend}
        if features is not None:
            options["changes"] = self.changes(bucket, features)
        state = self.state(bucket)
        if self.draft is None:
            return PlainRound(self.target, self.target_cache, state, **options)
        caches = self.target_cache, self.draft_cache
        if length == 0:
            drafter = self.drafter(bucket, sampled)
            return PlainRound(self.target, self.target_cache, state, drafter=drafter, **options)
        config = self.config if length is None else self.config.of_length(length)
        return SpeculativeRound(self.target, self.draft, *caches, state, config, drafts=drafts, **options)

    def round(self, bucket: int, choice: TokenChoice, bar: tqdm, length: int | None = None) -> Callable[[], None]:
        """The round of a bucket, and of a chain length if rounds differ in it, built and compiled when it is first used."""
        key = (bucket, choice.sampled, *(() if length is None else (length,)), choice.features)
        if key not in self.rounds:
            drafts = self.held_drafts(bucket, choice)
            module = self.build(bucket, sampled=choice.sampled, features=choice.features, drafts=drafts, length=length)
            if self.compile:
                from spec_ops.passes import compile as compile_with_passes

                if not bar.disable:
                    of_length = "" if length is None else f" and {length} draft steps"
                    message = f"compiling the round for batch size {bucket}{of_length} (once; later calls reuse it)"
                    bar.write(message, file=sys.stderr)
                compiled = compile_with_passes(module, invariant=self.invariant)
                self.rounds[key] = functools.partial(_run_compiled, compiled)
            else:
                self.rounds[key] = functools.partial(self._run_eagerly, module) if self.invariant else module
        return self.rounds[key]

    def _run_eagerly(self, module: Callable[[], None]) -> None:
        with self.eagerly():
            module()


def _run_compiled(compiled: Callable[[], None]) -> None:
    try:
        compiled()
    except torch._dynamo.exc.Unsupported as error:
        text = str(error)
        reason = next(line.strip() for line in text.splitlines() if line.strip())
        places = re.findall(r'File "(.+?)", line (\d+)', text.partition("from user code")[2])
        where = f" ({':'.join(places[-1])})" if places else ""
        raise RuntimeError(
            f"generate: the models do not become one graph, which `compile=True` needs: {reason}{where}; pass `compile=False`"
        ) from error
