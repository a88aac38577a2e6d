"""One model over several processes: each holds a share of every layer, and all of them emit the same tokens.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [--new-tokens 96]

With a GPU per process it runs on those (NCCL), else on the CPU (gloo). Rank 0 also decodes with the whole models and compares.
"""

import argparse
import os

import torch
import torch.distributed as dist

from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models import load_pair as load_whole_pair
from spec_ops.parallel import TensorParallel, load_pair

PROMPT = "class Matrix:\n    def __init__(self, rows, columns):\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 0
    ranks = TensorParallel.connect("cuda" if on_gpus else "cpu")
    device = ranks.device

    def decode(target, draft, prompt):
        generator = Generator(target, draft, SpeculationConfig(3), max_batch_size=1, max_seq_len=512)
        return generator.generate([prompt], max_new_tokens=args.new_tokens)

    target, draft, tokenizer = load_pair(ranks, device=device)
    prompt = tokenizer.encode(PROMPT)
    result = decode(target, draft, prompt)  # every rank makes the same calls
    if ranks.rank == 0:
        weights = sum(parameter.numel() for parameter in target.parameters())
        print(f"{ranks.size} ranks on {device.type}, {weights / 1e6:.2f} million weights of the target on each")
        print(f"{result.stats.accept_length:.2f} tokens a round:")
        print(PROMPT + tokenizer.decode(result.tokens[0]))
        whole = load_whole_pair(device=device)
        assert result.tokens == decode(whole[0], whole[1], prompt).tokens
        print("the same tokens as from one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
