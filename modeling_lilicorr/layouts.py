"""Checkpoints of other runtimes: z-lab's DFlash layout, and that of LiLiCorr's authors which SGLang and vLLM serve.

Both describe themselves in a `config.json` of type `qwen3` with a `dflash_config`, and name the backbone's tensors
without a prefix. The authors' layout adds the head: `lilicorr_*` keys, and tensors under `lilicorr.`.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint_files import CONFIG, WEIGHTS, Header, local_folder, read_headers, read_json, weight_files
from .config_checks import TEXT, Each, Kind, Real, Type, Whole, kind_problem, shown
from .configuration_lilicorr import LiLiCorrConfig, checked_config
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
    "hidden_act",
    "layer_types",
)
OPTIONAL_KEYS = (
    "attention_bias",
    "attention_dropout",
    "initializer_range",
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
KINDS: dict[str, Kind] = {  # what is worked with before the configuration's own checks
    "dflash_config": Type(dict, "a mapping", optional=True),
    "rope_parameters": Type(dict, "a mapping", optional=True),
    "rope_scaling": Type(dict, "a mapping", optional=True),
    "layer_types": Each(TEXT, optional=True),
    "hidden_size": Whole(1, optional=True),
}
SERVING_KINDS: dict[str, Kind] = {
    "lilicorr_hidden_size": Whole(0, 1 << 20),  # 0 is the drafter's width
    RATIO_KEY: Real(0, 1 << 10),
}
SERVED_NAMES = {  # ours: what released servers call it, in the head under `lilicorr.` or in one of its `layers.i.`
    "feature_mlp.0": "feature_norm",
    "feature_mlp.1": "feature_mlp.up_proj",
    "feature_mlp.3": "feature_mlp.down_proj",
    "mlp.0": "mlp.up_proj",
    "mlp.2": "mlp.down_proj",
}
OUR_NAMES = {theirs: ours for ours, theirs in SERVED_NAMES.items()}
CONVOLUTION_KEYS = ("conv_kernel_size", "conv_group_size")
# Settings of `dflash_config` that change what the drafter computes, and the value that leaves it unchanged.
UNSUPPORTED = {
    "selector_rank": 0,
    "selector_top_k": 0,
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": None,
}


def read_checkpoint(
    source: str | os.PathLike, revision: str | None = None, local_files_only: bool = False
) -> tuple[dict[str, Any], dict[str, Header]]:
    """`config.json` and the headers of all tensors of a local folder or Hub repository, single or sharded.

    Args:
        source: folder, or `owner/name` on the Hub, of which safetensors and JSON alone are fetched.
        revision: branch, tag or commit on the Hub.
        local_files_only: take what the cache holds, and ask nobody.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is torn, or holds a tensor under our and the servers' name.
    """
    folder = local_folder(source)
    if folder is None:
        patterns = ["*.json", "*.safetensors"]
        options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        folder = Path(snapshot_download(str(source), allow_patterns=patterns, **options))
    settings = read_json(folder / CONFIG)
    headers: dict[str, Header] = {}
    for name, header in read_headers(weight_files(folder)).items():
        ours = our_name(name)
        if ours in headers:
            raise ValueError(
                f"{folder} holds {shown(ours)} under two names, {shown(headers[ours].name)} and {shown(name)}; remove "
                "the one that was not trained."
            )
        headers[ours] = header
    return settings, headers


def served_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A drafter's tensors under the names that released servers read."""
    return {_renamed(name, SERVED_NAMES): tensor for name, tensor in state.items()}


def our_name(name: str) -> str:
    """What this package calls the tensor that a serving checkpoint, or an older export of ours, calls `name`."""
    return _renamed(name, OUR_NAMES)


def _renamed(name: str, names: dict[str, str]) -> str:
    """`name` with the part that names a module of the head replaced as `names` has it."""
    parts = re.fullmatch(r"(lilicorr\.(?:layers\.\d+\.)?)([\w.]+)(\.(?:weight|bias))", name)
    return name if parts is None else parts[1] + names.get(parts[2], parts[2]) + parts[3]


def has_head(settings: dict[str, Any]) -> bool:
    """Whether a `config.json` announces the head of LiLiCorr's authors."""
    architectures = settings.get("architectures")
    return isinstance(architectures, list) and SERVING_ARCHITECTURE in architectures


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
    for name, kind in KINDS.items():
        if problem := kind_problem(name, settings.get(name), kind):
            raise ValueError(problem)
    missing = [key for key in REQUIRED_KEYS if settings.get(key) is None]
    missing += [f"dflash_config.{key}" for key in ("mask_token_id", "target_layer_ids") if nested.get(key) is None]
    block_sizes = [size for size in (settings.get("block_size"), nested.get("block_size")) if size is not None]
    if not block_sizes:
        missing.append("block_size")
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}, so this is not a complete DFlash checkpoint.")
    if any(size != block_sizes[0] for size in block_sizes):
        raise ValueError(f"config.json gives two block sizes, {shown(block_sizes)}; keep the one it was trained with.")
    for key, neutral in UNSUPPORTED.items():
        value = nested.get(key, settings.get(key, neutral))
        if value is not None and value != neutral:
            raise ValueError(
                f"config.json sets {key} to {shown(value)}, which this drafter does not compute; use its runtime."
            )
    arguments = {key: settings[key] for key in REQUIRED_KEYS + OPTIONAL_KEYS if settings.get(key) is not None}
    arguments["rope_parameters"] = _rope(settings)
    arguments["block_size"] = block_sizes[0]
    arguments["mask_token_id"] = nested["mask_token_id"]
    arguments["target_layer_ids"] = nested["target_layer_ids"]
    arguments["head_type"] = head_type
    convolution = {key: nested.get(key, settings.get(key)) for key in CONVOLUTION_KEYS}
    arguments |= {key: value for key, value in convolution.items() if value}
    if settings.get("is_causal", "sliding_attention" in settings["layer_types"]):
        raise ValueError(
            "config.json asks for causal blocks (is_causal, or sliding layers that do not declare it false), but "
            "blocks are bidirectional here; use its own runtime."
        )
    if has_head(settings) and head_type == "lilicorr":
        arguments["head_config"] = _head_config(nested, settings["hidden_size"])
    return checked_config({**arguments, **overrides})


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Rope settings as Transformers 5 spells them, from either spelling."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope = {key: value for key, value in given.items() if value is not None}
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
    for theirs, kind in SERVING_KINDS.items():
        if problem := kind_problem(f"dflash_config.{theirs}", nested[theirs], kind):
            raise ValueError(problem)
    if not nested.get("lilicorr_enabled", True):
        raise ValueError(f"dflash_config.lilicorr_enabled is false, but the architecture is {SERVING_ARCHITECTURE}.")
    head = {ours: nested[theirs] for ours, theirs in HEAD_KEYS.items()}
    head["hidden_size"] = head["hidden_size"] or draft_width
    head["intermediate_size"] = int(head["hidden_size"] * nested[RATIO_KEY])
    return head


def dflash_settings(config: LiLiCorrConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of the backbone in z-lab's layout, in the old and the new spelling where they differ.

    Raises:
        ValueError: its positions are not those of DFlash runtimes.
    """
    rope = dict(config.rope_parameters)
    if rope.get("rope_type", "default") == "default":
        rope.pop("partial_rotary_factor", None)  # not looked at here, but it might be there
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"This drafter rotates {rope['partial_rotary_factor']} of each head (rope_type {rope['rope_type']!r}), "
            "which DFlash runtimes do not; serve it with Transformers."
        )
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
        (staging / CONFIG).write_text(text, "utf-8")
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(stored, staging / WEIGHTS, metadata={"format": "pt"})
