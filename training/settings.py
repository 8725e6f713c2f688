"""What defines a training run, as a dataclass and as a YAML file."""

import inspect
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from .losses import Objective


@dataclass
class TrainSettings:
    """Everything that defines a run.

    Attributes:
        target: folder or Hub id of the frozen target.
        data: JSONL files of `lilicorr regenerate`.
        output: folder for the checkpoint, the log and the state to resume from.
        init: folder of a LiLiCorr checkpoint whose backbone (and head, if of the same type) to start from; without
            one, `from_target` starts the backbone from the target's last layers where they fit.
        head_type, block_size, config: the drafter; `config` holds further `LiLiCorrConfig` arguments.
        states: folder that keeps the target's states, or `None` to run the target at every step.
        max_examples: use only this many answers (0: all), so that kept states are met again.
        max_length: tokens a sequence; loop_limit: see `load_examples`.
        batch_size: sequences a step and process; anchors: blocks a sequence.
        steps: optimiser steps in all, or 0 to derive them from `epochs`.
        learning_rate, head_learning_rate, head_weight_decay, warmup, clip: the paper's Table 4; betas: AdamW's.
        final_rate: what the cosine decays to, as a share of the peak (a later stage may take over there).
        objective: weights of the loss.
        dtype: the target's dtype; mixed_precision: `"no"` or `"bf16"` for the drafter, whose weights stay in fp32.
        seed: of initialisation, order and anchors; save_minutes: how often the state is saved; log_every: steps.
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
    objective: Objective = field(default_factory=Objective)
    dtype: str = "float32"
    mixed_precision: str = "no"
    seed: int = 0
    save_minutes: float = 5.0
    log_every: int = 20

    def identity(self) -> dict[str, Any]:
        """What must not change between a run and its continuation."""
        settings = asdict(self)
        for free in ("output", "states", "save_minutes", "log_every"):
            settings.pop(free)
        return json.loads(json.dumps(settings))  # as a state file gives it back: lists, no tuples

    def validate(self) -> None:
        """Raise a `ValueError` of one sentence for a setting of the wrong type or out of range."""
        _check_types(self)
        _check_types(self.objective)
        known = inspect.signature(LiLiCorrConfig).parameters
        for name in self.config:
            if name in ("head_type", "block_size"):
                raise ValueError(f"{name} stands in config; set it beside config, not inside.")
            if name not in known and not str(name).endswith("_token_id"):
                raise ValueError(f"config sets {name!r}, which is no argument of LiLiCorrConfig; mend or remove it.")
        for name in ("max_length", "batch_size", "anchors", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more.")
        for name in ("steps", "max_examples", "loop_limit", "epochs", "learning_rate", "head_learning_rate", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more.")
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision is {self.mixed_precision!r}, expected 'no' or 'bf16'.")

    @classmethod
    def from_recipe(cls, path: str | Path, **overrides: Any) -> "TrainSettings":
        """Read a YAML mapping of the attributes above (`objective` a mapping too); `overrides` win over it.

        Raises:
            ValueError: if the file is no such mapping, names an unknown setting, leaves a required one out, or gives
                one of the wrong type or out of range.
        """
        try:
            recipe = yaml.safe_load(Path(path).read_text("utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML ({' '.join(str(error).split())}); mend it.") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text; give a YAML file of settings.") from None
        if not isinstance(recipe, dict):
            raise ValueError(f"{path} holds {type(recipe).__name__}, expected a mapping of settings.")
        recipe |= overrides
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
        raise ValueError(f"{path} sets {unknown[0]!r}, which is none of {', '.join(known)}.")
