"""Many blocks of a sequence through the backbone at once, each as if it alone followed its anchor."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .anchors import block_mask


def block_states(
    drafter: LiLiCorrModel,
    embed: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    target_hidden: Tensor,
    anchors: Tensor,
    together: int,
    num_slots: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What `drafter` makes of the blocks behind `anchors` in known texts (paper §3.4).

    Args:
        embed: the target's input embedding, ids `[...]` to `[..., d]`.
        input_ids: `[batch, L]` (int64); target_hidden: the target's states of these rows, `[batch, L, layers * d]`.
        anchors: positions of slot 0, `[batch, N]` (int64), in any order.
        together: up to so many blocks of a sequence attend as one and share one copy of its keys and values.
        num_slots: end each block behind so many of its `B - 1` slots.

    Returns:
        The drafter's view of the target's states, `[batch, L, d]`, and block states `[batch, N, 1 + num_slots, d]`.
    """
    slots, device = drafter.config.num_slots if num_slots is None else num_slots, input_ids.device
    size = 1 + slots
    batch, width = anchors.shape
    parts = -(-width // together)
    group = -(-width // parts)
    grouped = F.pad(anchors, (0, parts * group - width)).view(-1, group)  # what fills up starts at 0
    context = drafter.project_context(target_hidden.to(drafter.dtype))
    anchor_ids = input_ids.repeat_interleave(parts, dim=0).gather(1, grouped)
    noise = embed(drafter.block_ids(anchor_ids.flatten(), slots)).to(drafter.dtype)
    positions = grouped[..., None] + torch.arange(size, device=device)
    states = drafter.decode_block(
        noise.view(len(grouped), group * size, -1),
        context,
        positions.flatten(1),
        torch.arange(input_ids.shape[1], device=device).expand(input_ids.shape),
        block_mask(grouped, input_ids.shape[1], size),
        size=size,
    )
    return context, states.reshape(batch, parts * group, size, -1)[:, :width]
