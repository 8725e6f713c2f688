"""Load a target and its drafter through the Auto classes, with one clear sentence for what cannot be loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..candidate_generator.requests import check_target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What libraries raise over folders that are missing, torn or hold something else.
FAILURES = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, HFValidationError, SafetensorError)


class LoadingError(RuntimeError):
    """A target or drafter could not be loaded; the message says which and why."""


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer, and the drafters that belong to it by name."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, PreTrainedModel]


def resolve_device(name: str = "auto") -> torch.device:
    """`auto` is CUDA where there is one, else the CPU.

    Raises:
        LoadingError: for a device that this machine does not have.
    """
    if name != "auto":
        try:
            device = torch.device(name)
            torch.ones(1, device=device).item()  # fails where there is no such device, and on `meta`
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise LoadingError(f"device {name!r} cannot be used here ({reason}); give cpu or auto.") from None
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`fp32`, `bf16`, or `auto`: bf16 where the hardware multiplies it natively, else fp32.

    A CPU without AMX or AVX512-BF16 emulates bf16 and gets slower, above all on the many rows of a verification.

    Raises:
        LoadingError: for any other name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise LoadingError(f"dtype is {name!r}, expected one of auto, {', '.join(DTYPES)}.")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = any(_cpu_has(check) for check in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return torch.bfloat16 if native and device.type == "cpu" else torch.float32


def _cpu_has(check: str) -> bool:
    probe = getattr(torch.cpu, check, None)  # private and young names: absent means unknown, and unknown means no
    return bool(probe and probe())


def load_pair(
    target: str | Path,
    drafters: Mapping[str, str | Path],
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Pair:
    """Load everything in one dtype on one device, in evaluation mode.

    Args:
        target: folder or repository of a decoder-only causal LM.
        drafters: name to folder or repository.
        dtype: see `resolve_dtype`; device: see `resolve_device`.
        trust_remote_code: whether to run code that target and drafters bring along.

    Raises:
        LoadingError: naming what could not be loaded and why.
    """
    place = resolve_device(device)
    options: dict[str, Any] = {"dtype": resolve_dtype(dtype, place), "trust_remote_code": trust_remote_code}
    tokenizer = _load(AutoTokenizer, "tokenizer", target, trust_remote_code=trust_remote_code)
    model = _load(AutoModelForCausalLM, "target", target, **options)
    loaded = {name: _load(AutoModel, "drafter", path, **options) for name, path in drafters.items()}
    for path, drafter in zip(drafters.values(), loaded.values(), strict=True):
        if not hasattr(drafter, "get_candidate_generator"):
            raise LoadingError(f"{path} holds a {type(drafter).__name__}, not a drafter; swap --target and --drafter?")
        try:
            check_target(drafter, model)
        except ValueError as error:
            raise LoadingError(f"The drafter {path} does not fit: {error}") from None
    return Pair(model.to(place).eval(), tokenizer, {name: d.to(place).eval() for name, d in loaded.items()})


def _load(auto: Any, role: str, source: str | Path, **options: Any) -> Any:
    path = Path(source)
    if path.is_dir() and role != "tokenizer" and not (path / "config.json").is_file():
        raise LoadingError(f"The {role} folder {path} holds no config.json; give a folder written by save_pretrained.")
    if not path.exists() and (path.is_absolute() or str(source).startswith(".") or str(source).count("/") > 1):
        raise LoadingError(f"The {role} folder {path} does not exist; give a model folder or a repository id.")
    try:
        return auto.from_pretrained(str(source), **options)
    except FAILURES as error:
        reason = " ".join(str(error).split())
        missing = "" if path.exists() else "there is no such folder, and as a repository: "
        raise LoadingError(f"The {role} {source} could not be loaded: {missing}{reason}") from error
