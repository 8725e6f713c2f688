import math

import pytest
import torch
from lilicorr.kernels.reference import greedy_walk
from lilicorr.training.losses.terms import (
    Objective,
    accepted,
    oracle_prefix,
    pace_weights,
    reranker_terms,
    slot_weights,
    teacher_forced_scores,
)

CANDIDATES = torch.tensor([[[5, 6], [7, 8], [9, 1]]])


def test_slot_weights_decay_from_one():
    expected = [1.0, math.exp(-1 / 7), math.exp(-2 / 7)]
    assert slot_weights(3, 7.0).tolist() == pytest.approx(expected)
    assert slot_weights(3, 0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("labels", "supervised", "covered", "gold"),
    [
        ([6, 7, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1]),
        ([6, 3, 1], [1, 1, 1], [1, 0, 0], [1, 0, 0]),  # a later hit behind a miss does not count
        ([4, 7, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]),
        ([6, 7, 1], [1, 0, 1], [1, 0, 0], [1, 0, 0]),  # nor one behind an unsupervised slot
    ],
)
def test_oracle_prefix_stops_at_the_first_miss(labels, supervised, covered, gold):
    run, index = oracle_prefix(CANDIDATES, torch.tensor([labels]), torch.tensor([supervised]).bool())
    assert run.int().tolist() == [covered]
    assert index.tolist() == [gold]


def test_teacher_forcing_reads_the_row_of_the_true_predecessor():
    first, pair = torch.randn(1, 2), torch.randn(1, 2, 2, 2)
    scores = teacher_forced_scores(first, pair, torch.tensor([[1, 0, 1]]))
    assert torch.equal(scores[0, 0], first[0])
    assert torch.equal(scores[0, 1], pair[0, 0, 1])
    assert torch.equal(scores[0, 2], pair[0, 1, 0])


def test_reranker_terms_equal_the_equations_by_hand():
    scores = torch.tensor([[[1.0, 3.0], [0.5, -0.5]]])
    gold, covered = torch.tensor([[1, 0]]), torch.tensor([[True, True]])
    target = torch.tensor([[[2.0, 5.0], [1.0, 4.0]]])
    terms = reranker_terms(scores, gold, covered, target, rho=1.5)
    p0, p1 = 1 / (1 + math.exp(2.0)), 1 / (1 + math.exp(-1.0))  # of the first candidate in either slot
    assert terms["cross_entropy"].item() == pytest.approx(-math.log(1 - p0) - math.log(p1))
    # Slot 1: the rival lies 3 below the ground truth; slot 2: it lies above, so the rectifier leaves nothing.
    assert terms["distractor"].item() == pytest.approx(3.0 * p0)
    assert terms["margin"].item() == pytest.approx(0.0 + (1.5 - 1.0))
    assert terms["covered"].item() == 2


def test_a_miss_at_slot_one_gives_no_reranker_loss_and_no_gradient():
    scores = torch.randn(1, 3, 2, requires_grad=True)
    covered, gold = oracle_prefix(CANDIDATES, torch.tensor([[4, 7, 1]]), torch.ones(1, 3).bool())
    terms = reranker_terms(scores, gold, covered, torch.randn(1, 3, 2), rho=2.0)
    total = terms["cross_entropy"] + terms["distractor"] + terms["margin"]
    total.backward()
    assert total.item() == 0 and terms["covered"].item() == 0
    assert scores.grad is None or not scores.grad.any()


def test_one_candidate_has_no_rival():
    terms = reranker_terms(
        torch.zeros(1, 1, 1), torch.zeros(1, 1).long(), torch.ones(1, 1).bool(), torch.zeros(1, 1, 1), 2.0
    )
    assert terms["margin"].item() == 0 and terms["cross_entropy"].item() == 0


def test_accepted_counts_the_leading_run_only():
    tokens = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    labels = torch.tensor([[1, 2, 3]] * 4)
    supervised = torch.tensor([[1, 1, 1]] * 3 + [[1, 0, 1]]).bool()
    assert accepted(tokens, labels, supervised).sum(dim=1).tolist() == [3, 1, 0, 1]


def test_minimising_the_cross_entropy_makes_the_walk_follow_the_truth():
    torch.manual_seed(0)
    first, pair = torch.zeros(1, 4, requires_grad=True), torch.zeros(1, 2, 4, 4, requires_grad=True)
    gold, covered = torch.tensor([[2, 0, 3]]), torch.ones(1, 3).bool()
    for _ in range(5):
        scores = teacher_forced_scores(first, pair, gold)
        loss = reranker_terms(scores, gold, covered, torch.zeros(1, 3, 4), 2.0)["cross_entropy"]
        for table, gradient in zip((first, pair), torch.autograd.grad(loss, (first, pair)), strict=True):
            table.data -= gradient
    assert greedy_walk(first, pair).tolist() == gold.tolist()


def test_pace_weights_of_two_slots_in_closed_form():
    p1, p2, alpha = 0.6, 0.3, 0.25
    weights = pace_weights(-torch.tensor([[p1, p2]]).log(), torch.tensor([[True, True]]), alpha)
    first = 0.75 * p1 + alpha
    both = first * (0.75 * p2 + alpha)
    torch.testing.assert_close(weights, torch.tensor([[first + both, both]]))


def test_pace_weights_without_probabilities_count_the_slots_left():
    supervised = torch.tensor([[True, True, False, True]])
    weights = pace_weights(torch.rand(1, 4, requires_grad=True), supervised, alpha=1.0)
    assert weights.tolist() == [[3, 2, 0, 1]] and not weights.requires_grad


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slot_weighting": "pace"}, "slot_weighting is 'pace'"),
        ({"slot_weighting": "d-pace", "sample_slots": True}, "choose one"),
        ({"alpha": 1.5}, "alpha is 1.5"),
    ],
)
def test_weights_that_cannot_work_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Objective(**wrong).validate()
