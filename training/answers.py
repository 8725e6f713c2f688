"""The file of answers: one JSON object a line, appended to, read back when a run goes on."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .decode import Dialogue
from .messages import is_answer

FIRST_BYTES = b'{"id": '  # of every answer


class AnswersFile:
    """Answers of `lilicorr regenerate` in `path`, which need not exist yet; `ids` are those of its rows.

    Raises:
        ValueError: if it holds anything else, such as the prompts given by mistake.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids: set[str] = set()
        self.turns = self.tokens = self.finished = 0
        self.whole, self.tail, self.tail_is_torn = 0, b"", False
        if not path.exists():
            return
        with open(path, "rb") as lines:
            for line in lines:
                ended = line.endswith(b"\n")
                if not ended:
                    line = line.rstrip(b"\0")  # what a power cut leaves behind the last write
                row = _row(line)
                if ended:
                    self.whole += len(line)
                else:
                    self.tail = line
                    self.tail_is_torn = row is None and line[: len(FIRST_BYTES)] == FIRST_BYTES[: len(line)]
                if line.strip() and not self.tail_is_torn:
                    self._count(row)

    def remove_torn_line(self) -> None:
        """Cut off what a kill left of a last line, and zeros; a line that lost only its line break gets it back."""
        if not self.tail and not self.tail_is_torn:
            return
        with open(self.path, "rb+") as file:
            file.truncate(self.whole)
            if not self.tail_is_torn:
                file.seek(self.whole)
                file.write(self.tail + b"\n")

    @contextmanager
    def appending(self) -> Iterator[Callable[[Dialogue], dict[str, Any]]]:
        """Hands out a function that writes one conversation through to the file and returns its row."""
        with open(self.path, "a", encoding="utf-8") as file:

            def append(dialogue: Dialogue) -> dict[str, Any]:
                row = _row_of(dialogue)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                self._count(row)
                return row

            yield append

    def counts(self) -> dict[str, float]:
        """Rows, turns (answers), their tokens, and the share of rows whose last answer the target itself ended."""
        rows = len(self.ids)
        share = round(self.finished / rows, 4) if rows else 0.0
        return {"rows": rows, "turns": self.turns, "tokens": self.tokens, "finished": share}

    def _count(self, row: dict[str, Any] | None) -> None:
        messages = row.get("messages") if row else None
        if row is None or not {"id", "finished"} <= row.keys() or not isinstance(messages, list):
            raise ValueError(
                f"{self.path} holds something else than answers of `lilicorr regenerate`; name another output."
            )
        earlier, tokens = row.get("earlier_output_ids") or [], row.get("tokens") or 0
        ids = [row.get("output_ids") or [], *(earlier if isinstance(earlier, list) else [earlier])]
        if type(tokens) is not int or not all(isinstance(each, list) for each in ids):
            raise ValueError(
                f"{self.path}: row {row['id']!r} has output_ids that are no token ids, or tokens that are no number; "
                "remove the row, and it is generated again."
            )
        self.ids.add(str(row["id"]))
        self.turns += sum(isinstance(message, dict) and is_answer(message) for message in messages)
        self.tokens += tokens or sum(map(len, ids))
        self.finished += bool(row["finished"])


def _row_of(dialogue: Dialogue) -> dict[str, Any]:
    """Its row; with the answers' ids where they are known, else with what a server says of them."""
    answers = dialogue.answers
    row = {
        "id": dialogue.conversation.id,
        **dialogue.conversation.labels,
        "messages": dialogue.messages,
        **({"tools": dialogue.conversation.tools} if dialogue.conversation.tools else {}),
        "finished": dialogue.finished,
        **({"stopped": str(dialogue.skipped)} if dialogue.skipped else {}),
        "prompt_hashes": dialogue.prompt_hashes,
        **({"now": dialogue.now.isoformat()} if dialogue.now else {}),
    }
    ids = [answer.ids for answer in answers]
    if ids[-1] is None:
        tokens = sum(answer.tokens for answer in answers)
        return {**row, "tokens": tokens, "finish_reason": answers[-1].finish_reason}
    earlier = {"earlier_output_ids": ids[:-1]} if ids[:-1] else {}
    return {**row, "output_ids": ids[-1], **earlier}


def _row(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`, or `None`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
