"""xPress's loss (arXiv 2608.02438): refined logits after true tokens and after its own, and the drafter's logits."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..vocabulary import corrected_terms
from .head import HeadLoss, Slots
from .terms import Objective, accepted


class XPressLoss(HeadLoss):
    """`C(refined) + 0.3 mean_i C(round i) + 0.6 C(base)` with `C = 0.1 CE + 0.9 |p - q|_1 / 2`; a gap ends the block.

    `q` is the target's distribution and `refined` follows the true tokens. Round i follows the argmax of round i - 1,
    the first that of the drafter, as a draft's passes do; no gradient flows through tokens. `consistency_passes` says
    how many rounds there are: each costs a pass over the vocabulary. The last term trains the drafter, whose own loss
    is only logged. Slots decay as the drafter's do.
    """

    settings: ClassVar = {
        "cross_entropy": 0.1,
        "total_variation": 0.9,
        "consistency": 0.3,
        "consistency_passes": 3,
        "base": 0.6,
    }
    over: ClassVar = {"refined": "reached", "consistent": "reached", "unrefined": "reached"}
    trains_drafter = False

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        passes = self.weigh["consistency_passes"]
        if passes < 0 or passes != int(passes):
            raise ValueError(f"objective.head.consistency_passes is {passes}, expected a whole number, 0 or more.")

    def sums(self, head: Any, slots: Slots) -> dict[str, Tensor]:
        """Numerators `refined`, `consistent` and `unrefined` over `reached`, and how far the refined draft gets.

        That is the draft of as many passes as slots; one of fewer is sure to equal it in its first so many slots.
        """
        rows = slots.supervised.long().cumprod(dim=1).bool()
        shared = head.shared(slots.hidden, slots.anchor_hidden)
        hidden, weights, labels, teacher = (
            each[rows] for each in (slots.hidden, slots.weights, slots.labels, slots.target_states)
        )

        def compound(previous: Tensor | None) -> tuple[Tensor, Tensor]:
            """The sum over `reached` and the tokens `[N, S]`, after `previous` or of the drafter alone."""
            codes = None if previous is None else head.codes(shared, previous)[rows]
            cross_entropy, distance, best = corrected_terms(
                hidden, codes, head.corrections, slots.weight, slots.bias, labels, teacher
            )
            losses = self.weigh["cross_entropy"] * cross_entropy + self.weigh["total_variation"] * distance / 2
            return (weights * losses).sum(), slots.labels.masked_scatter(rows, best)  # none looks behind a gap

        unrefined, tokens = compound(None)
        refined, walked = compound(slots.previous)
        sums = {
            "refined": refined,
            "unrefined": unrefined,
            "reached": weights.sum(),
            # The draft has the true tokens before it as long as it is right, so known tokens tell its length.
            "walk_accepted": accepted(walked, slots.labels, rows).sum(dim=0).float(),
        }
        rounds = []
        for _ in range(int(self.weigh["consistency_passes"])):
            total, tokens = compound(torch.cat([slots.anchor_ids[:, None], tokens[:, :-1]], dim=1))
            rounds.append(total)
        if rounds:
            sums["consistent"] = torch.stack(rounds).mean()
        return sums

    def loss(self, sums: dict[str, Tensor], totals: dict[str, Tensor], progress: float) -> Tensor:
        """The weighted sum of the three, or of two without rounds."""
        whole = sums["refined"] + self.weigh["base"] * sums["unrefined"]
        if "consistent" in sums:
            whole = whole + self.weigh["consistency"] * sums["consistent"]
        return whole / totals["reached"].clamp(min=1e-6)
