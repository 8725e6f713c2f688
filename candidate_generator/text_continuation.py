"""The text's own continuation: what followed where the last tokens stood before, and how often that is right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST = 5  # tokens of the longest suffix that is looked up
DEEPEST = 15  # tokens proposed at most

# A token's chance to be right by the length of the suffix that led to it, over answers of SmolLM2 to training prompts
# (`lilicorr replay` prints it for others).
PRIORS = {1: 0.20, 2: 0.56, 3: 0.59, 4: 0.77, 5: 0.90}
PRIOR_WEIGHT = 8.0  # tokens that a prior counts for beside those of the call


@dataclass(frozen=True)
class Proposal:
    """Tokens that the text went on with after a suffix of `matched` tokens like the present one."""

    tokens: list[int]
    matched: int


class TextContinuation:
    """Finds the longest suffix of a growing text, of 1 to `LONGEST` tokens, that stands earlier in it.

    Args:
        token_ids: the text so far.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # suffix to the index of the token behind its latest place
        self._hits = dict.fromkeys(PRIORS, 0)
        self._tries = dict.fromkeys(PRIORS, 0)
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add committed tokens to the text."""
        ids, latest = self._ids, self._latest
        for token in token_ids:
            end = len(ids)
            for length in range(1, min(LONGEST, end) + 1):
                latest[tuple(ids[end - length :])] = end
            ids.append(token)

    def propose(self, count: int = DEEPEST) -> Proposal | None:
        """The next `count` tokens as they followed the suffix's latest place, over and over where the text ends."""
        ids = self._ids
        for length in range(min(LONGEST, len(ids)), 0, -1):
            start = self._latest.get(tuple(ids[-length:]))
            if start is not None:
                period = len(ids) - start
                return Proposal([ids[start + index % period] for index in range(count)], length)
        return None

    def chance(self, matched: int) -> float:
        """How likely a token is to be right that `matched` tokens lead to: the prior, with what this text has shown."""
        length = min(matched, LONGEST)
        return (PRIORS[length] * PRIOR_WEIGHT + self._hits[length]) / (PRIOR_WEIGHT + self._tries[length])

    def chances(self, proposal: Proposal) -> list[float]:
        """For each token of `proposal`, how likely it is to be right if those before it were."""
        return [self.chance(proposal.matched + index) for index in range(len(proposal.tokens))]

    def learn(self, proposal: Proposal, committed: Sequence[int]) -> None:
        """Note which tokens of `proposal` the `committed` ones bore out, up to the first that they did not."""
        for index, (proposed, token) in enumerate(zip(proposal.tokens, committed, strict=False)):
            length = min(proposal.matched + index, LONGEST)
            self._tries[length] += 1
            if proposed != token:
                return
            self._hits[length] += 1
