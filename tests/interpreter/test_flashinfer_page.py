"""FlashInfer's page appends as a backend of `append_kv` and `append_mla_kv`, against stand-ins (`provider_fakes.py`)."""

from __future__ import annotations

import pytest
import torch

import spec_ops
from spec_ops.backends import BackendError, registry
from spec_ops.backends.flashinfer import page
from spec_ops.ops.reference import kv_cache as reference
from tests.helpers.provider_fakes import FLASHINFER, FP8, Fakes

BF16 = torch.bfloat16
SLOTS = {
    "some dropped": [5, -1, 0, 63, -1, 17],
    "first dropped": [-1, -1, 40, 41, -7, 2],
    "all dropped": [-1] * 6,
    "none dropped": [9, 8, 7, 6, 5, 4],
}


@pytest.fixture(params=FLASHINFER)
def fakes(request, monkeypatch) -> Fakes:
    monkeypatch.setattr(registry, "device_arch", lambda device: 90)  # ops ask where they run
    registry._forget()
    yield Fakes([request.param]).install(monkeypatch)
    registry._forget()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_append_kv(slots, index, fakes):
    """Bit for bit as the reference, rows of -1 included: FlashInfer would write those out of bounds."""
    k, v = normal(6, 4, 64)[:, ::2], normal(12, 2, 64)[::2]  # as slices of a fused projection
    caches, expected = ([normal(4, 16, 2, 64), normal(4, 16, 2, 64) + 1] for _ in range(2))
    where = torch.tensor(slots, dtype=index)
    spec_ops.append_kv(*caches, k, v, where, backend="flashinfer-page")
    reference.append_kv(*expected, k, v, where, 1.0, 1.0)
    assert all(map(torch.equal, caches, expected))
    assert len(fakes.calls) == 1


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_append_mla_kv(slots, fakes):
    cache, expected = (normal(2, 64, 576) for _ in range(2))
    rows = normal(6, 512), normal(6, 64)
    spec_ops.append_mla_kv(cache, *rows, torch.tensor(slots), backend="flashinfer-page")
    reference.append_mla_kv(expected, *rows, torch.tensor(slots), 1.0)
    assert torch.equal(cache, expected)


def test_layers_of_a_pool(fakes):
    """Caches are views of one allocation; nothing is copied, so the pool itself changes, and only where it should."""
    pool = normal(3, 2, 4, 16, 2, 64)
    before = pool.clone()
    spec_ops.append_kv(
        pool[1, 0], pool[1, 1], normal(2, 2, 64), normal(2, 2, 64) + 1, torch.tensor([33, -1]), backend="flashinfer-page"
    )
    changed = (pool != before).flatten(-2).any(-1).nonzero().tolist()
    assert changed == [[1, 0, 2, 1], [1, 1, 2, 1]]
    assert fakes.calls[0][1]["paged_kv_cache"][0].data_ptr() == pool[1, 0].data_ptr()


def test_long_appends_search_in_blocks(monkeypatch, fakes):
    """The first row that is written may lie beyond one block of slots."""
    monkeypatch.setattr(page, "_BLOCK", 4)
    slots = torch.tensor([-1] * 11 + [3, -1])
    caches, expected = ([normal(1, 16, 1, 64), normal(1, 16, 1, 64)] for _ in range(2))
    k, v = normal(13, 1, 64), -normal(13, 1, 64)
    spec_ops.append_kv(*caches, k, v, slots, backend="flashinfer-page")
    reference.append_kv(*expected, k, v, slots, 1.0, 1.0)
    assert all(map(torch.equal, caches, expected))


def test_nothing_to_append(fakes):
    cache = normal(1, 16, 1, 64)
    spec_ops.append_kv(
        cache, cache.clone(), normal(0, 1, 64), normal(0, 1, 64), torch.empty(0, dtype=torch.int64), backend="flashinfer-page"
    )
    assert fakes.calls == []


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 16, 2, 96), BF16, "supports head_dim 64, 128 and 256, not 96"),
        ((2, 16, 2, 64), torch.float32, "does not support query dtype torch.float32"),
        ((2, 16, 2, 64), FP8, "does not support cache dtype torch.float8_e4m3fn"),
        ((1, 1, 40, 256), BF16, "supports at most 32 KV heads of 256, not 40"),
    ],
)
def test_what_it_does_not_write(shape, dtype, reason, fakes):
    cache = torch.zeros(shape, dtype=dtype)
    row = torch.zeros(1, *shape[2:], dtype=BF16 if dtype == FP8 else dtype)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if dtype == FP8 else {}
    with pytest.raises(
        BackendError, match=f"^append_kv: `backend` 'flashinfer-page' cannot run this call on sm_90: .*{reason}"
    ):
        spec_ops.append_kv(cache, cache.clone(), row, row, torch.tensor([0]), backend="flashinfer-page", **scales)
    with pytest.raises(BackendError, match=r"\(kv_lora_rank, rope\) \(512, 64\), not \(256, 64\)"):
        spec_ops.append_mla_kv(normal(1, 16, 320), normal(1, 256), normal(1, 64), torch.tensor([0]), backend="flashinfer-page")


def test_layouts_it_would_misread(fakes):
    k_cache, row = normal(2, 16, 2, 64), normal(1, 2, 64)
    other = normal(2, 2, 16, 64).transpose(1, 2)
    with pytest.raises(ValueError, match="flashinfer-page: `v_cache` must have the strides of `k_cache`"):
        spec_ops.append_kv(k_cache, other, row, row, torch.tensor([0]), backend="flashinfer-page")
    odd = [torch.zeros(2, 16, 2, 65, dtype=BF16)[..., :64] for _ in range(2)]
    with pytest.raises(ValueError, match="flashinfer-page: rows of `k_cache` must start at multiples of 16 bytes"):
        spec_ops.append_kv(*odd, row, row, torch.tensor([0]), backend="flashinfer-page")


@pytest.mark.parametrize("name", ["reference", "no_such_backend", "flashinfer-xqa"])
def test_other_names(name):
    """On the CPU: the reference by its name, an unknown name, and a backend without appends."""
    caches, expected, row = ([normal(1, 16, 1, 64) for _ in range(2)] for _ in range(3))
    call = {"k": row[0][0, :1], "v": row[1][0, :1], "slots": torch.tensor([3])}
    if name == "reference":
        spec_ops.append_kv(*caches, **call, backend=name)
        spec_ops.append_kv(*expected, **call)
        assert all(map(torch.equal, caches, expected))
    elif name == "no_such_backend":
        with pytest.raises(ValueError, match=r"append_kv: `backend` must be 'auto' or one of .*, got 'no_such_backend'"):
            spec_ops.append_kv(*caches, **call, backend=name)
    else:
        with pytest.raises(BackendError, match="flashinfer-xqa has no kernel for append_kv"):
            spec_ops.append_kv(*caches, **call, backend=name)
