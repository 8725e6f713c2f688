"""The registry of losses, one a head type."""

from .dcoco import DCOCOLoss
from .domino import DominoLoss
from .dspark import DSparkLoss
from .head import HeadLoss
from .lilicorr import LiLiCorrLoss
from .selector import SelectorLoss
from .terms import Objective
from .xpress import XPressLoss

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
