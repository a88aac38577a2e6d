"""The ways in which the same prompts are decoded, and what each gives."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.invariance.models import MODELS, Models
from benchmarks.invariance.recorder import LogitsRecorder
from spec_ops.decoding import Generator, SpeculationConfig


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: says what differs.
        batch: rows. share: one prompt of so many is decoded, since small batches take long.
        draft: of `models.DRAFTS`; None for plain decoding.
        steps, topk, nodes: of `SpeculationConfig`.
        more: further arguments of `Generator`.
        invariant: the flag.
        recorded: whether the bits of logits are compared too, which makes another round: tokens are chosen from logits that the
            round keeps.
    """

    name: str
    batch: int
    share: int = 1
    draft: str | None = None
    steps: int = 1
    topk: int = 1
    nodes: int | None = None
    more: tuple[tuple[str, int], ...] = ()
    invariant: bool = True
    recorded: bool = True


PLAIN = Way("plain, batch 32", 32)
WITHOUT = Way("plain, batch 32", 32, invariant=False, recorded=False)
_EAGLE: dict[str, Any] = {"draft": "EAGLE-3"}
_TREE_2, _TREE_4 = ({"steps": 3, "topk": k, "nodes": n} for k, n in ((2, 6), (4, 16)))
_PIECES = (("prefill_chunk_size", 16), ("page_size", 16))
OTHERS = (
    Way("plain, batch 1", 1, 16),
    Way("EAGLE-3, chain of 1, batch 8", 8, 2, steps=1, **_EAGLE),
    Way("EAGLE-3, chain of 3, batch 32", 32, steps=3, **_EAGLE),
    Way("EAGLE-3, chain of 7, batch 2", 2, 8, steps=7, **_EAGLE),
    Way("standalone, tree of 6, 2 branches, batch 8", 8, 2, draft="standalone", **_TREE_2),
    Way("EAGLE-3, tree of 16, 4 branches, batch 32", 32, **_TREE_4, **_EAGLE),
    Way("standalone, chain of 3, batch 32", 32, draft="standalone", steps=3),
    Way("lookup, chain of 3, batch 32", 32, draft="lookup", steps=3),
    Way("EAGLE-3, chain of 3, batch 8, prompts in pieces of 16, pages of 16", 8, 2, steps=3, more=_PIECES, **_EAGLE),
    Way("EAGLE-3, chain of 3, batch 32, logits not seen", 32, steps=3, recorded=False, **_EAGLE),
)
OTHERS_WITHOUT = (
    Way("plain, batch 1", 1, 16, invariant=False, recorded=False),
    Way("EAGLE-3, chain of 3, batch 32", 32, steps=3, invariant=False, recorded=False, **_EAGLE),
    Way("EAGLE-3, tree of 16, 4 branches, batch 32", 32, invariant=False, recorded=False, **_TREE_4, **_EAGLE),
    Way("standalone, chain of 3, batch 32", 32, draft="standalone", steps=3, invariant=False, recorded=False),
)


@dataclass(frozen=True)
class Sizes:
    """How much is decoded, where."""

    device: str
    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def length(self) -> int:
        """Most tokens of a request."""
        return self.prompt_tokens + self.new_tokens

    def limits(self) -> list[int]:
        """New tokens of each prompt, from three quarters of `new_tokens`: so rows become free, and are refilled, one by one."""
        least = max(1, 3 * self.new_tokens // 4)
        return [least + 7 * i % (self.new_tokens - least + 1) for i in range(self.prompts)]


@dataclass
class Decoded:
    """What a way gave.

    Attributes:
        prompts: tokens of each prompt.
        chosen: which prompts, in ascending order.
        tokens: of each of them.
        bits: `[prompts, length]`, see `LogitsRecorder`; None where logits were not recorded.
        accept_length: tokens a round. seconds: with compiling.
    """

    prompts: list[int]
    chosen: list[int]
    tokens: list[list[int]]
    bits: torch.Tensor | None
    accept_length: float
    seconds: float


_models: dict[tuple[str, Sizes], Models] = {}


def decode(model: str, way: Way, sizes: Sizes, reference: Decoded | None, whole: bool) -> Decoded:
    """Decode in one way, in this process, which keeps the models.

    Args:
        reference: what plain decoding gave; None for plain decoding itself.
        whole: decode every prompt, whatever the way's share is.
    """
    start, place = time.perf_counter(), torch.device(sizes.device)
    key = model, sizes
    if key not in _models:
        _models[key] = MODELS[model](place, sizes.prompts, sizes.prompt_tokens)
    models, limits = _models[key], sizes.limits()
    chosen = list(range(0, sizes.prompts, 1 if whole else way.share))
    order = random.Random(way.name).sample(chosen, len(chosen))  # other neighbours in every way
    drafting: tuple[Any, ...] = ()
    if way.draft is not None:
        drafting = models.drafts[way.draft], SpeculationConfig(way.steps, way.topk, way.nodes)
    options: dict[str, Any] = {
        "max_batch_size": way.batch,
        "max_seq_len": sizes.length,
        "compile": place.type == "cuda",
        **dict(way.more),
    }
    generator = Generator(models.target, *drafting, invariant=way.invariant, **options)
    recorder = None
    if way.recorded:
        texts = None if reference is None else [[*p, *t] for p, t in zip(models.prompts, reference.tokens, strict=True)]
        recorder = LogitsRecorder(models.prompts, sizes.length, models.target.config.vocab_size, place, texts)
    result = generator.generate(
        [models.prompts[i] for i in order], max_new_tokens=[limits[i] for i in order], logits_processor=recorder
    )
    tokens = dict(zip(order, result.tokens, strict=True))
    bits = None if recorder is None else recorder.bits
    del generator
    torch._dynamo.reset()
    gc.collect()
    seconds = time.perf_counter() - start
    return Decoded(
        list(map(len, models.prompts)), chosen, [tokens[i] for i in chosen], bits, result.stats.accept_length, seconds
    )


def close_models() -> None:
    """Forget the models of this process."""
    while _models:
        _models.popitem()[1].close()


def compare(model: str, way: Way, got: Decoded, reference: Decoded) -> dict[str, Any]:
    """A row of the report: how many texts differ from plain decoding's, and of how many of their tokens the logits do. Logits
    that a way never had differ too."""
    differ = [i for i, tokens in zip(got.chosen, got.tokens, strict=True) if tokens != reference.tokens[i]]
    row: dict[str, Any] = {"model": model, "way": way.name, "invariant": way.invariant, "texts": len(got.chosen)}
    row |= {"differ": len(differ), "tokens": sum(map(len, got.tokens))}
    if got.bits is not None and reference.bits is not None:
        places = [(i, got.prompts[i] + n) for i in got.chosen for n in range(len(reference.tokens[i]))]
        rows, columns = (torch.tensor(index) for index in zip(*places, strict=True))
        row["logits_differ"] = int((got.bits[rows, columns] != reference.bits[rows, columns]).sum())
    return row | {"accept_length": round(got.accept_length, 3), "seconds": round(got.seconds, 1)}
