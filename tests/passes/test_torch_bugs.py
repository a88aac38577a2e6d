"""Bugs of torch on docs/torch-bugs.md that can be shown in a few lines, in the releases that the page names.

In the release that the page names, a test here fails once torch is right (`strict`): then the page and the workaround want
another look. Other releases were not looked at, and may do either.
"""

from __future__ import annotations

import pytest
import torch

SEEN = torch.__version__.startswith("2.13")
wrong_in_2_13 = pytest.mark.xfail(strict=SEEN, reason="docs/torch-bugs.md")


@wrong_in_2_13
def test_a_snapshot_holds_the_old_contents():
    def snapshot(a, b):
        old = b.clone()
        b.add_(1)
        a.copy_(old)

    a, b = torch.zeros(64), torch.arange(64.0)
    torch.compile(snapshot, fullgraph=True)(a, b)
    assert torch.equal(b, torch.arange(64.0) + 1)
    assert torch.equal(a, torch.arange(64.0))


@wrong_in_2_13
def test_a_clone_before_a_mutating_op_stays():
    """pytorch#198031"""
    with torch.library._scoped_library("spec_ops_test_bugs", "DEF") as library:
        library.define("add_first(Tensor(a!) x, Tensor y) -> ()")

        def add_first(x, y):
            for row in x:
                row += 10 * y[0]

        library.impl("add_first", add_first, "CPU")
        torch.library.register_fake("spec_ops_test_bugs::add_first", lambda x, y: None, lib=library)

        def call(x):
            first = x + 0
            other = first.clone()
            torch.ops.spec_ops_test_bugs.add_first(other, first)
            return other

        x = torch.ones(3)
        assert torch.equal(torch.compile(call, fullgraph=True)(x), torch.full((3,), 11.0))
