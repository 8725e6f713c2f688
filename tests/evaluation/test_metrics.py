import math

import pytest
from lilicorr.evaluation.metrics import (
    Trace,
    acceptance_by_slot,
    acceptance_length,
    first_difference,
    loops,
    mean_of_response_means,
    tokens_per_verification,
)


def trace_of(accepted: list[int], slots: int = 5) -> Trace:
    """An answer whose blocks had these numbers of drafts accepted; one token comes from the prefill."""
    per_slot = tuple(sum(a > slot for a in accepted) for slot in range(slots))
    return Trace(len(accepted), per_slot, 1 + sum(a + 1 for a in accepted), slots * len(accepted))


# A short answer that accepts much and a long one that accepts little: where the three poolings part.
SHORT = trace_of([5, 3])
LONG = trace_of([0, 1, 0, 1, 0, 1, 0, 1])


def test_acceptance_length_weighs_blocks():
    lengths = [6, 4] + [1, 2] * 4  # DeepSpec and the paper: sum over blocks by blocks, bonus included
    assert acceptance_length([SHORT, LONG]) == pytest.approx(sum(lengths) / len(lengths)) == pytest.approx(2.2)


def test_mean_of_response_means_weighs_answers():
    assert mean_of_response_means([SHORT, LONG]) == pytest.approx((5.0 + 1.5) / 2)  # z-lab


def test_tokens_per_verification_counts_the_prefill():
    assert tokens_per_verification([SHORT, LONG]) == pytest.approx((11 / 2 + 13 / 8) / 2)  # SGLang


def test_poolings_agree_on_one_answer_but_for_the_prefill():
    assert acceptance_length([LONG]) == mean_of_response_means([LONG])
    assert tokens_per_verification([LONG]) == pytest.approx(acceptance_length([LONG]) + 1 / LONG.blocks)


def test_answers_without_blocks_do_not_count():
    empty = Trace(0, (), 1)
    assert math.isnan(acceptance_length([])) and math.isnan(acceptance_length([empty]))
    assert math.isnan(mean_of_response_means([empty])) and math.isnan(tokens_per_verification([empty]))
    assert mean_of_response_means([SHORT, empty]) == mean_of_response_means([SHORT])
    assert acceptance_by_slot([empty]) == []


def test_acceptance_by_slot_sums_up_to_the_acceptance_length():
    shares = acceptance_by_slot([SHORT, LONG])
    assert shares == pytest.approx([6 / 10, 2 / 10, 2 / 10, 1 / 10, 1 / 10])
    assert 1 + sum(shares) == pytest.approx(acceptance_length([SHORT, LONG]))


def test_acceptance_by_slot_takes_answers_with_fewer_slots():
    assert acceptance_by_slot([Trace(1, (1, 1), 4), Trace(1, (1,), 3)]) == [1.0, 0.5]


def test_loops_needs_eight_equal_four_grams():
    assert loops([1, 2, 3, 4] * 8)
    assert not loops([1, 2, 3, 4] * 7)
    assert loops([9] * 11) and not loops([9] * 10)
    assert not loops(list(range(200)))
    assert not loops([]) and not loops([1, 2])


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None
