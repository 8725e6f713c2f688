"""The dispatcher of top-K with log-normaliser: callers get the fastest kernel for their tensors."""

import torch
from torch import Tensor

from .choice import kernel_choice, wants_triton
from .reference import check_topk, confidence_features
from .reference import topk_logsumexp as defined
from .tiled import topk_logsumexp as tiled

MAX_K = 32  # of the Triton kernel


def topk_logsumexp(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.topk_logsumexp`: same arguments, results and errors, on the kernel that `choice` describes."""
    check_topk(logits, k)
    if wants_triton((logits,), _refusal(logits, k)):
        from .topk_triton import topk_logsumexp as launch

        return launch(logits, k)[:3]
    return defined(logits, k) if kernel_choice() == "reference" else tiled(logits, k)


def topk_features(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `topk_logsumexp`, then the confidence features of the `k` candidates, written by the same launch.

    Returns:
        `values [rows, k]`, `indices [rows, k]`, `logsumexp [rows]`, `features [rows, k, 5]` (fp32, in the order of
        `reference.confidence_features`).
    """
    check_topk(logits, k)
    if wants_triton((logits,), _refusal(logits, k)):
        from .topk_triton import topk_logsumexp as launch

        values, indices, normaliser, features = launch(logits, k, with_features=True)
        assert features is not None
        return values, indices, normaliser, features
    values, indices, normaliser = topk_logsumexp(logits, k)
    return values, indices, normaliser, confidence_features(values - normaliser[:, None])


def _refusal(logits: Tensor, k: int) -> str | None:
    """What of this call Triton's kernel cannot honour, or `None`."""
    if k > MAX_K:
        return f"its top-K keeps at most {MAX_K}, got k = {k}"
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its top-K reads fp32, bf16 or fp16 logits, got {logits.dtype}"
    return None
