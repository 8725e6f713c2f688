"""Trees over candidate lattices: callers import from here and get the fastest implementation for their tensors.

Best first is sequential, but its result is not: the `M` likeliest prefixes of all lengths are among the `M` likeliest
of each length, and those continue the `M` likeliest of one slot less. So the batched version widens all slots in turn
and then takes the best of everything, in operations of fixed shape that never wait for the device.
"""

import torch
from torch import Tensor

from .tree_reference import TreeNodes, check_tree, child_log_probs
from .tree_reference import lattice_tree as defined

__all__ = ["TreeNodes", "child_log_probs", "join_text", "lattice_tree"]


def lattice_tree(first: Tensor, pair: Tensor, count: int, width: int | None = None) -> TreeNodes:
    """As `tree_reference.lattice_tree`; batched on devices where leaving them costs more than the work."""
    if first.device.type == "cpu":
        return defined(first, pair, count, width)
    return batched_lattice_tree(first, pair, count, width)


def batched_lattice_tree(first: Tensor, pair: Tensor, count: int, width: int | None = None) -> TreeNodes:
    """As `tree_reference.lattice_tree`: same arguments, results and errors, without host synchronisation."""
    check_tree(first, pair, count, width)
    candidates = first.shape[1]
    first, pair = _only_numbers(first), _only_numbers(pair)
    # Of the likeliest prefixes that end in a slot, likeliest first: candidate, place of the parent among the slot's
    # before, log P of the path; [N, beam] each. Sorts are stable: equal ones keep the order of parents and candidates.
    states, paths = _descending(first, count if width is None else width)
    levels = [(states, torch.zeros_like(states), paths)]
    for step in pair.unbind(dim=1):
        chances = step.gather(1, states[..., None].expand(-1, -1, candidates))  # [N, beam, K]
        children = paths[..., None] + chances
        if width is not None:
            likeliest = torch.zeros_like(children, dtype=torch.bool)
            likeliest.scatter_(2, children.argmax(dim=-1, keepdim=True), True)
            children = children.masked_fill(~likeliest, -torch.inf)
        flat, paths = _descending(children.flatten(1), count)
        origins, states = flat // candidates, flat % candidates
        levels.append((states, origins, paths))
    return _merge(levels, count)


def _descending(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices and values `[N, ≤ count]` of the largest of `values [N, n]`, descending; of equals the lower first."""
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    return order[:, :count], ordered[:, :count]


def _merge(levels: list[tuple[Tensor, Tensor, Tensor]], count: int) -> TreeNodes:
    """The likeliest `count` nodes of all levels; each level holds states, origins and paths `[N, beam]`."""
    paths = torch.cat([level[2] for level in levels], dim=1)
    states = torch.cat([level[0] for level in levels], dim=1)
    offsets = [0]
    for level in levels:
        offsets.append(offsets[-1] + level[0].shape[1])
    slots = torch.cat([torch.full_like(level[0], slot) for slot, level in enumerate(levels)], dim=1)
    # The place of each node's parent in the concatenation; -1 for the anchor.
    above = torch.cat([levels[0][1] - 1, *(level[1] + offsets[slot] for slot, level in enumerate(levels[1:]))], dim=1)
    kept, order = paths.sort(dim=-1, descending=True, stable=True)
    numbers = torch.arange(1, paths.shape[1] + 1, device=paths.device).expand_as(order)
    numbers = torch.zeros_like(order).scatter_(1, order, numbers)  # of each node in its tree
    parents = torch.where(above < 0, 0, numbers.gather(1, above.clamp(min=0)))
    order, kept = order[:, :count], kept[:, :count]
    absent = kept == -torch.inf
    chosen = [each.gather(1, order).masked_fill(absent, -1) for each in (states, slots, parents)]
    short = count - order.shape[1]
    if short > 0:
        chosen = [torch.nn.functional.pad(each, (0, short), value=-1) for each in chosen]
        kept = torch.nn.functional.pad(kept, (0, short), value=-torch.inf)
    return TreeNodes(chosen[0], chosen[1], chosen[2], kept)


def _only_numbers(log_probs: Tensor) -> Tensor:
    """In fp64, with `-inf` for NaN."""
    return log_probs.double().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=0.0)


def join_text(
    first: Tensor, pair: Tensor, marginals: Tensor, candidates: Tensor, text: Tensor, chances: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A lattice with one more path through it: how the text went on where it stood like this before.

    The path is the last candidate of every slot. A token of it that is a candidate anyway, where the path comes by,
    stands for both and takes the larger probability; what follows it is that candidate's. Behind a token that is none
    the slot's marginals go on.

    Args:
        first, pair: `log P` as `child_log_probs` gives it, `[N, K]` and `[N, S - 1, K, K]`.
        marginals: the drafter's log-probabilities, `[N, S, K]`; candidates: `[N, S, K]` (int64).
        text: the text's tokens, `[N, D]` (int64) with `D >= S`, -1 behind their end.
        chances: `log P` of each to be right if the one before it was, `[N, D]`.

    Returns:
        `tokens [N, D, K + 1]` (int64), `first [N, K + 1]`, `pair [N, D - 1, K + 1, K + 1]`, and `shared [N, D]` (bool):
        whether the text's token is one of the candidates.
    """
    blocks, slots, count = candidates.shape
    deep = text.shape[1]
    chances = chances.to(first).masked_fill(text < 0, -torch.inf)
    same = candidates == text[:, :slots, None]  # [N, S, K]
    tokens = candidates.new_zeros(blocks, deep, count + 1)
    tokens[:, :slots, :count] = candidates
    tokens[..., count] = text.clamp(min=0)

    joined_first = _with_path(first, same[:, 0], chances[:, 0])
    joined = first.new_full((blocks, deep - 1, count + 1, count + 1), -torch.inf)
    joined[:, : slots - 1, :count, :count] = pair
    # What follows the path's token: the row of the candidate it is, else the marginals.
    place = same[:, :-1].long().argmax(dim=-1)[..., None, None].expand(-1, -1, 1, count)
    follows = torch.where(same[:, :-1].any(dim=-1)[..., None], pair.gather(2, place).squeeze(2), marginals[:, 1:])
    joined[:, : slots - 1, count] = _with_path(follows, same[:, 1:], chances[:, 1:slots])
    joined[:, slots - 1 :, count, count] = chances[:, slots:]
    shared = torch.nn.functional.pad(same.any(dim=-1), (0, deep - slots))
    return tokens, joined_first, joined, shared


def _with_path(chances: Tensor, same: Tensor, path: Tensor) -> Tensor:
    """`[..., K + 1]` from `chances [..., K]` and `path [...]`: the path's entry takes over those that are `same`."""
    shared = chances.masked_fill(~same, -torch.inf).amax(dim=-1)
    own = torch.where(path == -torch.inf, path, torch.maximum(shared, path))  # without a path nothing is taken over
    off = chances.masked_fill(same & (path != -torch.inf)[..., None], -torch.inf)
    return torch.cat([off, own[..., None]], dim=-1)
