"""Top-k, top-p and min-p together, over rows with ties and masks, against a sort in float64."""

from __future__ import annotations

import math
import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is not what runs on a GPU"),
]

from benchmarks.sampling.cases import Setting, random_logits  # noqa: E402
from benchmarks.sampling.expected import Rows  # noqa: E402
from spec_ops.backends.triton.sampling import support  # noqa: E402

VOCAB = 128_256
SETTINGS = [  # each of the three is the one that cuts most; then rows with masks, and the top's own ties
    Setting("k", 40, 0.99, 1e-4),
    Setting("p", 20_000, 0.5, 1e-6),
    Setting("m", 1000, 0.999, 0.05),
    Setting("masked", 2000, 0.9, 1e-7),
    Setting("ties", 3, 0.9999, 0.9),
]


def rows_of_all_kinds(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, VOCAB]`: in turn peaked, flat, all but a hundredth masked, and of few values, so that cuts fall among ties."""
    generator = torch.Generator("cuda").manual_seed(1)
    peaked, flat = (random_logits(kind, (rows // 4, VOCAB), torch.float32, generator) for kind in ("peaked", "flat"))
    masked = peaked.masked_fill(torch.rand(peaked.shape, generator=generator, device="cuda") < 0.99, -math.inf)
    coarse = (flat * 4).round() / 4 * 2
    return torch.stack([peaked, flat * 3, masked, coarse], 1).flatten(0, 1).to(dtype)


@pytest.mark.parametrize("rows", [4, 72])  # many programs a row, which search; one, which counts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_three_settings(dtype, rows):
    logits = rows_of_all_kinds(rows, dtype)
    uniforms = torch.rand(rows, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    hot = torch.full((rows,), 0.6, device="cuda")
    for setting in SETTINGS:
        given = [
            torch.full((rows,), value, dtype=kind, device="cuda")
            for value, kind in ((setting.top_k, torch.int32), (setting.top_p, torch.float32), (setting.min_p, torch.float32))
        ]
        tokens, found = support.sample_logits(logits, uniforms, hot, *given)
        exact = Rows(logits, 0.6, setting)
        assert not (why := exact.wrong_support(found)), (setting, why)
        assert not (why := exact.wrong_tokens(tokens, uniforms)), (setting, why)
        again = support.sample_logits(logits, uniforms, hot, *given)
        assert torch.equal(again[0], tokens), setting
        assert torch.equal(again[1], found), setting
