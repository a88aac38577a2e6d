"""Targets against dense float64 forwards written independently: Llama-type GQA, and MLA in its plain form (keys and values
expanded per head) against the absorbed form over the latent cache."""

from __future__ import annotations

import math

import pytest
import torch

from spec_ops.models import CausalLM, ModelConfig, PagedAttention, PagedKVCache
from tests.decoding.test_generate import full_prefill, model_config

TOKENS = [5, 9, 2, 2, 77, 31, 0, 96, 14]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE of `[tokens, heads, dim]` as a complex rotation of the pairs `(i, i + dim / 2)`."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(len(x)).double(), theta ** (-torch.arange(half).double() / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks=None) -> torch.Tensor:
    """Causal attention, `[tokens, heads, dim]` each, one query and head at a time; `sinks [heads]` share in the softmax."""
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    for i in range(len(q)):
        first = 0 if window is None else max(0, i + 1 - window)
        for head in range(q.shape[1]):
            logits = k[first : i + 1, head] @ q[i, head] / math.sqrt(q.shape[-1])
            if sinks is not None:
                logits = torch.cat([logits, sinks[head : head + 1]])
            out[i, head] = torch.softmax(logits, 0)[: i + 1 - first] @ v[first : i + 1, head]
    return out.flatten(1)


def dense(model: CausalLM, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`(hidden, aux)` of one sequence."""
    config, state = model.config, {name: value.detach().double() for name, value in model.state_dict().items()}
    x, aux = state["embed.weight"][tokens], []
    for layer in range(config.num_layers):
        if layer in config.aux_layers:
            aux.append(x)
        weight = {n.removeprefix(f"layers.{layer}."): v for n, v in state.items() if n.startswith(f"layers.{layer}.")}
        a = {n.removeprefix("attention."): v for n, v in weight.items()}
        y = norm(x, weight["input_norm.weight"], config.rms_norm_eps)
        pattern = config.sliding_window_pattern
        window = None if pattern and layer % pattern == pattern - 1 else config.sliding_window
        if config.is_mla:
            nope = config.qk_nope_head_dim
            if config.q_lora_rank is None:
                q = y @ a["q_proj.weight"].T
            else:
                q = norm(y @ a["q_proj.0.weight"].T, a["q_proj.1.weight"], config.rms_norm_eps) @ a["q_proj.2.weight"].T
            q = q.unflatten(1, (config.num_heads, -1))
            latent, k_rope = (y @ a["kv_a_proj.weight"].T).split([config.kv_lora_rank, config.qk_rope_head_dim], 1)
            latent = norm(latent, a["kv_a_norm.weight"], config.rms_norm_eps)
            k_nope = torch.stack([latent @ w.T for w in a["w_uk"]], 1)
            v = torch.stack([latent @ w for w in a["w_uv"]], 1)
            k_rope = rotated(k_rope[:, None], config.rope_theta).expand(-1, config.num_heads, -1)
            q = torch.cat([q[..., :nope], rotated(q[..., nope:], config.rope_theta)], -1)
            out = attend(q, torch.cat([k_nope, k_rope], -1), v, window)
        else:
            q, k, v = ((y @ a[f"{n}_proj.weight"].T).unflatten(1, (-1, config.head_dim)) for n in "qkv")
            group = config.num_heads // config.num_kv_heads
            k, v = (t.repeat_interleave(group, 1) for t in (rotated(k, config.rope_theta), v))
            out = attend(rotated(q, config.rope_theta), k, v, window, a.get("sinks"))
        x = x + out @ a["o_proj.weight"].T
        y = norm(x, weight["post_norm.weight"], config.rms_norm_eps)
        gate = y @ weight["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (y @ weight["mlp.up_proj.weight"].T)) @ weight["mlp.down_proj.weight"].T
    return norm(x, state["norm.weight"], config.rms_norm_eps), torch.cat(aux, -1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "config",
    [
        model_config(False, aux_layers=(0, 2)),
        model_config(True, aux_layers=(0, 2)),
        model_config(True, aux_layers=(0, 2), q_lora_rank=24),
        model_config(False, aux_layers=(0, 2), sliding_window=9, sliding_window_pattern=2, attention_sinks=True),
    ],
    ids=["gqa", "mla", "mla-q_lora", "gqa-sinks"],
)
def test_target_equals_dense_forward(config, window):
    torch.manual_seed(4)
    pattern = None if window is None else config.sliding_window_pattern
    changed = {"sliding_window": window, "sliding_window_pattern": pattern}
    model = CausalLM(ModelConfig.from_dict({**config.to_dict(), **changed}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones could hide a forgotten or swapped weight
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("sinks"):  # zeros at first
                parameter.normal_()
    output, _ = full_prefill(model, TOKENS)
    hidden, aux = dense(model, TOKENS)
    # float32 against float64: three layers of sums over at most 96 terms of order 1
    torch.testing.assert_close(output.hidden.double(), hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.aux.double(), aux, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"sliding_window": 4, "sliding_window_pattern": 1}, "sliding_window_pattern"),
        ({"sliding_window_pattern": 2}, "sliding_window_pattern"),
        ({"attention_sinks": True, "kv_lora_rank": 8}, "attention_sinks"),
    ],
)
def test_impossible_windows_and_sinks(sizes, named):
    with pytest.raises(ValueError, match=named):
        model_config(False, **sizes)


def test_sinks_stay_what_the_ops_read():
    """In a bfloat16 model they are float32 from the start, or converted when the model was."""
    target = CausalLM(model_config(False, attention_sinks=True)).to(torch.bfloat16)
    hidden = full_prefill_bf16(target)
    with torch.no_grad():
        target.layers[0].attention.sinks.fill_(20.0)  # all weight to the sink: attention gives nothing
    assert not torch.equal(full_prefill_bf16(target), hidden)


def full_prefill_bf16(model: CausalLM) -> torch.Tensor:
    cache = PagedKVCache(model.config, 3, 4, dtype=torch.bfloat16)
    length = len(TOKENS)
    where = (torch.arange(3, dtype=torch.int32)[None], torch.tensor([length], dtype=torch.int32), torch.arange(length))
    ragged = {"q_indptr": torch.tensor([0, length], dtype=torch.int32), "max_q_len": length}
    with torch.no_grad():
        return model(torch.tensor(TOKENS), torch.arange(length), PagedAttention(cache, "extend", *where, **ragged)).hidden
