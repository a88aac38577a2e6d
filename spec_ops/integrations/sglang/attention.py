"""Attention of one SGLang engine by our ops: what a forward attends, and the calls of its layers.

Knows the shapes of SGLang's `ForwardBatch`, pools and `RadixAttention`, and imports none of it: `backend.py` gives it SGLang's
base class. `L` is a request's committed length, `D` the tokens that are verified.

| forward | `fb.seq_lens` | attended | queries per request | tables of a CUDA graph are written |
|---|---|---|---|---|
| decode | own token included | `seq_lens` | 1 | before each replay |
| verify | `L` | `L + D` | `D` | in the graph |
| draft extend | `L + D` | `seq_lens` | `D` | before each replay |
| extend (prefill) | all tokens | `seq_lens` | ragged | never captured |

Decode and draft extend write before the replay since SGLang 0.5.14 tells its scheduler that they have read `req_to_token` by
then; for verify it waits until the graph has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spec_ops import ops
from spec_ops.integrations.sglang import ahead
from spec_ops.integrations.sglang.limits import check_inputs


class Attended(NamedTuple):
    """What one forward attends: the arguments that all layers' calls share.

    Attributes:
        op: `"draft_decode"`, `"target_verify"`, `"draft_extend"` or `"extend"`.
        block_tables: `[bs, max_pages]` int32. seq_lens: `[bs]` int32.
        q_len: queries per request, the most of them if ragged.
        q_indptr: `[bs + 1]` int32 of ragged queries.
        tree_mask: `[bs, q_len]` int64 over the last `mask_len` positions.
    """

    op: str
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    q_len: int
    q_indptr: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    mask_len: int | None = None


def table_width(req_to_token: torch.Tensor, page_size: int) -> int:
    """Pages of a row: SGLang's rows are wider than the model's context."""
    return -(-req_to_token.shape[1] // page_size)


class Lengths:
    """Lengths attended and page tables of forwards whose queries stand `ahead` tokens past `fb.seq_lens`, one row each.

    Args:
        req_to_token: `[request slots, tokens]` int32. page_size: tokens.
        ahead: tokens, ascending: the table of the last row serves all.
    """

    def __init__(self, req_to_token: torch.Tensor, page_size: int, ahead: list[int]) -> None:
        self._req_to_token, self._page_size = req_to_token, page_size
        self._ahead = torch.tensor(ahead, dtype=torch.int32, device=req_to_token.device)[:, None]
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None

    def _new(self, bs: int) -> tuple[torch.Tensor, torch.Tensor]:
        width, device = table_width(self._req_to_token, self._page_size), self._req_to_token.device
        tables = torch.zeros(bs, width, dtype=torch.int32, device=device)
        return tables, torch.zeros(len(self._ahead), bs, dtype=torch.int32, device=device)

    def keep(self, max_bs: int) -> None:
        """Memory for CUDA graphs of up to `max_bs` requests."""
        self._memory = self._new(max_bs)

    def kept(self, bs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables `[bs, max_pages]` and lengths `[rows, bs]` in that memory."""
        assert self._memory is not None, "init_cuda_graph_state comes first"
        tables, lens = self._memory
        return tables[:bs], lens[:, :bs]

    def write(self, tables: torch.Tensor, lens: torch.Tensor, fb: Any) -> None:
        """No sync, no allocation: in a graph or before it. A replay's tensors may be buffers of the largest batch."""
        bs = lens.shape[1]
        torch.add(fb.seq_lens[:bs], self._ahead, out=lens)
        ops.page_table(self._req_to_token, fb.req_pool_indices[:bs], lens[-1], self._page_size, out=tables)

    def made(self, fb: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """New tables and lengths, for a forward without a graph."""
        tables, lens = self._new(fb.batch_size)
        self.write(tables, lens, fb)
        return tables, lens


class SpecOpsAttention:
    """The methods of SGLang's `AttentionBackend`.

    Args:
        runner: SGLang's `ModelRunner`.
        write_location: SGLang's `KVWriteLoc`.
    """

    needs_cpu_seq_lens = False  # no forward waits for lengths on the host

    def __init__(self, runner: Any, write_location: Callable[..., Any]) -> None:
        args = runner.server_args
        speculates = args.speculative_algorithm is not None
        self.device = runner.device
        self.page_size: int = runner.page_size
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.max_context_len: int = runner.model_config.context_len
        self.use_mla: bool = runner.use_mla_backend
        self.draft_tokens: int = args.speculative_num_draft_tokens if speculates else 1
        self.forward_metadata: Attended | None = None
        self._write_location = write_location
        own, verify = ([0], [self.draft_tokens])
        self._lengths = {
            "decode": Lengths(self.req_to_token, self.page_size, own),
            "verify": Lengths(self.req_to_token, self.page_size, verify),
            "draft_extend": Lengths(self.req_to_token, self.page_size, own),
        }
        # The tree's mask, bool [requests, D, D], into which SGLang builds it; a chain's is not read.
        self.is_tree = speculates and args.speculative_eagle_topk > 1
        self.verify_mask_rows: int = self.req_to_token.shape[0]
        cells = self.verify_mask_rows * self.draft_tokens**2 if speculates and not runner.is_draft_worker else 0
        self.verify_mask_buffer = torch.ones(cells, dtype=torch.bool, device=self.device) if cells else None
        ahead.start(runner)

    # Metadata

    def _kind(self, fb: Any) -> str | None:
        """None: nothing is attended (idle)."""
        mode = fb.forward_mode
        if mode.is_idle():
            return None
        if mode.is_decode_or_idle():
            return "decode"
        if mode.is_target_verify():
            return "verify"
        if mode.is_draft_extend_v2():
            return "draft_extend"
        if mode.is_extend():
            return "extend"
        raise NotImplementedError(f"spec_ops: SGLang's forward mode {mode} is not supported")

    def _uniform(self, kind: str, tables: torch.Tensor, lens: torch.Tensor) -> Attended:
        if kind == "decode":
            return Attended("draft_decode", tables, lens[0], 1)
        op = "target_verify" if kind == "verify" else "draft_extend"
        attended = Attended(op, tables, lens[0], self.draft_tokens)
        return attended._replace(tree_mask=self._tree_words(len(tables))) if kind == "verify" and self.is_tree else attended

    def _tree_words(self, bs: int) -> torch.Tensor:
        """`[bs, D]` int64 of the trees that SGLang built, made anew by each forward (in a graph: by each replay)."""
        nodes = self.draft_tokens
        assert self.verify_mask_buffer is not None, "a draft's backend verifies nothing"
        return ops.qlen_mask_to_tree_mask(self.verify_mask_buffer[: bs * nodes * nodes].view(bs, nodes, nodes))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """For a forward without a graph."""
        kind = self._kind(forward_batch)
        if kind is None:
            self.forward_metadata = None
        elif kind == "extend":
            self.forward_metadata = self._ragged(forward_batch)
        else:
            self.forward_metadata = self._uniform(kind, *self._lengths[kind].made(forward_batch))

    def _ragged(self, fb: Any) -> Attended:
        bs = fb.batch_size
        tables, lens = self._lengths["decode"].made(fb)
        q_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(fb.extend_seq_lens[:bs], 0, out=q_indptr[1:])
        return Attended("extend", tables, lens[0], max(1, *map(int, fb.extend_seq_lens_cpu)), q_indptr)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for lengths in self._lengths.values():
            lengths.keep(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        kind = self._kind(forward_batch)
        if kind is None:
            return
        if kind == "extend":
            raise NotImplementedError("spec_ops: a ragged extend in a CUDA graph is not supported: disable prefill CUDA graphs")
        lengths = self._lengths[kind]
        tables, lens = lengths.kept(forward_batch.batch_size)
        if kind != "verify":
            lengths.write(tables, lens, forward_batch)
        if in_capture and not (kind == "verify" and self.is_tree):  # a tree's words are part of the graph
            self.forward_metadata = self._uniform(kind, tables, lens)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if self._kind(forward_batch) == "verify":
            lengths = self._lengths["verify"]
            tables, lens = lengths.kept(forward_batch.batch_size)
            lengths.write(tables, lens, forward_batch)
            self.forward_metadata = self._uniform("verify", tables, lens)

    def get_verify_buffers_to_fill_after_draft(self) -> list[torch.Tensor | None]:
        """Mask and positions (SGLang before 0.5.23); `hooks.py` tells SGLang's tree kernel this mask's layout."""
        return [self.verify_mask_buffer, None]

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing that was planned depends on them."""

    # Layers

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _forward(
        self, q, k, v, layer, fb, save_kv_cache: bool, sinks=None, q_rope=None, k_rope=None, **others: Any
    ) -> torch.Tensor:
        """`[tokens, heads * v_head_dim]` of queries `[tokens, heads * dim]`."""
        if getattr(fb, "mm_inputs", None):
            check_inputs(layer, fb)
        if given := [name for name, value in others.items() if value is not None]:
            raise NotImplementedError(f"spec_ops: SGLang passed {', '.join(given)} to attention, which is not supported")
        if save_kv_cache and k is not None:
            self._write_kv(layer, fb.out_cache_loc, k, v, k_rope)
        heads = layer.tp_q_head_num
        if q.dim() == 4:  # Gemma 3's, [1, tokens, heads, dim]
            q = q[0]
        q = q.view(q.shape[0], heads, -1)
        if q_rope is not None:
            q = torch.cat([q, q_rope.view(q.shape[0], heads, -1)], -1)
        attended = self.forward_metadata
        assert attended is not None, "init_forward_metadata comes before the layers"
        options: dict[str, Any] = {
            "scale": layer.scaling, "window_left": _window(layer), "softcap": float(layer.logit_cap or 0.0), "sinks": sinks,
        }  # fmt: skip
        if attended.q_indptr is not None:
            queries: tuple = (attended.q_indptr, attended.q_len)
        else:
            q, queries = q.view(-1, attended.q_len, *q.shape[1:]), ()
            if attended.tree_mask is not None:
                options |= {"tree_mask": attended.tree_mask, "mask_len": attended.mask_len}
        tables, lens = attended.block_tables, attended.seq_lens
        out = self._attend(attended.op, q, layer, (tables, lens, *queries), options)
        return out.reshape(-1, heads * layer.v_head_dim)

    def _attend(self, op: str, q: torch.Tensor, layer: Any, where: tuple, options: dict[str, Any]) -> torch.Tensor:
        if self.use_mla:
            buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            cache = buffer.view(-1, self.page_size, buffer.shape[-1])
            if _is_fp8(cache):
                options["kv_scale"] = _scale(layer, "k_scale")
            return getattr(ops, f"mla_{op}")(q, cache, layer.v_head_dim, *where, **options)
        k_cache, v_cache = map(self._pages, self.token_to_kv_pool.get_kv_buffer(layer.layer_id))
        if _is_fp8(k_cache):
            options |= {"k_scale": _scale(layer, "k_scale"), "v_scale": _scale(layer, "v_scale")}
        return getattr(ops, f"mha_{op}")(q, k_cache, v_cache, *where, **options)

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """`[pages, page_size, heads, dim]`, a view: of `[slots, heads, dim]`, or of pages with heads before tokens."""
        if buffer.dim() == 4:
            return buffer.transpose(1, 2)
        return buffer.view(-1, self.page_size, *buffer.shape[1:])

    def _write_kv(self, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: Any) -> None:
        pool = self.token_to_kv_pool
        if not self.use_mla:
            pool.set_kv_buffer(layer, self._write_location(slots, None), k, v, layer.k_scale, layer.v_scale)
            return
        if layer.k_scale is not None and _is_fp8(pool.get_key_buffer(layer.layer_id)):  # this pool divides by no scale
            k, k_rope = k / layer.k_scale, None if k_rope is None else k_rope / layer.k_scale
        if k_rope is not None:
            pool.set_mla_kv_buffer(layer, slots, k, k_rope)
        else:
            pool.set_kv_buffer(layer, self._write_location(slots, None), k, v)


def _window(layer: Any) -> int:
    """SGLang says -1, 0 or None for none."""
    window = layer.sliding_window_size
    return -1 if window is None or window <= 0 else int(window)


def _is_fp8(cache: torch.Tensor) -> bool:
    return cache.dtype == torch.float8_e4m3fn


def _scale(layer: Any, name: str) -> float:
    """Of an fp8 cache, on the host; without one, what SGLang writes is not scaled."""
    if getattr(layer, name) is None:
        return 1.0
    value = getattr(layer, f"{name}_float", None)
    return float(getattr(layer, name) if value is None else value)
