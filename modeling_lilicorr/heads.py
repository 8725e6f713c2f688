"""The registry of heads. A head turns a `Block` of marginals into a `Draft`; `config.head_type` chooses its class."""

from typing import Protocol

from torch import nn

from .configuration_lilicorr import LiLiCorrConfig
from .head_dcoco import DCOCOHead
from .head_domino import DominoHead
from .head_dspark import DSparkHead
from .head_lilicorr import LiLiCorrHead
from .head_none import NoHead
from .head_selector import SelectorHead
from .head_xpress import XPressHead
from .lattice import Block, Draft

HEADS: dict[str, type[nn.Module]] = {
    "none": NoHead,
    "lilicorr": LiLiCorrHead,
    "dcoco": DCOCOHead,
    "domino": DominoHead,
    "dspark": DSparkHead,
    "selector": SelectorHead,
    "xpress": XPressHead,
}


class DraftHead(Protocol):
    """What a head offers. Its parameters are saved under the prefix `<head_type>.`."""

    num_candidates: int
    grows_trees: bool  # whether its lattice says which paths are likely; else its draft is a chain
    tree_beta: float  # calibrates its scores, see `child_log_probs`

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """Commit one token for every slot of every block."""
        ...


def build_head(config: LiLiCorrConfig) -> nn.Module:
    """The head that `config` asks for, with fresh weights."""
    return HEADS[config.head_type](config)
