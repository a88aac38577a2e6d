"""The likeliest few tokens of each row of logits, and their scores, in one launch."""

from __future__ import annotations

import torch

from spec_ops.ops._library import define_op
from spec_ops.ops._validate import Checker
from spec_ops.ops.reference import topk as reference

MAX_TOP_K = 32
MAX_ROW = 1 << 20  # one program joins what the programs of a row's parts have found
SCORES = ("log_softmax", "softmax", "none")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _topk_logits_fake(logits, k, scores, dtype):
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


topk_logits_op = define_op(
    "topk_logits(Tensor logits, int k, str scores, ScalarType dtype) -> (Tensor values, Tensor ids)",
    reference.topk_logits,
    _topk_logits_fake,
    cuda="spec_ops.backends.triton.drafting.topk:topk_logits",
    invariant=True,
)


def topk_logits(
    logits: torch.Tensor, k: int, *, scores: str = "log_softmax", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest logits of each row: their scores, in descending order, and their ids.

    As `torch.log_softmax(logits.float(), -1).topk(k)`, which takes about twenty launches on a GPU where rows are few and long.
    Equal logits come by ascending id; torch does not define their order. NaN counts as the largest.

    Args:
        logits: `[V]`, `[N, V]` or `[bs, K, V]` float32, bfloat16 or float16; `V` is at most 2**20.
        k: 1 to 32, and at most `V`.
        scores: `"log_softmax"`, `"softmax"`, or `"none"` for the logits themselves; computed in float32.
        dtype: of the scores, which are rounded to it: float32, bfloat16 or float16.

    Returns:
        `(values [..., k], ids [..., k] int64)`.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: the draft step of EAGLE-2 trees (arXiv:2406.16858); SGLang `fast_topk`.
    """
    check = Checker("topk_logits")
    check.tensor("logits", logits, rank=(1, 2, 3), dtypes=FLOATS)
    check.integer("k", k, 1, min(MAX_TOP_K, logits.shape[-1]))
    if logits.shape[-1] > MAX_ROW:
        check.fail("logits", f"of rows of at most {MAX_ROW} values", f"rows of {logits.shape[-1]}")
    if scores not in SCORES:
        check.fail("scores", "one of " + ", ".join(map(repr, SCORES)), repr(scores))
    if dtype not in FLOATS:
        check.fail("dtype", "torch.float32, torch.bfloat16 or torch.float16", dtype, TypeError)
    return topk_logits_op(logits, k, scores, dtype)
