"""A checkpoint on its way to the Hub: what would be uploaded, and the upload as one commit."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from ..modeling_lilicorr.checkpoint_files import read_tensors
from ..modeling_lilicorr.head_alone import FROZEN, check_settings, digest, without_heads
from ..modeling_lilicorr.layouts import read_checkpoint
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from ..modeling_lilicorr.repository import files_of, keeps_card, look_at, release, upload
from ..modeling_lilicorr.repository_files import CARD
from .card import LICENSE, model_card
from .hub_calls import hub_errors


@dataclass(frozen=True)
class CardFacts:
    """What a checkpoint does not know of itself, for its card; see `model_card`.

    Attributes:
        results: the `report.json` of `lilicorr evaluate` on this very checkpoint, or nothing.
    """

    license: str = LICENSE
    languages: Sequence[str] = ()
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()
    results: str = ""


@dataclass(frozen=True)
class Destination:
    """Where to publish: as `HfApi.create_repo` and `HfApi.create_commit` take them."""

    repo_id: str
    private: bool | None = None
    revision: str | None = None
    commit_message: str | None = None
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Backbone:
    """The DFlash checkpoint on the Hub that a head was trained on while it was frozen."""

    name: str
    revision: str | None = None
    local_files_only: bool = False


@contextmanager
def staged_repository(
    checkpoint: str | Path,
    repo_id: str,
    facts: CardFacts | None = None,
    max_shard_size: str = "5GB",
    backbone: Backbone | None = None,
) -> Iterator[dict[str, Path]]:
    """The files of the repository that a checkpoint makes, by their names there, in a folder that goes away afterwards.

    The checkpoint is loaded and so checked. Its card is kept if somebody wrote it. Of the Hub nothing but
    `backbone` is asked.

    Args:
        checkpoint: folder of a drafter, of which weights, configuration and card are read; its code is the release's.
        repo_id: for the card.
        max_shard_size: of one weight file.
        backbone: makes a repository of the head alone, which belongs to it.

    Raises:
        OSError: a file is missing.
        ValueError: see `LiLiCorrModel.from_pretrained`, `read_results` and `part_from`.
    """
    facts = facts or CardFacts()
    source = Path(checkpoint)
    drafter = LiLiCorrModel.from_pretrained(source)
    tensors = part_from(drafter, backbone) if backbone else None
    with tempfile.TemporaryDirectory(prefix="lilicorr-publish-") as folder:
        drafter.save_pretrained(folder, repo_id=repo_id, max_shard_size=max_shard_size, state_dict=tensors)
        write_card(drafter.config, source, Path(folder), repo_id, facts)
        yield files_of(Path(folder))


def part_from(drafter: LiLiCorrModel, backbone: Backbone) -> dict[str, Tensor]:
    """The tensors of a drafter's head, once its backbone is seen to be `backbone`; its configuration names that then.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the drafter has no head, or its backbone is another one.
    """
    prefix = f"{drafter.config.head_type}."
    state = drafter.state_dict()
    head = {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
    if not head:
        raise ValueError("This drafter has no head to publish alone; leave out --head-only.")
    try:
        settings, headers = read_checkpoint(backbone.name, backbone.revision, backbone.local_files_only)
    except LocalEntryNotFoundError:
        raise ValueError(
            f"The backbone {backbone.name} is not in the cache; fetch it once with `hf download {backbone.name}`."
        ) from None
    frozen = without_heads(headers)
    check_settings(drafter.config, settings, backbone.name)
    tensors = read_tensors(frozen)
    differing = [name for name in state.keys() - head.keys() if not _same(state[name], tensors.get(name))]
    differing += tensors.keys() - state.keys()
    if differing:
        raise ValueError(
            f"The drafter's backbone is not that of {backbone.name}: {len(differing)} of its tensors differ, first "
            f"{min(differing)!r}; leave out --head-only for one that was trained along."
        )
    commit = next(iter(frozen.values())).file.parent.name
    about = {"name": backbone.name, "revision": commit, "sha256": digest(tensors)}
    setattr(drafter.config, FROZEN, about)
    return head


def _same(ours: Tensor, theirs: Tensor | None) -> bool:
    """Whether values are equal, in whatever dtypes."""
    return theirs is not None and ours.shape == theirs.shape and bool((ours.float() == theirs.float()).all())


def write_card(config: Any, source: Path, folder: Path, repo_id: str, facts: CardFacts) -> None:
    """README.md of `folder`: that of `source` if somebody wrote it, else one of its own."""
    if keeps_card(source):
        (folder / CARD).write_bytes((source / CARD).read_bytes())
        return
    results: list[Any] = []
    if facts.results:
        from ..evaluation.machine import fingerprint
        from .results import read_results

        results = read_results(facts.results, fingerprint(source, None))
    text = model_card(
        config,
        repo_id,
        facts.tags,
        license=facts.license,
        languages=facts.languages,
        datasets=facts.datasets,
        results=results,
        release=release(),
    )
    (folder / CARD).write_text(text, "utf-8")


def check_destination(place: Destination) -> None:
    """Look at the repository before anything is loaded.

    Raises:
        ValueError: it holds something else than a drafter, is public but meant to be private, or cannot be looked at.
    """
    with hub_errors(place.repo_id, "looking at"):
        look_at(HfApi(library_name="lilicorr", token=place.token), place.repo_id, place.revision, place.private)


def send(files: dict[str, Path], place: Destination) -> Any:
    """Upload the files of `staged_repository` as one commit.

    Raises:
        ValueError: in one sentence, what the Hub refused or where the connection broke.
    """
    folder = files["config.json"].parent
    with hub_errors(place.repo_id, "uploading to"):
        return upload(
            folder,
            place.repo_id,
            token=place.token,
            private=place.private,
            revision=place.revision,
            commit_message=place.commit_message,
        )


def sizes(files: dict[str, Path]) -> dict[str, int]:
    """Bytes of each file by its name."""
    return {name: os.path.getsize(path) for name, path in files.items()}
