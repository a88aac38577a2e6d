"""What the layers of an SGLang runner will launch, for kernels that are compiled while the engine starts
(`integrations/ahead.py`): SGLang makes the backend before it records its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spec_ops.integrations import ahead
from spec_ops.integrations.ahead import Batches, Layer, Step
from spec_ops.integrations.sglang.limits import attention_layers, runner_heads

UNKNOWN = 256  # requests of the largest graph, where SGLang does not say
PROMPT = 8192  # tokens of a chunk, where prompts are not cut


def start(runner: Any) -> int:
    """Begin to compile. Returns how many binaries were begun."""
    return ahead.start(lambda: needed(runner), runner.device)


def needed(runner: Any) -> Iterator[tuple[Layer, Batches]]:
    """One for each kind of layer: with the windows and soft caps that the model has. Sinks are given with each call alone."""
    pool, config = runner.token_to_kv_pool, runner.model_config
    if mla := runner.use_mla_backend:
        heads, widths = 1, (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    else:
        heads, widths = pool.head_num, (pool.head_dim, getattr(pool, "v_head_dim", None) or pool.head_dim)
    made = batches(runner)
    for window, softcap in _kinds(runner):
        layer = Layer(
            mla, runner.dtype, pool.dtype, runner_heads(runner), heads, *widths, window, None, softcap, runner.page_size,
            runner.req_to_token_pool.req_to_token.shape[1], beside=False,
        )  # fmt: skip
        yield layer, made


def _kinds(runner: Any) -> list[tuple[int, bool]]:
    """Window and soft cap of each layer (SGLang's `RadixAttention`)."""
    found = [(layer.sliding_window_size or -1, (layer.logit_cap or 0) > 0) for layer in attention_layers(runner)]
    return list(dict.fromkeys((max(window, -1), softcap) for window, softcap in found))


def batches(runner: Any) -> Batches:
    """A target decodes, or verifies; a draft takes its steps, and then the tokens that were verified.

    SGLang records its graphs at once, and the first of them waits for all that is being compiled. So batches that are too large
    for a graph are left out: an engine may take thousands of requests.
    """
    args = runner.server_args
    chunk = getattr(args, "chunked_prefill_size", None) or 0
    most = getattr(runner, "max_running_requests", None) or len(runner.req_to_token_pool.req_to_token)
    decode = getattr(getattr(args, "cuda_graph_config", None), "decode", None)
    recorded = max(getattr(decode, "bs", None) or [UNKNOWN])
    return Batches(tuple(_steps(args, runner.is_draft_worker)), min(most, recorded), max(chunk, 0) or PROMPT, appends=False)


def _steps(args: Any, drafts: bool) -> Iterator[Step]:
    if args.speculative_algorithm is None:
        yield Step("draft_decode", 1)
        return
    nodes, topk, steps = args.speculative_num_draft_tokens, args.speculative_eagle_topk, args.speculative_num_steps
    if not drafts:
        yield Step("target_verify", nodes, mask_len=nodes if topk > 1 else 0)
        return
    if steps > 1:
        yield Step("draft_decode", topk, mask_len=topk * steps if topk > 1 else 0, one_mask=True)
    yield Step("draft_extend", nodes)
