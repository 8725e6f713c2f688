"""Attention over the lattice in Triton: one program for each block, head and tile of queries.

A bias depends on two slots alone, so it is looked up in the tables as the scores come up: no `[heads, L, L]` is ever
written or read, and queries, keys and values are taken where the packed projection left them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .choice import interpreted
from .triton_shared import jit, next_power_of_2, tl, triton

FEW = 32  # blocks times heads; up to these, small tiles make programs for more of the card


@jit
def lattice_attention_kernel(
    packed,
    relative,
    same,
    out,
    stride_block,
    stride_row,
    length,
    query_tiles,
    scale,
    HEADS: tl.constexpr,
    BIASES: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Softmax and sums are in fp32, over `KEYS` keys at a time; what was summed so far is rescaled as maxima rise."""
    program = tl.program_id(0)
    tile = program % query_tiles
    head = (program // query_tiles % HEADS).to(tl.int64)
    block = (program // query_tiles // HEADS).to(tl.int64)
    width = HEADS * DIM
    query = tile * QUERIES + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_PADDED)
    inside = (dim < DIM)[None, :]
    asked = (query < length)[:, None]

    start = packed + block * stride_block + head * DIM
    queries = tl.load(start + (query[:, None] * stride_row + dim[None, :]), mask=asked & inside, other=0.0)
    # A query's biases are those of its slot: a row of ones and zeros times the table of all slots picks them out.
    slot = tl.arange(0, SLOTS_PADDED)
    own_slot = tl.where((query // COUNT)[:, None] == slot[None, :], 1.0, 0.0)
    by_distance = relative + head * BIASES
    within_slot = tl.load(same + head).to(tl.float32)
    if WIDEN:
        queries = queries.to(tl.float32)
    own_slot = own_slot.to(queries.dtype)

    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    sums = tl.zeros([QUERIES, DIM_PADDED], dtype=tl.float32)
    for first in range(0, length, KEYS):
        key = first + tl.arange(0, KEYS)
        real = (key < length)[:, None] & inside
        columns = key[:, None] * stride_row + (width + dim)[None, :]
        keys = tl.load(start + columns, mask=real, other=0.0)
        values = tl.load(start + (width + columns), mask=real, other=0.0)
        distance = slot[:, None] - (key // COUNT)[None, :]
        known = (tl.abs(distance) <= BIASES // 2) & (key < length)[None, :]
        biases = tl.load(by_distance + (distance + BIASES // 2), mask=known, other=0.0).to(tl.float32)
        biases += tl.where(distance == 0, within_slot, 0.0)
        if WIDEN:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        logits += tl.dot(own_slot, biases.to(own_slot.dtype), input_precision="ieee")
        logits = tl.where((key < length)[None, :], logits, float("-inf"))

        risen = tl.maximum(highest, tl.max(logits, axis=1))
        shrink = tl.exp(highest - risen)
        weights = tl.exp(logits - risen[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        highest = risen

    places = out + (block * length * width + head * DIM) + (query[:, None] * width + dim[None, :])
    tl.store(places, (sums / total[:, None]).to(out.dtype.element_ty), mask=asked & inside)


def attention_settings(
    blocks: int, heads: int, biases: int, count: int, dim: int, dtype: torch.dtype
) -> dict[str, int]:
    """Constants of `lattice_attention_kernel`: a block's length is none of them, for every draft may bring another."""
    few = blocks * heads <= FEW or dtype == torch.float32
    return {
        "HEADS": heads,
        "BIASES": biases,
        "SLOTS_PADDED": max(16, next_power_of_2(biases // 2)),  # tl.dot wants 16
        "COUNT": count,
        "DIM": dim,
        "DIM_PADDED": max(16, next_power_of_2(dim)),
        "QUERIES": 16 if few else 64,
        "KEYS": 64 if few and dtype != torch.float32 else 32,
        "WIDEN": interpreted(),  # the interpreter's product takes the bits of bf16 for integers
        "num_warps": 4 if few else 8,
        "num_stages": 2,
    }


def lattice_attention(packed: Tensor, relative: Tensor, same: Tensor, count: int) -> Tensor:
    """As `lattice_reference.lattice_attention`; blocks and rows of `packed` may lie anywhere."""
    blocks, length, packed_width = packed.shape
    heads, biases = relative.shape
    width = packed_width // 3
    if packed.stride(-1) != 1 or length * abs(packed.stride(1)) >= 2**31:  # within a block offsets are 32 bits wide
        packed = packed.contiguous()
    out = torch.empty(blocks, length, width, dtype=packed.dtype, device=packed.device)
    if not out.numel():
        return out
    settings = attention_settings(blocks, heads, biases, count, width // heads, packed.dtype)
    query_tiles = triton.cdiv(length, settings["QUERIES"])
    lattice_attention_kernel[(blocks * heads * query_tiles,)](
        packed,
        relative.contiguous(),
        same.contiguous(),
        out,
        packed.stride(0),
        packed.stride(1),
        length,
        query_tiles,
        (width // heads) ** -0.5,
        **settings,
    )
    return out
