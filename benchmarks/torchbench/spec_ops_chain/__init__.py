"""TorchBench model: greedy EAGLE-3 chains of the pair that spec_ops ships. For a clone of pytorch/benchmark, to whose
`torchbenchmark/models` folder this one is linked: `python run.py spec_ops_chain -d cuda -t eval [--compile-rounds]`."""

from __future__ import annotations

import argparse
import weakref

import torch
from torchbenchmark.tasks import NLP
from torchbenchmark.util.model import BenchmarkModel

import spec_ops
from spec_ops.backends.workspace import release_workspaces

from .chain import build

LIVING: weakref.WeakSet[Model] = weakref.WeakSet()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and what is left over: TorchBench refuses a model that leaves anything."""
    parser = argparse.ArgumentParser(prog="spec_ops_chain", allow_abbrev=False)
    parser.add_argument("--compile-rounds", action="store_true", help="with spec_ops.compile: one CUDA graph a round")
    parser.add_argument("--num-steps", type=int, default=3, help="draft steps of a round")
    parser.add_argument("--num-rounds", type=int, default=16, help="rounds of one eval()")
    return parser.parse_known_args(args)


class Model(BenchmarkModel):
    task = NLP.GENERATION
    DEFAULT_EVAL_BSIZE = 8
    ALLOW_CUSTOMIZE_BSIZE = True
    DEFAULT_EVAL_CUDA_PRECISION = "bf16"

    def __init__(self, test: str, device: str, batch_size: int | None = None, extra_args: list[str] = []) -> None:  # noqa: B006
        if test == "train":
            raise NotImplementedError("spec_ops_chain decodes: it has no training")
        super().__init__(test=test, device=device, batch_size=batch_size, extra_args=extra_args)
        args, self.extra_args = parse_args(self.extra_args)
        precision = self.dargs.precision
        if precision not in DTYPES:
            raise NotImplementedError(f"spec_ops_chain runs in {', '.join(DTYPES)}, not in {precision}")
        if args.compile_rounds and (self.dynamo or self.dargs.accuracy):
            # TorchBench compares and compiles the module of `get_module`, whose rounds are eager.
            raise NotImplementedError("--compile-rounds goes without --torchdynamo, --inductor and --accuracy")
        sizes = {"num_steps": args.num_steps, "num_rounds": args.num_rounds}
        self.model, self.example_inputs = build(self.batch_size, **sizes, device=device, dtype=DTYPES[precision])
        LIVING.add(self)
        self.compiled_round = spec_ops.compile(self.model.round) if args.compile_rounds else None

    def __del__(self) -> None:
        # TorchBench counts what a model leaves on the device. Graphs recorded by another model would still use it.
        if all(model is self for model in LIVING):
            release_workspaces()

    def get_module(self):
        return self.model, self.example_inputs

    def train(self):
        raise NotImplementedError("spec_ops_chain decodes: it has no training")

    def eval(self) -> tuple[torch.Tensor]:
        step = self.compiled_round or self.model.round
        return (self.model.run(step, self.example_inputs),)

    def enable_bf16(self) -> None:
        """Nothing: the weights were loaded in that format. TorchBench's cast would make float32 state bfloat16 as well, and put
        caches and state at new addresses, which CUDA graphs must not see."""

    enable_fp16 = enable_bf16
