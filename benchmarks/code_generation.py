"""Processor seconds from a round's Python code to Inductor's CUDA code, by layers and steps; needs no GPU:

    python -m benchmarks.code_generation                                                  # prints
    python -m benchmarks.code_generation --json benchmarks/results/cpu-code-generation.json

Dynamo, AOTAutograd, the graph passes and Inductor's lowering, scheduling and code generation for sm_90, for an
EAGLE-3 chain over a narrow GQA target: the widths of a model change none of that work. Compiling the kernels comes on top. From
the root of the repository, since it borrows `tests/helpers/inductor_cuda.py`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.rows import write_rows
from spec_ops.decoding import Generator, SpeculationConfig
from spec_ops.models import CausalLM, Eagle3Draft, ModelConfig
from tests.helpers.inductor_cuda import generate_round

CASES = [(4, 3), (8, 3), (16, 3), (32, 3), (8, 1), (8, 2), (8, 5)]  # layers, steps


def seconds(layers: int, steps: int) -> float:
    """Processor time for one round."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    target = CausalLM(ModelConfig(num_layers=layers, aux_layers=(1, layers // 2, layers - 1), **sizes)).to(torch.bfloat16)
    draft = Eagle3Draft(ModelConfig(num_layers=1, **sizes), target, torch.arange(128)).to(torch.bfloat16)
    generator = Generator(
        target, draft, SpeculationConfig(steps), compile=False, max_batch_size=4, max_seq_len=256, page_size=64,
        prefill_backend="reference",
    )  # fmt: skip
    module = generator.round(4)
    start = time.process_time()
    generate_round(module)
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases = "instead of the built-in ones"
    parser.add_argument("--case", type=int, nargs=2, action="append", metavar=("LAYERS", "STEPS"), help=cases)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    seconds(2, 1)  # what is imported and made once
    rows = []
    for layers, steps in options.case or CASES:
        rows.append({"layers": layers, "steps": steps, "seconds": round(seconds(layers, steps), 1)})
        print(f"{layers} layers, {steps} steps: {rows[-1]['seconds']} s", flush=True)
    if options.json is not None:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
