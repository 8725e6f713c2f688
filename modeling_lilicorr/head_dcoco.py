"""The DCOCO head (arXiv 2610.12570): a small network corrects the logit of every candidate pair, then a greedy walk.

The paper's equations and widths are known at second hand only: biases, SiLU and the inner widths are ours, chosen to
meet its 2.23 M parameters.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_lilicorr import LiLiCorrConfig
from .head_settings import TREE_BETAS
from .lattice import Block, Draft
from .lattice_drafts import walk_lattice


class FanInLinear(nn.Linear):
    """A layer that at first keeps the size of what enters it."""

    def init_weights_with(self, init: Any) -> None:
        """Weights from N(0, 1 / in_features); the bias is zero already."""
        init.normal_(self.weight, mean=0.0, std=self.in_features**-0.5)


class ZeroLinear(nn.Linear):
    """A layer that at first gives zero."""

    def init_weights_with(self, init: Any) -> None:
        """All weights zero, as the bias is already."""
        init.zeros_(self.weight)


class DCOCOHead(nn.Module):
    """`S(a, b) = logit(b) + MLP(z_a, z_b, s)`, zero at first; the first slot keeps the drafter's best candidate.

    Settings: `num_candidates` (K), `width` of candidates and pair states, `hidden_size` of the network's one layer.
    """

    grows_trees = True

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        settings = config.head_config
        dim, width, inner = config.hidden_size, settings["width"], settings["hidden_size"]
        self.num_candidates: int = settings["num_candidates"]
        self.tree_beta: float = settings.get("tree_beta", TREE_BETAS["dcoco"])
        self.token_proj = FanInLinear(dim, width)
        self.hidden_proj = FanInLinear(dim, width)
        self.pair_proj = FanInLinear(2 * dim, width)
        self.fuse = FanInLinear(2 * width, width)
        self.transition = FanInLinear(3 * width, inner)
        self.output = ZeroLinear(inner, 1)

    def scores(self, embeds: Tensor, log_probs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of a lattice, up to a constant for each slot: log-probabilities stand for logits.

        Args:
            embeds: the target's embeddings of the candidates, `[N, S, K, d]`; no gradient flows through them.
            log_probs: `[N, S, K]` (fp32), descending in `K`; hidden: drafter states of the slots, `[N, S, d]`.

        Returns:
            `first [N, K]` and `pair [N, S - 1, K, K]` in fp32, as `Lattice` has them.
        """
        dtype = self.token_proj.weight.dtype
        hidden = hidden.to(dtype)
        tokens = _norm(self.token_proj(embeds.detach().to(dtype)))
        states = _norm(self.hidden_proj(hidden))[:, :, None].expand_as(tokens)
        nodes = self.fuse(torch.cat([tokens, states], dim=-1))
        pairs = self.pair_proj(torch.cat([hidden[:, :-1], hidden[:, 1:]], dim=-1))
        # The layer over [z_a ; z_b ; s] is a sum of three, so that no pair is ever concatenated.
        earlier, later, between = self.transition.weight.chunk(3, dim=1)
        inner = (
            F.linear(nodes[:, :-1], earlier)[:, :, :, None]
            + F.linear(nodes[:, 1:], later)[:, :, None]
            + F.linear(pairs, between, self.transition.bias)[:, :, None, None]
        )
        delta = self.output(F.silu(inner)).squeeze(-1)
        return log_probs[:, 0], log_probs[:, 1:, None] + delta.float()

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """Prefix-first greedy walk over the scored lattice; see `Draft` for the result."""
        return walk_lattice(
            block,
            self.num_candidates,
            lambda candidates, log_probs: self.scores(block.embed(candidates), log_probs, block.hidden),
            return_lattice,
            self.tree_beta,
        )


def _norm(vectors: Tensor) -> Tensor:
    """Layer normalisation without parameters."""
    return F.layer_norm(vectors, vectors.shape[-1:])
