"""`python -m spec_ops explain`."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils._pytree import tree_map

from spec_ops.cli.options import (
    Device,
    Steps,
    TopK,
    TreeTokens,
    console,
    parse_arch_option,
    parse_config,
    parse_device,
    parse_dtype,
    refusing,
    writable_file,
)
from spec_ops.decoding import Generator
from spec_ops.models import CausalLM, Eagle3Draft
from spec_ops.models.pretrained import load_pair
from spec_ops.parallel import TensorParallel
from spec_ops.parallel import load_pair as load_shares
from spec_ops.parallel.fake import first_of

_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
_RAISED = re.compile(r"raised exception (?P<kind>\w+)\((?P<quote>['\"])(?P<message>.*)(?P=quote)\)")
_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"


def explain(
    factory: Annotated[
        str | None,
        typer.Argument(
            help="FILE.py:FUNCTION that returns what to compile, or (it, *arguments); default: the shipped pair's round."
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Plan for this architecture, such as sm100; default: this machine's.")
    ] = None,
    steps: Steps = 3,
    tree_width: TopK = 1,
    tree_tokens: TreeTokens = None,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="bfloat16, float16 or float32; default: bfloat16, or with FACTORY that of its models."),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            "--tp", min=1, help="Plan for one of this many ranks that share the models. FACTORY is called as if by torchrun."
        ),
    ] = 1,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every count, rewrite and refusal, and why not another kernel.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(callback=writable_file, help="Write a page with the graph before and after, to open in a browser."),
    ] = None,
) -> None:
    """What the graph passes make of a round: kernels chosen, what was removed, what stays and why. Runs nothing.

    For example: explain examples/naive_round.py:make_round --arch sm100 --html plan.html
    """
    from spec_ops.passes import explain as explain_graph

    capability = parse_arch_option(arch)
    # `.item()` becomes a node that a pass can remove, instead of a graph break.
    world = contextlib.nullcontext() if factory is None or tp == 1 else first_of(tp)
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True), world:
        if factory is None:
            target, draft = _pair(tp, parse_device(device), parse_dtype(dtype or "bfloat16"))
            made: Any = Generator(target, draft, parse_config(steps, tree_width, tree_tokens), max_batch_size=8).round(8)
            report = explain_graph(made, arch=capability)
        else:
            made = _made_by(factory)
            parts = made if isinstance(made, tuple) else (made,)
            if dtype is not None:
                parts = _in_dtype(parts, parse_dtype(dtype))
            if not callable(parts[0] if parts else None):
                raise _bad_factory(f"must return what to compile, or (it, *arguments), got {type(made).__name__}")
            if problem := _cannot_call(*parts):
                raise _bad_factory(f"must return what to compile and its arguments: {problem}")
            try:
                with _quiet():
                    report = explain_graph(*parts, arch=capability)
            except Exception as error:  # of the user's code, which a traceback through the compiler does not show
                if _is_a_defect_of_a_pass(error):
                    raise
                raise _bad_factory(_in_a_line(error)) from error
    console.print(report.text(verbose), markup=False, soft_wrap=True)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(report.to_html(), encoding="utf-8")
        console.print(f"\nwrote {html}", markup=False, soft_wrap=True)
    elif not verbose:
        elsewhere = "; --arch sm100 plans for a GPU" if report.place.arch is None else ""
        more = f"\n--verbose shows every rewrite and refusal, --html FILE the graph before and after{elsewhere}"
        console.print(more, markup=False, soft_wrap=True)


def _pair(ranks: int, device: torch.device, dtype: torch.dtype) -> tuple[CausalLM, Eagle3Draft]:
    """The shipped one; of more than one rank, the first one's share."""
    if ranks == 1:
        return load_pair(device=device, dtype=dtype)[:2]
    with refusing("--tp"):
        return load_shares(TensorParallel.fake(ranks), device=device, dtype=dtype)[:2]


def _is_a_defect_of_a_pass(error: BaseException | None) -> bool:
    """Whether what the compiler raised comes from a `PassError`: ours to answer for, with the traceback."""
    from spec_ops.passes import PassError

    while error is not None and not isinstance(error, PassError):
        error = error.__cause__ or error.__context__
    return error is not None


def _bad_factory(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="FACTORY")


def _made_by(factory: str) -> Any:
    file, _, name = factory.rpartition(":")
    if not file and Path(name).is_file():
        raise _bad_factory(f"must name a function of that file: {name}:FUNCTION")
    if not Path(file).is_file():
        raise _bad_factory(f"no such file: {file or factory!r}; write FILE.py:FUNCTION")
    function = _load(Path(file), name)
    if problem := _cannot_call(function):
        raise _bad_factory(f"{name}{inspect.signature(function)} must take no arguments: {problem}")
    try:
        return function()
    except Exception as error:
        raise _bad_factory(_in_a_line(error)) from error


def _in_dtype(parts: tuple, dtype: torch.dtype) -> tuple:
    """A module and its arguments, floating-point numbers in `dtype`."""
    if not parts or not isinstance(parts[0], torch.nn.Module):
        raise typer.BadParameter("is for modules; the FACTORY of a function decides its dtype", param_hint="--dtype")

    def converted(part: Any) -> Any:
        return part.to(dtype) if isinstance(part, torch.Tensor) and part.is_floating_point() else part

    return parts[0].to(dtype), *tree_map(converted, parts[1:])


def _cannot_call(fn: Callable, *args: Any) -> str | None:
    """Why `fn` does not take `args`; None if it does, or has no signature that says (some builtins)."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except ValueError:
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return None


def _load(file: Path, name: str) -> Callable:
    # Not its own name, which may be that of a module in use: `random.py`, `types.py`.
    spec = importlib.util.spec_from_file_location(f"_explained_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise _bad_factory(f"{file} is no Python file; write FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the file's own classes look themselves up
    sys.path.insert(0, str(file.resolve().parent))  # as for a script: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _bad_factory(_in_a_line(error)) from error
    if not callable(found := getattr(module, name, None)):
        raise _bad_factory(f"{file} has no function {name!r}")
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs of an error before it is raised: tracebacks through the compiler."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _in_a_line(error: Exception) -> str:
    """What went wrong and where in the user's code: as the user's code or an op of ours says it, not as the compiler does."""
    text = str(error)
    cause: BaseException | None = error
    while cause is not None and type(cause).__module__.startswith(_COMPILER):
        cause = cause.__cause__ or cause.__context__
    first = next((line.strip() for line in str(cause or text).splitlines() if line.strip()), "no message")
    said = f"{type(cause or error).__name__}: {first}"
    if cause is None and (raised := _RAISED.search(text)):
        said = f"{raised['kind']}: {raised['message']}"
    frames = re.findall(r'File "(.+?)", line (\d+)', text.partition("from user code")[2])
    frames = frames or [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_PACKAGE)]
    return f"{said} ({own[-1]})" if own else said.removeprefix("RuntimeError: explain: ")
