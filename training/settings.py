"""What defines a training run, as a dataclass and as a YAML file."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

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
        return settings

    @classmethod
    def from_recipe(cls, path: str | Path, **overrides: Any) -> "TrainSettings":
        """Read a YAML mapping of the attributes above (`objective` a mapping too); `overrides` win over it.

        Raises:
            ValueError: if the file is no such mapping, names an unknown setting, or leaves a required one out.
        """
        try:
            recipe = yaml.safe_load(Path(path).read_text("utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML ({error}); mend it.") from None
        if not isinstance(recipe, dict):
            raise ValueError(f"{path} holds {type(recipe).__name__}, expected a mapping of settings.")
        recipe |= overrides
        objective = recipe.pop("objective", {})
        _check_names(path, recipe, cls)
        _check_names(path, objective, Objective)
        missing = [name for name in ("target", "data", "output") if not recipe.get(name)]
        if missing:
            raise ValueError(f"{path} does not set {', '.join(missing)}; add it there or as an option.")
        return cls(**recipe, objective=Objective(**objective))


def _check_names(path: str | Path, given: dict[str, Any], kind: type) -> None:
    known = [f.name for f in fields(kind)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{path} sets {unknown[0]!r}, which is none of {', '.join(known)}.")
