"""What SGLang has kernels for on a GPU alone, in plain PyTorch, so that its EAGLE worker runs on a CPU: a plug-in."""

from __future__ import annotations

import importlib.util
import os

import torch


def build_tree(
    parent_list, selected, seq_lens, tree_mask, positions, retrieve_index, next_token, next_sibling, topk, depth, nodes, mode
):
    """`sgl_kernel.build_tree_kernel_efficient`: masks `[bs, nodes, nodes]` for our backend, and over all of a request's
    positions for SGLang's own."""
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    import spec_ops

    bs = len(seq_lens)
    tree = spec_ops.build_tree(parent_list.expand(bs, -1).long(), selected.expand(bs, -1).contiguous(), seq_lens, topk)
    assert mode in (TreeMaskMode.QLEN_ONLY, TreeMaskMode.FULL_MASK), mode
    before = seq_lens.tolist() if mode == TreeMaskMode.FULL_MASK else [0] * bs
    masks = zip(spec_ops.tree_mask_to_qlen_mask(tree.tree_mask), before, strict=True)
    cells = torch.cat([torch.nn.functional.pad(mask, (count, 0), value=True).flatten() for mask, count in masks])
    tree_mask[: len(cells)] = cells
    positions.copy_(tree.positions.flatten())
    retrieve_index.copy_(torch.arange(bs * nodes).view(bs, nodes))
    next_token.copy_(tree.first_child)
    next_sibling.copy_(tree.next_sibling)


def verify_tree_greedy(
    predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling,
    target_predict, topk=-1,
):  # fmt: skip
    """`sgl_kernel.verify_tree_greedy`: from the root down, always to the child that the target would have written."""
    print(f"VERIFIED {candidates.tolist()}", flush=True)
    for b in range(len(candidates)):
        node = count = 0
        accept_index[b, 0] = retrieve_index[b, 0]
        while True:
            wanted = int(target_predict[b, node])
            predicts[int(retrieve_index[b, node])] = wanted
            child = int(retrieve_next_token[b, node])
            while child >= 0 and int(candidates[b, child]) != wanted:
                child = int(retrieve_next_sibling[b, child])
            if child < 0 or count + 1 >= accept_index.shape[1]:
                break
            node, count = child, count + 1
            accept_index[b, count] = retrieve_index[b, node]
        accept_token_num[b] = count
    return predicts, accept_index, accept_token_num


def extend_cache_locs(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
    columns = start_offset[:batch_size, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:batch_size, None], columns].flatten().long()


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import eagle_utils

    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None  # SGLang's EAGLE models call both, on every device
    torch.Tensor.record_stream = lambda self, stream: None
    if importlib.util.find_spec("sglang.srt.speculative.triton_ops") is None:
        return  # the newest release: `stubs_newest`
    eagle_utils.sgl_build_tree_kernel_efficient = build_tree
    HookRegistry.register("sglang.srt.speculative.eagle_utils.verify_tree_greedy_func", verify_tree_greedy, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.speculative.triton_ops.cache_locs.assign_extend_cache_locs_func", extend_cache_locs, HookType.REPLACE
    )
    if os.environ.get("SGLANG_CPU_GRAPHS"):
        import cpu_graphs

        cpu_graphs.install()
