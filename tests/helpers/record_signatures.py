"""Records the signatures of FlashInfer and TokenSpeed that we call, from unpacked wheels, without importing them.

    pip download --no-deps -d wheels flashinfer-python==0.7.2.post1 && unzip wheels/flashinfer*.whl -d unpacked
    python tests/helpers/record_signatures.py unpacked [unpacked2 ...]    # writes tests/helpers/data/flashinfer_signatures.json

Neither package is installed where the tests usually run (1.4 GB with what it needs); `provider_fakes.py` binds calls to these.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent / "data" / "flashinfer_signatures.json"
# Public path: candidates for the file that defines it (it moved), and the name there.
SOURCES = {
    "flashinfer.decode:trtllm_batch_decode_with_kv_cache": ["flashinfer/decode.py"],
    "flashinfer.decode:xqa_batch_decode_with_kv_cache": ["flashinfer/decode.py"],
    "flashinfer.prefill:trtllm_batch_context_with_kv_cache": ["flashinfer/prefill.py"],
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper": ["flashinfer/prefill.py"],
    "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla": ["flashinfer/mla/_core.py"],
    "flashinfer.mla:BatchMLAPagedAttentionWrapper": ["flashinfer/mla/_batch_mla/_wrapper.py", "flashinfer/mla/_core.py"],
    "flashinfer.page:append_paged_kv_cache": ["flashinfer/page.py"],
    "flashinfer.page:append_paged_mla_kv_cache": ["flashinfer/page.py"],
    "tokenspeed_mla:tokenspeed_mla_decode": ["tokenspeed_mla/mla_decode.py"],
    "flashinfer.sampling:softmax": ["flashinfer/sampling.py"],
    "flashinfer.sampling:sampling_from_logits": ["flashinfer/sampling.py"],
    "flashinfer.sampling:top_p_sampling_from_probs": ["flashinfer/sampling.py"],
    "flashinfer.sampling:min_p_sampling_from_probs": ["flashinfer/sampling.py"],
    "flashinfer.sampling:top_k_top_p_sampling_from_logits": ["flashinfer/sampling.py"],
    "flashinfer.sampling:top_k_renorm_probs": ["flashinfer/sampling.py"],
    "flashinfer.sampling:top_p_renorm_probs": ["flashinfer/sampling.py"],
    "flashinfer.sampling:chain_speculative_sampling": ["flashinfer/sampling.py"],
}
METHODS = ("__init__", "plan", "run")


def parameters(function: ast.FunctionDef) -> str:
    """The parameters as Python writes them, `...` for each default and without annotations: `"query, out=..., *, mask=..."`."""
    spec = function.args
    for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg):
        if argument is not None:
            argument.annotation = None
    spec.defaults = [ast.Constant(...) for _ in spec.defaults]
    spec.kw_defaults = [None if d is None else ast.Constant(...) for d in spec.kw_defaults]
    return ast.unparse(spec)


def last_definition(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The last one: those before it are typing overloads."""
    found = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name]
    return found[-1] if found else None


def record(root: Path) -> dict[str, dict]:
    """`{"package version": {public path: parameters}}` of the packages unpacked in `root`."""
    recorded: dict[str, dict] = {}
    for info in root.glob("*.dist-info"):
        name, version = info.name.removesuffix(".dist-info").split("-")
        signatures = {}
        for path, files in SOURCES.items():
            module, symbol = path.split(":")
            file = next((root / f for f in files if (root / f).is_file()), None)
            if file is None or not name.startswith(module.split(".")[0]):
                continue
            node = last_definition(ast.parse(file.read_text()).body, symbol)
            if isinstance(node, ast.FunctionDef):
                signatures[path] = parameters(node)
            elif isinstance(node, ast.ClassDef):
                for method in METHODS:
                    function = last_definition(node.body, method)
                    assert isinstance(function, ast.FunctionDef), f"{symbol}.{method}"
                    signatures[f"{path}.{method}"] = parameters(function)
            else:
                raise SystemExit(f"{name} {version}: {file} has no {symbol}")
        if signatures:
            recorded[f"{name.replace('_', '-')} {version}"] = signatures
    return recorded


if __name__ == "__main__":
    everything: dict[str, dict] = {}
    for folder in sys.argv[1:]:
        everything |= record(Path(folder))
    OUTPUT.write_text(json.dumps(everything, indent=2, sort_keys=True) + "\n")
    print(*(f"{package}: {len(signatures)} signatures" for package, signatures in everything.items()), sep="\n")
