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
    scale: float,
    eps: float | None = None,
    exact: bool = False,
) -> Walked:
    """As `reference.walk`: path and scores, on the kernel that `choice` describes."""
    check_lattice(out, inp, anchor_out, candidates)
    if wants_triton((out, inp, anchor_out), _refusal(out)):
        from .walk_triton import walk as launch

        tokens, picks, scores = launch(out, inp, anchor_out, candidates, scale, eps, exact, with_scores=True)
        assert scores is not None
        return Walked(tokens, picks, scores[:, 0, 0], scores[:, 1:])
    return defined(out, inp, anchor_out, candidates, scale, eps, exact)


def score_and_walk(
    out: Tensor, inp: Tensor, anchor_out: Tensor, candidates: Tensor, scale: float, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.score_and_walk`: tokens and picks of the greedy walk, without writing any scores."""
    return _path(out, inp, anchor_out, candidates, scale, eps, exact=False)


def score_and_decode_exact(
    out: Tensor, inp: Tensor, anchor_out: Tensor, candidates: Tensor, scale: float, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.score_and_decode_exact`: tokens and picks of the best path."""
    return _path(out, inp, anchor_out, candidates, scale, eps, exact=True)


def _path(
    out: Tensor, inp: Tensor, anchor_out: Tensor, candidates: Tensor, scale: float, eps: float | None, exact: bool
) -> tuple[Tensor, Tensor]:
    check_lattice(out, inp, anchor_out, candidates)
    if wants_triton((out, inp, anchor_out), _refusal(out)):
        from .walk_triton import walk as launch

        return launch(out, inp, anchor_out, candidates, scale, eps, exact, with_scores=False)[:2]
    walked = defined(out, inp, anchor_out, candidates, scale, eps, exact)
    return walked.tokens, walked.picks


def _refusal(out: Tensor) -> str | None:
    """What of this call Triton's kernel cannot honour, or `None`."""
    if out.shape[2] > MAX_K:
        return f"its walk takes at most {MAX_K} candidates a slot, got {out.shape[2]}"
    if out.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its walk reads fp32, bf16 or fp16 vectors, got {out.dtype}"
    return None
