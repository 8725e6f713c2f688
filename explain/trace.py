"""One greedy call recorded block by block: lattice, tree, what the target said, what was accepted."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..candidate_generator.decode import decode
from ..candidate_generator.decoding_pass import DecodingPass
from ..candidate_generator.requests import check_single
from ..candidate_generator.token_tree import SOURCES, TokenTree
from ..modeling_lilicorr.lattice import Draft

LATTICE, TEXT, BOTH = SOURCES


@dataclass(frozen=True)
class Slot:
    """A slot of a draft: its candidates, likeliest first, and which of them the walk took.

    Attributes:
        tokens, chances: of each candidate, the drafter's own probability.
        pick: index of the walk's candidate.
    """

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    pick: int


@dataclass(frozen=True)
class Node:
    """A node of a verified tree; the first one of a tree is the anchor.

    Attributes:
        parent: its number, -1 for the anchor; depth: the slot it stands at, 0 for the anchor.
        source: who proposed it, one of `SOURCES`; empty for the anchor.
        chance: how likely it was thought to follow its parent.
        said: the token that the target goes on with behind it; sure: its probability.
    """

    token: int
    parent: int
    depth: int
    source: str
    chance: float
    said: int
    sure: float


@dataclass(frozen=True)
class BlockTrace:
    """A pass of the target behind the prompt's: what was drafted for it, what it verified, what it committed.

    Attributes:
        slots: the drafter's lattice; empty where the drafter did not run.
        text: the text's own continuation, empty for none; text_chances: of each token to be right behind those before.
        nodes: of the tree, the anchor first.
        path: numbers of the accepted nodes that the target was read behind, the anchor first.
        committed: the new tokens.
        ended: whether the text ended with them.
    """

    slots: tuple[Slot, ...]
    text: tuple[int, ...]
    text_chances: tuple[float, ...]
    nodes: tuple[Node, ...]
    path: tuple[int, ...]
    committed: tuple[int, ...]
    ended: bool

    @property
    def accepted(self) -> tuple[int, ...]:
        """Numbers of the nodes whose tokens were committed, in order; the anchor is none of them."""
        last = self.child(self.path[-1], self.committed[-1])
        return self.path[1:] if last is None else (*self.path[1:], last)

    @property
    def bonus(self) -> int | None:
        """The token that the target added itself; `None` where the text ended with an accepted one."""
        return self.committed[-1] if len(self.accepted) < len(self.committed) else None

    @property
    def skipped(self) -> bool:
        """Whether the text's own continuation was trusted enough to do without the drafter."""
        return not self.slots and len(self.nodes) > 1

    def child(self, parent: int, token: int) -> int | None:
        """The number of the node with `token` below `parent`, if the tree holds one."""
        return next((i for i, node in enumerate(self.nodes) if (node.parent, node.token) == (parent, token)), None)

    def candidates(self, slot: int) -> tuple[int, ...]:
        """The tokens that might have been proposed at `slot` (1, 2, …) behind the accepted ones before it."""
        drafted = self.slots[slot - 1].tokens if slot <= len(self.slots) else ()
        follows = self.text[: slot - 1] == self.committed[: slot - 1]
        written = self.text[slot - 1 : slot] if follows else ()
        return (*drafted, *(token for token in written if token not in drafted))


@dataclass
class CallTrace:
    """A whole call: the prompt's tokens, the first new one, which the prompt's pass gave, and all blocks behind it."""

    prompt: tuple[int, ...]
    first: int
    blocks: list[BlockTrace] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All new tokens."""
        return (self.first, *(token for block in self.blocks for token in block.committed))

    @property
    def passes(self) -> int:
        """Passes of the target, the prompt's not counted."""
        return len(self.blocks)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass committed, the prompt's pass and its token not counted; NaN without one."""
        return (len(self.tokens) - 1) / self.passes if self.passes else float("nan")

    @property
    def skipped(self) -> int:
        """Passes that did without a draft, since the text's own continuation was trusted."""
        return sum(block.skipped for block in self.blocks)

    @property
    def proposed(self) -> int:
        """Nodes of all trees, anchors not counted."""
        return sum(len(block.nodes) - 1 for block in self.blocks)

    @property
    def accepted(self) -> int:
        """Those of them that were committed."""
        return sum(len(block.accepted) for block in self.blocks)


def record(target: PreTrainedModel, drafter: Any, inputs: dict[str, Tensor], **options: Any) -> CallTrace:
    """Answer one prompt with `drafter` by the decoding loop, and keep what every pass did.

    The output and `drafter.last_generation` are those of `target.generate(..., assistant_model=drafter)`; a
    configuration that asks for Transformers' own loop (`decoding="stock"`) is passed over.

    Args:
        inputs: `input_ids` and `attention_mask`, `[1, L]` (int64).
        options: of `generate`, greedy ones.

    Raises:
        ValueError: more than one prompt, or a call that the drafter cannot serve.
    """
    check_single(inputs["input_ids"], "a trace follows a single one")
    blocks: list[BlockTrace] = []

    def loop(model: PreTrainedModel, input_ids: Tensor, **call: Any) -> Any:
        for name in ("synced_gpus", "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer"):
            call.pop(name, None)
        return decode(drafter, model, input_ids, observer=lambda seen: blocks.append(block_of(seen)), **call)

    output: Any = target.generate(**inputs, custom_generate=loop, **options)  # type: ignore[operator]
    sequence = (output if isinstance(output, Tensor) else output.sequences)[0].tolist()
    start = inputs["input_ids"].shape[1]
    return CallTrace(tuple(sequence[:start]), sequence[start], blocks)


def block_of(seen: DecodingPass) -> BlockTrace:
    """What the loop showed of a pass, for its first row."""
    text, path = seen.texts[0], tuple(seen.paths[0])
    proposal, chances = ((), ()) if text is None else (tuple(text[0].tokens), tuple(text[1]))
    committed = tuple(seen.committed[0])
    nodes = _nodes(seen.tree, seen.logits[0], dict(zip(path, committed, strict=True)))
    slots = () if seen.draft is None else tuple(_slots(seen.draft))
    return BlockTrace(slots, proposal, chances, nodes, path, committed, seen.ended[0])


def _slots(draft: Draft) -> Iterable[Slot]:
    """The draft's lattice; of one without, its tokens as the only candidates. Ends before a slot that is not finite."""
    if draft.lattice is None:
        tokens, chances, picks = draft.tokens[0, :, None], draft.probabilities()[0, :, None], draft.tokens[0] * 0
    else:
        lattice = draft.lattice
        tokens, chances, picks = lattice.candidates[0], lattice.log_probs[0].exp(), lattice.picks[0]
    usable = draft.finite[0].tolist()
    for index, pick in enumerate(picks.tolist()):
        if not all(usable[: index + 1]):
            tokens, chances = tokens[:0], chances[:0]
        ids, odds = (tuple(part[index].tolist()) if len(part) else () for part in (tokens, chances))
        yield Slot(ids, odds, pick)


def _nodes(tree: TokenTree, logits: Tensor, chosen: dict[int, int]) -> tuple[Node, ...]:
    """The nodes of the first tree, absent ones left out.

    Args:
        logits: `[N, vocab]`; chosen: the token that was committed behind a node, where the target was read there: with
            processors, not always the likeliest one.
    """
    chances = logits.float().softmax(dim=-1).cpu()
    said = chances.argmax(dim=-1).tolist()
    for node, token in chosen.items():
        said[node] = token
    sure = chances[torch.arange(len(said)), torch.tensor(said)].tolist()
    parts = (tree.tokens, tree.parents, tree.depths, tree.sources, tree.log_probs)
    tokens, parents, depths, sources, paths = (part[0].tolist() for part in parts)
    nodes = [Node(tokens[0], -1, 0, "", 1.0, said[0], sure[0])]
    for number in range(1, len(tokens)):
        parent = parents[number]
        if parent < 0:  # absent ones stand at the end
            break
        chance = float(torch.tensor(paths[number] - paths[parent]).exp())
        nodes.append(
            Node(tokens[number], parent, depths[number], SOURCES[sources[number]], chance, said[number], sure[number])
        )
    return tuple(nodes)
