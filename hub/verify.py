"""Whether the code of a published drafter is that of the installed release: files are read and hashed, never run."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..modeling_lilicorr.repository_files import AUTO_MAP
from .bundle import released_code

PYTHON = (".py", ".pyc", ".pyo", ".pyd", ".pyw", ".pth", ".so", ".dll", ".dylib", ".sh")
PICKLES = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt")  # may run code as they are loaded
RUNS = (*PYTHON, *PICKLES)
CONFIG = "config.json"
NAMING = ("auto_map", "custom_pipelines")  # keys by which a JSON file names code to run
UNLOOKED = (".git", ".cache")  # nothing is loaded from there
LARGEST_JSON = 1 << 26  # bytes


@dataclass
class Verdict:
    """Names of code files, and of JSON files that name code: as the release has them, or not."""

    equal: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all are equal."""
        return not (self.differing or self.unknown or self.missing)


def verify_folder(folder: str | Path, names: Iterable[str] | None = None) -> Verdict:
    """Compare the code in a folder with what the installed release would publish.

    Args:
        folder: of a drafter; nothing in it is imported or run, and links to folders are not followed.
        names: what the repository holds, where `folder` has only part of it.

    Raises:
        OSError: a file cannot be read.
    """
    folder = Path(folder)
    held = set(walk(folder)) | set(names or ())
    release = {name: _hash(text.encode("utf-8")) for name, text in released_code().items()}
    verdict = Verdict(missing=sorted(name for name in (*release, CONFIG) if name not in held))
    for name in sorted(held):
        path = folder / name
        if name in release and path.is_file():
            same = _hash(path.read_bytes()) == release[name]
            (verdict.equal if same else verdict.differing).append(name)
        elif name.lower().endswith(RUNS) or name.endswith("/"):
            verdict.unknown.append(name)
        elif name.lower().endswith(".json") and path.is_file():
            named = _code_named_in(path)
            if name == CONFIG:
                (verdict.equal if named == {"auto_map": AUTO_MAP} else verdict.differing).append(f"{name}: auto_map")
            elif named:
                verdict.unknown.append(f"{name}: {', '.join(named)}")
    return verdict


def walk(folder: Path) -> Iterable[str]:
    """Names of all files below `folder`; a link to a folder ends in a slash and is not followed."""
    for place, folders, files in os.walk(folder):
        base = Path(place).relative_to(folder)
        for name in files:
            yield (base / name).as_posix()
        for name in list(folders):
            if os.path.islink(os.path.join(place, name)):
                yield (base / name).as_posix() + "/"
        folders[:] = [name for name in folders if name not in UNLOOKED]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _code_named_in(path: Path) -> dict[str, Any]:
    """What a JSON file says of code to run; everything, if it cannot be read as JSON."""
    try:
        content = json.loads(path.read_bytes()) if path.stat().st_size <= LARGEST_JSON else None
    except (ValueError, RecursionError):
        return {"not JSON": True}
    if not isinstance(content, dict):
        return {}
    return {key: content[key] for key in NAMING if key in content}


def verify_repository(repo_id: str, revision: str | None = None) -> tuple[Verdict, str]:
    """`verify_folder` of a repository on the Hub, and the commit that was looked at.

    Code and JSON alone are fetched, as text. Offline, what the cache holds is looked at.

    Raises:
        ValueError: in one sentence, why the Hub gives no answer.
        OSError: the cache does not hold it.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    from .hub_calls import check_repo_id, hub_errors

    check_repo_id(repo_id)
    patterns = ["*.py", "*.json"]
    if constants.HF_HUB_OFFLINE:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns, local_files_only=True))
        return verify_folder(folder), folder.name
    with hub_errors(repo_id, "reading"):
        info = HfApi(library_name="lilicorr").model_info(repo_id, revision=revision)
        commit = info.sha or revision
        kept = snapshot_download(repo_id, revision=commit, allow_patterns=patterns)
    return verify_folder(kept, [file.rfilename for file in info.siblings or ()]), str(commit)
