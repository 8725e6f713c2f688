"""Have the target answer prompts, so that a drafter learns what its target really says."""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ..hub.precision import torch_name
from ..hub.sources import check_tokenizer_files
from .answers import AnswersFile
from .chat import Chat
from .data import turns_of
from .decode import Decoding, Dialogue, TargetAnswers
from .endpoint import Endpoint, EndpointAnswers
from .manifest import Manifest, manifest_path, time_of
from .progress import Bar, waiting
from .prompts import Source, read_conversations
from .tally import Tally, Unusable
from .target import UNLOADABLE, load_target

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass
class Outcome:
    """What one run added: conversations, answers, their tokens, and the seconds it took.

    Of `cut` rows the last answer was not ended by the target, or there are turns without one. `left_out` counts, by
    reason, rows that could not be used and conversations given up on, of which `skipped` got no answer at all;
    `untrainable` counts answers that are written, but that training will leave out.
    """

    rows: int = 0
    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cut: int = 0
    skipped: int = 0
    left_out: Tally = field(default_factory=Tally)
    untrainable: Tally = field(default_factory=Tally)


def regenerate(
    target: str,
    source: Source,
    output: str,
    decoding: Decoding | None = None,
    template_options: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    dtype: str = "bf16",
    endpoint: Endpoint | None = None,
    strict: bool = False,
) -> Outcome:
    """Answer every user message of every conversation, in order: a later answer's context holds the earlier ones.

    Rows are appended as conversations end, with `id`, `source`, `domain`, `messages`, `finished` (false: the last
    answer was cut, which ends a conversation), and the answers' exact ids: `output_ids` of the last and, where there
    are several, `earlier_output_ids`. A server gives no ids, but `tokens`, their number, and `finish_reason`. What each
    answer followed is told by `prompt_hashes`, what ended a conversation early by `stopped`. A manifest is kept beside
    `output`. A run started again answers only what is missing, on the day that the manifest names as far as the chat
    template can tell; a torn last line is removed first.

    Args:
        target: folder or Hub id; with an `endpoint` only its tokenizer is read.
        source: the conversations.
        output: JSONL file to append to.
        decoding: greedy unless told otherwise.
        template_options: what the chat template is given beside the messages, such as `enable_thinking`.
        batch_size: prompts decoded together; dtype: the target's, `auto`, `fp32`, `bf16` or `fp16`.
        endpoint: a server that answers instead.
        strict: stop at the first row that cannot be used or conversation given up on, instead of counting it.

    Raises:
        ValueError: for prompts, settings or a target that cannot be used, an `output` that holds anything but answers
            or answers made otherwise (it is left as it is), a server that fails, or if every prompt had to be skipped.
    """
    decoding, dtype = decoding or Decoding(), torch_name(dtype)
    decoding.validate()
    if endpoint:
        endpoint.validate()
    tally = Tally(strict)
    with waiting("reading the prompts"):
        conversations = read_conversations(source, tally)
        kept = AnswersFile(Path(output))
    with waiting(f"loading {target}"):
        loaded: tuple[Any, Any] = (None, _tokenizer(target)) if endpoint else load_target(target, dtype)
        model, tokenizer = loaded
        commit = None if endpoint else revision(target, model)
    chat = Chat(tokenizer, template_options)
    engine: dict[str, Any] = {"endpoint_model": endpoint.model} if endpoint else {"dtype": dtype}
    manifest = Manifest(
        # A folder's weights tell it, not where it lies; an endpoint's target is known by its name alone.
        target=Path(target).resolve().name if not endpoint and Path(target).is_dir() else target,
        revision=commit,
        template_sha256=chat.digest,
        template_options=chat.options,
        decoding={**asdict(decoding), "max_turns": source.max_turns, **engine},
    )
    chat = _at_the_same_time(chat, output, manifest, bool(kept.ids))
    kept.remove_torn_line()
    missing = [conversation for conversation in conversations if conversation.id not in kept.ids]
    answers: Any
    if endpoint:
        answers = EndpointAnswers(endpoint, chat, decoding)
    else:
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        answers = TargetAnswers(model, chat, decoding, batch_size)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    manifest.counts = kept.counts()
    manifest.save_beside(output)  # before the first answer, so that none is ever without
    try:
        return _write(answers(missing), len(missing), kept, chat, tally)
    finally:
        manifest.counts = kept.counts()
        manifest.save_beside(output)


def _write(dialogues: Iterable[Dialogue], total: int, kept: AnswersFile, chat: Chat, tally: Tally) -> Outcome:
    outcome, first, began = Outcome(left_out=tally), "", time.monotonic()
    with kept.appending() as append, Bar(total, "rows", amounts="tokens") as bar:
        for dialogue in dialogues:
            outcome.seconds = time.monotonic() - began
            tokens = sum(answer.tokens for answer in dialogue.answers)
            if dialogue.answers:
                row = append(dialogue)
                outcome.rows += 1
                outcome.turns += len(dialogue.answers)
                outcome.cut += not dialogue.finished
                outcome.tokens += tokens
                for problem in _untrainable(kept.path, row, chat):
                    outcome.untrainable.leave_out(problem)
            if dialogue.skipped:
                outcome.skipped += not dialogue.answers
                first = first or str(dialogue.skipped)
                tally.leave_out(dialogue.skipped)
            bar.advance(1, tokens)
    if outcome.skipped and not kept.ids:
        raise ValueError(f"None of {outcome.skipped} prompts could be answered; the first, {first}.")
    return outcome


def _untrainable(path: Path, row: dict[str, Any], chat: Chat) -> list[Unusable]:
    """Why training will leave answers of `row` out, for each that it will."""
    try:
        return [turn for turn in turns_of(path, row, chat) if isinstance(turn, Unusable)]
    except Unusable as problem:
        return [problem]


def revision(target: str, model: Any) -> str:
    """The commit that `model` was loaded from, or a digest of the weight files in the folder `target`."""
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return str(commit)
    digest = hashlib.sha256()
    for path in sorted({path for pattern in WEIGHTS for path in Path(target).glob(pattern)}):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def _tokenizer(target: str) -> Any:
    try:
        check_tokenizer_files(target)
        return AutoTokenizer.from_pretrained(target)
    except UNLOADABLE as error:
        raise ValueError(
            f"The tokenizer of {target} could not be loaded ({' '.join(str(error).split())}); name the folder or "
            "repository of the target that the endpoint serves."
        ) from error


def _at_the_same_time(chat: Chat, output: str, manifest: Manifest, has_answers: bool) -> Chat:
    """`chat` at the time at which the answers in `output` were begun, which goes into `manifest`; now if it has none.

    Raises:
        ValueError: if `output` holds answers that were made otherwise, or do not say when.
    """
    kept = Manifest.beside(output) if has_answers else None
    if has_answers and kept is None:
        raise ValueError(
            f"{output} holds answers but {manifest_path(output).name} is missing, which says how they were made; name "
            "another output."
        )
    if kept is not None and (unlike := kept.differences(manifest)):
        raise ValueError(
            f"{output} holds answers made with another {', '.join(unlike)} (see {manifest_path(output).name}); name "
            "another output."
        )
    if not chat.reads_clock:
        return chat
    if kept is not None and kept.now is None:
        raise ValueError(
            f"{output} holds answers that do not say when they were given, but the chat template prints the date; name "
            "another output."
        )
    manifest.now = kept.now if kept is not None else datetime.now().replace(microsecond=0).isoformat()
    time = time_of(manifest.now)
    assert time is not None
    return chat.at(time)
