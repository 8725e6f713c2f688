"""Fresh weights that suit their target: the backbone from the target's last layers, the head scaled to its inputs.

A drafter reads the target's residual stream and must end in front of the target's LM head, which is what the target's
last layers already do.
"""

from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modeling_lilicorr.dflash import DFlashModel
from ..modeling_lilicorr.head_lilicorr import LiLiCorrHead
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel


@torch.no_grad()
def start_from_target(drafter: DFlashModel, target: PreTrainedModel) -> bool:
    """Copy the target's last layers and final norm into `drafter`; returns whether they fit.

    The last tap passes through `fc` unchanged, the others at the scale of their random initialisation. Where the target
    has no query and key norms, theirs are set so that attention logits keep the target's typical size.
    """
    decoder = target.base_model
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if layers is None or norm is None or len(layers) < len(drafter.layers):
        return False
    sources = list(layers[-len(drafter.layers) :])
    wanted = [_plain_state(layer) for layer in drafter.layers]
    offered = [layer.state_dict() for layer in sources]
    for want, offer in zip(wanted, offered, strict=True):
        if any(name not in offer or offer[name].shape != tensor.shape for name, tensor in want.items()):
            return False
    for layer, source, offer in zip(drafter.layers, sources, offered, strict=True):
        for name, tensor in _plain_state(layer).items():
            tensor.copy_(offer[name])
        for kind in ("q", "k"):
            own = getattr(layer.self_attn, f"{kind}_norm").weight
            theirs = getattr(source.self_attn, f"{kind}_norm", None)
            if theirs is not None and theirs.weight.shape == own.shape:
                own.copy_(theirs.weight)
            else:
                projection = getattr(source.self_attn, f"{kind}_proj")
                own.fill_(_typical_size(projection, source.input_layernorm.weight))
    drafter.norm.weight.copy_(norm.weight)
    drafter.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
    width = drafter.config.hidden_size
    drafter.fc.weight[:, -width:] += torch.eye(width, dtype=drafter.fc.weight.dtype, device=drafter.fc.weight.device)
    return True


def start_from_checkpoint(drafter: LiLiCorrModel, target: PreTrainedModel, folder: Path) -> None:
    """Load the backbone of a LiLiCorr checkpoint, and its head if it is of `drafter`'s type; else balance a fresh one.

    Raises:
        ValueError: if the checkpoint is missing or torn, or lacks backbone tensors or has them in other shapes.
    """
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"{folder} has no {file.name} to start from; give the checkpoint folder of an earlier run.")
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}); it is cut short or damaged, copy it again.") from error
    prefix = f"{drafter.config.head_type}."
    known = drafter.state_dict()
    convolved = any("_conv." in name for name in weights)
    if convolved and not drafter.config.conv_kernel_size:
        raise ValueError(
            f"{folder} has convolutions in its backbone, this drafter has none; set conv_kernel_size and "
            "conv_group_size in the recipe's config as its config.json has them."
        )
    absent = [name for name in known if name not in weights and not name.startswith(prefix)]
    if not convolved:  # they may join a backbone that has none: fresh ones change nothing
        absent = [name for name in absent if "_conv." not in name]
    if absent:
        raise ValueError(f"{folder} lacks {absent[0]!r} and {len(absent) - 1} more backbone tensors of this drafter.")
    for name in known:
        if name in weights and weights[name].shape != known[name].shape:
            raise ValueError(
                f"{folder} holds {name!r} in shape {list(weights[name].shape)}, this drafter needs "
                f"{list(known[name].shape)}; start from a checkpoint of the same target and settings."
            )
    drafter.load_state_dict({name: weights[name] for name in known if name in weights}, strict=False)
    if not any(name.startswith(prefix) for name in weights):
        balance_head(drafter, target)


@torch.no_grad()
def balance_head(drafter: LiLiCorrModel, target: PreTrainedModel) -> None:
    """Scale a fresh LiLiCorr head's input projections so that token and hidden state enter its nodes alike.

    Target embeddings and drafter states differ in size by an order of magnitude. Without this the candidates of a slot
    look alike to the head for hundreds of steps.
    """
    head = drafter.head
    if not isinstance(head, LiLiCorrHead):
        return
    entering: list[tuple[nn.Module, Tensor]] = [
        (head.token_proj, cast(Tensor, target.get_input_embeddings().weight)),
        (head.pass_hidden_proj, drafter.norm.weight),  # the states leave through this norm
    ]
    for projection, scale in entering:
        if isinstance(projection, nn.Linear):
            size = max(float(scale.float().square().mean().sqrt()), 1e-6)
            projection.weight.normal_(std=projection.in_features**-0.5 / size)


def _plain_state(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's tensors but for the query and key norms, which some targets lack, and convolutions, which all do."""
    plain = {k: v for k, v in layer.state_dict().items() if not k.endswith(("q_norm.weight", "k_norm.weight"))}
    return {k: v for k, v in plain.items() if "_conv." not in k}


def _typical_size(projection: nn.Linear, scale: Tensor) -> float:
    """Root mean square of `projection(scale * x)` for `x` with independent entries of unit variance."""
    return float((projection.weight * scale).float().square().sum(dim=1).mean().sqrt())
