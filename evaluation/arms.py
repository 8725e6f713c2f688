"""The arms of a comparison, plain decoding first, and what each of them made of a prompt in plain numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .compare import Answer, Difference, answer, find_difference
from .metrics import Trace, loops
from .names import PLAIN, WHOLE


@dataclass(frozen=True)
class Arm:
    """One way to answer: `drafter` (`None`: plain decoding) with more `options` for `generate`."""

    name: str
    drafter: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What one arm made of one prompt.

    Attributes:
        new_tokens, seconds: of the whole call, prefill included; stages: seconds of it by stage, where they are known.
        loops: whether the answer only repeats itself; trace: what drafting did, `None` for plain decoding.
        equal: whether the answer is plain decoding's, `None` where it need not be (plain itself, sampling).
        logit_gap: how far apart the target's logits are at the first difference, `None` without one.
    """

    new_tokens: int
    seconds: float
    loops: bool
    trace: Trace | None = None
    stages: dict[str, float] = field(default_factory=dict)
    equal: bool | None = None
    logit_gap: float | None = None

    @classmethod
    def of(cls, given: Answer, compared: bool = False, difference: Difference | None = None) -> "Measured":
        """From an answer, its `difference` to plain decoding's if they were `compared`."""
        gap = None if difference is None else difference.logit_gap
        equal = difference is None if compared else None
        new = len(given.token_ids)
        return cls(new, given.seconds, loops(given.token_ids), given.trace, given.stages, equal, gap)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Measured":
        """Back from `to_json`."""
        return cls(**row | {"trace": None if row["trace"] is None else Trace.from_json(row["trace"])})

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and mappings."""
        return asdict(self)


def arms_of(drafters: Mapping[str, Any], device: torch.device) -> list[Arm]:
    """Plain decoding, every drafter, and every one that would not draft whole blocks here with these too.

    Only acceptance lengths of equal drafts compare.
    """
    arms = [Arm(PLAIN)]
    for name, drafter in drafters.items():
        arms.append(Arm(name, drafter))
        if drafter.config.draft_lengths == "adaptive" and device.type == "cpu":
            arms.append(Arm(name + WHOLE, drafter, {"num_assistant_tokens": drafter.config.num_slots}))
    return arms


def ask(
    target: PreTrainedModel,
    arms: Sequence[Arm],
    inputs: dict[str, torch.Tensor],
    *,
    first: int = 0,
    seed: int = 0,
    **options: Any,
) -> dict[str, Answer]:
    """Every arm's timed answer, by its name, one right after the other so that drift of the machine hits all alike.

    Args:
        target, inputs, seed, options: as for `compare.answer`.
        first: which arm begins (counted round), to be raised with every call.
    """
    start = first % len(arms)
    answers = {
        arm.name: answer(target, inputs, arm.drafter, seed=seed, stages=True, **options, **arm.options)
        for arm in (*arms[start:], *arms[:start])
    }
    return {arm.name: answers[arm.name] for arm in arms}


def differences(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], answers: Mapping[str, Answer]
) -> dict[str, Difference]:
    """Where greedy `answers` of `ask` part from plain decoding's, by arm; those that are equal are not named."""
    plain = answers[PLAIN].token_ids
    found = {name: find_difference(target, inputs, plain, given.token_ids) for name, given in answers.items()}
    return {name: difference for name, difference in found.items() if difference is not None}
