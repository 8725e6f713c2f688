"""Triton's products of the lattice network are the reference, on a GPU where there is one and interpreted elsewhere."""

import pytest
import torch
from lilicorr.kernels import lattice_reference as reference

from .conftest import DEVICE

pytest.importorskip("triton")
from lilicorr.kernels import lattice_products_triton

SIZES = [(1, 1, 1, 1), (2, 20, 32, 40), (3, 7, 100, 33), (1, 70, 64, 24)]  # N, L, w, columns
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
TYPED = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SIZED = pytest.mark.parametrize("blocks,length,width,columns", SIZES)
pytestmark = pytest.mark.usefixtures("poisoned")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layer(columns: int, width: int, dtype: torch.dtype, seed: int = 5):
    weight = randn(columns, width, seed=seed).mul(width**-0.5).to(dtype)
    return weight, randn(columns, dtype=dtype, seed=seed + 1)


def assert_near(got, want, dtype: torch.dtype) -> None:
    """`got` in `dtype`, `want` computed in fp32 from the same numbers."""
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want, rtol=DTYPES[dtype], atol=DTYPES[dtype], equal_nan=True)


@TYPED
@SIZED
def test_a_layer_with_its_activation(blocks: int, length: int, width: int, columns: int, dtype: torch.dtype) -> None:
    rows, (weight, bias) = randn(blocks, length, width, dtype=dtype), layer(columns, width, dtype)
    got = lattice_products_triton.linear_silu(rows, weight, bias)
    assert_near(got, reference.linear_silu(rows.float(), weight.float(), bias.float()), dtype)


@TYPED
@SIZED
def test_nodes_are_fused_with_their_own_anchor(
    blocks: int, length: int, width: int, columns: int, dtype: torch.dtype
) -> None:
    nodes, anchor = randn(blocks, length, width, dtype=dtype), randn(blocks, width, dtype=dtype, seed=1)
    weight, bias = layer(columns, 3 * width, dtype)
    got = lattice_products_triton.fuse(nodes, anchor, weight, bias)
    assert_near(got, reference.fuse(*(tensor.float() for tensor in (nodes, anchor, weight, bias))), dtype)


@TYPED
@SIZED
def test_three_heads_in_one_launch(blocks: int, length: int, width: int, columns: int, dtype: torch.dtype) -> None:
    nodes, anchor = randn(blocks, length, width, dtype=dtype), randn(blocks, width, dtype=dtype, seed=1)
    weights, biases = zip(*(layer(columns, width, dtype, seed) for seed in (5, 7, 9)), strict=True)
    got = lattice_products_triton.project(nodes, anchor, weights, biases)
    want = reference.project(
        nodes.float(), anchor.float(), [weight.float() for weight in weights], [bias.float() for bias in biases]
    )
    for one, other in zip(got, want, strict=True):
        assert_near(one, other, dtype)


@TYPED
def test_many_rows_in_larger_tiles(dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(lattice_products_triton, "FEW", 8)
    assert lattice_products_triton.product_settings(9, 16, 8, torch.bfloat16)["ROWS_TILE"] == 128
    test_a_layer_with_its_activation(1, 130, 24, 150, dtype)
    test_nodes_are_fused_with_their_own_anchor(2, 65, 24, 70, dtype)
    test_three_heads_in_one_launch(2, 65, 24, 20, dtype)


def test_strided_rows_and_weights() -> None:
    rows, (weight, bias) = randn(4, 6, 32), layer(20, 16, torch.float32)
    views = rows[::2, 1:, ::2], weight.T.contiguous().T
    assert_near(lattice_products_triton.linear_silu(*views, bias), reference.linear_silu(*views, bias), torch.float32)
    anchor, (wide, bias) = randn(4, 32, seed=1)[::2, :16], layer(20, 48, torch.float32)
    given = views[0], anchor, wide.T.contiguous().T, bias
    assert_near(lattice_products_triton.fuse(*given), reference.fuse(*given), torch.float32)


def test_nan_stays_in_its_row_and_an_anchors_in_its_block() -> None:
    nodes, anchor = randn(2, 5, 16), randn(2, 16, seed=1)
    nodes[0, 2, 3], anchor[1, 0] = torch.nan, torch.nan
    got = lattice_products_triton.fuse(nodes, anchor, *layer(8, 48, torch.float32))
    assert got[0].isnan().all(dim=1).tolist() == [False, False, True, False, False] and got[1].isnan().all()
    weights, biases = zip(*(layer(8, 16, torch.float32, seed) for seed in (5, 7, 9)), strict=True)
    out, inp, anchor_out = lattice_products_triton.project(nodes, anchor, weights, biases)
    for vectors in (out, inp):
        assert vectors.isnan().any(dim=2).nonzero().tolist() == [[0, 2]]
    assert anchor_out.isnan().all(dim=1).tolist() == [False, True]


def test_no_rows_give_nothing() -> None:
    nodes, anchor, heads = randn(0, 6, 16), randn(0, 16), [layer(8, 16, torch.float32)] * 3
    assert lattice_products_triton.linear_silu(nodes, *heads[0]).shape == (0, 6, 8)
    assert lattice_products_triton.fuse(nodes, anchor, *layer(8, 48, torch.float32)).shape == (0, 6, 8)
    vectors = lattice_products_triton.project(nodes, anchor, *zip(*heads, strict=True))
    assert [one.shape for one in vectors] == [(0, 6, 8), (0, 6, 8), (0, 8)]
