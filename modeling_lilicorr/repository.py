"""A complete repository on disk and on the Hub: weights, configuration, the code that loads them, and a model card."""

import importlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from ..candidate_generator.custom_generate import generate as custom_generate
from .checkpoint_files import CONFIG
from .config_checks import shown
from .configuration_lilicorr import LiLiCorrConfig
from .repository_files import AUTO_MAP, BARE, CARD, CARD_MARK, UPLOADED, WEIGHT_FILES, is_drafter

COMMIT_ARGUMENTS = ("commit_message", "commit_description", "create_pr", "private", "revision", "token")


@contextmanager
def staged(folder: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder whose files move into `folder` once they are all written, so that a killed save tears nothing.

    Weight files of an earlier save that the new one does not replace are removed.

    Raises:
        NotADirectoryError: if `folder` is a file.
    """
    folder = Path(folder)
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; give the name of a folder to save to.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        yield Path(temporary)
        written = sorted(os.path.relpath(path, temporary) for path in Path(temporary).rglob("*") if path.is_file())
        for name in written:
            (folder / name).parent.mkdir(exist_ok=True)
            os.replace(os.path.join(temporary, name), folder / name)
    if any(WEIGHT_FILES.fullmatch(name) for name in written):
        for path in folder.iterdir():
            if WEIGHT_FILES.fullmatch(path.name) and path.name not in written:
                path.unlink()


def _package() -> str | None:
    """The package's name, or `None` in code that came with a checkpoint."""
    parent, _, room = (__package__ or "").rpartition(".")
    return parent if room == "modeling_lilicorr" else None


def release() -> str | None:
    """Which release of the package this is; code that came with a checkpoint cannot tell."""
    package = _package()
    return f"lilicorr {importlib.import_module(package).__version__}" if package else None


def flat_code() -> dict[str, str]:
    """File names and contents of the code that a checkpoint carries, all in one folder.

    Inside the package it is built from the rooms; code that itself came with a checkpoint passes itself on.
    """
    if package := _package():
        return importlib.import_module(f"{package}.hub.bundle").build_bundle()
    here = Path(__file__).parent
    return {path.name: path.read_text("utf-8") for path in here.glob("*.py") if path.name != "__init__.py"}


def save_repository(
    config: LiLiCorrConfig,
    folder: str | os.PathLike,
    save_weights: Callable[..., None],
    repo_id: str | None,
    tags: Iterable[str],
    state_dict: Any,
    **options: Any,
) -> None:
    """Write what `save_weights` writes, the code, and a model card unless `folder` has one.

    Args:
        config: the drafter's; its `auto_map` is set to the files beside it.
        folder: where to.
        save_weights: `PreTrainedModel.save_pretrained`, called as `save_weights(folder, state_dict=..., **options)`.
        repo_id, tags: for the model card.
        state_dict: tensors to write instead of the model's own, or `None`.
        **options: passed on.
    """
    from ..hub.card import model_card  # the card travels with the checkpoint; nothing of it is needed to load

    with staged(folder) as staging:
        config.auto_map = dict(AUTO_MAP)
        save_weights(staging, state_dict=state_dict, **options)
        for name, text in flat_code().items():
            (staging / name).write_text(text, "utf-8")
        (staging / "custom_generate").mkdir()
        source = inspect.getsource(inspect.getmodule(custom_generate))  # type: ignore[arg-type]
        (staging / "custom_generate" / "generate.py").write_text(source, "utf-8")
        if not keeps_card(Path(folder)):
            (staging / CARD).write_text(model_card(config, repo_id, tags, release=release()), "utf-8")


def keeps_card(folder: Path) -> bool:
    """Whether `folder` has a model card that somebody wrote: such a one is never replaced."""
    card = folder / CARD
    return card.is_file() and CARD_MARK not in card.read_text("utf-8", "replace")


def look_at(api: HfApi, repo_id: str, revision: str | None, private: bool | None) -> tuple[set[str], str]:
    """The names of the files of a repository, and its model card; nothing if there is no such repository.

    Args:
        api: to ask the Hub with.
        revision: branch to look at; one that is not there yet begins as `main` is.
        private: whether it is meant to be private.

    Raises:
        ValueError: it holds something else than a drafter, or is public but meant to be private.
    """
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return set(), ""
    if private and not info.private:
        raise ValueError(
            f"{repo_id} is there already and is public; make it private in its settings, or leave private out."
        )
    try:
        files = set(api.list_repo_files(repo_id, revision=revision))
    except RevisionNotFoundError:
        revision = None
        files = set(api.list_repo_files(repo_id))

    def text(name: str) -> str:
        if name not in files:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            return Path(api.hf_hub_download(repo_id, name, revision=revision, local_dir=folder)).read_text("utf-8")

    try:
        settings = json.loads(text(CONFIG) or "null")
    except (ValueError, RecursionError):
        settings = None
    if not is_drafter(settings) and not files.issubset(BARE):
        kind = settings.get("model_type") if isinstance(settings, dict) else None
        found = f"a model of type {shown(kind)}" if kind else f"{min(files.difference(BARE))} and no drafter's {CONFIG}"
        raise ValueError(f"{repo_id} holds something else than a drafter ({found}); name another repository.")
    return files, text(CARD)


def upload(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: Any = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    **commit: Any,
) -> Any:
    """Push the files of `folder` to the Hub as one commit; a model card of somebody's own that is there stays.

    Weight files of an earlier upload that this one does not replace are removed, for they would be loaded. What
    arrived before a connection broke is not sent again.

    Args:
        folder: where `save_pretrained` wrote.
        repo_id: repository, created if need be.
        token, private: as in `HfApi.create_repo`.
        revision: branch, created if need be.
        commit_message, **commit: also `commit_description` and `create_pr`, of `HfApi.create_commit`.

    Returns:
        The `CommitInfo` of the Hub.

    Raises:
        ValueError: the repository holds something else than a drafter, or is public but meant to be private.
    """
    api = HfApi(library_name="lilicorr", token=token)
    held, card = look_at(api, repo_id, revision, private)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    files = files_of(Path(folder))
    if card and CARD_MARK not in card:
        files.pop(CARD, None)
    stale = sorted(name for name in held.difference(files) if WEIGHT_FILES.fullmatch(name))
    return api.create_commit(
        repo_id,
        [
            *(CommitOperationDelete(name) for name in stale),
            *(CommitOperationAdd(name, path) for name, path in files.items()),
        ],
        commit_message=commit_message or "Upload drafter",
        revision=revision,
        **commit,
    )


def files_of(folder: Path) -> dict[str, Path]:
    """The files of `folder` that belong to a repository, by their names there."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: folder / name for name in filter_repo_objects(found, allow_patterns=list(UPLOADED))}
