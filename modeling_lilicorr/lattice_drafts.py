"""What heads share once they have scores or corrected logits: committing tokens, and the lattice to show for it."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.score_and_walk import greedy_walk
from ..kernels.topk_logsumexp import topk_logsumexp
from .lattice import Block, Draft, Lattice

SHOWN_CANDIDATES = 8  # what a lattice lists where the head has no candidates of its own


def walk_lattice(
    block: Block,
    count: int,
    scores: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    return_lattice: bool,
) -> Draft:
    """Commit the greedy walk over the lattice of each slot's `count` best candidates.

    Args:
        block: the block; return_lattice: fill the draft's lattice.
        scores: from candidates `[N, S, K]` (int64) and their log-probabilities `[N, S, K]` (fp32) to the scores of
            `Lattice`, `first [N, K]` and `pair [N, S - 1, K, K]`.
    """
    blocks, slots, vocab = block.logits.shape
    values, indices, normaliser = topk_logsumexp(block.logits.reshape(-1, vocab), count)
    candidates = indices.view(blocks, slots, count)
    log_probs = (values - normaliser[:, None]).view(blocks, slots, count)
    first, pair = scores(candidates, log_probs)
    picks = greedy_walk(first, pair)
    draft = Draft(
        tokens=candidates.gather(-1, picks[..., None]).squeeze(-1),
        finite=normaliser.isfinite().view(blocks, slots),
        probabilities=lambda: log_probs.gather(-1, picks[..., None]).squeeze(-1).exp(),
    )
    if return_lattice:
        draft.lattice = Lattice(candidates, log_probs, first, pair, picks)
    return draft


def commit_slots(
    block: Block, correction: Callable[[int, Tensor], Tensor | None], count: int, return_lattice: bool
) -> Draft:
    """Commit slot after slot the argmax of corrected logits, the lower id where they tie, or draw where `block` warps.

    Args:
        block: the block; return_lattice: fill the draft's lattice, with `count` candidates.
        correction: called for slots 0 … S - 1 in order with the slot and the token before it, `[N]` (int64); returns
            what to add to the slot's logits, `[N, vocab]`, or `None` for nothing.
    """
    tokens, finite, drawn_from, greatest = block.anchor_ids[:, None], [], [], []
    for slot in range(block.logits.shape[1]):
        added = correction(slot, tokens[:, -1])
        logits = block.logits[:, slot].float()
        logits = logits if added is None else logits + added.float()
        best, chosen = logits.max(dim=-1)
        greatest.append((best, logits))
        finite.append(best.isfinite())
        if block.warp is not None:
            drawn_from.append(block.warp(tokens[:, 1:], logits))
            chances = drawn_from[-1].softmax(dim=-1).nan_to_num()  # NaN where not finite, and then of no use
            chosen = torch.where(finite[-1], _draw(chances), chosen)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
    draft = Draft(tokens[:, 1:], torch.stack(finite, dim=1), lambda: _shares(greatest))
    if drawn_from:
        draft.logits = torch.stack(drawn_from, dim=1)
    if return_lattice:
        draft.lattice = drafters_lattice(block.logits, draft.tokens, count)
    return draft


def _shares(greatest: list[tuple[Tensor, Tensor]]) -> Tensor:
    """`[N, S]` from each slot's greatest logit `[N]` and all of them `[N, vocab]`: its probability."""
    return torch.stack([(best - logits.logsumexp(dim=-1)).exp() for best, logits in greatest], dim=1)


def _draw(chances: Tensor) -> Tensor:
    """One index a row of `chances [N, vocab]`, which may hold rows of zeros."""
    return torch.multinomial(chances + (chances.sum(dim=-1, keepdim=True) == 0), 1).squeeze(1)


def drafters_lattice(logits: Tensor, tokens: Tensor, count: int) -> Lattice:
    """The drafter's `count` best of each slot; a token `[N, S]` that is not among them takes the last one's place."""
    blocks, slots, vocab = logits.shape
    _, indices, normaliser = topk_logsumexp(logits.reshape(-1, vocab), count)
    candidates = indices.view(blocks, slots, count)
    outside = (candidates != tokens[..., None]).all(dim=-1)
    candidates[..., -1] = torch.where(outside, tokens, candidates[..., -1])
    log_probs = logits.gather(-1, candidates).float() - normaliser.view(blocks, slots, 1)
    return Lattice(candidates, log_probs, None, None, (candidates == tokens[..., None]).long().argmax(dim=-1))
