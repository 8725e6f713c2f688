"""One training step's arithmetic: blocks, backbone, vocabulary, head, loss sums and metrics."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from ..anchors import Blocks
from ..block_states import block_states
from ..vocabulary import logits_at, topk_normaliser
from .head import Slots
from .registry import build_head_loss
from .terms import Objective, accepted, pace_weights, slot_weights


class JointObjective(nn.Module):
    """Drafter and target under the joint loss; `forward` returns loss sums, their denominators and metric sums.

    Up to `together` blocks of a sequence attend as one and share one copy of its keys and values; with more, ever more
    of what they look at is masked. Of more than `at_once` blocks a sequence (0: no limit) the activations are not kept
    for the backward pass but recomputed, `at_once` blocks at a time, so that memory does not grow with their number.
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
        self.head_loss = build_head_loss(drafter.config.head_type, objective)
        self._target = (target,)  # a tuple hides it from nn.Module

    @property
    def target(self) -> PreTrainedModel:
        """The frozen model whose answers are learned."""
        return self._target[0]

    def forward(self, input_ids: Tensor, target_hidden: Tensor, last: Tensor, blocks: Blocks) -> dict[str, Tensor]:
        """Sums over this batch.

        Args:
            input_ids: `[batch, S]` (int64); blocks: drawn from them by `sample_blocks`.
            target_hidden: `[batch, S, layers * d]`; last: `[batch, S, d]`: the target's states of these rows.

        Returns:
            Numerators and denominators, metric sums `blocks` and, each `[slots]`, `supervised` (labels there are) and
            `argmax_accepted`. The drafter's are `dflash` over `weight`; the head's loss names its own (`over`). With a
            head, `walk_accepted` and, where it has a lattice, `oracle_accepted` (blocks in which the drafter's first
            candidates, the head's draft, or the best path could get that far) and `in_candidates` (labels among their
            slot's candidates).
        """
        width = blocks.anchors.shape[1]
        if not 0 < self.at_once < width:
            return self._sums(input_ids, target_hidden, last, blocks)
        totals: dict[str, Tensor] = {}
        for start in range(0, width, self.at_once):
            part = blocks.part(start, start + self.at_once)
            sums = checkpoint(self._sums, input_ids, target_hidden, last, part, use_reentrant=False)
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        return totals

    def _sums(self, input_ids: Tensor, target_hidden: Tensor, last: Tensor, blocks: Blocks) -> dict[str, Tensor]:
        """As `forward`, for all of `blocks` at once."""
        (target,) = self._target
        config, lm_head = self.drafter.config, target.get_output_embeddings()
        weight, bias = lm_head.weight[: config.vocab_size], getattr(lm_head, "bias", None)
        context, states = block_states(
            self.drafter, target.get_input_embeddings(), input_ids, target_hidden, blocks.anchors, self.together
        )
        rows = blocks.keep.flatten()  # blocks that only fill the width leave here
        labels = blocks.labels.flatten(0, 1)[rows]
        supervised = blocks.supervised.flatten(0, 1)[rows]
        states = states.flatten(0, 1)[rows]
        hidden = states[:, 1:]
        shape = hidden.shape[:2]

        on_lattice = self.head_loss.on_lattice
        count = self.drafter.head.num_candidates if on_lattice else 1
        share = slot_weights(shape[1], self.objective.beta, hidden.device)
        counted, weights, active = supervised, share * supervised, torch.ones_like(supervised)
        if self.objective.sample_slots:
            active = counted = supervised & (blocks.draws.flatten()[rows][:, None] <= share)
            weights = counted.float()
        # A lattice needs the candidates of every slot; without one, only slots that enter the loss are computed.
        needed = torch.ones_like(counted) if on_lattice else counted
        flat = hidden[needed] if self.head_loss.trains_drafter else hidden[needed].detach()
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
        log_probs = None
        if on_lattice:
            log_probs = (logits_at(flat, weight, bias, best) - normaliser[:, None]).view(candidates.shape)
        anchors = blocks.anchors.flatten()[rows]
        sequence = torch.arange(input_ids.shape[0], device=flat.device).repeat_interleave(blocks.anchors.shape[1])[rows]
        slots = Slots(
            hidden=hidden,
            anchor_hidden=states[:, 0],
            labels=labels,
            supervised=supervised,
            weights=weights,
            candidates=candidates,
            log_probs=log_probs,
            anchors=anchors,
            anchor_ids=input_ids[sequence, anchors],
            sequence=sequence,
            context=context,
            last=last,
            embed=target.get_input_embeddings(),
            weight=weight,
            bias=bias,
        )
        sums |= self.head_loss.sums(self.drafter.head, slots)
        return sums

    def loss(self, sums: dict[str, Tensor], denominators: dict[str, Tensor], progress: float = 1.0) -> Tensor:
        """The loss from this batch's sums and the denominators of the whole step.

        `progress` is the share of the run that lies behind, for losses that change with it.
        """
        return self.head_loss.loss(sums, denominators, progress)
