"""Have the target answer prompts, so that a drafter learns what its target really says."""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from ..hub.precision import torch_name
from .answers import AnswersFile
from .chat import Chat
from .decode import Decoding, Dialogue, TargetAnswers
from .endpoint import Endpoint, EndpointAnswers
from .manifest import Manifest, manifest_path
from .prompts import Source, read_conversations
from .target import load_target

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass
class Outcome:
    """What one run added: conversations, answers, their tokens, and the seconds it took.

    The last answer of `cut` rows was not ended by the target. `skipped` conversations got no answer; `note` says why
    for the first that was skipped or cut short.
    """

    rows: int = 0
    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cut: int = 0
    skipped: int = 0
    note: str = ""


def regenerate(
    target: str,
    source: Source,
    output: str,
    decoding: Decoding | None = None,
    template_options: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    dtype: str = "bf16",
    endpoint: Endpoint | None = None,
) -> Outcome:
    """Answer every user message of every conversation, in order: a later answer's context holds the earlier ones.

    Rows are appended as conversations end, with `id`, `source`, `domain`, `messages`, `finished` (false: the last
    answer was cut, which ends a conversation), and the answers' exact ids: `output_ids` of the last and, where there
    are several, `earlier_output_ids`. A server gives no ids, but `tokens`, their number, and `finish_reason`. A
    manifest is kept beside `output`. A run started again answers only what is missing; a torn last line is removed
    first.

    Args:
        target: folder or Hub id; with an `endpoint` only its tokenizer is read.
        source: the conversations.
        output: JSONL file to append to.
        decoding: greedy unless told otherwise.
        template_options: what the chat template is given beside the messages, such as `enable_thinking`.
        batch_size: prompts decoded together; dtype: the target's, `auto`, `fp32`, `bf16` or `fp16`.
        endpoint: a server that answers instead.

    Raises:
        ValueError: for prompts, settings or a target that cannot be used, an `output` that holds anything but answers
            or answers made otherwise (it is left as it is), a server that fails, or if every prompt had to be skipped.
    """
    decoding, dtype = decoding or Decoding(), torch_name(dtype)
    decoding.validate()
    if endpoint:
        endpoint.validate()
    conversations = read_conversations(source)
    kept = AnswersFile(Path(output))
    loaded: tuple[Any, Any] = (None, _tokenizer(target)) if endpoint else load_target(target, dtype)
    model, tokenizer = loaded
    chat = Chat(tokenizer, template_options)
    engine: dict[str, Any] = {"endpoint_model": endpoint.model} if endpoint else {"dtype": dtype}
    manifest = Manifest(
        # A folder's weights tell it, not where it lies; an endpoint's target is known by its name alone.
        target=Path(target).resolve().name if not endpoint and Path(target).is_dir() else target,
        revision=None if endpoint else revision(target, model),
        template_sha256=chat.digest,
        template_options=chat.options,
        decoding={**asdict(decoding), "max_turns": source.max_turns, **engine},
    )
    _check_manifest(output, manifest, bool(kept.ids))
    kept.mend()
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
        return _write(answers(missing), len(missing), kept)
    finally:
        manifest.counts = kept.counts()
        manifest.save_beside(output)


def _write(dialogues: Iterable[Dialogue], total: int, kept: AnswersFile) -> Outcome:
    outcome, began = Outcome(), time.monotonic()
    with kept.appending() as append, tqdm(total=total, unit="row") as bar:
        for dialogue in dialogues:
            outcome.seconds = time.monotonic() - began
            if dialogue.skipped:
                outcome.skipped += not dialogue.answers
                outcome.note = outcome.note or f"{dialogue.conversation.id!r}: {dialogue.skipped}"
            if dialogue.answers:
                append(dialogue)
                outcome.rows += 1
                outcome.turns += len(dialogue.answers)
                outcome.cut += not dialogue.answers[-1].finished
                outcome.tokens += sum(answer.tokens for answer in dialogue.answers)
            bar.set_postfix_str(f"{outcome.tokens / max(outcome.seconds, 1e-9):.0f} tok/s", refresh=False)
            bar.update()
    if outcome.skipped and not kept.ids:
        raise ValueError(f"None of {outcome.skipped} prompts could be answered; the first, {outcome.note}.")
    return outcome


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
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The tokenizer of {target} could not be loaded ({' '.join(str(error).split())}); name the folder or "
            "repository of the target that the endpoint serves."
        ) from error


def _check_manifest(output: str, manifest: Manifest, has_answers: bool) -> None:
    """Raise a `ValueError` if `output` holds answers that were made otherwise."""
    if not has_answers:
        return
    kept = Manifest.beside(output)
    if kept is None:
        raise ValueError(
            f"{output} holds answers but {manifest_path(output).name} is missing, which says how they were made; name "
            "another output."
        )
    unlike = kept.differences(manifest)
    if unlike:
        raise ValueError(
            f"{output} holds answers made with another {', '.join(unlike)} (see {manifest_path(output).name}); name "
            "another output."
        )
