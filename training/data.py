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

from .chat import Chat, Turn
from .manifest import Manifest, check_template
from .rows import check_messages, read_jsonl


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
) -> list[Example]:
    """Read answers as `lilicorr regenerate` writes them: rows with `messages`, the last one an answer.

    A row's `output_ids` are the exact ids of its last answer, `earlier_output_ids` those of the ones before; answers
    before those are context only. Of a row without them every answer is read out of the rendered text.

    Every answer is supervised in the context that the template gives it, with the options of the file's manifest. Where
    that context begins with the conversation so far, token by token, the answers share one sequence; where the template
    rewrites earlier turns (leaves their thinking out, say), each such answer is a sequence of its own.

    Args:
        paths: JSONL files; a manifest beside one says with which template options its answers were made.
        tokenizer: the target's; renders the contexts, and the answers where a row has no `output_ids`.
        max_length: sequences are cut to this many tokens; answers whose context leaves no room are dropped.
        loop_limit: cut an answer where a 4-gram stands this often (0: never).

    Raises:
        ValueError: for a broken line, a row whose last message is no answer, a manifest of another chat template, a
            template that leaves nothing to supervise, or if nothing is left to train on.
    """
    examples: list[Example] = []
    rows = untold = short = crowded = 0
    example_of_it = ""
    for path in paths:
        manifest = Manifest.beside(path)
        chat = Chat(tokenizer, manifest.template_options if manifest else None)
        if manifest:
            check_template(path, manifest, chat)
        for row in read_jsonl(path):
            rows += 1
            open_example: Example | None = None
            for number, turn in enumerate(_turns(path, row, chat)):
                if isinstance(turn, str):
                    untold += 1
                    example_of_it = example_of_it or f"{path}, row {row.get('id')!r}, is {turn[-1000:]!r}"
                    continue
                extended = _extend(open_example, turn, max_length, loop_limit)
                if extended is None:
                    name = str(row.get("id")) if number == 0 else f"{row.get('id')} (turn {number + 1})"
                    extended = _extend(Example(name, [], []), turn, max_length, loop_limit)
                    if extended is not None:
                        examples.append(extended)
                    elif sum(turn.supervised) < 2:
                        short += 1
                    else:
                        crowded += 1
                open_example = extended
    if untold and not examples:
        raise ValueError(
            "The chat template leaves no token to supervise that is known to be the target's; give rows with "
            f"output_ids, as `lilicorr regenerate` writes. The rendered text of {example_of_it}"
        )
    if untold:
        said = f"{untold} answers are left out: which tokens the target said cannot be told. The rendered text of "
        warnings.warn(said + example_of_it, stacklevel=2)
    if not examples:
        names = ", ".join(map(str, paths))
        if not rows:
            raise ValueError(f"There are no rows in {names}; give answers of `lilicorr regenerate`.")
        raise ValueError(
            f"No usable answer in {names}: {short} with fewer than the two tokens that a block needs, {crowded} that "
            f"begin too late in {max_length} tokens (max_length); give longer answers or more length."
        )
    return examples


def _turns(path: str | Path, row: dict[str, Any], chat: Chat) -> Iterator[Turn | str]:
    """The answers of `row` in order; for one whose tokens cannot be told, the rendered text instead."""
    messages = check_messages(path, row)
    places = [place for place, message in enumerate(messages) if place and message["role"] == "assistant"]
    if not places or places[-1] != len(messages) - 1:
        raise ValueError(
            f"{path}: row {row.get('id')!r} does not end with an assistant message; run `lilicorr regenerate`."
        )
    earlier = row.get("earlier_output_ids") or []
    known = [*(earlier if isinstance(earlier, list) else [earlier]), row.get("output_ids")]
    if known == [None]:
        known *= len(places)
    if len(known) > len(places) or not all(ids is None or _are_ids(ids) for ids in known):
        raise ValueError(f"{path}: row {row.get('id')!r} has output_ids that are no token ids; regenerate it.")
    for place, ids in zip(places[-len(known) :], known, strict=True):
        finished = place < len(messages) - 1 or row.get("finished") is not False
        turn = chat.turn(messages[: place + 1], ids, finished)
        yield turn if turn is not None else chat.render(messages[: place + 1])


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
