"""How many nodes a pass verifies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import GenerationConfig, PreTrainedModel

from .token_tree import TokenTree

if TYPE_CHECKING:
    from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig

DEFAULT_COUNT = 20  # Transformers' own num_assistant_tokens where a call names none


@dataclass
class NodeCount:
    """A fixed number of nodes.

    Attributes:
        most: nodes of a tree, the anchor not counted; 0 decodes plainly.
        chain: whether each node has one child at most.
        deep: nodes from which the text's continuation may go deeper than the block.
        sure: expected tokens of a text's continuation, in shares of `most`, from which no draft is made.
    """

    most: int
    chain: bool = False
    deep: int = 12
    sure: float = 2.0

    def choose(self, rows: int) -> int:
        """Nodes of each of `rows` trees."""
        return self.most

    def cut(self, tree: TokenTree, rows: int) -> TokenTree:
        """What of `tree` is worth verifying."""
        return tree

    def skips_draft(self, chances: Sequence[float]) -> bool:
        """Whether a text that goes on with these chances needs no draft."""
        return False


def node_count(config: "LiLiCorrConfig", target: PreTrainedModel, asked: GenerationConfig) -> NodeCount:
    """The nodes of a call: its `num_assistant_tokens`, else the drafter's `max_nodes`, else what suits the device.

    Raises:
        ValueError: if `num_assistant_tokens` is negative.
    """
    count = asked.num_assistant_tokens
    if count is not None and count < 0:
        raise ValueError(f"num_assistant_tokens is {count}, expected 0 or more; leave it out for the drafter's own.")
    on_cpu = target.device.type == "cpu"
    if count in (None, DEFAULT_COUNT):
        count = config.max_nodes
    if count is None:
        return NodeCount(7 if on_cpu else config.num_slots, chain=not on_cpu)
    return NodeCount(count)
