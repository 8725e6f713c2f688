"""Those matrix products of the lattice network that want more than a product, in Triton, with sums in fp32.

`linear_silu` is a layer and its activation. `fuse` is the layer over `[x; t; x * t]` without that concatenation: by
columns, `W [x; t; x * t] = (W1 + W3 diag(t)) x + W2 t`, so one product is left where three were, and `W2 t` is one
vector a block. `project` is the three factor heads in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .choice import interpreted
from .triton_shared import jit, next_power_of_2, silu, tl, triton

FEW = 512  # rows; up to these the weights' bytes rule and tiles are small, so that all of the card reads them


@jit
def linear_tile(
    rows,
    weight,
    bias,
    out,
    program,
    length,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
    SILU: tl.constexpr,
):
    """Tile `program` (of rows) by this program's tile of columns of `rows @ weight.T + bias`, on request with SiLU."""
    tiles = (COLUMNS + COLUMNS_TILE - 1) // COLUMNS_TILE
    first = program.to(tl.int64) * ROWS_TILE
    row = tl.arange(0, ROWS_TILE)
    column = tl.program_id(0) % tiles * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    in_rows, in_columns = (row < length - first)[:, None], column < COLUMNS
    sources = rows + first * WIDTH + row[:, None] * WIDTH
    heights = weight + column[:, None] * WIDTH
    total = tl.zeros([ROWS_TILE, COLUMNS_TILE], dtype=tl.float32)
    total += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    for start in range(0, WIDTH, CHUNK):
        dim = start + tl.arange(0, CHUNK)
        real = (dim < WIDTH)[None, :]
        a = tl.load(sources + dim[None, :], mask=in_rows & real, other=0.0)
        b = tl.load(heights + dim[None, :], mask=in_columns[:, None] & real, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if SILU:
        total = silu(total)
    places = out + first * COLUMNS + (row[:, None] * COLUMNS + column[None, :])
    tl.store(places, total.to(out.dtype.element_ty), mask=in_rows & in_columns[None, :])


@jit
def linear_silu_kernel(
    rows,
    weight,
    bias,
    out,
    length,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of `silu(rows @ weight.T + bias)`."""
    program = tl.program_id(0) // ((COLUMNS + COLUMNS_TILE - 1) // COLUMNS_TILE)
    linear_tile(
        rows, weight, bias, out, program, length, WIDTH, COLUMNS, ROWS_TILE, COLUMNS_TILE, CHUNK, WIDEN, SILU=True
    )


@jit
def fuse_kernel(
    nodes,
    anchor,
    weight,
    bias,
    out,
    length,
    row_tiles,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of the fused nodes; its rows belong to one block, whose anchor goes into the weights."""
    tiles = (COLUMNS + COLUMNS_TILE - 1) // COLUMNS_TILE
    program = tl.program_id(0) // tiles
    block = (program // row_tiles).to(tl.int64)
    row = program % row_tiles * ROWS_TILE + tl.arange(0, ROWS_TILE)
    column = tl.program_id(0) % tiles * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    in_rows, in_columns = (row < length)[:, None], column < COLUMNS
    first = block * length
    heights = weight + column[:, None] * (3 * WIDTH)
    total = tl.zeros([ROWS_TILE, COLUMNS_TILE], dtype=tl.float32)
    shared = tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)
    for chunk in range(0, WIDTH, CHUNK):
        dim = chunk + tl.arange(0, CHUNK)
        real = dim < WIDTH
        source = nodes + first * WIDTH + (row[:, None] * WIDTH + dim[None, :])
        a = tl.load(source, mask=in_rows & real[None, :], other=0.0)
        t = tl.load(anchor + block * WIDTH + dim, mask=real, other=0.0).to(tl.float32)
        wanted = in_columns[:, None] & real[None, :]
        own = tl.load(heights + dim[None, :], mask=wanted, other=0.0).to(tl.float32)
        common = tl.load(heights + (WIDTH + dim)[None, :], mask=wanted, other=0.0).to(tl.float32)
        both = tl.load(heights + (2 * WIDTH + dim)[None, :], mask=wanted, other=0.0).to(tl.float32)
        shared += tl.sum(common * t[None, :], axis=1)
        b = (own + both * t[None, :]).to(nodes.dtype.element_ty)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    places = out + first * COLUMNS + (row[:, None] * COLUMNS + column[None, :])
    total = silu(total + shared[None, :])
    tl.store(places, total.to(out.dtype.element_ty), mask=in_rows & in_columns[None, :])


@jit
def project_kernel(
    nodes,
    anchor,
    out_weight,
    in_weight,
    anchor_weight,
    out_bias,
    in_bias,
    anchor_bias,
    out,
    inp,
    anchor_out,
    rows,
    anchors,
    row_tiles,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of the out vectors, of the in vectors, or, by the last programs, of the anchors' out vectors."""
    tiles = (COLUMNS + COLUMNS_TILE - 1) // COLUMNS_TILE
    program = tl.program_id(0) // tiles
    if program < row_tiles:
        source, weight, bias, target, length = nodes, out_weight, out_bias, out, rows
    elif program < 2 * row_tiles:
        source, weight, bias, target, length = nodes, in_weight, in_bias, inp, rows
        program -= row_tiles
    else:
        source, weight, bias, target, length = anchor, anchor_weight, anchor_bias, anchor_out, anchors
        program -= 2 * row_tiles
    linear_tile(
        source, weight, bias, target, program, length, WIDTH, COLUMNS, ROWS_TILE, COLUMNS_TILE, CHUNK, WIDEN, SILU=False
    )


def product_settings(rows: int, width: int, columns: int, dtype: torch.dtype, fusing: bool = False) -> dict[str, int]:
    """Constants of the kernels of this file; `fusing` is `fuse_kernel`, which also holds three tiles of weights."""
    exact = dtype == torch.float32  # multiplied without tensor cores, from registers
    few = rows <= FEW or exact
    return {
        "WIDTH": width,
        "COLUMNS": columns,
        "ROWS_TILE": (32 if exact and fusing else 64) if few else 128,
        "COLUMNS_TILE": (16 if columns <= 1024 else 32) if few else 64 if fusing else 128,
        "CHUNK": min(32 if exact else 64, max(16, next_power_of_2(width))),  # tl.dot wants 16
        "WIDEN": interpreted(),  # the interpreter's product takes the bits of bf16 for integers
        "num_warps": 4 if few else 8,
        "num_stages": 3,
    }


def linear_silu(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `lattice_reference.linear_silu`."""
    rows, weight = rows.contiguous(), weight.contiguous()
    columns, width = weight.shape
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    if not out.numel():
        return out
    length = rows.numel() // width
    settings = product_settings(length, width, columns, rows.dtype)
    programs = triton.cdiv(length, settings["ROWS_TILE"]) * triton.cdiv(columns, settings["COLUMNS_TILE"])
    linear_silu_kernel[(programs,)](rows, weight, bias, out, length, **settings)
    return out


def fuse(nodes: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `lattice_reference.fuse`."""
    nodes, anchor, weight = nodes.contiguous(), anchor.contiguous(), weight.contiguous()
    blocks, length, width = nodes.shape
    columns = weight.shape[0]
    out = torch.empty(blocks, length, columns, dtype=nodes.dtype, device=nodes.device)
    if not out.numel():
        return out
    settings = product_settings(blocks * length, width, columns, nodes.dtype, fusing=True)
    row_tiles = triton.cdiv(length, settings["ROWS_TILE"])
    programs = blocks * row_tiles * triton.cdiv(columns, settings["COLUMNS_TILE"])
    fuse_kernel[(programs,)](nodes, anchor, weight, bias, out, length, row_tiles, **settings)
    return out


def project(
    nodes: Tensor, anchor: Tensor, weights: tuple[Tensor, Tensor, Tensor], biases: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `lattice_reference.project`."""
    nodes, anchor = nodes.contiguous(), anchor.contiguous()
    columns, width = weights[0].shape
    lead = nodes.shape[:-1]
    out = torch.empty(*lead, columns, dtype=nodes.dtype, device=nodes.device)
    inp = torch.empty_like(out)
    anchor_out = torch.empty(*anchor.shape[:-1], columns, dtype=nodes.dtype, device=nodes.device)
    rows, anchors = nodes.numel() // width, anchor.numel() // width
    settings = product_settings(rows, width, 2 * columns, nodes.dtype) | {"COLUMNS": columns}
    row_tiles = triton.cdiv(rows, settings["ROWS_TILE"])
    programs = (2 * row_tiles + triton.cdiv(anchors, settings["ROWS_TILE"])) * triton.cdiv(
        columns, settings["COLUMNS_TILE"]
    )
    if not programs:
        return out, inp, anchor_out
    project_kernel[(programs,)](
        nodes,
        anchor,
        *(weight.contiguous() for weight in weights),
        *biases,
        out,
        inp,
        anchor_out,
        rows,
        anchors,
        row_tiles,
        **settings,
    )
    return out, inp, anchor_out
