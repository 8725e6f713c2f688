"""Training states on disk: one safetensors file a step, moved into place whole, so that a killed run resumes.

A state holds whole tensors under their parameters' names, however they were sharded, so the number of processes may
change between a run and its continuation. Order, draws and learning rates depend on the step alone (`batch_order.py`,
`optimizer.py`): the step is their state.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = "resume"
_NAME = re.compile(r"step-(\d+)\.safetensors")


def kept_states(output: Path) -> list[Path]:
    """The finished states in `output`, the latest first."""
    found = [path for path in (output / FOLDER).glob("step-*.safetensors") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def save_state(
    output: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: dict[str, Any],
    extra: dict[str, Tensor],
    keep: int,
    writes: bool = True,
) -> None:
    """Write weights, moments, `step`, `extra` and what the run is (`identity`); keep the latest `keep` states.

    Every process calls this, since shards are gathered; only the one that `writes` touches the disk.

    Raises:
        OSError: in one sentence if the disk is full or fails; the older states are untouched.
    """
    gathered = _whole_state(model, optimizer, writes)
    if not writes:
        return
    folder = output / FOLDER
    path = folder / f"step-{step:08d}.safetensors"
    unfinished = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"step": str(step), "identity": json.dumps(identity, sort_keys=True)}
        save_file(gathered | {f"extra.{name}": value for name, value in extra.items()}, unfinished, metadata=metadata)
        _flush(unfinished)
        os.replace(unfinished, path)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        needed = sum(value.numel() * value.element_size() for value in gathered.values())
        raise not_written(
            f"The state of step {step} ({size_said(needed)})", folder, error, resort_of(output)
        ) from error
    for old in kept_states(output)[keep:]:
        old.unlink(missing_ok=True)


def size_said(size: int) -> str:
    """So many bytes in GB, or in MB if it is less than 0.1 of them."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def resort_of(output: Path) -> str:
    """What there is to go on from, as part of a sentence."""
    states = kept_states(output)
    return f"{states[0].name} is kept to go on from" if states else "no state was saved before"


def local_floats(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Those of `tensors` that hold floats, each the part that this process has."""
    for name, tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if own.is_floating_point():
            yield name, own.detach()


def not_written(what: str, where: Path, error: Exception, resort: str) -> OSError:
    """One sentence for a disk that is full or fails."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return OSError(
        f"{what} could not be written to {where} ({reason}); {resort}: make room and give the same command again."
    )


def load_state(
    output: Path, model: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> tuple[int, dict[str, Tensor]]:
    """Restore the latest state of `save_state`; returns the next step (0 if there is no state) and `extra`.

    Raises:
        ValueError: if the state belongs to a run with other settings or data, is damaged, or holds NaN.
    """
    if (output / "state.safetensors").exists():
        raise ValueError(f"{output} holds a state in an older format, which cannot go on; choose another folder.")
    states = kept_states(output)
    if not states:
        return 0, {}
    path = states[0]
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            step, theirs = int(metadata["step"]), json.loads(metadata["identity"])
            _check(path, identity, theirs)
            _restore(file, model, optimizer)
            extra = {n.removeprefix("extra."): file.get_tensor(n) for n in file.keys() if n.startswith("extra.")}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it to {_resort(states)}.") from error
    for name, own in local_floats(state_tensors(model, optimizer)):
        if not bool(own.isfinite().all()):
            raise ValueError(f"{path} holds numbers in {name} that are not finite; delete it to {_resort(states)}.")
    return step, extra


def _resort(states: list[Path]) -> str:
    return "resume from the state before it" if len(states) > 1 else "start this run afresh"


def _check(path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    if "-" not in theirs["data"]:  # an older state names its data by ids and lengths alone
        ours = ours | {"data": ours["data"].partition("-")[0]}
    changed = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if changed:
        raise ValueError(
            f"{path} belongs to a run with another {', '.join(changed)}; give that run's to go on with it, or another "
            "output folder."
        )


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Weights and moments by name, as this process holds them."""
    for name, tensor in model.state_dict().items():
        yield f"model.{name}", tensor
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, moments in optimizer.state.items():
        for key, value in moments.items():
            yield f"optimizer.{names[parameter]}.{key}", value


def _whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, keeps: bool) -> dict[str, Tensor]:
    """All tensors on the CPU, shards put together one by one; empty in a process that does not keep them."""
    gathered = {}
    for name, tensor in state_tensors(model, optimizer):
        whole = whole_tensor(tensor)
        if keeps:
            gathered[name] = whole.detach().cpu().contiguous()
    return gathered


def whole_tensor(tensor: Tensor) -> Tensor:
    """`tensor`, or what its shards in all processes make up."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy `whole` into `tensor`, or this process's part of it."""
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(tensor, DTensor)
        whole = distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(whole)


@torch.no_grad()
def _restore(file: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, tensor in model.state_dict().items():
        _fill(tensor, file.get_tensor(f"model.{name}"))
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    moments: dict[str, list[str]] = {}
    for name in file.keys():  # noqa: SIM118 (no mapping)
        if name.startswith("optimizer."):
            moments.setdefault(name.removeprefix("optimizer.").rpartition(".")[0], []).append(name)
    for name, parameter in model.named_parameters():
        for full in sorted(moments.get(name, ())):
            whole, key = file.get_tensor(full), full.rpartition(".")[2]
            if whole.shape == parameter.shape and whole.ndim:
                own = torch.zeros_like(parameter)
                _fill(own, whole)
                whole = own
            elif on_device:
                whole = whole.to(parameter.device)
            optimizer.state[parameter][key] = whole


def _flush(path: Path) -> None:
    """Have the operating system put `path` on the disk, so that a power cut cannot undo what follows."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
