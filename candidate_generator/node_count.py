"""How many nodes a pass verifies: a fixed number for the machine, shared by the rows of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..kernels.few_rows import multiplies_few_rows

if TYPE_CHECKING:
    from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig

DEFAULT_COUNT = 20  # Transformers' own num_assistant_tokens where a call names none

# In fp32 four rows cost a CPU no more than one, eight a third more (benchmarks/few_rows.py). In bf16 eight rows cost
# half more than one, and with matrix units sixteen cost little more than one.
FP32_NODES, CPU_NODES, AMX_NODES = 3, 7, 15
FP32_ROWS, CPU_ROWS, AMX_ROWS = 8, 32, 128  # of a whole batch
MOST_NODES = 1024  # whatever is asked for: each pair of nodes has an entry in the mask of a pass


@dataclass(frozen=True)
class NodeCount:
    """Numbers that do not depend on any clock, so that sampling draws alike in every run.

    Attributes:
        most: nodes of a tree at most, the anchor not counted; 0 decodes plainly.
        budget: rows of a pass at most, all trees and their anchors together; `None` for no limit.
        chain: whether each node has one child at most.
        deep: nodes from which the text's continuation may go deeper than the block.
        sure: a text whose next token is so likely needs no draft.
    """

    most: int
    budget: int | None = None
    chain: bool = False
    deep: int = 12
    sure: float = 0.88

    def choose(self, rows: int) -> int:
        """Nodes of each of `rows` trees."""
        return self.most if self.budget is None else max(0, min(self.most, self.budget // rows - 1))

    def skips_draft(self, chances: Sequence[float]) -> bool:
        """Whether a text that goes on with these chances needs no draft."""
        return chances[0] >= self.sure


def node_count(config: "LiLiCorrConfig", target: PreTrainedModel, asked: GenerationConfig) -> NodeCount:
    """The nodes of a call: its `num_assistant_tokens`, else the drafter's `max_nodes`, else what suits the device.

    1,024 at most. On a GPU, chains of whole blocks: what trees bring there has not been measured yet.

    Raises:
        ValueError: if `num_assistant_tokens` is negative.
    """
    count = asked.num_assistant_tokens
    if count is not None and count < 0:
        raise ValueError(f"num_assistant_tokens is {count}, expected 0 or more; leave it out for the drafter's own.")
    if count in (None, DEFAULT_COUNT):
        count = config.max_nodes
    if count is not None:
        return NodeCount(min(count, MOST_NODES))
    if target.device.type != "cpu":
        return NodeCount(config.num_slots, chain=True)
    if target.dtype == torch.bfloat16 and _has_amx():
        return NodeCount(AMX_NODES, AMX_ROWS)
    if target.dtype == torch.float32 and multiplies_few_rows():
        return NodeCount(FP32_NODES, FP32_ROWS)
    return NodeCount(CPU_NODES, CPU_ROWS)


def _has_amx() -> bool:
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private: absent means unknown, and unknown means no
    return bool(probe and probe())
