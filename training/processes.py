"""What accelerate does for a run: processes, precision, sharding, sums over all of them, trackers."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.tracking import LoggerType, get_available_trackers
from accelerate.utils import ProjectConfiguration
from torch import Tensor

from .losses.joint import JointObjective
from .settings import TrainSettings


def start_accelerator(settings: TrainSettings) -> Accelerator:
    """An `Accelerator` with the run's precision and trackers, the latter writing into `trackers` of its folder.

    Raises:
        ValueError: for a tracker that is unknown or not installed.
    """
    for name in settings.trackers:
        if name not in LoggerType.list() or name == "all":
            known = ", ".join(str(each) for each in LoggerType.list() if each != "all")
            raise ValueError(f"There is no tracker {name!r}; give one of {known}.")
        if LoggerType(name) not in get_available_trackers():
            raise ValueError(f"The tracker {name} is not installed: pip install {name}.")
    folder = str(Path(settings.output) / "trackers")
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        log_with=settings.trackers or None,
        project_config=ProjectConfiguration(project_dir=settings.output, logging_dir=folder),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if settings.trackers:
        shown = {
            name: value for name, value in settings.identity().items() if isinstance(value, (bool, int, float, str))
        }
        accelerator.init_trackers("lilicorr", config=shown)
    return accelerator


def prepare(accelerator: Accelerator, joint: JointObjective, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Module and optimizer as accelerate distributes them: as they are, under DDP, or sharded by FSDP2.

    Raises:
        ValueError: for FSDP1 and other ways to shard that this loop does not know.
    """
    if accelerator.is_fsdp2:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = ["DFlashDecoderLayer", "LatticeLayer"]
        if accelerator.mixed_precision == "bf16":
            # Loss sums and their denominators leave the module: they and the gradients are added up in fp32.
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
    elif str(accelerator.distributed_type).endswith(("FSDP", "DEEPSPEED", "MEGATRON_LM")):
        raise ValueError(
            f"accelerate is set to {accelerator.distributed_type}; set it to no sharding (DDP) or to FSDP of version 2."
        )
    return accelerator.prepare(joint, optimizer)


def add_up(accelerator: Accelerator, passed: list[dict[str, Tensor]], flags: dict[str, float]) -> dict[str, Tensor]:
    """Sums over micro-batches and processes, of scalars and of `[slots]`, in one message; no gradient (fp32)."""
    names, first = list(passed[0]), passed[0]
    parts = [torch.stack([sums[name].detach().float() for sums in passed]).sum(dim=0).reshape(-1) for name in names]
    message = torch.cat([*parts, torch.tensor(list(flags.values()), device=parts[0].device)])
    if accelerator.num_processes > 1:
        message = accelerator.reduce(message, "sum")
    sizes = [first[name].numel() for name in names]
    *whole, last = message.split([*sizes, len(flags)])
    totals = {name: part.reshape(first[name].shape) for name, part in zip(names, whole, strict=True)}
    return totals | dict(zip(flags, last, strict=True))
