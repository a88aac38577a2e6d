"""Damaged and odd checkpoints: every loader raises one kind of error, which names the file and the field."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_ops.integrations.transformers import load_eagle3
from spec_ops.integrations.transformers.eagle3 import is_eagle3
from spec_ops.integrations.transformers.loading import load_checkpoints, load_settings, load_tokenizer
from spec_ops.models import CausalLM, CheckpointError, Eagle3Draft, ModelConfig
from spec_ops.models.corpus import ByteTokenizer
from spec_ops.models.pretrained import load_pair, save_pair
from tests.helpers.tiny_transformers import VOCAB, make_model, tokenizer
from tests.integrations.transformers.test_eagle3 import HIDDEN, write_sglang, write_speculators

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SIZES["vocab_size"] = ByteTokenizer.vocab_size


def load_head(folder: Path) -> None:
    load_eagle3(folder, make_model("llama"))


def load_model(folder: Path) -> None:
    load_tokenizer(folder)
    load_checkpoints(folder, None, device="cpu", dtype=torch.float32)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "pair": load_pair,
    "head": load_head,
    "pickled head": load_head,
    "model": load_model,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder with a sound checkpoint for every loader."""
    root = tmp_path_factory.mktemp("sound")
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(num_layers=4, aux_layers=(1, 2, 3), **SIZES))
    save_pair(root / "pair", target, Eagle3Draft(ModelConfig(num_layers=1, **SIZES), target, torch.arange(0, 48, 3)), {})
    write_speculators(root / "head")
    (root / "pickled head").mkdir()
    write_sglang(root / "pickled head")
    make_model("llama").save_pretrained(root / "model")
    tokenizer().save_pretrained(root / "model")
    for name, load in LOADERS.items():
        load(root / name)
    return root


@pytest.fixture
def copied(sound, tmp_path) -> Callable[[str], Path]:
    def copy(loader: str) -> Path:
        return Path(shutil.copytree(sound / loader, tmp_path / loader))

    return copy


def refused(loader: str, folder: Path, file: str, field: str | None = None) -> str:
    """What the loader says, having named the file (or its folder) and the field."""
    with pytest.raises(CheckpointError) as caught:
        LOADERS[loader](folder)
    assert caught.value.file == folder / file
    assert str(folder / file) in str(caught.value)
    assert field in (None, caught.value.field), caught.value
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000], ids=["empty", *"{[3n", "not text", "deep"]
)
def test_a_configuration_that_is_no_object(copied, loader, text):
    folder = copied(loader)
    (folder / "config.json").write_bytes(text)
    assert "JSON" in refused(loader, folder, "config.json")


@pytest.mark.parametrize("loader", LOADERS)
def test_a_configuration_that_is_a_folder_or_missing(copied, loader):
    folder = copied(loader)
    (folder / "config.json").unlink()
    assert "no such file" in refused(loader, folder, "config.json")
    with pytest.raises(FileNotFoundError):
        LOADERS[loader](folder)
    (folder / "config.json").mkdir()
    assert "is not a file" in refused(loader, folder, "config.json")


def change(section: str, **values: Any) -> Callable[[dict], None]:
    return lambda config: (config[section] if section else config).update(values)


PAIR_VALUES = [
    (change("", format_version=True), "format_version"),
    (change("", format_version="1"), "format_version"),
    (change("", format_version=99), "format_version"),
    (change("", target=[]), "target"),
    (lambda config: config.pop("draft"), "draft"),
    (lambda config: config["target"].pop("vocab_size"), "target.vocab_size"),
    (change("target", vocab_size=100), "target.vocab_size"),  # fewer than the tokenizer's
    (change("draft", aux_layers=[0], width=1), "draft.width"),
    (change("target", hidden_size="32"), "target.hidden_size"),
    (change("target", num_layers=4.0), "target.num_layers"),
    (change("target", num_layers=True), "target.num_layers"),
    (change("target", rms_norm_eps=-1e-5), "target.rms_norm_eps"),
    (change("draft", rms_norm_eps="1e-5"), "draft.rms_norm_eps"),
    (change("target", rms_norm_eps=float("nan")), "target.rms_norm_eps"),
    (change("target", rope_theta=0), "target.rope_theta"),
    (change("target", rope_theta=None), "target.rope_theta"),
    (change("target", attention_sinks="false"), "target.attention_sinks"),
    (change("target", sliding_window=0), "target.sliding_window"),
    (change("target", sliding_window=2.5), "target.sliding_window"),
    (change("target", sliding_window_pattern=2), "target.sliding_window_pattern"),
    (change("target", kv_lora_rank="8"), "target.kv_lora_rank"),
    (change("target", head_dim=7), "target.head_dim"),
    (change("target", num_kv_heads=3), "target.num_kv_heads"),
    (change("target", aux_layers=4), "target.aux_layers"),
    (change("target", aux_layers=["1"]), "target.aux_layers"),
    (change("target", aux_layers=[1, 2, 4]), "target.aux_layers"),
    (change("target", rope_scaling=[8.0, 1.0, 4.0]), "target.rope_scaling"),
    (change("target", rope_scaling=[0.0, 1.0, 4.0, 64.0]), "target.rope_scaling.factor"),
    (change("target", rope_scaling=[8.0, 4.0, 4.0, 64.0]), "target.rope_scaling.low_freq_factor"),
    (change("draft", hidden_size=64), "draft"),
]
HEAD_VALUES = [
    (change("", hidden_size="32"), "hidden_size"),
    (change("", hidden_size=32.0), "hidden_size"),
    (lambda config: config.pop("hidden_size"), "hidden_size"),
    (lambda config: config.pop("intermediate_size"), "intermediate_size"),
    (change("", num_attention_heads=0), "num_attention_heads"),
    (change("", num_key_value_heads=3), "num_kv_heads"),
    (change("", head_dim="8"), "head_dim"),
    (change("", num_hidden_layers=-1), "num_hidden_layers"),
    (change("", rms_norm_eps=-1e-5), "rms_norm_eps"),
    (change("", rms_norm_eps="1e-5"), "rms_norm_eps"),
    (change("", rope_theta=0), "rope_theta"),
    (change("", rope_theta="5000"), "rope_theta"),
    (change("", rope_scaling="llama3"), "rope_scaling"),
    (change("rope_scaling", rope_type=3), "rope_scaling.rope_type"),
    (lambda config: config["rope_scaling"].pop("factor"), "rope_scaling.factor"),
    (change("rope_scaling", factor=0.0), "rope_scaling.factor"),
    (change("", rope_parameters={"full_attention": {"rope_theta": 1e4}}), "rope_parameters"),
    (change("", partial_rotary_factor=0.5), "partial_rotary_factor"),
    (change("", attention_bias="false"), "attention_bias"),
    (change("", norm_before_residual="false"), "norm_before_residual"),
    (change("", sliding_window="6"), "sliding_window"),
    (change("", hidden_act=["silu"]), "hidden_act"),
    (change("", draft_vocab_size="40"), "draft_vocab_size"),
    (change("", target_vocab_size=0), "target_vocab_size"),
    (change("", transformer_layer_config=[1]), "transformer_layer_config"),
    (change("", eagle_config=3), "eagle_config"),
    (change("eagle_config", use_aux_hidden_state="true"), "eagle_config.use_aux_hidden_state"),
    (change("eagle_config", eagle_aux_hidden_state_layer_ids="012"), "eagle_config.eagle_aux_hidden_state_layer_ids"),
    (change("eagle_config", eagle_aux_hidden_state_layer_ids=[0, 1, 9]), "eagle_config.eagle_aux_hidden_state_layer_ids"),
]
MODEL_VALUES = [
    (change("", model_type="nope"), None),
    (change("", hidden_size="32"), None),
    (change("", tie_word_embeddings="false"), None),
    (change("", rms_norm_eps="1e-5"), None),
    (change("", hidden_act="nope"), None),
    (change("", rms_norm_eps=-1e-5), "rms_norm_eps"),
    (change("", num_hidden_layers=-1), "num_hidden_layers"),
    (change("", vocab_size=-3), "vocab_size"),
    (change("rope_parameters", rope_theta=0), "rope_parameters.rope_theta"),
    (change("rope_parameters", rope_theta="x"), "rope_parameters.rope_theta"),
]


@pytest.mark.parametrize(
    ("loader", "spoil", "field"),
    [
        *(("pair", *case) for case in PAIR_VALUES),
        *(("pickled head", *case) for case in HEAD_VALUES),
        *(("model", *case) for case in MODEL_VALUES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_of_a_configuration_is_named(copied, loader, spoil, field):
    folder = copied(loader)
    config = json.loads((folder / "config.json").read_text())
    spoil(config)
    (folder / "config.json").write_text(json.dumps(config))
    if loader == "model" and config["hidden_act"] == "nope":  # found while the model is built
        refused(loader, folder, "model.safetensors")
    else:
        message = refused(loader, folder, "config.json", field)
        assert field is None or "got" in message or "is unknown" in message or "is missing" in message or "does not" in message


def test_architectures_that_are_no_list(copied):
    folder = copied("pickled head")
    config = json.loads((folder / "config.json").read_text())
    assert is_eagle3(folder)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": "LlamaForCausalLMEagle3"}))
    with pytest.raises(CheckpointError, match=r"`architectures` must be a list of strings, got 'Llama"):
        is_eagle3(folder)


@pytest.mark.parametrize(
    ("values", "field"),
    [('{"eos_token_id": "x"}', "eos_token_id"), ('{"eos_token_id": [2.5]}', "eos_token_id"), ("[]", None), ("{", None)],
)  # fmt: skip
def test_a_damaged_generation_config(copied, values, field):
    folder = copied("model")
    (folder / "generation_config.json").write_text(values)
    refused("model", folder, "generation_config.json", field)


@pytest.mark.parametrize("ends", [-1, [-1], [2, VOCAB]])
def test_end_tokens_outside_the_vocabulary_are_the_settings_affair(copied, ends):
    """One rule for files and arguments: they end nothing, and a warning says so."""
    folder = copied("model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    load_model(folder)
    with pytest.warns(UserWarning, match="which ends nothing"):
        settings = load_settings(folder, {}, 0)
    assert settings.stop_tokens == ([2] if ends == [2, VOCAB] else [])


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, torch.AcceleratorError])
@pytest.mark.parametrize(
    ("loader", "function"),
    [("model", "transformers.AutoConfig.from_pretrained"), ("pickled head", "torch.load")],
)
def test_a_machines_failure_is_not_the_files(copied, monkeypatch, loader, function, error):
    def fail(*_args, **_kwargs):
        raise error("the machine")

    folder = copied(loader)
    monkeypatch.setattr(function, fail)
    with pytest.raises(error, match="the machine"):
        LOADERS[loader](folder)


WEIGHTS = [
    ("pair", "target.safetensors"),
    ("pair", "draft.safetensors"),
    ("head", "model.safetensors"),
    ("pickled head", "pytorch_model.bin"),
    ("model", "model.safetensors"),
]


@pytest.mark.parametrize(("loader", "file"), WEIGHTS)
@pytest.mark.parametrize("length", [0, 4, 100, 5000, -1])
def test_truncated_weights(copied, loader, file, length):
    folder = copied(loader)
    (folder / file).write_bytes((folder / file).read_bytes()[:length])
    refused(loader, folder, file)


@pytest.mark.parametrize(("loader", "file"), WEIGHTS)
def test_weights_of_no_format(copied, loader, file):
    folder = copied(loader)
    (folder / file).write_bytes(b"not a checkpoint")
    refused(loader, folder, file)


TENSORS: list[tuple[str, str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("pair", "target.safetensors", "norm.weight", lambda x: x.to(torch.int8)),
    ("pair", "target.safetensors", "lm_head.weight", lambda x: x[:-1].contiguous()),
    ("pair", "draft.safetensors", "fc.weight", lambda x: x.bool()),
    ("pair", "draft.safetensors", "draft_to_target", lambda x: x.int()),
    ("pair", "draft.safetensors", "draft_to_target", lambda x: x.float()),
    ("pair", "draft.safetensors", "draft_to_target", lambda x: x[None]),
    ("pair", "draft.safetensors", "draft_to_target", lambda x: x[:0]),
    ("pair", "draft.safetensors", "draft_to_target", lambda x: x - 1),
    ("pair", "draft.safetensors", "draft_to_target", lambda x: x + ByteTokenizer.vocab_size),
    ("pair", "draft.safetensors", "draft_to_target", lambda x: x // 4),  # duplicates
    ("head", "model.safetensors", "norm.weight", lambda x: x.to(torch.int8)),
    ("head", "model.safetensors", "lm_head.weight", lambda x: x[:-1].contiguous()),
    ("head", "model.safetensors", "embed_tokens.weight", lambda x: x[:30].contiguous()),
    ("head", "model.safetensors", "embed_tokens.weight", lambda x: x[:, :30].contiguous()),
    ("head", "model.safetensors", "embed_tokens.weight", lambda x: x[0]),
    ("head", "model.safetensors", "embed_tokens.weight", lambda x: x.int()),
    ("head", "model.safetensors", "d2t", lambda x: x.float()),
    ("head", "model.safetensors", "d2t", lambda x: x.bool()),
    ("head", "model.safetensors", "d2t", lambda x: x - 100),
    ("head", "model.safetensors", "d2t", lambda x: 9 - torch.arange(len(x))),  # duplicates
    ("head", "model.safetensors", "t2d", lambda x: x[:, None]),
    ("head", "model.safetensors", "t2d", lambda x: x.float()),
    ("head", "model.safetensors", "t2d", lambda x: ~x),
    ("model", "model.safetensors", "model.norm.weight", lambda x: x.to(torch.int8)),
    ("model", "model.safetensors", "model.norm.weight", lambda x: x[:5].contiguous()),
]


@pytest.mark.parametrize(
    ("loader", "file", "field", "spoil"), TENSORS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_tensor_that_does_not_fit_is_named(copied, loader, file, field, spoil):
    folder = copied(loader)
    state = load_file(folder / file)
    state[field] = spoil(state[field])
    save_file(state, folder / file, metadata={"format": "pt"})
    assert "got" in (message := refused(loader, folder, file, field)) or "disagrees" in message


@pytest.mark.parametrize(
    ("loader", "file", "name"),
    [
        ("pair", "target.safetensors", "norm.weight"),
        ("pair", "draft.safetensors", "fc.weight"),
        ("pair", "draft.safetensors", "draft_to_target"),
        ("head", "model.safetensors", "fc.weight"),
        ("head", "model.safetensors", "lm_head.weight"),
        ("model", "model.safetensors", "model.layers.1.mlp.up_proj.weight"),  # transformers would fill it with random numbers
    ],
)
def test_a_missing_tensor_is_named(copied, loader, file, name):
    folder = copied(loader)
    state = load_file(folder / file)
    del state[name]
    save_file(state, folder / file, metadata={"format": "pt"})
    assert name in refused(loader, folder, file)


@pytest.mark.parametrize("text", [b"{", b"[]", b"", None])
def test_a_damaged_tokenizer(copied, text):
    folder = copied("model")
    if text is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_bytes(text)
    refused("model", folder, ".")


def test_a_head_in_the_place_of_its_target(copied):
    with pytest.raises(CheckpointError, match="must be a target, got an EAGLE-3 head"):
        load_checkpoints(copied("head"), None, device="cpu", dtype=torch.float32)


def test_two_names_of_one_tensor(copied):
    folder = copied("pickled head")
    state = torch.load(folder / "pytorch_model.bin")
    state["layers.0.mlp.up_proj.weight"] = state["midlayer.mlp.up_proj.weight"] + 1
    torch.save(state, folder / "pytorch_model.bin")
    refused("pickled head", folder, "pytorch_model.bin", "layers.0.mlp.up_proj.weight")


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("what", ["code", "list", "nested", "number", "names"])
def test_a_pickle_of_something_else(copied, tmp_path, what):
    folder = copied("pickled head")
    ran = tmp_path / "ran"
    content = {
        "code": {"fc.weight": _Runs(ran)},
        "list": [torch.ones(3)],
        "nested": {"state_dict": {"fc.weight": torch.ones(3)}},
        "number": {"fc.weight": 3},
        "names": {3: torch.ones(3)},
    }[what]
    if what == "code":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, folder / "pytorch_model.bin")
    refused("pickled head", folder, "pytorch_model.bin")
    assert not ran.exists()


def test_a_head_is_refused_before_it_changes_the_target(copied):
    folder = copied("head")
    state = load_file(folder / "model.safetensors")
    save_file(state | {"fc.weight": torch.ones(3)}, folder / "model.safetensors")
    model = make_model("llama", "eager")
    with pytest.raises(CheckpointError, match=r"`fc.weight` must be of shape"):
        load_eagle3(folder, model)
    assert model.config._attn_implementation == "eager"


def test_an_embedding_may_be_padded(copied):
    folder = copied("head")
    state = load_file(folder / "model.safetensors")
    state["embed_tokens.weight"] = torch.randn(VOCAB + 5, HIDDEN)
    save_file(state, folder / "model.safetensors")
    _, draft = load_eagle3(folder, make_model("llama"))
    assert draft.embed.weight.shape == (VOCAB + 5, HIDDEN)


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        (torch.arange(8).int(), r"int64 of shape \[draft_vocab\], got int32 \[8\]"),
        (torch.arange(8)[None], r"int64 of shape \[draft_vocab\], got int64 \[1, 8\]"),
        (torch.arange(8) - 1, r"ids in \[0, 264\), got -1 to 6"),
        (torch.arange(8) + 257, r"ids in \[0, 264\), got 257 to 264"),
        (torch.tensor([3, 5, 5, 7, 5]), r"different ids, got 5 3 times"),
    ],
)
def test_the_map_of_a_drafts_vocabulary(mapping, problem):
    target = CausalLM(ModelConfig(num_layers=1, aux_layers=(0,), **SIZES))
    with pytest.raises(ValueError, match=rf"Eagle3Draft: `draft_to_target` must .*{problem}"):
        Eagle3Draft(ModelConfig(num_layers=1, **SIZES), target, mapping)


def test_another_vocabulary_needs_a_map():
    target = CausalLM(ModelConfig(num_layers=1, aux_layers=(0,), **SIZES))
    with pytest.raises(ValueError, match=r"Eagle3Draft: `draft_to_target` must map .* of 40 to .* of 264, got None"):
        Eagle3Draft(ModelConfig(num_layers=1, **{**SIZES, "vocab_size": 40}), target, None)


ODD = [None, True, False, 0, 1, -1, 2.5, float("nan"), float("inf"), "", "false", [], [1], {}, {"a": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["pair", "pickled head", "model"])
def test_random_damage_gives_no_other_error(copied, loader, seeds):
    """A value swapped for another, or some bytes of a weights file: it loads, or CheckpointError comes."""
    folder = copied(loader)
    files = {path: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")}
    files = {path: data for path, data in files.items() if not path.name.startswith("tokenizer")}
    errors = 0
    for seed in seeds(20 if loader == "model" else 60):
        choose = random.Random(seed)
        path = choose.choice(sorted(files))
        damaged = bytearray(files[path])
        if path.suffix == ".json":
            values = json.loads(damaged)
            section = choose.choice([v for v in values.values() if isinstance(v, dict) and v] or [values])
            section = choose.choice([section, values])
            section[choose.choice(sorted(section))] = choose.choice(ODD)
            damaged = bytearray(json.dumps(values).encode())
        else:
            for _ in range(choose.randint(1, 8)):
                damaged[choose.randrange(min(len(damaged), 4000))] = choose.randrange(256)
        path.write_bytes(damaged)
        try:
            LOADERS[loader](folder)
        except CheckpointError:
            errors += 1
        path.write_bytes(files[path])
    assert errors > 5
