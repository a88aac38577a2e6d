"""Sampling with temperature, top-k and top-p: speculation keeps the target's distribution, and a seed repeats a run.

    python examples/sampled_decoding.py [--draws 2000]

Draws many first continuations of one prompt, plainly and speculatively, and compares how often each second token appears (the
second one is where acceptance decides: the first comes from the prefill).
"""

import argparse
from collections import Counter

import torch

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig
from spec_ops.models.pretrained import load_pair

PROMPT = "import "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000)
    args = parser.parse_args()
    target, draft, tokenizer = load_pair(device="cuda" if torch.cuda.is_available() else "cpu")
    prompt = tokenizer.encode(PROMPT)

    def draw(draft, sampling, count, new_tokens):
        generator = Generator(target, draft, SpeculationConfig(3), max_batch_size=min(count, 256), max_seq_len=128)
        return generator.generate([prompt] * count, max_new_tokens=new_tokens, sampling=sampling)

    sampling = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1)
    once = draw(draft, sampling, 4, 48)
    assert once.tokens == draw(draft, sampling, 4, 48).tokens
    print(f"same seed, same texts; {once.stats.accept_length:.2f} tokens a round at temperature 0.8:")
    for tokens in once.tokens:
        print("   " + repr(PROMPT + tokenizer.decode(tokens)))

    plain = Counter(tuple(t[:2]) for t in draw(None, sampling, args.draws, 2).tokens)
    other = SamplingParams(0.8, 50, 0.95, seed=2)
    spec = Counter(tuple(t[:2]) for t in draw(draft, other, args.draws, 2).tokens)
    distance = sum(abs(plain[key] - spec[key]) for key in plain | spec) / 2 / args.draws
    print(f"first two tokens over {args.draws} draws each: total variation distance {distance:.3f} (sampling noise included)")
    for key, count in plain.most_common(5):
        print(f"   {tokenizer.decode(key)!r:8s} plain {count / args.draws:.3f}   speculative {spec[key] / args.draws:.3f}")
    # Two empirical distributions over n draws of k outcomes differ by about sqrt(k / (pi n)) in total variation.
    bound = 3 * (len(plain | spec) / (3.14159 * args.draws)) ** 0.5
    assert distance < bound, f"distance {distance:.3f} exceeds the noise bound {bound:.3f}"


if __name__ == "__main__":
    main()
