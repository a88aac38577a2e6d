"""whole_concatenations alone, and what Inductor makes of a partitioned graph: no buffer is allocated in two partitions."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import spec_ops
from spec_ops.backends import get_backend
from spec_ops.ops.concatenate import concatenate
from spec_ops.passes import PassManager
from spec_ops.passes.whole_concatenations import WholeConcatenations
from tests.helpers.inductor_cuda import cuda_graph, generate
from tests.helpers.pass_harness import capture, registered, run_pass, targets, texts

CAT = torch.ops.aten.cat.default
PLANNED = dataclasses.replace(get_backend("reference"), name="planned", host_plan=True, rank=1000)


@pytest.fixture(autouse=True)
def _planned():
    with registered(PLANNED):
        yield


def inputs() -> list[torch.Tensor]:
    """q, k_cache, v_cache, block_tables, seq_lens, token"""
    g = torch.Generator().manual_seed(0)
    caches = [torch.randn(6, 4, 2, 16, generator=g) for _ in range(2)]
    tables, lens = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([5, 9], dtype=torch.int32)
    return [torch.randn(2, 1, 4, 16, generator=g), *caches, tables, lens, torch.tensor([3, 7])]


def embedded(tokens, k_cache):
    return torch.nn.functional.embedding(tokens, k_cache.flatten(0, 2))


def step(backend: str = "planned", join=lambda first, second: torch.stack([first, second], 1), use=embedded):
    """Two tokens, one from each side of an attention call, put together by `join`, and read by what Inductor does not fuse
    with a concatenation."""

    def fn(q, k_cache, v_cache, tables, lens, token):
        first = token * 2 + 1
        out = spec_ops.mha_draft_decode(q + first[:, None, None, None], k_cache, v_cache, tables, lens, backend=backend)
        return use(join(first, out.flatten(1).argmax(-1) % 48), k_cache)

    return fn


def check(fn, matches: int, *refused: str) -> torch.fx.GraphModule:
    module = cuda_graph(fn, *inputs())
    result = run_pass(WholeConcatenations(), module)
    assert result.matches == matches == targets(module).count(concatenate), texts(result.done)
    assert [reason for reason in refused if reason not in texts(result.refused)] == []
    assert len(result.refused) == len(refused)
    return module


def test_pieces_of_two_partitions_become_one_kernel():
    assert CAT not in targets(check(step(), 1))


def test_a_negative_dim_is_counted_from_the_front():
    module = check(step(join=lambda a, b: torch.cat([a[:, None], b[:, None]], -1)), 1)
    (node,) = module.graph.find_nodes(op="call_function", target=concatenate)
    assert node.args[1] == 1


def test_one_graph_is_left_alone():
    check(step("reference"), 0)


def test_what_inductor_cannot_write_as_one_kernel_is_refused():
    def channels_last(a, b):
        images = [x[:, None, None, None].expand(2, 3, 2, 2).contiguous(memory_format=torch.channels_last) for x in (a, b)]
        return torch.cat(images, 1)

    module = check(step(join=channels_last, use=lambda x, _: x * 1), 0, "is not contiguous")
    assert CAT in targets(module)


def test_unknown_sizes_are_refused():
    module = cuda_graph(step(), *inputs())
    (cat,) = module.graph.find_nodes(op="call_function", target=CAT)
    piece = cat.args[0][0]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        piece.meta["val"] = torch.empty(mode.shape_env.create_unbacked_symint(), 1, dtype=torch.int64, device="cuda")
    result = run_pass(WholeConcatenations(), module)
    assert result.matches == 0
    assert "not known while compiling" in texts(result.refused)


def test_nothing_to_do_on_cpu():
    module, _ = capture(step(), *inputs())
    assert run_pass(WholeConcatenations(), module).matches == 0


def test_switch():
    for on in (True, False):
        module = cuda_graph(step(), *inputs())
        PassManager({"whole_concatenations": on}, arch=90)(module.graph)
        assert (CAT in targets(module)) is not on


def allocated_twice(code: str) -> list[str]:
    """Buffers that more than one partition allocates."""
    partitions = re.split(r"^def partition_\d+\(", code[: code.index("class Runner")], flags=re.MULTILINE)[1:]
    assert len(partitions) == 2
    found = Counter(name for part in partitions for name in set(re.findall(r"(\w+) = empty_strided_cuda\(", part)))
    return [name for name, count in found.items() if count > 1]


@pytest.mark.parametrize("kind", ["tokens", "features"])
def test_no_buffer_is_allocated_in_two_partitions(kind):
    def features(a, b):
        return torch.cat([x[:, None].float().expand(2, 64).sin() for x in (a, b)], 1)

    fn = step() if kind == "tokens" else step(join=features, use=lambda x, k_cache: x @ k_cache.flatten()[:128, None])
    with inductor_config.patch({"graph_partition": True, "triton.cudagraphs": True}):
        assert allocated_twice(generate(fn, *inputs()).code) == []
