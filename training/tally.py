"""What cannot be used: counted by reason and named at the end, so that one odd row never stops the good ones."""

from collections import Counter
from dataclasses import dataclass, field


class Unusable(ValueError):
    """A row, or an answer in it, that cannot be used: `reason` in a few words, and a sentence that names it."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass
class Tally:
    """Counts of what was left out, with the first of each reason; `strict` raises it instead."""

    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)

    def leave_out(self, problem: Unusable) -> None:
        """Count `problem`.

        Raises:
            Unusable: `problem` itself, if this is strict.
        """
        if self.strict:
            raise problem
        self.counts[problem.reason] += 1
        self.firsts.setdefault(problem.reason, str(problem))

    @property
    def total(self) -> int:
        """How many were left out."""
        return self.counts.total()

    @property
    def first(self) -> str:
        """The sentence of what was left out first; empty if nothing was."""
        return next(iter(self.firsts.values()), "")

    def lines(self) -> list[str]:
        """One line a reason, the most frequent first."""
        return [
            f"{reason}: {count:,} (the first: {self.firsts[reason]})" for reason, count in self.counts.most_common()
        ]
