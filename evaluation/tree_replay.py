"""Trees along answers that are already there: what a pass of so many nodes would have brought home.

Every answer is followed block by block as the decoding loop follows it, with the functions that the loop calls: a tree
is grown below the anchor from the drafter's lattice and the text so far, and the answer says how deep it was right.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..candidate_generator.node_count import NodeCount
from ..candidate_generator.text_continuation import DEEPEST, LONGEST, TextContinuation
from ..candidate_generator.token_tree import SOURCES, TokenTree
from ..candidate_generator.tree_growth import grow_trees
from ..modeling_lilicorr.lattice import Draft, Lattice
from .replay import Text

WITHOUT_TEXT, WITH_TEXT = "without text", "with text"


@dataclass
class TreeTrace:
    """What verifying trees did for one answer, or for many added up.

    Attributes:
        passes: of the target, the prompt's not counted; committed: tokens that they committed.
        drafts: passes for which the drafter ran, and not the text's own continuation alone.
        drafted: nodes of all trees, anchors not counted.
        reached: in how many passes the tree held the text down to depth 1, 2, …: coverage of the path.
        nodes: of all trees, by depth 1, 2, ….
        sources: accepted tokens by who proposed them, see `token_tree.SOURCES`.
    """

    passes: int = 0
    committed: int = 0
    drafts: int = 0
    drafted: int = 0
    reached: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)

    def add(self, other: "TreeTrace") -> None:
        """Add what `other` counted."""
        self.passes += other.passes
        self.committed += other.committed
        self.drafts += other.drafts
        self.drafted += other.drafted
        self.reached = _sum(self.reached, other.reached)
        self.nodes = _sum(self.nodes, other.nodes)
        self.sources = dict(Counter(self.sources) + Counter(other.sources))

    @property
    def tokens_per_pass(self) -> float:
        """Tokens committed by a pass of the target, the prompt's not counted; NaN without one."""
        return self.committed / self.passes if self.passes else float("nan")


def _sum(left: Sequence[int], right: Sequence[int]) -> list[int]:
    longest = max(len(left), len(right))
    return [sum(each[depth] for each in (left, right) if depth < len(each)) for depth in range(longest)]


class Drafts:
    """A drafter's drafts behind every token of an answer, one at a time, on the CPU.

    Args:
        drafter: the model; drafts: from `drafts_along`, of whole blocks.
    """

    def __init__(self, drafter: Any, drafts: Sequence[Draft]) -> None:
        self.beta: float = drafter.head.tree_beta
        self.num_slots: int = drafter.config.num_slots
        self._tokens = torch.cat([draft.tokens for draft in drafts]).cpu()
        self._finite = torch.cat([draft.finite for draft in drafts]).cpu()
        self._chances = torch.cat([draft.probabilities() for draft in drafts]).cpu()
        self._lattice = _joined(drafts) if drafter.head.grows_trees else None

    def behind(self, index: int) -> Draft:
        """The draft of one row behind the answer's token `index`."""
        row, lattice = slice(index, index + 1), None
        if self._lattice is not None:
            parts = vars(self._lattice).items()
            lattice = Lattice(**{name: None if part is None else part[row] for name, part in parts})
        return Draft(self._tokens[row], self._finite[row], lambda: self._chances[row], lattice)


def _joined(drafts: Sequence[Draft]) -> Lattice:
    """The lattices of `drafts` as one, on the CPU."""
    lattices = [draft.lattice for draft in drafts if draft.lattice is not None]
    return Lattice(
        **{
            name: None if part is None else torch.cat([getattr(lattice, name) for lattice in lattices]).cpu()
            for name, part in vars(lattices[0]).items()
        }
    )


def follow_trees(
    text: Text, count: int, drafts: Drafts | None, lookup: bool = True, ends: Collection[int] = ()
) -> TreeTrace:
    """Follow `text` as the decoding loop does with `count` nodes a pass.

    Args:
        drafts: `None` for trees of nothing but the text's own continuation.
        lookup: whether that continuation joins the trees.
        ends: tokens that end an answer.
    """
    trace, nodes = TreeTrace(), NodeCount(count)
    count = nodes.choose(1)
    written = TextContinuation(text.token_ids[: text.start + 1]) if lookup else None
    final = torch.tensor(sorted(ends)) if ends else None
    place = text.start
    while (left := text.end - 1 - place) > 0:
        room = DEEPEST if text.ended else left - 1  # a limit leaves the last token to the target
        proposal = None if written is None else written.propose()
        tree = TokenTree.of_anchors(torch.tensor([text.token_ids[place]]))
        if room > 0 and count > 0 and (drafts is not None or proposal is not None):
            found = None if written is None or proposal is None else (proposal, written.chances(proposal))
            sure = found is not None and nodes.skips_draft(found[1])
            deep = DEEPEST if drafts is None or count >= nodes.deep else drafts.num_slots
            draft = None if drafts is None or sure else drafts.behind(place - text.start)
            trace.drafts += draft is not None
            tree = grow_trees(
                tree.tokens[:, 0],
                draft,
                [found],
                count,
                beta=1.0 if drafts is None else drafts.beta,
                depth=min(room, deep),
                ends=final,
            )
        committed = _pass(tree, text.token_ids[place + 1 : place + 1 + left], trace)
        if written is not None:
            if proposal is not None:
                written.learn(proposal, committed)
            written.extend(committed)
        place += len(committed)
    return trace


def _pass(tree: TokenTree, truth: Sequence[int], trace: TreeTrace) -> Sequence[int]:
    """The tokens of `truth` that a pass over `tree` commits, counted in `trace`."""
    parts = torch.stack([tree.tokens[0], tree.parents[0], tree.depths[0], tree.sources[0]])
    tokens, parents, depths, sources = parts.tolist()
    children = {(parent, tokens[node]): node for node, parent in enumerate(parents) if parent >= 0}
    node, accepted, came_from = 0, 0, Counter[str]()
    for token in truth:
        child = children.get((node, token))
        if child is None:
            break
        node, accepted = child, accepted + 1
        came_from[SOURCES[sources[child]]] += 1
    committed = truth[: accepted + 1]
    held = Counter(depths[node] for node in children.values())
    nodes = [held[depth] for depth in range(1, max(held, default=0) + 1)]
    trace.add(TreeTrace(1, len(committed), 0, len(children), [1] * accepted, nodes, dict(came_from)))
    return committed


def suffix_hits(text: Text) -> dict[int, tuple[int, int]]:
    """How often the token that followed an equal suffix is the answer's next one, by the length of that suffix.

    Asked once for every token behind the first, whatever trees would have skipped.

    Returns:
        `{length: (right, asked)}` for lengths 1 … `LONGEST`.
    """
    hits, asked = Counter[int](), Counter[int]()
    written = TextContinuation(text.token_ids[: text.start + 1])
    for token in text.token_ids[text.start + 1 : text.end]:
        proposal = written.propose(1)
        if proposal is not None:
            length = min(proposal.matched, LONGEST)
            asked[length] += 1
            hits[length] += proposal.tokens[0] == token
        written.extend((token,))
    return {length: (hits[length], asked[length]) for length in range(1, LONGEST + 1)}
