"""Use the ops inside a model of your own and compile it: no graph break, caches updated in place.

    python examples/compile_your_model.py [--backend aot_eager]

The model is one attention block with an output head; the loop decodes greedily with the cache as module buffers.
"""

import argparse

import torch
from torch import nn

import spec_ops


class Block(nn.Module):
    """Embedding, one paged GQA layer, LM head. KV lives in buffers, so CUDA graphs may mutate it."""

    def __init__(self, vocab=128, hidden=64, heads=4, kv_heads=2, num_pages=16, page_size=16):
        super().__init__()
        self.head_dim = hidden // heads
        self.embed = nn.Embedding(vocab, hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.kv = nn.Linear(hidden, 2 * kv_heads * self.head_dim, bias=False)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.register_buffer("k_cache", torch.zeros(num_pages, page_size, kv_heads, self.head_dim))
        self.register_buffer("v_cache", torch.zeros(num_pages, page_size, kv_heads, self.head_dim))

    def forward(self, tokens, committed_lens, block_tables):
        """One token per request, written at slot `committed_lens`: `tokens [bs]` to next tokens `[bs]`."""
        x = self.embed(tokens)
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        k, v = self.kv(x).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=1)
        page_size = self.k_cache.shape[1]
        page = block_tables.gather(1, (committed_lens // page_size).long()[:, None])[:, 0]
        spec_ops.append_kv(self.k_cache, self.v_cache, k, v, page * page_size + committed_lens % page_size)
        out = spec_ops.mha_draft_decode(q[:, None], self.k_cache, self.v_cache, block_tables, committed_lens + 1)
        return self.head(x + out.flatten(1)).argmax(-1)


@torch.no_grad()
def decode(model, step, start, length, block_tables):
    """Greedy decoding with `step`, from an empty cache."""
    model.k_cache.zero_()
    model.v_cache.zero_()
    tokens, out = start, []
    lens = torch.zeros(len(start), dtype=torch.int32, device=start.device)
    for _ in range(length):
        tokens = step(tokens, lens, block_tables).clone()  # the next replay overwrites a CUDA graph's outputs
        lens = lens + 1
        out.append(tokens)
    return torch.stack(out, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", help="torch.compile backend")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Block().to(device)
    block_tables = torch.tensor([[7, 2, 9], [1, 4, 0]], dtype=torch.int32, device=device)
    start = torch.tensor([5, 11], device=device)

    expected = decode(model, model, start, 40, block_tables)
    mode = {"mode": "reduce-overhead"} if args.backend == "inductor" else {}
    compiled = torch.compile(model, backend=args.backend, fullgraph=True, dynamic=False, **mode)
    got = decode(model, compiled, start, 40, block_tables)
    assert torch.equal(got, expected)
    print(f"{device}: 40 tokens for 2 requests, the compiled model equals eager: {got[0, :8].tolist()} ...")


if __name__ == "__main__":
    main()
