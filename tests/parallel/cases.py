"""What the ranks of a test's world do; `test_rounds.py` looks at what they return."""

from __future__ import annotations

import dataclasses
import time
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spec_ops.passes
from spec_ops.decoding import Generator, PromptLookup, SamplingParams, SpeculationConfig, generate
from spec_ops.models import load_pair as load_whole
from spec_ops.parallel import RankError, TensorParallel, load_pair, shard
from spec_ops.parallel.layers import VocabParallelHead, likeliest_of_shares
from spec_ops.passes import PassManager
from tests.parallel.models import BATCH, COMPILED, JOBS, NEW_TOKENS, OF_FOUR, make_draft, make_target


def decoded(job, ranks: TensorParallel, **options: Any) -> list[list[int]]:
    whole = make_target(job.kind)
    target = shard(whole, ranks, expert_parallel=job.expert_parallel)
    draft = make_draft(job, target)  # its embedding and head are the share's
    if job.divided and job.draft not in (None, "lookup"):
        draft = shard(make_draft(job, whole), ranks, target=target, expert_parallel=job.expert_parallel)
    options |= {"max_new_tokens": NEW_TOKENS, "page_size": 4, "sampling": job.sampling}
    return generate(target, draft, BATCH, job.config, **options).tokens


def case_tokens(ranks: TensorParallel) -> dict[str, Any]:
    return {name: decoded(job, ranks) for name, job in JOBS.items() if ranks.size == 2 or name in OF_FOUR}


def case_compiled(ranks: TensorParallel) -> dict[str, Any]:
    """Rounds as Inductor's passes leave them, with our passes and without; no code is made of them."""
    if ranks.size > 2:
        return {}
    from tests.helpers.inductor_unbuilt import unbuilt

    found: dict[str, Any] = {}
    plain = mock.patch.object(
        spec_ops.passes, "compile", lambda module, **_: torch.compile(module, fullgraph=True, dynamic=False)
    )
    run, counts = PassManager.__call__, []
    watched = mock.patch.object(PassManager, "__call__", lambda self, graph: counts.append(run(self, graph)))
    for name, context in (("passes", watched), ("no passes", plain)):
        torch._dynamo.reset()
        with context, unbuilt(lowered=False):
            found[name] = decoded(COMPILED, ranks, compile=True)
    return {**found, "graphs": len(counts)}


def case_invariant(ranks: TensorParallel) -> dict[str, Any]:
    """Plain decoding alone, chains and trees together in bfloat16: the tokens, and the sums of ranks that torch did. A
    mixture of four ranks: its text changes soonest where sums are rounded otherwise."""
    sums = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops._c10d_functional.all_reduce.default and args[0].is_floating_point():
                sums.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    found: dict[str, Any] = {}
    target = shard(make_target("mixture" if ranks.size == 4 else "gqa").bfloat16(), ranks)
    draft = make_draft(JOBS["chain"], target).bfloat16()
    ways = {"plain": (1,), "chain": (4, draft, SpeculationConfig(3)), "tree": (4, draft, SpeculationConfig(3, 2, 6))}
    for name, (batch, *drafting) in ways.items():
        options = {"max_batch_size": batch, "max_seq_len": 64, "page_size": 4, "prefill_chunk_size": 8}
        generator = Generator(target, *drafting, invariant=True, **options)
        with Watched():
            found[name] = generator.generate(BATCH, max_new_tokens=12).tokens
    return {"tokens": found, "sums": len(sums)}


def case_selected_rows(ranks: TensorParallel) -> dict[str, Any]:
    """Sums of the rows that are used, of parts in small integers: no order of adding rounds. The last rank is late."""
    from spec_ops.passes.hoist_row_select import HoistRowSelect
    from tests.helpers.pass_harness import capture, run_pass

    drawn = torch.Generator().manual_seed(ranks.rank)
    x, up, down = (torch.randint(-3, 4, shape, generator=drawn).float() for shape in ((3, 4, 8), (8, 16), (16, 8)))
    row = torch.tensor([1, 3, 0])

    def of_a_sum(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return ranks.all_reduce((x @ up).relu() @ down)[torch.arange(3), row]

    def of_all_requests(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        parts = torch.ops._c10d_functional.all_gather_into_tensor(x, ranks.size, ranks.name)
        return (torch.ops._c10d_functional.wait_tensor(parts) @ up)[:, row]

    found = {}
    for fn in (of_a_sum, of_all_requests):
        expected = fn(x, row)
        module, inputs = capture(fn, x, row)
        matches = run_pass(HoistRowSelect(), module).matches
        ranks.every(True)
        time.sleep(0.2 * (ranks.rank == ranks.size - 1))
        (got,) = module(*inputs)
        found[fn.__name__] = [matches, torch.equal(got, expected)]
    return found


def case_head(ranks: TensorParallel) -> dict[str, Any]:
    """Logits and likeliest tokens over a vocabulary that the ranks do not divide, with ties and numbers that are none."""
    whole = torch.nn.Linear(1, 13, bias=False)
    rows = [[0.0] * 13, [-0.0, 0.0] * 6 + [-0.0], [-1.0] * 12 + [3.0], [5.0, 1, 5, 1, 5, 1, 5, 5, 5, 5, 5, 5, 5]]
    rows += [[-torch.inf] * 13, [1.0] * 6 + [torch.inf] * 7, [1.0] * 9 + [torch.nan, torch.inf, torch.nan, 1]]
    found = []
    for row in rows:
        for sign in (1.0, -1.0):
            whole.weight.data = torch.tensor(row)[:, None]
            head = VocabParallelHead(1, 13, ranks)
            part = torch.zeros(len(head.weight), 1)
            mine = whole.weight.data[ranks.rank * len(part) : (ranks.rank + 1) * len(part)]
            part[: len(mine)] = mine
            head.weight.data = part
            hidden = torch.full((1, 1), sign)
            found.append(
                [
                    head.argmax(hidden).item(),
                    whole(hidden).argmax(-1).item(),
                    torch.equal(head(hidden).nan_to_num(9), whole(hidden).nan_to_num(9)),
                ]
            )
    return {"found": found}


def case_shares(ranks: TensorParallel) -> dict[str, Any]:
    """Likeliest tokens of shares that differ in size; some ranks hold none."""
    found = {}
    for vocab in (1, 3, 5, 13):
        logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
        logits[0] = -torch.inf
        shares = logits.chunk(ranks.size, -1)
        mine = shares[ranks.rank] if ranks.rank < len(shares) else logits[:, :0]
        first = torch.tensor(sum(share.shape[-1] for share in shares[: ranks.rank]))
        found[vocab] = torch.equal(likeliest_of_shares(mine, first, ranks), logits.argmax(-1))
    return found


def case_every(ranks: TensorParallel) -> dict[str, Any]:
    values = {"all": True, "none": False, "the first": ranks.rank == 0}
    return {name: ranks.every(value) for name, value in values.items()}


def case_shipped_pair(ranks: TensorParallel) -> dict[str, Any]:
    """From slices of the files, without the whole models."""
    target, draft, tokenizer = load_pair(ranks)
    whole, _, _ = load_whole()
    prompt = [tokenizer.encode("class Matrix:\n    def __init__(self")]
    share = sum(p.numel() for p in target.parameters()) / sum(p.numel() for p in whole.parameters())
    return {"tokens": generate(target, draft, prompt, max_new_tokens=8).tokens, "share": share}


def refused(action) -> str:
    try:
        action()
    except (RankError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def case_ranks_that_differ(ranks: TensorParallel) -> dict[str, Any]:
    target = shard(make_target("gqa"), ranks)
    generator = Generator(target, None, max_batch_size=2, max_seq_len=64)
    other = ranks.rank == ranks.size - 1
    deeper = make_target("gqa")
    deeper.config = dataclasses.replace(deeper.config, rms_norm_eps=1e-3 if other else 1e-4)
    changed = shard(deeper, ranks)
    drafting = PromptLookup() if other else None
    with mock.patch("spec_ops.decoding.generate.__version__", "0.0" if other else "0.1"):
        versions = refused(lambda: Generator(target, None, max_batch_size=2, max_seq_len=64))
    return {
        "versions": versions,
        "target": refused(lambda: Generator(changed, None, max_batch_size=2, max_seq_len=64)),
        "draft": refused(lambda: Generator(target, drafting, max_batch_size=2, max_seq_len=64)),
        "config": refused(lambda: Generator(target, None, max_batch_size=2 + other, max_seq_len=64)),
        "prompts": refused(lambda: generator.generate([[1, 2 + other]], max_new_tokens=4)),
        "seed": refused(lambda: generator.generate([[1]], sampling=SamplingParams(1.0, seed=int(other)), max_new_tokens=4)),
        "again": generator.generate([[1, 2]], max_new_tokens=4).tokens,
    }


def case_drawn_seed(ranks: TensorParallel) -> dict[str, Any]:
    """Every rank draws another seed; rank 0's counts."""
    target = shard(make_target("gqa"), ranks)
    torch.manual_seed(ranks.rank)  # after the model's weights, which seed it too
    result = generate(target, None, [[1, 2]], max_new_tokens=8, sampling=SamplingParams(1.0))
    return {"tokens": result.tokens, "seed": result.seed}


def case_clocks(ranks: TensorParallel) -> dict[str, Any]:
    """Hooks that decide by something else than tokens: rank 0's decides."""
    stop = 3 if ranks.rank == 0 else 5
    options = {"stop_when": lambda _request, tokens, count: count if len(tokens) >= stop else None}
    return {"tokens": generate(shard(make_target("gqa"), ranks), None, [[1, 2]], max_new_tokens=8, **options).tokens}


def case_raised(ranks: TensorParallel) -> dict[str, Any]:
    """A hook that raises on rank 0, where alone it is called; then another call."""
    target = shard(make_target("gqa"), ranks)
    calls: list[int] = []

    def stop_when(_request: int, _tokens: list[int], _count: int) -> None:
        calls.append(ranks.rank)
        if len(calls) == 3:
            raise ValueError("enough")

    error = refused(lambda: generate(target, None, [[1, 2]], max_new_tokens=12, stop_when=stop_when))
    return {"raised": error, "calls": len(calls), "again": generate(target, None, [[1, 2]], max_new_tokens=4).tokens}


def case_divergence(ranks: TensorParallel) -> dict[str, Any]:
    """One rank's round emits another token; without `check_rounds` nobody would know."""
    target = shard(make_target("gqa"), ranks)
    argmax, calls = target.argmax, iter(range(100))

    def wrong(hidden: torch.Tensor) -> torch.Tensor:
        return argmax(hidden) + (ranks.rank == 1 and next(calls) == 4)

    target.argmax = wrong
    ranks.check_rounds = True
    try:
        return {"error": refused(lambda: generate(target, None, [[1, 2]], max_new_tokens=12))}
    finally:
        ranks.check_rounds = False


def case_sizes(ranks: TensorParallel) -> dict[str, Any]:
    """What the ranks do not divide is refused by name."""
    from spec_ops.models import MixtureConfig
    from spec_ops.parallel import shard_config

    config = make_target("gqa").config
    size = ranks.size
    changed: dict[str, dict[str, Any]] = {
        "num_heads": {"num_heads": size + 1, "num_kv_heads": 1},
        "num_kv_heads": {"num_heads": 12, "num_kv_heads": 3} if size == 4 else {"num_heads": 6, "num_kv_heads": 3},
        "intermediate_size": {"intermediate_size": 97},
        "mixture.intermediate_size": {"mixture": MixtureConfig(4, 2, 25)},
        "mixture.shared_intermediate_size": {"mixture": MixtureConfig(4, 2, 24, 17)},
    }
    found = {n: refused(lambda c=c: shard_config(dataclasses.replace(config, **c), size)) for n, c in changed.items()}
    odd = dataclasses.replace(config, mixture=MixtureConfig(size + 1, 2, 24))
    found["mixture.num_experts"] = refused(lambda: shard_config(odd, size, expert_parallel=True))
    return {**found, "target": refused(lambda: shard(make_draft(JOBS["chain"], make_target("gqa")), ranks))}


def case_bytes(ranks: TensorParallel) -> dict[str, Any]:
    """A rank holds its share and no whole weight beside it."""
    target = shard(make_target("mixture"), ranks)
    return {"kept": [n for n, p in target.named_parameters() if p.untyped_storage().nbytes() != p.numel() * p.element_size()]}
