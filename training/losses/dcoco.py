"""DCOCO's loss (arXiv 2610.12570) beside the drafter's: the true pair among all pairs of adjacent slots."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..vocabulary import topk_normaliser
from .head import HeadLoss, Slots, walk_metrics
from .terms import slot_weights


class DCOCOLoss(HeadLoss):
    """Cross-entropy of one softmax over all K² pairs, decaying with `rho`, where both of the target's tokens are there.

    How it is weighed against the drafter's loss is not published; `correction` is 1 here.
    """

    settings: ClassVar = {"rho": 4.0, "correction": 1.0}
    over: ClassVar = {"transition": "transitions"}
    on_lattice = True

    def sums(self, head: Any, slots: Slots) -> dict[str, Tensor]:
        """Numerator `transition` over `transitions`, and metrics.

        The labels are the target's own best tokens after the true text, not the text.
        """
        candidates = slots.candidates
        first, pair = head.scores(slots.embed(candidates), slots.log_probs, slots.hidden)
        with torch.no_grad():
            _, best = topk_normaliser(slots.target_states.flatten(0, 1), slots.weight, slots.bias, 1)
        matches = candidates == best.view(*candidates.shape[:2], 1)
        there, place = matches.any(dim=-1) & slots.supervised, matches.long().argmax(dim=-1)
        both = there[:, :-1] & there[:, 1:]
        weights = slot_weights(both.shape[1], self.weigh["rho"], both.device).expand_as(both)[both]
        entry = place[:, :-1] * candidates.shape[2] + place[:, 1:]
        log_probs = pair.flatten(2)[both].log_softmax(dim=-1)
        transition = -(weights * log_probs.gather(1, entry[both][:, None]).squeeze(1)).sum()
        return {"transition": transition, "transitions": weights.sum()} | walk_metrics(slots, first, pair)

    def loss(self, sums: dict[str, Tensor], totals: dict[str, Tensor], progress: float) -> Tensor:
        """Drafter and correction, each a weighted mean."""
        correction = sums["transition"] / totals["transitions"].clamp(min=1e-6)
        return super().loss(sums, totals, progress) + self.weigh["correction"] * correction
