"""The loss of DFlash 2's selector beside the drafter's: the true token among a slot's candidates."""

from typing import Any, ClassVar

from torch import Tensor

from .head import HeadLoss, Slots, walk_metrics


class SelectorLoss(HeadLoss):
    """Cross-entropy over the candidates after the true token, where they hold the label, at the drafter's weights."""

    settings: ClassVar = {"alpha": 1.0}
    over: ClassVar = {"selector": "selector_weight"}
    on_lattice = True

    def sums(self, head: Any, slots: Slots) -> dict[str, Tensor]:
        """Numerator `selector`, the weight of its slots `selector_weight` for the log, and metrics."""
        candidates, log_probs, hidden = slots.candidates, slots.log_probs, slots.hidden
        first, pair = head.scores(candidates, log_probs, hidden, slots.anchor_ids)
        matches = candidates == slots.labels[..., None]
        covered = matches.any(dim=-1) & slots.supervised
        scores = head.scores_after(slots.previous, candidates, log_probs, hidden)[covered].log_softmax(dim=-1)
        weights = slots.weights[covered]
        gold = matches[covered].long().argmax(dim=-1, keepdim=True)
        selector = -(weights * scores.gather(1, gold).squeeze(1)).sum()
        return {"selector": selector, "selector_weight": weights.sum()} | walk_metrics(slots, first, pair)

    def loss(self, sums: dict[str, Tensor], totals: dict[str, Tensor], progress: float) -> Tensor:
        """Both numerators over the drafter's weights, as its authors have it."""
        selector = self.weigh["alpha"] * sums["selector"] / totals["weight"].clamp(min=1e-6)
        return super().loss(sums, totals, progress) + selector
