"""Everything that touches the whole vocabulary, chunk by chunk, once.

With a frozen LM head `W` the gradient of a row's log-normaliser is the expectation of `W` under its own softmax. So one
pass over a chunk of rows yields normaliser, candidates and that gradient; the chunk's logits are dropped at once, and
memory does not grow with the number of blocks. Every other logit that a loss needs is a dot product with a few rows
of `W`. A head that corrects every logit with a matrix of its own has no such shortcut: its chunks are computed again
for the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..kernels.topk_logsumexp import topk_logsumexp

CHUNK_ROWS = 128


class _TopKNormaliser(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, k: int, active: Tensor, chunk: int
    ) -> Any:
        needs_grad = states.requires_grad
        normalisers, indices = [], []
        expectation = torch.zeros_like(states) if needs_grad else None
        for start in range(0, states.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = F.linear(states[rows], weight, bias).float()
            _, best, normaliser = topk_logsumexp(logits, k)
            normalisers.append(normaliser)
            indices.append(best)
            if expectation is not None:
                chosen = active[rows]
                if not bool(chosen.all()):  # else the logits themselves become probabilities, without a copy
                    logits, normaliser = logits[chosen], normaliser[chosen]
                probabilities = logits.sub_(normaliser[:, None]).exp_().to(weight.dtype)
                expectation[rows][chosen] = probabilities @ weight
        if needs_grad:
            ctx.save_for_backward(expectation)
        best_ids = torch.cat(indices)
        ctx.mark_non_differentiable(best_ids)
        return torch.cat(normalisers), best_ids

    @staticmethod
    def backward(ctx: Any, grad_normaliser: Tensor, _: Tensor) -> Any:
        (expectation,) = ctx.saved_tensors
        return (grad_normaliser[:, None] * expectation.float()).to(expectation.dtype), None, None, None, None, None


def topk_normaliser(
    states: Tensor, weight: Tensor, bias: Tensor | None, k: int, active: Tensor | None = None, chunk: int = CHUNK_ROWS
) -> tuple[Tensor, Tensor]:
    """Log-normaliser and top-K ids of `states @ weight.T + bias`, differentiable in `states`.

    Args:
        states: `[rows, d]`; weight: the frozen LM head `[vocab, d]`; bias: `[vocab]` or `None`.
        k: candidates a row; chunk: rows whose logits exist at one time.
        active: bool `[rows]`, false where the normaliser counts as a constant; `None`: all rows get a gradient.

    Returns:
        `logsumexp [rows]` (fp32) and `indices [rows, k]` (int64, as `kernels.reference.topk_logsumexp` orders them).
    """
    if active is None:
        active = torch.ones(states.shape[0], dtype=torch.bool, device=states.device)
    # Autocast would round the frozen weight anew for every chunk, and logits to less than the target's own precision.
    with torch.autocast(states.device.type, enabled=False):
        return _TopKNormaliser.apply(states.to(weight.dtype), weight, bias, k, active, chunk)


def logits_at(states: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Logits of chosen tokens only: `states [rows, d]`, `ids [rows, n]` to `[rows, n]` (fp32), differentiable."""
    logits = torch.einsum("rd,rnd->rn", states.to(weight.dtype), F.embedding(ids, weight)).float()
    return logits if bias is None else logits + bias[ids].float()


def corrected_terms(
    states: Tensor,
    codes: Tensor | None,
    corrections: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    teacher: Tensor | None = None,
    chunk: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of `states @ weight.T + bias + corrections(codes)`, differentiable in all but the LM head.

    Args:
        states: `[rows, d]`; weight, bias: the frozen LM head; labels: `[rows]` (int64).
        codes: `[rows, r]`, or `None` for logits without corrections; corrections: a module's method from them to
            `[rows, vocab]`.
        teacher: the target's states `[rows, d]`, or `None` for no distances.
        chunk: rows whose logits exist at one time.

    Returns:
        Cross-entropy of the labels `[rows]`, `|p - q|_1` to the target's distribution `[rows]` (zeros without one),
        both fp32, and the argmax `[rows]` (int64, the lower id where logits tie).
    """

    def terms(
        states: Tensor, codes: Tensor | None, labels: Tensor, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(states.to(weight.dtype), weight, bias).float()
        if codes is not None:
            logits = logits + corrections(codes).float()
        log_probs = logits.log_softmax(dim=-1)
        distance = log_probs.new_zeros(len(logits))
        if teacher is not None:
            wanted = F.linear(teacher.to(weight.dtype), weight, bias).float().softmax(dim=-1)
            distance = (log_probs.exp() - wanted).abs().sum(dim=-1)
        return -log_probs.gather(1, labels[:, None]).squeeze(1), distance, logits.argmax(dim=-1)

    parts = []
    for start in range(0, max(1, len(states)), chunk):
        rows = slice(start, start + chunk)
        given = [None if each is None else each[rows] for each in (states, codes, labels, teacher)]
        parts.append(checkpoint(terms, *given, use_reentrant=False))
    cross_entropy, distance, best = (torch.cat(column) for column in zip(*parts, strict=True))
    return cross_entropy, distance, best
