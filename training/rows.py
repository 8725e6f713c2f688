"""Rows out of files: JSON objects a line, or one JSON array of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .tally import Tally, Unusable


def read_rows(path: str | Path, tally: Tally) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file, or of a file that is one JSON array (or object); what is no row goes to `tally`.

    Raises:
        OSError: if it cannot be read. Unusable: for the first that is no row, if `tally` is strict.
    """
    whole = _whole(path)
    if whole is None:
        for _, row in _numbered(path, tally):
            yield row
        return
    for number, row in enumerate(whole, 1):
        if isinstance(row, dict):
            yield row
        else:
            tally.leave_out(_no_object(f"{path} item {number}", row))


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; blank lines are skipped. Raises what `numbered_jsonl` does."""
    return (row for _, row in numbered_jsonl(path))


def numbered_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and rows of a JSONL file; blank lines are skipped.

    Raises:
        ValueError: for a line that is not a JSON object in UTF-8, naming file and line.
    """
    return _numbered(path, Tally(strict=True))


def _numbered(path: str | Path, tally: Tally) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = _row(f"{path} line {number}", line, first=number == 1)
            except Unusable as problem:
                tally.leave_out(problem)
            else:
                yield number, row


def _row(where: str, line: bytes, first: bool) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError:
        raise Unusable("not UTF-8 text", f"{where} is not UTF-8 text; save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise Unusable("not JSON", f"{where} is not valid JSON ({error.msg}); fix or remove it.") from None
    except RecursionError:
        raise Unusable("not JSON", f"{where} is nested too deeply; fix or remove it.") from None
    except ValueError:  # Python's limit on digits
        raise Unusable("not JSON", f"{where} holds a number of too many digits; fix it.") from None
    if not isinstance(row, dict):
        raise _no_object(where, row)
    return row


def _no_object(where: str, row: Any) -> Unusable:
    kind = type(row).__name__
    return Unusable("not a JSON object", f"{where} holds {kind}, expected one JSON object a line.")


def _whole(path: str | Path) -> list[Any] | None:
    """The items of a file that is one array, or one object over several lines; `None` if it is neither."""
    with open(path, "rb") as file:
        first = next((line for line in file if line.strip()), b"").removeprefix(b"\xef\xbb\xbf")
        if not first.lstrip().startswith(b"[") and first.strip() != b"{":
            return None
        file.seek(0)
        try:
            whole = json.loads(file.read().decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None
    return whole if isinstance(whole, list) else [whole]


def is_text(value: Any) -> bool:
    """Whether `value` is a string that UTF-8 can hold: half of a surrogate pair breaks tokenizers."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")
