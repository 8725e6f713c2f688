import copy
import pickle

import pytest
import torch
from lilicorr.kernels import int8_logits
from lilicorr.kernels.int8_logits import EXACT, Int8Logits, KnownLogits, multiplies_bytes
from torch import nn

needs_bytes = pytest.mark.skipif(not multiplies_bytes(), reason="needs a CPU with AVX2")


def layer(vocab=700, dim=32, bias=False, seed=0):
    torch.manual_seed(seed)
    made = nn.Linear(dim, vocab, bias=bias)
    nn.init.normal_(made.weight, std=0.1)
    return made.requires_grad_(False)


@pytest.fixture(autouse=True)
def small_heads_count(monkeypatch):
    monkeypatch.setattr(int8_logits, "WORTHWHILE", 1)
    monkeypatch.delenv("LILICORR_KERNELS", raising=False)


@needs_bytes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (1, 7)])
def test_the_greatest_entries_are_exact_and_the_others_near(bias, shape):
    head = layer(bias=bias)
    hidden = torch.randn(*shape, 32) * torch.linspace(0.1, 3, 32)
    logits, right = Int8Logits(head.weight, head.bias)(hidden), head(hidden)
    assert logits.shape == right.shape and logits.dtype == torch.float32
    # The order of the best is the right one wherever rounding cannot have hidden an entry from the EXACT best.
    count = EXACT // 4
    assert torch.equal(logits.topk(count).indices, right.topk(count).indices)
    torch.testing.assert_close(logits.topk(count).values, right.topk(count).values, rtol=1e-5, atol=1e-5)
    assert (logits - right).abs().max() < 0.1 * right.std()


@needs_bytes
def test_a_vocabulary_smaller_than_the_exact_entries_is_exact_throughout():
    head = layer(vocab=EXACT // 2)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(Int8Logits(head.weight, None)(hidden), head(hidden))


@needs_bytes
def test_a_row_of_zero_weights_gives_zero():
    head = layer(vocab=100)
    head.weight[3] = 0
    logits = Int8Logits(head.weight, None)(torch.randn(1, 32))
    assert logits[0, 3] == 0 and logits.isfinite().all()


@needs_bytes
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_state_that_is_not_finite_shows_and_spoils_no_other(value):
    head = layer(vocab=100, bias=True)
    hidden = torch.randn(2, 3, 32)
    hidden[0, 1, 5] = value
    torch.testing.assert_close(Int8Logits(head.weight, head.bias)(hidden), head(hidden), equal_nan=True)


@needs_bytes
def test_changed_weights_get_a_new_copy_and_the_same_keep_theirs():
    head, known = layer(), KnownLogits()
    first = known.of(head)
    assert known.of(head) is first
    head.weight.mul_(2)
    hidden = torch.randn(1, 32)
    again = known.of(head)
    assert again is not first
    torch.testing.assert_close(again(hidden).max(), head(hidden).max())
    for copied in (copy.deepcopy(known), pickle.loads(pickle.dumps(known))):
        assert copied.of(head) is not again


@needs_bytes
@pytest.mark.parametrize("why", ["hook", "half", "another class", "reference", "small", "inherits"])
def test_what_would_not_be_the_same_or_not_pay_is_left_alone(why, monkeypatch):
    head = layer()
    if why == "hook":
        head.register_forward_hook(lambda *_: None)
    elif why == "half":
        head = head.half()
    elif why == "another class":
        head = nn.Sequential(head)
    elif why == "reference":
        monkeypatch.setenv("LILICORR_KERNELS", "reference")
    elif why == "small":
        monkeypatch.setattr(int8_logits, "WORTHWHILE", head.weight.numel() + 1)
    else:
        head.__class__ = type("Lora", (nn.Linear,), {})
    assert KnownLogits().of(head) is None


def test_a_cpu_without_the_instructions_keeps_its_products(monkeypatch):
    multiplies_bytes.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    try:
        assert KnownLogits().of(layer()) is None
    finally:
        multiplies_bytes.cache_clear()


@needs_bytes
def test_large_states_and_weights_of_one_sign_do_not_overflow():
    """The worst case for sums of byte products in 16 bits: without VNNI states are rounded to seven bits."""
    head, hidden = layer(dim=64), torch.ones(3, 64) + 0.01 * torch.arange(64)
    torch.nn.init.uniform_(head.weight, 0.9, 1.0)
    with torch.no_grad():
        expected, got = head(hidden), Int8Logits(head.weight, head.bias)(hidden)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@needs_bytes
def test_a_bf16_head_serves_its_own_weights():
    head = layer(bias=True).bfloat16()
    logits = KnownLogits().of(head)
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2))
    expected = nn.functional.linear(hidden, head.weight.float(), head.bias.float())
    best = expected.topk(8).indices
    torch.testing.assert_close(logits(hidden.bfloat16().float()).gather(-1, best).argmax(-1), torch.zeros(2, 3).long())
    torch.testing.assert_close(logits(hidden).gather(-1, best), expected.gather(-1, best))
