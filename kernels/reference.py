"""The definition of every kernel in this room, in plain torch: what fast implementations reproduce, ties included."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize


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


def confidence_features(log_probs: Tensor) -> Tensor:
    """Five scalars a candidate (Appendix A): log-prob, prob, gap to the top, rank in [0, 1], whether it is the top.

    `log_probs [..., K]`, descending in `K`, to `[..., K, 5]` of the same dtype.
    """
    count = log_probs.shape[-1]
    rank = torch.arange(count, device=log_probs.device, dtype=log_probs.dtype)
    return torch.stack(
        [
            log_probs,
            log_probs.exp(),
            log_probs - log_probs[..., :1],
            (rank / max(count - 1, 1)).expand_as(log_probs),
            (rank == 0).to(log_probs.dtype).expand_as(log_probs),
        ],
        dim=-1,
    )


def unit_vectors(vectors: Tensor, eps: float) -> Tensor:
    """`vectors [..., d_e]` over their length, in fp32; a length below `eps` counts as `eps`."""
    return normalize(vectors.float(), dim=-1, eps=eps)


def lattice_scores(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    scale: float | Tensor,
    eps: float | None = None,
    log_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Matching scores of all adjacent candidate pairs (paper Eq. 1), in fp32.

    Args:
        out, inp: vectors `[blocks, slots, K, d_e]`, any float dtype.
        anchor_out: `[blocks, d_e]`, the anchor's only out vector.
        scale: the cosine scale sigma, or one number `[1]` (fp32) on the vectors' device that also holds a gate.
        eps: bring vectors to unit length first, see `unit_vectors`; `None` takes them as they are.
        log_probs: `[blocks, slots, K]` (fp32), added to every score of a candidate with one before it.

    Returns:
        `first [blocks, K]` from the anchor to slot 1 and `pair [blocks, slots - 1, K, K]`, where
        `pair[n, s, a, b]` links candidate `a` of slot `s` to candidate `b` of slot `s + 1` (zero-based slots).
    """
    if eps is None:
        out, inp, anchor_out = out.float(), inp.float(), anchor_out.float()
    else:
        out, inp, anchor_out = unit_vectors(out, eps), unit_vectors(inp, eps), unit_vectors(anchor_out, eps)
    first = scale * torch.einsum("ne,nke->nk", anchor_out, inp[:, 0])
    pair = scale * out[:, :-1] @ inp[:, 1:].transpose(-1, -2)
    if log_probs is None:
        return first, pair
    return log_probs[:, 0] + first, log_probs[:, 1:, None] + pair


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


def longest_path(first: Tensor, pair: Tensor) -> Tensor:
    """The path of which the longest prefix is expected to be right, if a softmax over scores gives the odds.

    What follows candidate `a` of slot `s` is right for `V(s, a) = max_b P(b | a) (1 + V(s + 1, b))` slots on average.
    The greedy walk looks at `P` alone, and the exact path counts a slot however unlikely it is to be reached.
    Arguments and result as `greedy_walk`.
    """
    follows = torch.zeros_like(first)
    choices = []
    for odds in reversed(pair.softmax(dim=-1).unbind(dim=1)):
        follows, choice = (odds * (1 + follows[:, None])).max(dim=-1)
        choices.append(choice)
    picks = [(first.softmax(dim=-1) * (1 + follows)).argmax(dim=-1, keepdim=True)]
    for choice in reversed(choices):
        picks.append(choice.gather(1, picks[-1]))
    return torch.cat(picks, dim=1)


RULES = {"greedy": greedy_walk, "exact": exact_path, "longest": longest_path}


@dataclass
class Walked:
    """A committed path through a lattice.

    Attributes:
        tokens: `[blocks, slots]` (int64), the candidates at `picks`.
        picks: `[blocks, slots]` (int64).
        first, pair: the scores that were walked, as `lattice_scores` returns them.
    """

    tokens: Tensor
    picks: Tensor
    first: Tensor
    pair: Tensor


def check_lattice(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor = 1.0,
    log_probs: Tensor | None = None,
    rule: str = "greedy",
) -> None:
    """Raise a `ValueError` unless the shapes are those of one lattice that is not empty, and `rule` is known."""
    shape = out.shape
    fits = out.dim() == 4 and inp.shape == shape and anchor_out.shape == (shape[0], shape[-1])
    if not fits or candidates.shape != shape[:3] or 0 in shape[1:]:
        raise ValueError(
            "A lattice takes out and inp [blocks, slots, K, d_e], anchor_out [blocks, d_e] and candidates [blocks, "
            f"slots, K] without an empty dimension but blocks, got {list(shape)}, {list(inp.shape)}, "
            f"{list(anchor_out.shape)} and {list(candidates.shape)}; bring them to these shapes."
        )
    if isinstance(scale, Tensor) and scale.shape != (1,):
        raise ValueError(f"A scale is a number or a tensor [1], got {list(scale.shape)}; reshape it.")
    if log_probs is not None and log_probs.shape != candidates.shape:
        raise ValueError(
            f"A lattice's log_probs are [blocks, slots, K] as its candidates, got {list(log_probs.shape)} and "
            f"{list(candidates.shape)}; bring them to one shape."
        )
    if rule not in RULES:
        raise ValueError(f"A lattice is walked by one of {', '.join(RULES)}, got {rule!r}.")


def walk(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor,
    eps: float | None = None,
    rule: str = "greedy",
    log_probs: Tensor | None = None,
) -> Walked:
    """Score the lattice and commit one path (paper Eq. 1, 2).

    Args:
        out, inp, anchor_out, scale, eps, log_probs: as in `lattice_scores`.
        candidates: token ids `[blocks, slots, K]` (int64).
        rule: of `RULES`: the `greedy` walk (Eq. 8), the `exact` path (Eq. 12) or the `longest`.

    Raises:
        ValueError: the shapes do not fit, or there is no such rule.
    """
    check_lattice(out, inp, anchor_out, candidates, scale, log_probs, rule)
    first, pair = lattice_scores(out, inp, anchor_out, scale, eps, log_probs)
    picks = RULES[rule](first, pair)
    return Walked(candidates.gather(-1, picks[..., None]).squeeze(-1), picks, first, pair)


def score_and_walk(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor,
    eps: float | None = None,
    rule: str = "greedy",
    log_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens and picks of `walk`."""
    walked = walk(out, inp, anchor_out, candidates, scale, eps, rule, log_probs)
    return walked.tokens, walked.picks
