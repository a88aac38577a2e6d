"""MTP on an MLA target with an fp8 cache: which kernels it runs on here, and which on Blackwell with nothing changed.

    python examples/blackwell_mtp_mla.py [--width 4] [--compile]

A small random DeepSeek-type target and MTP layer in bfloat16 with DeepSeek-V3's latent widths (512 + 64) and pages of 64. On
sm_100 a chain runs on tokenspeed_mla, or on trtllm-gen where only FlashInfer is installed; a tree (`--width`) goes to our own
kernel, since no other MLA kernel takes a mask. `pip install ".[tokenspeed,flashinfer]"` in a checkout.
"""

import argparse

import torch

import spec_ops
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models import CausalLM, ModelConfig, MTPDraft

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}


def build(device: str) -> tuple[CausalLM, MTPDraft]:
    torch.manual_seed(0)
    target = CausalLM(ModelConfig(num_layers=2, **SIZES, **LATENT))
    draft = MTPDraft(ModelConfig(num_layers=1, **SIZES, **LATENT), target)
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
    generator = Generator(
        target,
        draft,
        SpeculationConfig(num_steps=3, topk=args.width),
        max_batch_size=2,
        max_seq_len=192,
        page_size=64,
        cache_dtype=torch.float8_e4m3fn,
        compile=args.compile,
    )
    result = generator.generate([[1, 2, 3], [4, 5]], max_new_tokens=24)
    assert [len(tokens) for tokens in result.tokens] == [24, 24]
    print(f"{device}: 24 tokens for 2 requests in {result.stats.rounds} rounds, fp8 cache, with")
    print(*(line.split(" (")[0] for line in kernels(generator, None)), sep="\n")

    print("\non sm_100 it would be")
    planned = kernels(generator, "sm100")
    print(*(line.replace(" (", "\n    (").replace("; ", "\n     ") for line in planned), sep="\n")
    for line in planned:
        causal = args.width == 1 or "draft_extend" in line
        assert ("tokenspeed" in line.split(" (")[0]) == causal


if __name__ == "__main__":
    main()
