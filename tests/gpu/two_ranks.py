"""`python -m tests.gpu.two_ranks RANK FOLDER`: one of two ranks, rank 0 on the second GPU.

Its process has the other rank's GPU as its current one, then its own. Writes what it found each time to `FOLDER/RANK.pt`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.late_ranks import replay_late
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.ops.collectives import all_reduce_add_op, all_reduce_op
from spec_ops.parallel import TensorParallel, load_pair

PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n\n\ndef main(argv):\n"]


def parts(size: int) -> list[torch.Tensor]:
    """Of each rank, `[4, 64]` of bfloat16; one more is the residual, whose first row is the norm's weight too."""
    return [torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(size + 1)]


def sums_of(ranks: TensorParallel) -> list[torch.Tensor]:
    """By our kernels; the last two by NCCL."""
    mine, residual = (part.to(ranks.device) for part in (parts(ranks.size)[ranks.rank], parts(ranks.size)[-1]))
    keys = torch.arange(5, device=ranks.device) * (-1) ** ranks.rank
    outputs = [
        all_reduce_op(mine, "sum", ranks.name), all_reduce_op(keys, "max", ranks.name),
        *all_reduce_add_op(mine, residual, residual[0], ranks.name), ranks.all_reduce(mine), ranks.gather(mine),
    ]  # fmt: skip
    assert all(out.device == ranks.device for out in outputs)
    return [out.cpu() for out in outputs]


def rounds_of(ranks: TensorParallel) -> Callable[[], list[list[int]]]:
    """Compiled ones: in their CUDA graphs the sums are our kernels."""
    target, draft, tokenizer = load_pair(ranks, device=ranks.device, dtype=torch.bfloat16)
    generator = Generator(target, draft, SpeculationConfig(3), max_batch_size=2, max_seq_len=256, compile=True)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    return lambda: generator.generate(prompts, max_new_tokens=32).tokens


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(1 - rank), "WORLD_SIZE": "2"}
    ranks = TensorParallel.connect("cuda", timeout=120, check_rounds=True)
    assert ranks.device == torch.device("cuda", 1 - rank)
    found = []
    torch.cuda.set_device(rank)
    generate = rounds_of(ranks)
    for current in (rank, 1 - rank):
        torch.cuda.set_device(current)
        found.append({"outputs": sums_of(ranks), "tokens": generate()})
        assert torch.cuda.current_device() == current
    assert ranks._pushes is not None
    assert ranks._pushes.failed.item() == 0
    torch.cuda.set_device(ranks.device)
    assert replay_late(ranks._pushes, 2000, lambda done: None)[1] == 0
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
