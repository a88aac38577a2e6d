"""Train a small byte-level target and its EAGLE-3 head from scratch on the Python standard library.

What: a 6.4M-parameter Llama-type target, then a 1.1M-parameter EAGLE-3 head (arXiv:2503.01840) on the frozen target's hidden
states. The result is a checkpoint for `spec_ops.models.pretrained.load_pair`. The shipped pair was made with it.

Why: speculation can only be judged with a draft that agrees with its target. With random weights nothing is accepted, and
public checkpoints are gigabytes. This corpus is on every machine that runs Python, and 5% of its files are held out for
measuring.

How: a model sees no cache here. It attends through an `attention` object, and training passes dense ones: causal attention for
the target, `UnrolledAttention` for the head, which reproduces training-time test, i.e. what the head will see when it
drafts several steps from its own hidden states. 30% of the head's windows are continuations written by the target itself.

Run (about 8 minutes on one H200; `--tiny` checks the whole path on a CPU in seconds)::

    python examples/train_tiny.py --out checkpoint --plot losses.png

The default steps stop the target before it overfits: 11,000 steps (24 epochs) end 0.15 bits per held-out byte higher. The
learning rate follows whichever is used up first, steps or minutes. Runs limited by steps alone are reproducible from
`--seed` up to the nondeterminism of CUDA kernels.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from spec_ops.models.config import ModelConfig
from spec_ops.models.corpus import ByteTokenizer, split_of, stdlib_files
from spec_ops.models.drafts import Eagle3Draft
from spec_ops.models.layers import Rope, rotary
from spec_ops.models.pretrained import load_pair, save_pair
from spec_ops.models.target import CausalLM, TargetOutput

TARGET = ModelConfig(
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    aux_layers=(2, 4, 6),
)
TINY_TARGET = ModelConfig(
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    aux_layers=(1, 2, 3),
)
DRAFT_VOCAB = 128
UNROLL_STEPS = 4
STEP_DECAY = 0.8  # loss weight of an unrolled step relative to the one before
TARGET_LR, DRAFT_LR = 2e-3, 1e-3
GENERATED_SHARE = 0.3  # of the head's windows, the share written by the target
GENERATED_WINDOWS = 4096
GENERATION_BATCH = 2048
# A prompt starts with BOS at position 0. Windows cut at random almost never do, so a share of them is cut at a file's start.
DOCUMENT_SHARE = 0.1
EVALUATIONS = 20  # per phase


# Dense attention


class DenseAttention:
    """Causal attention over whole windows: what the paged steps compute, without a cache."""

    def mha(self, layer: int, q, k, v, *, rope: Rope | None = None, window_left: int = -1) -> torch.Tensor:
        """`q [bs, T, heads, dim]`, `k`, `v [bs, T, kv_heads, dim]`."""
        q, k = _prepared(q, k, rope, window_left)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class UnrolledAttention:
    """Attention of an EAGLE-3 head whose draft steps are unrolled, for all rows at once.

    Row `n` of step `j` is the draft that started from target features at position `n` and is now at position `n + j`. It sees
    what its paged counterpart sees: the keys of step 0 at positions up to `n`, and its own chain, which is row `n` of every
    step `1..j`. One object serves one unroll: it keeps the keys and values of all steps.
    """

    def __init__(self) -> None:
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    def mha(self, layer: int, q, k, v, *, rope: Rope | None = None, window_left: int = -1) -> torch.Tensor:
        """`q [bs, rows, heads, dim]`, `k`, `v [bs, rows, kv_heads, dim]` of the next step."""
        q, k = _prepared(q, k, rope, window_left)
        self.k.append(k)
        self.v.append(v)
        if len(self.k) == 1:
            return DenseAttention().mha(layer, q, k, v)
        rows, kv_heads, dim = k.shape[1:]
        q = q.unflatten(2, (kv_heads, -1)) * dim**-0.5  # [bs, rows, kv_heads, group, dim]
        past = torch.einsum("brhgd,bshd->bhgrs", q, self.k[0])
        visible = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        past = past.masked_fill(~visible, -math.inf)
        chain = torch.stack([torch.einsum("brhgd,brhd->bhgr", q, keys) for keys in self.k[1:]], -1)
        weights = torch.cat([past, chain], -1).float().softmax(-1).to(v.dtype)
        out = torch.einsum("bhgrs,bshd->brhgd", weights[..., :rows], self.v[0])
        for index, values in enumerate(self.v[1:]):
            out = out + torch.einsum("bhgr,brhd->brhgd", weights[..., rows + index], values)
        return out.flatten(2, 3)


class CachedAttention:
    """Dense KV cache of a fixed batch for generation: one prefill, then one token at a time. `length` tokens are held."""

    def __init__(self, config: ModelConfig, batch_size: int, max_length: int, dtype: torch.dtype, device: str) -> None:
        shape = (config.num_layers, batch_size, config.num_kv_heads, max_length, config.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")
        self.length = 0

    def mha(self, layer: int, q, k, v, *, rope: Rope | None = None, window_left: int = -1) -> torch.Tensor:
        """`q [bs, q_len, heads, dim]`, `k`, `v [bs, q_len, kv_heads, dim]`; `q_len` above 1 only into an empty cache."""
        q, k = _prepared(q, k, rope, window_left)
        end = self.length + k.shape[1]
        self.k[layer, :, :, self.length : end] = k.transpose(1, 2)
        self.v[layer, :, :, self.length : end] = v.transpose(1, 2)
        keys, values = self.k[layer, :, :, :end], self.v[layer, :, :, :end]
        q = q.transpose(1, 2).to(keys.dtype)
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=self.length == 0, enable_gqa=True)
        return out.transpose(1, 2)


def _prepared(q: torch.Tensor, k: torch.Tensor, rope: Rope | None, window_left: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` and `k`, rotated."""
    if window_left >= 0:
        raise ValueError("training attends to everything before a token; `sliding_window` must be None")
    return (q, k) if rope is None else (rotary(q, rope), rotary(k, rope))


# Losses


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on CUDA, nothing elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def next_token_loss(target: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats. `tokens [bs, T + 1]`."""
    with autocast(tokens.device):
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        output = target(inputs, torch.arange(inputs.shape[1], device=tokens.device), DenseAttention())
        logits = target.logits(output.hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def unroll(draft: Eagle3Draft, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Training-time test: the head's hidden states of `steps` draft steps, each `[bs, rows, hidden]`.

    Row `n` of step `j` stands at position `n + j`, takes token `n + j + 1` of the text and the hidden state of row `n` of step
    `j - 1` (step 0: `features`), and predicts token `n + j + 2`.

    Args:
        features: `draft.encode` of the target's output at positions `0 .. rows - 1`, `[bs, rows, hidden]`.
        tokens: `[bs, T]` with `T >= rows + steps`, from position 0 on.
    """
    rows, attention, hidden, result = features.shape[1], UnrolledAttention(), features, []
    positions = torch.arange(rows, device=tokens.device)
    for step in range(steps):
        hidden = draft(tokens[:, step + 1 : step + 1 + rows], hidden, positions + step, attention)
        result.append(hidden)
    return result


class DraftStep(NamedTuple):
    """One unrolled step. `logits [bs, rows, draft_vocab]` of the head, `target_logits [bs, rows, vocab]` for the same token."""

    logits: torch.Tensor
    target_logits: torch.Tensor


def draft_steps(target: CausalLM, draft: Eagle3Draft, tokens: torch.Tensor) -> list[DraftStep]:
    """Head and target side by side on `tokens [bs, T]`. Rows: `T - UNROLL_STEPS`, rounded down to a multiple of 8."""
    rows = (tokens.shape[1] - UNROLL_STEPS) // 8 * 8
    with autocast(tokens.device):
        with torch.no_grad():
            output = target(tokens, torch.arange(tokens.shape[1], device=tokens.device), DenseAttention())
            target_logits = target.logits(output.hidden).float()
        # float32, as the target's residual stream: autocast would leave the head's in bfloat16.
        features = draft.encode(TargetOutput(output.hidden[:, :rows], output.aux[:, :rows])).float()
        hidden = unroll(draft, features, tokens, UNROLL_STEPS)
        logits = [draft.logits(h).float() for h in hidden]
    return [DraftStep(own, target_logits[:, j + 1 : j + 1 + rows]) for j, own in enumerate(logits)]


def draft_loss(target: CausalLM, draft: Eagle3Draft, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats against the target's distribution over the draft vocabulary, averaged over the unrolled steps.

    Rows whose most likely token the head cannot name are left out: the renormalized rest would teach it noise.
    """
    ids = draft.draft_to_target
    nameable = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
    total, weight, weights = tokens.new_zeros((), dtype=torch.float32), 1.0, 0.0
    for step in draft_steps(target, draft, tokens):
        wanted = step.target_logits[..., ids].softmax(-1)
        loss = -(wanted * step.logits.log_softmax(-1)).sum(-1)
        kept = nameable[step.target_logits.argmax(-1)]
        total = total + weight * (loss * kept).sum() / kept.sum().clamp(min=1)
        weights += weight
        weight *= STEP_DECAY
    return total / weights


@torch.no_grad()
def agreement(target: CausalLM, draft: Eagle3Draft, windows: torch.Tensor, batch_size: int, first_row: int = 0) -> torch.Tensor:
    """Whether head and target name the same token, `[UNROLL_STEPS, rows]` bool over all of `windows [n, T]`; rows of a window
    before `first_row` are left out."""
    found = []
    for tokens in windows.split(batch_size):
        steps = draft_steps(target, draft, tokens)
        same = [draft.to_target(step.logits.argmax(-1)) == step.target_logits.argmax(-1) for step in steps]
        found.append(torch.stack(same)[:, :, first_row:].flatten(1))
    return torch.cat(found, 1)


def accept_length(agree: torch.Tensor) -> float:
    """Mean tokens per round of a greedy chain: the target's own, and the drafts before the first disagreement."""
    return 1 + agree.float().cumprod(0).sum(0).mean().item()


# Data


class TokenStream(NamedTuple):
    """Files back to back, each between BOS and EOS. `tokens [N] int16`; `documents [files] int64`, where each file starts."""

    tokens: torch.Tensor
    documents: torch.Tensor


def pack(files: list[Path], device: str) -> TokenStream:
    bos, eos = torch.tensor([ByteTokenizer.BOS]).short(), torch.tensor([ByteTokenizer.EOS]).short()
    pieces = []
    for file in files:
        text = torch.frombuffer(bytearray(file.read_bytes() or b"\n"), dtype=torch.uint8)
        pieces += [bos, text.short(), eos]
    tokens = torch.cat(pieces).to(device)
    return TokenStream(tokens, (tokens == ByteTokenizer.BOS).nonzero().flatten())


def cut(tokens: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Windows `[n, length] int64` of `tokens` at `starts [n]`."""
    return tokens[starts[:, None] + torch.arange(length, device=starts.device)].long()


def random_windows(stream: TokenStream, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`[count, length] int64`, a `DOCUMENT_SHARE` of them from the start of a file."""
    last = len(stream.tokens) - length
    options = {"generator": generator, "device": stream.tokens.device}
    anywhere = torch.randint(last + 1, (count,), **options)
    documents = stream.documents[torch.randint(len(stream.documents), (count,), **options)].clamp(max=last)
    return cut(stream.tokens, torch.where(torch.rand(count, **options) < DOCUMENT_SHARE, documents, anywhere), length)


def even_windows(stream: TokenStream, count: int, length: int) -> torch.Tensor:
    """`[n, length] int64`, the same in every call: up to `count` windows spread evenly and without overlap."""
    last = len(stream.tokens) - length
    count = min(count, len(stream.tokens) // length)
    return cut(stream.tokens, torch.linspace(0, last, count, device=stream.tokens.device).long(), length)


@torch.no_grad()
def generate(
    target: CausalLM, prompts: torch.Tensor, length: int, temperature: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """`prompts [bs, P]` continued by the target to `[bs, length]`. `temperature [bs]`; 0 is greedy."""
    device = prompts.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = CachedAttention(target.config, prompts.shape[0], length, dtype, str(device))
    tokens = torch.empty(prompts.shape[0], length, dtype=torch.long, device=device)
    tokens[:, : prompts.shape[1]] = prompts
    # Not cuDNN: it builds a plan for every KV length, which costs more than all the steps together.
    with autocast(device), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        for end in range(prompts.shape[1], length):
            start = attention.length
            output = target(tokens[:, start:end], torch.arange(start, end, device=device), attention)
            attention.length = end
            logits = target.logits(output.hidden[:, -1]).float()
            # argmax(logits + T * Gumbel noise) is a sample at temperature T, and the argmax at T = 0.
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            tokens[:, end] = (logits + temperature[:, None] * noise).argmax(-1)
    return tokens


# Training


def round_to_bfloat16(module: nn.Module) -> None:
    """Give the weights the values that a saved checkpoint will have."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())


def train(
    name: str,
    module: nn.Module,
    loss_function: Callable[[torch.Tensor], torch.Tensor],
    sample: Callable[[], torch.Tensor],
    heldout_loss: Callable[[], float],
    *,
    lr: float,
    steps: int,
    deadline: float | None,
) -> dict[str, Any]:
    """Optimize the parameters of `module` that require gradients: AdamW, warmup, cosine decay to zero.

    Args:
        sample: makes the `[bs, T]` tokens of one step.
        heldout_loss: called `EVALUATIONS` times.
        deadline: `time.perf_counter()` at which to stop, or None. The learning rate decays with the share of the budget that is
            used up, whichever of steps and time is further on, so it reaches zero either way.

    Returns:
        A JSON-ready record: steps, tokens, seconds, and the losses at every evaluation (training losses are means since the
        evaluation before).
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=parameters[0].is_cuda)
    warmup = max(1, min(200, steps // 10))
    curves: dict[str, list[float]] = {"step": [], "train_loss": [], "heldout_loss": []}
    started = timed_from = time.perf_counter()
    total, pending, counted, tokens_seen, step = None, 0, 0, 0, 0
    next_evaluation = 1 / EVALUATIONS

    with tqdm(total=steps, desc=name, unit="step", mininterval=1.0) as bar:
        while True:
            used = step / steps
            if deadline is not None and step > 0:
                # Time counts from the end of the first step: compilation is no reason to skip the high learning rates.
                now = time.perf_counter()
                used = max(used, (now - timed_from) / max(deadline - timed_from, 1e-9))
            done = used >= 1
            if done or used >= next_evaluation:
                curves["step"].append(step)
                curves["train_loss"].append(round(total.item() / counted, 4))
                curves["heldout_loss"].append(round(heldout_loss(), 4))
                total, counted = None, 0
                next_evaluation = max(next_evaluation, math.floor(used * EVALUATIONS) / EVALUATIONS) + 1 / EVALUATIONS
            if done:
                break
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * used))
            tokens = sample()
            loss = loss_function(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach() if total is None else total + loss.detach()
            step, counted, pending, tokens_seen = step + 1, counted + 1, pending + 1, tokens_seen + tokens.numel()
            # Reading the loss waits for the device. Rarely, so that it never idles; often enough for the clock to be true.
            if step == 1 or step % 10 == 0:
                value = loss.item()
                if not math.isfinite(value):
                    raise RuntimeError(f"{name}: loss is {value} at step {step}")
                if step == 1:
                    timed_from = time.perf_counter()
                else:
                    speed = (tokens_seen - tokens.numel()) / (time.perf_counter() - timed_from)
                    bar.set_postfix(loss=f"{value:.3f}", tokens_per_s=f"{speed:,.0f}", refresh=False)
                bar.update(pending)
                pending = 0
        bar.update(pending)
    seconds = time.perf_counter() - started
    return {"steps": step, "tokens": tokens_seen, "seconds": round(seconds, 1), "curves": curves}


def plot_losses(path: Path, target: dict[str, Any], draft: dict[str, Any]) -> None:
    """Training and held-out losses of both phases, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    panels = (
        (axes[0], target, 1 / math.log(2), "Target", "cross-entropy (bits per byte)"),
        (axes[1], draft, 1.0, f"EAGLE-3 head, mean of {UNROLL_STEPS} draft steps", "soft cross-entropy (nats per token)"),
    )
    for axis, record, unit, title, label in panels:
        curves = record["curves"]
        for key, name in (("train_loss", "train"), ("heldout_loss", "held out")):
            axis.plot(curves["step"], [value * unit for value in curves[key]], marker=".", label=name)
        axis.set(title=title, xlabel="optimizer steps", ylabel=label)
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(
    corpus: Annotated[
        Path | None, typer.Option(help="Directory of *.py files; default: this Python's standard library.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the checkpoint goes.")] = Path("checkpoint"),
    target: Annotated[Path | None, typer.Option(help="Checkpoint whose target to keep; only the head is trained then.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, windows and samples.")] = 0,
    target_steps: Annotated[int, typer.Option(min=1, help="Most optimizer steps of the target.")] = 4000,
    draft_steps: Annotated[int, typer.Option(min=1, help="Most optimizer steps of the head.")] = 7000,
    target_minutes: Annotated[
        float | None, typer.Option(help="Most minutes of the target's training, compilation included.")
    ] = None,
    draft_minutes: Annotated[float | None, typer.Option(help="The same for the head, text generation included.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 64,
    seq_len: Annotated[int, typer.Option(min=32, help="Tokens per window.")] = 1024,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    compile: Annotated[bool, typer.Option(help="torch.compile the losses (CUDA only).")] = True,
    plot: Annotated[Path | None, typer.Option(help="Write the loss curves to this PNG (needs matplotlib).")] = None,
    tiny: Annotated[
        bool, typer.Option(help="A few steps of a smaller model on a slice of the corpus; sets steps, batch and window.")
    ] = False,
) -> None:
    """Train a byte-level target and its EAGLE-3 head; write them to OUT."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if plot is not None:
        import matplotlib  # noqa: F401  missing: say so now, not after the training
    config, generated_windows, eval_windows = TARGET, GENERATED_WINDOWS, 256
    if tiny:
        config, generated_windows, eval_windows = TINY_TARGET, 8, 16
        target_steps, draft_steps, batch_size, seq_len = 60, 40, 8, 64
    compiled = compile and torch.device(device).type == "cuda"
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    console = Console()

    files: dict[str, list[Path]] = {"train": [], "heldout": []}
    for file in stdlib_files(corpus):
        files[split_of(file)].append(file)
    if tiny:
        files = {split: paths[:40] for split, paths in files.items()}
    if not (files["train"] and files["heldout"]):
        raise typer.BadParameter(f"{corpus or 'the standard library'} has too few *.py files to train and to hold out")
    streams = {split: pack(paths, device) for split, paths in files.items()}
    for split, stream in streams.items():
        if len(stream.tokens) <= seq_len:
            raise typer.BadParameter(f"the {split} split has {len(stream.tokens)} tokens, too few for windows of {seq_len}")
        console.print(f"{split}: {len(files[split]):,} files, {len(stream.tokens) / 1e6:.2f}M tokens")
    metadata: dict[str, Any] = {
        "seed": seed,
        "corpus_bytes": {split: sum(path.stat().st_size for path in paths) for split, paths in files.items()},
        "batch_size": batch_size,
        "seq_len": seq_len,
        "device": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "cpu",
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
    }

    def loss_on(function: Callable[..., torch.Tensor], modules: tuple[nn.Module, ...], windows: torch.Tensor) -> float:
        with torch.no_grad():
            losses = [function(*modules, tokens) * len(tokens) for tokens in windows.split(batch_size)]
        return (torch.stack(losses).sum() / len(windows)).item()

    # Target
    started = time.perf_counter()
    if target is None:
        model = CausalLM(config).to(device)
        heldout = even_windows(streams["heldout"], batch_size, seq_len + 1)
        function = torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss
        metadata["target"] = train(
            "target",
            model,
            lambda tokens: function(model, tokens),
            lambda: random_windows(streams["train"], batch_size, seq_len + 1, generator),
            lambda: loss_on(next_token_loss, (model,), heldout),
            lr=TARGET_LR,
            steps=target_steps,
            deadline=None if target_minutes is None else started + 60 * target_minutes,
        )
    else:
        model = load_pair(target, device=device)[0]
        config = model.config
        metadata["target"] = json.loads((target / "config.json").read_text(encoding="utf-8"))["training"]["target"]
    round_to_bfloat16(model)
    model.requires_grad_(False)
    heldout = even_windows(streams["heldout"], 4 * eval_windows, seq_len + 1)
    bits_per_byte = loss_on(next_token_loss, (model,), heldout) / math.log(2)
    metadata["target"]["heldout_bits_per_byte"] = round(bits_per_byte, 4)
    console.print(f"target: {bits_per_byte:.3f} bits per held-out byte")

    # Head
    started = time.perf_counter()
    counts = torch.bincount(streams["train"].tokens.long(), minlength=config.vocab_size)
    draft_to_target = counts.topk(DRAFT_VOCAB).indices.sort().values
    head_config = ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
    )
    head = Eagle3Draft(head_config, model, draft_to_target.cpu()).to(device)
    with torch.no_grad():  # a head start: the target's own rows for the draft vocabulary
        head.lm_head.weight.copy_(model.lm_head.weight[draft_to_target])
    # The target's phase is the longer one: with an untrained head, the checkpoint is already worth having.
    save_pair(out, model, head, metadata)

    # Half of the generated windows are greedy, as the shipped pair is mostly decoded, half sampled: greedy text is repetitive.
    prompt = seq_len // 4
    written: list[torch.Tensor] = []
    for count in torch.full((generated_windows,), 1).split(GENERATION_BATCH):
        if written and draft_minutes is not None and time.perf_counter() - started > 15 * draft_minutes:
            break  # a quarter of the time is enough
        temperature = torch.where(torch.arange(len(count), device=device) % 2 == 0, 0.0, 0.7)
        prompts = random_windows(streams["train"], len(count), prompt, generator)
        written.append(generate(model, prompts, seq_len, temperature, generator))
    own_text = torch.cat(written)
    console.print(f"generated {own_text.numel() / 1e6:.2f}M tokens in {time.perf_counter() - started:.0f} s")

    def sample_mixed() -> torch.Tensor:
        text = random_windows(streams["train"], batch_size, seq_len, generator)
        own = own_text[torch.randint(len(own_text), (batch_size,), generator=generator, device=device)]
        use_own = torch.rand(batch_size, 1, generator=generator, device=device) < GENERATED_SHARE
        return torch.where(use_own, own, text)

    heldout = even_windows(streams["heldout"], batch_size, seq_len)
    head_function = torch.compile(draft_loss, dynamic=False) if compiled else draft_loss
    metadata["draft"] = train(
        "draft",
        head,
        lambda tokens: head_function(model, head, tokens),
        sample_mixed,
        lambda: loss_on(draft_loss, (model, head), heldout),
        lr=DRAFT_LR,
        steps=draft_steps,
        deadline=None if draft_minutes is None else started + 60 * draft_minutes,
    )
    round_to_bfloat16(head)

    heldout = even_windows(streams["heldout"], eval_windows, seq_len)
    greedy = generate(model, heldout[:, :prompt], seq_len, torch.zeros(len(heldout), device=device), generator)
    agree = {
        "held-out text": agreement(model, head, heldout, batch_size),
        "greedy continuations": agreement(model, head, greedy, batch_size, first_row=prompt),
    }
    metadata["draft"]["agreement"] = {name: [round(x, 4) for x in a.float().mean(1).tolist()] for name, a in agree.items()}
    metadata["draft"]["accept_length"] = round(accept_length(agree["greedy continuations"]), 3)
    save_pair(out, model, head, metadata)
    if plot is not None:
        plot_losses(plot, metadata["target"], metadata["draft"])

    table = Table(title="Held out")
    table.add_column("")
    for name in agree:
        table.add_column(name, justify="right")
    table.add_row("target, bits per byte", f"{bits_per_byte:.3f}", "")
    for step in range(UNROLL_STEPS):
        shares = [f"{100 * share[step]:.1f}%" for share in metadata["draft"]["agreement"].values()]
        table.add_row(f"agreement, draft step {step + 1}", *shares)
    table.add_row(f"tokens per round, {UNROLL_STEPS} drafts", "", f"{metadata['draft']['accept_length']:.2f}")
    console.print(table)
    console.print(f"saved to {out}")


if __name__ == "__main__":
    typer.run(main)
