"""Why blocks end, on blocks made up for it, and the sums by slot."""

import pytest
from lilicorr.explain.losses import (
    ABSENT,
    ELSEWHERE,
    ENDED,
    LOSSES,
    PLAIN,
    UNCHOSEN,
    UNDRAFTED,
    WHOLE,
    end_of,
    tally,
)
from lilicorr.explain.words import Words, told, visible

ENDS = {
    "not among the candidates": (2, 77, ABSENT),
    "not chosen": (2, 23, UNCHOSEN),
    "below a refused token": (2, 22, ELSEWHERE),
    "at the very first slot": (1, 13, UNCHOSEN),
    "where the tree stopped": (3, 32, UNCHOSEN),
    "the text's token, not chosen": (2, 41, UNCHOSEN),
    "the text's token behind another path": (2, 41, ABSENT),  # what the text goes on with was never possible there
    "only the text": (2, 5, UNDRAFTED),
    "right to the last": (4, 8, WHOLE),
    "nothing usable": (1, 6, ABSENT),
    "nothing proposed": (1, 6, PLAIN),
    "ended by an accepted token": (2, 11, ENDED),
    "ended by the target's": (2, 9, ENDED),
}


def test_every_block_ends_for_its_reason(made_up):
    assert set(made_up) == set(ENDS)
    found = {name: end_of(block) for name, block in made_up.items()}
    assert {name: (end.slot, end.token, end.reason) for name, end in found.items()} == ENDS


def test_ends_are_summed_by_slot(made_up):
    first, second, third = tally(made_up.values())
    assert (first.slot, first.accepted, first.ended) == (1, 10, 0)
    assert first.lost == {ABSENT: 1, UNCHOSEN: 1, ELSEWHERE: 0, UNDRAFTED: 0}
    assert first.reached == 12  # of 13: one proposed nothing
    assert (second.accepted, second.ended, second.reached) == (2, 1, 9)  # one ended with what it accepted
    assert second.lost == {ABSENT: 2, UNCHOSEN: 2, ELSEWHERE: 1, UNDRAFTED: 1}
    assert (third.accepted, third.ended, third.reached) == (1, 0, 2)
    assert third.lost == {ABSENT: 0, UNCHOSEN: 1, ELSEWHERE: 0, UNDRAFTED: 0}
    assert tally([]) == []


def test_accepted_and_bonus_tokens(made_up):
    ended = made_up["ended by an accepted token"]
    assert (ended.accepted, ended.bonus) == ((1,), None)
    assert (made_up["not chosen"].accepted, made_up["not chosen"].bonus) == ((1,), 23)
    assert made_up["only the text"].skipped and not made_up["nothing proposed"].skipped


@pytest.mark.parametrize("name", ENDS)
def test_every_end_is_told_in_whole_sentences(name, made_up, letters):
    said = told(made_up[name], Words(letters))
    assert said.endswith((".", "itself.")) and "  " not in said
    token = f"“t{ENDS[name][1]}”"
    reason = {
        ABSENT: f"{token} was not among the candidates of slot",
        UNCHOSEN: f"{token} was among the candidates of slot",
        ELSEWHERE: "below a token that the target had refused",
        UNDRAFTED: "besides the text's own",
        WHOLE: "was right",
        ENDED: "the text ended",
        PLAIN: "Nothing was proposed",
    }[ENDS[name][2]]
    assert reason in said
    others = [f"{token} was not among", "the tree had no node", "had refused", "besides the text's own"]
    assert sum(other in said for other in others) == (ENDS[name][2] in LOSSES)


def test_what_shows_nothing_is_made_visible():
    assert visible("a b\n\tc") == "a·b⏎⇥c"
    assert visible("\x00\u202e\u200b\xa0\ud800") == "⟦U+0000⟧⟦U+202E⟧⟦U+200B⟧⟦U+00A0⟧⟦U+D800⟧"
    assert visible("é中✓") == "é中✓"
