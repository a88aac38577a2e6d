"""A round written the obvious way, and what the graph passes make of it.

    python examples/naive_round.py [--mla] [--width 4] [--arch sm100] [--dtype bfloat16]

Every attention call gets all the metadata that any kernel could want: a page table and kv-indices of its own, lengths on the
host, the longest length as a Python number; the extend runs as a prefill, and its LM head computes every row although one is
used. Engines remove all that by hand. Here `spec_ops.explain` prints what the passes remove, kernel by kernel; nothing is run
for the stated architecture, so the plan for Blackwell can be read on a laptop.
"""

import argparse

import torch
from torch import nn

import spec_ops
from spec_ops.models import CausalLM, ModelConfig, MTPDraft, PagedAttention, PagedKVCache

PAGE_SIZE, MAX_LEN = 16, 256


class NaiveRound(nn.Module):
    """Greedy rounds of `steps` draft steps with `width` branches (1: a chain) over a token-level request-to-token table."""

    def __init__(self, target: CausalLM, draft: MTPDraft, batch_size: int = 2, steps: int = 3, width: int = 1):
        super().__init__()
        self.target, self.draft, self.steps, self.width = target, draft, steps, width
        self.num_tokens, self.page_size = steps + 1 if width == 1 else 2 * width, PAGE_SIZE
        pages, dtype = MAX_LEN // PAGE_SIZE, next(target.parameters()).dtype
        self.target_cache = PagedKVCache(target.config, batch_size * pages, PAGE_SIZE, dtype=dtype)
        self.draft_cache = PagedKVCache(draft.config, batch_size * pages, PAGE_SIZE, dtype=dtype)
        slots = torch.arange(batch_size * MAX_LEN, dtype=torch.int32).reshape(batch_size, MAX_LEN)
        self.register_buffer("req_to_token", slots.flip(0).contiguous())
        self.register_buffer("requests", torch.arange(batch_size))
        self.register_buffer("committed", torch.tensor([5, 40])[torch.arange(batch_size) % 2].to(torch.int32))
        self.register_buffer("last_token", torch.full((batch_size,), 3))
        self.register_buffer("first_drafts", torch.full((batch_size, width), 4))
        self.register_buffer("first_scores", torch.zeros(batch_size, width))
        self.register_buffer("hidden", torch.zeros(batch_size, draft.config.hidden_size, dtype=dtype))

    def attention(self, cache, step, lens, positions, **options):
        """Everything that any kernel might read, for every call anew."""
        table = spec_ops.page_table(self.req_to_token, self.requests, lens, self.page_size)
        slots = self.req_to_token[self.requests[:, None], positions]
        if "kv_indices" not in options:
            options["kv_indptr"], options["kv_indices"] = spec_ops.kv_indices(self.req_to_token, self.requests, lens)
        host = {"seq_lens_cpu": lens.cpu(), "max_seq_len": lens.max().item()}
        return self.paged_attention(cache, step, table, lens, slots, **host, **options)

    def paged_attention(self, *args, **options):
        return PagedAttention(*args, **options)

    def draft_step(self, step, tokens, hidden, mask):
        """One draft forward over `width` branches; returns hidden states and log-probabilities."""
        branch = torch.arange(self.width, device=tokens.device)
        lens = self.committed + (step + 1) * self.width
        positions = (self.committed + step * self.width)[:, None] + branch
        indptr, indices = spec_ops.draft_kv_indices(
            self.req_to_token, self.requests, self.committed, step, self.steps, self.width, self.page_size
        )
        tree = {} if self.width == 1 else {"tree_mask": mask, "mask_len": (step + 1) * self.width}
        attention = self.attention(
            self.draft_cache, "draft_decode", lens, positions, kv_indptr=indptr, kv_indices=indices, **tree
        )
        depth = (self.committed + step)[:, None].expand(-1, self.width)
        hidden = self.draft(tokens, hidden, depth, attention)
        return hidden, torch.log_softmax(self.draft.logits(hidden).float(), -1)

    def draft_tokens(self):
        """Candidates `[bs, D]`, positions, mask and parents (None for a chain)."""
        width, bs = self.width, self.committed.shape[0]
        branch = torch.arange(width, device=self.committed.device)
        tokens, scores, mask = self.first_drafts, self.first_scores, (torch.ones_like(branch) << branch).expand(bs, -1)
        hidden = self.hidden[:, None].expand(-1, width, -1)
        all_tokens, all_scores, parent_list = [tokens], [scores], [torch.arange(-1, width, device=tokens.device).expand(bs, -1)]
        for step in range(self.steps - 1):
            hidden, log_probs = self.draft_step(step, tokens, hidden, mask)
            best, ids = log_probs.topk(width)
            all_tokens.append(self.draft.to_target(ids).flatten(1))
            all_scores.append((scores[:, :, None] + best).flatten(1))
            scores, chosen = all_scores[-1].topk(width)
            parent = chosen // width
            tokens = all_tokens[-1].gather(1, chosen)
            hidden = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1]))
            mask = mask.gather(1, parent) | (torch.ones_like(branch) << (branch + (step + 1) * width))
            if step < self.steps - 2:
                parent_list.append(chosen + width + step * width * width)
        if width == 1:
            candidates = torch.cat([self.last_token[:, None], *all_tokens], 1)
            return candidates, self.committed[:, None] + torch.arange(self.num_tokens, device=candidates.device), None, None
        drafts, selected = spec_ops.select_draft_tokens(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), self.num_tokens - 1)
        tree = spec_ops.build_tree(torch.cat(parent_list, 1), selected, self.committed, width)
        return torch.cat([self.last_token[:, None], drafts], 1), tree.positions, tree.tree_mask, tree.parents

    def forward(self):
        """One round; returns the accepted tokens `[bs, P]` (-1 past `lens`) and `lens [bs]`."""
        candidates, positions, mask, parents = self.draft_tokens()
        place = torch.arange(self.num_tokens, device=candidates.device)
        slots = self.committed[:, None] + place
        attention = self.attention(self.target_cache, "target_verify", self.committed + self.num_tokens, slots, tree_mask=mask)
        output = self.target(candidates, positions, attention)
        path_len = min(self.steps + 1, self.num_tokens)
        accepted = spec_ops.accept_greedy(candidates, self.target.logits(output.hidden).argmax(-1), parents, path_len)
        if parents is not None:
            source = self.req_to_token.gather(1, (self.committed[:, None] + accepted.path.clamp(min=0)).long())
            target = self.req_to_token.gather(1, (self.committed[:, None] + place[:path_len]).long())
            spec_ops.move_kv(
                self.target_cache.tensors(), torch.where(accepted.path >= 0, source, -1).flatten(), target.flatten()
            )

        # Extend as a ragged prefill over the accepted path; logits of every row, then the one row that counts.
        lens = self.committed + path_len
        rows = self.committed[:, None] + torch.arange(path_len, device=lens.device)
        q_indptr = torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device) * path_len
        attention = self.attention(self.draft_cache, "extend", lens, rows, q_indptr=q_indptr, max_q_len=path_len)
        node = accepted.path.clamp(min=0)[:, :, None].expand(-1, -1, output.hidden.shape[-1])
        features = self.draft.encode(output).gather(1, node)
        hidden = self.draft(accepted.tokens.clamp(min=0).flatten(), features.flatten(0, 1), rows.flatten(), attention)
        hidden = hidden.unflatten(0, (-1, path_len))
        log_probs = torch.log_softmax(self.draft.logits(hidden).float(), -1)
        row = (accepted.lens - 1).long()
        self.hidden.copy_(hidden[torch.arange(len(row), device=row.device), row])
        scores, drafts = log_probs[torch.arange(len(row), device=row.device), row].topk(self.width)
        self.first_scores.copy_(scores)
        self.first_drafts.copy_(self.draft.to_target(drafts))
        self.last_token.copy_(accepted.tokens.gather(1, row[:, None])[:, 0])
        self.committed.add_(accepted.lens)
        return accepted.tokens, accepted.lens


def make_round(
    mla: bool = False, width: int = 1, steps: int = 3, layers: int = 2, dtype: torch.dtype = torch.bfloat16
) -> NaiveRound:
    """A tiny random target and MTP draft in the naive round; most kernels are for bfloat16 and float16 alone."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
    if mla:
        sizes |= {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    else:
        sizes |= {"num_kv_heads": 2, "head_dim": 16}
    target = CausalLM(ModelConfig(num_layers=layers, **sizes)).to(dtype)
    draft = MTPDraft(ModelConfig(num_layers=1, **sizes), target).to(dtype)
    return NaiveRound(target, draft, width=width, steps=steps).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mla", action="store_true", help="latent attention instead of GQA")
    parser.add_argument("--width", type=int, default=1, help="branches per draft step; 1 drafts a chain")
    parser.add_argument("--arch", help="plan for this architecture, such as sm100; default: the tensors' device")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: bfloat16")
    args = parser.parse_args()
    torch._dynamo.config.capture_scalar_outputs = True  # lets `.item()` into the graph, where a pass can remove it
    module = make_round(args.mla, args.width, dtype=getattr(torch, args.dtype))
    try:
        with torch.no_grad():
            print(spec_ops.explain(module, arch=args.arch))
    except ValueError as error:  # no such architecture
        parser.error(str(error))


if __name__ == "__main__":
    main()
