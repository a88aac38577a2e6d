"""`SpecCache`: a transformers `Cache` over paged KV with device lengths."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from spec_ops._numbers import integer
from spec_ops.integrations.transformers.attention import LayerCall, append_and_attend, leave_note
from spec_ops.integrations.transformers.probe import Argument, probe
from spec_ops.models.paged import DEFAULT_PAGE_SIZE, PagedAttention, PagedKVCache


class SpecCacheLayer(CacheLayerMixin):
    """One layer's pages as a cache layer of transformers. All layers share the lengths of their `SpecCache`."""

    is_compileable, is_sliding, is_croppable = True, False, True

    def __init__(self, cache: SpecCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.keys, self.values = cache.pool.layer(index)[0], cache.pool.layer(index)[-1]
        self.batch_size, self.is_initialized = cache._rows, True

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to do: pages are allocated by `SpecCache`."""

    def update(self, key_states, value_states, *args, **kwargs):
        return self._cache.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.max_seq_len, 0

    def get_seq_length(self) -> Any:  # a tensor, as transformers' own static layers return
        return self._cache.columns

    def get_max_length(self) -> int:
        return self._cache.max_seq_len


class SpecCache(Cache):
    """Static paged KV for `attn_implementation="spec_ops"`: pass it as `past_key_values`.

    Each row of a batch has a length of its own, on the device. Padding by a 2-D `attention_mask`, on the left or the right,
    takes no room: a row's real tokens lie in consecutive slots, and the outputs of padded tokens mean nothing. The mask must
    cover all columns so far, as `generate` passes it. One that hides tokens already cached is refused.

    Args:
        model: causal language model with `attn_implementation="spec_ops"`; a few tokens are run through it.
        batch_size: number of rows of every call.
        max_seq_len: most tokens that a row may hold, the padding of a single call included.
        page_size: tokens per page, 1 to 128.

    Attributes:
        lengths: `[bs]` int32, real tokens cached per row.
        columns: 0-dim int64, columns seen, padding included (what transformers calls the sequence length).
        block_tables: `[bs, pages]` int32, the pages of each row.

    Raises:
        ValueError: naming what of the model or the sizes does not fit.
    """

    def __init__(
        self, model: PreTrainedModel, batch_size: int, max_seq_len: int, *, page_size: int = DEFAULT_PAGE_SIZE
    ) -> None:
        batch_size = integer("SpecCache", "batch_size", batch_size, 1)
        max_seq_len = integer("SpecCache", "max_seq_len", max_seq_len, 1)
        page_size = integer("SpecCache", "page_size", page_size, 1, 128)
        self.spec = probe(model, Argument("SpecCache", "model")).spec
        weight: torch.Tensor = model.get_input_embeddings().get_parameter("weight")
        pages = -(-max_seq_len // page_size)
        # Not `batch_size` or `max_batch_size`: properties of `Cache` in some versions.
        self._rows, self.max_seq_len, self.page_size = batch_size, max_seq_len, page_size
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
            self.pool = PagedKVCache(self.spec, batch_size * pages, page_size, dtype=weight.dtype, device=weight.device)
            tables = torch.arange(batch_size * pages, dtype=torch.int32, device=weight.device)
            self.block_tables = tables.view(batch_size, pages)
            self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=weight.device)
            self.columns = torch.zeros((), dtype=torch.int64, device=weight.device)
        for tensor in (self.block_tables, self.lengths, self.columns):
            torch._dynamo.mark_static_address(tensor)
        self._step: PagedAttention | None = None
        self._new: torch.Tensor | None = None
        super().__init__(layers=[SpecCacheLayer(self, layer) for layer in range(len(self.spec.kv_rows))])

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        leave_note(self, layer_idx, key_states, value_states)
        return key_states, value_states

    def attend(self, call: LayerCall) -> torch.Tensor:
        if call.layer == 0:
            self._begin(call)
        if self._step is None:
            raise RuntimeError("SpecCache: layer 0 must attend first in every forward")
        out = append_and_attend(self._step, call, self.spec.latent[call.layer])
        if call.layer == len(self.spec.kv_rows) - 1:
            assert self._new is not None
            self.lengths += self._new
            self.columns += call.query.shape[2]
            self._step = self._new = None
        return out

    def _begin(self, call: LayerCall) -> None:
        """Compute the slots and lengths of a forward's tokens, which are the same for every layer."""
        bs, _, q_len, _ = call.query.shape
        if bs != self._rows:
            raise ValueError(f"SpecCache: made for batch size {self._rows}, got {bs}")
        layers, config = len(self.spec.kv_rows), getattr(call.module, "config", None)
        given = getattr(config, "num_hidden_layers", layers)
        if given != layers:  # lengths are counted at the last one
            raise ValueError(f"SpecCache: made for a model of {layers} layers, got one of {given}")
        row = torch.arange(q_len, device=self.lengths.device)
        real = torch.ones_like(row, dtype=torch.bool).expand(bs, -1) if call.columns is None else call.columns >= 0
        first = torch.where(real, row, q_len).amin(-1)  # columns of padding before a row's tokens
        position = self.lengths[:, None] + row - first[:, None]
        seq_lens = (self.lengths + q_len - first).to(torch.int32)
        _require(
            (seq_lens <= self.max_seq_len).all(),
            f"SpecCache: the tokens must fit max_seq_len={self.max_seq_len}; make the cache larger or call `reset()`",
        )
        if call.columns is not None:
            _require(
                ((call.columns == position) | ~real).all(),
                "SpecCache: `attention_mask` must cover every column since the cache was empty, show every cached token, and "
                "pad a row's new tokens on the left or the right only",
            )
        page = (position // self.page_size).clamp(0, self.block_tables.shape[1] - 1).long()
        slots = self.block_tables.gather(1, page) * self.page_size + position % self.page_size
        self._new = real.sum(-1, dtype=torch.int32)
        step: dict[str, Any] = {"step": "draft_decode"}
        # Padding after the tokens is written too, to slots that the next tokens overwrite: every slot attended holds numbers.
        slots = torch.where(row >= first[:, None], slots, -1)
        if q_len > 1:
            starts = torch.arange(bs + 1, dtype=torch.int32, device=row.device) * q_len
            step = {"step": "extend", "q_indptr": starts, "max_q_len": q_len}
        self._step = PagedAttention(self.pool, block_tables=self.block_tables, seq_lens=seq_lens, slots=slots, **step)

    def rollback(self, count: torch.Tensor) -> None:
        """Forget the last tokens of each row, without a sync with the host.

        The columns of forgotten tokens stay: an `attention_mask` has to mark them as padding from then on.

        Args:
            count: `[bs]` integers on the device, how many tokens of each row, in [0, length]. On CUDA, a count out of
                range is a device-side assertion.

        Raises:
            ValueError: `count` has another shape or dtype, or on the CPU is out of range.
        """
        if count.shape != self.lengths.shape or count.is_floating_point():
            got = f"{count.dtype} of shape {tuple(count.shape)}"
            raise ValueError(f"rollback: `count` must be integers of shape [{self._rows}], got {got}")
        in_range = ((count >= 0) & (count <= self.lengths)).all()
        _require(in_range, "rollback: `count` must be in [0, length] for every row", sync=False)
        self.lengths -= count.to(self.lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns of every row. As in transformers, the number of tokens is negative."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop: `tokens_to_remove` must be negative or 0, got {tokens_to_remove}")
        self.rollback(torch.full_like(self.lengths, -tokens_to_remove))
        self.columns += tokens_to_remove

    def reset(self) -> None:
        """Empty the cache. Its memory is kept."""
        self.lengths.zero_()
        self.columns.zero_()
        self._step = self._new = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("SpecCache: beam search (`num_beams` > 1) is not supported")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("SpecCache: repeating a batch is not supported; repeat `input_ids` and make a cache for it")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError("SpecCache: selecting rows is not supported")


def _require(condition: torch.Tensor, message: str, sync: bool = True) -> None:
    """Raise a ValueError unless `condition` holds. In a compiled graph, or on CUDA without `sync`, assert on the device."""
    if torch.compiler.is_compiling() or (condition.is_cuda and not sync):
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
