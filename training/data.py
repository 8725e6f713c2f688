"""Training text: JSONL rows of messages and the target's own answers, turned into token ids with a loss mask."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass
class Example:
    """One conversation: its prompt's ids, then the supervised answer's ids."""

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass
class Batch:
    """Right-padded sequences: `input_ids [batch, S]` (int64) and `loss_mask [batch, S]` (bool, answer tokens only)."""

    input_ids: Tensor
    loss_mask: Tensor


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; blank lines are skipped.

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
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number} holds {type(row).__name__}, expected one JSON object a line.")
            yield row


def check_messages(path: str | Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The `messages` of `row` (`[]` where it has none), if each is a mapping with `role` and `content` as text.

    Raises:
        ValueError: if one is not, naming file and row.
    """
    messages = row.get("messages") or []
    for message in messages if isinstance(messages, list) else [messages]:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(_is_text(part) for part in parts):
            raise ValueError(
                f"{path}: row {row.get('id')!r} has a message {str(message)[:80]!r}, expected a list of messages, each "
                'like {"role": "user", "content": "text"}; mend or remove the row.'
            )
    return messages


def _is_text(value: Any) -> bool:
    """Whether `value` is a string that UTF-8 can hold: half of a surrogate pair breaks tokenizers."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """The chat template's ids of `messages` with the generation prompt appended."""
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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
    """Read answers as `lilicorr regenerate` writes them: rows with `messages` (the last one the answer), `output_ids`.

    Args:
        paths: JSONL files.
        tokenizer: the target's; renders the prompt, and the answer where a row has no `output_ids`.
        max_length: prompt and answer are cut to this many tokens together; prompts that leave no room are dropped.
        loop_limit: cut an answer where a 4-gram stands this often (0: never).

    Raises:
        ValueError: for a broken line, a row whose last message is no answer, or if nothing is left to train on.
    """
    examples = []
    for path in paths:
        for row in read_jsonl(path):
            messages = check_messages(path, row)
            if len(messages) < 2 or messages[-1].get("role") != "assistant":
                raise ValueError(
                    f"{path}: row {row.get('id')!r} does not end with an assistant message; run `lilicorr regenerate`."
                )
            answer = row.get("output_ids")
            if answer is None:
                answer = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
            if not isinstance(answer, list) or not all(type(token) is int and token >= 0 for token in answer):
                raise ValueError(f"{path}: row {row.get('id')!r} has output_ids that are no token ids; regenerate it.")
            prompt = prompt_token_ids(tokenizer, messages[:-1])
            answer = cut_loop(answer, loop_limit)[: max(0, max_length - len(prompt))]
            if len(answer) > 1:
                examples.append(Example(str(row.get("id")), prompt, answer))
    if not examples:
        raise ValueError(f"No usable answer in {', '.join(map(str, paths))} within {max_length} tokens.")
    return examples


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
        ids = example.prompt_ids + example.answer_ids
        input_ids[row, : len(ids)] = torch.tensor(ids)
        loss_mask[row, len(example.prompt_ids) : len(ids)] = True
    return Batch(input_ids, loss_mask)
