"""Figures of speculative decoding, from plain numbers: how long drafts live, and which answers only loop.

Evaluators pool acceptance lengths in different ways, and the results differ on the same trace. `Trace` is one answer;
`acceptance_length` is what this repository reports, the other poolings are there to compare with published figures.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..candidate_generator.figures import GenerationFigures


@dataclass(frozen=True)
class Trace:
    """What drafting did for one answer; a block commits its accepted tokens and, if it goes on, one of the target's.

    Attributes:
        blocks: verified blocks.
        accepted_per_slot: for slot 1, 2, …: in how many blocks the draft of that slot was accepted.
        new_tokens: tokens of the answer, among them the one that the prefill gave.
        drafted: drafted tokens of all blocks.
        endings: blocks that ended the answer with an accepted token, which none of the target's followed.
    """

    blocks: int
    accepted_per_slot: tuple[int, ...]
    new_tokens: int
    drafted: int = 0
    endings: int = 0

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Trace":
        """Back from the mapping that `dataclasses.asdict` and JSON made of one."""
        return cls(**row | {"accepted_per_slot": tuple(row["accepted_per_slot"])})

    @property
    def accepted(self) -> int:
        """Accepted draft tokens of all blocks."""
        return sum(self.accepted_per_slot)

    @property
    def committed(self) -> int:
        """Tokens that entered the answer by all blocks."""
        return self.accepted + self.blocks - self.endings


def trace_of(figures: "GenerationFigures", new_tokens: int) -> Trace:
    """From a call's `figures` and the tokens of its answer."""
    blocks = zip(figures.accepted_per_block, figures.committed_per_block, strict=True)
    endings = sum(accepted == committed for accepted, committed in blocks)
    return Trace(figures.blocks, tuple(figures.accepted_per_slot), new_tokens, figures.drafted, endings)


def acceptance_length(traces: Iterable[Trace]) -> float:
    """Tokens committed per verified block with the bonus token, each block weighing the same; NaN without blocks."""
    traces = list(traces)
    blocks = sum(trace.blocks for trace in traces)
    return sum(trace.committed for trace in traces) / blocks if blocks else float("nan")


def mean_of_response_means(traces: Iterable[Trace]) -> float:
    """The mean over answers of each answer's own acceptance length (z-lab's benchmark)."""
    means = [acceptance_length([trace]) for trace in traces if trace.blocks]
    return sum(means) / len(means) if means else float("nan")


def tokens_per_verification(traces: Iterable[Trace]) -> float:
    """The mean over answers of all new tokens by verified blocks, the prefill's token included (SGLang)."""
    ratios = [trace.new_tokens / trace.blocks for trace in traces if trace.blocks]
    return sum(ratios) / len(ratios) if ratios else float("nan")


def acceptance_by_slot(traces: Iterable[Trace]) -> list[float]:
    """For slot 1, 2, …: the share of all blocks whose draft was accepted at least that far."""
    traces = list(traces)
    blocks = sum(trace.blocks for trace in traces)
    counts = zip_longest(*(trace.accepted_per_slot for trace in traces), fillvalue=0)
    return [sum(slot) / blocks for slot in counts] if blocks else []


def loops(token_ids: Sequence[int], gram: int = 4, times: int = 8) -> bool:
    """Whether some `gram` consecutive ids stand `times` times or more in an answer: easy prey for any drafter."""
    grams = Counter(tuple(token_ids[i : i + gram]) for i in range(len(token_ids) - gram + 1))
    return max(grams.values(), default=0) >= times


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first id in which two answers differ, `None` if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
