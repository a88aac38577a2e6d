"""TorchBench userbenchmark: `python run_benchmark.py spec_ops --device cuda` in a clone of pytorch/benchmark, to whose
`userbenchmark` folder this one is linked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from userbenchmark.utils import dump_output, get_output_json

from .metrics import Options, measure

NAME = "spec_ops"


def parse_args(args: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog=f"run_benchmark.py {NAME}", description="Speculative decoding: ops, rounds, tokens/s."
    )
    parser.add_argument("--device", "-d", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bs", type=int, nargs="+", help="batch sizes (default 1 8)")
    parser.add_argument("--context", type=int, help="tokens in the cache before a step (default 4096 on cuda, 512 on cpu)")
    parser.add_argument("--steps", type=int, help="draft steps of the chain (default 3)")
    parser.add_argument("--prompts", type=int, help="prompts of held-out files to generate from (default 32 on cuda, 8 on cpu)")
    parser.add_argument("--new-tokens", type=int, help="tokens to generate for each (default 128)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the rounds (default on cuda)")
    given = {name: value for name, value in vars(parser.parse_args(args)).items() if value is not None}
    try:
        return Options.for_device(**given)
    except ValueError as error:
        parser.error(str(error))


def run(args: list[str]) -> None:
    output = get_output_json(NAME, measure(parse_args(args)))
    dump_output(NAME, output)
    print(json.dumps(output, indent=2))
