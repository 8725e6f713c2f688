"""Finished rows of an evaluation, a JSON line each behind a first line of settings; a stopped run goes on from them."""

import json
import os
from pathlib import Path
from typing import Any

FIRST_BYTES = b'{"settings": '  # of every file


class Journal:
    """The file of finished rows. A torn last line and zeros, left by a kill or a power cut, are cut off.

    Args:
        path: the file, made if need be.
        settings: what decides about rows, as JSON can hold it; `rows` by their `key` are those that are there already.

    Raises:
        ValueError: the file holds rows of other settings, or a broken line.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.rows: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        held = path.read_bytes() if path.exists() else b""
        data = held.rstrip(b"\0")
        tail = data[data.rfind(b"\n") + 1 :]
        torn = bool(tail) and _object(tail) is None
        if torn:
            data = data[: -len(tail)]
        lines = [self._parse(number, line) for number, line in enumerate(data.splitlines(), 1)]
        foreign = torn and not lines and tail[: len(FIRST_BYTES)] != FIRST_BYTES[: len(tail)]
        if lines or foreign:
            _check(path, lines[0].get("settings") if lines else None, self.settings)
        for number, row in enumerate(lines[1:], 2):
            if not isinstance(row.get("key"), str):
                raise ValueError(f"{path} line {number} is no row of an evaluation; remove it.")
            self.rows[row["key"]] = row
        if data and not data.endswith(b"\n"):
            data += b"\n"  # all that the last row lost
        if data != held:
            self._mend(data)
        if not lines:
            self._append({"settings": self.settings})

    def add(self, row: dict[str, Any]) -> None:
        """Append a finished row, named by its `key`.

        Raises:
            OSError: the disk is full or fails; the rows before stay.
        """
        self._append(row)
        self.rows[row["key"]] = row

    def _append(self, row: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _mend(self, data: bytes) -> None:
        """Leave `data` in the file, which already begins with it but for a last line break."""
        with open(self.path, "rb+") as file:
            file.truncate(len(data) - data.endswith(b"\n"))
            if data:
                file.seek(len(data) - 1)
                file.write(b"\n")

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        row = _object(line)
        if row is None:
            raise ValueError(f"{self.path} line {number} is no row of an evaluation; remove it.")
        return row


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`, or `None`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _check(path: Path, held: Any, wanted: dict[str, Any]) -> None:
    """Raise a `ValueError` that names the first setting in which `held` differs from `wanted`."""
    if not isinstance(held, dict):
        raise ValueError(f"{path} does not begin with the settings of an evaluation; give another --output.")
    before, now = _flat(held), _flat(wanted)
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{path} holds rows of other settings ({name} was {before.get(name)!r}, is {now.get(name)!r}); give "
                "another --output, or the settings of those rows."
            )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
