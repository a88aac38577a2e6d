"""MTP layers in the layout of DeepSeek-V3 and GLM: what a loaded one computes, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spec_ops import cli
from spec_ops.decoding import SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, load_mtp
from spec_ops.integrations.transformers.mtp import holds_mtp
from spec_ops.models.checkpoint import CheckpointError
from tests.decoding.test_generate import full_prefill
from tests.helpers.tiny_transformers import batch, eager_tokens, make_model, tokenizer

LAYERS, HIDDEN = 3, 32
KINDS = ["deepseek_v3", "glm4_moe"]
PREFIX = f"model.layers.{LAYERS}."


def write(folder, kind: str, *, head: bool = False, exported: bool = False) -> dict[str, torch.Tensor]:
    """The target's checkpoint with an MTP layer after its own, the last one's weights changed; or that layer alone, as SGLang
    exports it. Returns the layer's tensors by their names in it."""
    model = make_model(kind, "eager")
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    torch.manual_seed(4)
    last = f"model.layers.{LAYERS - 1}."
    layer = {name.removeprefix(last): value * 1.1 for name, value in stored.items() if name.startswith(last)}
    for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        layer[name] = 1 + 0.3 * torch.randn(HIDDEN)
    layer["eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * (2 * HIDDEN) ** -0.5
    layer["embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    layer["shared_head.head.weight"] = stored["lm_head.weight"] * (2.0 if head else 1.0)
    if exported:
        edit(folder, architectures=["DeepseekV3ForCausalLMNextN"], num_hidden_layers=1)
        stored = {}
    prefix = "model.layers.0." if exported else PREFIX
    save_file({**stored, **{prefix + name: value for name, value in layer.items()}}, folder / "model.safetensors")
    return layer


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reference(folder, kind: str, layer: dict, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits for `tokens [T]`, `hidden [T, HIDDEN]`, as in SGLang's `DeepseekModelNextN.forward`: embedding
    first in the joined row, one decoder layer (here transformers' own, eager), then `shared_head.norm`."""
    model = make_model(kind, "eager")
    model.save_pretrained(folder)
    stored, last = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS - 1}."
    stored = {name: layer[name.removeprefix(last)] if name.startswith(last) else value for name, value in stored.items()}
    save_file(stored, folder / "model.safetensors")
    model = type(model).from_pretrained(folder, attn_implementation="eager").eval()

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), layer[f"{name}.weight"], model.config.rms_norm_eps)

    embedded = layer["embed_tokens.weight"][tokens]
    x = torch.cat([norm("enorm", embedded), norm("hnorm", hidden)], -1) @ layer["eh_proj.weight"].T
    rope = model.model.rotary_emb(x[None], torch.arange(len(tokens))[None])
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    out = model.model.layers[-1](x[None], position_embeddings=rope, attention_mask=mask)
    out = norm("shared_head.norm", (out[0] if isinstance(out, tuple) else out)[0])
    return out, out @ layer["shared_head.head.weight"].T


@pytest.mark.parametrize(("kind", "head", "exported"), [("deepseek_v3", False, True), ("glm4_moe", True, False)])
def test_a_loaded_layer_computes_what_its_engines_compute(tmp_path, kind, head, exported):
    layer = write(tmp_path, kind, head=head, exported=exported)
    target, draft = load_mtp(tmp_path, make_model(kind))
    tokens, hidden = batch()[0][1], torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        got, _ = full_prefill(draft, tokens.tolist(), hidden)
        logits = draft.logits(got)
        expected = reference(tmp_path / "reference", kind, layer, tokens, hidden)
    # fp32, another order of sums
    torch.testing.assert_close((got, logits), expected, rtol=1e-4, atol=1e-4)
    assert draft.block.embed is target.embed
    assert (draft.block.lm_head is target.lm_head) is not head


@pytest.mark.parametrize("config", [SpeculationConfig(3), SpeculationConfig(3, 2, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_layers_draft_for_their_target(tmp_path, kind, config):
    write(tmp_path, kind)
    ids, mask = batch()
    target, draft = load_mtp(tmp_path, make_model(kind))
    generator = TransformersGenerator(target, draft, config, max_batch_size=3, max_seq_len=40)
    result = generator.generate(ids, mask, max_new_tokens=20, eos_token_id=(), return_dict_in_generate=True)
    assert result.tokens == eager_tokens(kind)


def test_a_layer_that_knows_the_answer_is_believed(tmp_path):
    """Embedding and hidden state end up in the right halves: the layer is silent and repeats its token, as the target does."""
    model, layer = make_model("glm4_moe"), write(tmp_path, "glm4_moe")
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *layer.items()):
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        rows = F.normalize(model.model.embed_tokens.weight, dim=1)
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight.copy_(rows)
    layer |= {name: torch.ones(HIDDEN) for name in layer if name in ("enorm.weight", "shared_head.norm.weight")}
    layer["eh_proj.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    del layer["embed_tokens.weight"], layer["shared_head.head.weight"]  # the target's
    save_file({PREFIX + name: value.contiguous() for name, value in layer.items()}, tmp_path / "model.safetensors")
    generator = TransformersGenerator(*load_mtp(tmp_path, model), max_batch_size=1, max_seq_len=32)
    ids = batch()[0][1:2]
    result = generator.generate(ids, max_new_tokens=13, eos_token_id=(), return_dict_in_generate=True)
    assert result.tokens == [[int(ids[0, -1])] * 13]
    assert result.stats.accept_length == 4


def test_only_the_files_of_the_layer_are_read(tmp_path):
    write(tmp_path, "glm4_moe")
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "1.safetensors").write_text("the target's layers: never opened")
    save_file({name: value for name, value in stored.items() if name.startswith(PREFIX)}, tmp_path / "2.safetensors")
    places = {name: f"{1 + name.startswith(PREFIX)}.safetensors" for name in stored}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    load_mtp(tmp_path, make_model("glm4_moe"))
    (tmp_path / "2.safetensors").write_text("damaged")
    with pytest.raises(CheckpointError, match=r"2\.safetensors: must be a safetensors file"):
        load_mtp(tmp_path, make_model("glm4_moe"))
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"2\.safetensors: no such file"):
        load_mtp(tmp_path, make_model("glm4_moe"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "`hidden_size` must be 32, as the target's is, got 64"),
        ({"num_hidden_layers": 4}, "`num_hidden_layers` must be 3, .*got 4"),
        ({"model_type": "llama"}, "`model_type` must be 'glm4_moe', .*got 'llama'"),
        ({"num_nextn_predict_layers": 2}, "`num_nextn_predict_layers` must be 1, got 2"),
        ({"num_nextn_predict_layers": None}, "`num_nextn_predict_layers` must be 1, got 0"),
        ({"num_nextn_predict_layers": "1"}, "`num_nextn_predict_layers` must be an integer"),
    ],
)
def test_configurations_that_do_not_fit_are_named(tmp_path, change, message):
    write(tmp_path, "glm4_moe")
    edit(tmp_path, **change)
    with pytest.raises(CheckpointError, match=message):
        load_mtp(tmp_path, make_model("glm4_moe"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("eh_proj.weight"), r"holds no MTP layer: `model\.layers\.3\.eh_proj\.weight` is missing"),
        (lambda w: w.pop("hnorm.weight"), "missing tensors .*hnorm"),
        (lambda w: w.pop("shared_head.norm.weight"), r"missing tensors .*layers\.3\.shared_head\.norm"),
        (lambda w: w.pop("self_attn.o_proj.weight"), r"missing tensors .*layers\.3\.self_attn\.o_proj"),
        (lambda w: w.update({"self_attn.x.weight": torch.ones(2)}), r"unknown tensors .*layers\.3\.self_attn\.x"),
        (
            lambda w: w.update({"self_attn.o_proj.weight": torch.ones(2, 2)}),
            r"`model\.layers\.3\.self_attn\.o_proj\.weight` must be of shape \[.*\], got \[2, 2\]",
        ),
        (lambda w: w.update({"enorm.weight": torch.ones(3)}), r"`model\.layers\.3\.enorm\.weight` must be of shape \[32\]"),
        (
            lambda w: w.update({"eh_proj.weight": w["eh_proj.weight"].to(torch.float8_e4m3fn)}),
            r"`model\.layers\.3\.eh_proj\.weight` must be float64, .*got float8_e4m3fn",
        ),
        (
            lambda w: w.update({"mlp.experts.1.up_proj.weight": torch.ones(3, 3)}),
            r"model\.layers\.3\..*must be a layer of Glm4MoeForCausalLM",
        ),
    ],
    ids=["none", "join", "norm", "block", "unknown", "shape", "join's shape", "8 bits", "experts"],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, message):
    layer = write(tmp_path, "glm4_moe")
    change(layer)
    save_file({PREFIX + name: value for name, value in layer.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_mtp(tmp_path, make_model("glm4_moe"))


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.mtp_layers.0.input_proj.weight", "model.mtp_block.0.x.weight"])
def test_other_layouts_are_named(tmp_path, name):
    write(tmp_path, "glm4_moe")
    save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"`{name}` must be `model\.layers\.3\.\*`, .*no other one is supported"):
        load_mtp(tmp_path, make_model("glm4_moe"))


@pytest.mark.parametrize("exported", [False, True])
def test_command_line_with_an_mtp_layer(tmp_path, exported):
    write(tmp_path, "glm4_moe")
    tokenizer().save_pretrained(tmp_path)
    draft = tmp_path
    if exported:
        draft = tmp_path / "exported"
        write(draft, "glm4_moe", exported=True)
    options = ["--prompt", "the thing", "--max-new-tokens", "12", "--device", "cpu", "--compare"]
    result = CliRunner().invoke(cli.app, ["generate", "--model", str(tmp_path), "--draft", str(draft), *options])
    assert result.exit_code == 0, result.output
    assert "texts are equal" in result.output


def test_the_same_folder_without_an_mtp_layer_is_a_whole_model(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    assert not holds_mtp(tmp_path, tmp_path)
    write(tmp_path / "glm", "glm4_moe")
    assert holds_mtp(tmp_path / "glm", tmp_path / "glm")
    assert not holds_mtp(tmp_path / "glm", tmp_path)


def test_a_refused_target_is_given_back(tmp_path):
    write(tmp_path, "glm4_moe")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has none of"):
        load_mtp(tmp_path, make_model("glm4_moe"))
    layer = write(tmp_path, "glm4_moe")
    del layer["hnorm.weight"]
    save_file({PREFIX + name: value for name, value in layer.items()}, tmp_path / "model.safetensors")
    model = make_model("glm4_moe", "eager")
    with pytest.raises(CheckpointError):
        load_mtp(tmp_path, model)
    assert model.config._attn_implementation == "eager"
    assert isinstance(model, transformers.Glm4MoeForCausalLM)
