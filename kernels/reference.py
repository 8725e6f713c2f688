"""The definition of every kernel in this room, in plain torch: what the fast twins must reproduce, ties included."""

import torch
from torch import Tensor


def topk_logsumexp(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` largest logits of each row with the row's log-normaliser.

    Args:
        logits: `[rows, vocab]`, any float dtype; compared and summed in fp32.
        k: how many to keep, `1 <= k <= vocab`.

    Returns:
        `values [rows, k]` (fp32, descending), `indices [rows, k]` (int64, the lower id first where values tie) and
        `logsumexp [rows]` (fp32) over the full vocabulary.

    Raises:
        ValueError: if `k` does not fit the vocabulary.
    """
    check_topk(logits, k)
    values = logits.float()
    ordered, indices = values.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :k].contiguous(), indices[:, :k].contiguous(), values.logsumexp(dim=-1)


def check_topk(logits: Tensor, k: int) -> None:
    """Raise a `ValueError` unless `logits` is `[rows, vocab]` and `1 <= k <= vocab`."""
    if logits.dim() != 2:
        raise ValueError(
            f"topk_logsumexp takes logits of shape [rows, vocab], got {list(logits.shape)}; flatten first."
        )
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"Asked for the top {k} of {logits.shape[-1]} logits; choose k between 1 and the vocabulary.")


def lattice_scores(out: Tensor, inp: Tensor, anchor_out: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Matching scores of all adjacent candidate pairs (paper Eq. 1), in fp32.

    Args:
        out, inp: unit vectors `[blocks, slots, K, d_e]`.
        anchor_out: unit vectors `[blocks, d_e]`, the anchor's only out vector.
        scale: the fixed cosine scale sigma.

    Returns:
        `first [blocks, K]` from the anchor to slot 1 and `pair [blocks, slots - 1, K, K]`, where
        `pair[n, s, a, b]` links candidate `a` of slot `s` to candidate `b` of slot `s + 1` (zero-based slots).
    """
    out, inp, anchor_out = out.float(), inp.float(), anchor_out.float()
    first = scale * torch.einsum("ne,nke->nk", anchor_out, inp[:, 0])
    pair = scale * out[:, :-1] @ inp[:, 1:].transpose(-1, -2)
    return first, pair


def greedy_walk(first: Tensor, pair: Tensor) -> Tensor:
    """Commit each slot to the candidate that best matches its committed predecessor (paper Eq. 8).

    Args:
        first: `[blocks, K]`; pair: `[blocks, slots - 1, K, K]`, as `lattice_scores` returns them.

    Returns:
        `picks [blocks, slots]` (int64), the lowest index where scores tie.
    """
    successor = pair.argmax(dim=-1)  # [blocks, slots - 1, K]: the choice at every slot for every possible predecessor
    picks = [first.argmax(dim=-1, keepdim=True)]
    for slot in range(pair.shape[1]):
        picks.append(successor[:, slot].gather(1, picks[-1]))
    return torch.cat(picks, dim=1)


def exact_path(first: Tensor, pair: Tensor) -> Tensor:
    """The path with the highest summed score (Viterbi, paper Eq. 12); arguments and result as `greedy_walk`."""
    best = first  # [blocks, K]: the best sum of any path that ends in each candidate
    came_from = []
    for slot in range(pair.shape[1]):
        best, predecessor = (best[:, :, None] + pair[:, slot]).max(dim=1)
        came_from.append(predecessor)
    picks = [best.argmax(dim=-1, keepdim=True)]
    for predecessor in reversed(came_from):
        picks.append(predecessor.gather(1, picks[-1]))
    return torch.cat(picks[::-1], dim=1)


def score_and_walk(
    out: Tensor, inp: Tensor, anchor_out: Tensor, candidates: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Score the lattice and walk it greedily (paper Eq. 1, 2, 8).

    Args:
        out, inp: unit vectors `[blocks, slots, K, d_e]`; anchor_out: `[blocks, d_e]`.
        candidates: token ids `[blocks, slots, K]` (int64).
        scale: the cosine scale sigma.

    Returns:
        `tokens [blocks, slots]` and `picks [blocks, slots]` (int64); `tokens` are `candidates` at `picks`.
    """
    picks = greedy_walk(*lattice_scores(out, inp, anchor_out, scale))
    return candidates.gather(-1, picks[..., None]).squeeze(-1), picks


def score_and_decode_exact(
    out: Tensor, inp: Tensor, anchor_out: Tensor, candidates: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """As `score_and_walk`, with the globally best path (paper Eq. 12) instead of the greedy one."""
    picks = exact_path(*lattice_scores(out, inp, anchor_out, scale))
    return candidates.gather(-1, picks[..., None]).squeeze(-1), picks
