"""The drafter that users load: DFlash backbone and head in one `PreTrainedModel`."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from .configuration_lilicorr import LiLiCorrConfig
from .dflash import DFlashModel, DraftCache
from .heads import DraftHead, build_head
from .lattice import Block, Draft


class LiLiCorrModel(DFlashModel):
    """A drafter for `target.generate(..., assistant_model=drafter)`.

    It holds no embedding and no LM head: both are the target's, handed in at every call. It keeps no state between
    calls either, apart from the figures of `last_generation`.
    """

    def __init__(self, config: LiLiCorrConfig) -> None:
        from ..candidate_generator.seam import install  # the seam needs nothing of this room but must follow it in

        config.validate()
        super().__init__(config)
        self.add_module(config.head_type, build_head(config))
        self.post_init()
        install()

    @property
    def head(self) -> DraftHead:
        """The head, whose parameters live under the prefix `<head_type>.`."""
        return cast(DraftHead, self.get_submodule(self.config.head_type))

    def new_cache(self) -> DraftCache:
        """An empty context cache for one sequence."""
        return DraftCache(self.config.num_hidden_layers)

    def block_ids(self, anchor_ids: Tensor) -> Tensor:
        """`[N]` anchor tokens to block inputs `[N, B]`: the anchor, then mask tokens."""
        masks = anchor_ids.new_full((anchor_ids.shape[0], self.config.num_slots), self.config.mask_token_id)
        return torch.cat([anchor_ids[:, None], masks], dim=1)

    def draft(
        self,
        anchor_ids: Tensor,
        context_hidden_states: Tensor,
        context_positions: Tensor,
        cache: DraftCache,
        embed: Callable[[Tensor], Tensor],
        lm_head: Callable[[Tensor], Tensor],
        return_lattice: bool = False,
    ) -> Draft:
        """Draft one block (paper §3.5): backbone, LM head, lattice, walk.

        Args:
            anchor_ids: the last committed token, `[1]` (int64), at the position after the last context row.
            context_hidden_states: tapped target states of the rows that `cache` lacks, `[1, C, taps * d]`, `C >= 1`.
            context_positions: their absolute positions, `[1, C]` (int64).
            cache: from `new_cache`; holds the older rows and takes in these.
            embed: the target's input embedding, ids `[...]` to `[..., d]`.
            lm_head: the target's output projection, `[..., d]` to `[..., vocab]` (rows beyond `vocab_size` are cut).
            return_lattice: also return candidates, log-probabilities, scores and picks.

        Returns:
            `Draft` with tokens `[1, B - 1]`.
        """
        context = self.project_context(context_hidden_states)
        block_positions = context_positions[:, -1:] + 1 + torch.arange(self.config.block_size, device=self.device)
        noise = embed(self.block_ids(anchor_ids)).to(device=self.device, dtype=self.dtype)
        states = self.decode_block(noise, context, block_positions, context_positions, cache=cache)
        hidden = states[:, 1:]
        logits = lm_head(hidden)[..., : self.config.vocab_size]
        block = Block(hidden, logits, anchor_ids, context[:, -1], None, embed)
        return self.head.draft(block, return_lattice=return_lattice)
