"""What a transformers model caches, and whether it can run on these ops: a few tokens are run through it to see.

Configurations name sizes in many ways and say nothing of what a forward does with its cache, so the model itself is asked. The
tokens go through it twice: with eager attention and no cache, and in two steps with a paged cache. What a layer hands to its
attention gives the shapes; logits that differ show that the model does something that the attention interface does not express.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, PreTrainedModel

from spec_ops.integrations.transformers.attention import (
    NAME,
    LayerCall,
    NoUpdate,
    append_and_attend,
    attending,
    is_latent,
    leave_note,
)
from spec_ops.models.paged import PagedAttention, PagedKVCache

_STEPS = (5, 3)  # tokens of the two steps
_LENGTH = sum(_STEPS)
# Largest share of the logits' spread that rounding may move: experts may also be chosen differently in 16 bits.
_TOLERANCE = {torch.float32: 0.01, torch.float64: 1e-6}
_TOLERANCE_16 = 0.25


@dataclass(frozen=True)
class CacheSpec:
    """What one token of a model takes in a paged cache.

    Attributes:
        kv_rows: per layer the row shapes: `((kv_heads, head_dim), (kv_heads, v_head_dim))`, or one latent row
            `((kv_lora_rank + rope_dim,),)` for MLA.
        logits_size: width of the LM head.
    """

    kv_rows: tuple[tuple[tuple[int, ...], ...], ...]
    logits_size: int

    @property
    def latent(self) -> tuple[bool, ...]:
        """Per layer whether it caches MLA latents."""
        return tuple(len(rows) == 1 for rows in self.kv_rows)


@dataclass(frozen=True)
class Probed:
    """What `probe` found.

    Attributes:
        spec: what a token takes in a cache.
        tokens, logits: `[n]` int64 and `[n, vocab]`: the tokens run, and eager attention's logits.
        decoder: name of the module that takes the tokens; its output's type is `output`.
        table: rows of the table that the model looks positions up in, if it does.
    """

    spec: CacheSpec
    tokens: torch.Tensor
    logits: torch.Tensor
    decoder: str
    output: type
    table: int | None


class StepCache(Cache):
    """What a model sees as its cache during one step of a round: it holds nothing, and hands every layer to `attention`."""

    def __init__(self, attention: PagedAttention | None, latent: Sequence[bool]) -> None:
        super().__init__(layers=[])
        self.attention, self.latent = attention, latent

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        leave_note(self, layer_idx, key_states, value_states)
        return key_states, value_states

    def attend(self, call: LayerCall) -> torch.Tensor:
        assert self.attention is not None
        return append_and_attend(self.attention, call, self.latent[call.layer])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class _Recorder(StepCache):
    """Pages for one row, made as the layers come; records what they cache."""

    def __init__(self) -> None:
        super().__init__(None, ())
        self.rows: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.windows: dict[int, int] = {}
        self.pages: dict[int, PagedKVCache] = {}
        self.start, self.attends = 0, False

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.attends = True
        layer, device, length = call.layer, call.query.device, call.query.shape[2]
        if layer not in self.rows:
            self.rows[layer] = tuple((x.shape[1], x.shape[3]) for x in (call.key, call.value))
            if is_latent(call):
                self.rows[layer] = ((call.states[0].shape[-1] + call.states[1].shape[-1],),)
            self.windows[layer] = call.options["window_left"]
            spec = CacheSpec((self.rows[layer],), 0)
            self.pages[layer] = PagedKVCache(spec, 1, _LENGTH, dtype=call.query.dtype, device=device)
        step = extend_from_start(self.pages[layer], length, self.start, backend="reference")
        out = append_and_attend(step, call._replace(layer=0), len(self.rows[layer]) == 1)
        self.attends = False
        return out


def extend_from_start(cache: PagedKVCache, length: int, start: int = 0, *, backend: str = "auto") -> PagedAttention:
    """The step of one row that writes slots `[start, start + length)` of a cache of one page."""
    device = cache.tensors()[0].device
    return PagedAttention(
        cache,
        "extend",
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.tensor([start + length], dtype=torch.int32, device=device),
        torch.arange(start, start + length, device=device),
        q_indptr=torch.tensor([0, length], dtype=torch.int32, device=device),
        max_q_len=length,
        backend=backend,
    )


@torch.no_grad()
def probe(model: PreTrainedModel) -> Probed:
    """Run a few tokens through `model`.

    Args:
        model: a causal language model of transformers with `attn_implementation="spec_ops"`.

    Raises:
        ValueError: the model cannot run on these ops; the message says which part of it.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"`model` must be a decoder-only language model, got the encoder-decoder {name}")
    if not model._can_set_attn_implementation():
        raise ValueError(f"`model` must attend through transformers' attention interface; {name} does not")
    if config._attn_implementation != NAME:
        raise ValueError(
            f'`model` must be loaded with attn_implementation="{NAME}" (or switched by `model.set_attn_implementation`), '
            f"got {config._attn_implementation!r}"
        )
    if model.training:
        raise ValueError("`model` must be in evaluation mode: call `model.eval()`")
    types = getattr(config, "layer_types", None)
    if unknown := sorted(set(types or ()) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"`model`: layers must be of full or sliding attention, {name} has {unknown}")
    tokens = _tokens(model)
    record, logits, table = _run(model, tokens)
    layers = config.num_hidden_layers
    if silent := sorted(set(range(layers)) - set(record.rows)):
        raise ValueError(f"`model`: layers {silent} of {name} do not attend through the attention interface")
    kinds = types or ["sliding_attention" if _slides(config) else "full_attention"] * layers
    for layer, kind in enumerate(kinds[:layers]):
        if (kind == "sliding_attention") != (record.windows[layer] >= 0):
            window = record.windows[layer] + 1
            raise ValueError(f"`model`: layer {layer} of {name} is {kind}, but the attention gets the window {window}")
    with attending(model, "eager"):
        calls = _DecoderCalls(model)
        with calls:
            positions = torch.arange(_LENGTH, device=tokens.device)[None]
            want = model(input_ids=tokens[None], position_ids=positions, use_cache=False).logits[0]
    check_logits(name, logits, want)
    if calls.first is None or calls.output is None or not hasattr(calls.output, "last_hidden_state"):
        raise ValueError(f"`model`: {name} has no decoder module that turns tokens into hidden states")
    spec = CacheSpec(tuple(record.rows[layer] for layer in range(layers)), logits.shape[-1])
    return Probed(spec, tokens, want, calls.first, type(calls.output), table)


def _slides(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    """`[_LENGTH]` ids all over the vocabulary, none of them padding or of zero embedding, which would hide differences."""
    embed = model.get_input_embeddings()
    vocab, config = model.config.get_text_config().vocab_size, model.config.get_text_config()
    names = [(config, kind) for kind in ("pad", "bos", "eos")] + [(model.config, kind) for kind in ("image", "video", "audio")]
    found = [getattr(owner, f"{kind}_token_id", None) for owner, kind in names]
    special = {
        token for ids in found for token in (ids if isinstance(ids, (list, tuple)) else [ids])
    }  # Llama 3 ends by several
    # From the end: consecutive ids in a small vocabulary are not mistaken for positions.
    ids = [token for token in torch.linspace(vocab - 1, 0, min(vocab, 8 * _LENGTH)).long().tolist() if token not in special]
    candidates = torch.tensor(ids, device=model.device)
    seen = candidates[embed(candidates).flatten(1).ne(0).any(-1)]
    if not len(seen):
        raise ValueError(f"`model`: the embeddings of {type(model).__name__} are zero: are its weights loaded?")
    spread = torch.linspace(0, len(seen) - 1, min(len(seen), _LENGTH), device=seen.device).long()
    return seen[spread].repeat(-(-_LENGTH // len(spread)))[:_LENGTH]


def _run(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[_Recorder, torch.Tensor, int | None]:
    """Run `tokens` in two steps with a paged cache; returns what was recorded, the logits and the length of the table of
    positions."""
    name, record = type(model).__name__, _Recorder()
    positions = torch.arange(_LENGTH, device=tokens.device)
    logits, reads = [], []
    for length in _STEPS:
        part = slice(record.start, record.start + length)
        reads.append(_TableReads(positions[part], record))
        try:
            with reads[-1]:
                step = {"input_ids": tokens[None, part], "position_ids": positions[None, part]}
                logits.append(model(**step, past_key_values=record, use_cache=True).logits[0])
        except NoUpdate as error:
            raise ValueError(
                f"`model`: {error.layer} of {name} does not hand its own keys and values to the cache just before it attends: "
                "it borrows another layer's, attends twice to the same ones, or numbers its layers in another way"
            ) from error
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            raise ValueError(
                f"`model`: {name} does not run with a paged cache and attention: {type(error).__name__}: {error}"
            ) from error
        record.start += length
    return record, torch.cat(logits), reads[-1].rows


def check_logits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise a ValueError unless `got` and `want` `[n, vocab]` are equal but for rounding."""
    tolerance = _TOLERANCE.get(want.dtype, _TOLERANCE_16)
    got, want = got.double(), want.double()
    spread = (want - want.mean(-1, keepdim=True)).norm(dim=-1)
    error = (got - want).norm(dim=-1)
    for rows in torch.arange(len(want), device=want.device).split(_STEPS):
        worst = float((error[rows] - tolerance * spread[rows]).median())
        if not worst <= 0:
            share = float((error[rows] / spread[rows]).median())
            raise ValueError(
                f"`model`: {name} gives other logits with these ops than with eager attention (by {share:.0%} of their "
                "spread): its layers do something that transformers' attention interface does not express"
            )


class _DecoderCalls:
    """Watches which module of a model takes the tokens: the first model inside it that is called."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.inner = [(name, m) for name, m in model.named_modules() if name and isinstance(m, PreTrainedModel)]
        self.first: str | None = None
        self.output: Any = None

    def __enter__(self) -> _DecoderCalls:
        self.hooks = [m.register_forward_pre_hook(lambda *_, name=name: self._enter(name)) for name, m in self.inner]
        self.hooks += [m.register_forward_hook(lambda *a, name=name: self._leave(name, a[-1])) for name, m in self.inner]
        return self

    def __exit__(self, *_exception: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _enter(self, name: str) -> None:
        self.first = name if self.first is None else self.first

    def _leave(self, name: str, output: Any) -> None:
        if name == self.first:
            self.output = output


class _TableReads(TorchDispatchMode):
    """Finds the table whose rows are read by position: learned or sinusoidal embeddings, which end somewhere."""

    def __init__(self, positions: torch.Tensor, record: _Recorder) -> None:
        super().__init__()
        self.positions, self.record = positions, record
        self.rows: int | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.record.attends:
            for table, dim, index in _reads(func, args):
                self._look(table.shape[dim], index)
        return func(*args, **(kwargs or {}))

    def _look(self, rows: int, index: torch.Tensor) -> None:
        if index.dtype not in (torch.int64, torch.int32):
            return
        values = index.unique()
        if values.shape == self.positions.shape:
            first = int(values[0] - self.positions[0])  # some tables begin with rows for padding
            if first >= 0 and torch.equal(values, self.positions + first):
                self.rows = min(rows - first, self.rows or rows)


def _reads(func, args):
    """`(table, dim, index)` of every look-up of `func(*args)`."""
    aten = torch.ops.aten
    if func is aten.embedding.default:
        return [(args[0], 0, args[1])]
    if func in (aten.index_select.default, aten.gather.default):
        return [(args[0], args[1], args[2])]
    if func is aten.index.Tensor:
        return [(args[0], dim, index) for dim, index in enumerate(args[1]) if index is not None]
    return []
