"""The xPress head (arXiv 2608.02438): a causal refiner of whole blocks, run on its own choices until they agree."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_lilicorr import LiLiCorrConfig
from .lattice import Block, Draft
from .lattice_drafts import SHOWN_CANDIDATES, drafters_lattice


class XPressHead(nn.Module):
    """Adds `readout(x_k)` to row k's logits, `x_k` of its state, the block's mean state and the tokens before it.

    `x_k = W [down_h h_k ; down_g mean(h) ; token_embed(t_{k-1})]`, then `x_k += sum_{j <= k} L[k, j] * x_j` by channel,
    then a SwiGLU with a residual. Row 0 is the anchor's: it takes part in mean and mixer, and its own logits are of no
    use. The token before the anchor is at hand in training only; here the anchor stands in for it in training too, as
    it does where its authors serve. Of a block cut short the mean is that of the rows there are.

    Settings: `rank` of `x`, `mlp_ratio` (width of the SwiGLU over `rank`), `num_jacobi_passes` of a draft.
    """

    grows_trees = False

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        settings = config.head_config
        rank = settings["rank"]
        inner = settings["mlp_ratio"] * rank
        self.rank: int = rank
        self.num_candidates = min(SHOWN_CANDIDATES, config.vocab_size)
        self.tree_beta: float = 1.0
        self.passes: int = settings["num_jacobi_passes"]
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, config.block_size, config.block_size))  # the lower triangle counts
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, config.vocab_size, bias=False)

    def init_weights_with(self, init: Any) -> None:
        """The mixer at zero: a fresh head looks at the token before only."""
        init.zeros_(self.mix_l)

    def shared(self, hidden: Tensor, anchor_hidden: Tensor | None) -> Tensor:
        """The part of `W [...]` that no token changes.

        Args:
            hidden: drafter states of the slots, `[N, S, d]`; anchor_hidden: of the anchors' own rows, `[N, d]`.

        Returns:
            `[N, 1 + S, rank]`.

        Raises:
            ValueError: `anchor_hidden` is `None`.
        """
        if anchor_hidden is None:
            raise ValueError("The xpress head reads the state of the anchor's own row; give the Block anchor_hidden.")
        rows = torch.cat([anchor_hidden[:, None], hidden], dim=1).to(self.down_h.weight.dtype)
        of_row, of_block, _ = self.in_proj.weight.split(self.rank, dim=1)
        whole = F.linear(self.down_g(rows.mean(dim=1, keepdim=True)), of_block)
        return F.linear(self.down_h(rows), of_row) + whole

    def codes(self, shared: Tensor, previous: Tensor) -> Tensor:
        """What `corrections` turns into the bias of each slot.

        Args:
            shared: of the same blocks; previous: the token before each slot, anchor first, `[N, S]` (int64).

        Returns:
            `[N, S, rank]`; those of a slot depend on no token behind it.
        """
        tokens = torch.cat([previous[:, :1], previous], dim=1)
        x = shared + F.linear(self.token_embed(tokens), self.in_proj.weight[:, 2 * self.rank :])
        rows = x.shape[1]
        x = (x + torch.einsum("rkj,njr->nkr", self.mix_l[:, :rows, :rows].tril(), x))[:, 1:]
        return x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))

    def corrections(self, codes: Tensor) -> Tensor:
        """`[..., rank]` to `[..., vocab]`."""
        return self.readout(codes)

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """Jacobi passes from the drafter's own tokens on: each takes the argmax after those of the pass before.

        As many passes as slots give what a slot after slot decode gives. See `Draft` for the result.
        """
        base, shared = block.logits.float(), self.shared(block.hidden, block.anchor_hidden)
        logits, (best, tokens) = base, base.max(dim=-1)
        for _ in range(min(self.passes, base.shape[1])):
            earlier, previous = tokens, torch.cat([block.anchor_ids[:, None], tokens[:, :-1]], dim=1)
            logits = base + self.corrections(self.codes(shared, previous)).float()
            best, tokens = logits.max(dim=-1)
            if tokens.device.type == "cpu" and torch.equal(tokens, earlier):  # on a GPU it would have to wait for it
                break
        draft = Draft(tokens, best.isfinite(), lambda: (best - logits.logsumexp(dim=-1)).exp())
        if return_lattice:
            draft.lattice = drafters_lattice(block.logits, tokens, self.num_candidates)
        return draft
