"""Training text: JSONL rows of messages and the target's own answers, turned into token ids with a loss mask."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .chat import Chat, Turn, hash_of
from .decode import ENDED
from .manifest import Manifest, check_template, time_of
from .messages import chatlog, is_answer
from .rows import read_rows
from .tally import Tally, Unusable


@dataclass
class Example:
    """One training sequence: its token ids, and for each whether the target said it."""

    id: str
    input_ids: list[int]
    loss_mask: list[bool]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass
class Batch:
    """Right-padded sequences: `input_ids [batch, S]` (int64) and `loss_mask [batch, S]` (bool, answer tokens only)."""

    input_ids: Tensor
    loss_mask: Tensor


def cut_loop(ids: list[int], limit: int, width: int = 4) -> list[int]:
    """`ids` up to where some `width`-gram would stand for the `limit`-th time; `limit` 0 keeps everything."""
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(ids) - width + 1 if limit else 0):
        gram = tuple(ids[start : start + width])
        seen[gram] += 1
        if seen[gram] >= limit:
            return ids[: start + width - 1]
    return ids


def load_examples(
    paths: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    loop_limit: int = 0,
    tally: Tally | None = None,
) -> list[Example]:
    """Read answers as `lilicorr regenerate` writes them: rows with `messages`, the last one an answer.

    A row's `output_ids` are the exact ids of its last answer, `earlier_output_ids` those of the ones before; answers
    before those are context only, as are messages of an assistant with `weight` 0. Of a row without them every answer
    is read out of the rendered text.

    Every answer is supervised in the context that the template gives it, with the options, the tools and the date that
    it was given with. Where that context begins with the conversation so far, token by token, the answers share one
    sequence; where the template rewrites earlier turns (leaves their thinking out, say), each such answer is a sequence
    of its own.

    Args:
        paths: JSONL files; a manifest beside one says with which template options and when its answers were made.
        tokenizer: the target's; renders the contexts, and the answers where a row has no `output_ids`.
        max_length: sequences are cut to this many tokens; answers whose context leaves no room are dropped.
        loop_limit: cut an answer where a 4-gram stands this often (0: never).
        tally: counts what cannot be used; without one, a warning says it.

    Raises:
        ValueError: for a manifest of another chat template, if nothing is left to train on, and, if `tally` is strict,
            for the first row or answer that cannot be used.
    """
    counted = Tally() if tally is None else tally
    before, rows = counted.total, 0
    examples: list[Example] = []
    for path in paths:
        manifest = Manifest.beside(path)
        chat = Chat(tokenizer, manifest.template_options if manifest else None)
        if manifest:
            check_template(path, manifest, chat)
            chat = chat.at(time_of(manifest.now) or chat.now)
        if chat.reads_clock and (manifest is None or manifest.now is None):
            said = f"{path} does not say when its answers were given, but the chat template prints the date"
            warnings.warn(f"{said}; it is taken to be {chat.now.date()}.", stacklevel=2)
        for row in read_rows(path, counted):
            rows += 1
            try:
                for example in _examples(path, row, chat, max_length, loop_limit, counted):
                    examples.append(example)
            except Unusable as problem:
                counted.leave_out(problem)
    if not examples:
        names = ", ".join(map(str, paths))
        if not rows and counted.total == before:
            raise ValueError(f"There are no rows in {names}; give answers of `lilicorr regenerate`.")
        raise ValueError(f"No usable answer in {names}: {'; '.join(counted.lines())}")
    if tally is None and counted.total:
        warnings.warn(f"{counted.total} answers are left out: {'; '.join(counted.lines())}", stacklevel=2)
    return examples


def _examples(
    path: str | Path, row: dict[str, Any], chat: Chat, max_length: int, loop_limit: int, tally: Tally
) -> Iterator[Example]:
    """The sequences that the answers of `row` make, each once it can grow no further."""
    log = chatlog(path, row)
    open_example: Example | None = None
    for number, turn in enumerate(turns_of(path, row, chat)):
        if isinstance(turn, Unusable):
            tally.leave_out(turn)
            continue
        extended = _extend(open_example, turn, max_length, loop_limit)
        if extended is None:
            if open_example is not None:
                yield open_example
            name = log.id if number == 0 else f"{log.id} (turn {number + 1})"
            extended = _extend(Example(name, [], []), turn, max_length, loop_limit)
            if extended is None:
                said = f"{path}: row {log.id!r} has {len(turn.prompt_ids)} tokens before an answer; give more length."
                tally.leave_out(Unusable(f"an answer that begins too late in {max_length} tokens (max_length)", said))
        open_example = extended
    if open_example is not None:
        yield open_example


def turns_of(path: str | Path, row: dict[str, Any], chat: Chat) -> Iterator[Turn | Unusable]:
    """The answers of `row` in order, and in place of one that cannot be trained on, why.

    Raises:
        Unusable: if that holds for the whole row.
    """
    log = chatlog(path, row)
    messages, where = log.messages, f"{path}: row {log.id!r}"
    places = [place for place, message in enumerate(messages) if place and is_answer(message)]
    if not places or places[-1] != len(messages) - 1:
        said = f"{where} does not end with an assistant message; run `lilicorr regenerate`."
        raise Unusable("a row that does not end with an answer", said)
    earlier = row.get("earlier_output_ids") or []
    known = [*(earlier if isinstance(earlier, list) else [earlier]), row.get("output_ids")]
    if known == [None]:
        known *= len(places)
    if len(known) > len(places) or not all(ids is None or _are_ids(ids) for ids in known):
        said = f"{where} has output_ids that are no token ids; regenerate it."
        raise Unusable("output_ids that are no token ids", said)
    hashes = row.get("prompt_hashes")
    hashes = hashes if isinstance(hashes, list) and len(hashes) == len(known) else [None] * len(known)
    chat = chat.at(time_of(row.get("now")) or chat.now)
    ended = row.get("finished") is not False or row.get("finish_reason") in ENDED
    for place, ids, prompt_hash in zip(places[-len(known) :], known, hashes, strict=True):
        yield _turn(where, chat, messages[: place + 1], log.tools, ids, place < places[-1] or ended, prompt_hash)


def _turn(
    where: str, chat: Chat, messages: Any, tools: Any, ids: list[int] | None, finished: bool, prompt_hash: str | None
) -> Turn | Unusable:
    try:
        turn = chat.turn(messages, ids, finished, tools)
        rendered = "" if turn is not None else chat.render(messages, False, tools)
    except Unusable as problem:
        return Unusable(problem.reason, f"{where}: {problem}")
    if turn is None:
        said = (
            f"{where} leaves no token to supervise that is known to be the target's; give rows with output_ids, as "
            f"`lilicorr regenerate` writes. Its rendered text is {rendered[-1000:]!r}"
        )
        return Unusable("an answer of which cannot be told which tokens the target said", said)
    if prompt_hash is not None and prompt_hash != hash_of(turn.prompt_ids):
        said = f"{where} was answered in another context than the chat template renders here; regenerate it."
        return Unusable("an answer in a context that is rendered otherwise now", said)
    if sum(turn.supervised) < 2:
        said = f"{where} has an answer of fewer than the two tokens that a block needs; leave it out."
        return Unusable("an answer with fewer than the two tokens that a block needs", said)
    return turn


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)


def _extend(example: Example | None, turn: Turn, max_length: int, loop_limit: int) -> Example | None:
    """`example` continued in place by `turn`; `None` if its context is another or leaves no room for two tokens."""
    if example is None or turn.prompt_ids[: len(example)] != example.input_ids:
        return None
    answer = cut_loop(turn.answer_ids, loop_limit)[: max(0, max_length - len(turn.prompt_ids))]
    said = turn.supervised[: len(answer)]
    if sum(said) < 2:
        return None
    gap = turn.prompt_ids[len(example) :]
    example.input_ids += gap + answer
    example.loss_mask += [False] * len(gap) + said
    return example


def batches(examples: Sequence[Example], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch's order: lists of `batch_size` example indices of similar length, shuffled by `(seed, epoch)`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(examples), generator=generator).tolist()
    pool = 32 * batch_size
    pools = [sorted(order[i : i + pool], key=lambda j: len(examples[j])) for i in range(0, len(order), pool)]
    alike = [index for sorted_pool in pools for index in sorted_pool]
    groups = [alike[i : i + batch_size] for i in range(0, len(alike) - batch_size + 1, batch_size)]
    if not groups:
        raise ValueError(f"{len(examples)} examples do not fill one batch of {batch_size}; use a smaller batch.")
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def collate(examples: Sequence[Example], pad_id: int = 0) -> Batch:
    """Right-pad to the longest; a causal target never looks at the padding behind a row."""
    length = max(map(len, examples))
    input_ids = torch.full((len(examples), length), pad_id, dtype=torch.long)
    loss_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = torch.tensor(example.input_ids)
        loss_mask[row, : len(example)] = torch.tensor(example.loss_mask)
    return Batch(input_ids, loss_mask)
