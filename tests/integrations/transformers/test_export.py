"""A pair written for other packages: transformers and `load_eagle3` read back what it was. Engines: `tests/sglang`."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from spec_ops.cli import app
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.integrations.transformers import TransformersGenerator, load_eagle3
from spec_ops.models import (
    CausalLM,
    Eagle3Draft,
    MixtureConfig,
    ModelConfig,
    MTPDraft,
    export_pair,
    huggingface,
    load_pair,
    quantize,
)
from spec_ops.models.corpus import ByteTokenizer, held_out_prompts
from tests.decoding.test_generate import full_prefill

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
}  # fmt: skip
SCALED = {"rope_theta": 5000.0, "rope_scaling": (8.0, 1.0, 4.0, 32.0), "rms_norm_eps": 1e-6}


def pair(reduced: bool = True, head: dict[str, Any] | None = None, **changes: Any) -> tuple[CausalLM, Eagle3Draft]:
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(**{**SIZES, "num_layers": 4, "aux_layers": (0, 1, 3), **changes}))
    kept = torch.randperm(SIZES["vocab_size"])[:40].sort().values if reduced else None
    draft = Eagle3Draft(ModelConfig(**{**SIZES, "num_layers": 1, **(head or {})}), target, kept)
    for module in (target, draft):
        for name, weight in module.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(weight, 1, 0.3)
    return target.requires_grad_(False), draft.requires_grad_(False)


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("changes", [{}, SCALED])
def test_what_is_read_back(reduced, changes, tmp_path):
    """Every weight, and every size; the RoPE that transformers computes from what was written."""
    target, draft = pair(reduced, head=changes, **changes)
    folders = export_pair(tmp_path, target, draft, context=512)
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    tokens = torch.randint(64, (50,), generator=torch.Generator().manual_seed(1))
    output, _ = full_prefill(target, tokens.tolist())
    torch.testing.assert_close(model(tokens[None]).logits[0], target.logits(output.hidden), rtol=1e-4, atol=1e-5)
    adapter, head = load_eagle3(folders[1], model)
    read, own = head.own_state_dict(), draft.own_state_dict()
    assert read.keys() == own.keys()
    assert all(torch.equal(read[name], own[name]) for name in own)
    assert head.config == dataclasses.replace(draft.config, vocab_size=64)
    assert adapter.config.aux_layers == target.config.aux_layers
    assert model.config.max_position_embeddings == 512
    adapter.close()


def test_the_shipped_pair_gives_the_same_tokens_in_the_same_rounds(tmp_path):
    target, draft, tokenizer = load_pair()
    folders = export_pair(tmp_path, target, draft, tokenizer, context=1024)
    prompts = held_out_prompts(tokenizer, 2, 64)
    options: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 128}
    config = SpeculationConfig(num_steps=3)
    ours = Generator(target, draft, config, **options).generate(prompts, max_new_tokens=32)
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    adapter, head = load_eagle3(folders[1], model)
    with TransformersGenerator(adapter, head, config, compile=False, **options) as generator:
        theirs = generator.generator.generate(prompts, max_new_tokens=32)
    adapter.close()
    assert theirs.tokens == ours.tokens
    assert theirs.stats.histograms == ours.stats.histograms
    assert ours.stats.accept_length > 2.5
    assert GenerationConfig.from_pretrained(folders[0]).eos_token_id == tokenizer.EOS


def test_the_tokenizer_has_our_ids(tmp_path):
    """Of every byte, and of text in several scripts."""
    export_pair(tmp_path, *pair(vocab_size=ByteTokenizer.vocab_size, head={"vocab_size": 264}), ByteTokenizer(), context=99)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "target"), ByteTokenizer()
    for text in ("def f(x):\n\treturn 'é€' + x  # ok .", "".join(map(chr, range(0x800))), "  two  spaces \r\n", "日本🐍", ""):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text), skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.model_max_length) == (ours.BOS, ours.EOS, 99)
    broken = [0xE2, 0x82, 65]
    assert theirs.decode(broken) == ours.decode(broken)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sliding_window": 8}, "`target.config.sliding_window` must be None, as of a Llama, got 8"),
        ({"attention_sinks": True}, "`target.config.attention_sinks` must be False"),
        ({"mixture": MixtureConfig(2, 1, 8)}, "`target.config.mixture` must be None"),
        ({"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}, "`target.config.kv_lora_rank`"),
        ({"head": {"sliding_window": 8}}, "`draft.config.sliding_window` must be None"),
        ({"head": {"num_layers": 2}}, "`draft` must have one layer, got 2"),
    ],
)
def test_what_the_layouts_do_not_have(changes, told, tmp_path):
    with pytest.raises(ValueError, match=f"export_pair: {told}"):
        export_pair(tmp_path, *pair(**changes), context=512)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_norms_that_engines_read_differently(flag, tmp_path):
    target, draft = pair()
    other = Eagle3Draft(draft.config, target, draft.draft_to_target, **{flag: True})
    with pytest.raises(ValueError, match="export_pair: `draft` must have the norms of EAGLE-3, got one with"):
        export_pair(tmp_path, target, other, context=512)


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_over_another_one(tmp_path, monkeypatch):
    """It replaces all files, the tokenizer that it does not have among them; one that fails half-way changes none."""
    first, second = pair(vocab_size=264, head={"vocab_size": 264}), pair()
    export_pair(tmp_path / "a", *first, ByteTokenizer(), context=64)
    export_pair(tmp_path / "b", *second, context=32)
    before = everything(tmp_path / "a")
    (tmp_path / "a" / "target" / "notes.txt").write_text("mine")

    def no_room(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "_head_tensors", no_room)
        with pytest.raises(OSError, match="No space left"):
            export_pair(tmp_path / "a", *second, context=32)
    assert everything(tmp_path / "a") == before | {"target/notes.txt": b"mine"}
    export_pair(tmp_path / "a", *second, context=32)
    assert everything(tmp_path / "a") == everything(tmp_path / "b") | {"target/notes.txt": b"mine"}
    (tmp_path / "a" / "draft" / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(FileExistsError, match=r"`directory` must have no other weights in .*draft, got model-00001-of-00002"):
        export_pair(tmp_path / "a", *first, context=64)


def test_what_is_no_pair(tmp_path):
    target, draft = pair()
    mtp = MTPDraft(draft.config, target)
    with pytest.raises(TypeError, match=r"export_pair: `draft` must be a spec_ops.models Eagle3Draft, got MTPDraft"):
        export_pair(tmp_path, target, mtp, context=64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="export_pair: `context` must be a positive number of tokens, got 0"):
        export_pair(tmp_path, target, draft, context=0)
    with pytest.raises(ValueError, match=r"`target.config.vocab_size` must be at least the tokenizer's 264, got 64"):
        export_pair(tmp_path, target, draft, ByteTokenizer(), context=64)
    narrow = Eagle3Draft(dataclasses.replace(draft.config, vocab_size=40), target, draft.draft_to_target)
    with pytest.raises(ValueError, match="`draft` must know the target's 64 tokens, got 40"):
        export_pair(tmp_path, target, narrow, context=64)
    wide, head = pair(hidden_size=64, head={"hidden_size": 64})
    quantize(head, "nvfp4")
    with pytest.raises(ValueError, match=r"must have the weights .* before `quantize`, got `fc.weight` as StoredTensor"):
        export_pair(tmp_path, wide, head, context=64)
    target.ranks = types.SimpleNamespace(rank=0, size=2)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="export_pair: `target` must be whole, got the share of rank 0 of 2"):
        export_pair(tmp_path, target, draft, context=64)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path):
    result = CliRunner().invoke(app, ["export", str(tmp_path / "served")])
    assert result.exit_code == 0, result.output
    assert f"target: {tmp_path / 'served' / 'target'}\n" in result.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "served" / "target").dtype == torch.bfloat16
    (tmp_path / "file").touch()
    assert CliRunner().invoke(app, ["export", str(tmp_path / "file")]).exit_code == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "target").touch()
    assert CliRunner().invoke(app, ["export", str(tmp_path / "full")]).exit_code == 2
