"""From a draft and the text's own continuation to the tree of the likeliest prefixes of both."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.lattice_tree import child_log_probs, join_text, lattice_tree
from .text_continuation import Proposal
from .token_tree import TokenTree

if TYPE_CHECKING:
    from ..modeling_lilicorr.lattice import Draft

Text = tuple[Proposal, list[float]]  # a proposal with each token's chance to be right if those before it were


def grow_trees(
    anchors: Tensor,
    draft: "Draft | None",
    texts: Sequence[Text | None],
    count: int,
    *,
    beta: float = 1.0,
    depth: int | None = None,
    ends: Tensor | None = None,
    chain: bool = False,
) -> TokenTree:
    """Trees of at most `count` nodes below `anchors`, likeliest nodes first.

    Args:
        anchors: `[rows]` (int64), on the device where drafts are made.
        draft: of these rows, with its lattice if it has one; a draft without is a chain. `None` for none.
        texts: each row's continuation, `None` for none.
        count: nodes besides the anchor, 1 or more.
        beta: see `child_log_probs`.
        depth: the deepest a node may be, 1 or more; `None` for no limit.
        ends: tokens that nothing follows, `[n]` (int64).
        chain: grow one child a node at most.
    """
    tokens, first, pair, marginals = _lattice(anchors, draft, beta)
    if depth is not None:
        tokens, pair, marginals = tokens[:, :depth], pair[:, : depth - 1], marginals[:, :depth]
    if ends is not None:
        final = torch.isin(tokens[:, :-1], ends)[..., None]
        pair = pair.masked_fill(final, -torch.inf)
    shared = None
    if any(texts):
        written, chances = _written(texts, tokens.shape[1], depth, ends, anchors.device)
        tokens, first, pair, shared = join_text(first, pair, marginals, tokens, written, chances)
    nodes = lattice_tree(first, pair, count, 1 if chain else None)
    tree = TokenTree.of_nodes(anchors, nodes, tokens, shared)
    if anchors.device.type == "cpu":  # elsewhere a look at the number of nodes would wait for the device
        tree = tree.first(1 + int((nodes.states >= 0).sum(dim=1).amax()))
    return tree


def _lattice(anchors: Tensor, draft: "Draft | None", beta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a draft: tokens `[rows, S, K]`, `log P` of first ones `[rows, K]` and of pairs, marginals `[rows, S, K]`."""
    rows = anchors.shape[0]
    if draft is None:
        nothing = torch.full((rows, 1, 1), -torch.inf, device=anchors.device)
        return anchors[:, None, None], nothing[:, 0], nothing[:, :0, None], nothing
    if draft.lattice is None:
        tokens, marginals, scores = draft.tokens[..., None], draft.probabilities().log()[..., None], None
    else:
        tokens, marginals, scores = draft.lattice.candidates, draft.lattice.log_probs, draft.lattice.pair_scores
    marginals = marginals.masked_fill(~draft.finite[..., None], -torch.inf)
    first, pair = child_log_probs(marginals, scores, beta)
    return tokens, first, pair.masked_fill(~draft.finite[:, 1:, None, None], -torch.inf), marginals


def _written(
    texts: Sequence[Text | None], slots: int, depth: int | None, ends: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens of the texts, `[rows, D]` with -1 behind their ends, and the logarithms of their chances, `[rows, D]`."""
    final = set() if ends is None else set(ends.tolist())
    deepest = max(slots, *(len(text[0].tokens) for text in texts if text is not None))
    if depth is not None:
        deepest = max(slots, min(deepest, depth))
    tokens, chances = [], []
    for text in texts:
        ids, odds = ([], []) if text is None else (text[0].tokens[:deepest], text[1][:deepest])
        end = next((index + 1 for index, token in enumerate(ids) if token in final), len(ids))
        tokens.append(ids[:end] + [-1] * (deepest - end))
        chances.append(odds[:end] + [0.0] * (deepest - end))
    return torch.tensor(tokens, device=device), torch.tensor(chances, device=device).log()
