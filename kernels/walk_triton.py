"""Scoring and walking a lattice in Triton: one launch, one program for each block and slot.

A program works out the K x K scores between its slot and the one before, on the tensor cores where the vectors are in
half precision. For the greedy walk that already settles what every possible predecessor would choose, and K choices of
4 bits are one 64-bit word. The block's last program to finish follows these words from the anchor. For the other rules
it first works them out from the scores, forwards (Viterbi) or backwards (the longest path).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .choice import interpreted
from .triton_shared import jit, next_power_of_2, ordered_key, tl, value_of_key

CHUNK = 128  # of the factor dimension at a time


@jit
def pack_choices(choices, K: tl.constexpr, K_PADDED: tl.constexpr):
    """Choices `[K_PADDED]` below 16 in one int64, that of candidate `k` in bits `4k` to `4k + 3`."""
    rank = tl.arange(0, K_PADDED)
    return tl.sum(tl.where(rank < K, choices.to(tl.int64) << (4 * rank).to(tl.int64), 0), axis=0)


@jit
def pair_scores(
    source,
    destination,
    stride_source,
    stride_destination,
    scale,
    eps,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Scores `[K_PADDED, K_PADDED]` (fp32) of K rows of `source` with K rows of `destination`; padding is 0."""
    rank = tl.arange(0, K_PADDED)
    row = rank[:, None].to(tl.int64)
    scores = tl.zeros([K_PADDED, K_PADDED], dtype=tl.float32)
    source_square = tl.zeros([K_PADDED], dtype=tl.float32)
    destination_square = tl.zeros([K_PADDED], dtype=tl.float32)
    for start in range(0, DIM, CHUNK):
        dim = start + tl.arange(0, CHUNK)
        inside = (rank < K)[:, None] & (dim < DIM)[None, :]
        a = tl.load(source + row * stride_source + dim[None, :], mask=inside, other=0.0)
        b = tl.load(destination + row * stride_destination + dim[None, :], mask=inside, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        scores = tl.dot(a, tl.trans(b), scores, input_precision="ieee")
        if NORMALISE:
            source_square += tl.sum(a.to(tl.float32) * a.to(tl.float32), axis=1)
            destination_square += tl.sum(b.to(tl.float32) * b.to(tl.float32), axis=1)
    if NORMALISE:
        # A length below eps counts as eps; NaN stays NaN.
        source_length = tl.sqrt(source_square)
        destination_length = tl.sqrt(destination_square)
        source_length = tl.where(source_length < eps, eps, source_length)
        destination_length = tl.where(destination_length < eps, eps, destination_length)
        scores = scores / source_length[:, None] / destination_length[None, :]
    return scale * scores


@jit
def score_and_walk_kernel(
    out,
    inp,
    anchor_out,
    candidates,
    log_probs,
    scores_out,
    words,
    arrived,
    tokens_out,
    picks_out,
    stride_out_block,
    stride_out_slot,
    stride_out_rank,
    stride_inp_block,
    stride_inp_slot,
    stride_inp_rank,
    stride_anchor_block,
    stride_candidates_block,
    stride_candidates_slot,
    stride_candidates_rank,
    stride_log_probs_block,
    stride_log_probs_slot,
    stride_log_probs_rank,
    scale,
    eps,
    SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALISE: tl.constexpr,
    WIDEN: tl.constexpr,
    EXACT: tl.constexpr,
    LONGEST: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr,
):
    """Slot 0 is scored from the anchor, whose vector stands for every predecessor: K equal rows of scores."""
    block = (tl.program_id(0) // SLOTS).to(tl.int64)
    slot = tl.program_id(0) % SLOTS
    place = block * SLOTS + slot
    rank = tl.arange(0, K_PADDED)
    padding = -(1 << 31)
    if SCALE_IN_MEMORY:
        scale = tl.load(scale)
    if RESIDUAL:
        own = log_probs + block * stride_log_probs_block + slot.to(tl.int64) * stride_log_probs_slot
        added = tl.load(own + rank.to(tl.int64) * stride_log_probs_rank, mask=rank < K, other=0.0)

    if slot == 0:
        source = anchor_out + block * stride_anchor_block
    else:
        source = out + block * stride_out_block + (slot - 1).to(tl.int64) * stride_out_slot
    scores = pair_scores(
        source,
        inp + block * stride_inp_block + slot.to(tl.int64) * stride_inp_slot,
        tl.where(slot == 0, 0, stride_out_rank),
        stride_inp_rank,
        scale,
        eps,
        K,
        K_PADDED,
        DIM,
        CHUNK,
        NORMALISE,
        WIDEN,
    )
    if RESIDUAL:
        scores += added[None, :]
    real = (rank < K)[:, None] & (rank < K)[None, :]
    cells = rank[:, None] * K + rank[None, :]
    if WITH_SCORES or EXACT or LONGEST:
        tl.store(scores_out + place * K * K + cells, scores, mask=real)
    if not (EXACT or LONGEST):
        keys = tl.where(real, ordered_key(scores), padding)
        best = tl.max(keys, axis=1)
        choices = tl.min(tl.where(keys == best[:, None], rank[None, :], K_PADDED), axis=1)
        tl.store(words + place, pack_choices(choices, K, K_PADDED))

    # All of this program's writes come before its sign of arrival, and what others wrote is read after it.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu")
    if before == SLOTS - 1:
        tl.store(arrived + block, 0)  # ready for the next launch on the same buffer
        steps = tl.arange(0, SLOTS_PADDED)
        picks = tl.zeros([SLOTS_PADDED], dtype=tl.int32)
        if EXACT:
            first = scores_out + block * SLOTS * K * K
            reached = tl.load(first + rank, mask=rank < K, other=0.0, cache_modifier=".cg")
            came_from = tl.zeros([SLOTS_PADDED], dtype=tl.int64)
            coming = tl.load(first + (min(1, SLOTS - 1) * K * K + cells), mask=real, other=0.0, cache_modifier=".cg")
            for step in range(1, SLOTS):
                pair = coming
                # The next scores are on their way while these are looked at.
                ahead = tl.minimum(step + 1, SLOTS - 1)
                coming = tl.load(first + (ahead * K * K + cells), mask=real, other=0.0, cache_modifier=".cg")
                sums = tl.where(real, ordered_key(reached[:, None] + pair), padding)
                best = tl.max(sums, axis=0)
                predecessor = tl.min(tl.where(sums == best[None, :], rank[:, None], K_PADDED), axis=0)
                came_from = tl.where(steps == step, pack_choices(predecessor, K, K_PADDED), came_from)
                reached = tl.sum(tl.where(rank[:, None] == rank[None, :], value_of_key(best)[None, :], 0.0), axis=1)
            keys = tl.where(rank < K, ordered_key(reached), padding)
            pick = tl.min(tl.where(keys == tl.max(keys, axis=0), rank, K_PADDED), axis=0)
            picks = tl.where(steps == SLOTS - 1, pick, picks)
            for back in range(1, SLOTS):
                word = tl.sum(tl.where(steps == SLOTS - back, came_from, 0), axis=0)
                pick = ((word >> (4 * pick).to(tl.int64)) & 15).to(tl.int32)
                picks = tl.where(steps == SLOTS - 1 - back, pick, picks)
        elif LONGEST:
            # From the back: how many slots are expected to be right behind each candidate. Slot 0's rows are all alike.
            best_followers = tl.zeros([SLOTS_PADDED], dtype=tl.int64)
            follows = tl.zeros([K_PADDED], dtype=tl.float32)
            for back in range(1, SLOTS + 1):
                step = SLOTS - back
                spot = (block * SLOTS + step) * K * K + cells
                pair = tl.load(scores_out + spot, mask=real, other=float("-inf"), cache_modifier=".cg")
                highest = tl.where(rank < K, tl.max(pair, axis=1), 0.0)
                odds = tl.exp(pair - highest[:, None])
                odds = odds / tl.where(rank < K, tl.sum(odds, axis=1), 1.0)[:, None]
                worth = tl.where(real, ordered_key(odds * (1.0 + follows[None, :])), padding)
                best = tl.max(worth, axis=1)
                choices = tl.min(tl.where(worth == best[:, None], rank[None, :], K_PADDED), axis=1)
                best_followers = tl.where(steps == step, pack_choices(choices, K, K_PADDED), best_followers)
                found = tl.where(rank < K, value_of_key(best), 0.0)
                follows = tl.sum(tl.where(rank[:, None] == rank[None, :], found[:, None], 0.0), axis=0)
            pick = 0
            for step in tl.static_range(SLOTS):
                word = tl.sum(tl.where(steps == step, best_followers, 0), axis=0)
                pick = ((word >> (4 * pick)) & 15).to(tl.int32)
                picks = tl.where(steps == step, pick, picks)
        else:
            pick = 0
            for step in tl.static_range(SLOTS):
                word = tl.load(words + (block * SLOTS + step), cache_modifier=".cg")
                pick = ((word >> (4 * pick)) & 15).to(tl.int32)
                picks = tl.where(steps == step, pick, picks)
        inside = steps < SLOTS
        chosen = candidates + block * stride_candidates_block + steps.to(tl.int64) * stride_candidates_slot
        tokens = tl.load(chosen + picks.to(tl.int64) * stride_candidates_rank, mask=inside, other=0)
        tl.store(tokens_out + block * SLOTS + steps, tokens, mask=inside)
        tl.store(picks_out + block * SLOTS + steps, picks.to(tl.int64), mask=inside)


def walk_settings(
    slots: int,
    count: int,
    dim: int,
    normalise: bool,
    rule: str,
    with_scores: bool,
    residual: bool = False,
    scale_in_memory: bool = False,
) -> dict[str, Any]:
    """Constants of `score_and_walk_kernel`: fixed, since autotuning would measure anew in every process."""
    return {
        "SLOTS": slots,
        "SLOTS_PADDED": next_power_of_2(slots),
        "K": count,
        "K_PADDED": max(16, next_power_of_2(count)),  # tl.dot wants 16 rows
        "DIM": dim,
        "CHUNK": min(CHUNK, max(16, next_power_of_2(dim))),
        "NORMALISE": normalise,
        "WIDEN": interpreted(),  # the interpreter's product takes the bits of bf16 for integers
        "EXACT": rule == "exact",
        "LONGEST": rule == "longest",
        "WITH_SCORES": with_scores,
        "RESIDUAL": residual,
        "SCALE_IN_MEMORY": scale_in_memory,
        "num_warps": 4,
    }


def arrival_counters(blocks: int, device: torch.device) -> Tensor:
    """What `walk` counts finished programs in; every launch leaves it at zero, so a captured graph keeps one."""
    return torch.zeros(blocks, dtype=torch.int32, device=device)


def _rows(vectors: Tensor) -> Tensor:
    """`vectors` with their last dimension side by side in memory."""
    return vectors if vectors.stride(-1) == 1 else vectors.contiguous()


def walk(
    out: Tensor,
    inp: Tensor,
    anchor_out: Tensor,
    candidates: Tensor,
    scale: float | Tensor,
    eps: float | None,
    rule: str,
    log_probs: Tensor | None,
    with_scores: bool,
    arrived: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`tokens [blocks, slots]`, `picks [blocks, slots]`, and on request scores `[blocks, slots, K, K]` (fp32).

    Arguments as in `reference.walk`. The scores of slot 0 are K equal rows. `arrived [blocks]` is from
    `arrival_counters` and must not serve two launches at one time.
    """
    blocks, slots, count, dim = out.shape
    device = out.device
    out, inp, anchor_out = (_rows(vectors.to(out.dtype)) for vectors in (out, inp, anchor_out))
    scale = scale.float() if isinstance(scale, Tensor) else float(scale)  # the former is never read by the host
    added = None if log_probs is None else log_probs.float()
    tokens = torch.empty(blocks, slots, dtype=candidates.dtype, device=device)
    picks = torch.empty(blocks, slots, dtype=torch.int64, device=device)
    wants_scores = with_scores or rule != "greedy"
    scores = torch.empty(blocks, slots, count, count, dtype=torch.float32, device=device) if wants_scores else None
    if not blocks:
        return tokens, picks, scores
    words = torch.empty_like(picks)
    if arrived is None:
        arrived = arrival_counters(blocks, device)
    with torch.cuda.device_of(out):  # Triton launches on the current device, wherever the tensors are
        score_and_walk_kernel[(blocks * slots,)](
            out,
            inp,
            anchor_out,
            candidates,
            words if added is None else added,
            words if scores is None else scores,
            words,
            arrived,
            tokens,
            picks,
            *out.stride()[:3],
            *inp.stride()[:3],
            anchor_out.stride(0),
            *candidates.stride(),
            *((0, 0, 0) if added is None else added.stride()),
            scale,
            float(eps or 0.0),
            **walk_settings(
                slots, count, dim, eps is not None, rule, with_scores, added is not None, isinstance(scale, Tensor)
            ),
        )
    return tokens, picks, scores
