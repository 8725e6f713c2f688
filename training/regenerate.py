"""Have the target answer prompts greedily, so that a drafter learns what its target really says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .data import prompt_token_ids, read_jsonl


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
        ValueError: for a broken line or a row without `id` or user message.
    """
    wanted = [(_key(path, row), _first_turn(path, row), row) for path in prompts for row in read_jsonl(path)]
    done = _finished_ids(Path(output))
    wanted = [item for item in wanted[: limit or None] if item[0] not in done]
    if not wanted:
        return 0
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
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
    if "id" not in row:
        raise ValueError(f"{path}: a row has no `id`, so it could not be resumed; give every prompt its own.")
    return str(row["id"])


def _first_turn(path: str, row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages up to and including the first user turn."""
    kept: list[dict[str, str]] = []
    for message in row.get("messages") or []:
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
    """Ids already answered in `output`; what a kill left of a last line is cut off the file."""
    if not output.exists():
        return set()
    with open(output, "rb+") as answers:
        content = answers.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            answers.truncate(whole)
    return {row["id"] for row in read_jsonl(output)}
