"""The definition of trees over a candidate lattice, in plain Python: what the batched version must reproduce."""

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class TreeNodes:
    """The nodes of one tree a row, without the anchor, likeliest first; a parent stands before its children.

    Node `i` of a table is node `i + 1` of its tree, since node 0 is the anchor.

    Attributes:
        states: which candidate of its slot a node is, `[N, M]` (int64), -1 for an absent node (these are the last).
        slots: zero-based slots, `[N, M]` (int64): a node of slot `s` has depth `s + 1`; -1 for absent ones.
        parents: numbers of the parents in their trees, `[N, M]` (int64): 0 is the anchor; -1 for absent ones.
        log_probs: of the path from the anchor to the node, `[N, M]` (fp64), `-inf` for absent ones.
    """

    states: Tensor
    slots: Tensor
    parents: Tensor
    log_probs: Tensor


def child_log_probs(log_probs: Tensor, pair_scores: Tensor | None, beta: float) -> tuple[Tensor, Tensor]:
    """`log P(child | parent)` over a lattice (DESIGN §3): what a tree is grown by.

    The first slot takes the drafter's own probabilities. Behind it, a slot's coverage (the mass of its candidates)
    times the softmax of `beta` times the scores; the drafter's own probabilities where a head has no scores.

    Args:
        log_probs: `[N, S, K]` (fp32) over the full vocabulary.
        pair_scores: `[N, S - 1, K, K]` (fp32), earlier candidate, later candidate, or `None`.
        beta: inverse temperature that calibrates the scores.

    Returns:
        `first [N, K]` and `pair [N, S - 1, K, K]` (fp32).
    """
    count = log_probs.shape[-1]
    if pair_scores is None:
        return log_probs[:, 0], log_probs[:, 1:, None].expand(-1, -1, count, -1)
    coverage = log_probs[:, 1:].logsumexp(dim=-1).clamp(max=0.0)
    return log_probs[:, 0], coverage[..., None, None] + (beta * pair_scores).log_softmax(dim=-1)


def lattice_tree(first: Tensor, pair: Tensor, count: int, width: int | None = None) -> TreeNodes:
    """The `count` likeliest prefixes of paths through a lattice, which form a tree.

    Grown best first by path probability; where two are equal, the lower slot first, then the node whose parent came
    first, then the lower candidate. No child is likelier than its parent, so these are the likeliest of all prefixes.

    Args:
        first: `log P` of each candidate of slot 1, `[N, K]`; at most 0, `-inf` or NaN for none.
        pair: `log P(later | earlier)`, `[N, S - 1, K, K]`, likewise.
        count: nodes of each tree at most, M.
        width: 1 grows a chain, each node with its likeliest child only; `None` sets no limit.

    Returns:
        `TreeNodes` of `[N, M]`, on the lattice's device.

    Raises:
        ValueError: the shapes do not fit, or `count` or `width` is out of range.
    """
    check_tree(first, pair, count, width)
    rows = [_grow(a, b, count, width) for a, b in zip(first.double().tolist(), pair.double().tolist(), strict=True)]
    table = torch.tensor(rows, dtype=torch.float64, device=first.device).reshape(first.shape[0], 4, count)
    states, slots, parents = table[:, :3].long().unbind(dim=1)
    return TreeNodes(states, slots, parents, table[:, 3])


def _grow(first: list[float], pair: list[list[list[float]]], count: int, width: int | None) -> list[list[float]]:
    """States, slots, parents and log-probabilities of one tree, each `count` long."""
    nodes: list[tuple[float, int, int, int]] = []
    # (-log P of the path, slot, parent, candidate): tuples compare as nodes are ordered
    waiting: list[tuple[float, int, int, int]] = []

    def offer(slot: int, parent: int, path: float, chances: list[float]) -> None:
        children = [
            (-(path + chance), slot, parent, state) for state, chance in enumerate(chances) if chance > -torch.inf
        ]
        for child in sorted(children)[:width]:
            heapq.heappush(waiting, child)

    offer(0, 0, 0.0, first)
    while waiting and len(nodes) < count:
        node = heapq.heappop(waiting)
        nodes.append(node)
        negative, slot, _, state = node
        if slot < len(pair):
            offer(slot + 1, len(nodes), -negative, pair[slot][state])
    nodes += [(torch.inf, -1, -1, -1)] * (count - len(nodes))
    paths, slots, parents, states = zip(*nodes, strict=True)
    return [list(states), list(slots), list(parents), [-path for path in paths]]


def check_tree(first: Tensor, pair: Tensor, count: int, width: int | None) -> None:
    """Raise a `ValueError` unless the shapes are those of one lattice and `count` and `width` can be honoured."""
    blocks, candidates = first.shape if first.dim() == 2 else (-1, -1)
    if (
        blocks < 0
        or candidates < 1
        or pair.dim() != 4
        or pair.shape[0] != blocks
        or set(pair.shape[2:]) != {candidates}
    ):
        raise ValueError(
            "A tree is grown from log-probabilities first [blocks, K] and pair [blocks, slots - 1, K, K] with K of 1 "
            f"or more, got {list(first.shape)} and {list(pair.shape)}; bring them to these shapes."
        )
    if count < 1:
        raise ValueError(f"A tree of {count} nodes was asked for; ask for 1 or more.")
    if width not in (None, 1):
        raise ValueError(f"A tree's width is {width}, expected 1 for a chain or None for no limit.")
