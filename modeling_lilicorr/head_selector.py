"""The candidate selector of DFlash 2: a low-rank score of adjacent tokens, gated by the drafter's state."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_lilicorr import LiLiCorrConfig
from .head_settings import TREE_BETAS
from .lattice import Block, Draft
from .lattice_drafts import walk_lattice


class SelectorHead(nn.Module):
    """`S(a, b) = logit(b) + <A[a] * (H h), B[b]>` with `h` of the slot of `b`; the anchor precedes the first slot.

    Settings: `num_candidates` (K), `rank` of the codebooks `A` and `B`.
    """

    grows_trees = True

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        settings = config.head_config
        self.num_candidates: int = settings["num_candidates"]
        self.tree_beta: float = settings.get("tree_beta", TREE_BETAS["selector"])
        self.spread = config.initializer_range
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, settings["rank"]))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, settings["rank"]))
        self.hidden_projection = nn.Linear(config.hidden_size, settings["rank"], bias=False)

    def init_weights_with(self, init: Any) -> None:
        """The successors at zero, so that a fresh head is the drafter; the other factors are random."""
        init.normal_(self.predecessor_codebook, mean=0.0, std=self.spread)
        init.zeros_(self.successor_codebook)

    def scores(
        self, candidates: Tensor, log_probs: Tensor, hidden: Tensor, anchor_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores of a lattice, up to a constant for each slot: log-probabilities stand for logits.

        Args:
            candidates: token ids `[N, S, K]` (int64); log_probs: `[N, S, K]` (fp32).
            hidden: drafter states of the slots, `[N, S, d]`; anchor_ids: `[N]` (int64).

        Returns:
            `first [N, K]` and `pair [N, S - 1, K, K]` in fp32, as `Lattice` has them.
        """
        gate = self.hidden_projection(hidden.to(self.hidden_projection.weight.dtype)).float()
        later = F.embedding(candidates, self.successor_codebook).float()
        anchor = F.embedding(anchor_ids, self.predecessor_codebook).float() * gate[:, 0]
        earlier = F.embedding(candidates[:, :-1], self.predecessor_codebook).float() * gate[:, 1:, None]
        first = log_probs[:, 0] + torch.einsum("nr,nkr->nk", anchor, later[:, 0])
        pair = log_probs[:, 1:, None] + earlier @ later[:, 1:].transpose(-1, -2)
        return first, pair

    def scores_after(self, previous: Tensor, candidates: Tensor, log_probs: Tensor, hidden: Tensor) -> Tensor:
        """Scores `[N, S, K]` (fp32) of the candidates after known tokens, `previous [N, S]` (int64); see `scores`."""
        gate = self.hidden_projection(hidden.to(self.hidden_projection.weight.dtype)).float()
        earlier = F.embedding(previous, self.predecessor_codebook).float() * gate
        return log_probs + torch.einsum(
            "nsr,nskr->nsk", earlier, F.embedding(candidates, self.successor_codebook).float()
        )

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """Greedy walk over the scored lattice; see `Draft` for the result."""
        return walk_lattice(
            block,
            self.num_candidates,
            lambda candidates, log_probs: self.scores(candidates, log_probs, block.hidden, block.anchor_ids),
            return_lattice,
            self.tree_beta,
        )
