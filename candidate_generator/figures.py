"""What one call of `generate` drafted and kept, in plain numbers."""

from dataclasses import dataclass, field
from itertools import accumulate


@dataclass
class GenerationFigures:
    """Figures of one `generate` call, filled block by block; derived numbers are computed only when read.

    A block is one pass of the drafter and the verification of what it proposed. The prompt's own pass, a last token for
    which nothing was left to draft, and a draft that was not worth verifying are plain steps. A block cut short by an
    end-of-sequence token or by the length limit counts with what it really committed.

    Attributes:
        drafted_per_block: tokens proposed, for each block.
        committed_per_block: tokens that entered the output, for each block: the accepted ones and the target's own.
        plain_steps: tokens committed by passes without a draft.
    """

    drafted_per_block: list[int] = field(default_factory=list)
    committed_per_block: list[int] = field(default_factory=list)
    plain_steps: int = 0

    def add_block(self, drafted: int, committed: int) -> None:
        """Record one verified block."""
        self.drafted_per_block.append(drafted)
        self.committed_per_block.append(committed)

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
        """Proposed tokens that entered the output, without the target's own token of each block."""
        return sum(self.committed_per_block) - self.blocks

    @property
    def committed(self) -> int:
        """All tokens of the output: of blocks and of plain steps."""
        return sum(self.committed_per_block) + self.plain_steps

    @property
    def accepted_per_slot(self) -> list[int]:
        """In how many blocks slot 1, slot 2, … was accepted; acceptance is a prefix, so the counts never rise.

        Committed 3, 1, 4 tokens with 4 drafted each means accepted 2, 0, 3: the slots counted `[2, 2, 1, 0]`.
        """
        ends = [0] * (max(self.drafted_per_block, default=0) + 1)
        for committed in self.committed_per_block:
            ends[committed - 1] += 1
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
