"""Experts of compressed-tensors checkpoints in int4, read as they are stored."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spec_ops.integrations.transformers import TransformersGenerator, read_as_stored, stored
from spec_ops.integrations.transformers.experts import is_experts
from tests.helpers.layouts import LAYOUTS
from tests.integrations.transformers.test_stored_experts import COMMON, NEW, VOCAB, Calls, filled

IDS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
EXPERTS = 4


def saved(folder: Path, kind: str = "packed", config: transformers.PreTrainedConfig | None = None) -> PreTrainedModel:
    """A checkpoint whose linear layers and experts are in the layout `kind`; returns the model that it means."""
    sizes = {"num_experts": EXPERTS, "moe_intermediate_size": 64, "intermediate_size": 128}
    model = filled(config or transformers.Qwen3MoeConfig(**COMMON, **sizes))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parts, values, exact = LAYOUTS[kind](tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            module.weight.copy_(exact)
        elif is_experts(module):
            for expert in range(EXPERTS):
                made = []
                for part in ("gate_proj", "up_proj", "down_proj"):
                    own = f"{name}.{expert}.{part}"
                    parts, values, exact = LAYOUTS[kind](tensors.pop(f"{own}.weight"))
                    tensors |= {f"{own}.{part}": tensor for part, tensor in parts.items()}
                    made.append(exact)
                module.gate_up_proj[expert].copy_(torch.cat(made[:2]))
                module.down_proj[expert].copy_(made[2])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": values}))
    return model


def load(folder: Path) -> PreTrainedModel:
    config = read_as_stored(AutoConfig.from_pretrained(folder))
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def test_a_checkpoint_is_the_dequantized_model(tmp_path):
    """Alone and in a generator; nothing of 32 bits is left of the experts."""
    plain, model = saved(tmp_path), load(tmp_path)
    experts = [module for module in model.modules() if is_experts(module)]
    assert len(experts) == 2
    for module in experts:
        assert {name: (p.dtype, tuple(p.shape)) for name, p in module.named_parameters()} == {
            "gate_up_proj": (torch.uint8, (EXPERTS, 128, 64)), "gate_up_proj_scale_inv": (torch.bfloat16, (EXPERTS, 128, 2)),
            "down_proj": (torch.uint8, (EXPERTS, 128, 32)), "down_proj_scale_inv": (torch.bfloat16, (EXPERTS, 128, 1)),
        }  # fmt: skip
    with torch.no_grad(), Calls() as calls:
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)
    assert calls.count == 2
    want = plain.generate(IDS, **NEW)
    assert torch.equal(model.generate(IDS, **NEW), want)
    with TransformersGenerator(model, plain, compile=False) as generator, Calls() as calls:
        assert torch.equal(generator.generate(IDS, **NEW), want)
    assert calls.count > 4


def test_many_tensors_take_few_patterns_and_openings(tmp_path, monkeypatch):
    """Every expert of every layer has tensors of its own. transformers searches for each pattern in each name, and whoever
    opens a file reads all names in it."""
    saved(tmp_path)
    opened: Counter[str] = Counter()

    def count(path: str, framework: str):
        opened[path] += 1
        return safe_open(path, framework)

    monkeypatch.setattr(stored, "safe_open", count)
    before = stored.StoredLayersQuantizer._process_model_before_weight_loading
    patterns: list[str] = []

    def record(self, model: PreTrainedModel, **options):
        before(self, model, **options)
        patterns.extend(self._ignored)

    monkeypatch.setattr(stored.StoredLayersQuantizer, "_process_model_before_weight_loading", record)
    load(tmp_path)
    assert list(opened.values()) == [2]  # for the names, and for the tensors
    names = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith("weight_packed")]
    assert len(names) == 2 * (4 + 3 * EXPERTS)
    assert sum(pattern.endswith("weight_packed$") for pattern in patterns) == 4 + 3
    assert all(any(re.search(pattern, name) for pattern in patterns) for name in names)


def test_patterns_match_no_other_tensor_of_a_checkpoint():
    """A layer that is not quantized has a name like those that are."""
    alike = {f"layers.{i}.q_proj.weight" for i in (0, 1, 11)}
    scales = {f"layers.{i}.experts.{j}.up_proj.weight_scale" for i in (0, 1) for j in range(3)}
    present = alike | scales | {"embed.weight"}
    names = scales | {"layers.0.q_proj.weight", "layers.1.q_proj.weight"}
    patterns = stored.patterns_of(names, present)
    assert {name for name in present if any(re.search(pattern, name) for pattern in patterns)} == names
    assert len(patterns) == 3
    assert len(stored.patterns_of(names, names)) == 2


def drop(name: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        for part in [key for key in tensors if key.startswith(name)]:
            tensors.pop(part)

    return change


def rename(tensors: dict) -> None:
    for key in [key for key in tensors if "layers.0.mlp.experts" in key]:
        tensors[key.replace("experts", "other")] = tensors.pop(key)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("packed with zero points", lambda t: None, r"experts.0.gate_proj: experts must be of int4 without zero points"),
        ("nvfp4", lambda t: None, r"experts.0.gate_proj: experts must be of int4 without zero points"),
        ("packed", drop("model.layers.1.mlp.experts.2.up_proj"), r"model.layers.1.mlp.experts must have all of its 4 experts"),
        ("packed", rename, "model.layers.0.mlp.other.0.down_proj must be a linear layer of Qwen3MoeForCausalLM"),
        ("packed", drop("model.layers.0.mlp.experts.3.down_proj.weight_scale"), r"experts.3.down_proj: `weight_scale` must be"),
    ],
)
def test_other_experts_are_named(tmp_path, kind, change, message):
    saved(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
