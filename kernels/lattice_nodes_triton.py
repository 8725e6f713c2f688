"""What surrounds the matrix products of the lattice network, in Triton: node sums, residual sums, norms, features.

A program holds whole rows, so that a row's sum, its norm and what both leave behind are one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_shared import jit, next_power_of_2, silu, tl

FEATURES = 5
FEW = 512  # rows of confidence features; up to these each gets a program of its own


@jit
def store_norm(total, weight, normed, column, inside, eps, WIDTH: tl.constexpr):
    """`rms_norm` of one row `total` (fp32), rounded before the weight comes in, as in Qwen3."""
    mean = tl.sum(total * total, axis=0) / WIDTH
    shape = normed.dtype.element_ty
    unit = (total * tl.rsqrt(mean + eps)).to(shape).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + column, (unit * scale).to(shape), mask=inside)


@jit
def node_sum_kernel(
    tokens,
    states,
    confidence,
    slot_table,
    rank_table,
    weight,
    nodes_out,
    normed_out,
    slots,
    eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    """One node and its norm."""
    node = tl.program_id(0).to(tl.int64)
    place = node // COUNT  # of the slot among all blocks' slots
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    total = tl.load(tokens + node * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(states + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(confidence + node * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(slot_table + place % slots * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(rank_table + node % COUNT * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(nodes_out.dtype.element_ty)
    tl.store(nodes_out + node * WIDTH + column, rounded, mask=inside)
    store_norm(rounded.to(tl.float32), weight, normed_out + node * WIDTH, column, inside, eps, WIDTH)


@jit
def norm_kernel(
    rows,
    update,
    valid,
    weight,
    total_out,
    normed_out,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ADD: tl.constexpr,
    MASK: tl.constexpr,
):
    """One row's norm, after `update` is added to it (`ADD`) or after it is zeroed where it is not `valid` (`MASK`)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    total = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(update + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(total_out.dtype.element_ty)
        tl.store(total_out + row * WIDTH + column, rounded, mask=inside)
        total = rounded.to(tl.float32)
    if MASK:
        total *= tl.load(valid + row).to(tl.float32)
    store_norm(total, weight, normed_out + row * WIDTH, column, inside, eps, WIDTH)


@jit
def confidence_hidden_kernel(
    features,
    norm_weight,
    norm_bias,
    weight,
    bias,
    out,
    rows,
    norm_eps,
    FEATURES: tl.constexpr,
    FEATURES_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    """Layer norm, first layer and SiLU of `ROWS` rows, among which the layer's weights are read once."""
    half = out.dtype.element_ty
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    feature = tl.arange(0, FEATURES_PADDED)
    known = feature < FEATURES
    scale = tl.load(norm_weight + feature, mask=known, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + feature, mask=known, other=0.0).to(tl.float32)
    offsets = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for step in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        wanted = feature < tl.where(row < rows, FEATURES, 0)
        values = tl.load(features + row * FEATURES + feature, mask=wanted, other=0.0).to(half).to(tl.float32)
        centred = tl.where(known, values - tl.sum(values, axis=0) / FEATURES, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / FEATURES + norm_eps) * scale + shift
        total = offsets
        for number in tl.static_range(FEATURES):
            heights = tl.load(weight + column * FEATURES + number, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(tl.where(feature == number, normed, 0.0), axis=0) * heights
        tl.store(out + row * WIDTH + column, silu(total).to(half), mask=column < tl.where(row < rows, WIDTH, 0))


def row_settings(width: int) -> dict[str, int]:
    """Constants of a kernel that holds a row of `width`."""
    padded = next_power_of_2(width)
    return {"WIDTH": width, "WIDTH_PADDED": padded, "num_warps": min(8, max(1, padded // 256))}


def confidence_settings(rows: int, width: int) -> dict[str, int]:
    """Constants of `confidence_hidden_kernel`."""
    sizes = {"FEATURES": FEATURES, "FEATURES_PADDED": next_power_of_2(FEATURES), "ROWS": 1 if rows <= FEW else 8}
    return sizes | row_settings(width)


def node_sum(
    tokens: Tensor,
    states: Tensor,
    confidence: Tensor,
    slot_table: Tensor,
    rank_table: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`lattice_reference.node_sum` and its `rms_norm` with `weight [w]`, both `[N, L, w]`; `weight`'s dtype for all."""
    blocks, slots, count, width = confidence.shape
    nodes = torch.empty(blocks, slots * count, width, dtype=weight.dtype, device=weight.device)
    normed = torch.empty_like(nodes)
    if not nodes.numel():
        return nodes, normed
    node_sum_kernel[(blocks * slots * count,)](
        tokens.contiguous(),
        states.contiguous(),
        confidence.contiguous(),
        slot_table.contiguous(),
        rank_table.contiguous(),
        weight,
        nodes,
        normed,
        slots,
        eps,
        COUNT=count,
        **row_settings(width),
    )
    return nodes, normed


def add_norm(rows: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `lattice_reference.add_norm`."""
    rows, update = rows.contiguous(), update.contiguous()
    total, normed = torch.empty_like(rows), torch.empty_like(rows)
    _norm(rows, update, None, weight, total, normed, eps)
    return total, normed


def masked_norm(rows: Tensor, valid: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """As `lattice_reference.masked_norm`."""
    rows = rows.contiguous()
    normed = torch.empty_like(rows)
    _norm(rows, None, valid, weight, normed, normed, eps)
    return normed


def _norm(
    rows: Tensor,
    update: Tensor | None,
    valid: Tensor | None,
    weight: Tensor,
    total: Tensor,
    normed: Tensor,
    eps: float,
) -> None:
    width = rows.shape[-1]
    if not rows.numel():
        return
    norm_kernel[(rows.numel() // width,)](
        rows,
        rows if update is None else update,
        rows if valid is None else valid.contiguous(),
        weight,
        total,
        normed,
        eps,
        ADD=update is not None,
        MASK=valid is not None,
        **row_settings(width),
    )


def confidence_hidden(
    features: Tensor, norm_weight: Tensor, norm_bias: Tensor, norm_eps: float, weight: Tensor, bias: Tensor
) -> Tensor:
    """As `lattice_reference.confidence_hidden`."""
    width, rows = weight.shape[0], features.numel() // FEATURES
    out = torch.empty(*features.shape[:-1], width, dtype=weight.dtype, device=weight.device)
    if not out.numel():
        return out
    settings = confidence_settings(rows, width)
    confidence_hidden_kernel[(-(-rows // settings["ROWS"]),)](
        features.contiguous(),
        norm_weight,
        norm_bias,
        weight.contiguous(),
        bias,
        out,
        rows,
        norm_eps,
        **settings,
    )
    return out
