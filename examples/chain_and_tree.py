"""Chain against tree: the same greedy text, with different numbers of target forwards.

    python examples/chain_and_tree.py [--new-tokens 96]

The shipped byte-level target and its EAGLE-3 head continue a few prompts of different lengths, plainly, with chains of 1 to 5
drafts, and with trees. All in float32: bfloat16 rounds differently, and a near tie may fall either way.
"""

import argparse

import torch

from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models.pretrained import load_pair

PROMPTS = [
    "def read_lines(path):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "import os\n\ndef main():\n    for name in os.listdir(",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    target, draft, tokenizer = load_pair(device="cuda" if torch.cuda.is_available() else "cpu")
    prompts = [tokenizer.encode(text) for text in PROMPTS]

    def run(name, draft, config):
        generator = Generator(target, draft, config, max_batch_size=len(prompts), max_seq_len=512)
        result = generator.generate(prompts, max_new_tokens=args.new_tokens)
        stats = result.stats
        print(f"{name:32s} {stats.rounds:4d} target forwards, {stats.accept_length:.2f} tokens a round and request")
        return result.tokens

    plain = run("plain", None, None)
    for steps in (1, 3, 5):
        assert run(f"chain, {steps} steps", draft, SpeculationConfig(steps)) == plain
    for steps, width, size in ((3, 2, 8), (3, 4, 16), (5, 4, 32)):
        config = SpeculationConfig(steps, width, size)
        assert run(f"tree, {steps} steps, width {width}, {size} tokens", draft, config) == plain
    print("every text equals the plain one:")
    print(PROMPTS[0] + tokenizer.decode(plain[0]))


if __name__ == "__main__":
    main()
