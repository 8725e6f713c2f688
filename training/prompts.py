"""Prompts for regeneration: conversations out of JSON files or data sets, what assistants said in them left out."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from .messages import chatlog
from .rows import is_text, read_rows
from .tally import Tally, Unusable


@dataclass(frozen=True)
class Conversation:
    """A conversation to be answered.

    `turns` holds for each answer the messages, a user's or a tool's last, that come between it and the answer before;
    `labels` are the row's `source` and `domain`, which go with the answers; `tools` are what the target may call.
    """

    id: str
    turns: list[list[dict[str, Any]]]
    labels: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Source:
    """Where prompts come from.

    Attributes:
        names: JSONL files, JSON arrays, or names (or folders) for `datasets.load_dataset`.
        column: holds the messages (also as ShareGPT's `from` and `value`) or one prompt's text; empty: the first of
            `messages.COLUMNS` that a row has.
        split, subset: of data sets.
        limit: only the first so many rows (0: all); max_turns: only the first so many answers of each (0: all).
    """

    names: Sequence[str]
    column: str = ""
    split: str = "train"
    subset: str = ""
    limit: int = 0
    max_turns: int = 0


def read_conversations(source: Source, tally: Tally | None = None) -> list[Conversation]:
    """The conversations of `source` in its order, each id once; what cannot be used goes to `tally`.

    Every user message and every tool's result is followed by an answer to come. A call in the row whose result is there
    stays before it, as the context of the answer; whatever else an assistant said is left out.

    Rows of data sets without `id` are named by split and row number, those of files by their content.

    Raises:
        ValueError: for a data set that cannot be loaded, no row at all or none that can be used, and, if `tally` is
            strict, for the first that cannot.
    """
    tally = Tally() if tally is None else tally
    rows = chain.from_iterable(((name, row) for row in _rows(name, source, tally)) for name in source.names)
    found: dict[str, Conversation] = {}
    before = tally.total
    for name, row in islice(rows, source.limit or None):
        try:
            conversation = _conversation(name, row, source.column)
            if source.max_turns:
                conversation = replace(conversation, turns=conversation.turns[: source.max_turns])
            known = found.setdefault(conversation.id, conversation)
            if (known.turns, known.tools) != (conversation.turns, conversation.tools):
                raise Unusable(
                    "another prompt has its id",
                    f"Two different prompts have the id {conversation.id!r}; give every prompt its own.",
                )
        except Unusable as problem:
            tally.leave_out(problem)
    if not found:
        names, lost = ", ".join(source.names), tally.total - before
        if lost:
            raise ValueError(f"None of {lost} rows in {names} can be used; the first: {tally.first}")
        raise ValueError(f"There are no rows in {names}; give prompts to answer.")
    return list(found.values())


def _rows(name: str, source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    if not name:
        raise ValueError("The name of the prompts is empty; give a JSONL file, or the name or folder of a data set.")
    if Path(name).is_file() or Path(name).suffix in (".jsonl", ".json", ".ndjson"):
        yield from read_rows(name, tally)
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
    log = chatlog(name, row, column, answers=False)
    turns: list[list[dict[str, Any]]] = []
    waiting: list[dict[str, Any]] = []
    roles = [message["role"] for message in log.messages]
    for message, following, second in zip(log.messages, [*roles[1:], ""], [*roles[2:], "", ""], strict=False):
        if message["role"] == "assistant":
            if following == "tool" and "problem" in message:
                raise message["problem"]
            if following == "tool":  # what it called is answered there: context, and no words of the target's
                waiting.append({key: message[key] for key in message if key != "reasoning_content"} | {"weight": 0})
            continue
        waiting.append(message)
        if message["role"] in ("user", "tool") and following != "tool" and (following, second) != ("assistant", "tool"):
            turns.append(waiting)
            waiting = []
    if not turns:
        raise Unusable("no user message", f"{name}: row {log.id!r} has no user message; every prompt needs one.")
    labels = {key: row.get(key) for key in ("source", "domain")}
    for key, label in labels.items():
        if not _can_be_kept(label):
            said = f"{name}: row {log.id!r} has a {key} {label!r}, expected text; fix or remove the row."
            raise Unusable(f"a {key} that is no text", said)
    return Conversation(log.id, turns, labels, log.tools)


def _can_be_kept(label: Any) -> bool:
    """Whether it is JSON in UTF-8, as rows of answers are."""
    try:
        return is_text(json.dumps(label, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return False
