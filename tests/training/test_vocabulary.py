import pytest
import torch
from lilicorr.kernels.reference import topk_logsumexp
from lilicorr.training.vocabulary import logits_at, topk_normaliser


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunked_normaliser_and_its_gradient_equal_the_dense_ones(biased, chunk):
    torch.manual_seed(0)
    weight, bias = torch.randn(97, 8), torch.randn(97) if biased else None
    states = torch.randn(13, 8, requires_grad=True)
    dense = states.detach().clone().requires_grad_()
    upstream = torch.randn(13)
    normaliser, indices = topk_normaliser(states, weight, bias, 5, chunk=chunk)
    logits = torch.nn.functional.linear(dense, weight, bias)
    _, expected_indices, expected = topk_logsumexp(logits, 5)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(normaliser, expected)
    (normaliser * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(states.grad, dense.grad, rtol=1e-4, atol=1e-6)


def test_logits_at_equals_the_gathered_dense_logits_with_gradient():
    torch.manual_seed(0)
    weight, bias, ids = torch.randn(31, 6), torch.randn(31), torch.randint(31, (4, 3))
    states = torch.randn(4, 6, requires_grad=True)
    chosen = logits_at(states, weight, bias, ids)
    dense = torch.nn.functional.linear(states, weight, bias).gather(1, ids)
    torch.testing.assert_close(chosen, dense)
    gradient, expected = (torch.autograd.grad(x.square().sum(), states)[0] for x in (chosen, dense))
    torch.testing.assert_close(gradient, expected)


def test_without_gradient_nothing_is_kept():
    normaliser, _ = topk_normaliser(torch.randn(4, 6), torch.randn(31, 6), None, 2)
    assert not normaliser.requires_grad


def test_inactive_rows_count_as_constants():
    torch.manual_seed(0)
    weight, states = torch.randn(31, 6), torch.randn(5, 6, requires_grad=True)
    active = torch.tensor([True, False, True, False, False])
    normaliser, _ = topk_normaliser(states, weight, None, 2, active, chunk=2)
    normaliser.sum().backward()
    assert states.grad.any(dim=1).tolist() == active.tolist()
