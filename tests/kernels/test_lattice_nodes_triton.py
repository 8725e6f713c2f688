"""Triton's node sums, norms and features are the reference, on a GPU where there is one and interpreted elsewhere."""

import pytest
import torch
from lilicorr.kernels import lattice_reference as reference

from .conftest import DEVICE

pytest.importorskip("triton")
from lilicorr.kernels import lattice_nodes_triton

SIZES = [(1, 1, 1, 1), (2, 5, 4, 32), (3, 2, 3, 100), (1, 2, 2, 600)]  # blocks, slots, K, w
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
TYPED = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZED = pytest.mark.parametrize("blocks,slots,count,width", SIZES)
pytestmark = pytest.mark.usefixtures("poisoned")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(got, want, dtype: torch.dtype) -> None:
    """`got` in `dtype`, `want` computed in fp32 from the same numbers."""
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want, rtol=DTYPES[dtype], atol=DTYPES[dtype], equal_nan=True)


def terms(blocks, slots, count, width, dtype=torch.float32):
    shapes = [(blocks, slots, count, width), (blocks, slots, width), (blocks, slots, count, width), (slots, width)]
    return [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([*shapes, (count, width)])]


@TYPED
@SIZED
def test_nodes_are_summed_and_normed(blocks: int, slots: int, count: int, width: int, dtype: torch.dtype) -> None:
    given, weight = terms(blocks, slots, count, width, dtype), randn(width, dtype=dtype, seed=9)
    nodes, normed = lattice_nodes_triton.node_sum(*given, weight, 1e-6)
    assert_near(nodes, reference.node_sum(*(tensor.float() for tensor in given)), dtype)
    assert_near(normed, reference.rms_norm(nodes.float(), weight.float(), 1e-6), dtype)


def test_strided_terms() -> None:
    tokens, states, confidence, slot_table, rank_table = terms(2, 6, 4, 16)
    weight = randn(16, seed=9)
    views = [tokens[:, ::2], states[:, 1::2], confidence[:, :3].flip(0), slot_table[::2], rank_table.flip(0)]
    nodes, _ = lattice_nodes_triton.node_sum(*views, weight, 1e-6)
    assert_near(nodes, reference.node_sum(*views), torch.float32)


@TYPED
@SIZED
def test_rows_are_added_and_normed(blocks: int, slots: int, count: int, width: int, dtype: torch.dtype) -> None:
    rows, update, weight = (randn(blocks, slots * count, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0, 0]
    total, normed = lattice_nodes_triton.add_norm(rows, update, weight, 1e-5)
    assert_near(total, rows.float() + update.float(), dtype)
    assert_near(normed, reference.rms_norm(total.float(), weight.float(), 1e-5), dtype)


@TYPED
def test_rows_that_are_not_valid_are_zero(dtype: torch.dtype) -> None:
    rows, weight = randn(5, 24, dtype=dtype), randn(24, dtype=dtype, seed=1)
    valid = torch.tensor([True, False, True, True, False], device=DEVICE)
    for mask in (valid, None):
        normed = lattice_nodes_triton.masked_norm(rows, mask, weight, 1e-5)
        assert_near(normed, reference.masked_norm(rows.float(), mask, weight.float(), 1e-5), dtype)
    assert not lattice_nodes_triton.masked_norm(rows, valid, weight, 1e-5)[1].any()


@TYPED
@pytest.mark.parametrize("rows,width", [(1, 1), (6, 40), (8, 600), (11, 20)])
def test_confidence_features_enter_their_network(rows: int, width: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(lattice_nodes_triton, "FEW", 6)  # from there on a program takes eight rows
    features = randn(rows, 5)
    features[:, 0] *= 10
    features = features.to(dtype).float()
    weights = [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(5,), (5,), (width, 5), (width,)])]
    norm_weight, norm_bias, *layer = weights
    got = lattice_nodes_triton.confidence_hidden(features, norm_weight, norm_bias, 1e-5, *layer)
    norm_weight, norm_bias, *layer = (tensor.float() for tensor in weights)
    want = reference.confidence_hidden(features, norm_weight, norm_bias, 1e-5, *layer)
    assert_near(got, want, dtype)


def test_nan_stays_in_its_row() -> None:
    given, weight = terms(1, 2, 2, 12), randn(12, seed=9)
    given[1][0, 1, 3] = torch.nan  # the second slot's state
    for got in lattice_nodes_triton.node_sum(*given, weight, 1e-6):
        assert got[0, :2].isfinite().all() and got[0, 2:, 3].isnan().all()
    rows = randn(3, 12)
    rows[1, 0], rows[2, 0] = torch.nan, torch.inf
    _, normed = lattice_nodes_triton.add_norm(rows, torch.zeros_like(rows), weight, 1e-6)
    torch.testing.assert_close(normed, reference.rms_norm(rows, weight, 1e-6), equal_nan=True)
    features = randn(3, 5)
    features[1, 2] = torch.nan
    layer = (randn(5), randn(5), 1e-5, randn(8, 5), randn(8))
    got = lattice_nodes_triton.confidence_hidden(features, *layer)
    assert got[1].isnan().all() and got[::2].isfinite().all()


def test_no_rows_give_nothing() -> None:
    weight = randn(8)
    nodes, normed = lattice_nodes_triton.node_sum(*terms(0, 3, 4, 8), weight, 1e-6)
    assert nodes.shape == normed.shape == (0, 12, 8)
    rows = randn(0, 12, 8)
    assert [tensor.shape for tensor in lattice_nodes_triton.add_norm(rows, rows, weight, 1e-6)] == [(0, 12, 8)] * 2
    assert lattice_nodes_triton.masked_norm(rows[:, 0], None, weight, 1e-6).shape == (0, 8)
    layer = (randn(5), randn(5), 1e-5, randn(8, 5), randn(8))
    assert lattice_nodes_triton.confidence_hidden(randn(0, 3, 4, 5), *layer).shape == (0, 3, 4, 8)
