"""Options of the drafter's layers in training: frozen, recomputed in the backward pass, compiled."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from ..modeling_lilicorr.dflash import DFlashDecoderLayer
from ..modeling_lilicorr.head_lilicorr import LatticeLayer
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .settings import TrainSettings


def apply_layer_options(drafter: LiLiCorrModel, settings: TrainSettings) -> None:
    """Set up `drafter` as `settings` say; its parameters keep their names.

    Raises:
        ValueError: for a compiler backend that is not there.
    """
    if settings.freeze_backbone:
        prefix = f"{drafter.config.head_type}."
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith(prefix))
    if settings.gradient_checkpointing and not settings.freeze_backbone:
        for layer in drafter.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if settings.compile != "no":
        known = torch.compiler.list_backends(exclude_tags=())
        if settings.compile not in known:
            raise ValueError(f"compile is {settings.compile!r}, expected 'no' or one of {', '.join(known)}.")
        for module in drafter.modules():
            if isinstance(module, (DFlashDecoderLayer, LatticeLayer)):
                module.compile(backend=settings.compile, dynamic=True)
