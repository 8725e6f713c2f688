"""Checkpoints of other runtimes: z-lab's DFlash layout, and that of LiLiCorr's authors which SGLang and vLLM serve.

Both describe themselves in a `config.json` of type `qwen3` with a `dflash_config`, and name the backbone's tensors
without a prefix. The authors' layout adds the head: `lilicorr_*` keys, and tensors under `lilicorr.`.
"""

import json
import os
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .configuration_lilicorr import LiLiCorrConfig
from .repository import staged

DFLASH_ARCHITECTURE = "DFlashDraftModel"
SERVING_ARCHITECTURE = "LiLiCorrDraftModel"

REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "num_target_layers",
)
OPTIONAL_KEYS = (
    "hidden_act",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "layer_types",
    "sliding_window",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
HEAD_KEYS = {  # ours: theirs; the feed-forward width is theirs as a ratio
    "num_candidates": "lilicorr_candidate_topk",
    "hidden_size": "lilicorr_hidden_size",
    "num_layers": "lilicorr_num_layers",
    "num_heads": "lilicorr_num_heads",
    "factor_dim": "lilicorr_factor_dim",
    "logit_scale": "lilicorr_logit_scale",
    "vector_eps": "lilicorr_vector_eps",
}
RATIO_KEY = "lilicorr_mlp_ratio"
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
# Settings of `dflash_config` that change what the drafter computes, and the value that leaves it unchanged.
UNSUPPORTED = {
    "selector_rank": 0,
    "selector_top_k": 0,
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": None,
}


def read_checkpoint(source: str | os.PathLike, revision: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and all tensors of a local folder or Hub repository, single or sharded; safetensors only.

    Args:
        source: folder, or `owner/name` on the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is torn.
    """
    folder = Path(source)
    if not folder.is_dir():
        try:
            patterns = ["*.json", "*.safetensors"]
            folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))
        except HFValidationError as error:
            raise FileNotFoundError(f"{source} is neither a folder nor the name of a repository on the Hub.") from error
    settings = _read_json(folder / "config.json")
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file() and (folder / "model.safetensors.index.json").is_file():
        files = sorted(set(_read_json(folder / "model.safetensors.index.json")["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = folder / name
        if Path(name).name != name:
            raise ValueError(f"The index of {source} points outside its folder, to {name!r}; do not load it.")
        if not path.is_file():
            raise FileNotFoundError(f"{source} has no {name}; download or copy the checkpoint again.")
        try:
            tensors.update(load_file(path))
        except SafetensorError as error:
            raise ValueError(
                f"{path} cannot be read ({error}); it is cut short or damaged, download or copy it again."
            ) from error
    return settings, tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} has no {path.name}; is it a checkpoint?") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download or copy it again.") from error


def has_head(settings: dict[str, Any]) -> bool:
    """Whether a `config.json` announces the head of LiLiCorr's authors."""
    return SERVING_ARCHITECTURE in (settings.get("architectures") or [])


def config_from_dflash(settings: dict[str, Any], head_type: str, **overrides: Any) -> LiLiCorrConfig:
    """Our configuration for the `config.json` of a DFlash checkpoint.

    Args:
        settings: the parsed file.
        head_type: the head to use; `"lilicorr"` takes its settings from the checkpoint if it has one.
        **overrides: arguments of `LiLiCorrConfig` that replace what the file says.

    Raises:
        ValueError: a required key is missing, or a setting asks for something this code does not compute.
    """
    nested = settings.get("dflash_config") or {}
    missing = [key for key in REQUIRED_KEYS if settings.get(key) is None]
    missing += [f"dflash_config.{key}" for key in ("mask_token_id", "target_layer_ids") if nested.get(key) is None]
    block_sizes = {size for size in (settings.get("block_size"), nested.get("block_size")) if size is not None}
    if not block_sizes:
        missing.append("block_size")
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}, so this is not a complete DFlash checkpoint.")
    if len(block_sizes) > 1:
        raise ValueError(f"config.json gives two block sizes, {sorted(block_sizes)}; keep the one it was trained with.")
    for key, neutral in UNSUPPORTED.items():
        value = nested.get(key, settings.get(key, neutral))
        if value is not None and value != neutral:
            raise ValueError(
                f"config.json sets {key} to {value!r}, which this drafter does not compute; use its runtime."
            )
    arguments = {key: settings[key] for key in REQUIRED_KEYS + OPTIONAL_KEYS if settings.get(key) is not None}
    arguments["rope_parameters"] = _rope(settings)
    arguments["block_size"] = block_sizes.pop()
    arguments["mask_token_id"] = nested["mask_token_id"]
    arguments["target_layer_ids"] = nested["target_layer_ids"]
    arguments["head_type"] = head_type
    convolution = {key: nested.get(key, settings.get(key)) for key in CONVOLUTION_KEYS}
    arguments |= {key: value for key, value in convolution.items() if value}
    if settings.get("is_causal", "sliding_attention" in (settings.get("layer_types") or [])):
        raise ValueError(
            "config.json asks for causal blocks (is_causal, or sliding layers that do not declare it false), but "
            "blocks are bidirectional here; use its own runtime."
        )
    if has_head(settings) and head_type == "lilicorr":
        arguments["head_config"] = _head_config(nested, settings["hidden_size"])
    config = LiLiCorrConfig(**{**arguments, **overrides})
    config.validate()
    return config


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Rope settings as Transformers 5 spells them, from either spelling."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", settings.get("rope_theta"))
    if rope["rope_theta"] is None:
        raise ValueError("config.json lacks rope_theta, at the top level or in rope_parameters; positions need it.")
    return rope


def _head_config(nested: dict[str, Any], draft_width: int) -> dict[str, Any]:
    missing = [key for key in (*HEAD_KEYS.values(), RATIO_KEY) if nested.get(key) is None]
    if missing:
        raise ValueError(
            f"dflash_config lacks {', '.join(missing)}; without all of its settings another head would be rebuilt than "
            "the one that was trained."
        )
    if not nested.get("lilicorr_enabled", True):
        raise ValueError(f"dflash_config.lilicorr_enabled is false, but the architecture is {SERVING_ARCHITECTURE}.")
    head = {ours: nested[theirs] for ours, theirs in HEAD_KEYS.items()}
    head["hidden_size"] = head["hidden_size"] or draft_width
    head["intermediate_size"] = int(head["hidden_size"] * nested[RATIO_KEY])
    return head


def check_tensors(found: dict[str, Tensor], model: nn.Module, source: object, fresh: str | None = None) -> None:
    """Compare a checkpoint's tensors with those of `model` (which may be on the meta device).

    Args:
        found: tensors by name.
        model: what they are meant for.
        source: how to call the checkpoint in an error.
        fresh: prefix of parameters that the checkpoint need not have.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape.
    """
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if fresh is None or not name.startswith(fresh)
    }
    explain(
        source,
        missing=expected.keys() - found.keys(),
        unexpected=found.keys() - expected.keys(),
        mismatched=[
            (name, tuple(found[name].shape), shape)
            for name, shape in expected.items()
            if name in found and tuple(found[name].shape) != shape
        ],
    )


def explain(source: object, missing: Any, unexpected: Any, mismatched: Any) -> None:
    """Raise a `ValueError` that says what is wrong with a checkpoint's tensors, if anything is.

    `missing` and `unexpected` hold names; `mismatched` holds (name, shape found, shape expected).
    """
    if missing:
        raise ValueError(
            f"{source} lacks {len(missing)} of the tensors its config.json calls for, first {min(missing)!r}; "
            "the checkpoint is incomplete or its config.json belongs to another one."
        )
    if unexpected:
        raise ValueError(
            f"{source} holds {len(unexpected)} tensors its config.json does not call for, first {min(unexpected)!r}; "
            "dropping them would make another drafter than the one that was trained."
        )
    if mismatched:
        name, found, expected = min(mismatched, key=lambda entry: entry[0])
        raise ValueError(
            f"{source} holds {name!r} in shape {list(found)}, its config.json calls for {list(expected)}; "
            "weights and config.json belong to different drafters."
        )


def common_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The narrowest dtype that keeps the value of every tensor."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))


def dflash_settings(config: LiLiCorrConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of the backbone in z-lab's layout, in the old and the new spelling where they differ."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    settings = {key: getattr(config, key, None) for key in REQUIRED_KEYS + OPTIONAL_KEYS}
    sliding = "sliding_attention" in config.layer_types
    return settings | {
        "architectures": [DFLASH_ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "is_causal": False,
        "max_window_layers": config.num_hidden_layers,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **{key: getattr(config, key) for key in CONVOLUTION_KEYS if config.conv_kernel_size},
        },
    }


def serving_settings(config: LiLiCorrConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of backbone and head in the layout of LiLiCorr's authors.

    Raises:
        ValueError: no runtime serves this head, or not with this many candidates.
    """
    if config.head_type != "lilicorr":
        hint = " (save_dflash writes a drafter without a head)" if config.head_type == "none" else ""
        raise ValueError(
            f"No runtime serves the head {config.head_type!r} in this layout{hint}; it must be 'lilicorr'."
        )
    head = config.head_config
    count, width, inner = head["num_candidates"], head["hidden_size"], head["intermediate_size"]
    if head.get("residual"):
        raise ValueError("SGLang and vLLM serve the paper's head, this one is residual; retrain it without.")
    if head.get("walk", "greedy") != "greedy":
        raise ValueError(f"SGLang and vLLM walk greedily, this head's walk is {head['walk']!r}; set it to 'greedy'.")
    if count > 16 or count & (count - 1):
        raise ValueError(f"SGLang and vLLM serve K = 1, 2, 4, 8 or 16 candidates, this head has {count}; retrain it.")
    if int(width * (inner / width)) != inner:
        raise ValueError(f"The head's intermediate_size {inner} is not exact as a ratio to its hidden_size {width}.")
    settings = dflash_settings(config, dtype)
    settings["architectures"] = [SERVING_ARCHITECTURE]
    settings["dflash_config"] |= {
        "projector_type": "lilicorr",
        "lilicorr_enabled": True,
        **{theirs: head[ours] for ours, theirs in HEAD_KEYS.items()},
        RATIO_KEY: inner / width,
    }
    return settings


def write_checkpoint(folder: str | os.PathLike, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors`, both complete or not at all."""
    with staged(folder) as staging:
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (staging / "config.json").write_text(text, "utf-8")
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(stored, staging / "model.safetensors", metadata={"format": "pt"})
