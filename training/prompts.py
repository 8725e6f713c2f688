"""Prompts for regeneration: conversations out of JSONL files or data sets, what assistants said in them left out."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from .rows import check_messages, is_text, read_jsonl

COLUMNS = ("messages", "conversations", "prompt")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """A conversation to be answered.

    `turns` holds for each answer the messages, a user's last, that come between it and the answer before; `labels` are
    the row's `source` and `domain`, which go with the answers.
    """

    id: str
    turns: list[list[dict[str, str]]]
    labels: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where prompts come from.

    Attributes:
        names: JSONL files, or names (or folders) for `datasets.load_dataset`.
        column: holds the messages (also as ShareGPT's `from` and `value`) or one prompt's text; empty: the first of
            `messages`, `conversations` and `prompt` that a row has.
        split, subset: of data sets.
        limit: only the first so many rows (0: all); max_turns: only the first so many answers of each (0: all).
    """

    names: Sequence[str]
    column: str = ""
    split: str = "train"
    subset: str = ""
    limit: int = 0
    max_turns: int = 0


def read_conversations(source: Source) -> list[Conversation]:
    """The conversations of `source` in its order, each id once; every user message is followed by an answer to come.

    Rows of data sets without `id` are named by split and row number.

    Raises:
        ValueError: for a broken line, a row without `id` or user message, messages that are no text, a role other than
            system, user and assistant, two different conversations of one id, a data set that cannot be loaded, or no
            row at all.
    """
    rows = chain.from_iterable(((name, row) for row in _rows(name, source)) for name in source.names)
    found: dict[str, Conversation] = {}
    for name, row in islice(rows, source.limit or None):
        conversation = _conversation(name, row, source.column)
        if source.max_turns:
            conversation = replace(conversation, turns=conversation.turns[: source.max_turns])
        if found.setdefault(conversation.id, conversation).turns != conversation.turns:
            raise ValueError(f"Two different prompts have the id {conversation.id!r}; give every prompt its own.")
    if not found:
        raise ValueError(f"There are no rows in {', '.join(source.names)}; give prompts to answer.")
    return list(found.values())


def _rows(name: str, source: Source) -> Iterator[dict[str, Any]]:
    if not name:
        raise ValueError("The name of the prompts is empty; give a JSONL file, or the name or folder of a data set.")
    if Path(name).is_file() or Path(name).suffix in (".jsonl", ".json", ".ndjson"):
        yield from read_jsonl(name)
        return
    if not Path(name).exists() and not _could_be_on_the_hub(name):
        raise ValueError(f"{name} is neither a file nor a folder nor the name of a data set; give one of them.")
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(f"Reading the data set {name} needs: pip install 'lilicorr[data]'.") from None
    try:
        # With a limit only what is needed comes over the network.
        rows = datasets.load_dataset(name, source.subset or None, split=source.split, streaming=bool(source.limit))
    except Exception as error:  # whatever the library says about a wrong name, split, subset or network
        raise ValueError(f"The data set {name} could not be loaded: {' '.join(str(error).split())}") from error
    for number, row in enumerate(rows):
        yield row if row.get("id") is not None else {**row, "id": f"{source.split}-{number}"}


def _could_be_on_the_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _conversation(name: str, row: dict[str, Any], column: str) -> Conversation:
    if row.get("id") is None:
        raise ValueError(f"{name}: a row has no `id`, so it could not be resumed; give every prompt its own.")
    turns: list[list[dict[str, str]]] = []
    waiting: list[dict[str, str]] = []
    for message in _messages(name, row, column):
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(
                f"{name}: row {row['id']!r} has a message of role {message['role']!r}; regeneration knows system, user "
                "and assistant: remove the row."
            )
        if message["role"] == "assistant":  # to be said anew
            continue
        waiting.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            turns.append(waiting)
            waiting = []
    if not turns:
        raise ValueError(f"{name}: row {row['id']!r} has no user message; every prompt needs one.")
    labels = {key: row.get(key) for key in ("source", "domain")}
    for key, label in labels.items():
        if not _can_be_kept(label):
            raise ValueError(f"{name}: row {row['id']!r} has a {key} {label!r}, expected text; mend or remove the row.")
    return Conversation(str(row["id"]), turns, labels)


def _can_be_kept(label: Any) -> bool:
    """Whether it is JSON in UTF-8, as rows of answers are."""
    try:
        return is_text(json.dumps(label, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return False


def _messages(name: str, row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The row's messages with `role` and `content`, whatever the column calls them."""
    column = column or next((known for known in COLUMNS if row.get(known)), COLUMNS[0])
    if column not in row:
        raise ValueError(
            f"{name}: row {row['id']!r} has no {column}, only {', '.join(row)}; name the column of messages."
        )
    value = row[column]
    if column != "messages" and is_text(value):
        value = [{"role": "user", "content": value}]
    if isinstance(value, list):
        value = [_plain(message) for message in value]
    return check_messages(name, {"id": row["id"], column: value}, column)


def _plain(message: Any) -> Any:
    """ShareGPT's keys renamed; what an assistant said or thought is never read, so it may be missing."""
    if not isinstance(message, dict):
        return message
    if "role" not in message and "from" in message:
        role = message["from"]
        message = {"role": SHAREGPT_ROLES.get(role, role), "content": message.get("value")}
    return {"role": "assistant", "content": ""} if message.get("role") == "assistant" else message
