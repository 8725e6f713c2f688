"""One training step's arithmetic: blocks, backbone, vocabulary, head, loss sums and metrics."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..kernels.score_and_walk import greedy_walk
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .anchors import Blocks, block_mask
from .losses import (
    Objective,
    accepted,
    oracle_prefix,
    pace_weights,
    reranker_terms,
    slot_weights,
    teacher_forced_scores,
)
from .vocabulary import logits_at, topk_normaliser


class JointObjective(nn.Module):
    """Drafter and target under the joint loss; `forward` returns loss sums, their denominators and metric sums.

    Up to `together` blocks of a sequence attend as one and share one copy of its keys and values; with more, ever more
    of what they look at is masked. Of more than `at_once` blocks a sequence (0: no limit) the activations are not kept
    for the backward pass but made again, `at_once` blocks at a time, so that memory does not grow with their number.
    The target is kept out of the module's parameters: it is frozen, and neither saved nor synchronised.
    """

    def __init__(
        self,
        drafter: LiLiCorrModel,
        target: PreTrainedModel,
        objective: Objective,
        together: int = 32,
        at_once: int = 0,
    ) -> None:
        super().__init__()
        self.together, self.at_once = together, at_once
        self.drafter = drafter
        self.objective = objective
        self._target = (target,)  # a tuple hides it from nn.Module

    def forward(self, input_ids: Tensor, taps: Tensor, last: Tensor, blocks: Blocks) -> dict[str, Tensor]:
        """Sums over this batch.

        Args:
            input_ids: `[batch, S]` (int64); blocks: drawn from them by `sample_blocks`.
            taps: `[batch, S, taps * d]`; last: `[batch, S, d]`: the target's states of these rows.

        Returns:
            Differentiable numerators `dflash`, and with a LiLiCorr head `cross_entropy`, `distractor`, `margin`;
            denominators `weight` (of `dflash`) and `covered` (of the others); metric sums `blocks` and, each `[slots]`,
            `supervised` (labels there are), `argmax_accepted`, and with such a head `walk_accepted`, `oracle_accepted`
            (blocks in which the drafter's first candidates, the walk, or the best path could get that far) and
            `in_candidates` (labels among their slot's candidates).
        """
        width = blocks.anchors.shape[1]
        if not 0 < self.at_once < width:
            return self._sums(input_ids, taps, last, blocks)
        totals: dict[str, Tensor] = {}
        for start in range(0, width, self.at_once):
            part = blocks.part(start, start + self.at_once)
            sums = checkpoint(self._sums, input_ids, taps, last, part, use_reentrant=False)
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        return totals

    def _sums(self, input_ids: Tensor, taps: Tensor, last: Tensor, blocks: Blocks) -> dict[str, Tensor]:
        """As `forward`, for all of `blocks` at once."""
        (target,) = self._target
        config, lm_head = self.drafter.config, target.get_output_embeddings()
        weight, bias = lm_head.weight[: config.vocab_size], getattr(lm_head, "bias", None)
        context, states = self._block_states(target, input_ids, taps, blocks)
        rows = blocks.keep.flatten()  # blocks that only fill the width leave here
        labels = blocks.labels.flatten(0, 1)[rows]
        supervised = blocks.supervised.flatten(0, 1)[rows]
        hidden = states[rows, 1:]
        shape = hidden.shape[:2]

        reranks = config.head_type == "lilicorr"
        count = self.drafter.head.num_candidates if reranks else 1
        share = slot_weights(shape[1], self.objective.beta, hidden.device)
        counted, weights, active = supervised, share * supervised, torch.ones_like(supervised)
        if self.objective.sample_slots:
            active = counted = supervised & (blocks.draws.flatten()[rows][:, None] <= share)
            weights = counted.float()
        # A lattice needs the candidates of every slot; without one, only slots that enter the loss are worked out.
        needed = torch.ones_like(counted) if reranks else counted
        flat = hidden[needed]
        normaliser, best = topk_normaliser(flat, weight, bias, count, active[needed])
        gold_logits = logits_at(flat, weight, bias, labels[needed][:, None]).squeeze(1)
        candidates = labels.new_full((*shape, count), -1)
        candidates[needed] = best
        cross_entropy = normaliser - gold_logits
        if self.objective.slot_weighting == "d-pace":
            full = torch.zeros_like(weights).masked_scatter(needed, cross_entropy.detach())
            weights = pace_weights(full, supervised, self.objective.alpha)
        run = accepted(candidates[..., 0], labels, counted).sum(dim=0)
        sums = {
            "dflash": (weights[needed] * cross_entropy).sum(),
            "weight": weights.sum(),
            "blocks": rows.sum().float(),
            "supervised": supervised.sum(dim=0).float(),
            # A slot that is looked at with probability w counts 1 / w, which keeps the mean unbiased.
            "argmax_accepted": run / share if self.objective.sample_slots else run.float(),
        }
        if reranks:
            log_probs = (logits_at(flat, weight, bias, best) - normaliser[:, None]).view(candidates.shape)
            anchors = blocks.anchors.flatten()[rows]
            sequence = torch.arange(input_ids.shape[0], device=flat.device).repeat_interleave(blocks.anchors.shape[1])
            before = (anchors - 1).clamp(min=0)
            embeds = target.get_input_embeddings()(candidates)
            anchor_states = context[sequence[rows], before]
            first, pair = self.drafter.head.scores(embeds, log_probs, hidden, anchor_states, anchors > 0)
            covered, gold = oracle_prefix(candidates, labels, supervised)
            # Row p + s - 1 of the target scores the token at p + s.
            places = (anchors[:, None] + torch.arange(shape[1], device=flat.device)).clamp(max=input_ids.shape[1] - 1)
            seen = last[sequence[rows][:, None], places].flatten(0, 1)
            target_logits = logits_at(seen, weight, bias, best).view(candidates.shape)
            scores = teacher_forced_scores(first, pair, gold)
            sums |= reranker_terms(scores, gold, covered, target_logits, self.objective.rho)
            picks = greedy_walk(first.detach(), pair.detach())
            walked = candidates.gather(-1, picks[..., None]).squeeze(-1)
            sums["walk_accepted"] = accepted(walked, labels, supervised).sum(dim=0).float()
            sums["argmax_accepted"] = accepted(candidates[..., 0], labels, supervised).sum(dim=0).float()
            sums["oracle_accepted"] = covered.sum(dim=0).float()
            sums["in_candidates"] = ((candidates == labels[..., None]).any(-1) & supervised).sum(dim=0).float()
        return sums

    def _block_states(
        self, target: PreTrainedModel, input_ids: Tensor, taps: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor]:
        """Context rows `[batch, S, d]` and block states `[batch * N, B, d]` under the training mask."""
        drafter = self.drafter
        size = drafter.config.block_size
        batch, width = blocks.anchors.shape
        parts = -(-width // self.together)
        group = -(-width // parts)
        anchors = F.pad(blocks.anchors, (0, parts * group - width)).view(-1, group)  # what fills up starts at 0
        context = drafter.project_context(taps.to(drafter.dtype))
        anchor_ids = input_ids.repeat_interleave(parts, dim=0).gather(1, anchors)
        noise = target.get_input_embeddings()(drafter.block_ids(anchor_ids.flatten())).to(drafter.dtype)
        positions = anchors[..., None] + torch.arange(size, device=input_ids.device)
        states = drafter.decode_block(
            noise.view(len(anchors), group * size, -1),
            context,
            positions.flatten(1),
            torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape),
            block_mask(anchors, input_ids.shape[1], size),
        )
        return context, states.reshape(batch, parts * group, size, -1)[:, :width].flatten(0, 1)

    def loss(self, sums: dict[str, Tensor], denominators: dict[str, Tensor]) -> Tensor:
        """Eq. 7 (13 with `mu`) from this batch's sums and the denominators `weight`, `covered` of the whole step."""
        weigh = self.objective
        loss = sums["dflash"] / denominators["weight"].clamp(min=1e-6)
        if "cross_entropy" in sums:
            reranker = (
                (1 - weigh.mu) * sums["cross_entropy"] + weigh.penalty * sums["distractor"] + weigh.mu * sums["margin"]
            )
            loss = loss + weigh.gamma * reranker / denominators["covered"].clamp(min=1.0)
        return loss
