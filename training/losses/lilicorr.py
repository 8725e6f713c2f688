"""LiLiCorr's loss (paper Eq. 3–5, 7, 13) beside the drafter's: cross-entropy, distractor penalty, margin."""

from typing import Any, ClassVar

from torch import Tensor

from ..vocabulary import logits_at
from .head import HeadLoss, Slots, walk_metrics
from .terms import oracle_prefix, reranker_terms, teacher_forced_scores


class LiLiCorrLoss(HeadLoss):
    """Over the oracle prefix; its weights are the fields of `Objective`."""

    over: ClassVar = {"cross_entropy": "covered", "distractor": "covered", "margin": "covered"}
    on_lattice = True

    def sums(self, head: Any, slots: Slots) -> dict[str, Tensor]:
        """Numerators `cross_entropy`, `distractor`, `margin` over `covered`, and metrics."""
        embeds = slots.embed(slots.candidates)
        first, pair = head.scores(embeds, slots.log_probs, slots.hidden, slots.anchor_states, slots.anchors > 0)
        covered, gold = oracle_prefix(slots.candidates, slots.labels, slots.supervised)
        target_logits = logits_at(
            slots.target_states.flatten(0, 1), slots.weight, slots.bias, slots.candidates.flatten(0, 1)
        ).view(slots.candidates.shape)
        scores = teacher_forced_scores(first, pair, gold)
        terms = reranker_terms(scores, gold, covered, target_logits, self.objective.rho)
        return terms | walk_metrics(slots, first, pair)

    def loss(self, sums: dict[str, Tensor], totals: dict[str, Tensor], progress: float) -> Tensor:
        """Eq. 7, or 13 with `mu`."""
        weigh = self.objective
        reranker = (
            (1 - weigh.mu) * sums["cross_entropy"] + weigh.penalty * sums["distractor"] + weigh.mu * sums["margin"]
        )
        drafter = super().loss(sums, totals, progress)
        return drafter + weigh.gamma * reranker / totals["covered"].clamp(min=1.0)
