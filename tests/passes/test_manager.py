"""The manager: composition with the user's passes, switches, cache keys, reports, planning for another architecture."""

from __future__ import annotations

import uuid
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import pad_mm
from torch._subclasses import FakeTensorMode

import spec_ops
from spec_ops.backends import Backend
from spec_ops.backends.call import STEPS
from spec_ops.passes import PassManager, enabled, explain, install, manager, pass_names
from tests.helpers.pass_harness import registered
from tests.passes.test_compile import has_cpp_compiler

# Everything here goes through Inductor, whose CPU code a C++ compiler builds.
pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler, which a fresh machine may lack")


class Seen(CustomGraphPass):
    """A user's pass: notes which backends it finds in attention calls. Each has an id of its own, so that no graph comes from a
    cache that an earlier run filled: passes do not see such graphs."""

    def __init__(self) -> None:
        self.id, self.backends = uuid.uuid4().hex, []

    def __call__(self, graph: torch.fx.Graph) -> None:
        ops = (torch.ops.spec_ops.mha_draft_decode.default, torch.ops.spec_ops.mha_draft_decode.host_plan)
        self.backends += [node.args[-1] for node in graph.nodes if node.target in ops]

    def uuid(self) -> str:
        return self.id


def step(q, k_cache, v_cache, block_tables, seq_lens):
    return spec_ops.mha_draft_decode(q, k_cache, v_cache, block_tables, seq_lens) * 2


def arguments(page_size: int = 4):
    cache = torch.randn(2, 6, page_size, 2, 16)
    return (
        torch.randn(2, 1, 4, 16),
        cache[0],
        cache[1],
        torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        torch.tensor([6, 3], dtype=torch.int32),
    )


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    assert inductor_config.post_grad_custom_pre_pass is None


def test_user_passes_before_and_after_still_run():
    before, after = Seen(), Seen()
    with inductor_config.patch(post_grad_custom_pre_pass=before, post_grad_custom_post_pass=after):
        args = arguments(5)
        torch.testing.assert_close(spec_ops.compile(step, mode="default")(*args), step(*args))
    assert before.backends == ["auto"]  # ours had not run yet
    assert after.backends == ["reference"]


class InferenceAware(getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)):  # type: ignore[misc]
    """A user's pass of the kind that is told whether there will be a backward."""

    seen: ClassVar[list[bool]] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        self.seen.append(is_inference)

    def uuid(self) -> str:
        return uuid.uuid4().hex


HAS_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.13


@pytest.mark.parametrize("in_a_list", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_LISTS, reason="one pass"))])
def test_a_pass_among_the_options_runs_before_ours(in_a_list):
    before, after = Seen(), Seen()
    options = {"post_grad_custom_pre_pass": [before, InferenceAware()] if in_a_list else before}
    args = arguments(11 + in_a_list)
    with torch.no_grad():
        spec_ops.compile(step, mode="default", options={**options, "post_grad_custom_post_pass": after})(*args)
    assert before.backends == ["auto"]
    assert after.backends == ["reference"]
    assert counters["inductor"]["spec_ops_select_backends"] == 1
    assert InferenceAware.seen == [True] * in_a_list


def test_options_are_checked_before_anything_runs():
    for name in ("no_such_option", "triton.no_such_option"):
        with pytest.raises(ValueError, match=rf"`options` must name settings of torch._inductor.config, got '{name}'"):
            spec_ops.compile(step, options={name: 1})
    known = {"force_disable_caches": True, "triton.cudagraphs": False, "epilogue-fusion": False, "cpp.simdlen": None}
    spec_ops.compile(step, options={**known, "post_grad_custom_post_pass": None})


def in_the_slot() -> list[object]:
    """What Inductor will run, in order."""
    parts = manager._installed()
    return [sorted(p.name for p in part.passes) if isinstance(part, PassManager) else part for part in parts]


def test_installed_twice_runs_once():
    some, names, user, late = {"split_argmax": False}, sorted(pass_names()), Seen(), Seen()
    fewer = [name for name in names if name != "split_argmax"]
    with inductor_config.patch(post_grad_custom_pre_pass=user):
        first, second = install(), install(some)
        assert in_the_slot() == [user, fewer]
        with enabled():
            assert in_the_slot() == [user, names]
        second()
        second()  # once more: nothing to do
        assert in_the_slot() == [user, names]
        third = install(some)
        first()  # not the one that runs
        assert in_the_slot() == [user, fewer]
        if HAS_LISTS:
            inductor_config.post_grad_custom_pre_pass = [inductor_config.post_grad_custom_pre_pass, late]
            fourth = install()
            assert in_the_slot() == [user, late, names]
            fourth()
            assert in_the_slot() == [user, late, fewer]
        third()
        assert in_the_slot() == [user, late][: 1 + HAS_LISTS]


def test_install_appends_and_undoes():
    before = Seen()
    with inductor_config.patch(post_grad_custom_pre_pass=before):
        uninstall = install()
        torch.compile(step)(*arguments(6))
        assert before.backends == ["auto"]
        assert counters["inductor"]["spec_ops_select_backends"] == 1
        uninstall()
        assert inductor_config.post_grad_custom_pre_pass is before
        torch._dynamo.reset()
        torch.compile(step)(*arguments(6))
        assert counters["inductor"]["spec_ops_select_backends"] == 1


def pads() -> bool:
    """Whether Inductor would consider padding the 4 rows of a round's product to 8."""
    with FakeTensorMode(), mock.patch.object(pad_mm, "has_triton", return_value=True):
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 512), (512, 256)))
        return pad_mm.can_pad(x, weight, torch.ops.aten.mm)


def test_products_are_not_padded_where_our_passes_run():
    assert pads()
    with enabled():
        assert not pads()
        with inductor_config.patch(shape_padding=True):  # as `spec_ops.compile(..., options=...)` does
            assert pads()
    first, second = install(), install()
    assert not pads()
    first()
    assert not pads()
    second()
    assert pads()
    with enabled():
        inside = install()
    assert pads()  # what was installed inside is out with the block
    inside()
    assert pads()
    with inductor_config.patch(shape_padding=False):
        second()  # out already: what the user has set since stays
        assert not pads()


def test_enabled_is_scoped_and_restores_after_an_error():
    def fail() -> None:
        with enabled():
            assert isinstance(inductor_config.post_grad_custom_pre_pass, PassManager)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inductor_config.post_grad_custom_pre_pass is None


def test_switches():
    seen = Seen()
    with inductor_config.patch(post_grad_custom_pre_pass=seen):
        spec_ops.compile(step, passes={"select_backends": False}, mode="default")(*arguments(7))
    assert seen.backends == ["auto"]
    assert counters["inductor"]["spec_ops_select_backends"] == 0
    with pytest.raises(ValueError, match="no_such_pass"):
        spec_ops.compile(step, passes={"no_such_pass": True})
    for wrong in (["split_argmax"], {"split_argmax": "no"}, {"split_argmax": 0}):
        with pytest.raises(ValueError, match=r"passes: must map names of passes to True or False, got [\[{]'split_argmax'"):
            spec_ops.compile(step, passes=wrong)


def test_cache_key_depends_on_all_that_decides():
    ids = {PassManager().uuid(), PassManager(arch=100).uuid(), PassManager(every_graph=True).uuid()}
    ids |= {PassManager({name: False}).uuid() for name in pass_names()}
    extra = Backend("extra", {}, None, frozenset(), frozenset(), rank=1)
    with registered(extra):
        ids.add(PassManager().uuid())
    assert len(ids) == 4 + len(pass_names())
    assert PassManager().uuid() == PassManager(dict.fromkeys(pass_names(), True)).uuid()
    assert PassManager(listener=lambda report: None).uuid() is None  # a cached graph would make no report


def test_two_settings_do_not_share_compiled_code():
    """The same function and inputs, passes on and off, within one process and its caches."""
    after = Seen()
    with inductor_config.patch(post_grad_custom_post_pass=after):
        for passes in ({}, {"select_backends": False}, {}):
            torch._dynamo.reset()
            spec_ops.compile(step, passes=passes, mode="default")(*arguments(8))
    assert after.backends[:2] == ["reference", "auto"]
    assert len(after.backends) in (2, 3)  # the third may come from the cache


def blackwell_backend(**settings) -> Backend:
    steps = dict.fromkeys(STEPS, "spec_ops.ops.reference.attention:attention")
    floats = frozenset({torch.float32})
    return Backend("fast", steps, (100, 103), floats, floats, rank=1, **settings)


def test_explain_plans_for_an_architecture_that_is_not_there():
    with registered(blackwell_backend()):
        plan = explain(step, *arguments(), arch="sm100")
        (kernel,) = plan.kernels()
        assert kernel.startswith("mha_draft_decode: fast (")
        assert "reference ranks after fast" in kernel
        assert "test_manager.py:" in plan.text(verbose=True)
        here = explain(step, *arguments())
    (kernel,) = here.kernels()
    assert kernel.startswith("mha_draft_decode: reference (")
    assert "fast needs a CUDA device" in kernel
    assert here.before["mha_draft_decode"] == here.after["mha_draft_decode"] == 1


def test_explain_runs_nothing_and_names_what_it_cannot_do():
    args = arguments()
    caches = args[1].clone()

    def write(q, k_cache, v_cache):
        spec_ops.append_kv(k_cache, v_cache, q[:, 0, :2], q[:, 0, :2], torch.tensor([0, 1]))
        return k_cache.sum()

    assert explain(write, *args[:3]).before["append_kv"] == 1
    assert torch.equal(args[1], caches)
    with pytest.raises(RuntimeError, match="calls none"):
        explain(lambda x: x + 1, torch.ones(2))
    with pytest.raises(ValueError, match="arch"):
        explain(step, *args, arch="blackwell")
    with registered(blackwell_backend()):
        report = explain(lambda *a: spec_ops.mha_draft_decode(*a, backend="fast"), *args)
    (refusal,) = (note.text for result in report.results if result.name == "select_backends" for note in result.refused)
    assert "needs a CUDA device" in refusal


def test_host_planned_backend_leaves_the_cuda_graph():
    """Its calls become the overload that Inductor keeps out of CUDA graphs; "auto" never picks it."""
    planned = Backend(**{**vars(blackwell_backend()), "name": "planned", "capabilities": None, "host_plan": True})
    seen = Seen()
    with registered(planned), inductor_config.patch(post_grad_custom_post_pass=seen):
        args = arguments(10)
        compiled = spec_ops.compile(lambda *a: spec_ops.mha_draft_decode(*a, backend="planned") * 2, mode="default")
        torch.testing.assert_close(compiled(*args), step(*args))
        report = explain(step, *args)
    assert seen.backends == ["planned"]
    assert torch.Tag.cudagraph_unsafe in torch.ops.spec_ops.mha_draft_decode.host_plan.tags
    assert "plans on the host" in report.kernels()[0]
