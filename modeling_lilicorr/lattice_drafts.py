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
    beta: float = 1.0,
) -> Draft:
    """Commit the greedy walk over the lattice of each slot's `count` best candidates, or a path drawn if `block` warps.

    Args:
        block: the block; return_lattice: fill the draft's lattice.
        scores: from candidates `[N, S, K]` (int64) and their log-probabilities `[N, S, K]` (fp32) to the scores of
            `Lattice`, `first [N, K]` and `pair [N, S - 1, K, K]`.
        beta: calibrates the scores of a drawn path.
    """
    blocks, slots, vocab = block.logits.shape
    values, indices, normaliser = topk_logsumexp(block.logits.reshape(-1, vocab), count)
    candidates = indices.view(blocks, slots, count)
    log_probs = (values - normaliser[:, None]).view(blocks, slots, count)
    first, pair = scores(candidates, log_probs)
    finite, drawn_from = normaliser.isfinite().view(blocks, slots), None
    if block.warp is None:
        picks = greedy_walk(first, pair)
        tokens = candidates.gather(-1, picks[..., None]).squeeze(-1)
    else:
        tokens, picks, drawable, drawn_from = draw_path(block, candidates, log_probs, first, pair, beta)
        finite = finite & drawable
    draft = Draft(
        tokens=tokens,
        finite=finite,
        logits=drawn_from,
        probabilities=lambda: log_probs.gather(-1, picks[..., None]).squeeze(-1).exp(),
    )
    if return_lattice:
        draft.lattice = Lattice(candidates, log_probs, first, pair, picks)
    return draft


def draw_path(
    block: Block, candidates: Tensor, log_probs: Tensor, first: Tensor, pair: Tensor, beta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a path slot after slot, each token from the warped `softmax(beta · score)` over its slot's candidates.

    The first slot is drawn from the drafter's own probabilities, as trees take them.

    Args:
        block: with its `warp`.
        candidates: `[N, S, K]` (int64); log_probs: `[N, S, K]` (fp32).
        first: `[N, K]`, only its dtype matters; pair: `[N, S - 1, K, K]` (fp32), as `Lattice` holds them.

    Returns:
        tokens and picks `[N, S]` (int64), whether each slot left anything to draw `[N, S]` (bool), and the logits that
        were drawn from, `[N, S, vocab]` (fp32), `-inf` for all but candidates.
    """
    assert block.warp is not None
    tokens, picks, finite, drawn_from = candidates[:, :0, 0], list[Tensor](), [], []
    for slot in range(candidates.shape[1]):
        scores = log_probs[:, 0] if slot == 0 else beta * _row(pair[:, slot - 1], picks[-1])
        logits = torch.full_like(block.logits[:, slot], -torch.inf, dtype=first.dtype)
        logits = block.warp(tokens, logits.scatter(-1, candidates[:, slot], scores))
        chances = logits.softmax(dim=-1).nan_to_num().gather(-1, candidates[:, slot])
        finite.append(chances.sum(dim=-1) > 0)
        picks.append(_draw(chances))
        tokens = torch.cat([tokens, candidates[:, slot].gather(-1, picks[-1][:, None])], dim=1)
        drawn_from.append(logits)
    return tokens, torch.stack(picks, dim=1), torch.stack(finite, dim=1), torch.stack(drawn_from, dim=1)


def _row(pair: Tensor, picks: Tensor) -> Tensor:
    """`[N, K]`: the row of `pair [N, K, K]` that each of `picks [N]` names."""
    return pair.gather(1, picks[:, None, None].expand(-1, 1, pair.shape[2])).squeeze(1)


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
