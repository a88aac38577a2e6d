"""What the userbenchmark measures: every op alone, then rounds and generation of the pair that the package ships.

Keys have the form of TorchBench's own: `op=mha_target_verify, bs=8, context=4096, ..., device=cuda, metric=latency_us`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters
from tqdm.auto import tqdm

import spec_ops
from benchmarks.kernels.cases import Batch, Case, Heads, Pool, Problem, num_sets, pages_needed
from benchmarks.round.measure import reset
from benchmarks.round.profile import profile
from benchmarks.timing import MAX_REPLAYS, median_ms, time_calls
from spec_ops import ops
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from spec_ops.models.pretrained import load_pair
from spec_ops.passes.analysis.counts import CUDA_GRAPHS, HOST_COPIES, ITEMS

PAGE_SIZE = 64
PREFILL = 128  # queries per request of the ragged extend
PROMPT = 256
VOCAB, DRAFT_VOCAB = 128256, 32000  # Llama 3's, and an EAGLE-3 head's for it
LLAMA_8B, DEEPSEEK_TP8 = Heads("gqa", 32, 8, 128, 128), Heads("mla", 16, 1, 576, 512)

Metrics = Iterator[tuple[str, float]]


@dataclass(frozen=True)
class Options:
    """What to measure; `heads` of the attention ops, everything else as the runner's command line says."""

    device: str
    bs: tuple[int, ...]
    context: int
    steps: int
    prompts: int
    new_tokens: int
    compile: bool
    heads: tuple[Heads, ...] = (LLAMA_8B, DEEPSEEK_TP8)

    @classmethod
    def for_device(cls, device: str, **given: Any) -> Options:
        """Defaults of `device` under what is given."""
        cuda = device == "cuda"
        own: dict[str, Any] = (
            {"context": 4096, "prompts": 32, "compile": True} if cuda else {"context": 512, "prompts": 8, "compile": False}
        )
        values: dict[str, Any] = {"bs": (1, 8), "steps": 3, "new_tokens": 128} | own | given
        return cls(device=device, **values | {"bs": tuple(values["bs"])})

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device: no CUDA device is available")
        for name in ("context", "steps", "prompts", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not self.bs or min(self.bs) < 1 or max(self.bs) > self.prompts:
            raise ValueError(f"--bs must lie in [1, {self.prompts}], the number of prompts, got {list(self.bs)}")
        if self.context <= self.steps:
            raise ValueError(f"--context must be more than the {self.steps} draft steps, got {self.context}")
        try:
            held_out_prompts(ByteTokenizer(), self.prompts, PROMPT)
        except ValueError as error:  # now, not after minutes of measuring
            raise ValueError(f"--prompts: {error}") from None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def key(self, metric: str, **facts: Any) -> str:
        return ", ".join(f"{name}={value}" for name, value in (facts | {"device": self.device, "metric": metric}).items())


def measure(options: Options) -> dict[str, float]:
    """All metrics, by key; progress goes to stderr."""
    found: dict[str, float] = {}
    jobs: list[tuple[str, Callable[[], Metrics]]] = []
    for bs in options.bs:
        for heads in options.heads:
            jobs.append((f"{heads.kind} {heads}, batch {bs}", functools.partial(attention_and_append, options, heads, bs)))
        jobs.append((f"acceptance, batch {bs}", functools.partial(acceptance, options, bs)))
        jobs.append((f"pair, batch {bs}", functools.partial(generation, options, bs)))
    with tqdm(jobs, unit="job") as bar:
        for name, job in bar:
            bar.set_description(name)
            with torch.no_grad():
                found.update((key, float(value)) for key, value in job())
    return found


def attention_and_append(options: Options, heads: Heads, bs: int) -> Metrics:
    """The four attention steps over a full cache, and the append before them, microseconds."""
    kind = "mha" if heads.kind == "gqa" else "mla"
    rows = options.steps + 1
    widths = {"draft_decode": 1, "target_verify": rows, "draft_extend": rows, "extend": min(PREFILL, options.context)}
    batch = Batch(bs, options.context, options.context)
    cases = {f"{kind}_{step}": Case(heads, batch, q_len, "causal") for step, q_len in widths.items()}
    verify = cases[f"{kind}_target_verify"]
    device, dtype = torch.device(options.device), options.dtype
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = num_sets(verify, dtype.itemsize, l2_bytes)
    pool = Pool(heads, pages_needed(verify, PAGE_SIZE) * sets, PAGE_SIZE, dtype, dtype, device)
    for op, case in cases.items():
        problem = Problem(case, pool, sets)
        timed: dict[str, Callable[..., Callable[[], object]]] = {op: attention_step}
        if case is verify:
            timed["append_kv" if kind == "mha" else "append_mla_kv"] = append_step
        for name, make in timed.items():
            key = options.key(
                "latency_us", op=name, bs=bs, context=options.context, heads=f"{heads}:{heads.head_dim}", q_len=case.q_len
            )
            yield key, microseconds([make(name, problem, index) for index in range(sets)], device)


def attention_step(op: str, problem: Problem, index: int) -> Callable[[], torch.Tensor]:
    """An attention step on buffer set `index`; a ragged one gets the same queries in a row."""
    case, pool, q = problem.case, problem.pool, problem.q[index]
    latent = (case.heads.v_head_dim,) if case.heads.kind == "mla" else ()
    ragged: tuple[torch.Tensor, int] | tuple[()] = ()
    if op in ("mha_extend", "mla_extend"):
        starts = torch.arange(case.batch.bs + 1, dtype=torch.int32, device=q.device) * case.q_len
        q, ragged = q.flatten(0, 1), (starts, case.q_len)
    arguments = (q, *pool.caches, *latent, problem.tables[index], problem.seq_lens, *ragged)
    return functools.partial(getattr(ops, op), *arguments, max_seq_len=max(problem.lens), scale=case.heads.scale)


def append_step(op: str, problem: Problem, index: int) -> Callable[[], None]:
    """Writes as many rows per request as the case has queries, to the last slots of buffer set `index`."""
    case, pool, table = problem.case, problem.pool, problem.tables[index]
    positions = problem.seq_lens[:, None] - case.q_len + torch.arange(case.q_len, device=table.device)
    slots = (table.gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE).flatten()
    rows = problem.q[index].flatten(0, 1)[:, : case.heads.num_kv_heads].contiguous()
    if case.heads.kind == "mla":
        rank = case.heads.v_head_dim
        return functools.partial(getattr(ops, op), *pool.caches, rows[:, 0, :rank], rows[:, 0, rank:], slots)
    return functools.partial(getattr(ops, op), *pool.caches, rows, rows, slots)


def acceptance(options: Options, bs: int) -> Metrics:
    """Greedy and sampled acceptance of a chain, microseconds."""
    device, tokens = torch.device(options.device), options.steps + 1
    candidates = torch.randint(DRAFT_VOCAB, (bs, tokens), device=device)
    agree = torch.rand(bs, tokens, device=device) < 0.75
    target_tokens = torch.where(agree, candidates.roll(-1, 1), candidates)
    target_probs = torch.randn(bs, tokens, VOCAB, device=device).softmax(-1)
    draft_probs = torch.randn(bs, tokens - 1, DRAFT_VOCAB, device=device).softmax(-1)
    uniforms, final = torch.rand(bs, tokens, device=device), torch.rand(bs, device=device)
    draft: dict[str, Any] = {"draft_probs": draft_probs, "draft_to_target": torch.arange(DRAFT_VOCAB, device=device)}
    calls = {
        "accept_greedy": functools.partial(ops.accept_greedy, candidates, target_tokens),
        "accept_sampled": functools.partial(ops.accept_sampled, candidates, target_probs, uniforms, final, **draft),
    }
    for op, call in calls.items():
        yield options.key("latency_us", op=op, bs=bs, q_len=tokens), microseconds([call], device)


def generation(options: Options, bs: int) -> Metrics:
    """Greedy chains of the shipped pair on held-out text: accept length and tokens/s, then one round and what the host does."""
    device = torch.device(options.device)
    target, draft, tokenizer = load_pair(device=device, dtype=options.dtype)
    prompts = held_out_prompts(tokenizer, options.prompts, PROMPT)
    config = SpeculationConfig(options.steps)
    # Timed rounds go on from `context`, each by the longest path at most.
    longest = max(PROMPT + options.new_tokens, options.context + config.path_len * (MAX_REPLAYS + 8))
    sizes: dict[str, Any] = {"max_batch_size": bs, "max_seq_len": longest, "page_size": PAGE_SIZE}
    generator = Generator(target, draft, config, compile=options.compile, **sizes)
    skips = counters["inductor"]["cudagraph_skips"]
    generator.generate(prompts[:bs], max_new_tokens=min(24, options.new_tokens), progress=True)  # compiles and records
    stats = generator.generate(prompts, max_new_tokens=options.new_tokens, progress=True).stats
    pair: dict[str, Any] = {"model": "spec_ops_pair", "bs": bs, "steps": options.steps}
    text = pair | {"prompts": options.prompts, "new_tokens": options.new_tokens}
    yield options.key("accept_length", **text), stats.accept_length
    yield options.key("tokens_per_second", **text), stats.tokens_per_second

    step = generator.buckets.rounds[bs, False, None]
    pair["context"] = options.context
    reset(generator, bs, options.context)
    yield options.key("round_latency_ms", **pair), milliseconds(step, device)
    if options.compile:
        yield options.key("cudagraph_skips", **pair), counters["inductor"]["cudagraph_skips"] - skips
    if device.type == "cuda":
        reset(generator, bs, options.context)
        counts = profile(step).counts
        for name in ("graph_launches", "host_launches", "host_syncs"):
            yield options.key(name, **pair), counts[name]
    # Of the graph itself, so on any machine: where it waits for the device, and how many CUDA graphs the rest makes.
    planned = spec_ops.explain(generator.round(bs)).after
    yield options.key("planned_host_syncs", **pair), planned[HOST_COPIES] + planned[ITEMS]
    yield options.key("planned_cuda_graphs", **pair), planned[CUDA_GRAPHS]


def microseconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median time of one of `calls`, as `time_calls` takes it, whatever they return."""
    overwritten = torch.zeros((), device=device)  # `time_calls` spoils what a call returned

    def marked(call: Callable[[], object]) -> torch.Tensor:
        call()
        return overwritten

    return time_calls([functools.partial(marked, call) for call in calls]).us


def milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """Median time of a round; a compiled one is a CUDA graph already, which no other graph can hold."""
    return median_ms(step, MAX_REPLAYS) if device.type == "cuda" else microseconds([step], device) / 1e3
