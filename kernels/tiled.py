"""Exact top-K with log-normaliser in two stages: the maxima of vocabulary tiles first, then the best K tiles only.

A logit among the K best lies in a tile whose maximum is among the K best maxima, since every better tile holds a better
logit; the same argument with ids settles ties. No host synchronisation, any device.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reference import check_topk

TILE = 64


def ordered_topk(values: Tensor, k: int) -> Tensor:
    """Indices `[rows, k]` of the largest fp32 `values [rows, n]`, descending, the lower index first where they tie.

    `torch.topk` leaves the order of ties open; here each value and its index form one unique int64 key. NaN comes
    first whatever its sign, as it does in `torch.sort`.
    """
    bits = (values + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0, which must tie
    bits = bits.masked_fill(values.isnan(), 0x7FFFFFFF)  # a negative NaN would sort behind the padding
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # orders floats as signed integers do
    index = torch.arange(values.shape[-1], device=values.device)
    key = (ascending.long() << 32) | (0xFFFFFFFF - index)
    return 0xFFFFFFFF - (key.topk(k, dim=-1).values & 0xFFFFFFFF)


def topk_logsumexp(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The fast implementation of `reference.topk_logsumexp`: same arguments, results and errors."""
    check_topk(logits, k)
    values = logits.float()
    rows, vocab = values.shape
    normaliser = values.logsumexp(dim=-1)
    if vocab % TILE:
        values = pad(values, (0, TILE - vocab % TILE), value=-torch.inf)
    tiles = values.view(rows, values.shape[1] // TILE, TILE)
    # [rows, k]: the best tiles in ascending order of id, so that positions below keep the order of token ids
    best = ordered_topk(tiles.amax(dim=-1), min(k, tiles.shape[1])).sort(dim=-1).values
    kept = tiles.gather(1, best[..., None].expand(-1, -1, TILE)).flatten(1)
    place = ordered_topk(kept, k)
    indices = best.gather(1, place // TILE) * TILE + place % TILE
    return kept.gather(1, place), indices, normaliser
