"""Tokens as a person can see them, and what happened in a block as sentences."""

from typing import Any

from .losses import ABSENT, ELSEWHERE, ENDED, UNCHOSEN, UNDRAFTED, WHOLE, End, end_of
from .trace import BlockTrace

SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """`text` with a sign for every space, line break and character that shows nothing or turns the writing around."""
    return "".join(
        SIGNS.get(letter) or (letter if letter.isprintable() else f"⟦U+{ord(letter):04X}⟧") for letter in text
    )


class Words:
    """Tokens of a tokenizer, visibly."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bool]] = {}

    def _look_up(self, token: int) -> tuple[str, bool]:
        if token not in self._known:
            text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
            self._known[token] = (visible(text) or f"⟦{token}⟧", "\n" in text)
        return self._known[token]

    def __call__(self, token: int) -> str:
        """The token, visibly; its number where it has no text."""
        return self._look_up(token)[0]

    def breaks(self, token: int) -> bool:
        """Whether a line ends in the token."""
        return self._look_up(token)[1]


def percent(chance: float) -> str:
    """A probability for people: whole percents, with small ones told from none."""
    if 0 < chance < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= chance < 1 else f"{chance:.0%}".replace("%", " %")


def told(block: BlockTrace, words: Words) -> str:
    """What was proposed in a block, what was accepted of it, and why no more, in two or three sentences."""
    return " ".join(filter(None, (_proposed(block), _accepted(block, words), _lost(block, end_of(block), words))))


def _proposed(block: BlockTrace) -> str:
    count = len(block.nodes) - 1
    tree = f"a tree of {count} node{'s' * (count != 1)}"
    if not count:
        return "The drafter ran, but nothing of its draft could be used." if block.slots else "Nothing was proposed."
    if block.skipped:
        return f"The text had stood like this before: its own continuation alone gave {tree}, without a draft."
    if any(node.source == "text" for node in block.nodes):
        return f"The drafter's candidates and the text's own continuation gave {tree}."
    return f"The drafter's candidates gave {tree}."


def _accepted(block: BlockTrace, words: Words) -> str:
    kept = "".join(words(block.nodes[number].token) for number in block.accepted)
    count = len(block.accepted)
    if block.bonus is None:
        return f"The target accepted {count}, “{kept}”, and the text ended."
    own = f"said “{words(block.bonus)}” itself{', and the text ended' if block.ended else ''}."
    if len(block.nodes) == 1:
        return f"The target {own}"
    return f"The target accepted {count}, “{kept}”, and {own}" if count else f"The target accepted none and {own}"


def _lost(block: BlockTrace, end: End, words: Words) -> str:
    token, slot = f"“{words(end.token)}”", f"slot {end.slot}"
    if end.reason == ABSENT:
        return f"{token} was not among the candidates of {slot}."
    if end.reason == UNCHOSEN:
        drafted = block.slots[end.slot - 1] if end.slot <= len(block.slots) else None
        place = ""
        if drafted and end.token in drafted.tokens:
            rank = drafted.tokens.index(end.token)
            place = f" (number {rank + 1}, {percent(drafted.chances[rank])})"
        return f"{token} was among the candidates of {slot}{place}, but the tree had no node for it."
    if end.reason == ELSEWHERE:
        return f"{token} stood in the tree at {slot}, but below a token that the target had refused."
    if end.reason == UNDRAFTED:
        return f"There were no candidates for {slot} besides the text's own."
    if end.reason == WHOLE:
        return "All that was proposed along this path was right."
    assert end.reason == ENDED or len(block.nodes) == 1
    return ""
