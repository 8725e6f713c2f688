"""What one call of `generate` drafted and kept, in plain numbers."""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass
class GenerationFigures:
    """Figures of one `generate` call, filled block by block; derived numbers are computed only when read.

    A block is one draft and the pass that verified it. The prompt's own pass, a last token for which nothing was left
    to draft, and a pass without a draft are plain steps. A block cut short by an end-of-sequence token, another
    criterion or the length limit counts with what it really committed.

    Attributes:
        drafted_per_block: tokens proposed, for each block; of a tree, its nodes without the anchor.
        committed_per_block: tokens that entered the output, for each block: the accepted ones and the target's own.
        accepted_per_block: how many of those were proposed; one less than committed, or all where a block ended with an
            accepted token.
        plain_steps: tokens committed by passes without a draft.
        accepted_by_source: accepted tokens by who proposed them ("lattice", "text", "both"), where it is known.
        rows: of a batch, each row's figures; what stands above is all of them together.
    """

    drafted_per_block: list[int] = field(default_factory=list)
    committed_per_block: list[int] = field(default_factory=list)
    accepted_per_block: list[int] = field(default_factory=list)
    plain_steps: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    rows: list["GenerationFigures"] = field(default_factory=list)

    @classmethod
    def of_rows(cls, rows: Iterable["GenerationFigures"]) -> "GenerationFigures":
        """The figures of a batch; of a single row, that row's own."""
        parts = list(rows)
        if len(parts) == 1:
            return parts[0]
        whole = cls(rows=parts)
        for part in parts:
            whole.drafted_per_block += part.drafted_per_block
            whole.committed_per_block += part.committed_per_block
            whole.accepted_per_block += part.accepted_per_block
            whole.plain_steps += part.plain_steps
            whole.count_sources(part.accepted_by_source)
        return whole

    def add_block(self, drafted: int, committed: int, accepted: int | None = None) -> None:
        """Record one verified block; all but one of the committed tokens were proposed unless `accepted` says more."""
        self.drafted_per_block.append(drafted)
        self.committed_per_block.append(committed)
        self.accepted_per_block.append(committed - 1 if accepted is None else accepted)

    def count_sources(self, accepted: dict[str, int]) -> None:
        """Add accepted tokens by source."""
        for source, count in accepted.items():
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + count

    @property
    def blocks(self) -> int:
        """Number of drafted blocks."""
        return len(self.drafted_per_block)

    @property
    def drafted(self) -> int:
        """Tokens proposed in all blocks."""
        return sum(self.drafted_per_block)

    @property
    def accepted(self) -> int:
        """Proposed tokens that entered the output."""
        return sum(self.accepted_per_block)

    @property
    def committed(self) -> int:
        """All tokens of the output: of blocks and of plain steps."""
        return sum(self.committed_per_block) + self.plain_steps

    @property
    def accepted_per_slot(self) -> list[int]:
        """In how many blocks slot 1, slot 2, … was accepted; acceptance is a prefix, so the counts never rise.

        Accepted 2, 0, 3 of 4 drafted tokens each: the slots counted `[2, 2, 1, 0]`. Nodes of a tree count by depth.
        """
        ends = [0] * (max([*self.drafted_per_block, *self.accepted_per_block], default=0) + 1)
        for accepted in self.accepted_per_block:
            ends[accepted] += 1
        return list(accumulate(reversed(ends[1:])))[::-1]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed by a block, the target's own token included (block-weighted); 0.0 without blocks."""
        return sum(self.committed_per_block) / self.blocks if self.blocks else 0.0

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.committed} tokens, {self.blocks} blocks, {self.accepted} of {self.drafted} drafted tokens "
            f"accepted, acceptance length {self.acceptance_length:.2f}"
        )


class LatestFigures:
    """The figures of the latest call in each thread; copies and pickles start anew."""

    def __init__(self) -> None:
        self._by_thread: weakref.WeakKeyDictionary[threading.Thread, GenerationFigures] = weakref.WeakKeyDictionary()
        self._latest: GenerationFigures | None = None

    def put(self, figures: GenerationFigures | None) -> None:
        """Those of a call of this thread."""
        self._latest = figures
        if figures is None:
            self._by_thread.pop(threading.current_thread(), None)
        else:
            self._by_thread[threading.current_thread()] = figures

    def get(self) -> GenerationFigures | None:
        """Those of this thread's latest call; in a thread that made none, of the latest anywhere."""
        return self._by_thread.get(threading.current_thread(), self._latest)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
