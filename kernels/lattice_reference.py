"""The definition of the lattice network's kernels (paper Appendix A), in plain torch, as `reference` is of the others.

`w` is the head's width, `L = slots * K` the nodes of a block, candidates of one slot side by side.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def confidence_hidden(
    features: Tensor, norm_weight: Tensor, norm_bias: Tensor, norm_eps: float, weight: Tensor, bias: Tensor
) -> Tensor:
    """What enters the last layer of the network over confidence features: layer norm, first layer, SiLU.

    `features [..., 5]` in any float dtype, `norm_weight [5]`, `norm_bias [5]`, `weight [w, 5]`, `bias [w]`; returns
    `[..., w]` in the weights' dtype.
    """
    normed = F.layer_norm(features.to(weight.dtype), (5,), norm_weight, norm_bias, norm_eps)
    return F.silu(F.linear(normed, weight, bias))


def node_sum(
    tokens: Tensor,
    states: Tensor,
    confidence: Tensor,
    slot_table: Tensor,
    rank_table: Tensor,
) -> Tensor:
    """A node for every candidate: its token, its slot's state, its confidence, its slot and its rank.

    Args:
        tokens, confidence: `[N, S, K, w]`; states: `[N, S, w]`; slot_table: `[S, w]`; rank_table: `[K, w]`.

    Returns:
        `[N, L, w]`.
    """
    nodes = tokens + states[:, :, None] + confidence + slot_table[:, None] + rank_table
    return nodes.flatten(1, 2)


def attention_bias(relative: Tensor, same: Tensor, slots: int, count: int) -> Tensor:
    """`[heads, L, L]`: a scalar by query slot minus key slot, one more within a slot.

    `relative [heads, 2B - 1]`, distance 0 in the middle; `same [heads]`.
    """
    slot = torch.arange(slots, device=same.device).repeat_interleave(count)
    distance = slot[:, None] - slot[None, :]
    bias = relative[:, distance + relative.shape[1] // 2]
    return bias + (distance == 0).to(bias.dtype) * same[:, None, None]


def attention(packed: Tensor, bias: Tensor) -> Tensor:
    """Attention in both directions, from queries, keys and values `packed [N, L, 3w]` and `bias [heads, L, L]`.

    Returns `[N, L, w]`.
    """
    blocks, length, _ = packed.shape
    query, key, value = packed.view(blocks, length, 3, len(bias), -1).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return attended.transpose(1, 2).reshape(blocks, length, -1)


def lattice_attention(packed: Tensor, relative: Tensor, same: Tensor, count: int) -> Tensor:
    """`attention` with the `attention_bias` of slots of `count` candidates each."""
    return attention(packed, attention_bias(relative, same, packed.shape[1] // count, count))


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rows [..., w]` over their root mean square (fp32), rounded, then times `weight [w]`, as in Qwen3."""
    values = rows.float()
    return weight * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(rows.dtype)


def add_norm(rows: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rows + update`, both `[..., w]`, and its `rms_norm`."""
    total = rows + update
    return total, rms_norm(total, weight, eps)


def masked_norm(rows: Tensor, valid: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of `rows [N, w]`, of zero where `valid [N]` (bool) is false."""
    return rms_norm(rows if valid is None else rows * valid[:, None].to(rows.dtype), weight, eps)


def linear_silu(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`silu(rows @ weight.T + bias)`: `rows [..., w]`, `weight [columns, w]`, `bias [columns]`."""
    return F.silu(F.linear(rows, weight, bias))


def fusion_input(nodes: Tensor, anchor: Tensor) -> Tensor:
    """Every node with its block's anchor and their product: `nodes [N, L, w]`, `anchor [N, w]` to `[N, L, 3w]`."""
    shared = anchor[:, None].expand_as(nodes)
    return torch.cat([nodes, shared, nodes * shared], dim=-1)


def fuse(nodes: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`linear_silu` of the `fusion_input`: `weight [columns, 3w]`, `bias [columns]`; returns `[N, L, columns]`."""
    return linear_silu(fusion_input(nodes, anchor), weight, bias)


def project(
    nodes: Tensor, anchor: Tensor, weights: tuple[Tensor, Tensor, Tensor], biases: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The three factor heads: `nodes [..., w]` by the first two, `anchor [..., w]` by the third, to `[..., d_e]`.

    `weights [d_e, w]` and `biases [d_e]` of the out, the in and the anchor's head.
    """
    out, inp = (F.linear(nodes, weights[i], biases[i]) for i in (0, 1))
    return out, inp, F.linear(anchor, weights[2], biases[2])
