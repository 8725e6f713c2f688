"""Have the target answer prompts greedily, so that a drafter learns what its target really says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from .data import check_messages, prompt_token_ids, read_jsonl
from .target import load_target

_FIRST_BYTES = b'{"id": '  # of every answer


def regenerate(
    target: str,
    prompts: Sequence[str],
    output: str,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    limit: int = 0,
    dtype: str = "bfloat16",
) -> int:
    """Answer the first user turn of every prompt; returns how many answers were added to `output`.

    Rows are appended as they are made, with `id`, `source`, `domain`, `messages`, `output_ids` (the answer's exact ids)
    and `finished` (false: cut at `max_new_tokens`). A run started again answers only what is missing; a torn last line
    is removed first.

    Args:
        target: folder or Hub id.
        prompts: JSONL files of rows with `id` and `messages` (system and user turns).
        output: JSONL file to append to.
        max_new_tokens: longest answer, in tokens; batch_size: prompts decoded together.
        limit: answer only this many of the prompts (0: all); dtype: the target's, as torch spells it.

    Raises:
        ValueError: for a broken line, a row without `id` or user message, two prompts of one `id`, an `output` that
            holds anything but answers (it is left as it is), or a target that cannot be loaded.
    """
    wanted = [(_key(path, row), _first_turn(path, row), row) for path in prompts for row in read_jsonl(path)]
    turns: dict[str, list[dict[str, str]]] = {}
    for key, messages, _ in wanted:
        if turns.setdefault(key, messages) != messages:
            raise ValueError(f"Two different prompts have the id {key!r}; give every prompt its own.")
    done = _finished_ids(Path(output))
    wanted = [item for item in wanted[: limit or None] if item[0] not in done]
    if not wanted:
        return 0
    loaded: tuple[Any, Any] = load_target(target, dtype)
    model, tokenizer = loaded
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    eos = model.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos])
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id
    )
    encoded = [(prompt_token_ids(tokenizer, item[1]), item) for item in wanted]
    encoded.sort(key=lambda pair: len(pair[0]))  # a batch of like lengths wastes little padding
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with open(output, "a", encoding="utf-8") as answers, tqdm(total=len(encoded), unit="answer") as bar:
        for start in range(0, len(encoded), batch_size):
            group = encoded[start : start + batch_size]
            inputs = tokenizer.pad({"input_ids": [ids for ids, _ in group]}, return_tensors="pt").to(model.device)
            with torch.inference_mode():
                rows = model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
            for row, (_, (key, messages, source)) in zip(rows.tolist(), group, strict=True):
                ids, finished = _until_stop(row, stops)
                text = tokenizer.decode(ids[:-1] if finished else ids)
                answer = {
                    "id": key,
                    "source": source.get("source"),
                    "domain": source.get("domain"),
                    "messages": [*messages, {"role": "assistant", "content": text}],
                    "output_ids": ids,
                    "finished": finished,
                }
                answers.write(json.dumps(answer, ensure_ascii=False) + "\n")
            answers.flush()
            bar.update(len(group))
    return len(encoded)


def _key(path: str, row: dict[str, Any]) -> str:
    if row.get("id") is None:
        raise ValueError(f"{path}: a row has no `id`, so it could not be resumed; give every prompt its own.")
    return str(row["id"])


def _first_turn(path: str, row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages up to and including the first user turn."""
    kept: list[dict[str, str]] = []
    for message in check_messages(path, row):
        kept.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            return kept
    raise ValueError(f"{path}: row {row.get('id')!r} has no user message; every prompt needs one.")


def _until_stop(ids: list[int], stops: set[int]) -> tuple[list[int], bool]:
    """`ids` through the first stop token, and whether there was one."""
    for place, token in enumerate(ids):
        if token in stops:
            return ids[: place + 1], True
    return ids, False


def _finished_ids(output: Path) -> set[str]:
    """Ids already answered in `output`; what a kill left of a last line is cut off the file.

    Nothing is cut off a file that holds anything but answers, such as the prompts given as output by mistake.
    """
    if not output.exists():
        return set()
    foreign = f"{output} holds something else than answers of `lilicorr regenerate`; name another output."
    content = output.read_bytes()
    whole = content.rfind(b"\n") + 1
    torn = content[whole:]
    rows = [_row(line) for line in content[:whole].splitlines() if line.strip()]
    if _row(torn) is not None:  # only its line break is missing
        rows.append(_row(torn))
    elif torn[: len(_FIRST_BYTES)] != _FIRST_BYTES[: len(torn)]:
        raise ValueError(foreign)
    if any(row is None or "id" not in row or "output_ids" not in row for row in rows):
        raise ValueError(foreign)
    if torn:
        with open(output, "rb+") as answers:
            answers.truncate(whole)
            if _row(torn) is not None:
                answers.seek(whole)
                answers.write(torn + b"\n")
    return {str(row["id"]) for row in rows if row is not None}


def _row(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`, or `None`."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
