"""Multi-token-prediction (NextN) layers that Hugging Face checkpoints hold after the target's own layers.

A checkpoint of `n` layers names its one MTP layer `model.layers.n` (DeepSeek-V3: 61, GLM-4.5: 46 or 92, GLM-4.7-Flash: 47):

* `enorm`, `hnorm`, `eh_proj`: join the token's embedding with the target's hidden state;
* `self_attn`, `mlp` and two norms: a decoder layer like the target's last one;
* `shared_head.norm`; `shared_head.head` and `embed_tokens` where they are not the target's.

transformers ignores these tensors. SGLang's exports (`lmsys/DeepSeek-V3-NextN`, architecture `...NextN`) hold them alone, as
`model.layers.0`. The arithmetic is that of SGLang (`deepseek_nextn.py`, `glm4_moe_nextn.py`): the next draft step reads the
hidden state after `shared_head.norm`. (vLLM hands on the one before it; the first draft is the same.)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from spec_ops.integrations.transformers.model import TransformersModel
from spec_ops.integrations.transformers.probe import Argument
from spec_ops.integrations.transformers.sharing import all_of, ranks_of
from spec_ops.models.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    check_dtype,
    check_tensors,
    first_line,
    read_fields,
)
from spec_ops.models.drafts import Draft
from spec_ops.models.fields import Fields

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_JOIN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
_SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
_NORM = "shared_head.norm.weight"
# Qwen3-Next and Qwen3.5, MiMo, Ernie 4.5: their layers have other parts.
_OTHER_LAYOUTS = re.compile(r"(model\.)?(mtp\.|mtp_layers\.|mtp_block\.)")


class NextNDraft(Draft):
    """An MTP layer whose block is a decoder layer of transformers, divided among ranks as the target's layers are. It computes
    what `spec_ops.models.MTPDraft` does.

    Args:
        block: a language model of one layer: the target's embedding, the decoder layer, `shared_head.norm`, the LM head.
        eps: of the two norms before the block.
    """

    def __init__(self, block: TransformersModel, eps: float) -> None:
        super().__init__()
        hidden = block.config.hidden_size
        self.config, self.block, self.ranks = block.config, block, block.ranks
        self.enorm, self.hnorm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def encode(self, output):
        return output.hidden

    def forward(self, tokens, hidden, positions, attention):
        x = self.eh_proj(torch.cat([self.enorm(self.block.embed(tokens)), self.hnorm(hidden)], -1))
        return self.block.embedded(x, positions, attention).hidden

    def logits(self, hidden):
        return self.block.logits(hidden)

    def argmax(self, hidden):
        return self.block.argmax(hidden)


def holds_mtp(path: Path, model: Path) -> bool:
    """Whether folder `path` stands for the MTP layer of the target in folder `model`: it is an export of one, or that very
    folder, whose `config.json` counts one."""
    config = read_fields(path / "config.json")
    if _is_export(config):
        return True
    return path.resolve() == model.resolve() and config.integer("num_nextn_predict_layers", 0, 0) > 0


def _is_export(config: Fields) -> bool:
    return any("nextn" in name.lower() for name in config.texts("architectures", ()))


def load_mtp(path: str | Path, target: PreTrainedModel) -> tuple[TransformersModel, NextNDraft]:
    """Load the MTP layer of the checkpoint in folder `path`, and prepare `target` for it. Only the layer's tensors are read. It
    gets the target's device and dtype.

    Args:
        path: the target's own folder, or that of an exported layer: `config.json` and safetensors files.
        target: the causal language model that the layer was trained with.

    Returns:
        `(target, draft)` for `speculative_generate`, `TransformersGenerator` or `Generator`. `target.close()` gives the model
        its own attention back.

    Raises:
        CheckpointError: a folder that holds no MTP layer, several, or one in another layout (`mtp.*`); quantized weights; files
            that are damaged or do not fit `target`. A missing file is a FileNotFoundError as well.
        TypeError, ValueError: a `target` that cannot run on these ops.
    """
    folder = Path(path)
    index = _layer_index(read_fields(folder / "config.json"), target.config)
    found = _read_layer(folder, index)
    adapter = TransformersModel(target, argument=Argument("load_mtp", "target"))
    try:
        return adapter, _draft(folder, index, found, target)
    except BaseException:
        adapter.close()
        raise


def _layer_index(config: Fields, target: Any) -> int:
    """The number of the MTP layer, its checkpoint's configuration compared with the target's."""
    exported = _is_export(config)
    for key in ("model_type", "hidden_size", "vocab_size", *(() if exported else ("num_hidden_layers",))):
        expected = getattr(target, key, None)
        got = config.text(key) if key == "model_type" else config.integer(key)
        # An export of SGLang may have a model type of its own.
        if got != expected and not (exported and key == "model_type"):
            raise config.error(key, f"must be {expected!r}, as the target's is, got {got!r}")
    if (count := config.integer("num_nextn_predict_layers", 0, 0)) != 1:
        raise config.error("num_nextn_predict_layers", f"must be 1, got {count}")
    return 0 if exported else config.integer("num_hidden_layers")


def _read_layer(folder: Path, index: int) -> dict[str, torch.Tensor]:
    """The tensors of layer `index` by their names in it. Files of other layers stay closed."""
    prefix, places = f"model.layers.{index}.", _places(folder)
    if other := next((name for name in places if _OTHER_LAYOUTS.match(name)), None):
        what = f"must be `{prefix}*`, the layout of DeepSeek's and GLM's MTP layers; no other one is supported"
        raise CheckpointError(places[other], what, other)
    if f"{prefix}eh_proj.weight" not in places:
        raise CheckpointError(folder, f"holds no MTP layer: `{prefix}eh_proj.weight` is missing")
    found: dict[str, torch.Tensor] = {}
    names = [name for name in places if name.startswith(prefix)]
    for file in {places[name] for name in names}:
        with _open(file) as tensors:
            stored = set(tensors.keys())
            for name in (name for name in names if places[name] == file):
                if name not in stored:
                    raise CheckpointError(file, f"is missing, but {_INDEX} names it", name)
                value = found[name.removeprefix(prefix)] = tensors.get_tensor(name)
                check_dtype(file, name, value)
    return found


def _places(folder: Path) -> dict[str, Path]:
    """The names of all tensors, and the file of each."""
    if (folder / _INDEX).is_file():
        index = read_fields(folder / _INDEX).inner("weight_map")
        return {name: folder / index.text(name) for name in index.values}
    if not (folder / _SINGLE).is_file():
        raise CheckpointNotFoundError(folder, f"has none of {_INDEX}, {_SINGLE}")
    with _open(folder / _SINGLE) as tensors:
        return dict.fromkeys(tensors.keys(), folder / _SINGLE)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise CheckpointNotFoundError(file, "no such file")
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(file, f"must be a safetensors file, got {first_line(error)}") from error


def _draft(folder: Path, index: int, found: dict[str, torch.Tensor], target: PreTrainedModel) -> NextNDraft:
    file = folder / (_INDEX if (folder / _INDEX).is_file() else _SINGLE)
    prefix = f"model.layers.{index}."
    embed: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    given = {"embed_tokens.weight": all_of(embed.weight), "shared_head.head.weight": all_of(head.weight)}
    state = {ours: found.get(theirs, given[theirs]) for theirs, ours in _SHARED.items()}
    join = {name: found.pop(name) for name in _JOIN if name in found}
    for name, value in found.items():
        if name == _NORM:
            state["model.norm.weight"] = value
        elif name not in _SHARED:
            state[f"model.layers.0.{name}"] = value
    model = _one_layer(file, prefix, state, target)
    for theirs, setter, module in (
        ("embed_tokens.weight", model.set_input_embeddings, embed),
        ("shared_head.head.weight", model.set_output_embeddings, head),
    ):
        if theirs not in found or torch.equal(found[theirs].to(given[theirs]), given[theirs]):
            setter(module)
    block = TransformersModel(model.to(embed.weight.device), argument=Argument("load_mtp", "path"))
    with torch.device("meta"):
        draft = NextNDraft(block, target.config.rms_norm_eps)
    expected = {name: value for name, value in draft.state_dict().items() if name in _JOIN}
    check_tensors(file, expected, join, {name: f"{prefix}{name}" for name in _JOIN})
    draft.load_state_dict(join, strict=False, assign=True)  # not strict: the block is in place
    for module in (draft.enorm, draft.hnorm, draft.eh_proj):
        module.to(given["embed_tokens.weight"])
    return draft.eval()


def _one_layer(file: Path, prefix: str, state: dict[str, torch.Tensor], target: PreTrainedModel) -> PreTrainedModel:
    """A model of the target's class with one layer, which is like the target's last one, filled with `state`."""
    config = copy.deepcopy(target.config)
    layers = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:  # what each layer is: "layer_types", "mlp_layer_types"
            setattr(config, name, value[-1:])
    config.num_hidden_layers = 1
    if getattr(config, "first_k_dense_replace", 0):
        config.first_k_dense_replace = 0 if config.first_k_dense_replace < layers else 1
    options: dict[str, Any] = {"config": config, "state_dict": state, "dtype": target.dtype}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if ranks_of(target) is not None:
        options["distributed_config"] = target.config.distributed_config
    try:
        loaded: Any = type(target).from_pretrained(None, **options)
    except (RuntimeError, ValueError, TypeError) as error:  # experts of different shapes cannot be joined
        raise CheckpointError(
            file, f"its `{prefix}*` must be a layer of {type(target).__name__}: {first_line(error)}"
        ) from error
    model, report = loaded

    def theirs(name: str) -> str:
        return prefix + _NORM if name == "model.norm.weight" else name.replace("model.layers.0.", prefix)

    for name, got, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(file, f"must be of shape {list(expected)}, got {list(got)}", theirs(name))
    if missing := sorted(map(theirs, report["missing_keys"])):
        raise CheckpointError(file, f"missing tensors {missing}")
    if unknown := sorted(map(theirs, report["unexpected_keys"])):
        raise CheckpointError(file, f"unknown tensors {unknown}")
    return model.eval()
