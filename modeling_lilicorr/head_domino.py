"""The Domino head (arXiv 2605.29707): a recurrent state of the block's tokens corrects the logits of the next slot."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_lilicorr import LiLiCorrConfig
from .lattice import Block, Draft
from .lattice_drafts import SHOWN_CANDIDATES, commit_slots


class PrefixGRU(nn.GRU):
    """A GRU that reads one token at a time; written out, since not every device and dtype has torch's."""

    weight_ih_l0: nn.Parameter
    weight_hh_l0: nn.Parameter

    def init_weights_with(self, init: Any) -> None:
        """As torch starts it."""
        bound = self.hidden_size**-0.5
        init.uniform_(self.weight_ih_l0, -bound, bound)
        init.uniform_(self.weight_hh_l0, -bound, bound)

    def blank(self, blocks: int) -> Tensor:
        """The state before any token, `[blocks, hidden_size]`."""
        return self.weight_hh_l0.new_zeros(blocks, self.hidden_size)

    def read(self, embed: Tensor, state: Tensor) -> Tensor:
        """The state `[N, hidden_size]` after a token, `embed [N, d]`."""
        fresh = F.linear(embed.detach().to(state.dtype), self.weight_ih_l0).chunk(3, dim=-1)
        held = F.linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        reset, update = torch.sigmoid(fresh[0] + held[0]), torch.sigmoid(fresh[1] + held[1])
        return (1 - update) * torch.tanh(fresh[2] + reset * held[2]) + update * state


class DominoHead(nn.Module):
    """Adds `W2 SiLU(W1 [h ; s])` to a slot's logits, `s` the state of a GRU that has read the tokens before it.

    Slots predict their own position here (its authors' `shift_label: false`). Settings: `gru_hidden_dim`, `emb_dim`
    (rank of the correction), `pure_draft_prefix_len` (first slots that keep the drafter's logits).
    """

    grows_trees = False

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        settings = config.head_config
        state, rank = settings["gru_hidden_dim"], settings["emb_dim"]
        self.num_candidates = min(SHOWN_CANDIDATES, config.vocab_size)
        self.tree_beta: float = 1.0
        self.prefix_length: int = settings["pure_draft_prefix_len"]
        self.width = config.hidden_size
        self.prefix_gru = PrefixGRU(config.hidden_size, state, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + state, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, config.vocab_size, bias=False),
        )

    def codes(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """What the last matrix turns into corrections of known tokens' successors.

        Args:
            hidden: drafter states of the slots, `[N, S, d]`.
            embeds: the target's embeddings of the tokens before each slot, anchor first, `[N, S, d]`.

        Returns:
            `[N, S, emb_dim]`; those of the first `prefix_length` slots are not used.
        """
        shared, state = self._shared(hidden), self.prefix_gru.blank(len(hidden))
        codes = []
        for slot in range(hidden.shape[1]):
            state = self.prefix_gru.read(embeds[:, slot], state)
            codes.append(self._code(shared[:, slot], state))
        return torch.stack(codes, dim=1)

    def corrections(self, codes: Tensor) -> Tensor:
        """`[..., emb_dim]` to `[..., vocab]`."""
        return self.embed_proj[2](codes)

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """Slot after slot the argmax of the corrected logits; see `Draft` for the result."""
        shared, state = self._shared(block.hidden), self.prefix_gru.blank(len(block.hidden))

        def correction(slot: int, previous: Tensor) -> Tensor | None:
            nonlocal state
            state = self.prefix_gru.read(block.embed(previous), state)
            if slot < self.prefix_length:
                return None
            return self.corrections(self._code(shared[:, slot], state))

        return commit_slots(block, correction, self.num_candidates, return_lattice)

    def _shared(self, hidden: Tensor) -> Tensor:
        """The part of `W1 [h ; s]` that no token changes, for all slots at once."""
        weight = cast(nn.Linear, self.embed_proj[0]).weight
        return F.linear(hidden.to(weight.dtype), weight[:, : self.width])

    def _code(self, shared: Tensor, state: Tensor) -> Tensor:
        """`SiLU(W1 [h ; s])` of one slot, from its row of `_shared`."""
        return F.silu(shared + F.linear(state, cast(nn.Linear, self.embed_proj[0]).weight[:, self.width :]))
