"""Top-K with log-normaliser in Triton: the logits are read once, by as many programs as keep the memory busy.

Stage 1 reduces each tile of a row to its maximum and its sum of exponentials. Stage 2, one program a row, combines the
sums, picks the K tiles with the best maxima, and sorts out the K best logits among these alone. A logit of the top K
cannot lie elsewhere: every better tile holds a better logit, and where maxima tie the lower tile holds the lower id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_shared import jit, next_power_of_2, ordered_key, tl, triton, value_of_key

# Fixed launch settings: autotuning would measure anew in every process.
TILE = 256  # one warp reads it at 16 bytes a lane in half precision
TILES_A_PROGRAM = 16


@jit
def tile_maxima(
    logits,
    maxima,
    sums,
    stride_row,
    stride_column,
    vocab,
    tiles,
    programs_a_row,
    TILE: tl.constexpr,
    TILES_A_PROGRAM: tl.constexpr,
):
    """Maximum and sum of exponentials relative to it of `TILES_A_PROGRAM` tiles of one row.

    A maximum is NaN where its tile holds one. An infinite maximum leaves the sum relative to 0.
    """
    # Rows times vocabulary pass 2^31 in a training batch, and rows may lie anywhere: 64-bit offsets.
    row = (tl.program_id(0) // programs_a_row).to(tl.int64)
    tile = (tl.program_id(0) % programs_a_row) * TILES_A_PROGRAM + tl.arange(0, TILES_A_PROGRAM)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    places = logits + row * stride_row + column.to(tl.int64) * stride_column
    values = tl.load(places, mask=column < vocab, other=float("-inf")).to(tl.float32)

    highest = tl.max(tl.where(values == values, values, float("-inf")), axis=1)
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    total = tl.sum(tl.exp(values - base[:, None]), axis=1)
    highest = tl.where(total != total, total, highest)

    place = row * tiles + tile
    tl.store(maxima + place, highest, mask=tile < tiles)
    tl.store(sums + place, total, mask=tile < tiles)


@jit
def merge_tiles(
    logits,
    maxima,
    sums,
    values_out,
    indices_out,
    normalisers_out,
    features_out,
    stride_row,
    stride_column,
    vocab,
    tiles,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    WITH_FEATURES: tl.constexpr,
):
    """One row's K best logits, ids, log-normaliser and, on request, confidence features from its tiles."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_PADDED)
    real = tile < tiles
    highest = tl.load(maxima + row * tiles + tile, mask=real, other=float("-inf"))
    total = tl.load(sums + row * tiles + tile, mask=real, other=0.0)

    # NaN need not survive a maximum, but it is in its tile's sum as well.
    top = tl.max(tl.where(highest == highest, highest, float("-inf")), axis=0)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    # The sum of an infinite tile is relative to 0: 0 where all is -inf, inf where anything is +inf.
    shift = tl.where(highest == float("inf"), 0.0, highest - base)
    normaliser = tl.log(tl.sum(total * tl.exp(shift), axis=0)) + base

    # A key is unique: the value's order above, the complement of the id below, so that ties go to the lower id.
    low = (1 << 32) - 1
    nothing = -(1 << 63)
    rank = tl.arange(0, K_PADDED)
    keys = (ordered_key(highest).to(tl.int64) << 32) | (low - tile.to(tl.int64))
    keys = tl.where(real, keys, nothing)
    chosen = tl.full([K_PADDED], 0, tl.int32) + tiles
    for k in range(K):
        best = tl.max(keys, axis=0)
        found = tl.where(best == nothing, tiles, (low - (best & low)).to(tl.int32))
        chosen = tl.where(rank == k, found, chosen)
        keys = tl.where(keys == best, nothing, keys)

    column = chosen[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = (column < vocab) & (chosen < tiles)[:, None]
    places = logits + row * stride_row + column.to(tl.int64) * stride_column
    candidates = tl.load(places, mask=inside, other=float("-inf")).to(tl.float32)
    keys = (ordered_key(candidates).to(tl.int64) << 32) | (low - column.to(tl.int64))
    keys = tl.reshape(tl.where(inside, keys, nothing), [K_PADDED * TILE])
    winners = tl.full([K_PADDED], nothing, tl.int64)
    for k in range(K):
        best = tl.max(keys, axis=0)
        winners = tl.where(rank == k, best, winners)
        keys = tl.where(keys == best, nothing, keys)

    values = value_of_key((winners >> 32).to(tl.int32))
    written = rank < K
    tl.store(values_out + row * K + rank, values, mask=written)
    tl.store(indices_out + row * K + rank, low - (winners & low), mask=written)
    tl.store(normalisers_out + row, normaliser)
    if WITH_FEATURES:
        log_prob = values - normaliser
        top_log_prob = tl.max(tl.where(rank == 0, values, float("-inf")), axis=0) - normaliser
        feature = features_out + (row * K + rank) * 5
        tl.store(feature, log_prob, mask=written)
        tl.store(feature + 1, tl.exp(log_prob), mask=written)
        tl.store(feature + 2, log_prob - top_log_prob, mask=written)
        tl.store(feature + 3, rank.to(tl.float32) / max(K - 1, 1), mask=written)
        tl.store(feature + 4, tl.where(rank == 0, 1.0, 0.0), mask=written)


def tile_settings() -> dict[str, int]:
    """Constants of `tile_maxima`: none depends on the vocabulary."""
    return {"TILE": TILE, "TILES_A_PROGRAM": TILES_A_PROGRAM, "num_warps": 4}


def merge_settings(vocab: int, k: int, with_features: bool) -> dict[str, int]:
    """Constants of `merge_tiles`."""
    return {
        "K": k,
        "K_PADDED": next_power_of_2(k),
        "TILES_PADDED": next_power_of_2(-(-vocab // TILE)),
        "TILE": TILE,
        "WITH_FEATURES": with_features,
        "num_warps": 4 if k <= 16 else 8,
    }


def topk_logsumexp(logits: Tensor, k: int, with_features: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Values, ids and log-normaliser as in `reference.topk_logsumexp`, and the features `[rows, k, 5]` on request."""
    rows, vocab = logits.shape
    device = logits.device
    tiles = triton.cdiv(vocab, TILE)
    programs_a_row = triton.cdiv(tiles, TILES_A_PROGRAM)
    maxima, sums = torch.empty(2, rows, tiles, dtype=torch.float32, device=device)
    values = torch.empty(rows, k, dtype=torch.float32, device=device)
    indices = torch.empty(rows, k, dtype=torch.int64, device=device)
    normalisers = torch.empty(rows, dtype=torch.float32, device=device)
    features = torch.empty(rows, k, 5, dtype=torch.float32, device=device) if with_features else None
    if not rows:
        return values, indices, normalisers, features
    with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
        tile_maxima[(rows * programs_a_row,)](
            logits,
            maxima,
            sums,
            logits.stride(0),
            logits.stride(1),
            vocab,
            tiles,
            programs_a_row,
            **tile_settings(),
        )
        merge_tiles[(rows,)](
            logits,
            maxima,
            sums,
            values,
            indices,
            normalisers,
            values if features is None else features,
            logits.stride(0),
            logits.stride(1),
            vocab,
            tiles,
            **merge_settings(vocab, k, with_features),
        )
    return values, indices, normalisers, features
