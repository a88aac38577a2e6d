"""Texts that engines write over the plug-in are those of SGLang's own backends and of this package's rounds."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.conftest import llama
from tests.sglang.engines import (
    BRANCHES,
    EAGLE,
    EAGLE3,
    GRAPHS,
    MARKS,
    NEEDS_NEWEST,
    NEWEST,
    RELEASES,
    TIMEOUT,
    TREE,
    accepted,
    serve,
)

pytestmark = MARKS


def test_plain_decoding(models, plain):
    assert serve(models, fresh=True, attention_backend="spec_ops", page_size=16)["tokens"] == plain


@pytest.mark.parametrize(
    ("page_size", "speculation", "graphs"),
    [(16, {}, 2), (16, EAGLE3, 6), (1, TREE, 6)],
    ids=["plain", "chain", "tree"],
)
def test_graphs(models, plain, page_size, speculation, graphs):
    """Of decode; of verify, draft steps and draft extend."""
    found = serve(models, attention_backend="spec_ops", page_size=page_size, **speculation, **GRAPHS)
    assert found["tokens"] == plain
    assert found["graphs"] == graphs
    assert not speculation or accepted(found) > 0


@NEEDS_NEWEST
@pytest.mark.parametrize(("page_size", "speculation"), [(16, {}), (16, EAGLE3), (1, TREE)], ids=["plain", "chain", "tree"])
def test_the_newest(models, plain, page_size, speculation):
    """Its drafts are accepted where those of the other release are."""
    options: dict[str, Any] = {"attention_backend": "spec_ops", "page_size": page_size, **speculation}
    found = serve(models, fresh=not speculation, first=NEWEST, **options)
    assert found["tokens"] == plain
    if speculation:
        assert accepted(found) > 0
        assert found["rounds"] == serve(models, **options)["rounds"]


def test_a_chain_of_eagle3(models, plain):
    """Prefill, draft steps, verify and draft extend; in float32 the text is plain decoding's."""
    found = serve(models, fresh=True, attention_backend="spec_ops", page_size=16, **EAGLE3)
    assert found["tokens"] == plain
    assert accepted(found) > 0


def test_a_tree_of_eagle3(models, plain):
    found = serve(models, attention_backend="spec_ops", page_size=1, **TREE)
    assert found["tokens"] == plain
    assert accepted(found) > 0


@pytest.mark.parametrize(("page_size", "speculation"), [(16, EAGLE), (1, EAGLE | BRANCHES)], ids=["chain", "tree"])
def test_eagles_first_heads(models, plain, page_size, speculation):
    """They take hidden states of the target's last layer, after its norm."""
    found = serve(models, attention_backend="spec_ops", page_size=page_size, **speculation)
    assert found["tokens"] == plain
    assert accepted(found) > 0


def attentive(folder: Path) -> Path:
    """`llama` with heads whose drafts attention decides, and likely tokens that are nearly as likely: all branches grow."""
    from safetensors.torch import load_file, save_file

    from tests.helpers.engine_checkpoints import VOCAB

    llama(folder, ids=VOCAB)
    for part in ("target", "draft", "first_draft"):
        file = folder / part / "model.safetensors"
        weights = load_file(file)
        for name, weight in weights.items():
            if name == "lm_head.weight":
                weight *= 0.1
            elif part != "target" and name.endswith("o_proj.weight"):
                weight *= 4
        save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("speculation", [EAGLE, EAGLE | BRANCHES, TREE], ids=["first chain", "first tree", "eagle3 tree"])
def test_drafts_are_those_of_sglangs_own_backend(tmp_path, speculation):
    """Text does not depend on them. Its Triton kernels run in the interpreter, which takes long."""
    work = {"prompts": [list(range(3, 53, 7))], "new_tokens": 10, "alone": 0}  # one request, so that batches are alike
    models = attentive(tmp_path)
    found, own = (serve(models, work, attention_backend=name, page_size=1, **speculation) for name in ("spec_ops", "triton"))
    assert found == own
    assert len(found["drafts"]) > 4


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Path:
    """The pair that the package ships, as SGLang loads it."""
    from spec_ops.models import export_pair, load_pair

    folder = tmp_path_factory.mktemp("shipped")
    export_pair(folder, *load_pair(), context=1024)
    return folder


@RELEASES
def test_the_shipped_pair(shipped, release):
    """Its head is accepted as often as in our own rounds, and the text is plain decoding's."""
    from spec_ops.decoding import Generator, SpeculationConfig
    from spec_ops.models import load_pair
    from spec_ops.models.corpus import held_out_prompts

    target, draft, tokenizer = load_pair()
    prompts = held_out_prompts(tokenizer, 6, 64)
    work = {"prompts": prompts, "new_tokens": 48, "alone": 0}
    ours = Generator(target, draft, SpeculationConfig(3), max_batch_size=6, max_seq_len=128).generate(
        prompts, max_new_tokens=48
    )
    options: dict[str, Any] = {"attention_backend": "spec_ops", "page_size": 16}
    found = serve(shipped, work, first=release, **options, **EAGLE3)
    assert found["tokens"] == serve(shipped, work, first=release, **options)["tokens"]
    assert found["tokens"] == ours.tokens
    assert sum(found["rounds"]) == ours.stats.request_rounds
    assert ours.stats.accept_length > 3


REQUESTS = int(os.environ.get("SGLANG_REQUESTS", "60"))
LONG = max(TIMEOUT, 20 * REQUESTS)


@pytest.fixture(scope="module")
def requests() -> dict[str, Any]:
    """Of random lengths, so that they join and leave one by one, some with the beginning of another."""
    from spec_ops.models.corpus import ByteTokenizer, held_out_prompts

    rng, texts = random.Random(0), held_out_prompts(ByteTokenizer(), 16, 80)
    prompts = [rng.choice(texts)[: rng.randint(2, 80)] for _ in range(REQUESTS)]
    return {"prompts": prompts, "new_tokens": [rng.randint(1, 32) for _ in prompts], "alone": 0}


@pytest.fixture(scope="module")
def stock(shipped, requests) -> list[list[int]]:
    """What SGLang's own backend writes for them, plainly."""
    return serve(shipped, requests, timeout=LONG, attention_backend="torch_native", page_size=1)["tokens"]


@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
def test_requests_that_join_and_leave(shipped, requests, stock, overlap, graphs):
    options: dict[str, Any] = EAGLE3 | {"attention_backend": "spec_ops", "page_size": 16} | graphs
    found = serve(shipped, requests, timeout=LONG, disable_overlap_schedule=not overlap, **options)
    assert [len(tokens) for tokens in found["tokens"]] == requests["new_tokens"]
    assert found["tokens"] == stock
    assert sum(filter(None, found["rounds"])) < 0.4 * sum(requests["new_tokens"])  # one token takes no round; drafts are good
