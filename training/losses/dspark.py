"""DSpark's loss (arXiv 2607.05147): corrected logits against label and target distribution, and the confidence."""

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from ..vocabulary import corrected_terms
from .head import HeadLoss, Slots
from .terms import accepted


class DSparkLoss(HeadLoss):
    """`0.1 CE + 0.9 |p - q|_1 + 1.0 BCE`, all on corrected logits after the true tokens; a gap ends the block.

    `q` is the target's distribution, the confidence learns `1 - |p - q|_1 / 2`, and the drafter's own loss is only
    logged. Slots decay as the drafter's do.
    """

    settings: ClassVar = {"cross_entropy": 0.1, "distance": 0.9, "confidence": 1.0}
    over: ClassVar = {"corrected": "reached", "distance": "reached", "confidence": "reached"}
    trains_drafter = False

    def sums(self, head: Any, slots: Slots) -> dict[str, Tensor]:
        """Numerators `corrected`, `distance` and `confidence` over `reached`, and how far the corrected draft gets."""
        rows = slots.supervised.long().cumprod(dim=1).bool()
        weights, previous = slots.weights[rows], slots.previous
        codes = head.codes(slots.hidden, previous)
        cross_entropy, distance, best = corrected_terms(
            slots.hidden[rows],
            codes[rows],
            head.corrections,
            slots.weight,
            slots.bias,
            slots.labels[rows],
            slots.target_states[rows],
        )
        tokens = slots.labels.new_full(rows.shape, -1).masked_scatter(rows, best)
        sums = {
            "corrected": (weights * cross_entropy).sum(),
            "distance": (weights * distance).sum(),
            "reached": weights.sum(),
            "walk_accepted": accepted(tokens, slots.labels, rows).sum(dim=0).float(),
        }
        if head.confidence_head is not None:
            logits, wanted = head.confidences(slots.hidden, previous)[rows], 1 - distance.detach() / 2
            losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            sums["confidence"] = (weights * losses).sum()
        return sums

    def loss(self, sums: dict[str, Tensor], totals: dict[str, Tensor], progress: float) -> Tensor:
        """The weighted sum of the three, or of two without a confidence."""
        weigh = self.weigh
        whole = weigh["cross_entropy"] * sums["corrected"] + weigh["distance"] * sums["distance"]
        if "confidence" in sums:
            whole = whole + weigh["confidence"] * sums["confidence"]
        return whole / totals["reached"].clamp(min=1e-6)
