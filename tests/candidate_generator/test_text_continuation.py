"""What a text went on with before, and how far it is to be believed."""

import pytest
from lilicorr.candidate_generator.text_continuation import LONGEST, PRIORS, Proposal, TextContinuation


@pytest.mark.parametrize(
    "text,tokens,matched",
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3], 2),  # what followed 1 2, periodically at the text's end
        ([7, 7], [7, 7, 7, 7, 7], 1),
        ([5, 1, 9, 1, 8, 1], [8, 1, 8, 1, 8], 1),  # the latest place counts
        ([1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4], LONGEST),
    ],
)
def test_the_longest_suffix_seen_before_is_continued(text, tokens, matched):
    assert TextContinuation(text).propose(5) == Proposal(tokens, matched)


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_a_text_without_a_repeated_token_proposes_nothing(text):
    assert TextContinuation(text).propose(5) is None


def test_a_text_that_grew_is_the_text_that_was_given_at_once():
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5]
    grown = TextContinuation(text[:1])
    for end in range(1, len(text)):
        assert grown.propose(8) == TextContinuation(text[:end]).propose(8)
        grown.extend(text[end : end + 1])


def test_chances_rise_with_the_suffix_that_leads_to_a_token():
    text = TextContinuation([1])
    assert text.chances(Proposal([5] * 7, 1)) == [PRIORS[n] for n in (1, 2, 3, 4, 5, 5, 5)]


def test_chances_follow_what_came_of_proposals_up_to_the_first_wrong_token():
    text = TextContinuation([1])
    for _ in range(100):
        text.learn(Proposal([5, 6, 7, 8], 2), [5, 6, 0, 8])  # two right, the third wrong, the fourth never reached
    assert text.chance(2) > 0.95 and text.chance(3) > 0.95
    assert text.chance(4) < 0.1
    assert text.chance(1) == PRIORS[1] and text.chance(5) == PRIORS[5]
