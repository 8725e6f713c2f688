"""The joint objective (paper Eq. 3–7 and 13) as sums over slots, so that denominators can be global.

Each term is a numerator; what they are divided by is summed beside them, over all processes.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Objective:
    """Weights of the loss: slot decay `beta` (Eq. 6), `gamma` and `penalty` lambda (Eq. 7), `mu` and `rho` (Eq. 13).

    `slot_weighting` is `"decay"` (Eq. 6) or `"d-pace"` (D-PACE, arXiv 2605.18810): a slot then weighs what the
    drafter's own probabilities, smoothed by `alpha`, promise to be accepted from it on. Both are divided by the sum of
    weights.

    With `sample_slots` slot `s` enters Eq. 6 with probability `w_s` and weight 1 instead of always and with weight
    `w_s`: the same loss in expectation, without the vocabulary work of slots that weigh little. The reranker's terms
    stay whole; their gradient takes the log-normaliser of the other slots as a constant, an approximation.

    `gamma`, `penalty`, `mu` and `rho` are of the head `lilicorr`. What the loss of another head weighs, by name in
    `head`, is its paper's where not given (`settings` of `losses/<head>.py`).
    """

    beta: float = 7.0
    gamma: float = 0.25
    penalty: float = 1.0
    mu: float = 0.0
    rho: float = 2.0
    sample_slots: bool = False
    slot_weighting: str = "decay"
    alpha: float = 0.5
    head: dict[str, float] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise a `ValueError` of one sentence for weights that cannot work."""
        weights = {name: getattr(self, name) for name in ("beta", "gamma", "penalty", "mu", "rho")}
        for name, value in (weights | {f"head.{name}": value for name, value in self.head.items()}).items():
            if type(value) not in (int, float) or not -math.inf < value < math.inf:
                raise ValueError(f"objective.{name} is {value!r}, expected a finite number.")
        if self.slot_weighting not in ("decay", "d-pace"):
            raise ValueError(f"slot_weighting is {self.slot_weighting!r}, expected 'decay' or 'd-pace'.")
        if self.slot_weighting == "d-pace" and self.sample_slots:
            raise ValueError("sample_slots draws slots by the decay of Eq. 6, which d-pace replaces; choose one.")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, expected a number from 0 to 1.")


def slot_weights(slots: int, beta: float, device: torch.device | None = None) -> Tensor:
    """`w_s = exp(-(s - 1) / beta)` for slots 1 … S (Eq. 6), `[S]` (fp32); `beta` 0 or less weighs all slots alike."""
    index = torch.arange(slots, device=device, dtype=torch.float32)
    return torch.exp(-index / beta) if beta > 0 else torch.ones_like(index)


def pace_weights(cross_entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights: `w_j = sum_{k >= j} C_k` with `C_k = prod_{i <= k} ((1 - alpha) p_i + alpha)`.

    Args:
        cross_entropy: of the drafter at each slot, `[N, S]`, so that `p = exp(-cross_entropy)`; no gradient flows back.
        supervised: bool `[N, S]`; other slots weigh nothing and leave the product as it is.

    Returns:
        `[N, S]` (fp32), zero where not supervised.
    """
    smoothed = (1 - alpha) * torch.exp(-cross_entropy.detach().float()) + alpha
    reached = smoothed.masked_fill(~supervised, 1.0).cumprod(dim=-1) * supervised
    return reached.flip(-1).cumsum(dim=-1).flip(-1) * supervised


def oracle_prefix(candidates: Tensor, labels: Tensor, supervised: Tensor) -> tuple[Tensor, Tensor]:
    """The leading run of supervised slots whose label is among the candidates (paper §3.3).

    Args:
        candidates: `[N, S, K]`; labels: `[N, S]` (int64); supervised: bool `[N, S]`.

    Returns:
        `covered` bool `[N, S]`, true on the run, and `gold [N, S]` (int64): the label's candidate index, 0 elsewhere.
    """
    matches = candidates == labels[..., None]
    covered = (matches.any(dim=-1) & supervised).long().cumprod(dim=-1).bool()
    return covered, matches.long().argmax(dim=-1) * covered


def teacher_forced_scores(first: Tensor, pair: Tensor, gold: Tensor) -> Tensor:
    """Scores of every candidate given the ground-truth predecessor (Eq. 2).

    `first [N, K]`, `pair [N, S - 1, K, K]`, `gold [N, S]` to `[N, S, K]`; meaningful on the oracle prefix only.
    """
    predecessor = gold[:, :-1, None, None].expand(-1, -1, 1, pair.shape[-1])
    return torch.cat([first[:, None], pair.gather(2, predecessor).squeeze(2)], dim=1)


def reranker_terms(
    scores: Tensor, gold: Tensor, covered: Tensor, target_logits: Tensor, rho: float
) -> dict[str, Tensor]:
    """Numerators of Eq. 3, 5 and 13, summed over the oracle prefix, and the size of that set.

    Args:
        scores: `[N, S, K]` from `teacher_forced_scores`; gold, covered: from `oracle_prefix`.
        target_logits: the target's logits of the candidates given the true prefix, `[N, S, K]`; a difference of two
            equals the difference of their log-probabilities, so they need no normaliser.
        rho: the margin.

    Returns:
        Scalars `cross_entropy`, `distractor`, `margin`, `covered`.
    """
    scores, gold, target_logits = scores[covered], gold[covered], target_logits[covered].float()
    log_probs = scores.log_softmax(dim=-1)
    gap = torch.relu(target_logits.gather(1, gold[:, None]) - target_logits)
    golden = scores.gather(1, gold[:, None]).squeeze(1)
    rivals = scores.scatter(1, gold[:, None], -torch.inf).amax(dim=1)
    return {
        "cross_entropy": -log_probs.gather(1, gold[:, None]).sum(),
        "distractor": (log_probs.exp() * gap).sum(),
        # With one candidate there is no rival and the hinge is idle.
        "margin": torch.relu(rho - (golden - rivals)).sum(),
        "covered": covered.sum().float(),
    }


def accepted(tokens: Tensor, labels: Tensor, supervised: Tensor) -> Tensor:
    """The leading run of supervised slots where `tokens` equal `labels`, all `[N, S]`; returns 0 or 1, `[N, S]`."""
    return ((tokens == labels) & supervised).long().cumprod(dim=-1)
