"""`python -m benchmarks`, from a checkout: each command's module says what it measures."""

from __future__ import annotations

import typer

from benchmarks.accept import bench_accept
from benchmarks.ahead import bench_ahead
from benchmarks.collectives import bench_collectives
from benchmarks.engines.sglang_requests import bench_requests
from benchmarks.engines.sglang_rounds import bench_sglang
from benchmarks.engines.vllm_requests import bench_vllm_requests
from benchmarks.engines.vllm_rounds import bench_vllm
from benchmarks.invariance.command import bench_invariance
from benchmarks.kernels.command import bench_kernels
from benchmarks.lengths import bench_lengths
from benchmarks.moe import bench_moe
from benchmarks.prompts import bench_prompts
from benchmarks.round.command import bench_round
from benchmarks.sampling.command import bench_sampling
from benchmarks.soak import bench_soak
from benchmarks.tune.command import bench_tune

# Without rich markup: it would break an error's line into the lines of a box, paths too.
app = typer.Typer(
    help="Measure; benchmarks/README.md says what is measured how.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
app.command("round", short_help="Whole rounds beside the bytes floor.")(bench_round)
app.command("kernels", short_help="Every attention kernel: error and microseconds.")(bench_kernels)
app.command("sampling", short_help="Sampling from logits, and acceptance: microseconds.")(bench_sampling)
app.command("moe", short_help="Mixtures of experts at few tokens, beside the bytes floor.")(bench_moe)
app.command("collectives", short_help="Sums over ranks: microseconds.")(bench_collectives)
app.command("invariance", short_help="Texts and logits that must be equal in bfloat16, and what that costs.")(bench_invariance)
app.command("sglang", short_help="SGLang's rounds by attention backend, this package's among them.")(bench_sglang)
app.command("vllm", short_help="vLLM's rounds by attention backend, this package's among them.")(bench_vllm)
app.command("sglang-requests", short_help="Texts of SGLang engines, whose requests join and leave.")(bench_requests)
app.command("vllm-requests", short_help="Texts of vLLM engines, whose requests join and leave.")(bench_vllm_requests)
app.command("tune", short_help="Block shapes of the attention kernels, timed.")(bench_tune)
app.command("accept", short_help="Accept length of a target and its draft.")(bench_accept)
app.command("prompts", short_help="Many prompts of unequal lengths: rows refilled, groups, one by one.")(bench_prompts)
app.command("lengths", short_help="Chain lengths that are chosen, beside fixed ones.")(bench_lengths)
app.command("soak", short_help="Rounds for as long as asked: nothing compiled, recorded or kept.")(bench_soak)
app.command("ahead", short_help="Registers, shared memory and spills, without a GPU.")(bench_ahead)


def main() -> None:
    app(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
