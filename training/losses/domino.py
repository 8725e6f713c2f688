"""Domino's loss (arXiv 2605.29707): cross-entropy of corrected logits, which takes over from the drafter's own."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..vocabulary import corrected_terms
from .head import HeadLoss, Slots
from .terms import accepted


class DominoLoss(HeadLoss):
    """`(1 - λ) CE_final + λ CE_base`, where λ falls linearly from `lambda_start` to 0 over a share of the steps.

    That share is `lambda_decay`. The first slots, which the head leaves to the drafter, count in both terms alike.
    """

    settings: ClassVar = {"lambda_start": 1.0, "lambda_decay": 1.0}
    over: ClassVar = {"final": "weight"}

    def sums(self, head: Any, slots: Slots) -> dict[str, Tensor]:
        """Numerator `final` over the drafter's `weight`, and how far the corrected draft gets."""
        codes = head.codes(slots.hidden, slots.embed(slots.previous))
        late = torch.arange(codes.shape[1], device=codes.device) >= head.prefix_length
        codes = codes * late[:, None].to(codes.dtype)  # a code of zeros corrects nothing
        rows = slots.supervised
        cross_entropy, _, best = corrected_terms(
            slots.hidden[rows], codes[rows], head.corrections, slots.weight, slots.bias, slots.labels[rows]
        )
        tokens = slots.labels.new_full(rows.shape, -1).masked_scatter(rows, best)
        return {
            "final": (slots.weights[rows] * cross_entropy).sum(),
            # The draft has the true tokens before it as long as it is right, so known tokens tell its length.
            "walk_accepted": accepted(tokens, slots.labels, rows).sum(dim=0).float(),
        }

    def base_share(self, progress: float) -> float:
        """λ at `progress`, 0 to 1."""
        decay = self.weigh["lambda_decay"]
        return self.weigh["lambda_start"] * max(0.0, 1 - progress / decay) if decay > 0 else 0.0

    def loss(self, sums: dict[str, Tensor], totals: dict[str, Tensor], progress: float) -> Tensor:
        """Both terms over the same weights."""
        share = self.base_share(progress)
        final = sums["final"] / totals["weight"].clamp(min=1e-6)
        return (1 - share) * final + share * super().loss(sums, totals, progress)
