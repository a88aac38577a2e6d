"""What of SGLang is hooked, once an engine was asked for the backend.

| target | why |
|---|---|
| `DraftBackendFactory.create_decode_backend`, `create_draft_extend_backend` | they know SGLang's own names alone |
| `build_tree_kernel_efficient` (before 0.5.23) | it must write our mask as `[requests, D, D]`; later `verify_mask` says so |
| `TritonAttnBackend` (`ABC.register`) | a draft extend is captured for a list of classes alone |
| `AttentionBackendRegistry.register` | MLA prefill of unknown names is dense, past the cache |

Every hook hands calls that are not about our backend to what was there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from spec_ops.integrations.sglang.symbols import NAME, has_verify_mask, root

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_BUILD_TREE = "sglang.srt.speculative.eagle_utils.build_tree_kernel_efficient"
MASK_MARK = "is_spec_ops_verify_mask"  # an attribute of the buffer that SGLang is given
_installed: set[str] = set()


def knows_verify_masks() -> bool:
    folder = root()
    return folder is not None and has_verify_mask(folder)


def install(backend: type, draft_steps: Callable[[Any, int, int], Any], *, uses_mla: bool) -> None:
    """Put the hooks in; those that are in stay.

    Raises:
        RuntimeError: SGLang did not take one (it only logs that).
    """
    if uses_mla and "mla" not in _installed:
        _take_absorbed_mla()
        _installed.add("mla")
    if "draft" in _installed:
        return
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    TritonAttnBackend.register(backend)

    def create_decode_backend(original: Callable, factory: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(factory, decode=True):
            return original(factory, *args, **kwargs)
        if factory.speculative_num_steps <= 1:  # the one draft token comes from the draft extend
            return None
        return _stamped(draft_steps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps))

    def create_draft_extend_backend(original: Callable, factory: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(factory, decode=_draft_extends_as_decode(factory)):
            return original(factory, *args, **kwargs)
        return _stamped(backend(factory.draft_model_runner))

    targets = {
        f"{_FACTORY}.create_decode_backend": create_decode_backend,
        f"{_FACTORY}.create_draft_extend_backend": create_draft_extend_backend,
    }
    if not knows_verify_masks():
        targets[_BUILD_TREE] = _build_tree()
    before = {target: _resolve(target) for target in targets}
    for target, hook in targets.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    if missed := [target for target, was in before.items() if _resolve(target) is was]:
        raise RuntimeError(f"spec_ops: SGLang did not hook {', '.join(missed)}; its log says why")
    _installed.add("draft")


def _resolve(target: str) -> Any:
    parts = target.split(".")
    depth = next(i for i, part in enumerate(parts) if part[0].isupper() or i == len(parts) - 1)
    found: Any = importlib.import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        found = getattr(found, part)
    return found


def _is_ours(factory: Any, *, decode: bool) -> bool:
    """Whether the draft's own backend, or else the engine's for this phase, is ours."""
    if factory.draft_attn_backend:
        return factory.draft_attn_backend == NAME
    if hasattr(factory, "server_args"):
        names = factory.server_args.get_attention_backends()
    else:
        from sglang.srt.runtime_context import attention_backends

        names = attention_backends()
    return names[1 if decode else 0] == NAME


def _draft_extends_as_decode(factory: Any) -> bool:
    if hasattr(factory, "server_args"):
        return factory.server_args.speculative_attention_mode == "decode"
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_attention_mode == "decode"


def _stamped(backend: Any) -> Any:
    """With the names that SGLang writes on its own."""
    for each in (backend, *getattr(backend, "attn_backends", ())):
        each.prefill_attention_backend_str = each.decode_attention_backend_str = NAME
    return backend


def _build_tree() -> Callable:
    """The mask's layout follows from whose buffer it is: ours has room for no other."""

    def hook(original: Callable, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.speculative.eagle_utils import TreeMaskMode

        bound = inspect.signature(original).bind(*args, **kwargs)
        if getattr(bound.arguments.get("tree_mask_buf"), MASK_MARK, False):
            bound.arguments["tree_mask_mode"] = TreeMaskMode.QLEN_ONLY
        return original(*bound.args, **bound.kwargs)

    return hook


def _take_absorbed_mla() -> None:
    """Prefill attends over the cache, as every other step does: the prompt's latents are in it, and no dense keys are made."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(NAME, lambda attn, forward_batch: AttnForwardMethod.MLA)
