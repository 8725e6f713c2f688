"""A complete repository on disk and on the Hub: weights, configuration, the code that loads them, and a model card."""

import importlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..candidate_generator.custom_generate import generate as custom_generate
from .configuration_lilicorr import LiLiCorrConfig

AUTO_MAP = {"AutoConfig": "configuration_lilicorr.LiLiCorrConfig", "AutoModel": "modeling_lilicorr.LiLiCorrModel"}
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
COMMIT_ARGUMENTS = ("commit_message", "commit_description", "create_pr", "private", "revision", "token")
UPLOADED = ("*.safetensors", "*.json", "*.py", "README.md")


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


def flat_code() -> dict[str, str]:
    """File names and contents of the code that a checkpoint carries, all in one folder.

    Inside the package it is built from the rooms; code that itself came with a checkpoint passes itself on.
    """
    parent, _, room = (__package__ or "").rpartition(".")
    if room == "modeling_lilicorr":
        return importlib.import_module(f"{parent}.hub.bundle").build_bundle()
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
        if not (Path(folder) / "README.md").exists():
            (staging / "README.md").write_text(model_card(config, repo_id, tags), "utf-8")


def upload(
    folder: str | os.PathLike[str], repo_id: str, *, token: Any = None, private: bool | None = None, **commit: Any
):
    """Push the files of `folder` to the Hub as one commit; a model card that is already there stays.

    Args:
        folder: where `save_pretrained` wrote.
        repo_id: repository, created if need be.
        token, private: as in `HfApi.create_repo`.
        **commit: `commit_message`, `commit_description`, `revision`, `create_pr` of `HfApi.upload_folder`.

    Returns:
        The `CommitInfo` of the Hub.
    """
    api = HfApi(library_name="lilicorr", token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    revision = commit.get("revision")
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    keep_card = api.file_exists(repo_id, "README.md", revision=revision)
    commit["commit_message"] = commit.get("commit_message") or "Upload drafter"
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=os.fspath(folder),
        allow_patterns=list(UPLOADED),
        ignore_patterns=["README.md"] if keep_card else None,
        **commit,
    )
