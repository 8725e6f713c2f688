"""Rows of conversations: JSONL files read line by line, their messages checked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REASONING = ("reasoning_content", "reasoning")  # where a message may hold its thinking


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; blank lines are skipped. Raises what `numbered_jsonl` does."""
    return (row for _, row in numbered_jsonl(path))


def numbered_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and rows of a JSONL file; blank lines are skipped.

    Raises:
        ValueError: for a line that is not a JSON object in UTF-8, naming file and line.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise ValueError(f"{path} line {number} is not UTF-8 text; save the file as UTF-8.") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number} is not valid JSON ({error.msg}); mend or remove it.") from None
            except RecursionError:
                raise ValueError(f"{path} line {number} is nested too deeply; mend or remove it.") from None
            except ValueError:  # Python's limit on digits
                raise ValueError(f"{path} line {number} holds a number of too many digits; mend it.") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number} holds {type(row).__name__}, expected one JSON object a line.")
            yield number, row


def check_messages(path: str | Path, row: dict[str, Any], column: str = "messages") -> list[dict[str, Any]]:
    """`row[column]` (`[]` where it has none), if each is a mapping with `role`, `content` and any reasoning as text.

    Raises:
        ValueError: if one is not, or the row's `id` is no text either, naming file and row.
    """
    if not is_text(str(row.get("id"))):
        raise ValueError(f"{path}: row {row['id']!r} has an id that UTF-8 cannot hold; give it another.")
    messages = row.get(column) or []
    for message in messages if isinstance(messages, list) else [messages]:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        thoughts = [message.get(name) for name in REASONING] if isinstance(message, dict) else []
        parts += [thought for thought in thoughts if thought is not None]
        if not isinstance(messages, list) or not all(map(is_text, parts)):
            raise ValueError(
                f"{path}: row {row.get('id')!r} has a message {str(message)[:80]!r}, expected a list of messages, each "
                'like {"role": "user", "content": "text"}; mend or remove the row.'
            )
    return messages


def is_text(value: Any) -> bool:
    """Whether `value` is a string that UTF-8 can hold: half of a surrogate pair breaks tokenizers."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")
