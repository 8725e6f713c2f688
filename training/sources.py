"""The sequences that a run trains on, and the mask token that none of them holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..modeling_lilicorr.configuration_lilicorr import choose_mask_token
from .data import Example, load_examples
from .settings import TrainSettings
from .tally import Tally, Unusable


def training_examples(
    settings: TrainSettings, tokenizer: Any, target_config: Any, tally: Tally
) -> tuple[list[Example], int]:
    """The examples of `settings.data`, or as many of them as `settings.max_examples` says, and the mask token.

    Left out and counted in `tally` are those with ids that the target lacks and those that hold the mask token, where
    the recipe, the checkpoint to start from or the lack of an unused row leaves no other.

    Raises:
        ValueError: if nothing is left, or no mask token can be chosen.
    """
    text = target_config.get_text_config()
    examples = load_examples(settings.data, tokenizer, settings.max_length, settings.loop_limit, tally)
    lacks = f"which {settings.target} lacks; regenerate it with this target"
    examples = _without(examples, tally, lambda token: token >= text.vocab_size, "a token the target lacks", lacks)
    mask = settings.config.get("mask_token_id", _mask_of(settings.init))
    if mask is None:
        said = set[int]().union(*(example.input_ids for example in examples))
        try:
            mask = choose_mask_token(text, said.union(tokenizer.get_vocab().values()))
        except ValueError:
            raise ValueError(
                f"Every embedding row of {settings.target} is in use and its pad token is missing or ends texts; set "
                "config.mask_token_id to a token that no text holds (--set config.mask_token_id=ID)."
            ) from None
    elif type(mask) is not int:
        raise ValueError(f"mask_token_id is {mask!r}, expected a whole number: the id of a token that no text holds.")
    holds = "the drafter's mask; leave the row out, or set config.mask_token_id to a token that no text holds"
    examples = _without(examples, tally, lambda token: token == mask, "the mask token in the text", holds)
    if settings.max_examples:
        # Whatever the seed, the same answers: runs that follow each other share their kept states.
        chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
        examples = [examples[i] for i in chosen[: settings.max_examples].tolist()]
    return examples, mask


def report_left_out(tally: Tally) -> None:
    """Print what was left out, a line a reason."""
    for line in tally.lines():
        print(f"left out: {line}")


def _without(
    examples: list[Example], tally: Tally, unfit: Callable[[int], bool], reason: str, why: str
) -> list[Example]:
    """Those of `examples` without a token that is `unfit`; the others go to `tally`."""
    fit = []
    for example in examples:
        token = next((token for token in example.input_ids if unfit(token)), None)
        if token is None:
            fit.append(example)
        else:
            tally.leave_out(Unusable(reason, f"The row {example.id} holds token id {token}, {why}."))
    if not fit:
        raise ValueError(f"Nothing is left to train on: {'; '.join(tally.lines())}")
    return fit


def _mask_of(init: str | None) -> int | None:
    """The mask token of the checkpoint in `init`: another would have to be learnt anew."""
    try:
        config = json.loads((Path(init) / "config.json").read_text("utf-8")) if init else {}
    except (OSError, ValueError):
        return None  # whoever loads the checkpoint says what is wrong with it
    return config.get("mask_token_id") if isinstance(config, dict) else None
