"""What the kernels of collectives compile to."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton", reason="triton comes for Linux only")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled")

from spec_ops.backends.triton.collectives import push  # noqa: E402
from spec_ops.backends.triton.runtime import ahead  # noqa: E402


@pytest.mark.parametrize("variant", [v for v in push.ahead() if "of 8" in v.name], ids=lambda v: v.name)
def test_sixteen_bytes_at_a_time_to_and_from_all_ranks(variant):
    """And nothing on the way goes through shared memory but what is missing."""
    ptx = ahead.lowered(variant, 90).ptx
    width = "v2.b64" if "maximum" in variant.name else "v4.b32"
    assert set(re.findall(r"st\.relaxed[\w.]+", ptx)) == {f"st.relaxed.sys.global.{width}"}
    assert set(re.findall(r"ld\.volatile[\w.]+", ptx)) == {f"ld.volatile.global.{width}"}
    vectors = 4 if "maximum" in variant.name else 2 if "two-shot" in variant.name else 1
    assert ptx.count("st.relaxed.sys") == vectors * 8
