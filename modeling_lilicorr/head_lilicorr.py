"""The LiLiCorr head (paper §3.2 and Appendix A): scores the whole candidate lattice in one pass, then walks it.

Names, shapes and order of operations follow the authors' released training and serving code, so that one checkpoint
serves everywhere.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ..kernels.lattice_network import lattice_vectors, wants_kernels
from ..kernels.lattice_reference import attention, attention_bias, fusion_input, node_sum
from ..kernels.reference import confidence_features, unit_vectors
from ..kernels.score_and_walk import lattice_scores, score_and_walk, walk
from ..kernels.topk_logsumexp import topk_features
from .configuration_lilicorr import LiLiCorrConfig
from .head_settings import TREE_BETAS
from .lattice import Block, Draft, Lattice
from .lattice_drafts import draw_path


class LatticeAttention(nn.Module):
    """Bidirectional attention over lattice nodes, with the parameter layout of `nn.MultiheadAttention`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def init_weights_with(self, init: Any) -> None:
        """Set the packed projection, which no generic rule knows; `init` is `transformers.initialization`."""
        init.xavier_uniform_(self.in_proj_weight)
        init.zeros_(self.in_proj_bias)

    def forward(self, nodes: Tensor, bias: Tensor) -> Tensor:
        """`nodes [N, L, w]`, `bias [heads, L, L]` added to the attention logits; returns `[N, L, w]`."""
        return self.out_proj(attention(F.linear(nodes, self.in_proj_weight, self.in_proj_bias), bias))


class LatticeLayer(nn.Module):
    """Pre-norm attention, then a plain SiLU network."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = Qwen3RMSNorm(width, eps=eps)
        self.attn = LatticeAttention(width)
        self.mlp_norm = Qwen3RMSNorm(width, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, nodes: Tensor, bias: Tensor) -> Tensor:
        """`nodes [N, L, w]`, `bias [heads, L, L]`; returns `[N, L, w]`."""
        nodes = nodes + self.attn(self.attn_norm(nodes), bias)
        return nodes + self.mlp(self.mlp_norm(nodes))


GATE = 0.5  # at first, of a residual head: from 0 it never opened (evaluation/RESULTS.md)


class LiLiCorrHead(nn.Module):
    """Gives every candidate a unit out and in vector; adjacent candidates match by their scaled cosine (Eq. 1).

    The setting `walk` chooses how a path is committed: `greedy` (Eq. 8) or `longest`, see `reference.longest_path`.

    With the setting `residual`, which is not the paper's, a score is the candidate's log-probability plus the scaled
    cosine times one learnt `gate`: the head corrects the drafter instead of replacing it.
    """

    grows_trees = True

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        settings = config.head_config
        width, dim, factor = settings["hidden_size"], config.hidden_size, settings["factor_dim"]
        heads, eps = settings["num_heads"], config.rms_norm_eps
        self.num_candidates: int = settings["num_candidates"]
        self.tree_beta: float = settings.get("tree_beta", TREE_BETAS["lilicorr"])
        self.logit_scale: float = settings["logit_scale"]
        self.vector_eps: float = settings["vector_eps"]
        self.rule: str = settings.get("walk", "greedy")
        self.token_proj = nn.Identity() if dim == width else nn.Linear(dim, width)
        self.pass_hidden_proj = nn.Linear(dim, width)
        self.feature_mlp = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, width), nn.SiLU(), nn.Linear(width, width))
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.num_slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, self.num_candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(
            LatticeLayer(width, settings["intermediate_size"], eps) for _ in range(settings["num_layers"])
        )
        self.output_norm = Qwen3RMSNorm(width, eps=eps)
        self.context_proj = nn.Linear(dim, width)
        self.anchor_norm = Qwen3RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, factor)
        self.in_head = nn.Linear(width, factor)
        self.anchor_out_head = nn.Linear(width, factor)
        self.gate = nn.Parameter(torch.full((1,), GATE)) if settings.get("residual") else None

    def init_weights_with(self, init: Any) -> None:
        """Tables at zero, factor heads at N(0, 0.02): zero on both sides of a product would never learn.

        Inner layers keep the size of what enters them. At Transformers' usual 0.02 the confidence features, which tell
        a slot's candidates apart, would drown in the slot's hidden state, which its candidates share.
        """
        if self.gate is not None:
            init.constant_(self.gate, GATE)
        for table in (self.slot_embedding, self.rank_embedding, self.relative_slot_bias, self.same_slot_bias):
            init.zeros_(table)
        for head in (self.out_head, self.in_head, self.anchor_out_head):
            init.normal_(head.weight, mean=0.0, std=0.02)
            init.zeros_(head.bias)
        inner: list[tuple[Any, float]] = [
            (self.feature_mlp[1], 1),
            (self.feature_mlp[3], 1),
            (self.factor_input_proj, 1),
        ]
        for layer in cast("list[LatticeLayer]", self.layers):
            # What a layer adds to its nodes is halved, so that depth does not let them grow.
            inner += [(layer.mlp[0], 1), (layer.mlp[2], 0.5), (layer.attn.out_proj, 0.5)]
        for linear, gain in inner:
            init.normal_(linear.weight, mean=0.0, std=gain * linear.in_features**-0.5)

    def factors(
        self,
        embeds: Tensor,
        log_probs: Tensor,
        hidden: Tensor,
        anchor_state: Tensor,
        anchor_valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Out and in vectors of every candidate and the anchor's out vector, all of unit length.

        Args:
            embeds: the target's embeddings of the candidates, `[N, S, K, d]`; no gradient flows through them.
            log_probs: `[N, S, K]` (fp32), descending in `K`; `K` may be smaller than the head was trained with.
            hidden: drafter states of the slots, `[N, S, d]`.
            anchor_state: `[N, d]`; anchor_valid: bool `[N]`, false where there is no such state.

        Returns:
            `out [N, S, K, d_e]`, `inp [N, S, K, d_e]`, `anchor_out [N, d_e]`, in fp32.
        """
        features = confidence_features(log_probs)
        out, inp, anchor_out = self._vectors(embeds, features, hidden, anchor_state, anchor_valid)
        return (
            unit_vectors(out, self.vector_eps),
            unit_vectors(inp, self.vector_eps),
            unit_vectors(anchor_out, self.vector_eps),
        )

    def _vectors(
        self,
        embeds: Tensor,
        features: Tensor,
        hidden: Tensor,
        anchor_state: Tensor,
        anchor_valid: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`factors` before they get unit length, in the head's dtype, from confidence features `[N, S, K, 5]`."""
        blocks, slots, count = features.shape[:3]
        dtype = self.pass_hidden_proj.weight.dtype
        tokens = self.token_proj(embeds.detach().to(dtype))
        if wants_kernels(self, hidden, features, anchor_state):
            return lattice_vectors(self, tokens, features, hidden, anchor_state, anchor_valid)
        nodes = node_sum(
            tokens,
            self.pass_hidden_proj(hidden.to(dtype)),
            self.feature_mlp(features.to(dtype)),
            self.slot_embedding[0, 0, :slots, 0],
            self.rank_embedding[0, 0, 0, :count],
        )
        bias = attention_bias(self.relative_slot_bias, self.same_slot_bias, slots, count)
        for layer in self.layers:
            nodes = layer(nodes, bias)
        nodes = self.output_norm(nodes)
        anchor = self.context_proj(anchor_state.to(dtype))
        if anchor_valid is not None:
            anchor = anchor * anchor_valid[:, None].to(dtype)
        anchor = self.anchor_norm(anchor)
        fused = F.silu(self.factor_input_proj(fusion_input(nodes, anchor)))
        shape = (blocks, slots, count, -1)
        return self.out_head(fused).view(shape), self.in_head(fused).view(shape), self.anchor_out_head(anchor)

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """A path through the scored lattice; see `Draft` for the result."""
        blocks, slots, vocab = block.logits.shape
        _, indices, normaliser, features = topk_features(block.logits.reshape(-1, vocab), self.num_candidates)
        candidates, features = indices.view(blocks, slots, -1), features.view(blocks, slots, -1, 5)
        log_probs = features[..., 0]
        vectors = self._vectors(block.embed(candidates), features, block.hidden, block.anchor_state, block.anchor_valid)
        finite = normaliser.isfinite().view(blocks, slots)
        scale: float | Tensor = self.logit_scale
        if self.gate is not None:
            scale = scale * self.gate.float()  # stays on its device
        added = None if self.gate is None else log_probs

        def probabilities() -> Tensor:
            return log_probs.gather(-1, picks[..., None]).squeeze(-1).exp()

        if not return_lattice and block.warp is None:
            tokens, picks = score_and_walk(*vectors, candidates, scale, self.vector_eps, self.rule, added)
            return Draft(tokens, finite, probabilities)
        walked = walk(*vectors, candidates, scale, self.vector_eps, self.rule, added)
        tokens, picks, drawn_from = walked.tokens, walked.picks, None
        if block.warp is not None:
            tokens, picks, drawable, drawn_from = draw_path(
                block, candidates, log_probs, walked.first, walked.pair, self.tree_beta
            )
            finite = finite & drawable
        lattice = Lattice(candidates, log_probs, walked.first, walked.pair, picks) if return_lattice else None
        return Draft(tokens, finite, probabilities, lattice, drawn_from)

    def scores(self, embeds: Tensor, log_probs: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Scores of a lattice from the arguments of `factors`: `[N, K]` and `[N, S - 1, K, K]`, as `lattice_scores`.

        No gradient flows through the log-probabilities that a residual head adds; the drafter has its own loss.
        """
        first, pair = lattice_scores(*self.factors(embeds, log_probs, *rest), self.logit_scale)
        if self.gate is None:
            return first, pair
        own, gate = log_probs.detach(), self.gate.float()
        return own[:, 0] + gate * first, own[:, 1:, None] + gate * pair
