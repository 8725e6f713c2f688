"""Triton's attention over a lattice is the reference, on a GPU where there is one and interpreted elsewhere."""

import pytest
import torch
from lilicorr.kernels import lattice_reference as reference
from torch import Tensor

from .conftest import DEVICE

pytest.importorskip("triton")
from lilicorr.kernels import lattice_attention_triton

# blocks, slots, K, heads, head dim, B
SIZES = [(1, 1, 1, 1, 16, 2), (2, 5, 4, 2, 8, 6), (1, 7, 3, 2, 20, 16), (1, 15, 8, 1, 64, 16), (1, 20, 2, 1, 128, 24)]
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
pytestmark = pytest.mark.usefixtures("poisoned")


def given(blocks, slots, count, heads, dim, block_size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(blocks, slots * count, 3 * heads * dim), (heads, 2 * block_size - 1), (heads,)]
    tensors = [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return *tensors, count


def assert_equals_reference(
    packed: Tensor, relative: Tensor, same: Tensor, count: int, largest_logit: float = 0.0
) -> Tensor:
    got = lattice_attention_triton.lattice_attention(packed, relative, same, count)
    want = reference.lattice_attention(packed.float().contiguous(), relative.float(), same.float(), count)
    assert got.dtype == packed.dtype and got.shape == want.shape
    # An fp32 logit is known to its last bit only, and a softmax passes that on.
    tolerance = max(DTYPES[packed.dtype], torch.finfo(torch.float32).eps * largest_logit)
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance, equal_nan=True)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lattices_of_odd_sizes(sizes, dtype: torch.dtype) -> None:
    assert_equals_reference(*given(*sizes, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_blocks_in_larger_tiles(dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(lattice_attention_triton, "FEW", 3)
    settings = lattice_attention_triton.attention_settings(2, 2, 31, 7, 32, dtype)
    assert settings["QUERIES"] == (16 if dtype == torch.float32 else 64)
    assert_equals_reference(*given(2, 10, 7, 2, 32, 16, dtype))


def test_as_many_candidates_as_are_served() -> None:
    assert_equals_reference(*given(1, 15, 16, 1, 32, 16, torch.bfloat16))


def test_large_logits_and_biases_keep_their_softmax() -> None:
    packed, relative, same, count = given(1, 12, 8, 1, 16, 16, seed=1)
    queries, keys, _ = (packed * 30).chunk(3, dim=-1)
    logits = queries @ keys.transpose(1, 2) / 16**0.5
    largest = float(logits.abs().max() + 40 * torch.cat([relative.flatten(), same]).abs().max())
    assert 500 < largest < 5000
    assert_equals_reference(packed * 30, relative * 40, same * 40, count, largest)


def test_nan_and_infinity_stay_in_their_block_and_head() -> None:
    packed, *rest = given(3, 4, 3, 2, 8, 5, seed=2)
    packed[0, 5, 3] = torch.nan  # a query of head 0
    packed[1, 7, 16 + 9] = torch.nan  # a key of head 1
    packed[2, 0, 32 + 1] = torch.inf  # a value of head 0
    got = assert_equals_reference(packed, *rest)
    assert got[0].isnan().sum() == 8 and got[1, :, 8:].isnan().all() and got[1, :, :8].isfinite().all()


def test_strided_projections_are_read_in_place() -> None:
    packed, *rest = given(4, 6, 2, 2, 8, 6, seed=3)
    for view in (packed[::2], packed[:, ::2], packed.expand(4, -1, -1)[1:2].expand(3, -1, -1)):
        assert_equals_reference(view, *rest)
    assert_equals_reference(packed.transpose(1, 2).contiguous().transpose(1, 2), *rest)


def test_no_blocks_give_nothing() -> None:
    assert lattice_attention_triton.lattice_attention(*given(0, 3, 4, 2, 8, 4)).shape == (0, 12, 16)


def test_blocks_and_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    packed, *rest = given(2, 2, 2, 1, 16, 3, torch.float16, seed=4)
    store = torch.zeros(1, dtype=torch.float16, device=DEVICE).new_empty(2**31 + 2000)  # few pages are touched
    for strides in ((2**31, 48, 1), (64, 2**29, 1)):
        far = store.as_strided(packed.shape, strides)
        far.copy_(packed)
        got = lattice_attention_triton.lattice_attention(far, *rest)
        assert torch.equal(got, lattice_attention_triton.lattice_attention(packed, *rest))
