"""The Triton top-K is the reference, on a GPU where there is one and interpreted elsewhere."""

import pytest
import torch
from lilicorr.kernels import reference
from torch import Tensor

from .conftest import DEVICE
from .test_topk_logsumexp import tied_logits

pytest.importorskip("triton")
from lilicorr.kernels import topk_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("poisoned")


def assert_equals_reference(logits: Tensor, k: int, atol: float = 1e-5) -> None:
    logits = logits.to(DEVICE)
    before = logits.clone()
    values, indices, normaliser, features = topk_triton.topk_logsumexp(logits, k, with_features=True)
    # On the CPU, so that the definition depends on no GPU's sort.
    want_values, want_indices, want_normaliser = (t.to(DEVICE) for t in reference.topk_logsumexp(logits.cpu(), k))
    assert values.dtype == normaliser.dtype == features.dtype == torch.float32 and indices.dtype == torch.int64
    assert torch.equal(indices, want_indices)
    torch.testing.assert_close(values, want_values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(normaliser, want_normaliser, rtol=1e-6, atol=atol, equal_nan=True)
    want_features = reference.confidence_features(want_values - want_normaliser[:, None])
    torch.testing.assert_close(features, want_features, rtol=1e-5, atol=atol, equal_nan=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab,k", [(1, 1), (5, 5), (256, 8), (257, 3), (4097, 16)])
def test_tied_rows_of_odd_sizes(vocab: int, k: int, dtype: torch.dtype) -> None:
    for levels in (2, 40):
        assert_equals_reference(tied_logits(2, vocab, dtype, levels, seed=vocab + levels), k)


def test_as_many_candidates_as_are_served() -> None:
    assert_equals_reference(tied_logits(1, 1000, torch.float16, 9, seed=0), 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_untied_rows_of_a_real_vocabulary(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    assert_equals_reference(logits, 8)


def test_ties_go_to_the_lower_id_across_tiles_and_programs() -> None:
    logits = torch.zeros(1, 20000)
    logits[0, [19999, 300, 4096, 301]] = 3.0
    logits[0, 8191] = 5.0
    assert topk_triton.topk_logsumexp(logits.to(DEVICE), 7)[1].tolist() == [[8191, 300, 301, 4096, 19999, 0, 1]]
    assert_equals_reference(logits, 7)


def test_more_tied_tiles_than_candidates() -> None:
    logits = torch.full((1, 256 * 12), 2.0)
    assert_equals_reference(logits, 4)
    logits[0, :256] = 1.0
    assert_equals_reference(logits, 4)


def test_negative_zero_ties_with_zero_within_and_across_tiles() -> None:
    logits = torch.full((1, 1030), -1.0)
    logits[0, [1028, 600, 3]] = torch.tensor([0.0, -0.0, 0.0])
    logits[0, [2, 300]] = -0.0
    for k in (1, 5):
        assert_equals_reference(logits, k)


@pytest.mark.parametrize("k", [1, 5])
def test_masked_columns_and_infinities(k: int) -> None:
    logits = tied_logits(7, 1030, torch.float32, 2, seed=k)
    logits[0] = -torch.inf
    logits[1, :-1] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -torch.inf
    logits[4, [900, 7]] = torch.inf
    logits[5] = torch.inf
    logits[6, :1024] = -torch.inf
    assert_equals_reference(logits, k)
    assert topk_triton.topk_logsumexp(logits.to(DEVICE), k)[1].max() < 1030


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("vocab", [5, 4500])
def test_nan_of_either_sign_comes_first_and_spoils_only_its_row(vocab: int, sign: float) -> None:
    nan = torch.tensor(torch.nan).copysign(torch.tensor(sign))
    logits = tied_logits(5, vocab, torch.float32, 3, seed=vocab)
    logits[1, vocab // 2] = nan
    logits[2] = nan
    logits[3, [0, vocab - 1]] = torch.stack([torch.tensor(torch.inf), nan])
    assert_equals_reference(logits, 4)
    for row in (1, 2, 3):
        assert topk_triton.topk_logsumexp(logits.to(DEVICE), 4)[2][row].isnan()


def test_huge_logits_do_not_overflow_the_normaliser() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    logits[0] *= 1e30
    logits[1] += 3e4
    logits[2] -= 3e4
    assert_equals_reference(logits, 8)


def test_strided_views_are_read_in_place() -> None:
    store = tied_logits(6, 600, torch.float32, 4, seed=1)
    for view in (store[:2, 100:433], store[::3, :65], store.t()[:2], store[2:3].expand(2, -1), store[:2, ::7]):
        assert_equals_reference(view, 3)


def test_no_rows_give_no_results() -> None:
    values, indices, normaliser, features = topk_triton.topk_logsumexp(torch.zeros(0, 65, device=DEVICE), 3, True)
    assert values.shape == indices.shape == (0, 3) and normaliser.shape == (0,) and features.shape == (0, 3, 5)


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    # Only the pages that hold the rows are ever touched.
    store = torch.zeros(1, dtype=torch.float16, device=DEVICE).new_empty(2**31 + 2000)
    logits = store.as_strided((2, 700), (2**31, 1))
    logits.copy_(tied_logits(2, 700, torch.float16, 50, seed=3))
    values, indices, normaliser, _ = topk_triton.topk_logsumexp(logits, 8)
    want = reference.topk_logsumexp(logits.contiguous(), 8)
    assert torch.equal(values, want[0]) and torch.equal(indices, want[1])
    torch.testing.assert_close(normaliser, want[2])


def test_columns_beyond_two_to_the_31_elements_are_reached() -> None:
    store = torch.zeros(1, dtype=torch.float16, device=DEVICE).new_empty(2**31 + 8)
    logits = store.as_strided((2, 257), (1, 2**23))
    logits.copy_(tied_logits(2, 257, torch.float16, 50, seed=4))
    values, indices, _, _ = topk_triton.topk_logsumexp(logits, 4)
    want = reference.topk_logsumexp(logits.contiguous(), 4)
    assert torch.equal(values, want[0]) and torch.equal(indices, want[1])


def test_a_wide_vocabulary_is_tiled() -> None:
    # A program's share is a constant, whatever the vocabulary; the widest in use today is 262,144.
    settings = topk_triton.tile_settings()
    assert settings["TILE"] * settings["TILES_A_PROGRAM"] <= 4096
    logits = torch.zeros(1, 300_001, dtype=torch.bfloat16)
    logits[0, [300_000, 262_144, 5]] = 1.0
    assert_equals_reference(logits, 4)


def test_the_second_stage_reads_only_the_best_tiles() -> None:
    logits = tied_logits(2, 5000, torch.float32, 100, seed=5).to(DEVICE)
    tiles = -(-5000 // topk_triton.TILE)
    maxima, sums = torch.empty(2, 2, tiles, device=DEVICE)
    strides = (logits.stride(0), logits.stride(1))
    topk_triton.tile_maxima[(4,)](logits, maxima, sums, *strides, 5000, tiles, 2, **topk_triton.tile_settings())
    values, indices = logits.new_empty(2, 3), torch.empty(2, 3, dtype=torch.int64, device=DEVICE)
    want = reference.topk_logsumexp(logits, 3)
    best = maxima.sort(dim=-1, descending=True, stable=True).indices[:, :3]
    for row in range(2):
        keep = torch.isin(torch.arange(5000, device=DEVICE) // topk_triton.TILE, best[row])
        logits[row, ~keep] = 1e9  # never seen again
    settings = topk_triton.merge_settings(5000, 3, False)
    normaliser = logits.new_empty(2)
    topk_triton.merge_tiles[(2,)](
        logits, maxima, sums, values, indices, normaliser, values, *strides, 5000, tiles, **settings
    )
    assert torch.equal(values, want[0]) and torch.equal(indices, want[1])
    torch.testing.assert_close(normaliser, want[2])


def test_it_runs_under_no_grad_and_inference_mode_alike() -> None:
    logits = tied_logits(2, 300, torch.float32, 9, seed=6).to(DEVICE)
    with torch.no_grad():
        first = topk_triton.topk_logsumexp(logits.requires_grad_(), 4)
    with torch.inference_mode():
        second = topk_triton.topk_logsumexp(logits.detach(), 4)
    for a, b in zip(first[:3], second[:3], strict=True):
        assert torch.equal(a, b)
