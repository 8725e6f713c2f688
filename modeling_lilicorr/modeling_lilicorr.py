"""The drafter that users load: DFlash backbone and head in one `PreTrainedModel`."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from .configuration_lilicorr import LiLiCorrConfig
from .dflash import DFlashModel, DraftCache
from .heads import DraftHead, build_head
from .lattice import Block, Draft

if TYPE_CHECKING:
    from ..candidate_generator.figures import GenerationFigures
    from ..candidate_generator.lilicorr_generator import LiLiCorrCandidateGenerator


class LiLiCorrModel(DFlashModel):
    """A drafter for `target.generate(..., assistant_model=drafter)`.

    It holds no embedding and no LM head: both are the target's, handed in at every call. It keeps no state between
    calls either, apart from the figures of `last_generation`.
    """

    last_generation: "GenerationFigures | None" = None  # of the latest `generate` call that this drafter served

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

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        *,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        **kwargs: Any,
    ) -> "LiLiCorrCandidateGenerator":
        """What `target.generate(..., assistant_model=self)` asks for: a generator that serves this one call.

        Args:
            target: the decoder-only model that generates.
            generation_config, model_kwargs: of the call, as `generate` prepared them.
            input_ids: the prompt, `[1, L]` (int64).
            **kwargs: what a draft without distribution has no use for, such as `logits_processor`.

        Raises:
            ValueError: for a batch, an encoder-decoder target, or a target that this drafter was not made for.
        """
        from ..candidate_generator.lilicorr_generator import LiLiCorrCandidateGenerator

        return LiLiCorrCandidateGenerator(self, target, generation_config, model_kwargs, input_ids)
