"""What figures were measured on, and with which weights."""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from .loading import Pair


def machine(device: torch.device) -> dict[str, Any]:
    """Device, threads and versions that a report's speeds belong to."""
    packages: dict[str, str | None] = {}
    for package in ("lilicorr", "torch", "transformers"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return {"device": name, "threads": torch.get_num_threads(), "python": platform.python_version(), **packages}


def models(pair: Pair, name: str, drafters: Mapping[str, str], target: str | Path) -> dict[str, Any]:
    """The models of a run, with what tells their weights apart, and their dtype.

    Args:
        name: what a report calls the target; target, drafters: what `pair` was loaded from.
    """
    return {
        "format": 1,
        "target": {"source": name, "weights": fingerprint(target, pair.target)},
        "drafters": {
            drafter: {"source": str(source), "weights": fingerprint(source, pair.drafters[drafter])}
            for drafter, source in drafters.items()
        },
        "dtype": str(pair.target.dtype).removeprefix("torch."),
    }


def fingerprint(source: str | Path, model: Any) -> str:
    """Tells checkpoints under one name apart: SHA-256 of a folder's configuration and weights, a repository's commit.

    Args:
        source: what `model` was loaded from.
    """
    folder = Path(source)
    if not folder.is_dir():
        cached = try_to_load_from_cache(str(source), "config.json")  # a remote configuration need not know its commit
        commit = Path(cached).parent.name if isinstance(cached, str) else None
        return str(getattr(model.config, "_commit_hash", None) or commit)
    digest = hashlib.sha256()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
