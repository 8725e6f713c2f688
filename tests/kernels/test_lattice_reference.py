"""What defines the lattice network's kernels, against loops and against torch's own layers."""

import torch
from lilicorr.kernels import lattice_reference as reference
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def randn(*shape: int, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_bias_goes_by_query_slot_minus_key_slot_and_one_more_within_a_slot() -> None:
    relative, same = randn(2, 9), randn(2, seed=1)  # B = 5: distances -4 to 4
    bias = reference.attention_bias(relative, same, 3, 2)
    assert bias.shape == (2, 6, 6)
    assert bias[1, 5, 0] == relative[1, 4 + 2] and bias[1, 0, 5] == relative[1, 4 - 2]
    assert bias[0, 2, 3] == relative[0, 4] + same[0] and bias[0, 2, 1] == relative[0, 4 + 1]


def test_attention_is_torchs_multihead_attention_before_its_last_projection() -> None:
    packed, relative, same = randn(2, 6, 3 * 8), randn(2, 9, seed=1), randn(2, seed=2)
    module = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(8))
        bias = reference.attention_bias(relative, same, 3, 2)
        rows = randn(2, 6, 8, seed=3)
        want = module(rows, rows, rows, attn_mask=bias.repeat(2, 1, 1), need_weights=False)[0]
        torch.testing.assert_close(reference.attention(rows.repeat(1, 1, 3), bias), want)
    got = reference.lattice_attention(packed, relative, same, 2)
    assert torch.equal(got, reference.attention(packed, bias))


def test_a_node_is_the_sum_of_what_is_known_of_its_candidate() -> None:
    tokens, states, confidence = randn(1, 2, 2, 4), randn(1, 2, 4, seed=1), randn(1, 2, 2, 4, seed=2)
    slot_table, rank_table = randn(2, 4, seed=3), randn(2, 4, seed=4)
    nodes = reference.node_sum(tokens, states, confidence, slot_table, rank_table)
    want = tokens[0, 1, 0] + states[0, 1] + confidence[0, 1, 0] + slot_table[1] + rank_table[0]
    torch.testing.assert_close(nodes[0, 2], want)


def test_norms_are_qwens() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        norm = Qwen3RMSNorm(12, eps=1e-5).to(dtype)
        norm.weight.data.copy_(randn(12))
        rows, update = randn(3, 12, seed=1).to(dtype), randn(3, 12, seed=2).to(dtype)
        total, normed = reference.add_norm(rows, update, norm.weight, 1e-5)
        assert torch.equal(total, rows + update) and torch.equal(normed, norm(rows + update))
        valid = torch.tensor([True, False, True])
        want = norm(torch.where(valid[:, None], rows, torch.zeros_like(rows)))
        assert torch.equal(reference.masked_norm(rows, valid, norm.weight, 1e-5), want)
        assert torch.equal(reference.masked_norm(rows, None, norm.weight, 1e-5), norm(rows))


def test_layers_before_and_after_are_the_modules() -> None:
    network = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 8), nn.SiLU())
    norm, first, _ = network
    features = randn(2, 3, 5)
    got = reference.confidence_hidden(features, norm.weight, norm.bias, norm.eps, first.weight, first.bias)
    assert torch.equal(got, network(features))
    layers = [nn.Linear(8, 6) for _ in range(3)]
    nodes, anchor = randn(2, 4, 8), randn(2, 8, seed=1)
    weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
    rows = (nodes, nodes, anchor)
    for one, layer, given in zip(reference.project(nodes, anchor, weights, biases), layers, rows, strict=True):
        assert torch.equal(one, layer(given))


def test_fusion_takes_the_anchor_into_the_weights() -> None:
    nodes, anchor, weight, bias = randn(2, 3, 4), randn(2, 4, seed=1), randn(5, 12, seed=2), randn(5, seed=3)
    own, shared, both = weight.split(4, dim=1)
    want = torch.stack([nodes[n] @ (own + both * anchor[n]).T + shared @ anchor[n] + bias for n in range(2)])
    torch.testing.assert_close(reference.fuse(nodes, anchor, weight, bias), F.silu(want))
