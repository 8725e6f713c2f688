"""The dispatcher of the lattice network: whether kernels serve it, and then all nodes' vectors in few launches.

Between the matrix products, which stay torch's where they are nothing but products, everything is a kernel of
`lattice_attention_triton`, `lattice_nodes_triton` or `lattice_products_triton`: seven launches a layer and nine around
them. `lattice_reference` defines each; the modules of the head define the whole, and train.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .choice import interpreted, wants_triton

MAX_WIDTH = 8192  # a program holds a row
MAX_HEAD_DIM = 128
MAX_SLOTS = 64


def wants_kernels(head: Any, hidden: Tensor, features: Tensor, anchor_state: Tensor) -> bool:
    """Whether `lattice_vectors` serves this call of a `LiLiCorrHead`, as `choice` describes.

    Raises:
        ValueError: `LILICORR_KERNELS` is unknown, or asks for Triton where it cannot serve.
    """
    served = hidden.device.type == "cuda" or interpreted()
    return wants_triton((hidden, features, anchor_state), _refusal(head, hidden) if served else None)


def lattice_vectors(
    head: Any,
    tokens: Tensor,
    features: Tensor,
    hidden: Tensor,
    anchor_state: Tensor,
    anchor_valid: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out and in vectors `[N, S, K, d_e]` and the anchor's `[N, d_e]` of a `LiLiCorrHead`, before they get unit length.

    Args:
        head: the module whose weights are used.
        tokens: projected tokens `[N, S, K, w]`.
        features: `[N, S, K, 5]`; hidden: `[N, S, d]`; anchor_state: `[N, d]`; anchor_valid: bool `[N]` or `None`.
    """
    from .lattice_attention_triton import lattice_attention
    from .lattice_nodes_triton import add_norm, confidence_hidden, masked_norm, node_sum
    from .lattice_products_triton import fuse, linear_silu, project

    slots, count = features.shape[1:3]
    dtype = head.pass_hidden_proj.weight.dtype
    norm, first, _, second = head.feature_mlp
    norms = [scale for layer in head.layers for scale in (layer.attn_norm, layer.mlp_norm)] + [head.output_norm]
    weights = [(scale.weight, scale.variance_epsilon) for scale in (*norms, head.anchor_norm)]
    with torch.cuda.device_of(hidden):  # Triton launches on the current device, wherever the tensors are
        states = head.pass_hidden_proj(hidden.to(dtype))
        features = confidence_hidden(features, norm.weight, norm.bias, norm.eps, first.weight, first.bias)
        slot_table, rank_table = head.slot_embedding[0, 0, :slots, 0], head.rank_embedding[0, 0, 0, :count]
        nodes, normed = node_sum(tokens, states, second(features), slot_table, rank_table, *weights[0])
        for number, layer in enumerate(head.layers):
            packed = F.linear(normed, layer.attn.in_proj_weight, layer.attn.in_proj_bias)
            attended = lattice_attention(packed, head.relative_slot_bias, head.same_slot_bias, count)
            nodes, normed = add_norm(nodes, layer.attn.out_proj(attended), *weights[2 * number + 1])
            inner = linear_silu(normed, layer.mlp[0].weight, layer.mlp[0].bias)
            nodes, normed = add_norm(nodes, layer.mlp[2](inner), *weights[2 * number + 2])
        anchor = masked_norm(head.context_proj(anchor_state.to(dtype)), anchor_valid, *weights[-1])
        fused = fuse(normed, anchor, head.factor_input_proj.weight, head.factor_input_proj.bias)
        heads = (head.out_head, head.in_head, head.anchor_out_head)
        heights, offsets = zip(*((linear.weight, linear.bias) for linear in heads), strict=True)
        out, inp, anchor_out = project(fused, anchor, heights, offsets)
    shape = (*features.shape[:3], out.shape[-1])
    return out.view(shape), inp.view(shape), anchor_out


def _refusal(head: Any, hidden: Tensor) -> str | None:
    """What of this call the kernels cannot honour, or `None`."""
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in chain(head.parameters(), (hidden,))):
        return "its kernels have no gradient"
    weight = head.pass_hidden_proj.weight
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its lattice network computes in fp32, bf16 or fp16, got {weight.dtype}"
    if torch.is_autocast_enabled(hidden.device.type):
        return "its lattice network computes in the weights' dtype, and autocast asks for another"
    width, (heads, biases) = len(weight), head.relative_slot_bias.shape
    if width > MAX_WIDTH or width // heads > MAX_HEAD_DIM or biases // 2 > MAX_SLOTS:
        return (
            f"its lattice network takes widths to {MAX_WIDTH}, heads of {MAX_HEAD_DIM} and {MAX_SLOTS} slots at most, "
            f"got {width}, {width // heads} and {biases // 2}"
        )
    read = [head.feature_mlp[1], head.factor_input_proj, head.out_head, head.in_head, head.anchor_out_head]
    for linear in chain(read, (layer.mlp[0] for layer in head.layers)):
        # Quantised, sharded, offloaded or adapted layers are more than their weights.
        plain = type(linear) is nn.Linear and type(linear.weight) in (nn.Parameter, Tensor)
        if not plain or linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"):
            return "its lattice network reads the weights of plain linear layers only"
        if (linear.weight.dtype, linear.weight.device) != (weight.dtype, hidden.device):
            return f"its lattice network wants all weights in {weight.dtype} on {hidden.device}"
    return None
