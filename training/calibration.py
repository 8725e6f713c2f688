"""What turns a head's scores into probabilities: one number, fitted on training answers when training is over."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..modeling_lilicorr.lattice import Block
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .anchors import Blocks
from .block_states import block_states

BETAS = torch.logspace(-1.5, 0.75, 46)  # 0.03 … 5.6, steps of 12 %
ENOUGH = 20_000  # pairs of candidates after which more tell nothing new
TOGETHER = 32  # blocks that go through the LM head at once


@torch.no_grad()
def fit_tree_beta(
    drafter: LiLiCorrModel, target: PreTrainedModel, texts: Iterable[tuple[Tensor, Tensor, Blocks]]
) -> float | None:
    """The `beta` at which `softmax(beta · score)` gives the true successors of true candidates the highest likelihood.

    Args:
        drafter: trained, on the target's device; target: the model whose LM head it borrows.
        texts: `input_ids [batch, L]` (int64), the target's hidden states `[batch, L, layers * d]`, and blocks drawn
            from them; as many as it takes to see `ENOUGH` pairs are read.

    Returns:
        `beta`, or `None` for a head without scores or texts in which no true pair is among the candidates.
    """
    if not drafter.head.grows_trees:
        return None
    losses, seen = torch.zeros(len(BETAS), dtype=torch.float64), 0
    for input_ids, states, blocks in texts:
        for scores, successors in _true_rows(drafter, target, input_ids, states, blocks):
            losses += torch.tensor([float(cross_entropy(b * scores, successors, reduction="sum")) for b in BETAS])
            seen += len(successors)
        if seen >= ENOUGH:
            break
    return float(BETAS[losses.argmin()]) if seen else None


def _true_rows(
    drafter: LiLiCorrModel, target: PreTrainedModel, input_ids: Tensor, states: Tensor, blocks: Blocks
) -> Iterable[tuple[Tensor, Tensor]]:
    """Where a slot's and the next slot's true tokens are candidates: the scores `[M, K]` after the first, and which of
    them the second is, `[M]` (int64).
    """
    embed, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    assert isinstance(lm_head, torch.nn.Module)
    context, hidden = block_states(drafter, embed, input_ids, states, blocks.anchors, TOGETHER)
    sequence = torch.arange(len(input_ids), device=input_ids.device)[:, None].expand(blocks.anchors.shape)
    kept = blocks.keep
    parts = [part[kept] for part in (hidden, blocks.labels, blocks.supervised, blocks.anchors, sequence)]
    for rows, labels, supervised, anchors, texts in zip(*(part.split(TOGETHER) for part in parts), strict=True):
        block = Block(
            hidden=rows[:, 1:],
            logits=lm_head(rows[:, 1:].to(target.dtype))[..., : drafter.config.vocab_size].to(drafter.dtype),
            anchor_ids=input_ids[texts, anchors],
            anchor_state=context[texts, (anchors - 1).clamp(min=0)],
            anchor_valid=anchors > 0,
            embed=lambda tokens: embed(tokens).to(drafter.dtype),
            anchor_hidden=rows[:, 0],
        )
        lattice: Any = drafter.head.draft(block, return_lattice=True).lattice
        if lattice.pair_scores is None:
            return
        same = lattice.candidates == labels[..., None]
        there, which = same.any(dim=-1) & supervised, same.long().argmax(dim=-1)
        both = there[:, :-1] & there[:, 1:]
        scores = lattice.pair_scores[both]  # [M, K, K]
        before = which[:, :-1][both]
        yield scores[torch.arange(len(before), device=before.device), before].cpu(), which[:, 1:][both].cpu()
