"""How answers were made: a JSON file beside them that training and the model card read."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from .chat import Chat


@dataclass
class Manifest:
    """What answers were made with, and how many there are.

    Attributes:
        target: a folder's name, Hub id, or the name by which an endpoint serves it.
        revision: the Hub's commit, a digest of the folder's weights, or `None` where an endpoint hides it.
        template_sha256, template_options: the chat template and what it was given.
        decoding: every setting that decides what is said.
        now: what the clock showed the chat template, in ISO 8601, if it reads one; of answers of an endpoint each row
            says its own.
        counts: rows, turns, tokens (of answers), and the share of rows that are finished.
    """

    target: str
    revision: str | None
    template_sha256: str
    template_options: dict[str, Any] = field(default_factory=dict)
    decoding: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    now: str | None = None

    @classmethod
    def beside(cls, answers: str | Path) -> "Manifest | None":
        """The manifest of a file of answers, `None` if it has none.

        Raises:
            ValueError: if it cannot be read.
        """
        path = manifest_path(answers)
        if not path.exists():
            return None
        try:
            manifest = cls(**json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no manifest of `lilicorr regenerate` ({error}); fix or remove it.") from None
        text = (str, type(None))
        kinds: dict[str, Any] = {"target": str, "template_sha256": str, "revision": text, "now": text}
        for part in fields(cls):
            if not isinstance(getattr(manifest, part.name), kinds.get(part.name, dict)):
                raise ValueError(f"{path} has a {part.name} of the wrong kind; fix or remove it.")
        if manifest.now is not None and time_of(manifest.now) is None:
            raise ValueError(f"{path} has a now of {manifest.now!r}, expected a date and time; fix or remove it.")
        return manifest

    def save_beside(self, answers: str | Path) -> None:
        """Write it, whole or not at all."""
        path = manifest_path(answers)
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", "utf-8")
        os.replace(unfinished, path)

    def differences(self, other: "Manifest") -> list[str]:
        """Names of what makes answers of the two unlike; a target is known by its revision where both have one."""
        by = "revision" if self.revision and other.revision else "target"
        unlike = [name for name in (by, "template_sha256", "template_options") if _of(self, name) != _of(other, name)]
        names = sorted(self.decoding.keys() | other.decoding.keys())
        unlike += [name for name in names if self.decoding.get(name) != other.decoding.get(name)]
        said = {"revision": "target", "template_sha256": "chat template", "template_options": "template options"}
        return [said.get(name, name) for name in unlike]


def time_of(text: Any) -> datetime | None:
    """A time in ISO 8601, `None` if it is none."""
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None


def _of(manifest: Manifest, name: str) -> Any:
    return getattr(manifest, name)


def manifest_path(answers: str | Path) -> Path:
    """`answers.jsonl` has `answers.jsonl.manifest.json`."""
    return Path(f"{answers}.manifest.json")


def check_template(answers: str | Path, manifest: Manifest, chat: Chat) -> None:
    """Raise a `ValueError` if `chat` renders by another template than the answers' prompts were."""
    if manifest.template_sha256 != chat.digest:
        raise ValueError(
            f"{answers} was made with another chat template than this target's ({manifest.target} had "
            f"{manifest.template_sha256[:12]}, here is {chat.digest[:12]}): regenerate it with this target, or remove "
            f"{manifest_path(answers)} if both render these prompts alike."
        )


def training_data(paths: Sequence[str | Path], counts: Mapping[str, int]) -> dict[str, Any]:
    """What a drafter's configuration and card say of its data: `counts`, and what the manifests of `paths` agree on.

    Raises:
        ValueError: if answers made with different template options are mixed, for a drafter records one set.
    """
    manifests = {str(path): manifest for path in paths if (manifest := Manifest.beside(path))}
    record: dict[str, Any] = dict(counts)
    if not manifests:
        return record
    first_path, first = next(iter(manifests.items()))
    for path, manifest in manifests.items():
        if manifest.template_options != first.template_options:
            raise ValueError(
                f"{path} was made with template options {manifest.template_options}, {first_path} with "
                f"{first.template_options}; a drafter learns one of them: train on answers that agree."
            )
    record["template_options"] = first.template_options
    for name in ("revision", "decoding"):
        if all(getattr(manifest, name) == getattr(first, name) for manifest in manifests.values()):
            record[name] = getattr(first, name)
    return record
