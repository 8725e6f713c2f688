"""Files of a report: each appears under its name only when it is complete."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, whole or not at all; its folder is made if need be.

    Raises:
        OSError: it cannot be written; what `path` held before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.chmod(file.name, 0o666 & ~_umask())  # as a file that was opened by its name, not a private one
        except OSError:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write `report` to `path` as `write_text` does."""
    write_text(path, json.dumps(report, indent=1) + "\n")


def writable(folder: Path) -> bool:
    """Whether a file can be put into `folder`, which may have to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
