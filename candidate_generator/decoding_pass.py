"""What one pass of the decoding loop drafted, verified and committed, for whoever wants to watch it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .token_tree import TokenTree
from .tree_growth import Text

if TYPE_CHECKING:
    from ..modeling_lilicorr.lattice import Draft


@dataclass(frozen=True)
class DecodingPass:
    """A step of a loop with all its rows, once it has committed. Tensors are the loop's own: to be read, not changed.

    Attributes:
        anchors: each row's last token before the pass, `[rows]` (int64).
        texts: each row's own continuation with its chances, `None` for none.
        draft: with its lattice, also where the tree was grown without; `None` where the drafter did not run.
        tree: what was verified, of N nodes a row.
        logits: the target's, behind every node, `[rows, N, vocab]`, before any processor.
        paths: each row's accepted nodes that the target was read behind, the anchor first.
        committed: each row's new tokens: those of its path without the anchor, and one more, which may be a node too
            where the text ended with it.
        ended: whether each row has reached its end.
    """

    anchors: Tensor
    texts: Sequence[Text | None]
    draft: "Draft | None"
    tree: TokenTree
    logits: Tensor
    paths: list[list[int]]
    committed: list[list[int]]
    ended: list[bool]


Observer = Callable[[DecodingPass], None]
