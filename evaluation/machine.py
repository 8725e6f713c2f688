"""What figures were measured on, and with which weights."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    """Device, threads and versions that a report's speeds belong to."""
    packages: dict[str, str | None] = {}
    for name in ("lilicorr", "torch", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": place, "threads": torch.get_num_threads(), "python": platform.python_version(), **packages}


def fingerprint(source: str | Path, model: Any) -> str:
    """Tells checkpoints under one name apart: SHA-256 of a folder's configuration and weights, a repository's commit.

    Args:
        source: what `model` was loaded from.
    """
    folder = Path(source)
    if not folder.is_dir():
        return str(getattr(model.config, "_commit_hash", None))
    digest = hashlib.sha256()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
