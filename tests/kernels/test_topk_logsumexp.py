"""The tiled top-K with log-normaliser is the reference, bit for bit: values, order, ties, odd shapes and bad input."""

import pytest
import torch
from lilicorr.kernels import reference, tiled
from torch import Tensor

VOCABULARIES = (1, 5, 63, 64, 65, 100, 1000)
COUNTS = (1, 2, 3, 7, 8, 15, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tied_logits(rows: int, vocab: int, dtype: torch.dtype, levels: int, seed: int) -> Tensor:
    """Logits on a few levels only, so that almost every value ties with others."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-levels, levels + 1, (rows, vocab), generator=generator)
    return (steps.float() / 4).to(dtype)


def assert_twins(logits: Tensor, k: int) -> None:
    values, indices, normaliser = tiled.topk_logsumexp(logits, k)
    want_values, want_indices, want_normaliser = reference.topk_logsumexp(logits, k)
    assert values.dtype == torch.float32 and indices.dtype == torch.int64 and normaliser.dtype == torch.float32
    assert values.shape == indices.shape == (logits.shape[0], k) and normaliser.shape == logits.shape[:1]
    assert torch.equal(indices, want_indices)
    torch.testing.assert_close(values, want_values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(normaliser, want_normaliser, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_twins_agree_bit_for_bit_on_tied_logits_for_every_k(vocab: int, dtype: torch.dtype) -> None:
    for levels in (0, 1, 3, 40):
        logits = tied_logits(9, vocab, dtype, levels, seed=vocab + levels)
        for k in (*(k for k in COUNTS if k <= vocab), min(vocab, 100)):
            assert_twins(logits, k)


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 100, 1000])
def test_k_may_be_the_whole_vocabulary(vocab: int) -> None:
    assert_twins(tied_logits(4, vocab, torch.float32, 5, seed=vocab), vocab)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [49152, 151936])
def test_twins_agree_on_real_vocabularies(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)).mul(4).to(dtype)
    for k in (1, 8, 16):
        assert_twins(logits, k)


@pytest.mark.parametrize("vocab", [100, 49152])
def test_untied_order_is_torch_topk(vocab: int) -> None:
    logits = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(s)) for s in range(3)]).float()
    values, indices, _ = tiled.topk_logsumexp(logits, 16)
    want = logits.topk(16)
    assert torch.equal(values, want.values) and torch.equal(indices, want.indices)


@pytest.mark.parametrize("implementation", [reference, tiled], ids=["reference", "tiled"])
def test_ties_go_to_the_lower_id_across_tiles(implementation) -> None:
    logits = torch.zeros(1, 400)
    logits[0, [390, 70, 200, 71]] = 3.0
    logits[0, 130] = 5.0
    _, indices, _ = implementation.topk_logsumexp(logits, 7)
    assert indices.tolist() == [[130, 70, 71, 200, 390, 0, 1]]


@pytest.mark.parametrize("implementation", [reference, tiled], ids=["reference", "tiled"])
def test_negative_zero_ties_with_zero(implementation) -> None:
    logits = torch.full((1, 130), -1.0)
    logits[0, [128, 66, 3]] = torch.tensor([0.0, -0.0, 0.0])
    logits[0, 2] = -0.0
    _, indices, _ = implementation.topk_logsumexp(logits, 5)
    assert indices.tolist() == [[2, 3, 66, 128, 0]]


@pytest.mark.parametrize("vocab", [5, 64, 65, 100, 130, 1000])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_minus_infinity_never_selects_padding(vocab: int, k: int) -> None:
    logits = tied_logits(6, vocab, torch.float32, 2, seed=k)
    logits[0] = -torch.inf
    logits[1, :-1] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -torch.inf
    assert_twins(logits, k)
    assert tiled.topk_logsumexp(logits, k)[1].max() < vocab


def test_plus_infinity_comes_first() -> None:
    logits = tied_logits(2, 200, torch.float32, 3, seed=0)
    logits[0, [150, 7]] = torch.inf
    assert_twins(logits, 4)
    assert tiled.topk_logsumexp(logits, 2)[1][0].tolist() == [7, 150]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("vocab", [5, 64, 65, 200])
@pytest.mark.parametrize("where", ["one", "all"])
def test_nan_of_either_sign_gives_a_nan_normaliser_and_ids_inside_the_vocabulary(
    sign: float, vocab: int, where: str
) -> None:
    nan = torch.tensor(torch.nan).copysign(torch.tensor(sign))
    logits = tied_logits(3, vocab, torch.float32, 3, seed=vocab)
    logits[1, slice(None) if where == "all" else vocab // 2] = nan
    for implementation in (reference, tiled):
        _, indices, normaliser = implementation.topk_logsumexp(logits, 4)
        assert normaliser.isnan().tolist() == [False, True, False]
        assert indices.min() >= 0 and indices.max() < vocab
    assert_twins(logits, 4)


def test_strided_views_are_read_in_place() -> None:
    store = tied_logits(8, 1000, torch.float32, 4, seed=1)
    for view in (store[:, 100:333], store[::3, :65], store.t()[:300], store[2:3].expand(4, -1), store[:, ::7]):
        assert_twins(view, 5)
    kept = store.clone()
    tiled.topk_logsumexp(store[:, 1:130], 8)
    assert torch.equal(store, kept), "the input must stay as it was"


def test_no_rows_give_no_results() -> None:
    for implementation in (reference, tiled):
        values, indices, normaliser = implementation.topk_logsumexp(torch.zeros(0, 65), 3)
        assert values.shape == indices.shape == (0, 3) and normaliser.shape == (0,)


def test_logsumexp_covers_the_full_vocabulary_in_fp32() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(5)).mul(8).bfloat16()
    _, _, normaliser = tiled.topk_logsumexp(logits, 2)
    want = logits.double().exp().sum(-1).log()
    torch.testing.assert_close(normaliser.double(), want, rtol=1e-6, atol=1e-5)


def test_gradients_reach_the_logits_through_values_and_normaliser() -> None:
    logits = torch.randn(3, 130, generator=torch.Generator().manual_seed(6)).requires_grad_()
    values, _, normaliser = tiled.topk_logsumexp(logits, 4)
    (values.sum() - normaliser.sum()).backward()
    got, logits.grad = logits.grad, None
    values, _, normaliser = reference.topk_logsumexp(logits, 4)
    (values.sum() - normaliser.sum()).backward()
    torch.testing.assert_close(got, logits.grad)


@pytest.mark.parametrize("implementation", [reference, tiled], ids=["reference", "tiled"])
@pytest.mark.parametrize("k", [0, -1, 11])
def test_k_outside_the_vocabulary_is_refused_in_one_sentence(implementation, k: int) -> None:
    with pytest.raises(ValueError, match=rf"top {k} of 10 logits"):
        implementation.topk_logsumexp(torch.zeros(2, 10), k)


@pytest.mark.parametrize("implementation", [reference, tiled], ids=["reference", "tiled"])
@pytest.mark.parametrize("shape", [(10,), (2, 3, 10)])
def test_a_wrong_rank_is_refused_with_the_seen_shape(implementation, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[rows, vocab\], got " + str(list(shape)).replace("[", r"\[")):
        implementation.topk_logsumexp(torch.zeros(shape), 1)
