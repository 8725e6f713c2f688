"""What a head's loss may look at, and the loss of a drafter without a head, which the others extend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.score_and_walk import greedy_walk
from .terms import Objective, accepted, oracle_prefix


@dataclass
class Slots:
    """The `S` slots of `N` training blocks after the backbone.

    Attributes:
        hidden: drafter states, `[N, S, d]`; anchor_hidden: of the anchors' own rows, `[N, d]`.
        labels: ground truth, `[N, S]` (int64); supervised: bool `[N, S]`, where it counts.
        weights: of each slot in the drafter's loss, `[N, S]` (fp32), zero where not supervised.
        candidates: `[N, S, K]` (int64); log_probs: theirs, `[N, S, K]` (fp32), or `None` where no head asked for them.
        anchors, anchor_ids, sequence: each block's first position, its token and its row of the batch, `[N]` (int64).
        context: the drafter's view of the target's states, `[batch, L, d]`; last: the target's last states, same shape.
        embed: the target's input embedding; weight, bias: the target's LM head, `[vocab, d]`, `[vocab]` or `None`.
    """

    hidden: Tensor
    anchor_hidden: Tensor
    labels: Tensor
    supervised: Tensor
    weights: Tensor
    candidates: Tensor
    log_probs: Tensor | None
    anchors: Tensor
    anchor_ids: Tensor
    sequence: Tensor
    context: Tensor
    last: Tensor
    embed: Callable[[Tensor], Tensor]
    weight: Tensor
    bias: Tensor | None

    @property
    def previous(self) -> Tensor:
        """The true token before each slot, `[N, S]` (int64)."""
        return torch.cat([self.anchor_ids[:, None], self.labels[:, :-1]], dim=1)

    @property
    def anchor_states(self) -> Tensor:
        """The context row before each anchor, `[N, d]`; of no meaning where the anchor is the first token."""
        return self.context[self.sequence, (self.anchors - 1).clamp(min=0)]

    @property
    def target_states(self) -> Tensor:
        """The target's states that predict each slot, `[N, S, d]`: row `p + s - 1` scores the token at `p + s`."""
        places = self.anchors[:, None] + torch.arange(self.labels.shape[1], device=self.anchors.device)
        return self.last[self.sequence[:, None], places.clamp(max=self.last.shape[1] - 1)]


class HeadLoss:
    """The drafter's loss alone, which is all there is without a head.

    Subclasses name in `settings` the weights of their papers, which `objective.head` may replace, and in `over` their
    numerators with the denominator of each.
    """

    settings: ClassVar[dict[str, float]] = {}
    over: ClassVar[dict[str, str]] = {}
    on_lattice = False  # whether `sums` needs candidates and log-probabilities of every slot
    trains_drafter = True  # whether the drafter's own loss enters; else it is only logged

    def __init__(self, objective: Objective) -> None:
        unknown = [name for name in objective.head if name not in self.settings]
        if unknown:
            known = ", ".join(self.settings) or "nothing"
            raise ValueError(f"objective.head sets {unknown[0]!r}, but this head's loss takes {known}.")
        self.objective = objective
        self.weigh = self.settings | objective.head

    def sums(self, head: Any, slots: Slots) -> dict[str, Tensor]:
        """Numerators, denominators and metric sums of the head."""
        return {}

    def loss(self, sums: dict[str, Tensor], totals: dict[str, Tensor], progress: float) -> Tensor:
        """The loss from this batch's sums and the denominators of the whole step; `progress` is the run's, 0 to 1."""
        return sums["dflash"] / totals["weight"].clamp(min=1e-6)


def walk_metrics(slots: Slots, first: Tensor, pair: Tensor) -> dict[str, Tensor]:
    """Sums `[slots]` of how far the first candidates, the greedy walk over these scores and the best path get."""
    candidates, labels, supervised = slots.candidates, slots.labels, slots.supervised
    picks = greedy_walk(first.detach(), pair.detach())
    walked = candidates.gather(-1, picks[..., None]).squeeze(-1)
    return {
        "walk_accepted": accepted(walked, labels, supervised).sum(dim=0).float(),
        "argmax_accepted": accepted(candidates[..., 0], labels, supervised).sum(dim=0).float(),
        "oracle_accepted": oracle_prefix(candidates, labels, supervised)[0].sum(dim=0).float(),
        "in_candidates": ((candidates == labels[..., None]).any(-1) & supervised).sum(dim=0).float(),
    }
