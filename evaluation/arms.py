"""The arms of a comparison, plain decoding first, and what each of them made of a prompt in plain numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .compare import Answer, Difference, answer, decoding_options, find_difference
from .metrics import Trace, loops
from .names import CHAIN, PLAIN, PROMPT_LOOKUPS, SUFFIXES, TEXTLESS, TREE


@dataclass(frozen=True)
class Arm:
    """One way to answer.

    Attributes:
        drafter: `None` without a drafter; settings: of its configuration while it answers.
        options: more of them for `generate`.
    """

    name: str
    drafter: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What one arm made of one prompt.

    Attributes:
        new_tokens, seconds: of the whole call, prefill included; stages: seconds of it by stage, where they are known.
        passes: of the target after the prompt's, where they were counted.
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
    passes: int | None = None

    @classmethod
    def of(cls, given: Answer, compared: bool = False, difference: Difference | None = None) -> "Measured":
        """From an answer, its `difference` to plain decoding's if they were `compared`."""
        gap = None if difference is None else difference.logit_gap
        equal = difference is None if compared else None
        new = len(given.token_ids)
        return cls(new, given.seconds, loops(given.token_ids), given.trace, given.stages, equal, gap, given.passes)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Measured":
        """Back from `to_json`."""
        return cls(**row | {"trace": None if row["trace"] is None else Trace.from_json(row["trace"])})

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and mappings."""
        return asdict(self)


def arms_of(drafters: Mapping[str, Any], kinds: Sequence[str], nodes: int | None = None) -> list[Arm]:
    """Plain decoding, and those of `names.ARMS` that `kinds` names: what needs no drafter, then every drafter's.

    Transformers' own DFlash, which serves one family of models on GPUs, is not among them.

    Args:
        nodes: of a tree, the anchor not counted; `None` for what the drafter's configuration says.
    """
    lookups = [Arm(name, options={"prompt_lookup_num_tokens": PROMPT_LOOKUPS[name]}) for name in PROMPT_LOOKUPS]
    arms = [Arm(PLAIN), *(arm for arm in lookups if arm.name in kinds)]
    fixed = {} if nodes is None else {"max_nodes": nodes}
    settings: dict[str, dict[str, Any]] = {
        TREE: {"decoding": "auto", "lookup": True, **fixed},
        CHAIN: {"decoding": "stock"},
        TEXTLESS: {"decoding": "auto", "lookup": False, **fixed},
    }
    for name, drafter in drafters.items():
        arms += [Arm(name + SUFFIXES[kind], drafter, settings[kind]) for kind in settings if kind in kinds]
    return arms


@contextmanager
def configured(drafter: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Change `settings` of the drafter's configuration (`decoding`, `lookup`, `max_nodes`) for a while."""
    held = {name: getattr(drafter.config, name) for name in settings}
    for name, value in settings.items():
        setattr(drafter.config, name, value)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(drafter.config, name, value)


def answer_as(arm: Arm, target: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> Answer:
    """`compare.answer` by `arm`, with its settings and options."""
    with configured(arm.drafter, arm.settings):
        return answer(target, inputs, arm.drafter, **options, **arm.options)


def warm_up_arms(target: PreTrainedModel, arms: Iterable[Arm], inputs: dict[str, torch.Tensor]) -> None:
    """Generate a few tokens by every arm, so that first calls are not timed."""
    for arm in arms:
        answer_as(arm, target, inputs, **decoding_options(12))


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
        arm.name: answer_as(arm, target, inputs, seed=seed, stages=True, **options)
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
