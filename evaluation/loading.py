"""Load a target and its drafter through the Auto classes, with one clear sentence for what cannot be loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lilicorr
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..candidate_generator.requests import check_target
from ..hub.precision import torch_dtype
from ..hub.sources import check_model, check_tokenizer_files
from ..training.target import UNLOADABLE


class LoadingError(ValueError):
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
    """`auto`, `fp32`, `bf16` or `fp16` as `hub.precision.torch_dtype` reads them.

    Raises:
        LoadingError: for any other name.
    """
    try:
        return torch_dtype(name, device)
    except ValueError as error:
        raise LoadingError(str(error)) from None


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
    assert lilicorr.LiLiCorrModel  # its classes are registered now, which the command line leaves for later
    place = resolve_device(device)
    options: dict[str, Any] = {"dtype": resolve_dtype(dtype, place), "trust_remote_code": trust_remote_code}
    try:
        for role, source in [("target", target), *(("drafter", path) for path in drafters.values())]:
            check_model(role, source)
    except ValueError as error:
        raise LoadingError(str(error)) from None
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
    try:
        if role == "tokenizer":
            check_tokenizer_files(source)
        return auto.from_pretrained(str(source), **options)
    except UNLOADABLE as error:
        reason = " ".join(str(error).split())
        missing = "" if Path(source).exists() else "there is no such folder, and as a repository: "
        raise LoadingError(f"The {role} {source} could not be loaded: {missing}{reason}") from error
