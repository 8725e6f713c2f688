"""AdamW with two learning rates, and their schedule (paper Table 4)."""

import math
from typing import Any

import torch

from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .settings import TrainSettings


def build_optimizer(drafter: LiLiCorrModel, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW with the drafter's and the head's own peak learning rate (`peak` of a group) and weight decay.

    Parameters that need no gradient, those of a frozen backbone, are left out.
    """
    prefix = f"{drafter.config.head_type}."
    trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    head = [p for name, p in trained if name.startswith(prefix)]
    backbone = [p for name, p in trained if not name.startswith(prefix)]
    groups: list[dict[str, Any]] = [
        {"params": backbone, "weight_decay": 0.0, "peak": settings.learning_rate},
        {"params": head, "weight_decay": settings.head_weight_decay, "peak": settings.head_learning_rate},
    ]
    betas = (settings.betas[0], settings.betas[1])
    # One kernel a parameter: on two CPU cores the optimiser takes a third of the time.
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set every group's learning rate to `share` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]


def rate_share(step: int, total: int, warmup: float, final: float) -> float:
    """Learning rate of a step as a share of its peak: linear over `warmup` of `total`, then a cosine to `final`."""
    rising = max(1, round(warmup * total))
    if step < rising:
        return (step + 1) / rising
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))
