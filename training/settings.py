"""What defines a training run, as a dataclass and as a YAML file."""

import difflib
import inspect
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from ..hub.precision import check_dtype, torch_name
from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from ..modeling_lilicorr.head_settings import HEAD_TYPES, OPTIONAL, default_head_config
from .losses.registry import build_head_loss
from .losses.terms import Objective
from .recipe_files import find_recipe

NOT_NEGATIVE = (
    "steps", "max_examples", "loop_limit", "micro_batch_size", "epochs", "learning_rate", "head_learning_rate",
    "head_weight_decay", "save_minutes", "save_every", "blocks_at_once",
)  # fmt: skip
# What a run may change when it goes on: it moves no weight, or only by rounding.
FREE = {
    "output", "states", "micro_batch_size", "gradient_checkpointing", "compile", "blocks_together", "blocks_at_once",
    "save_minutes",
    "save_every", "keep_states", "log_every", "trackers", "strict",
}  # fmt: skip


@dataclass
class TrainSettings:
    """Everything that defines a run.

    Attributes:
        target: folder or Hub id of the frozen target.
        data: JSONL files of `lilicorr regenerate`; strict: stop at a row or answer of them that cannot be used, instead
            of counting it.
        output: folder for the checkpoint, the log and the state to resume from.
        init: folder of a LiLiCorr checkpoint whose backbone (and head, if of the same type) to start from; without
            one, `from_target` starts the backbone from the target's last layers where they fit.
        head_type, block_size, config: the drafter; `config` holds further `LiLiCorrConfig` arguments.
        states: folder that keeps the target's states, or `None` to run the target at every step.
        max_examples: use only this many answers (0: all), so that kept states are met again.
        max_length: tokens a sequence; loop_limit: see `load_examples`.
        batch_size: sequences an optimiser step, over all processes together; anchors: blocks a sequence.
        micro_batch_size: sequences that go through one process at a time, gradients being accumulated over the
            others; 0: all of its share at once. Losses and gradients are those of the whole batch either way.
        steps: optimiser steps in all, or 0 to derive them from `epochs`.
        learning_rate, head_learning_rate, head_weight_decay, warmup, clip: the paper's Table 4; betas: AdamW's.
        final_rate: what the cosine decays to, as a share of the peak (a later stage may take over there).
        freeze_backbone: train the head only.
        objective: weights of the loss.
        dtype: the target's, `auto`, `fp32`, `bf16` or `fp16` (kept as torch spells it); mixed_precision: `"no"` or
            `"bf16"` for the drafter, whose weights stay in fp32.
        gradient_checkpointing: recompute the backbone's layers in the backward pass instead of keeping them.
        compile: backend of `torch.compile` for the layers, such as `"inductor"`, or `"no"`.
        blocks_together: blocks of a sequence that attend as one. They share a copy of its keys and values, but every
            pair of them costs masked products: 1 is the least arithmetic, all anchors the least copying.
        blocks_at_once: of more blocks a sequence than this (0: no limit) the activations are not kept for the backward
            pass but recomputed, so many blocks at a time.
        seed: of initialisation, order and anchors.
        save_minutes, save_every: how often the state is saved, in minutes and in steps (0: by minutes only).
        keep_states: how many of the latest states are kept; log_every: steps; trackers: of accelerate, by name.
    """

    target: str
    data: list[str]
    output: str
    init: str | None = None
    from_target: bool = True
    head_type: str = "lilicorr"
    block_size: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    states: str | None = None
    max_examples: int = 0
    max_length: int = 3072
    loop_limit: int = 0
    batch_size: int = 4
    micro_batch_size: int = 0
    anchors: int = 512
    epochs: float = 1.0
    steps: int = 0
    learning_rate: float = 6e-4
    head_learning_rate: float = 1.5e-4
    head_weight_decay: float = 0.01
    warmup: float = 0.04
    final_rate: float = 0.0
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    freeze_backbone: bool = False
    objective: Objective = field(default_factory=Objective)
    dtype: str = "float32"
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    compile: str = "no"
    blocks_together: int = 32
    blocks_at_once: int = 0
    seed: int = 0
    save_minutes: float = 5.0
    save_every: int = 0
    keep_states: int = 2
    log_every: int = 20
    trackers: list[str] = field(default_factory=list)
    strict: bool = False

    def __post_init__(self) -> None:
        with suppress(ValueError, TypeError):  # `validate` says what is wrong with it
            self.dtype = torch_name(self.dtype)

    def identity(self) -> dict[str, Any]:
        """What must not change between a run and its continuation; processes and micro-batches may."""
        settings = {name: value for name, value in asdict(self).items() if name not in FREE}
        return json.loads(json.dumps(settings))  # as a state file gives it back: lists, no tuples

    def validate(self) -> None:
        """Raise a `ValueError` of one sentence for a setting of the wrong type or out of range."""
        _check_types(self)
        _check_types(self.objective)
        check_dtype(self.dtype)
        self.objective.validate()
        build_head_loss(self.head_type, self.objective)
        known = inspect.signature(LiLiCorrConfig).parameters
        for name in self.config:
            if name in ("head_type", "block_size"):
                raise ValueError(f"{name} stands in config; set it beside config, not inside.")
            if name not in known and not str(name).endswith("_token_id"):
                raise ValueError(f"config sets {name!r}, which is no argument of LiLiCorrConfig; fix or remove it.")
        for name in ("max_length", "batch_size", "anchors", "log_every", "keep_states", "blocks_together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more.")
        for name in NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite number, 0 or more.")
        for name in ("warmup", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a share from 0 to 1.")
        if not self.clip > 0:
            raise ValueError(f"clip is {self.clip}, expected a gradient norm above 0 (.inf clips nothing).")
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision is {self.mixed_precision!r}, expected 'no' or 'bf16'.")
        if self.freeze_backbone and self.head_type == "none":
            raise ValueError("freeze_backbone leaves nothing to train with head_type 'none'; choose a head.")

    @classmethod
    def from_recipe(
        cls,
        path: str | Path,
        default_target: Callable[[], object] | None = None,
        changes: Sequence[str] = (),
        **overrides: Any,
    ) -> "TrainSettings":
        """Read a YAML mapping of the attributes above (`objective` a mapping too); `overrides` win over it.

        `path` is a file, or the name of a recipe that comes along, see `find_recipe`. `default_target` gives the target
        where neither sets one. `changes` are settings as `change` takes them, which win over the file.

        Raises:
            ValueError: if the file is no such mapping, names an unknown setting, leaves a required one out, or gives
                one of the wrong type or out of range.
        """
        path = find_recipe(path)
        try:
            recipe = yaml.safe_load(Path(path).read_text("utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML ({' '.join(str(error).split())}); fix it.") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text; give a YAML file of settings.") from None
        if not isinstance(recipe, dict):
            raise ValueError(f"{path} holds {type(recipe).__name__}, expected a mapping of settings.")
        for text in changes:
            change(recipe, text)
        recipe |= overrides
        if not recipe.get("target") and default_target is not None:
            recipe["target"] = str(default_target())
        objective = recipe.pop("objective", {})
        if not isinstance(objective, dict):
            raise ValueError(f"{path} sets objective to {objective!r}, expected a mapping of its weights.")
        _check_names(path, recipe, cls)
        _check_names(path, objective, Objective)
        missing = [name for name in ("target", "data", "output") if not recipe.get(name)]
        if missing:
            raise ValueError(f"{path} does not set {', '.join(missing)}; add it there or as an option.")
        settings = cls(**recipe, objective=Objective(**objective))
        try:
            settings.validate()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return settings


def change(recipe: dict[str, Any], text: str) -> None:
    """Set in `recipe` what `text` says, such as `objective.penalty=0`: a name, dots into mappings, a YAML value.

    Raises:
        ValueError: `text` is not of this form, or a name with something below it is no mapping.
    """
    path, equals, value = text.partition("=")
    *parents, name = path.split(".")
    if not equals or not all([*parents, name]):
        raise ValueError(f"--set takes NAME=VALUE such as objective.penalty=0, got {text!r}.")
    place = recipe
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ValueError(f"--set {text}: {parent} is {place!r}, no mapping of settings; set {parent} itself.")
    try:
        place[name] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(
            f"--set {text}: the value is not valid YAML ({' '.join(str(error).split())}); fix it."
        ) from None


def _check_types(settings: Any) -> None:
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not _is_a(value, kind):
            expected = getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)
            hint = " (YAML needs a point in 6.0e-4)" if kind is float and isinstance(value, str) else ""
            raise ValueError(f"{name} is {value!r}, expected {expected}{hint}.")


def _is_a(value: Any, kind: Any) -> bool:
    """Whether `value` is a `kind`; whole numbers count as floats, lists as tuples."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, inner[0]) for item in value)
    if origin is tuple:
        pairs = isinstance(value, (list, tuple)) and len(value) == len(inner)
        return pairs and all(_is_a(item, part) for item, part in zip(value, inner, strict=True))
    if origin is dict:
        return isinstance(value, dict)
    if inner:  # a union
        return any(_is_a(value, part) for part in inner)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_names(path: str | Path, given: dict[str, Any], kind: type) -> None:
    known = [f.name for f in fields(kind)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{path} sets {unknown[0]!r}{_meant(str(unknown[0]), known)}")


def _meant(name: str, known: list[str]) -> str:
    """What may have been meant by `name`, which is none of `known`: a setting of a mapping, one spelt alike, or any."""
    heads = {key for head in HEAD_TYPES for key in [*default_head_config(head, 64), *OPTIONAL.get(head, ())]}
    drafter = [each for each in inspect.signature(LiLiCorrConfig).parameters if each != "kwargs"]
    mappings = {"objective.": [f.name for f in fields(Objective)], "config.": drafter, "config.head_config.": [*heads]}
    places = [prefix + name for prefix, names in mappings.items() if name in names and names != known]
    if places:
        return f", which is {' or '.join(places)}: --set {places[0]}=…, or inside that mapping of the recipe."
    alike = difflib.get_close_matches(name, known, 3)
    return f"; did you mean {' or '.join(alike)}?" if alike else f", which is none of {', '.join(known)}."
