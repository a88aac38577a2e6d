"""What the ranks of `test_sharing.py` do with models that transformers has divided among them."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig
from spec_ops.decoding.draft import Drafted
from spec_ops.decoding.round import SpeculativeRound
from spec_ops.integrations.transformers import TransformersGenerator, TransformersModel, load_eagle3, load_mtp
from spec_ops.integrations.transformers.sharing import calls_its_class, own_part
from spec_ops.models import Eagle3Draft, ModelConfig
from spec_ops.models.layers import DividedHead
from spec_ops.models.target import TargetOutput
from spec_ops.parallel import TensorParallel, shard
from tests.helpers.tiny_transformers import VOCAB, make_model
from tests.integrations.transformers.test_eagle3 import write_sglang, write_speculators
from tests.integrations.transformers.test_mtp import write as write_mtp

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")  # qwen2 has biases, gemma2 caps its logits
BATCH = [[3, 4, 5, 6, 7], [9], list(range(20, 41))]
SAMPLED = SamplingParams(0.9, top_k=40, top_p=0.95, seed=7)
JOBS: dict[str, tuple[bool, SpeculationConfig | None, SamplingParams | None]] = {
    "plain": (False, None, None),
    "chain": (True, SpeculationConfig(3), None),
    "tree": (True, SpeculationConfig(3, 4, 10), None),
    "sampled chain": (True, SpeculationConfig(3), SAMPLED),
}


def decoded(target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, list[list[int]]]:
    found = {}
    for name, (drafts, config, sampling) in JOBS.items():
        with TransformersGenerator(target, draft if drafts else None, config, compile=False, max_seq_len=64) as made:
            found[name] = made.generator.generate(BATCH, max_new_tokens=12, sampling=sampling).tokens
    return found


def divided(model: PreTrainedModel, ranks: TensorParallel, **styles: str) -> PreTrainedModel:
    """As a user reads it, with `tp_plan=styles`. In a world transformers writes files on rank 0 only."""
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plan = DistributedConfig(tp_size=ranks.size, tp_plan=styles or None)
        read = AutoModelForCausalLM.from_pretrained(ranks.first(folder), distributed_config=plan)
        ranks.first(None)  # all have read it
    return read.eval()


def case_tokens(ranks: TensorParallel) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family in FAMILIES:
        whole = make_model(family, "eager")
        found[family] = decoded(divided(whole, ranks), make_model(family, "eager", 2))
    return found


def case_both_divided(ranks: TensorParallel) -> dict[str, Any]:
    whole = make_model("llama", "eager")
    return {"tokens": decoded(divided(whole, ranks), divided(make_model("llama", "eager", 2), ranks))}


def case_ranks(ranks: TensorParallel) -> dict[str, Any]:
    """They are found, once for a group; of a whole model there are none."""
    whole = make_model("llama", "eager")
    model = divided(whole, ranks)
    first, second, alone = TransformersModel(model), TransformersModel(model), TransformersModel(whole)
    heads = [rows[0][0] for rows in first.spec.kv_rows]
    return {
        "size": first.ranks.size, "same": first.ranks is second.ranks, "whole": alone.ranks is None, "kv_heads": heads,
        "user's": first.ranks is ranks,
    }  # fmt: skip


def local(model: nn.Module, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model.get_parameter(name).to_local()


def joined(model: nn.Module, names: list[str]) -> bool:
    """Whether this rank's parts of parameters follow one another in one storage."""
    parts = [local(model, name) for name in names]
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    one = {part.untyped_storage().data_ptr() for part in parts}
    return ends[:-1] == [part.data_ptr() for part in parts[1:]] and len(one) == 1


QKV = [f"model.layers.1.self_attn.{name}_proj.{{}}" for name in "qkv"]
GATE_UP = ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]


def case_weights(ranks: TensorParallel) -> dict[str, Any]:
    """Side by side while the model is taken over, the same to whoever reads them, and apart afterwards."""
    model = divided(make_model("qwen2", "eager"), ranks)
    groups = [[name.format(kind) for name in QKV] for kind in ("weight", "bias")] + [GATE_UP]
    parameters = dict(model.named_parameters())
    before = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in parameters.items()}
    before = {name: value.clone() for name, value in before.items()}

    def same() -> bool:
        state = model.state_dict()
        full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
        objects = all(model.get_parameter(name) is value for name, value in parameters.items())
        return objects and all(torch.equal(full[name], value) for name, value in before.items())

    adapter = TransformersModel(model)
    found = {"apart": adapter.apart, "open": [joined(model, names) for names in groups], "same": same()}
    adapter.close()
    own = [local(model, name) for names in groups for name in names]
    found["closed"] = all(part.untyped_storage().nbytes() == part.numel() * part.element_size() for part in own)
    return {**found, "still the same": same()}


def case_changed_weights(ranks: TensorParallel) -> dict[str, Any]:
    """Written in place, and replaced by others, while the model is taken over."""
    model, other = (divided(make_model("llama", "eager"), ranks) for _ in range(2))
    found = {}
    with TransformersGenerator(model, compile=False, max_seq_len=64) as made, torch.no_grad():
        for name, assign in (("in place", False), ("replaced", True)):
            for parameter in other.parameters():
                parameter.mul_(-1)
            model.load_state_dict(other.state_dict(), assign=assign)
            found[name] = made.generator.generate(BATCH, max_new_tokens=12).tokens
        found["joined"] = joined(model, GATE_UP)
    return found


def case_own_calls(ranks: TensorParallel) -> dict[str, Any]:
    """Hooks and forwards of the user's count, from before the model is taken over and from later."""
    found: dict[str, Any] = {}
    for when in ("before", "later"):
        for kind in ("hook", "forward", "wrapped"):
            model, calls = divided(make_model("llama", "eager"), ranks), []
            layers = (model.model.layers[1].self_attn.k_proj, model.lm_head)

            def add(layers=layers, kind=kind, calls=calls) -> None:
                for layer in layers:
                    own, sign = layer.forward, -1 if layer.out_features == VOCAB else 1

                    def forward(x, own=own, sign=sign):
                        calls.append(sign)
                        return sign * own(x)

                    if kind == "hook":
                        layer.register_forward_hook(lambda _m, _a, out, sign=sign: (calls.append(sign), sign * out)[1])
                    else:
                        layer.forward = functools.wraps(own)(forward) if kind == "wrapped" else forward

            if when == "before":
                add()
            with TransformersGenerator(model, compile=False, max_seq_len=64) as made:
                if when == "later":
                    add()
                calls.clear()
                tokens = made.generator.generate(BATCH, max_new_tokens=6).tokens
                apart = sorted(name.rpartition(".")[2] for name in made.target.apart)
            found[f"{kind} {when}"] = {"tokens": tokens, "apart": apart, "calls": sorted(set(calls))}
    return found


def case_gathered_siblings(ranks: TensorParallel) -> dict[str, Any]:
    """Gate and up give all of their outputs on every rank: more than the product with its rows."""
    mlp = "model.layers.*.mlp."
    styles = {f"{mlp}{name}_proj": "colwise_gather_output" for name in ("gate", "up")} | {f"{mlp}down_proj": "replicate"}
    with TransformersGenerator(
        divided(make_model("llama", "eager"), ranks, **styles), compile=False, max_seq_len=64
    ) as generator:
        tokens = generator.generator.generate(BATCH, max_new_tokens=12).tokens
        return {"tokens": tokens, "apart": generator.target.apart}


def case_forwards(ranks: TensorParallel) -> dict[str, Any]:
    """A `forward` of transformers' must be around that of the layer's class alone."""
    layer = divided(make_model("llama", "eager"), ranks).model.layers[0].mlp.up_proj
    theirs, space, plain = layer.forward, {"__name__": "transformers.somewhere"}, nn.Linear.forward.__get__(layer)
    exec("def around(inside):\n    def forward(x):\n        return inside(x)\n    return forward", space)
    found = {}
    for name, forward in {
        "theirs": theirs,
        "around the class": space["around"](plain),
        "around another layer": space["around"](nn.Linear.forward.__get__(nn.Linear(1, 1))),
        "around the user's": space["around"](lambda x: -theirs(x)),
        "the user's": lambda x: theirs(x),
        "the user's around the class": lambda x: -plain(x),
        "the user's, named as theirs": functools.wraps(theirs)(lambda x: theirs(x)),
    }.items():
        layer.forward = forward
        found[name] = calls_its_class(layer)
    return found


def case_heads(ranks: TensorParallel) -> dict[str, Any]:
    """Which models choose tokens by an exchange."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = {}
    for family, styles in (("llama", {}), ("gemma2", {}), ("llama", {"lm_head": "replicate"})):
        target = TransformersModel(divided(make_model(family, "eager"), ranks, **styles))
        hidden = torch.randn(5, 1, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), CommDebugMode() as traffic:
            tokens = target.argmax(hidden)
        gathered = sum(count for op, count in traffic.get_comm_counts().items() if "gather" in str(op))
        right = torch.equal(tokens, target.logits(hidden).argmax(-1))
        name = " ".join([family, *styles])
        found[name] = {"divided": isinstance(target.lm_head, DividedHead), "gathers": gathered, "right": right}
        target.close()
    return found


def eagle3(target: TransformersModel) -> Eagle3Draft:
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    config = ModelConfig(**sizes, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
    return Eagle3Draft(config, target, torch.randperm(VOCAB)[:41].sort().values).eval()


@contextlib.contextmanager
def watched_drafts() -> Iterator[list[list[list[int]]]]:
    """The candidates of every round that is verified inside. They tell more than a text does, in which few of a random head's
    drafts are accepted."""
    verify, found = SpeculativeRound.verify, []

    def noted(self: SpeculativeRound, drafted: Drafted) -> TargetOutput:
        found.append(drafted.candidates.tolist())
        return verify(self, drafted)

    with mock.patch.object(SpeculativeRound, "verify", noted):
        yield found


def drafted(target: TransformersModel, draft: Eagle3Draft) -> dict[str, Any]:
    generator = Generator(target, draft, SpeculationConfig(3, 6, 16), compile=False, max_batch_size=3, max_seq_len=96)
    with watched_drafts() as drafts:
        result = generator.generate(BATCH, max_new_tokens=8)
    return {"tokens": result.tokens, "histograms": result.stats.histograms, "drafts": drafts}


def case_eagle3(ranks: TensorParallel) -> dict[str, Any]:
    """A head of ours, divided and whole, with the target's embedding and with one of its own."""
    found: dict[str, Any] = {}
    for name, styles in (("whole embedding", {"model.embed_tokens": "replicate"}), ("divided embedding", {})):
        target = TransformersModel(divided(make_model("llama", "eager"), ranks, **styles), (0, 1, 3))
        trained = [p.requires_grad for p in target.parameters()]
        draft = eagle3(target)
        share = shard(draft, ranks, target=target)
        found[name] = {"shared": drafted(target, share), "whole": drafted(target, draft)}
        found[name]["kept"] = share.embed is target.embed and [p.requires_grad for p in target.parameters()] == trained
        draft.embed, draft.lm_head = own_embedding(), target.lm_head
        draft.draft_to_target = None
        found[name]["own"] = drafted(target, shard(draft, ranks, target=target))
        target.close()
    return found


def loaded(folder: Path, name: str, model: PreTrainedModel, ranks: TensorParallel | None = None) -> dict[str, Any]:
    """With a published head: one that has its own embedding, or one that shares the target's, and perhaps its LM head."""
    _, weights = (write_speculators if name == "own" else write_sglang)(folder)
    if name == "all":
        for unshared in ("d2t", "t2d", "lm_head.weight"):
            del weights[unshared]
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": None}))
        torch.save(weights, folder / "pytorch_model.bin")
    target, draft = load_eagle3(folder, model)
    found = {"whole": drafted(target, draft)}
    if ranks is not None:
        share = shard(draft, ranks, target=target)
        found |= {"shared": drafted(target, share), "head": share.lm_head is target.lm_head}
    target.close()
    return found


def case_loaded_heads(ranks: TensorParallel) -> dict[str, Any]:
    found = {}
    for kind in ("own", "shared", "all"):
        for embedding in ({"model.embed_tokens": "replicate"}, {}):
            model = divided(make_model("llama", "eager"), ranks, **embedding)
            with tempfile.TemporaryDirectory() as folder:
                found[" ".join([kind, *embedding])] = loaded(Path(folder) / "head", kind, model, ranks)
    return found


MTP = [(kind, head) for kind in ("deepseek_v3", "glm4_moe") for head in (False, True)]


def with_mtp(folder: str, model: PreTrainedModel) -> dict[str, Any]:
    """With the MTP layer in the folder: greedy and sampled chains, and a tree; and how much of the layer is here."""
    target, draft = load_mtp(folder, model)
    found: dict[str, Any] = {}
    for name, (_, config, sampling) in JOBS.items():
        if config is not None:
            with TransformersGenerator(target, draft, config, compile=False, max_seq_len=64) as made:
                with watched_drafts() as drafts:
                    result = made.generator.generate(BATCH, max_new_tokens=8, sampling=sampling)
                found[name] = [result.tokens, result.stats.rounds, drafts]
    experts = draft.block.decoder.layers[0].mlp.experts.down_proj
    return {"found": found, "here": own_part(experts).numel() / experts.numel(), "shared": draft.ranks is not None}


def case_mtp(ranks: TensorParallel) -> dict[str, Any]:
    """An MTP layer that shares the target's LM head, or has one of its own."""
    from transformers.distributed import DistributedConfig

    results = {}
    for kind, head in MTP:
        with tempfile.TemporaryDirectory() as folder:
            if ranks.rank == 0:
                write_mtp(Path(folder), kind, head=head)
            place = ranks.first(folder)
            plan = DistributedConfig(tp_size=ranks.size)
            model = AutoModelForCausalLM.from_pretrained(place, distributed_config=plan).eval()
            results[f"{kind} {head}"] = with_mtp(place, model)
            ranks.first(None)
    return results


def own_embedding() -> nn.Embedding:
    return nn.Embedding(VOCAB, 32, _weight=torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(9)))
