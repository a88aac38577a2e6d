"""Stand-ins for FlashInfer and tokenspeed_mla that bind every call to a release's recorded signature, check what the real
functions require of their arguments, and compute what they document, densely in float64.

So a CPU test that runs a backend through them sees a renamed argument, a wrong layout, a missing scale or a bad page id. What
the real kernels compute is tested on a GPU (`test_flashinfer.py`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction

from spec_ops.backends import padding, workspace

RECORDED = json.loads((Path(__file__).parent / "data" / "flashinfer_signatures.json").read_text())
FLASHINFER = sorted(package for package in RECORDED if package.startswith("flashinfer"))
TOKENSPEED = sorted(package for package in RECORDED if package.startswith("tokenspeed"))
FP8 = torch.float8_e4m3fn


def interpret_padding(monkeypatch) -> None:
    """Run the kernels of `padding.py` in Triton's interpreter, where there is no GPU."""
    if not torch.cuda.is_available():
        for name in ("prepare_kernel", "clear_kernel"):
            monkeypatch.setattr(padding, name, InterpretedFunction(getattr(padding, name).fn))


def own_scratch(monkeypatch) -> None:
    """Buffers of one test: zeros that the system writes when they are looked at. PyTorch would write all 128 MiB of each."""
    monkeypatch.setattr(workspace, "_buffers", {})
    monkeypatch.setattr(
        workspace, "zeros_outside_graph_pools", lambda device, num_bytes: torch.from_numpy(np.zeros(num_bytes, np.uint8))
    )


def signature(package: str, path: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {RECORDED[package][path]}: None"))


def real_signature(path: str) -> inspect.Signature:
    """Of the installed package; `path` as in the records (`"module:function"` or `"module:Class.method"`)."""
    module, symbol = path.split(":")
    found = importlib.import_module(module)
    for name in symbol.split("."):
        found = getattr(found, name)
    return inspect.signature(found)


def attend(q, keys, values, visible, scale: float, sinks=None, softcap: float = 0.0) -> torch.Tensor:
    """One request: `q [n, heads, d]`, `keys`, `values [m, kv_heads, *]`, `visible [n, m]`; a row that sees nothing is NaN."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, q.shape[0], 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    weights = logits.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, torch.where(weights.sum((0, 1))[:, None, None] == 0, 0.0, values))


def causal(q_len: int, kv_len: int, window_left: int) -> torch.Tensor:
    distance = (kv_len - q_len + torch.arange(q_len))[:, None] - torch.arange(kv_len)
    return (distance >= 0) & ((distance <= window_left) if window_left >= 0 else True)


def rows_of(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    return cache[pages.long()].flatten(0, 1)[:length]


def check_tables(block_tables, seq_lens, caches, q_lens) -> None:
    """What the kernels take on trust: everything dense, every page id valid, at least as many keys as queries."""
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert block_tables.is_contiguous()
    assert seq_lens.is_contiguous()
    page_size = caches[0].shape[1]
    assert ((block_tables >= 0) & (block_tables < caches[0].shape[0])).all(), "page id out of range"
    assert (seq_lens >= torch.as_tensor(q_lens)).all(), "fewer keys than queries"
    assert int(seq_lens.max()) <= block_tables.shape[1] * page_size, "length past the page table"


def check_scratch(buffer, semaphores: int = 0) -> None:
    assert buffer.dim() == 1
    assert buffer.is_contiguous()
    assert buffer.element_size() == 1
    assert buffer.numel() >= 64 << 20
    assert not buffer[: max(semaphores, 1)].any(), "semaphores must start at zero"


def check_trtllm(query, cache, out, skip_softmax_threshold_scale_factor) -> None:
    assert query.dtype == cache.dtype
    assert out.dtype in (query.dtype, torch.float16, torch.bfloat16, torch.float32), "Unsupported out_dtype"
    assert skip_softmax_threshold_scale_factor is None or skip_softmax_threshold_scale_factor > 0  # 0 means none


def append_rows(rows, cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len) -> None:
    """Every row is written, whatever its request and position; nothing is converted."""
    n = rows.shape[0]
    assert rows.dtype == cache.dtype, "bytes are reinterpreted"
    assert rows.shape[1:] == cache.shape[2:]
    assert batch_indices.shape == positions.shape == (n,)
    assert kv_indptr.shape == (kv_last_page_len.shape[0] + 1,)
    for tensor in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert ((batch_indices >= 0) & (batch_indices < len(kv_last_page_len))).all(), "a batch index of -1 is out of bounds"
    page_size = cache.shape[1]
    assert ((kv_indices >= 0) & (kv_indices < cache.shape[0])).all()
    assert ((kv_last_page_len > 0) & (kv_last_page_len <= page_size)).all()
    written: dict[tuple[int, int], torch.Tensor] = {}
    for row, request, position in zip(rows, batch_indices.tolist(), positions.tolist(), strict=True):
        held = int(kv_indptr[request + 1] - kv_indptr[request] - 1) * page_size + int(kv_last_page_len[request])
        assert 0 <= position < held
        place = (int(kv_indices[int(kv_indptr[request]) + position // page_size]), position % page_size)
        assert torch.equal(written.setdefault(place, row), row), "two values for one slot: which is written is chance"
        cache[place] = row


class Fakes:
    """One release's stand-ins; `calls` holds `(path, arguments)` of every call."""

    def __init__(self, packages: list[str], installed: bool = False) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.signatures = {}
        for package in packages:
            for path in RECORDED[package]:
                self.signatures[path] = real_signature(path) if installed else signature(package, path)

    def bound(self, path: str, function: Callable) -> Callable:
        found = self.signatures[path]

        def call(*args, **kwargs):
            arguments = found.bind(*args, **kwargs).arguments
            self.calls.append((path, dict(arguments)))
            return function(**{k: v for k, v in arguments.items() if k != "self"})

        call.__signature__ = found  # type: ignore[attr-defined]
        return call

    def install(self, monkeypatch) -> Fakes:
        modules: dict[str, dict[str, Any]] = {
            "flashinfer": {},
            "flashinfer.decode": {
                "trtllm_batch_decode_with_kv_cache": self.decode,
                "xqa_batch_decode_with_kv_cache": lambda **_: None,
            },
            "flashinfer.prefill": {
                "trtllm_batch_context_with_kv_cache": self.context,
                "BatchPrefillWithPagedKVCacheWrapper": Prefill,
            },
            "flashinfer.page": {
                "append_paged_kv_cache": self.append_paged_kv_cache,
                "append_paged_mla_kv_cache": self.append_paged_mla_kv_cache,
            },
            "flashinfer.mla": {"trtllm_batch_decode_with_kv_cache_mla": self.mla, "BatchMLAPagedAttentionWrapper": PlannedMLA},
            "tokenspeed_mla": {"tokenspeed_mla_decode": self.tokenspeed},
        }
        for name, members in modules.items():
            module = types.ModuleType(name)
            for symbol, function in members.items():
                path = f"{name}:{symbol}"
                if f"{path}.run" in self.signatures:
                    setattr(module, symbol, self.bound_class(path, function))
                elif path in self.signatures:
                    setattr(module, symbol, self.bound(path, function))
            monkeypatch.setitem(sys.modules, name, module)
        return self

    def bound_class(self, path: str, base: type) -> type:
        def method(name: str) -> Callable:
            found = self.signatures[f"{path}.{name}"]

            def call(instance, *args, **kwargs):
                arguments = dict(found.bind(instance, *args, **kwargs).arguments)
                del arguments["self"]
                self.calls.append((f"{path}.{name}", arguments))
                return getattr(base, name)(instance, **arguments)

            return call

        return type(base.__name__, (base,), {name: method(name) for name in ("__init__", "plan", "run")})

    def last(self, path: str) -> dict[str, Any]:
        return next(arguments for called, arguments in reversed(self.calls) if called == path)

    @staticmethod
    def decode(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
               window_left=-1, out=None, sinks=None, kv_layout="HND", backend="auto", q_len_per_req=1, mask=None,
               skip_softmax_threshold_scale_factor=None, multi_ctas_kv_counter_buffer=None):  # fmt: skip
        assert kv_layout == "NHD"
        assert backend in ("trtllm-gen", "xqa")
        assert isinstance(bmm1_scale, float)
        assert isinstance(bmm2_scale, float)
        k_cache, v_cache = kv_cache
        bs, q_len = seq_lens.shape[0], q_len_per_req
        assert query.is_contiguous()
        assert query.shape[0] == bs * q_len
        assert out.is_contiguous()
        assert out.shape == query.shape
        check_tables(block_tables, seq_lens, kv_cache, q_len)
        assert max_seq_len == block_tables.shape[1] * k_cache.shape[1]
        visible = [causal(q_len, int(n), window_left) for n in seq_lens]
        if backend == "xqa":
            check_scratch(workspace_buffer, 8 << 20)
            assert multi_ctas_kv_counter_buffer is None
            assert k_cache.stride() == v_cache.stride()
            assert query.dtype != FP8
            assert skip_softmax_threshold_scale_factor is None, "trtllm-gen only"
            if out.dtype == FP8:
                assert k_cache.dtype == FP8, "KV cache must be fp8 when output is fp8"
            else:
                assert out.dtype == query.dtype, "Output and query must have the same dtype"
            if q_len > 1:
                words = 2 * -(-q_len // 32)
                assert mask is not None, "required with several queries"
                assert mask.dtype == torch.uint16
                assert mask.shape == (bs, q_len, words)
                assert mask.is_contiguous()
                bits = (mask.to(torch.int32)[..., None] >> torch.arange(16)) & 1
                bits = bits.flatten(2)[:, :, :q_len].bool()
                for b, seen in enumerate(visible):  # only the last columns are masked; a window cuts both
                    inside = causal(q_len, int(seq_lens[b]), window_left) if window_left >= 0 else torch.ones_like(seen)
                    seen[:] = inside
                    seen[:, -q_len:] = bits[b] & (inside[:, -q_len:])
            else:
                assert mask is None
        else:
            check_scratch(workspace_buffer)
            check_trtllm(query, k_cache, out, skip_softmax_threshold_scale_factor)
            if multi_ctas_kv_counter_buffer is not None:
                assert multi_ctas_kv_counter_buffer.dtype == torch.uint8
                assert multi_ctas_kv_counter_buffer.numel() >= 4 * bs * query.shape[1]
                assert not multi_ctas_kv_counter_buffer.any()
        for b in range(bs):
            n = int(seq_lens[b])
            keys, values = (rows_of(cache, block_tables[b], n) for cache in kv_cache)
            rows = slice(b * q_len, (b + 1) * q_len)
            out[rows] = attend(query[rows], keys, values.double() * bmm2_scale, visible[b], bmm1_scale, sinks).to(out.dtype)
        return out

    @staticmethod
    def context(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
                batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, kv_layout="HND", sinks=None,
                skip_softmax_threshold_scale_factor=None, multi_ctas_kv_counter_buffer=None):  # fmt: skip
        assert kv_layout == "NHD"
        check_scratch(workspace_buffer)
        q_lens = cum_seq_lens_q[1:] - cum_seq_lens_q[:-1]
        check_tables(block_tables, seq_lens, kv_cache, q_lens)
        assert batch_size == len(seq_lens)
        assert int(q_lens.max()) <= max_q_len
        assert torch.equal(cum_seq_lens_kv[1:] - cum_seq_lens_kv[:-1], seq_lens)
        assert cum_seq_lens_kv.dtype == cum_seq_lens_q.dtype == torch.int32
        check_trtllm(query, kv_cache[0], out, skip_softmax_threshold_scale_factor)
        for b in range(batch_size):
            n, rows = int(seq_lens[b]), slice(int(cum_seq_lens_q[b]), int(cum_seq_lens_q[b + 1]))
            keys, values = (rows_of(cache, block_tables[b], n) for cache in kv_cache)
            visible = causal(int(q_lens[b]), n, window_left)
            out[rows] = attend(query[rows], keys, values.double() * bmm2_scale, visible, bmm1_scale, sinks).to(out.dtype)
        return out

    @staticmethod
    def append_paged_kv_cache(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
                              kv_last_page_len, kv_layout="NHD"):  # fmt: skip
        assert kv_layout == "NHD"
        k_cache, v_cache = paged_kv_cache
        assert k_cache.stride() == v_cache.stride()
        for rows, cache in ((append_key, k_cache), (append_value, v_cache)):
            append_rows(rows, cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)

    @staticmethod
    def append_paged_mla_kv_cache(append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr,
                                  kv_last_page_len):  # fmt: skip
        assert (ckv_cache.shape[-1], kpe_cache.shape[-1]) == (512, 64)
        for rows, cache in ((append_ckv, ckv_cache), (append_kpe, kpe_cache)):
            append_rows(rows, cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)

    @staticmethod
    def mla(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
            max_seq_len, out=None, bmm1_scale=1.0, bmm2_scale=1.0, skip_softmax_threshold_scale_factor=None, backend="auto",
            multi_ctas_kv_counter_buffer=None):  # fmt: skip
        assert backend in ("trtllm-gen", "cute-dsl"), "auto raises on sm_90"
        assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) in ((128, 512, 64), (64, 256, 64))
        assert block_tables.shape[1] % max(1, 128 // kv_cache.shape[1]) == 0, "width must hold whole tiles of keys"
        if backend == "cute-dsl":
            assert workspace_buffer.dtype == torch.int8  # FlashInfer 0.6
            assert multi_ctas_kv_counter_buffer is None
            assert skip_softmax_threshold_scale_factor is None, "trtllm-gen only"
        check_scratch(workspace_buffer)
        return _absorbed(query, kv_cache, kv_lora_rank, block_tables, seq_lens, max_seq_len, out, bmm1_scale, bmm2_scale)

    @staticmethod
    def tokenspeed(query, kv_cache, workspace_buffer, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
                   softmax_scale, output_scale=1.0, out=None, is_var_seq=True, causal_mask=True, enable_pdl=False):  # fmt: skip
        assert workspace_buffer.dtype == torch.int8
        assert is_var_seq
        assert causal_mask
        assert query.shape[-1] == kv_lora_rank + qk_rope_head_dim
        check_scratch(workspace_buffer)
        return _absorbed(query, kv_cache, kv_lora_rank, block_tables, seq_lens, max_seq_len, out, softmax_scale, output_scale)


def _absorbed(query, kv_cache, rank, block_tables, seq_lens, max_seq_len, out, scale, output_scale):
    bs, q_len = query.shape[:2]
    assert query.dtype == kv_cache.dtype
    assert query.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (*query.shape[:-1], rank)
    assert isinstance(scale, float)
    assert isinstance(output_scale, float)
    check_tables(block_tables, seq_lens, (kv_cache,), q_len)
    assert max_seq_len == block_tables.shape[1] * kv_cache.shape[1]
    for b in range(bs):
        n = int(seq_lens[b])
        rows = rows_of(kv_cache, block_tables[b], n)[:, None]
        values = rows[..., :rank].double() * output_scale
        out[b] = attend(query[b], rows, values, causal(q_len, n, -1), scale).to(out.dtype)
    return out


class _Planned:
    """The planned wrappers' common part: CSR pages on the host, and no more than what was planned."""

    backend: str
    planned: dict[str, Any]

    def check_plan(self, indptr, indices, lens, q_indptr) -> None:
        assert indptr.device.type == q_indptr.device.type == "cpu"
        assert indptr.dtype == indices.dtype == q_indptr.dtype == torch.int32
        assert indices.numel() == int(indptr[-1])
        assert (lens >= q_indptr[1:] - q_indptr[:-1]).all()

    def requests(self):
        plan = self.planned
        for b in range(len(plan["lens"])):
            rows = slice(int(plan["qo_indptr"][b]), int(plan["qo_indptr"][b + 1]))
            pages = plan["indices"][int(plan["indptr"][b]) : int(plan["indptr"][b + 1])]
            yield rows, pages, int(plan["lens"][b])


class Prefill(_Planned):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
        check_scratch(float_workspace_buffer)
        assert kv_layout == "NHD"
        assert backend in ("fa2", "fa3")
        self.backend = backend

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, custom_mask=None, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
             q_data_type=None, kv_data_type=None):  # fmt: skip
        pages = paged_kv_indptr[1:] - paged_kv_indptr[:-1]
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        lens = (pages - 1) * page_size + paged_kv_last_page_len
        self.check_plan(paged_kv_indptr, paged_kv_indices, lens, qo_indptr)
        if custom_mask is not None:
            assert self.backend == "fa2", "fa3 refuses masks"
            assert custom_mask.dtype == torch.bool
            assert custom_mask.numel() == int(((qo_indptr[1:] - qo_indptr[:-1]) * lens).sum())
            assert window_left == -1
        self.planned = {
            "qo_indptr": qo_indptr, "indptr": paged_kv_indptr, "indices": paged_kv_indices, "lens": lens, "mask": custom_mask,
            "causal": causal, "scale": sm_scale, "window": window_left, "softcap": logits_soft_cap,
            "shape": (num_qo_heads, num_kv_heads, head_dim_qk, page_size), "dtypes": (q_data_type, kv_data_type),
        }  # fmt: skip

    def run(self, q, paged_kv_cache, out=None, k_scale=1.0, v_scale=1.0):
        k_cache = paged_kv_cache[0]
        plan, offset = self.planned, 0
        assert plan["shape"] == (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1])
        assert plan["dtypes"] == (q.dtype, k_cache.dtype)
        for rows, pages, length in self.requests():
            keys, values = (rows_of(c, pages, length).double() for c in paged_kv_cache)
            n = rows.stop - rows.start
            visible = causal(n, length, plan["window"])
            if plan["mask"] is not None:
                visible = plan["mask"][offset : offset + n * length].view(n, length)
                offset += n * length
            part = attend(q[rows], keys, values * v_scale, visible, plan["scale"] * k_scale, None, plan["softcap"])
            out[rows] = part.to(out.dtype)
        return out


class PlannedMLA(_Planned):
    def __init__(self, float_workspace_buffer, backend="auto"):
        check_scratch(float_workspace_buffer)
        assert backend in ("fa2", "fa3")
        self.backend = backend

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
             sm_scale, q_data_type, kv_data_type):  # fmt: skip
        assert causal
        assert 128 % num_heads == 0, "the kernel drops keys at tile edges"
        self.check_plan(kv_indptr, kv_indices, kv_len_arr, qo_indptr)
        self.planned = {
            "qo_indptr": qo_indptr,
            "indptr": kv_indptr,
            "indices": kv_indices,
            "lens": kv_len_arr,
            "scale": sm_scale,
        }
        self.planned["shape"] = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        assert q_data_type == kv_data_type

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        assert self.planned["shape"] == (q_nope.shape[1], ckv_cache.shape[2], kpe_cache.shape[2], ckv_cache.shape[1])
        cache = torch.cat([ckv_cache, kpe_cache], -1)
        q = torch.cat([q_nope, q_pe], -1)
        for rows, pages, length in self.requests():
            keys = rows_of(cache, pages, length)[:, None]
            visible = causal(rows.stop - rows.start, length, -1)
            values = keys[..., : ckv_cache.shape[-1]]
            out[rows] = attend(q[rows], keys, values, visible, self.planned["scale"]).to(out.dtype)
        return out
