"""What SGLang 0.5.23 imports for a CPU and calls for speculation alone; its own build of it is on no package index."""

from __future__ import annotations

from typing import NoReturn


def _missing(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError("a kernel of SGLang for CPUs")


assign_draft_cache_locs_contiguous_cpu = assign_extend_cache_locs_cpu = assign_req_to_token_pool_cpu = _missing
build_tree_kernel_efficient_cpu = copy_all_layer_kv_cache_cpu = fill_accept_out_cache_loc_cpu = _missing
fill_bonus_tokens_cpu = verify_tree_greedy_cpu = _missing
