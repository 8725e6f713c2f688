"""Blocks drafted again on a known answer, outside any timed run, to see what a head saw and chose."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling_lilicorr.lattice import Lattice
from .metrics import first_difference


@dataclass(frozen=True)
class DrawnBlock:
    """One block drafted again on a known answer: its lattice, the drafted ids, and how many the answer confirms."""

    lattice: Lattice
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    accepted: int


@torch.no_grad()
def draw_block(
    target: PreTrainedModel, drafter: Any, inputs: dict[str, torch.Tensor], token_ids: Sequence[int], tries: int = 12
) -> DrawnBlock | None:
    """Draft one block again in the midst of an answer, to show what the head saw and chose.

    Of the `tries` positions around the middle, the block in which the answer confirms most picks that are not their
    slot's likeliest candidate is taken (the plain middle one where there is no such pick).

    Args:
        target, drafter, inputs: as for `compare.answer`; token_ids: the answer that `target` gave to `inputs`.
        tries: positions looked at.

    Returns:
        The block, or `None` if the answer is too short to hold one.
    """
    held = positions_of(drafter, inputs, token_ids)
    middle = (held.start + held.stop - 1) // 2
    nearest = sorted(held, key=lambda position: abs(position - middle))[:tries]
    blocks = draft_again(target, drafter, inputs, token_ids, nearest)
    return max(blocks, key=_confirmed_corrections, default=None)  # the first of equals: the one nearest to the middle


def positions_of(drafter: Any, inputs: dict[str, torch.Tensor], token_ids: Sequence[int]) -> range:
    """Positions of those anchors in an answer behind which the answer fills a whole block."""
    first = inputs["input_ids"].shape[1]
    return range(first, first + max(0, len(token_ids) - drafter.config.num_slots))


@torch.no_grad()
def draft_again(
    target: PreTrainedModel,
    drafter: Any,
    inputs: dict[str, torch.Tensor],
    token_ids: Sequence[int],
    positions: Sequence[int],
) -> list[DrawnBlock]:
    """The blocks that `drafter` drafts behind anchors at `positions`, from one pass of `target` over prompt and answer.

    Args:
        target, drafter, inputs, token_ids: as for `draw_block`; positions: some of `positions_of`.
    """
    if not positions:
        return []
    prompt = inputs["input_ids"]
    ids = torch.cat([prompt, torch.tensor([list(token_ids)], dtype=prompt.dtype, device=prompt.device)], dim=1)
    fewest = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(target.forward).parameters else {}
    hidden = target(ids, output_hidden_states=True, use_cache=False, **fewest).hidden_states
    target_hidden = torch.cat([hidden[i + 1].to(drafter.device) for i in drafter.config.target_layer_ids], dim=-1)
    target_hidden = target_hidden.to(drafter.dtype)
    return [_draft_at(target, drafter, ids, target_hidden, position) for position in positions]


def _draft_at(target: Any, drafter: Any, ids: torch.Tensor, target_hidden: torch.Tensor, position: int) -> DrawnBlock:
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    draft = drafter.draft(
        ids[0, position : position + 1].to(drafter.device),
        target_hidden[:, :position],
        torch.arange(position, device=drafter.device)[None],
        drafter.new_cache(),
        lambda tokens: embedding(tokens.to(target.device)).to(device=drafter.device, dtype=drafter.dtype),
        lambda states: lm_head(states.to(device=target.device, dtype=target.dtype)).to(drafter.device),
        return_lattice=True,
    )
    drafted = draft.tokens[0].tolist()
    truth = ids[0, position + 1 : position + 1 + len(drafted)].tolist()
    accepted = first_difference(drafted, truth)
    return DrawnBlock(draft.lattice, tuple(drafted), tuple(truth), len(drafted) if accepted is None else accepted)


def _confirmed_corrections(block: DrawnBlock) -> int:
    return int((block.lattice.picks[0, : block.accepted] > 0).sum())
