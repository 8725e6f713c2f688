"""The registry of losses, one a head type."""

from .head_loss import HeadLoss
from .loss_dcoco import DCOCOLoss
from .loss_domino import DominoLoss
from .loss_dspark import DSparkLoss
from .loss_lilicorr import LiLiCorrLoss
from .loss_selector import SelectorLoss
from .loss_xpress import XPressLoss
from .losses import Objective

HEAD_LOSSES: dict[str, type[HeadLoss]] = {
    "none": HeadLoss,
    "lilicorr": LiLiCorrLoss,
    "dcoco": DCOCOLoss,
    "domino": DominoLoss,
    "dspark": DSparkLoss,
    "selector": SelectorLoss,
    "xpress": XPressLoss,
}
# Every numerator with its denominator.
DENOMINATORS = {"dflash": "weight"} | {name: by for loss in HEAD_LOSSES.values() for name, by in loss.over.items()}


def build_head_loss(head_type: str, objective: Objective) -> HeadLoss:
    """The loss of a head.

    Raises:
        ValueError: if there is none, or `objective.head` sets what it does not take.
    """
    if head_type not in HEAD_LOSSES:
        raise ValueError(f"head_type is {head_type!r}, expected one of {', '.join(HEAD_LOSSES)}.")
    return HEAD_LOSSES[head_type](objective)
