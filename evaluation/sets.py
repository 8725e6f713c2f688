"""Evaluation sets: JSONL files of conversations, one file a set, and the questions chosen from them."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..training.rows import is_text, numbered_jsonl

TITLES = {  # in the order of the paper's tables
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "aime25": "AIME 2025",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "livecodebench": "LiveCodeBench",
    "alpaca_eval": "AlpacaEval",
    "mt-bench": "MT-Bench",
}
EXAMPLE = '{"messages": [{"role": "user", "content": "…"}]}'


@dataclass(frozen=True)
class Question:
    """One row of a set.

    Attributes:
        set: the set's name, its file's stem; id: the row's own, or its line.
        category: the row's `category`, or else its `domain`.
        system: the system message, if there is one; turns: what the user says, one text a turn.
    """

    set: str
    id: str
    category: str
    system: str | None
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        """Names this question and changes with its text."""
        text = "\0".join([self.system or "", *self.turns])
        return f"{self.set}/{self.id}/{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def load_sets(sources: Sequence[str | Path], benchmarks: Sequence[str] = ("all",)) -> dict[str, list[Question]]:
    """Questions of every set by its name, in the paper's order, other sets after them by name.

    Args:
        sources: folders of `*.jsonl` files, or such files; a row holds `messages`, of which user turns are asked.
        benchmarks: names of the sets to read, or `all`.

    Raises:
        ValueError: there is nothing to read, a set is not there or there twice, or a line is broken, naming it.
    """
    files = jsonl_files(
        sources,
        f"give --data a folder with one file a set, each row {EXAMPLE} (GSM8K, HumanEval, MT-Bench … in that form)",
    )
    wanted = set(files) if "all" in benchmarks else set(benchmarks)
    if missing := sorted(wanted - set(files)):
        raise ValueError(f"There is no set {missing[0]!r} in --data; choose all or some of {', '.join(sorted(files))}.")
    sets = {name: _read(files[name]) for name in in_order(wanted)}
    if not any(sets.values()):
        raise ValueError(f"The *.jsonl files of {', '.join(map(str, sources))} hold no rows; give --data some prompts.")
    return {name: questions for name, questions in sets.items() if questions}


def jsonl_files(sources: Sequence[str | Path], advice: str) -> dict[str, Path]:
    """JSONL files by their set's name, from folders or as such; `advice` says what to give where there are none.

    Raises:
        ValueError: one of `sources` holds none, or two files have one name.
    """
    files: dict[str, Path] = {}
    for source in map(Path, sources):
        found = sorted(source.glob("*.jsonl")) if source.is_dir() else [source] if source.is_file() else []
        if not found:
            raise ValueError(f"{source} holds no *.jsonl files; {advice}.")
        for file in found:
            if file.stem in files:
                raise ValueError(f"{files[file.stem]} and {file} both hold the set {file.stem!r}; rename one.")
            files[file.stem] = file
    return files


def in_order(names: Any) -> list[str]:
    """Set names in the paper's order, others after them by name."""
    known = list(TITLES)
    return sorted(names, key=lambda name: (known.index(name) if name in TITLES else len(known), name))


def choose(sets: dict[str, list[Question]], count: int, seed: int = 0) -> list[Question]:
    """`count` questions (0: all) from every set in turn, shuffled by `seed`; fewer are always a part of more."""
    queues = []
    for questions in sets.values():
        queues.append(list(questions))
        random.Random(seed).shuffle(queues[-1])
    longest = max(map(len, queues), default=0)
    in_turn = [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
    return in_turn[: count or None]


def _read(file: Path) -> list[Question]:
    questions: list[Question] = []
    ids: set[str] = set()
    for number, row in numbered_jsonl(file):
        name = str(row.get("id", number))
        if name in ids:
            raise ValueError(f"{file} line {number} repeats the id {name!r}; give every row its own.")
        ids.add(name)
        questions.append(_question(file, number, name, row))
    return questions


def _question(file: Path, number: int, name: str, row: dict[str, Any]) -> Question:
    said: dict[str, list[str]] = {"system": [], "user": []}
    try:
        for message in row["messages"]:
            if message["role"] in said:
                said[message["role"]].append(message["content"])
        if not said["user"] or not all(is_text(text) for texts in said.values() for text in texts):
            raise TypeError
    except (KeyError, TypeError):
        raise ValueError(
            f"{file} line {number} is not a JSON object with messages and a user turn; fix or remove it."
        ) from None
    category = row.get("category") or row.get("domain") or "other"
    return Question(file.stem, name, str(category), "\n".join(said["system"]) or None, tuple(said["user"]))
