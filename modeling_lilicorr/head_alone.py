"""A head alone, trained on the frozen backbone of somebody else's DFlash checkpoint, and how both meet again.

Its `config.json` is a whole drafter's and names the backbone in `frozen_backbone`: `name` and `revision` on the Hub,
and `sha256` of its tensors, since on any other backbone the head would score states that it has never seen.
"""

import hashlib
import os
from typing import Any

import torch
from torch import Tensor

from .checkpoint_files import Header
from .config_checks import shown
from .configuration_lilicorr import LiLiCorrConfig
from .layouts import CONVOLUTION_KEYS, config_from_dflash, dflash_settings, read_checkpoint

FROZEN = "frozen_backbone"
COMPUTED_WITH = (  # settings of DFlash's layout that decide about a backbone's states
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "attention_bias", "layer_types", "sliding_window"),
    *("num_target_layers", "block_size", "rope_parameters"),
)
COMPUTED_WITH_NESTED = ("mask_token_id", "target_layer_ids", *CONVOLUTION_KEYS)


def is_head_alone(config: LiLiCorrConfig) -> bool:
    """Whether the checkpoint of this configuration holds a head without its backbone."""
    return getattr(config, FROZEN, None) is not None


def read_head(source: str | os.PathLike, revision: str | None = None) -> tuple[LiLiCorrConfig, dict[str, Header]]:
    """Configuration and headers of a head alone, in a folder or on the Hub.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is torn, or it is a whole drafter, or none.
    """
    settings, headers = read_checkpoint(source, revision)
    config = LiLiCorrConfig.from_dict(settings)
    about = getattr(config, FROZEN, None)
    if about is None:
        raise ValueError(f"{source} holds a whole drafter, expected a head alone; load it with from_pretrained.")
    if not isinstance(about, dict) or not isinstance(about.get("sha256"), str):
        raise ValueError(
            f"config.json of {source} gives {FROZEN} as {shown(about)}, expected a mapping with a sha256; download or "
            "copy it again."
        )
    return config, headers


def without_heads(headers: dict[str, Header]) -> dict[str, Header]:
    """Of a DFlash checkpoint, what the backbone holds: no head of LiLiCorr's authors."""
    return {name: header for name, header in headers.items() if not name.startswith("lilicorr.")}


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of tensors with their names, dtypes and shapes."""
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()


def check_settings(config: LiLiCorrConfig, settings: dict[str, Any], source: object) -> None:
    """Raise a `ValueError` where a drafter of `config` computes otherwise than the DFlash checkpoint of `settings`."""
    theirs = dflash_settings(config_from_dflash(settings, "none"), torch.float32)
    ours = dflash_settings(config, torch.float32)
    pairs = [(key, ours[key], theirs[key]) for key in COMPUTED_WITH]
    nested, others = ours["dflash_config"], theirs["dflash_config"]
    pairs += [(key, nested.get(key), others.get(key)) for key in COMPUTED_WITH_NESTED]
    for key, mine, other in pairs:
        if mine != other:
            raise ValueError(
                f"{source} has {key} {shown(other)}, the head belongs to a backbone with {shown(mine)}; give the "
                "backbone that it was trained on."
            )


def check_backbone(
    config: LiLiCorrConfig, settings: dict[str, Any], tensors: dict[str, Tensor], source: object
) -> None:
    """Raise a `ValueError` unless a DFlash checkpoint is the backbone that a head alone of `config` was trained on."""
    check_settings(config, settings, source)
    about = getattr(config, FROZEN)
    if digest(tensors) != about["sha256"]:
        where = " at ".join(str(about[key]) for key in ("name", "revision") if about.get(key))
        raise ValueError(
            f"The weights of {source} are not those that the head was trained on{f' ({where})' if where else ''}; give "
            "that backbone."
        )
