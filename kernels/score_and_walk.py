"""The dispatcher of scoring and walking lattices: callers get the fastest kernel for their tensors."""

from typing import Any

import torch
from torch import Tensor

from .choice import wants_triton
from .reference import RULES, Walked, check_lattice, greedy_walk, lattice_scores
from .reference import walk as defined

__all__ = ["RULES", "Walked", "greedy_walk", "lattice_scores", "score_and_walk", "walk"]

MAX_K = 16  # of the Triton kernel: the choices of 16 candidates, 4 bits each, fill one word of 64


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
    """As `reference.walk`: path and scores, on the kernel that `choice` describes."""
    given = (out, inp, anchor_out, candidates, scale, eps, rule, log_probs)
    launched = _launched(given, with_scores=True)
    if launched is None:
        return defined(*given)
    tokens, picks, scores = launched
    return Walked(tokens, picks, scores[:, 0, 0], scores[:, 1:])


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
    """As `reference.score_and_walk`: tokens and picks, without giving any scores."""
    given = (out, inp, anchor_out, candidates, scale, eps, rule, log_probs)
    launched = _launched(given, with_scores=False)
    if launched is None:
        walked = defined(*given)
        return walked.tokens, walked.picks
    return launched[:2]


def _launched(given: tuple[Any, ...], with_scores: bool) -> Any:
    """What Triton's kernel makes of the arguments of `walk`, or `None` where it is not to run."""
    out, inp, anchor_out, candidates, scale, eps, rule, log_probs = given
    check_lattice(out, inp, anchor_out, candidates, scale, log_probs, rule)
    vectors = [tensor for tensor in (out, inp, anchor_out, scale, log_probs) if isinstance(tensor, Tensor)]
    if not wants_triton(tuple(vectors), _refusal(out)):
        return None
    from .walk_triton import walk as launch

    return launch(out, inp, anchor_out, candidates, scale, eps, rule, log_probs, with_scores)


def _refusal(out: Tensor) -> str | None:
    """What of this call Triton's kernel cannot honour, or `None`."""
    if out.shape[2] > MAX_K:
        return f"its walk takes at most {MAX_K} candidates a slot, got {out.shape[2]}"
    if out.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its walk reads fp32, bf16 or fp16 vectors, got {out.dtype}"
    return None
