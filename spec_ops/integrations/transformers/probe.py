"""What a transformers model caches, and whether it can run on these ops: a few tokens are run through it to find out.

Configurations name sizes in many ways, and do not say what a forward does with its cache, so the model itself is asked. The
tokens go through it twice: with eager attention and no cache, and in two chunks with a paged cache. What a layer hands to its
attention gives the shapes. Logits that differ show that the model does something that the attention interface does not express.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from spec_ops.integrations.transformers.experts import using_experts
from spec_ops.integrations.transformers.merging import SiblingLinears
from spec_ops.integrations.transformers.parts import cache_argument
from spec_ops.models.checkpoint import MACHINE_ERRORS
from spec_ops.models.config import LayerAttention
from spec_ops.models.paged import PagedAttention, PagedKVCache, refuse_autocast

_CHUNKS = (5, 3)  # tokens of the two forwards with a cache
_LENGTH = sum(_CHUNKS)
# Largest share of the logits' spread that rounding may move: experts may also be chosen differently in 16 bits.
_TOLERANCE = {torch.float32: 0.01, torch.float64: 1e-6}
_TOLERANCE_16 = 0.25


class Argument(NamedTuple):
    """The argument that a model came in, for messages: `str` gives "where: `name`"."""

    where: str
    name: str

    def __str__(self) -> str:
        return f"{self.where}: `{self.name}`"

    def part(self, module: str) -> str:
        """The same for a module inside the model; "" is the model itself."""
        return f"{self.where}: `{self.name}{module and '.'}{module}`"


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
        attention: of each layer.
        tokens: `[n]` int64, the tokens that were run.
        logits: `[n, vocab]`, what eager attention gives for them.
        decoder: name of the module that takes the tokens.
        output: type of that module's output.
        table: rows of the table in which the model looks positions up; None if it has none.
        siblings: names of linear layers that read one value.
        rowwise: those that are divided among processes, and whose output is the product with the rows of this one.
    """

    spec: CacheSpec
    attention: tuple[LayerAttention, ...]
    tokens: torch.Tensor
    logits: torch.Tensor
    decoder: str
    output: type
    table: int | None
    siblings: tuple[tuple[str, ...], ...]
    rowwise: frozenset[str]


class StepCache(Cache):
    """What a model gets as its cache in one step of a round. It holds nothing, and hands every layer's call to `attention`."""

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
        self.kinds: dict[int, LayerAttention] = {}
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
            self.kinds[layer] = _kind(call)
            spec = CacheSpec((self.rows[layer],), 0)
            self.pages[layer] = PagedKVCache(spec, 1, _LENGTH, dtype=call.query.dtype, device=device)
        step = extend_from_start(self.pages[layer], length, self.start, backend="reference")
        out = append_and_attend(step, call._replace(layer=0), len(self.rows[layer]) == 1)
        self.attends = False
        return out


def _kind(call: LayerCall) -> LayerAttention:
    width = call.states[0].shape[-1] if is_latent(call) else call.value.shape[-1]
    window, sinks, softcap = (call.options[name] for name in ("window_left", "sinks", "softcap"))
    return LayerAttention(call.query.shape[1], width, window >= 0, sinks is not None, softcap > 0)


def extend_from_start(cache: PagedKVCache, length: int, start: int = 0, *, backend: str = "auto") -> PagedAttention:
    """An extend of one row that writes slots `[start, start + length)` of a cache of one page."""
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
def probe(model: PreTrainedModel, argument: Argument, own_experts: dict[str, str | None] | None = None) -> Probed:
    """Run a few tokens through `model`.

    Args:
        model: a causal language model of transformers with `attn_implementation="spec_ops"`.
        argument: what it is called in messages.
        own_experts: its own experts implementations, if it has others now.

    Raises:
        ValueError: the model cannot run on these ops; the message says which part of it.
        RuntimeError: autocast is enabled.
    """
    if model.device.type == "meta":
        raise ValueError(f"{argument} must have its weights loaded, got {type(model).__name__} on the device meta")
    refuse_autocast(argument.where, model.device)
    config = model.config.get_text_config()
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{argument} must be a decoder-only language model, got the encoder-decoder {name}")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{argument} must attend through transformers' attention interface; {name} does not")
    if config._attn_implementation != NAME:
        raise ValueError(
            f'{argument} must be loaded with attn_implementation="{NAME}" (or switched by `model.set_attn_implementation`), '
            f"got {config._attn_implementation!r}"
        )
    if model.training:
        raise ValueError(f"{argument} must be in evaluation mode: call `model.eval()`")
    types = getattr(config, "layer_types", None)
    if unknown := sorted(set(types or ()) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"{argument}: layers must be of full or sliding attention, {name} has {unknown}")
    tokens = _tokens(model, argument)
    record, logits, table = _run(model, tokens, argument)
    layers = config.num_hidden_layers
    if silent := sorted(set(range(layers)) - set(record.rows)):
        raise ValueError(f"{argument}: layers {silent} of {name} do not attend through the attention interface")
    kinds = types or ["sliding_attention" if _slides(config) else "full_attention"] * layers
    for layer, kind in enumerate(kinds[:layers]):
        if (kind == "sliding_attention") != (record.windows[layer] >= 0):
            window = record.windows[layer] + 1
            raise ValueError(f"{argument}: layer {layer} of {name} is {kind}, but the attention gets the window {window}")
    with attending(model, "eager"), nullcontext() if own_experts is None else using_experts(model, own_experts):
        calls, linears = _DecoderCalls(model), SiblingLinears(model)
        with calls, linears:
            positions = torch.arange(_LENGTH, device=tokens.device)[None]
            want = model(input_ids=tokens[None], position_ids=positions, use_cache=False).logits[0]
    check_logits(name, logits, want, argument)
    if calls.first is None or calls.output is None or not hasattr(calls.output, "last_hidden_state"):
        raise ValueError(f"{argument}: {name} has no decoder module that turns tokens into hidden states")
    spec = CacheSpec(tuple(record.rows[layer] for layer in range(layers)), logits.shape[-1])
    kinds_of = tuple(record.kinds[layer] for layer in range(layers))
    return Probed(spec, kinds_of, tokens, want, calls.first, type(calls.output), table, linears.groups(), linears.rowwise)


def _slides(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _tokens(model: PreTrainedModel, argument: Argument) -> torch.Tensor:
    """`[_LENGTH]` ids from all over the vocabulary. Padding and embeddings of zeros are left out: they hide differences."""
    embed = model.get_input_embeddings()
    vocab, config = model.config.get_text_config().vocab_size, model.config.get_text_config()
    names = [(config, kind) for kind in ("pad", "bos", "eos")] + [(model.config, kind) for kind in ("image", "video", "audio")]
    found = [getattr(owner, f"{kind}_token_id", None) for owner, kind in names]
    # Some have several: Llama 3 has a list of end tokens.
    special = {token for ids in found for token in (ids if isinstance(ids, (list, tuple)) else [ids])}
    # From the end: consecutive ids in a small vocabulary are not mistaken for positions.
    ids = [
        token
        for token in torch.linspace(vocab - 1, 0, min(vocab, 8 * _LENGTH), device="cpu").long().tolist()
        if token not in special
    ]
    candidates = torch.tensor(ids, device=model.device)
    seen = candidates[embed(candidates).flatten(1).ne(0).any(-1)]
    if not len(seen):
        raise ValueError(f"{argument}: the embeddings of {type(model).__name__} are zero: are its weights loaded?")
    spread = torch.linspace(0, len(seen) - 1, min(len(seen), _LENGTH), device=seen.device).long()
    return seen[spread].repeat(-(-_LENGTH // len(spread)))[:_LENGTH]


def _run(model: PreTrainedModel, tokens: torch.Tensor, argument: Argument) -> tuple[_Recorder, torch.Tensor, int | None]:
    """Run `tokens` in two chunks with a paged cache. Returns what was recorded, the logits, and the rows of the table of
    positions."""
    name, record = type(model).__name__, _Recorder()
    positions = torch.arange(_LENGTH, device=tokens.device)
    logits, reads = [], []
    for length in _CHUNKS:
        part = slice(record.start, record.start + length)
        reads.append(_TableReads(positions[part], record))
        try:
            with reads[-1]:
                step = {"input_ids": tokens[None, part], "position_ids": positions[None, part], cache_argument(model): record}
                logits.append(model(**step, use_cache=True).logits[0])
        except NoUpdate as error:
            raise ValueError(
                f"{argument}: {error.layer} of {name} does not hand its own keys and values to the cache just before it "
                "attends: it borrows another layer's, attends twice to the same ones, or numbers its layers in another way"
            ) from error
        except MACHINE_ERRORS:
            raise
        except Exception as error:
            raise ValueError(
                f"{argument}: {name} does not run with a paged cache and attention: {type(error).__name__}: {error}"
            ) from error
        record.start += length
    return record, torch.cat(logits), reads[-1].rows


def check_logits(name: str, got: torch.Tensor, want: torch.Tensor, argument: Argument) -> None:
    """Raise a ValueError unless `got` and `want`, both `[n, vocab]`, are equal up to rounding."""
    tolerance = _TOLERANCE.get(want.dtype, _TOLERANCE_16)
    got, want = got.double(), want.double()
    spread = (want - want.mean(-1, keepdim=True)).norm(dim=-1)
    error = (got - want).norm(dim=-1)
    for rows in torch.arange(len(want), device=want.device).split(_CHUNKS):
        worst = float((error[rows] - tolerance * spread[rows]).median())
        if not worst <= 0:
            share = float((error[rows] / spread[rows]).median())
            raise ValueError(
                f"{argument}: {name} gives other logits with these ops than with eager attention (by {share:.0%} of their "
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
    """Finds the table whose rows are read by position: learned or sinusoidal embeddings, which have a last position."""

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
        # A DTensor's own look-up follows; before it DTensor asks fakes for its shape.
        if type(index) is not torch.Tensor or index.dtype not in (torch.int64, torch.int32):
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
