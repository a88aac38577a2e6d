"""EAGLE-3 on a GQA target: which kernels it runs on here, and which on Blackwell with nothing changed.

    python examples/blackwell_eagle3.py [--width 4] [--compile]

A small random Llama-type target and head in bfloat16 with heads and pages as large models have them (128 wide, 64 tokens), so
that every kernel that a Llama-3.1-8B would get is open to it. On sm_100 a chain runs on trtllm-gen throughout; a tree
(`--width`) needs kernels that honour its mask. Nothing names a backend: FlashInfer is used where it is installed (`pip install
".[flashinfer]"` in a checkout).
"""

import argparse

import torch

import spec_ops
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models import CausalLM, Eagle3Draft, ModelConfig

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128}


def build(device: str) -> tuple[CausalLM, Eagle3Draft]:
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(num_layers=3, aux_layers=(0, 1, 2), **SIZES))
    draft = Eagle3Draft(ModelConfig(num_layers=1, **SIZES), target, torch.arange(256))
    return target.to(device, torch.bfloat16), draft.to(device, torch.bfloat16)


def kernels(generator: Generator, arch: str | None) -> list[str]:
    """The round's kernels with the reasons against the others, planned without running anything."""
    with torch.no_grad():
        return sorted(set(spec_ops.explain(generator.round(2), arch=arch).kernels()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1, help="branches per draft step; 1 drafts a chain")
    parser.add_argument("--compile", action="store_true", help="compile the round (one CUDA graph on a GPU)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = build(device)
    config = SpeculationConfig(num_steps=3, topk=args.width)
    generator = Generator(target, draft, config, max_batch_size=2, max_seq_len=192, page_size=64, compile=args.compile)
    result = generator.generate([[1, 2, 3], [4, 5]], max_new_tokens=24)
    assert [len(tokens) for tokens in result.tokens] == [24, 24]
    print(f"{device}: 24 tokens for 2 requests in {result.stats.rounds} rounds, with")
    print(*(line.split(" (")[0] for line in kernels(generator, None)), sep="\n")

    print("\non sm_100 it would be")
    planned = kernels(generator, "sm100")
    print(*(line.replace(" (", "\n    (").replace("; ", "\n     ") for line in planned), sep="\n")
    causal = [line for line in planned if args.width == 1 or "draft_extend" in line]
    assert all("flashinfer-trtllm" in line.split(" (")[0] for line in causal)
    assert not any("flashinfer-trtllm" in line.split(" (")[0] for line in planned if line not in causal)


if __name__ == "__main__":
    main()
