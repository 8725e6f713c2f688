"""Where acceptance is lost: why each block ended where it did, and these ends summed by slot."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .trace import BlockTrace

ABSENT, UNCHOSEN, ELSEWHERE, UNDRAFTED = "absent", "unchosen", "elsewhere", "undrafted"
ENDED, WHOLE, PLAIN = "ended", "whole", "plain"

LOSSES = {  # a reason, and what it is called in a table
    ABSENT: "not a candidate",
    UNCHOSEN: "a candidate, not in the tree",
    ELSEWHERE: "in the tree, below a refused token",
    UNDRAFTED: "no draft: only the text was trusted",
}


@dataclass(frozen=True)
class End:
    """Where a block ended.

    Attributes:
        slot: that of the token which no accepted node held; token: the target's token there.
        reason: one of `LOSSES`; `ENDED` where the text ended, `WHOLE` where everything to the last slot was right,
            `PLAIN` where nothing was proposed.
    """

    slot: int
    token: int
    reason: str


def end_of(block: BlockTrace) -> End:
    """Why no more of `block` was accepted."""
    slot, token = len(block.accepted) + 1, block.committed[-1]
    return End(slot, token, _reason(block, slot, token))


def _reason(block: BlockTrace, slot: int, token: int) -> str:
    if block.ended:
        return ENDED
    if len(block.nodes) == 1 and not block.slots:
        return PLAIN
    goes_on = any(node.parent == block.path[-1] for node in block.nodes)
    if not goes_on and slot > len(block.slots):
        return WHOLE
    if not block.slots:
        return UNDRAFTED
    if any((node.depth, node.token) == (slot, token) for node in block.nodes):
        return ELSEWHERE
    return UNCHOSEN if token in block.candidates(slot) else ABSENT


@dataclass
class SlotTally:
    """Of all blocks that reached a slot: how many were accepted there, were lost by which reason, or ended."""

    slot: int
    accepted: int
    lost: dict[str, int]
    ended: int

    @property
    def reached(self) -> int:
        """Blocks whose earlier slots were all accepted."""
        return self.accepted + sum(self.lost.values()) + self.ended


def tally(blocks: Iterable[BlockTrace]) -> list[SlotTally]:
    """The ends of `blocks` by slot, for slots 1, 2, … as far as any block came.

    A block that ended with its last accepted token, was right to its last slot, or proposed nothing counts nowhere
    behind what it accepted.
    """
    accepted = Counter[int]()
    ends = Counter[tuple[int, str]]()
    for block in blocks:
        accepted.update(range(1, len(block.accepted) + 1))
        end = end_of(block)
        if end.reason in LOSSES or (end.reason == ENDED and block.bonus is not None and len(block.nodes) > 1):
            ends[end.slot, end.reason] += 1
    deepest = max([*accepted, *(slot for slot, _ in ends)], default=0)
    return [
        SlotTally(slot, accepted[slot], {reason: ends[slot, reason] for reason in LOSSES}, ends[slot, ENDED])
        for slot in range(1, deepest + 1)
    ]
