"""Acceptance along answers that are already there: what every drafter would have got accepted, without generating.

The target's answer does not depend on the drafter. Greedy, it is the target's argmax anyway; sampled, a draft is
accepted with the target's own probability of its token, which is what happens if the target draws first and a draft
counts where it foretold the draw. All drafters therefore meet the same text, and all blocks of it can be drafted at
once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..candidate_generator.figures import GenerationFigures
from ..kernels.reference import exact_path, longest_path
from ..modeling_lilicorr.lattice import Block, Draft
from ..training.block_states import block_states
from .metrics import Trace, trace_of

TOGETHER = 32  # blocks that go through the LM head and the drafter's head at once
RULES = ("draft", "first candidates", "exact path", "longest path", "best path there is")


@dataclass(frozen=True)
class Text:
    """A known text with one answer in it.

    Attributes:
        token_ids: prompt, answer and whatever comes behind it.
        start, end: the answer's first position and the one behind its last.
        ended: whether the answer ends of itself, not by a limit.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    ended: bool


def answers_in(token_ids: Sequence[int], said: Sequence[bool], ends: Collection[int]) -> list[Text]:
    """Every answer of at least two tokens in a text; `said` marks their tokens, `ends` are ids that end one."""
    starts = [i for i, now in enumerate(said) if now and not (i and said[i - 1])]
    texts = []
    for start in starts:
        end = next((i for i in range(start, len(said)) if not said[i]), len(said))
        if end - start > 1:
            texts.append(Text(token_ids, start, end, token_ids[end - 1] in ends))
    return texts


@torch.no_grad()
def drafts_along(
    target: PreTrainedModel, drafter: Any, text: Text, target_hidden: Tensor, num_slots: int | None = None
) -> list[Draft]:
    """What `drafter` drafts behind every token of the answer but its last, `TOGETHER` blocks in one `Draft`.

    Args:
        drafter: on the target's device; target_hidden: the target's hidden states, `[1, L, layers * d]`.
        num_slots: tokens drafted at a time, at most `B - 1`.

    Returns:
        Drafts with their lattices; `probabilities` are computed for heads whose trees need them.
    """
    device, slots = target.device, _slots(drafter, num_slots)
    ids = torch.tensor([text.token_ids[: text.end]], device=device)
    anchors = torch.arange(text.start, text.end - 1, device=device)
    embed, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    context, states = block_states(drafter, embed, ids, target_hidden[:, : text.end], anchors[None], TOGETHER, slots)
    hidden, made = states[0, :, 1:], []
    for rows in torch.arange(len(anchors), device=device).split(TOGETHER):
        places = anchors[rows]
        block = Block(
            hidden=hidden[rows],
            logits=lm_head(hidden[rows].to(target.dtype))[..., : drafter.config.vocab_size].to(drafter.dtype),
            anchor_ids=ids[0, places],
            anchor_state=context[0, (places - 1).clamp(min=0)],
            anchor_valid=places > 0,
            embed=lambda tokens: embed(tokens).to(drafter.dtype),
            anchor_hidden=states[0, rows, 0],
        )
        draft = drafter.head.draft(block, return_lattice=True)
        chances = torch.ones_like(draft.tokens, dtype=torch.float32)
        if not drafter.head.grows_trees:
            chances = draft.probabilities()
        made.append(replace(draft, probabilities=partial(_given, chances)))  # else it would hold on to the logits
    return made


def _given(chances: Tensor) -> Tensor:
    return chances


def _slots(drafter: Any, num_slots: int | None) -> int:
    return min(num_slots or drafter.config.num_slots, drafter.config.num_slots)


def walks(text: Text, drafts: Sequence[Draft]) -> dict[str, Trace]:
    """Follow `text` block by block, as Transformers' assisted loop would with these `drafts` of `drafts_along`.

    Returns:
        What would have been accepted, by `RULES`; those that the head has no scores or candidates for are absent.
        `draft` is the drafter; `first candidates` takes each slot's likeliest token, `exact path` the path with the
        highest summed score (paper Eq. 12), `longest path` that of the longest expected prefix, `best path there is`
        whatever candidate is right.
    """
    choices, place, slots = dict[str, list[Tensor]](), text.start, drafts[0].tokens.shape[1]
    ids = torch.tensor(text.token_ids[: text.end], device=drafts[0].tokens.device)
    for draft in drafts:
        count = draft.tokens.shape[0]
        truth = _truth(ids, place + torch.arange(count, device=ids.device), slots)
        for rule, right in _right(draft, truth).items():
            choices.setdefault(rule, []).append(right.cumprod(dim=1).sum(dim=1))
        place += count
    return {rule: _follow(text, torch.cat(runs).tolist(), slots) for rule, runs in choices.items()}


def _truth(ids: Tensor, places: Tensor, slots: int) -> Tensor:
    """The text behind each of `places [N]`, `[N, slots]`; -1 behind its end."""
    padded = torch.nn.functional.pad(ids, (0, slots), value=-1)
    return padded[places[:, None] + torch.arange(1, slots + 1, device=ids.device)]


def _right(draft: Draft, truth: Tensor) -> dict[str, Tensor]:
    """By rule, which slots (`[N, S]`, 0 or 1) get the text's token."""
    right = {"draft": draft.tokens == truth}
    lattice = draft.lattice
    if lattice is not None:
        first, pair, candidates = lattice.first_scores, lattice.pair_scores, lattice.candidates
        right["first candidates"] = candidates[..., 0] == truth
        if first is not None and pair is not None:
            for rule, decode in {"exact path": exact_path, "longest path": longest_path}.items():
                right[rule] = candidates.gather(-1, decode(first, pair)[..., None]).squeeze(-1) == truth
        right["best path there is"] = (candidates == truth[..., None]).any(dim=-1)
    return {rule: each.long() for rule, each in right.items()}


def _follow(text: Text, runs: Sequence[int], slots: int) -> Trace:
    """The trace of a decoder whose draft behind position `start + i` is right for `runs[i]` tokens."""
    figures, place = GenerationFigures(), text.start
    while (left := text.end - 1 - place) > 0:
        drafted = slots if text.ended else min(slots, left - 1)  # a limit leaves the last token to the target
        accepted = min(runs[place - text.start], drafted, left)
        committed = min(accepted + 1, left)
        if drafted:
            figures.add_block(drafted, committed, accepted)
        place += committed
    return trace_of(figures, text.end - text.start)
