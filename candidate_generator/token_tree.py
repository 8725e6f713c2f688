"""A tree of tokens to verify (DESIGN §3): node 0 is the anchor, every other node continues its parent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.lattice_tree import TreeNodes

SOURCES = ("lattice", "text", "both")


@dataclass
class TokenTree:
    """One tree a row, with the same number of nodes in all rows.

    Attributes:
        tokens: `[rows, N]` (int64), the anchors first; absent nodes hold their row's anchor.
        parents: `[rows, N]` (int64); -1 for the anchor and for absent nodes.
        depths: `[rows, N]` (int64), 0 for the anchor and for absent nodes.
        sources: `[rows, N]` (int64), who proposed a node, as an index into `SOURCES`.
        log_probs: `[rows, N]` (fp64) of the paths; 0 for the anchor, `-inf` for absent nodes.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    sources: Tensor
    log_probs: Tensor

    @classmethod
    def of_anchors(cls, anchors: Tensor) -> "TokenTree":
        """Trees of nothing but `anchors [rows]`: plain decoding."""
        tokens = anchors[:, None]
        nothing = torch.zeros_like(tokens)
        return cls(tokens, nothing - 1, nothing, nothing, nothing.double())

    @classmethod
    def of_nodes(cls, anchors: Tensor, nodes: TreeNodes, tokens: Tensor, shared: Tensor | None = None) -> "TokenTree":
        """Trees below `anchors [rows]`.

        Args:
            nodes: of `[rows, N - 1]`; tokens: of every candidate of the lattice they are from, `[rows, D, K]` (int64).
            shared: of a lattice whose last candidates are the text's continuation, whether those are candidates anyway,
                `[rows, D]` (bool); `None` for a lattice without a text.
        """
        absent, slots = nodes.states < 0, nodes.slots.clamp(min=0)
        flat = slots * tokens.shape[2] + nodes.states.clamp(min=0)
        chosen = torch.where(absent, anchors[:, None], tokens.flatten(1).gather(1, flat))
        sources = torch.zeros_like(nodes.states)
        if shared is not None:
            of_text = (nodes.states == tokens.shape[2] - 1).long()
            sources = of_text * (1 + shared.gather(1, slots).long())
        root = cls.of_anchors(anchors)
        return cls(
            torch.cat([root.tokens, chosen], dim=1),
            torch.cat([root.parents, nodes.parents], dim=1),
            torch.cat([root.depths, nodes.slots + 1], dim=1),
            torch.cat([root.sources, sources], dim=1),
            torch.cat([root.log_probs, nodes.log_probs], dim=1),
        )

    @property
    def size(self) -> int:
        """Nodes of each row, the anchor included."""
        return self.tokens.shape[1]

    def first(self, size: int) -> "TokenTree":
        """The first `size` nodes of every row: nodes stand behind their parents, so this is a tree again."""
        parts = (self.tokens, self.parents, self.depths, self.sources, self.log_probs)
        return TokenTree(*(part[:, :size] for part in parts))

    def visible(self) -> Tensor:
        """Which nodes a node sees, `[rows, N, N]` (bool): itself and its ancestors; absent nodes see themselves."""
        size = self.size
        own = torch.eye(size, dtype=torch.bool, device=self.tokens.device)
        if size == 1:
            return own.expand(self.tokens.shape[0], 1, 1)
        # One step up, and then twice as many steps with each product of such steps.
        steps = (self.parents[..., None] == torch.arange(size, device=own.device)) | own
        reach = 1
        while reach < size - 1:
            lifted = steps.float()
            steps, reach = (lifted @ lifted) > 0, 2 * reach
        return steps
