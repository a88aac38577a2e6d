"""Call every attention op directly: two requests, paged KV, a draft step, a verification, an extend and a prefill.

    python examples/attention_ops.py

Each step appends its keys and values to the cache, then attends; `seq_lens` counts the step's own tokens. A tree differs from a
chain by one argument, `tree_mask`: an int64 word per query whose bit j says that it sees draft position j.
"""

import torch

import spec_ops

PAGE_SIZE, NUM_PAGES = 16, 8
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
KV_LORA_RANK, ROPE_DIM = 128, 32


def slots_of(block_tables, positions):
    """KV slots of token positions `[bs, n]`."""
    pages = block_tables.gather(1, (positions // PAGE_SIZE).long())
    return pages * PAGE_SIZE + positions % PAGE_SIZE


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_device(device)
    block_tables = torch.tensor([[3, 1, 4], [5, 0, 2]], dtype=torch.int32)
    committed = torch.tensor([20, 9], dtype=torch.int32)  # tokens whose KV is final

    k_cache = torch.randn(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    v_cache = torch.randn(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    mla_cache = torch.randn(NUM_PAGES, PAGE_SIZE, KV_LORA_RANK + ROPE_DIM)

    def append(q_len):
        """New keys and values for slots [committed, committed + q_len)."""
        slots = slots_of(block_tables, committed[:, None] + torch.arange(q_len)).flatten()
        k, v = torch.randn(2, len(slots), KV_HEADS, HEAD_DIM)
        spec_ops.append_kv(k_cache, v_cache, k, v, slots)
        spec_ops.append_mla_kv(mla_cache, torch.randn(len(slots), KV_LORA_RANK), torch.randn(len(slots), ROPE_DIM), slots)

    def report(name, out):
        assert out.isfinite().all()
        print(f"{name:45s} -> {list(out.shape)}")

    def queries(q_len):
        return torch.randn(2, q_len, HEADS, HEAD_DIM), torch.randn(2, q_len, HEADS, KV_LORA_RANK + ROPE_DIM)

    scale = 1 / (128 + ROPE_DIM) ** 0.5  # 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)

    append(1)
    q, q_mla = queries(1)
    report("mha_draft_decode, step 0 of a chain", spec_ops.mha_draft_decode(q, k_cache, v_cache, block_tables, committed + 1))
    report(
        "mla_draft_decode", spec_ops.mla_draft_decode(q_mla, mla_cache, KV_LORA_RANK, block_tables, committed + 1, scale=scale)
    )

    # A tree of five tokens: 0 is the root, 1 and 2 its children, 3 a child of 1, 4 a child of 2.
    tree = spec_ops.build_tree(
        parent_list=torch.tensor([[-1, 0, 1]] * 2), selected_index=torch.tensor([[0, 1, 2, 4]] * 2), seq_lens=committed, topk=2
    )
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]] * 2
    append(5)
    q, q_mla = queries(5)
    chain = spec_ops.mha_target_verify(q, k_cache, v_cache, block_tables, committed + 5)
    branched = spec_ops.mha_target_verify(q, k_cache, v_cache, block_tables, committed + 5, tree_mask=tree.tree_mask)
    assert torch.equal(chain[:, :2], branched[:, :2])  # nodes 0 and 1 see the same keys in both
    assert not torch.allclose(chain[:, 2:], branched[:, 2:])
    report("mha_target_verify, chain of 5", chain)
    report("mha_target_verify, tree of 5", branched)
    out = spec_ops.mla_target_verify(
        q_mla, mla_cache, KV_LORA_RANK, block_tables, committed + 5, scale=scale, tree_mask=tree.tree_mask
    )
    report("mla_target_verify, tree of 5", out)

    report("mha_draft_extend", spec_ops.mha_draft_extend(q, k_cache, v_cache, block_tables, committed + 5))
    out = spec_ops.mla_draft_extend(q_mla, mla_cache, KV_LORA_RANK, block_tables, committed + 5, scale=scale)
    report("mla_draft_extend", out)

    # Prefill is ragged: request 0 brings three new tokens, request 1 one.
    q_indptr = torch.tensor([0, 3, 4], dtype=torch.int32)
    lens = committed + torch.tensor([3, 1], dtype=torch.int32)
    ragged = torch.randn(4, HEADS, HEAD_DIM)
    out = spec_ops.mha_extend(ragged, k_cache, v_cache, block_tables, lens, q_indptr, max_q_len=3)
    report("mha_extend, ragged 3 + 1", out)
    ragged = torch.randn(4, HEADS, KV_LORA_RANK + ROPE_DIM)
    out = spec_ops.mla_extend(ragged, mla_cache, KV_LORA_RANK, block_tables, lens, q_indptr, max_q_len=3, scale=scale)
    report("mla_extend, ragged 3 + 1", out)


if __name__ == "__main__":
    main()
