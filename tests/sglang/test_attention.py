"""Windows, attention sinks, latent attention and caches of 8 bits: the texts that transformers writes in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engines import (
    BRANCHES,
    EAGLE3,
    GRAPHS,
    MARKS,
    NEEDS_NEWEST,
    NEWEST,
    NEXTN,
    TREE,
    accepted,
    result,
    run,
    serve,
)
from tests.sglang.oracle import written

pytestmark = MARKS


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A target with windows that are shorter than most texts, its EAGLE-3 head, and its texts."""
    from tests.helpers.engine_checkpoints import write_draft, write_windowed_target

    folder = tmp_path_factory.mktemp("windowed")
    write_windowed_target(folder / "target", window=12)
    write_draft(folder / "draft")
    texts = written(folder)
    # A model that repeats one token shows nothing, and one that windows do not change shows nothing of windows. Of a prompt of
    # one token sixteen times both are so.
    assert sum(len(set(text)) > 3 for text in texts) == len(texts) - 1
    assert sum(a != b for a, b in zip(texts, written(folder, sliding_window=512), strict=True)) == len(texts) - 1
    return folder, texts


@pytest.mark.parametrize(("page_size", "speculation"), [(16, {}), (16, EAGLE3), (1, TREE)], ids=["plain", "chain", "tree"])
def test_windows(windowed, page_size, speculation):
    folder, texts = windowed
    found = serve(folder, {"alone": 0}, attention_backend="spec_ops", page_size=page_size, **speculation)
    assert found["tokens"] == texts


@pytest.fixture(scope="module")
def sunk(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A Granite with windows and sinks, a MiMo V2 of the same weights and function with its MTP layer, and their texts."""
    from tests.helpers.engine_checkpoints import write_sunk_target

    folder = tmp_path_factory.mktemp("sunk")
    write_sunk_target(folder / "granite/target", window=12, ids=8)
    write_sunk_target(folder / "mimo/target", window=12, ids=8, mimo=True)
    # Texts without sinks, with others, without windows and with shorter ones: alike, they would show nothing of them.
    changes = [{}, {"sinks": -1e9}, {"sinks": 2.5}, {"sliding_window": 512}, {"sliding_window": 11}]
    done = run("-m", "tests.sglang.oracle", str(folder / "granite"), json.dumps(changes), first=NEWEST)
    texts, *others = result(done)
    assert all(a != b for other in others for a, b in zip(texts, other, strict=True))
    return folder, texts


ONE_POOL = {"attention_backend": "spec_ops", "disable_hybrid_swa_memory": True}  # for all layers


@NEEDS_NEWEST
def test_sinks_of_granite(sunk):
    """SGLang has no drafts for this architecture, and holds sinks in bfloat16."""
    folder, texts = sunk
    assert serve(folder / "granite", {"alone": 0}, first=NEWEST, page_size=16, **ONE_POOL)["tokens"] == texts


@NEEDS_NEWEST
@pytest.mark.parametrize(
    ("release", "page_size", "speculation"),
    [
        (None, 16, {}), (None, 16, NEXTN), (None, 16, NEXTN | GRAPHS), (None, 1, NEXTN | BRANCHES),
        (NEWEST, 16, NEXTN), (NEWEST, 1, NEXTN | BRANCHES),
    ],
    ids=["plain", "mtp", "graphs", "tree", "newest mtp", "newest tree"],
)  # fmt: skip
def test_sinks_of_mimo(sunk, release, page_size, speculation):
    folder, texts = sunk
    found = serve(folder / "mimo", {"alone": 0}, first=release, page_size=page_size, **ONE_POOL, **speculation)
    assert found["tokens"] == texts
    assert found["graphs"] == (6 if GRAPHS.keys() <= speculation.keys() else 0)
    assert not speculation or accepted(found) > 0


@NEEDS_NEWEST
def test_sinks_of_a_draft(sunk):
    """Text does not depend on them, but which drafts are accepted does."""
    from safetensors.torch import load_file, save_file

    folder, texts = sunk
    weights = load_file(folder / "mimo/target/model.safetensors")
    weights["model.mtp.layers.0.self_attn.attention_sink_bias"].fill_(-1e9)
    shutil.copytree(folder / "mimo", folder / "without")
    save_file(weights, folder / "without/target/model.safetensors", metadata={"format": "pt"})
    found, without = (serve(folder / name, {"alone": 0}, page_size=16, **ONE_POOL, **NEXTN) for name in ("mimo", "without"))
    assert found["tokens"] == without["tokens"] == texts
    assert found["rounds"] != without["rounds"]


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A target with MLA and an MTP layer, which SGLang takes with experts alone, an EAGLE-3 head, and its texts."""
    from tests.helpers.engine_checkpoints import LAYERS, YARN, write_draft, write_latent_target

    folder = tmp_path_factory.mktemp("latent")
    write_latent_target(folder / "target", layers=LAYERS, experts=4, rope_scaling=YARN)
    write_draft(folder / "draft")
    return folder, written(folder)


@pytest.mark.parametrize("speculation", [{}, EAGLE3, EAGLE3 | GRAPHS, NEXTN], ids=["plain", "eagle3", "graphs", "mtp"])
def test_latent_attention(latent, speculation):
    """Prefill without a prefix too, over the cache."""
    folder, texts = latent
    assert serve(folder, {"alone": 0}, attention_backend="spec_ops", page_size=16, **speculation)["tokens"] == texts


@pytest.fixture(scope="module")
def rounded(models) -> list[list[int]]:
    """What a target writes that attends to keys and values of 8 bits, a prompt's own tokens too."""
    import torch
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, key_states, value_states, *args, **kwargs):
            of_8_bits = (x.to(torch.float8_e4m3fn).float() for x in (key_states, value_states))
            return super().update(*of_8_bits, *args, **kwargs)

    return written(models, Rounded)


@pytest.mark.parametrize(("page_size", "speculation"), [(16, {}), (16, EAGLE3), (1, TREE)], ids=["plain", "chain", "tree"])
def test_a_cache_of_8_bits(models, plain, rounded, page_size, speculation):
    options: dict[str, Any] = {"attention_backend": "spec_ops", "page_size": page_size, "kv_cache_dtype": "fp8_e4m3"}
    assert serve(models, {"alone": 0}, **options, **speculation)["tokens"] == rounded != plain[: len(rounded)]


@pytest.fixture(scope="module")
def rounded_latent(latent) -> list[list[int]]:
    """As `rounded`, of latents and their rotated keys."""
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    from tests.helpers.engine_checkpoints import RANK

    def of_8_bits(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    rotate, norm = deepseek.apply_rotary_pos_emb_interleave, deepseek.DeepseekV3RMSNorm.forward

    def rotated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = rotate(*args, **kwargs)
        return queries, of_8_bits(keys)

    def normed(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = norm(layer, x)
        return of_8_bits(y) if y.shape[-1] == RANK else y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepseek, "apply_rotary_pos_emb_interleave", rotated)
        patch.setattr(deepseek.DeepseekV3RMSNorm, "forward", normed)
        return written(latent[0])


@pytest.mark.parametrize("speculation", [{}, EAGLE3, NEXTN], ids=["plain", "eagle3", "mtp"])
def test_a_latent_cache_of_8_bits(latent, rounded_latent, speculation):
    folder, texts = latent
    options: dict[str, Any] = {"attention_backend": "spec_ops", "page_size": 16, "kv_cache_dtype": "fp8_e4m3"}
    assert serve(folder, {"alone": 0}, **options, **speculation)["tokens"] == rounded_latent != texts
