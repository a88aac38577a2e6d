"""`experts_implementation="spec_ops"`: the function that transformers' experts modules call, on the op `moe_experts`.

An experts module says how its weights lie (`use_experts_implementation`), and computes what lies between its two products with
`_apply_gate`, or `act_fn` without a gate: any Python. So a few rows go through it and through the op, and the form of the op
that gives the same is the module's. Experts of fine-grained fp8, and those in fp4 of such checkpoints, are read as they are
stored, and their rows keep their dtype: transformers' own kernels round those to 8 bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

try:
    from transformers.integrations.moe import ExpertsInterface
except ImportError:  # renamed or gone: models keep their own experts
    ExpertsInterface = None  # type: ignore[assignment, misc]

from spec_ops.backends.expert_format import expert_format
from spec_ops.backends.registry import device_arch
from spec_ops.ops.moe import ACTIVATIONS, moe_experts

NAME = "spec_ops"
_FORM = "_spec_ops_form"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORED = (torch.float8_e4m3fn, torch.int8, torch.uint8)  # fp8; fp4 and int4 (`packed_experts.py`), two in a byte
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")


class Form(NamedTuple):
    """The keyword arguments of `moe_experts` that say what a module computes."""

    activation: str
    gated: bool
    interleaved: bool
    transposed: bool
    limit: float | None
    alpha: float
    beta: float


def register_experts() -> None:
    """Make `experts_implementation="spec_ops"` known to transformers."""
    if ExpertsInterface is None:
        return
    ExpertsInterface.register(NAME, experts_forward)
    try:
        fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    except ImportError:  # its own requirements: then no model has such experts
        return
    if (interface := getattr(fp8, "FP8ExpertsInterface", None)) is not None:
        interface.register(NAME, experts_forward)


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function of `experts_implementation="spec_ops"`, with the signature of transformers' experts interface.

    Args:
        self: the experts module.
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, k]`; with expert parallelism ids from `num_experts` on are other ranks' experts.
        top_k_weights: `[tokens, k]`.

    Returns:
        `[tokens, hidden]`.

    Raises:
        ValueError: the module computes what `moe_experts` does not, or is compiled before it ever ran.
    """
    form = getattr(self, _FORM, None)
    if form is None:
        if torch.compiler.is_compiling():
            raise ValueError(f"spec_ops experts: {type(self).__name__} must run once before it is compiled: call the model")
        form = form_of(self)
        setattr(self, _FORM, form)
    if getattr(self, "_is_expert_parallel", False):
        top_k_index = torch.where(top_k_index < self.down_proj.shape[0], top_k_index, -1)  # type: ignore[union-attr, index]
    first = "gate_up_proj" if form.gated else "up_proj"
    gate_up, gate_up_scale = _stack(self, first)
    down, down_scale = _stack(self, "down_proj")
    return moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up,
        down,
        gate_up_bias=getattr(self, f"{first}_bias") if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,  # type: ignore[arg-type]
        **form._asdict(),
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )


def _stack(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A stack of weights and its scales as `moe_experts` takes them."""
    stack = getattr(module, name)
    if stack.element_size() > 1:
        return stack, None
    scale = getattr(module, f"{name}_scale_inv")
    if stack.dtype == torch.int8:  # two numbers of MXFP4
        return stack.view(torch.uint8), scale.view(torch.uint8)
    if stack.dtype == torch.uint8:  # of int4
        return stack, scale
    return stack, scale.float()  # which may be powers of 2 in 8 bits


def is_experts(module: nn.Module) -> bool:
    """Whether it goes through transformers' experts interface."""
    return all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "is_concatenated", "is_transposed", "down_proj"))


@torch.no_grad()
def form_of(module: nn.Module) -> Form:
    """The form of the op that computes what an experts module does.

    Raises:
        ValueError: none does; the message says why.
    """
    name = f"spec_ops experts: {type(module).__name__}"
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name} norms what each expert gives, which `moe_experts` does not compute")
    weights = [module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj]
    for weight in weights:
        plain = isinstance(weight, torch.Tensor) and type(weight.data) is torch.Tensor and weight.dim() == 3
        if not plain or weight.dtype not in (*_DTYPES, *_STORED):
            found = f"{type(weight.data).__name__} of {weight.dtype}" if isinstance(weight, torch.Tensor) else type(weight)
            raise ValueError(f"{name} must have weights of float32, bfloat16 or float16, [experts, rows, columns], got {found}")
    _check_stored(module, name)
    rows = 6 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0), device="cpu")  # close to 0 and past limits
    there = rows.to(weights[0].device)  # type: ignore[arg-type]
    wanted = (module._apply_gate(there) if module.has_gate else module.act_fn(there)).float().cpu()  # type: ignore[operator]
    for form in _candidates(module):
        if torch.allclose(_between(rows, form), wanted, rtol=1e-4, atol=1e-5):
            return form
    raise ValueError(f"{name} puts something between its products that `moe_experts` does not compute")


def _check_stored(module: nn.Module, name: str) -> None:
    """Refuse experts of 8 or 4 bits in a format that `moe_experts` does not read."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    stack: Any = getattr(module, first)
    if stack.element_size() > 1:
        return
    if module.is_transposed:
        raise ValueError(f"{name} must not be transposed with weights of {stack.dtype}")
    arch = device_arch(stack.device)
    if stack.dtype == torch.float8_e4m3fn and arch is not None and arch < 89:
        raise ValueError(f"{name} of {stack.dtype} need sm_89 or newer, got sm_{arch}")
    for part, parts in ((first, 2 if module.has_gate and module.is_concatenated else 1), ("down_proj", 1)):
        scale = getattr(module, f"{part}_scale_inv", None)
        if not isinstance(scale, torch.Tensor) or (stack.dtype == torch.int8 and scale.element_size() > 1):
            got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
            raise ValueError(f"{name} must have scales `{part}_scale_inv` of a known dtype, got {got}")
        try:
            expert_format(name, part, *_stack(module, part), parts)
        except (TypeError, ValueError) as error:
            raise ValueError(str(error)) from None


def _candidates(module: nn.Module) -> Iterator[Form]:
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    limits = [None, *_numbers(module, _LIMITS)] if gated else [None]
    alphas = [1.0, *_numbers(module, _ALPHAS)]
    for activation in ACTIVATIONS:
        for interleaved in (not module.is_concatenated, bool(module.is_concatenated)) if gated else (False,):
            for limit in limits:
                for alpha in alphas if activation == "silu" else [1.0]:
                    for beta in (0.0, 1.0) if gated else (0.0,):
                        yield Form(activation, gated, interleaved, transposed, limit, alpha, beta)


def _numbers(module: nn.Module, names: tuple[str, ...]) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [float(value) for value in found if isinstance(value, (int, float))]


def _between(rows: torch.Tensor, form: Form) -> torch.Tensor:
    """What the op computes between its products: with weights of one expert that change nothing."""
    first = torch.eye(rows.shape[1], device="cpu")
    second = torch.eye(rows.shape[1] // 2 if form.gated else rows.shape[1], device="cpu")
    padded = torch.zeros(rows.shape[1], second.shape[0], device="cpu")
    padded[: second.shape[0]] = second
    ids, weights = torch.zeros(len(rows), 1, dtype=torch.int64, device="cpu"), torch.ones(len(rows), 1, device="cpu")
    arguments = form._replace(transposed=False)._asdict()
    return moe_experts(rows, ids, weights, first[None], padded[None], **arguments)[:, : second.shape[0]]


def implementations(model: PreTrainedModel) -> dict[str, str | None]:
    """What `set_experts_implementation` takes to make everything as it is now."""
    configs = {"": model.config, **{key: getattr(model.config, key) for key in model.config.sub_configs}}
    return {key: getattr(c, "_experts_implementation", None) for key, c in configs.items() if c is not None}


def present(model: PreTrainedModel) -> bool:
    """Whether `model` has experts: the first layers of a mixture may be dense, and a draft may have no others."""
    return any(is_experts(module) for module in model.modules())


def stored(model: PreTrainedModel) -> bool:
    """Whether experts of `model` are of 8 or 4 bits."""
    return any(is_experts(module) and module.down_proj.element_size() == 1 for module in model.modules())  # type: ignore[union-attr, operator]


def supported(model: PreTrainedModel) -> bool:
    """Whether all experts of `model` can run on `moe_experts`, and there are any. Finds their forms."""
    modules = [module for module in model.modules() if is_experts(module)]
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not modules or ExpertsInterface is None or not any(m._can_set_experts_implementation() for m in models):
        return False
    if "deepgemm_megamoe" in implementations(model).values():  # which cannot be switched after loading
        return False
    try:
        for module in modules:
            setattr(module, _FORM, form_of(module))
    except ValueError:
        return False
    return True


@contextmanager
def using_experts(model: PreTrainedModel, name: str | dict[str, Any]) -> Iterator[None]:
    """Let `model` and its parts use the experts implementation `name`; afterwards everything is as before."""
    before = implementations(model)
    try:
        model.set_experts_implementation(name)
        yield
    finally:
        model.set_experts_implementation(before)
