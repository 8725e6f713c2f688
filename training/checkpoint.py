"""Training state on disk: one safetensors file, moved into place whole, so that a killed run resumes where it stood."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

STATE_FILE = "state.safetensors"


def save_state(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> None:
    """Write weights, optimiser moments, `step` and what the run is (`identity`), replacing the older state."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    unfinished = directory / (STATE_FILE + ".tmp")
    save_file(tensors, unfinished, metadata={"step": str(step), "identity": json.dumps(identity, sort_keys=True)})
    os.replace(unfinished, directory / STATE_FILE)


def load_state(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]) -> int:
    """Restore what `save_state` wrote into `model` and `optimizer`; returns the next step, 0 if there is no state.

    Raises:
        ValueError: if the state belongs to a run with other settings, or is damaged.
    """
    path = directory / STATE_FILE
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            step, theirs = int(metadata["step"]), json.loads(metadata["identity"])
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it to start this run afresh.") from error
    changed = sorted(key for key in identity.keys() | theirs.keys() if identity.get(key) != theirs.get(key))
    if changed:
        raise ValueError(
            f"{path} belongs to a run with another {', '.join(changed)}; choose another output folder or delete it."
        )
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            moments.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return step
