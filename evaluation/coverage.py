"""Where the target's token stands among a drafter's candidates, slot by slot, and what each way to pick one accepts.

Measured on blocks drafted again behind sampled tokens of plain decoding's answer, never inside a timed run.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..kernels.reference import exact_path
from .blocks import DrawnBlock, draft_again, positions_of
from .metrics import first_difference


def count_coverage(
    target: PreTrainedModel,
    drafter: Any,
    inputs: dict[str, torch.Tensor],
    token_ids: Sequence[int],
    blocks: int,
    seed: int = 0,
) -> dict[str, Any] | None:
    """Counts over at most `blocks` blocks behind tokens of an answer that `seed` chooses.

    Args:
        target, drafter, inputs: as for `compare.answer`; token_ids: the target's plain answer to `inputs`.

    Returns:
        `blocks`; `ranks`, for every slot in how many blocks the answer's token is candidate 1, 2, … K; `greedy`, drafts
        accepted in all blocks; `exact`, the same for the path of the highest summed score, `None` for a head without
        scores. `None` if the answer fills no block or the head shows no candidates.
    """
    held = positions_of(drafter, inputs, token_ids)
    chosen = sorted(random.Random(seed).sample(held, min(blocks, len(held))))
    drawn = draft_again(target, drafter, inputs, token_ids, chosen)
    if not drawn or drawn[0].lattice is None:
        return None
    hits = [_hits(block) for block in drawn]
    exact = [_accepted_exactly(block) for block in drawn]
    return {
        "blocks": len(drawn),
        "ranks": torch.stack(hits).sum(0).tolist(),
        "greedy": sum(block.accepted for block in drawn),
        "exact": None if None in exact else sum(filter(None, exact)),
    }


def _hits(block: DrawnBlock) -> torch.Tensor:
    """`[slots, K]` (bool): whether the candidate is the answer's token."""
    candidates = block.lattice.candidates[0].cpu()
    return candidates == torch.tensor(block.answer_ids)[:, None]


def _accepted_exactly(block: DrawnBlock) -> int | None:
    first, pair = block.lattice.first_scores, block.lattice.pair_scores
    if first is None or pair is None:
        return None
    path = block.lattice.candidates.gather(-1, exact_path(first, pair)[..., None])[0, :, 0].tolist()
    differs = first_difference(path, block.answer_ids)
    return len(path) if differs is None else differs


def add_coverage(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Shares over all counts of one drafter; `None` if there are none.

    Returns:
        `blocks`; `by_slot`, for every slot the share of blocks whose token is among the top 1, 2, … K; `mean`, the same
        over all slots; `greedy` and `exact`, acceptance lengths with the bonus token (`exact` may be `None`).
    """
    counts = list(counts)
    blocks = sum(count["blocks"] for count in counts)
    if not blocks:
        return None
    ranks = torch.tensor([count["ranks"] for count in counts]).sum(0)
    by_slot = (ranks.cumsum(-1).double() / blocks).tolist()
    exact = [count["exact"] for count in counts]
    return {
        "blocks": blocks,
        "by_slot": by_slot,
        "mean": [sum(slot[rank] for slot in by_slot) / len(by_slot) for rank in range(len(by_slot[0]))],
        "greedy": 1 + sum(count["greedy"] for count in counts) / blocks,
        "exact": None if None in exact else 1 + sum(exact) / blocks,
    }
