"""Where blocks start in training, what they may see and what they should say."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Blocks:
    """`N` training blocks a sequence.

    Attributes:
        anchors: position of slot 0, `[batch, N]` (int64), ascending.
        keep: bool `[batch, N]`, false for blocks that only fill the width.
        labels: ground truth of slots 1 … B-1, `[batch, N, S]` (int64).
        supervised: bool `[batch, N, S]`: the label exists, belongs to an answer and its block is kept.
        draws: one uniform number a block, `[batch, N]` (fp32), for objectives that sample slots.
    """

    anchors: Tensor
    keep: Tensor
    labels: Tensor
    supervised: Tensor
    draws: Tensor

    def part(self, start: int, end: int) -> "Blocks":
        """Blocks `start … end - 1` of every sequence."""
        return Blocks(*(getattr(self, field.name)[:, start:end] for field in fields(self)))


def sample_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    block_size: int,
    num_anchors: int,
    generators: torch.Generator | Sequence[torch.Generator],
) -> Blocks:
    """Draw anchors uniformly without replacement among positions supervised together with their successor.

    Args:
        input_ids: `[batch, S]` (int64); loss_mask: bool `[batch, S]`.
        block_size: B; num_anchors: at most this many a sequence (fewer where no sequence has as many).
        generators: one for all sequences, or one each: then what a sequence draws depends on nothing beside it.

    Raises:
        ValueError: if no sequence has a valid anchor.
    """
    batch, length = input_ids.shape
    valid = loss_mask[:, :-1] & loss_mask[:, 1:]
    width = min(num_anchors, int(valid.sum(dim=1).max())) if length > 1 else 0
    if width == 0:
        raise ValueError("No sequence of this batch has two supervised tokens in a row; check the loss mask.")
    if isinstance(generators, torch.Generator):
        generators = [generators] * batch
    counts = valid.sum(dim=1).tolist()
    rank, draws = torch.full(valid.shape, 2.0), torch.zeros(batch, width)
    chances = [torch.rand(2, count, generator=each) for count, each in zip(counts, generators, strict=True)]
    for row, (places, chance) in enumerate(zip(valid.cpu(), chances, strict=True)):
        rank[row, places] = chance[0]
    anchors = rank.to(valid.device).argsort(dim=1)[:, :width].sort(dim=1).values
    keep = valid.gather(1, anchors)
    for row, (kept, chance) in enumerate(zip(keep.cpu(), chances, strict=True)):
        draws[row, kept] = chance[1, : int(kept.sum())]
    slots = torch.arange(1, block_size, device=input_ids.device)
    places = anchors[..., None] + slots  # [batch, N, S]: slot s of an anchor at p predicts the token at p + s
    inside = places < length
    places = places.clamp(max=length - 1).flatten(1)
    shape = (batch, width, block_size - 1)
    labels = input_ids.gather(1, places).view(shape)
    supervised = loss_mask.gather(1, places).view(shape) & inside & keep[..., None]
    return Blocks(anchors, keep, labels, supervised, draws.to(input_ids.device))


def block_mask(anchors: Tensor, context_length: int, block_size: int) -> Tensor:
    """What the rows of blocks that attend together see: target rows before their own anchor, and their own block.

    `anchors [groups, G]` to bool `[groups, 1, G * B, context_length + G * B]`.
    """
    groups, size = anchors.shape
    past = torch.arange(context_length, device=anchors.device) < anchors[..., None]  # [groups, G, context_length]
    own = torch.eye(size, dtype=torch.bool, device=anchors.device).repeat_interleave(block_size, dim=1)
    seen = torch.cat([past, own.expand(groups, -1, -1)], dim=-1)
    return seen.repeat_interleave(block_size, dim=1)[:, None]
