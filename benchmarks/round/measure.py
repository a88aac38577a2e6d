"""Time of one speculative round on a real model's shape with random weights, and what it is compared with.

A round runs as the replay of its CUDA graph; the median of single replays between events is reported. The floor is the bytes
of weights and KV that a round must read once, over the measured copy bandwidth. One compiled round serves all contexts of its
batch size, as in a server: only lengths differ, and the block tables are as wide as the longest needs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.round import ranks as sharing
from benchmarks.round.naive import NaiveRound
from benchmarks.round.profile import Profile, breakdown, plot, profile, small_kernels
from benchmarks.round.report import kind
from benchmarks.round.shapes import SHAPES, Shape, touched_experts
from benchmarks.round.stored import parameter_bytes, store
from benchmarks.round.through_transformers import build_model, taken_over
from benchmarks.timing import median_ms
from spec_ops.decoding import Generator, PromptLookup, SamplingParams, SpeculationConfig
from spec_ops.decoding.drafter import draft_model
from spec_ops.decoding.logits import LogitsChanges, LogitsFeatures
from spec_ops.models import Draft, Target
from spec_ops.models.config import CacheSizes, ModelConfig
from spec_ops.models.layers import Mixture
from spec_ops.parallel import TensorParallel, shard_config
from spec_ops.passes import compile as compile_with_passes

ROUNDS = ("speculative", "naive", "plain", "assisted", "lookup", "plain-lookup")
PLAIN = ("plain", "plain-lookup")  # of one token
PAGE_SIZE = 64
PROFILED = 5  # rounds under the profiler
PENALIZED = LogitsFeatures(bias=True, repetition=True, counts=True, bitmask=True)
PENALTIES = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={1: 1.0})


@dataclass(frozen=True)
class RoundCase:
    """One round to compile and time, in a process of its own.

    Attributes:
        model: key of `SHAPES`; layers: of the target, None for all.
        steps, topk, tree_tokens: the draft, as in `SpeculationConfig`.
        contexts: committed tokens per request, one row each.
        path: `"own"`: our class of the target; `"transformers"`: transformers', through `TransformersModel`.
        round: `"speculative"`; `"naive"` (`naive.py`); `"plain"`: one token by the same ops; `"assisted"`: transformers;
            `"lookup"`: drafts by prompt lookup; `"plain-lookup"`: a plain step that looks up too, a round of length 0.
        backend: of every attention call. passes: the graph passes on or off.
        repeats: rounds to take the median of. bandwidth: bytes a second, for the floor.
        accept_length: tokens a request gains per round, stated and not measured: random weights accept nothing.
        compiled: False runs the round as it is, to try a benchmark without a compiler.
        timeline: file for a picture of one round at the first context.
        temperature, top_k, top_p, min_p: of every request; temperature 0 decodes greedily.
        penalties: bias, repetition, presence and frequency penalties and a token bitmask change the target's logits.
        invariant: batch-invariant arithmetic.
        weights: of the linear layers of target and draft, one of `stored.KINDS`; None: they are of `dtype`.
        tp: ranks that share the models, in as many processes; alone: only the first of them runs (`ranks.py`).
        collective: who computes their sums: `"push"`, our kernels where they do; `"nccl"`.
        expert_parallel: with ranks, a mixture's experts are shared whole. whole_draft: every rank has all of the draft.
        check_rounds: with ranks, so many rounds more, of which they compare the tokens.
    """

    model: str
    batch_size: int
    contexts: tuple[int, ...]
    path: str = "own"
    round: str = "speculative"
    backend: str = "auto"
    passes: bool = True
    layers: int | None = None
    steps: int = 3
    topk: int = 1
    tree_tokens: int | None = None
    repeats: int = 50
    bandwidth: float = 4.3e12
    accept_length: float = 3.0
    device: str = "cuda"
    dtype: str = "bfloat16"
    compiled: bool = True
    timeline: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: bool = False
    invariant: bool = False
    weights: str | None = None
    tp: int = 1
    alone: bool = False
    collective: str = "push"
    expert_parallel: bool = False
    whole_draft: bool = False
    check_rounds: int = 0

    def __str__(self) -> str:
        layers = f" {self.layers} layers" if self.layers else ""
        contexts = ", ".join(str(context) for context in self.contexts)
        shape = f"{self.model}{layers} batch {self.batch_size} context {contexts} S={self.steps}"
        what = kind({"round": self.round, "path": self.path} | self.choice)
        return f"{shape} {what} {self.backend}{'' if self.passes else ' without passes'}"

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    @property
    def choice(self) -> dict[str, Any]:
        """What its rows say of how tokens are chosen and weights are stored; nothing for a greedy round of unchanged logits
        and 16 bits."""
        settings = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        names = ("penalties", "invariant", "weights", "expert_parallel", "whole_draft")
        flags = {name: value for name in names if (value := getattr(self, name))}
        shared = {"tp": self.tp, "collective": self.collective, "gpus": self.processes} if self.tp > 1 else {}
        return ({"sampled": True, **settings} if self.sampled else {}) | flags | shared

    @property
    def has_model(self) -> bool:
        """Whether a model drafts."""
        return self.round not in (*PLAIN, "lookup")

    @property
    def tokens(self) -> int:
        """Of a request, that the target reads in a round."""
        return 1 if self.round in PLAIN else self.config.num_tokens

    @property
    def processes(self) -> int:
        return 1 if self.alone else self.tp

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model].with_layers(self.layers)

    @property
    def config(self) -> SpeculationConfig:
        return SpeculationConfig(self.steps, self.topk, self.tree_tokens)

    @property
    def slack(self) -> int:
        """Tokens that a request may gain between two resets: warm-up, or the timed rounds, all of the longest path."""
        return self.config.path_len * (max(self.repeats, PROFILED, sharing.RESTARTED) + 8)

    def memory_bytes(self) -> int:
        """Estimate of what the process takes on the device; weights of fewer bits have 16 at first."""
        target, draft = self.build("meta", TensorParallel.fake(self.tp))
        models = [target, draft] if self.has_model else [target]
        configs: list[CacheSizes] = [target.config, draft.config] if self.has_model else [target.config]
        weights = {id(p): p.numel() * p.element_size() for model in models for p in model.parameters()}
        rows = [row for config in configs for layer in config.kv_rows for row in layer]
        tokens = self.batch_size * (max(self.contexts) + self.slack + self.config.reserve + PAGE_SIZE)
        item = getattr(torch, self.dtype).itemsize
        # The CUDA context, libraries' workspaces, a graph's pool, and logits of a batch.
        return sum(weights.values()) + tokens * item * sum(map(math.prod, rows)) + 2 * 2**30

    def build(self, device: str, ranks: TensorParallel) -> tuple[Target, Draft]:
        """Target and draft, or a rank's shares of them."""
        dtype = getattr(torch, self.dtype)
        if self.tp == 1:
            return self.shape.build(device, dtype)
        how = {"expert_parallel": self.expert_parallel, "whole_draft": self.whole_draft}
        return sharing.shares(self.shape, ranks, device, dtype, **how)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RoundCase:
        values = json.loads(text)
        return cls(**values | {"contexts": tuple(values["contexts"])})

    def _touched(self) -> dict[str, float]:
        """For a mixture the experts of a layer that the target's tokens go to, as the floor counts them."""
        mixture = self.shape.target.mixture
        if mixture is None:
            return {}
        return {"touched_experts": round(touched_experts(mixture, self.batch_size * self.tokens), 2)}

    def row(self, context: int, milliseconds: float, floors: tuple[int, int]) -> dict[str, Any]:
        """What every row has. `floors`: bytes of weights and of KV that a round must read."""
        weights, kv = (number / self.bandwidth * 1e3 for number in floors)
        accepted = 1.0 if self.round in PLAIN else self.accept_length
        steps, topk = (0, 0) if self.round in PLAIN else (self.steps, self.topk)
        named = {"plain": "", "assisted": "+one-layer", "lookup": "+lookup", "plain-lookup": "+lookup"}
        draft = named.get(self.round, f"+{self.shape.draft}")
        tree = {"num_tokens": self.config.num_tokens} if topk > 1 else {}
        return {
            "model": f"{self.shape.label}-{self.shape.target.num_layers}-layers{draft}",
            "layers": self.shape.target.num_layers,
            "bs": self.batch_size,
            "context": context,
            "steps": steps,
            "topk": topk,
            **tree,
            "round": self.round,
            "path": self.path,
            "kind": self.round if self.round != "speculative" else self.shape.draft,
            **self.choice,
            "backend": self.backend,
            "passes": self.passes,
            "ms": round(milliseconds, 3),
            "floor_ms": round(weights + kv, 3),
            "weights_floor_ms": round(weights, 3),
            "kv_floor_ms": round(kv, 3),
            "share_of_floor": round((weights + kv) / milliseconds, 4),
            **self._touched(),
            "accept_length": accepted,
            "tokens_per_s": round(accepted * self.batch_size / milliseconds * 1e3, 1),
        }


def floor_bytes(
    generator: Generator, batch_size: int, context: int, sizes: ModelConfig | None = None, tokens: int | None = None
) -> tuple[int, int]:
    """Bytes of weights and of KV that a round must read: the target's once, the draft's (its LM head too) once per draft
    forward. A layer with a window reads the window, a mixture the experts that its tokens go to if routing is uniform.
    `sizes`: of the target; default those of its class. `tokens`: of a request that the target reads; default those of a draft
    model's rounds, or one."""
    target, draft = generator.target, draft_model(generator.draft)

    def size(module: Any, tokens: int) -> int:
        total = sum(map(parameter_bytes, module.parameters())) - sum(map(parameter_bytes, module.embed.parameters()))
        for layer in (part for part in module.modules() if isinstance(part, Mixture)):
            stacks = layer.gate_up_proj, layer.down_proj, layer.gate_up_scale, layer.down_scale
            experts = sum(stack.nbytes for stack in stacks if stack is not None)
            total -= round(experts * (1 - touched_experts(layer.mixture, tokens) / layer.mixture.num_experts))
        return total

    def kv(config: ModelConfig) -> int:
        seen = [min(context, config.window(layer) or context) for layer in range(config.num_layers)]
        return sum(n * math.prod(row) for n, rows in zip(seen, config.kv_rows, strict=True) for row in rows)

    forwards = 0 if draft is None else generator.config.num_steps
    verified = batch_size * (tokens or (1 if draft is None else generator.config.num_tokens))
    weights, rows = size(target, verified), kv(sizes or target.config)  # type: ignore[arg-type]
    if draft is not None:
        weights += forwards * size(draft, batch_size * generator.config.topk)
        rows += forwards * kv(draft.config)  # type: ignore[arg-type]
    return weights, batch_size * rows * target.embed.weight.element_size()


def reset(generator: Generator, batch_size: int, context: int) -> None:
    """All rows in the middle of a generation at `context` committed tokens, their pages in random order."""
    state = generator.buckets.state(batch_size)
    state.clear()
    order = torch.randperm(batch_size * generator.max_pages, generator=torch.Generator().manual_seed(0))
    state.block_tables.copy_(order.to(torch.int32).view(batch_size, -1))
    state.committed_lens.fill_(context)
    state.max_lens.fill_(2**30)
    state.finished.fill_(False)


class CompiledRound:
    """A case's round, built, compiled and recorded by the constructor.

    Attributes:
        compile_s: seconds of the first call: compilation with whatever is in the cache directories, and its warm-up; None for
            a round that is not compiled.
        first_call_s: the same with all that comes before it but the weights: taking the model over, caches.
    """

    compile_s: float | None = None
    changes: LogitsChanges | None = None

    def __init__(self, case: RoundCase) -> None:
        self.case = case
        self.ranks = sharing.join(case.tp, case.alone or case.tp == 1, case.device)
        target, draft = self._models()
        self.generator = Generator(
            target,
            draft if case.has_model else None if case.round == "plain" else PromptLookup(),
            case.config,
            max_batch_size=case.batch_size,
            max_seq_len=max(case.contexts) + case.slack,
            page_size=PAGE_SIZE,
            backend=case.backend,
            invariant=case.invariant,
            prefill_backend="auto",  # not every provider has one, and nothing is prefilled here
        )
        for cache in filter(None, (self.generator.target_cache, self.generator.draft_cache)):
            for tensor in cache.tensors():
                tensor.normal_()
        reset(self.generator, case.batch_size, max(case.contexts))  # a naive round copies the page tables
        naive = case.round == "naive"
        self.step = self._compiled(NaiveRound(self.generator, case.batch_size) if naive else self._round())
        self.reset(max(case.contexts))
        start = time.perf_counter()
        # `.item()` of the naive round becomes a node that a pass can remove, instead of a graph break.
        with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=naive):
            self.step()
            self._synchronize()
            self.first_call_s = time.perf_counter() - self.started
            if case.compiled:
                self.compile_s = time.perf_counter() - start
            for _ in range(3):  # record the graph, and replay it
                self.step()
        self._synchronize()

    def _models(self) -> tuple[Target, Draft]:
        """Target and draft; from then on it counts as the first call."""
        case, shape, dtype = self.case, self.case.shape, getattr(torch, self.case.dtype)
        own = case.path == "own"
        models: list[Any]
        if own:
            models = list(case.build(case.device, self.ranks))
        else:
            models = [build_model(shape, case.device, dtype, self.ranks if case.tp > 1 else None)]
        self._store(models)
        self._synchronize()
        self.started = time.perf_counter()
        if not own:
            models = list(taken_over(models[0], shape))
            self._store(models[1:])
        return models[0], models[1]

    def _store(self, models: list[Any]) -> None:
        if self.case.weights is not None:
            for model in models:
                store(model, self.case.weights)

    def _round(self) -> torch.nn.Module:
        case = self.case
        options: dict[str, Any] = {"length": 0} if case.round == "plain-lookup" else {}
        options |= {"sampled": case.sampled, "features": PENALIZED if case.penalties else None}
        module = self.generator.round(case.batch_size, **options)
        self.changes = module.changes
        return module

    def _compiled(self, module: torch.nn.Module) -> Callable[[], object]:
        if not self.case.compiled:
            return module
        if self.case.passes:
            switches = sharing.COLLECTIVES[self.case.collective]
            return compile_with_passes(module, passes=switches, invariant=self.case.invariant)
        # torch 2.11 records no CUDA graph after an `.item()`: the node's buffer, None, enters the next partition, where an
        # assertion without a text fails. Without the pass that removes it, the naive round is launched kernel by kernel.
        mode = "default" if self.case.round == "naive" else "reduce-overhead"
        return torch.compile(module, mode=mode, fullgraph=True, dynamic=False)

    def _synchronize(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()

    def reset(self, context: int) -> None:
        case = self.case
        reset(self.generator, case.batch_size, context)
        if isinstance(self.generator.draft, PromptLookup):
            random = torch.Generator(case.device).manual_seed(0)
            self.generator.buckets.state(case.batch_size).tokens.random_(case.shape.target.vocab_size, generator=random)
        if case.sampled:
            state = self.generator.buckets.state(case.batch_size)
            state.seeds.copy_(torch.arange(case.batch_size))
            for name in ("temperature", "top_k", "top_p", "min_p"):
                getattr(state, name).fill_(getattr(case, name))
        if self.changes is not None:
            vocab, random = case.shape.target.vocab_size, torch.Generator().manual_seed(0)
            texts = torch.randint(vocab, (case.batch_size, context), generator=random).tolist()
            rows = torch.arange(case.batch_size, device=self.changes.bitmask.device)
            self.changes.load(rows, [PENALTIES] * case.batch_size, texts)
            masks = torch.randint(-(2**31), 2**31, (64, *self.changes.bitmask.shape[1:]), generator=random)
            self.changes.bitmask.copy_(masks[torch.arange(case.batch_size) % 64])

    def _milliseconds(self) -> float:
        if self.case.device == "cuda":
            return median_ms(self.step, self.case.repeats)
        times = []
        for _ in range(self.case.repeats):
            start = time.perf_counter()
            self.step()
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times)[len(times) // 2]

    @torch.no_grad()
    def rows(self) -> Iterator[dict[str, Any]]:
        """A row per context, in the case's order."""
        case = self.case
        for context in case.contexts:
            self.reset(context)
            milliseconds = sharing.slowest(self.ranks, self._milliseconds())
            sizes = shard_config(case.shape.target, case.tp) if case.path == "transformers" else None
            row = case.row(context, milliseconds, floor_bytes(self.generator, case.batch_size, context, sizes, case.tokens))
            row["first_call_s"] = round(self.first_call_s, 3)
            if case.device == "cuda":
                self.reset(context)
                found = profile(self.step, PROFILED)
                kernels = [kernel for one in found.rounds for kernel in one]
                row |= found.counts | breakdown(kernels, PROFILED, milliseconds)
                row["small_kernels"] = small_kernels(kernels, PROFILED)
            if case.check_rounds and not self.ranks.alone:
                output = self.generator.buckets.state(case.batch_size).output

                def restart(number: int, context: int = context) -> None:
                    self.reset(max(1, context - number % 128))  # other texts each time

                sharing.check_tokens(self.ranks, self.step, output, restart, case.check_rounds)
                row["same_tokens_rounds"] = case.check_rounds
            yield row
            if case.timeline is not None and context == case.contexts[0]:
                self._draw(case.timeline, found, row)

    def _draw(self, path: str, found: Profile, row: dict[str, Any]) -> None:
        if len(found.rounds) != PROFILED:
            raise RuntimeError(f"--timeline: the {PROFILED} rounds of {self.case} launched different kernels")
        shape = f"{row['model']}, batch {row['bs']}, context {row['context']}, {row['backend']}"
        title = f"one round: {shape}; {row['ms']:.2f} ms, floor {row['floor_ms']:.2f}"
        plot(Path(path), found.rounds[PROFILED // 2], title)
