"""What a name on the command line must be before anything large is imported or fetched: checked in milliseconds."""

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from .precision import check_dtype

HUB = "https://huggingface.co"
HUB_SECONDS = 3.0  # to answer in, before it counts as out of reach
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def check_model(role: str, source: str | Path) -> None:
    """Raise a `ValueError` unless `source` is a model folder, as far as `config.json` tells, or may be a repository.

    Args:
        role: what it is to be, such as `drafter`.
    """
    path = Path(source)
    try:
        path.exists()
    except (OSError, ValueError):  # too long, or a null byte
        raise ValueError(
            f"The {role} {str(source)[:80]!r} is no path and no repository; give a model folder."
        ) from None
    if path.is_dir():
        _check_config(role, path)
    elif path.exists():
        raise ValueError(f"The {role} {path} is a file; give the model folder that it lies in, or a repository id.")
    elif path.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") > 1:
        raise ValueError(f"The {role} folder {path} does not exist; give a model folder or a repository id.")


def _check_config(role: str, folder: Path) -> None:
    advice = "give a folder written by save_pretrained"
    if not (folder / "config.json").is_file():
        raise ValueError(f"The {role} folder {folder} holds no config.json; {advice}.")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"The {role} {folder} could not be loaded: its config.json holds no JSON object; {advice}.")
    if role != "drafter" and config.get("model_type") == "lilicorr":
        raise ValueError(f"{folder} holds a drafter, which has no {role} of its own; give its target's folder there.")


def check_tokenizer_files(source: str | Path) -> None:
    """Raise a `ValueError` for a folder whose tokenizer files are of another kind of JSON, which Transformers trips on.

    A file that is missing Transformers says itself.
    """
    for name, key, kinds in (
        ("tokenizer.json", "model", (dict,)),
        ("tokenizer_config.json", "tokenizer_class", (str, type(None))),
    ):
        path = Path(source) / name
        if not path.is_file():
            continue
        try:
            held = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            held = None
        if not isinstance(held, dict) or not isinstance(held.get(key), kinds):
            raise ValueError(f"{path} is not as a tokenizer is saved; copy it again from the target's repository.")


def check_reachable(role: str, source: str | Path) -> None:
    """Raise a `ValueError` for a repository that neither disk nor Hub can give, instead of half a minute's wait.

    Where the Hub is out of reach but the repository's files are kept, Transformers is told to work offline.
    """
    if Path(source).exists() or (_offline() is None and _hub_answers()):
        return
    if "huggingface_hub" not in sys.modules:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read as it is imported
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        kept = try_to_load_from_cache(str(source), "config.json")
    except HFValidationError:
        kept = None
    if not isinstance(kept, str):
        raise ValueError(
            f"The {role} {source} could not be loaded: there is no such folder, and the Hub ({_endpoint()}) is out of "
            "reach; fix the path, or connect to fetch a repository."
        )


def check_online() -> None:
    """Raise a `ValueError` where the Hub must be asked but cannot be."""
    if name := _offline():
        raise ValueError(f"{name} is set, so the Hub is not asked; unset it to publish, or try --dry-run.")
    if not _hub_answers():
        raise ValueError(f"The Hub ({_endpoint()}) is out of reach; connect to publish, or try --dry-run.")


def _offline() -> str | None:
    """The variable that forbids asking the Hub, by the values that the Hub's library takes for a yes."""
    return next((name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or HUB


def _hub_answers() -> bool:
    """Whether the Hub can be reached: one try. Behind a proxy nothing is tried, for it may speak what this does not."""
    if urllib.request.getproxies():
        return True
    try:
        with urllib.request.urlopen(urllib.request.Request(_endpoint(), method="HEAD"), timeout=HUB_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True  # an answer
    except urllib.error.URLError as error:
        return not isinstance(error.reason, (socket.gaierror, ConnectionError, TimeoutError))
    except (ConnectionError, TimeoutError):
        return False


def check_models(target: str | Path | None, drafters: Iterable[str | Path], dtype: str = "auto") -> None:
    """`check_model` and `check_reachable` of a target (where there is one) and its drafters, and `check_dtype`."""
    check_dtype(dtype)
    named = [("target", target)] if target else []
    named += [("drafter", source) for source in drafters]
    for role, source in named:
        check_model(role, source)
    for role, source in named:
        check_reachable(role, source)


def check_files(paths: Iterable[str | Path]) -> None:
    """Raise a `ValueError` unless each of `paths` is a file that holds something."""
    for path in map(Path, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a folder, expected a file; name a file in it.")
        if not path.exists():
            raise ValueError(f"{path}: No such file or directory; give another path.")
        if path.is_file() and path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; give a file that holds something.")
