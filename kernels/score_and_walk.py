"""One door to scoring and walking lattices: callers import from here and get the fastest kernel for their tensors."""

import torch
from torch import Tensor

from .choice import wants_triton
from .reference import Walked, check_lattice, greedy_walk, lattice_scores
from .reference import walk as defined

__all__ = ["Walked", "greedy_walk", "lattice_scores", "score_and_decode_exact", "score_and_walk", "walk"]

MAX_K = 16  # of the Triton kernel: the choices of 16 candidates, 4 bits each, fill one word of 64


def walk(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor,
    eps: float | None = None,
    exact: bool = False,
    log_probs: Tensor | None = None,
) -> Walked:
    """As `reference.walk`: path and scores, on the kernel that `choice` describes."""
    check_lattice(out, inp, anchor_out, candidates, scale, log_probs)
    if wants_triton(_tensors(out, inp, anchor_out, scale, log_probs), _refusal(out)):
        from .walk_triton import walk as launch

        tokens, picks, scores = launch(out, inp, anchor_out, candidates, scale, eps, exact, True, log_probs)
        assert scores is not None
        return Walked(tokens, picks, scores[:, 0, 0], scores[:, 1:])
    return defined(out, inp, anchor_out, candidates, scale, eps, exact, log_probs)


def score_and_walk(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor,
    eps: float | None = None,
    log_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.score_and_walk`: tokens and picks of the greedy walk, without writing any scores."""
    return _path(out, inp, anchor_out, candidates, scale, eps, False, log_probs)


def score_and_decode_exact(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor,
    eps: float | None = None,
    log_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.score_and_decode_exact`: tokens and picks of the best path."""
    return _path(out, inp, anchor_out, candidates, scale, eps, True, log_probs)


def _path(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor,
    eps: float | None,
    exact: bool,
    log_probs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_lattice(out, inp, anchor_out, candidates, scale, log_probs)
    if wants_triton(_tensors(out, inp, anchor_out, scale, log_probs), _refusal(out)):
        from .walk_triton import walk as launch

        return launch(out, inp, anchor_out, candidates, scale, eps, exact, False, log_probs)[:2]
    walked = defined(out, inp, anchor_out, candidates, scale, eps, exact, log_probs)
    return walked.tokens, walked.picks


def _tensors(*arguments: float | Tensor | None) -> tuple[Tensor, ...]:
    return tuple(argument for argument in arguments if isinstance(argument, Tensor))


def _refusal(out: Tensor) -> str | None:
    """What of this call Triton's kernel cannot honour, or `None`."""
    if out.shape[2] > MAX_K:
        return f"its walk takes at most {MAX_K} candidates a slot, got {out.shape[2]}"
    if out.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its walk reads fp32, bf16 or fp16 vectors, got {out.dtype}"
    return None
