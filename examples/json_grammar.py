"""JSON that follows a schema: a grammar masks the target's logits at every position that a round verifies.

    pip install xgrammar
    python examples/json_grammar.py [--prompts 4] [--temperature 0.8] [--topk 2]

The shipped pair knows Python's standard library and no JSON. The grammar alone makes its output parse.
"""

import argparse
import json
import sys

import torch

from spec_ops.decoding import Generator, SamplingParams, SpeculationConfig
from spec_ops.models.pretrained import load_pair

SCHEMA = {
    "type": "object",
    "properties": {
        "module": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["class", "function", "constant"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 9999},
        "public": {"type": "boolean"},
    },
    "required": ["module", "kind", "line", "public"],
    "additionalProperties": False,
}


def check(text: str) -> dict:
    """The value of a text that follows `SCHEMA`."""
    value = json.loads(text)
    assert set(value) == set(SCHEMA["required"]), text
    assert isinstance(value["module"], str), text
    assert len(value["module"]) <= 12, text
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"], text
    assert type(value["line"]) is int, text
    assert 0 <= value["line"] <= 9999, text
    assert type(value["public"]) is bool, text
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--topk", type=int, default=1, help="width of the draft tree")
    args = parser.parse_args()
    try:
        import xgrammar
    except ImportError:
        sys.exit("this example needs xgrammar: pip install xgrammar")

    target, draft, tokenizer = load_pair(device="cuda" if torch.cuda.is_available() else "cpu")
    vocab = [bytes([i]) for i in range(tokenizer.BOS)] + [b""] * (tokenizer.vocab_size - tokenizer.BOS)
    # With the tokenizer of a checkpoint: xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=...)
    info = xgrammar.TokenizerInfo(vocab, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[tokenizer.EOS])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

    prompts = [tokenizer.encode(f"# example {i}\nimport json\ntext = '''") for i in range(args.prompts)]
    generator = Generator(target, draft, SpeculationConfig(3, topk=args.topk), max_batch_size=8, max_seq_len=256)
    result = generator.generate(
        prompts,
        max_new_tokens=128,
        stop_tokens=[tokenizer.EOS],
        sampling=SamplingParams(temperature=args.temperature, seed=0),
        matchers=[xgrammar.GrammarMatcher(grammar) for _ in prompts],
    )
    for tokens in result.tokens:
        print(check(tokenizer.decode(tokens)))
    print(f"{result.stats.accept_length:.2f} tokens a round, every text follows the schema")


if __name__ == "__main__":
    main()
