"""fuse_rope_append: which rotations it finds, that results stay the same bit for bit in float32, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import fx

import spec_ops
from spec_ops.ops.kv_cache import append_kv_op
from spec_ops.ops.rope import rope_append_kv_op
from spec_ops.passes import PassManager
from spec_ops.passes.analysis.graph import op_of
from spec_ops.passes.fuse_rope_append import FuseRopeAppend
from tests.helpers import rope_models as models
from tests.helpers.inductor_cuda import generate, launches
from tests.helpers.pass_harness import capture, run_pass, switched_off, texts
from tests.helpers.rope_models import inputs, layers

FP8 = torch.float8_e4m3fn


def ops(module: fx.GraphModule) -> list:
    return [op_of(node) for node in module.graph.nodes if op_of(node) in (append_kv_op, rope_append_kv_op)]


def check(fn: Callable, args: list[torch.Tensor], matches: int, refused: str = "", *, dynamo: bool = False) -> fx.GraphModule:
    """The pass rewrites so many appends and refuses the others with that reason; float32 results stay equal."""
    module, given = capture(fn, *args, dynamo=dynamo)
    expected = module(*[a.clone() for a in given])
    appends = ops(module).count(append_kv_op)
    result = run_pass(FuseRopeAppend(), module)
    module.recompile()
    assert result.matches == matches == len(result.done) == ops(module).count(rope_append_kv_op), texts(result.refused)
    assert len(result.refused) == appends - matches
    assert refused in texts(result.refused)
    if args[0].dtype == torch.float32 and args[-1].dtype == torch.float32:
        for got, want in zip(module(*[a.clone() for a in given]), expected, strict=True):
            assert torch.equal(got, want)
    return module


ROTATIONS = [models.transformers_rope, models.partial, models.chunks, models.in_float32]


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROTATIONS, ids=lambda fn: fn.__name__)
def test_rotations(rope):
    check(layers(rope), inputs(), 2, dynamo=True)


@pytest.mark.parametrize("rope", ROTATIONS, ids=lambda fn: fn.__name__)
def test_rotations_in_bfloat16(rope):
    check(layers(rope, count=1), inputs(torch.bfloat16, count=1), 1)


def test_queries_and_keys_may_be_written_differently():
    check(layers(models.chunks, q_rope=models.in_float32), inputs(), 2)


def test_fp8_caches():
    check(layers(scale=0.5), inputs(torch.bfloat16, FP8), 2)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [models.rms_norm, models.builtin_norm], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("rope", [models.transformers_rope, models.partial], ids=lambda fn: fn.__name__)
def test_norms_of_heads(rope, norm):
    def both(q, k, q_norm, k_norm):
        return norm(q, q_norm), norm(k, k_norm)

    module = check(layers(rope, prepare=both), inputs(), 2)
    fused = [node for node in module.graph.nodes if op_of(node) is rope_append_kv_op]
    assert [node.kwargs[name].op for node in fused for name in ("q_norm", "k_norm")] == ["placeholder"] * 4
    assert [node.kwargs["norm_eps"] for node in fused] == [pytest.approx(1e-6)] * 2
    check(layers(rope, prepare=both, count=1), inputs(torch.bfloat16, count=1), 1)


def test_angles_are_made_once():
    module = check(layers(), inputs(torch.bfloat16), 2)
    fused = [node for node in module.graph.nodes if op_of(node) is rope_append_kv_op]
    assert len({(node.kwargs["cos"], node.kwargs["sin"]) for node in fused}) == 1
    assert fused[0].kwargs["cos"].meta["val"].shape == (6, models.DIM // 2)


def test_caches_that_are_views_of_a_pool():
    def fn(x, weight, positions, slots, table, lens, q_norm, k_norm, pool):
        return layers()(x, weight, positions, slots, table, lens, q_norm, k_norm, *(c for pair in pool for c in pair))

    pool = torch.stack([torch.stack(inputs()[-4:-2]), torch.stack(inputs()[-2:])])
    check(fn, [*inputs()[:-4], pool], 2)


def only(which: str, norm: Callable = models.rms_norm) -> Callable:
    def prepare(q, k, q_norm, k_norm):
        return (norm(q, q_norm), k) if which == "q" else (q, norm(k, k_norm))

    return prepare


def other_epsilons(q, k, q_norm, k_norm):
    return models.rms_norm(q, q_norm), models.rms_norm(k, k_norm, 1e-5)


def computed_weight(q, k, q_norm, k_norm):
    return models.rms_norm(q, 1 + q_norm), models.rms_norm(k, 1 + k_norm)


def over_all_heads(q, k, q_norm, k_norm):
    """OLMo-2's norms."""
    return (models.rms_norm(x.flatten(-2), w.repeat(x.shape[2])).view(x.shape) for x, w in ((q, q_norm), (k, k_norm)))


def later(x, t):
    """Rotated by other angles."""
    cos, sin = t["two frequencies"]
    whole = [torch.cat([table[..., : models.DIM // 2]] * 2, -1) for table in (cos + 0.5, sin + 0.5)]
    return models.transformers_rope(x, {"whole": whole})


def every_second(x, t):
    """By columns 0, 2, ... of a table, of which `first_columns` reads 0, 1, ..."""
    return models.in_float32(x, {"half": [table.reshape(-1, models.DIM // 2, 2)[..., 0] for table in t["whole"]]})


def first_columns(x, t):
    return models.in_float32(x, {"half": [table.reshape(-1, models.DIM)[..., : models.DIM // 2] for table in t["whole"]]})


def one_head_expanded(q, k, *_):
    return q, k[:, :, :1].expand_as(k)


def across_heads(q, k, q_norm, k_norm):
    """Keys are the end of one head that was normalized and the start of the next."""
    normed = models.rms_norm(torch.cat([q, k], 2), k_norm).flatten(-2)
    return models.rms_norm(q, q_norm), normed[..., models.DIM // 2 :][..., : models.KV_HEADS * models.DIM].view(k.shape)


NO_ROTATION = "are not known to be rotated: "
one_layer = functools.partial(layers, count=1)  # another would be refused for the same reason
NEAR_MISSES = {
    "interleaved": (one_layer(models.interleaved), NO_ROTATION),
    "backwards": (one_layer(models.backwards), NO_ROTATION + "its halves are not rotated by the same angles"),
    "two frequencies": (one_layer(models.two_frequencies), NO_ROTATION + "its halves are not rotated by the same angles"),
    "angles by head": (one_layer(models.by_head), NO_ROTATION),
    "scaled afterwards": (one_layer(models.scaled), NO_ROTATION + "it is not two halves that rotate into each other"),
    "no rotation": (one_layer(lambda x, _: x), "keys " + NO_ROTATION + "it is not two halves"),
    "queries do not rotate": (one_layer(q_rope=lambda x, _: x), "queries " + NO_ROTATION),
    "other angles": (one_layer(q_rope=later), "rotate by different angles"),
    "other columns of a table": (one_layer(every_second, q_rope=first_columns), "rotate by different angles"),
    "one head expanded": (one_layer(models.in_float32, prepare=one_head_expanded), "the heads before their rotation are not"),
    "across heads": (one_layer(models.in_float32, prepare=across_heads), "the keys are computed"),
    "part of the queries": (one_layer(q_rope=models.partial), "rotate by different angles"),
    "computed before": (
        one_layer(models.doubled_first),
        "the keys are computed, which Inductor does in the kernel that rotates them",
    ),
    "only queries are normalized": (one_layer(prepare=only("q")), "only the queries are normalized"),
    "only keys are normalized": (one_layer(prepare=only("k")), "only the keys are normalized"),
    "other epsilons": (one_layer(prepare=other_epsilons), "different epsilons"),
    "weights are computed": (one_layer(prepare=computed_weight), "the keys are computed"),
    "norm over all heads": (one_layer(prepare=over_all_heads), "the keys are computed"),
    "keys are read": (one_layer(after=lambda out, q, k, v: k.sum()), "the rotated keys have other readers"),
    "queries are read": (one_layer(after=lambda out, q, k, v: q + 1), "the rotated queries have other readers"),
    "no attention": (one_layer(attend=False), "no attention calls read what it appends"),
}


@pytest.mark.parametrize(("fn", "refused"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(fn, refused):
    check(fn, inputs(count=1), 0, refused)


@pytest.mark.parametrize("what", ["keys", "queries"])
def test_rows_of_the_cache_that_is_written(what):
    """As keys that move to other positions: in one launch, one row would be written while another still reads it."""
    heads = models.KV_HEADS if what == "keys" else models.HEADS

    def prepare(q, k, old):
        rows = old.view(models.BS, models.QUERIES, heads, models.DIM)
        return (q, rows) if what == "keys" else (rows, k)

    def fn(x, weight, positions, slots, table, lens, q_norm, k_norm, k_cache, v_cache):
        step = layers(models.in_float32, prepare=lambda q, k, *_: prepare(q, k, k_cache), count=1)
        return step(x, weight, positions, slots, table, lens, q_norm, k_norm, k_cache, v_cache)

    x, weight, positions, _, _, lens, *norms, k_cache, v_cache = inputs(count=1)
    pages = models.BS * models.QUERIES * heads // (2 * models.KV_HEADS)  # of 2 tokens: as many numbers as are rotated
    table = torch.tensor([[0, 1, 0, 0], [2, 1, 0, 0]], dtype=torch.int32)
    caches = [cache[:pages, :2].clone() for cache in (k_cache, v_cache)]
    slots = torch.tensor([3, 4, 5, 0, 1, 2])
    check(fn, [x, weight, positions, slots, table, lens, *norms, *caches], 0, "from a cache that it writes")


def test_two_attention_calls():
    def fn(x, weight, positions, slots, table, lens, q_norm, k_norm, k_cache, v_cache):
        def after(out, q, *_):
            return spec_ops.mha_target_verify(q, k_cache, v_cache, table, lens - 1)

        step = layers(after=after, count=1)
        return step(x, weight, positions, slots, table, lens, q_norm, k_norm, k_cache, v_cache)

    check(fn, inputs(count=1), 0, "2 attention calls read what it appends")


def sources(node: fx.Node) -> set[fx.Node]:
    """What `node` is computed from, and `node`."""
    found, queue = {node}, [node]
    for current in queue:
        queue += [source for source in current.all_input_nodes if source not in found]
        found.update(current.all_input_nodes)
    return found


def test_the_append_waits_for_the_queries():
    """Inductor moves nodes to their readers before our passes run."""
    module, given = capture(layers(count=1), *inputs(count=1), dynamo=False)
    append = next(node for node in module.graph.nodes if op_of(node) is append_kv_op)
    attention = next(node for node in module.graph.nodes if node.target is torch.ops.spec_ops.mha_target_verify.default)
    late = sources(attention.args[0]) - sources(append)
    for node in [node for node in module.graph.nodes if node in late]:
        attention.prepend(node)
    order = list(module.graph.nodes)
    assert order.index(append) < min(map(order.index, late))
    expected = module(*[a.clone() for a in given])
    assert run_pass(FuseRopeAppend(), module).matches == 1
    module.recompile()
    for got, want in zip(module(*[a.clone() for a in given]), expected, strict=True):
        assert torch.equal(got, want)


def test_queries_computed_from_what_was_appended():
    def fn(x, weight, positions, slots, table, lens, q_norm, k_norm, k_cache, v_cache):
        t = models.tables(positions, x.dtype)
        q, k, v = (x @ weight).unflatten(-1, (-1, models.DIM)).split([models.HEADS, models.KV_HEADS, models.KV_HEADS], 2)
        spec_ops.append_kv(k_cache, v_cache, models.transformers_rope(k, t).flatten(0, 1), v.flatten(0, 1), slots)
        scale = k_cache.amax()
        q = (q.flatten(-2) * scale) @ torch.eye(models.HEADS * models.DIM)
        q = models.transformers_rope(q.unflatten(-1, (-1, models.DIM)), t)
        return spec_ops.mha_target_verify(q, k_cache, v_cache, table, lens)

    check(fn, inputs(count=1), 0, "what it appends is read before the queries are computed")


def test_keys_of_two_layers_come_before_the_queries_of_the_first():
    """Each rotation takes its own cosines of the same angles."""

    def fn(x, weight, positions, slots, table, lens, q_norm, k_norm, *caches):
        angle = positions[..., None].float() * 2.0 ** -torch.arange(models.DIM // 2)

        def rotated(x):
            return models.in_float32(x, {"half": (angle.cos(), angle.sin())})

        q, k, v = (x @ weight).unflatten(-1, (-1, models.DIM)).split([models.HEADS, models.KV_HEADS, models.KV_HEADS], 2)
        for k_cache, v_cache in (caches[:2], caches[2:]):
            spec_ops.append_kv(k_cache, v_cache, rotated(k).flatten(0, 1), v.flatten(0, 1), slots)
        out = spec_ops.mha_target_verify(rotated(q), *caches[2:], table, lens)
        q = (out.flatten(-2)[..., : x.shape[-1]] @ weight).unflatten(-1, (-1, models.DIM))[:, :, : models.HEADS]
        return out, spec_ops.mha_target_verify(rotated(q), *caches[:2], table, lens)

    check(fn, inputs(), 2)


def test_queries_that_are_what_another_append_wrote():
    """Its keys are rotated first, in the launch before: the append may not move after this launch."""

    def fn(x, weight, positions, slots, table, lens, q_norm, k_norm, *caches):
        t = models.tables(positions, x.dtype)
        q, k, v = (x @ weight).unflatten(-1, (-1, models.DIM)).split([models.HEADS, models.KV_HEADS, models.KV_HEADS], 2)
        for k_cache, v_cache in (caches[:2], caches[2:]):
            spec_ops.append_kv(k_cache, v_cache, models.in_float32(k, t).flatten(0, 1), v.flatten(0, 1), slots)
        written = caches[2].view(models.BS, models.QUERIES, models.HEADS, models.DIM)
        out = spec_ops.mha_target_verify(models.in_float32(written, t), *caches[:2], table, lens)
        return out, spec_ops.mha_target_verify(models.in_float32(q, t), *caches[2:], table, lens)

    x, weight, positions, _, _, lens, *norms, k_cache, v_cache = inputs(count=1)
    pages = models.BS * models.QUERIES * models.HEADS // (2 * models.KV_HEADS)  # of 2 tokens: as many numbers as are rotated
    table = torch.tensor([[0, 1, 0, 0], [2, 1, 0, 0]], dtype=torch.int32)
    caches = [cache[:pages, :2].clone() for cache in (k_cache, v_cache) * 2]
    args = [x, weight, positions, torch.tensor([3, 4, 5, 0, 1, 2]), table, lens, *norms, *caches]
    check(fn, args, 1, "what it appends is read before the queries are computed")


def test_off_switch(monkeypatch):
    switched_off(FuseRopeAppend(), capture(layers(count=1), *inputs(count=1), dynamo=False)[0], monkeypatch)


def test_it_runs_before_appends_are_lowered():
    names = [p.name for p in PassManager().passes]
    assert names.index("merge_linears") < names.index("fuse_rope_append") < names.index("lower_kv_append")


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True], ids=["llama", "qwen3"])
def test_generated_code_rotates_in_the_launch_that_appends(normed):
    def both(q, k, q_norm, k_norm):
        return models.rms_norm(q, q_norm), models.rms_norm(k, k_norm)

    fn = layers(prepare=both, count=1) if normed else layers()
    on = launches(generate(fn, *inputs(torch.bfloat16, count=1 if normed else 2)).code)
    assert on.count("rope_append_kv") == (1 if normed else 2)
    assert on[on.index("rope_append_kv") + 1] == "mha_target_verify"
    if not normed:  # one less in each of two layers, and one more for the angles
        assert len(on) < len(launches(generate(fn, *inputs(torch.bfloat16), passes={"fuse_rope_append": False}).code))
