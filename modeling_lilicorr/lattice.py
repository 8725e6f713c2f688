"""The candidate lattice: what a drafter's marginals leave for a head to choose from, and what a head chose."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Block:
    """Everything a head may look at for `N` blocks of `S` slots.

    Attributes:
        hidden: drafter states of the slots, `[N, S, d]`.
        logits: the target's LM head on `hidden`, `[N, S, vocab]`.
        anchor_ids: the committed token of slot 0, `[N]` (int64).
        anchor_state: projected target state of the row before the anchor, `[N, d]`.
        anchor_valid: bool `[N]`, false where no such row exists (`p = 0`), or `None` if all exist.
        embed: the target's input embedding, ids `[...]` to `[..., d]`.
        warp: makes the logits of one more slot, `[N, vocab]` (fp32), those to draw from, given the tokens drafted
            before it, `[N, 0 … S - 1]` (int64); for a head that then draws its tokens, `None` for the likeliest ones.
        anchor_hidden: drafter state of the anchor's own row, `[N, d]`; few heads read it.
    """

    hidden: Tensor
    logits: Tensor
    anchor_ids: Tensor
    anchor_state: Tensor
    anchor_valid: Tensor | None
    embed: Callable[[Tensor], Tensor]
    warp: Callable[[Tensor, Tensor], Tensor] | None = None
    anchor_hidden: Tensor | None = None


@dataclass
class Lattice:
    """Candidates of each slot in descending order of the drafter's probability, ties to the lower id.

    Attributes:
        candidates: token ids `[N, S, K]` (int64).
        log_probs: log-probabilities over the full vocabulary, `[N, S, K]` (fp32).
        first_scores: scores from the anchor to slot 1, `[N, K]` (fp32), or `None` for heads without scores.
        pair_scores: `[N, S - 1, K, K]` (fp32): candidate of the earlier slot, candidate of the later, or `None`.
        picks: the committed candidate of each slot, `[N, S]` (int64).
    """

    candidates: Tensor
    log_probs: Tensor
    first_scores: Tensor | None
    pair_scores: Tensor | None
    picks: Tensor


@dataclass
class Draft:
    """Drafted tokens `[N, S]` (int64), with `finite` `[N, S]` (bool): whether each slot's logits were all usable.

    `probabilities` works out what the drafter gives each of the tokens, `[N, S]` (fp32), of its own or its corrected
    logits: on request, since few ask.
    `lattice` is filled on request; `logits [N, S, vocab]` (fp32) are those that drawn tokens were drawn from, warped,
    `None` for a draft without chance.
    """

    tokens: Tensor
    finite: Tensor
    probabilities: Callable[[], Tensor]
    lattice: Lattice | None = None
    logits: Tensor | None = None
