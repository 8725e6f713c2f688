"""No head: every slot commits its own most likely token, as vanilla DFlash does."""

from torch import nn

from ..kernels.topk_logsumexp import topk_logsumexp
from .configuration_lilicorr import LiLiCorrConfig
from .lattice import Block, Draft, Lattice
from .lattice_drafts import SHOWN_CANDIDATES


class NoHead(nn.Module):
    """Argmax of each slot's marginal; has no parameters."""

    grows_trees = True

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        self.num_candidates = min(SHOWN_CANDIDATES, config.vocab_size)
        self.tree_beta: float = 1.0

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """Tokens `[N, S]` by argmax, the lower id where logits tie; the lattice has no scores."""
        blocks, slots, vocab = block.logits.shape
        count = self.num_candidates if return_lattice else 1
        values, indices, normaliser = topk_logsumexp(block.logits.reshape(-1, vocab), count)
        candidates = indices.view(blocks, slots, count)
        draft = Draft(
            tokens=candidates[..., 0],
            finite=normaliser.isfinite().view(blocks, slots),
            probabilities=lambda: (values[:, 0] - normaliser).exp().view(blocks, slots),
        )
        if return_lattice:
            log_probs = (values - normaliser[:, None]).view(blocks, slots, count)
            draft.lattice = Lattice(candidates, log_probs, None, None, candidates.new_zeros(blocks, slots))
        return draft
