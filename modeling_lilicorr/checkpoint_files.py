"""Reading checkpoints that may hold anything: JSON and safetensors in one folder, headers before tensors.

What a header promises is compared with what `config.json` calls for before a single tensor is read, so that a wrong
file costs neither memory nor time.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from .config_checks import shown

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = ("F64", "F32", "F16", "BF16")
FIRST = 1 << 26  # values of a tensor that are looked at in one go


@dataclass(frozen=True)
class Header:
    """What a file says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    name: str  # in that file


def local_folder(source: Any, subfolder: str = "") -> Path | None:
    """`source` as a folder on this machine, or `None` if it can only be a repository on the Hub.

    Raises:
        FileNotFoundError: it is neither: a file, or a path that no repository is named like.
    """
    path = Path(source)
    if path.is_dir():
        return path / subfolder
    name = os.fspath(source)
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith((".", "~")):
        raise FileNotFoundError(
            f"{name} is neither a folder nor the name of a repository on the Hub; give the folder of a checkpoint or "
            "owner/name."
        )
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is torn, or holds something else.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"{path.parent} has no {path.name}; is it a checkpoint?") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download or copy it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shown(content)}, expected a mapping; download or copy it again.")
    return content


def weight_files(
    source: str | Path, fetch: Callable[[str], Path | None] | None = None, variant: str | None = None
) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that its index names.

    Args:
        source: the folder they lie in; also how errors call the checkpoint.
        fetch: gives the path of a file by its name, or `None` if it is not there; without it, `source` is looked in.
        variant: as in Transformers, part of the files' names.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: the index is damaged, or names what is no safetensors file beside it.
    """

    def in_folder(name: str) -> Path | None:
        path = Path(source) / name
        return path if path.is_file() else None

    get = fetch or in_folder
    middle = f".{variant}" if variant else ""
    single, index = WEIGHTS.replace(".", f"{middle}.", 1), INDEX.replace(".index", f".index{middle}")
    whole = get(single)
    if whole is not None:
        return [whole]
    listed = get(index)
    if listed is None:
        raise FileNotFoundError(
            f"{source} has no {single}; drafters are stored as safetensors only, download or copy the checkpoint again."
        )
    names = read_json(listed).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"The index {listed} has no weight_map that names files; download or copy it again.")
    files = []
    for name in sorted(set(names.values())):
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise ValueError(
                f"The index {listed} names {shown(name)}, which points outside its folder or is no safetensors file; "
                "do not load it."
            )
        path = get(name)
        if path is None:
            raise FileNotFoundError(f"{source} has no {name}; download or copy the checkpoint again.")
        files.append(path)
    return files


def find_weights(source: Any, variant: str | None = None, subfolder: str = "", **options: Any) -> list[Path]:
    """The safetensors files of a checkpoint in a folder, or on the Hub, from where they are fetched.

    Args:
        source: folder, or `owner/name`.
        variant, subfolder: as in Transformers.
        **options: of `transformers.utils.cached_file`; nothing is asked of the Hub for a folder.

    Raises:
        OSError: a file is missing, or the Hub cannot be asked.
        ValueError: see `weight_files`.
    """
    folder = local_folder(source, subfolder)
    if folder is not None:
        return weight_files(folder, variant=variant)

    def fetch(name: str) -> Path | None:
        found = cached_file(source, name, subfolder=subfolder, _raise_exceptions_for_missing_entries=False, **options)
        return None if found is None else Path(found)

    return weight_files(source, fetch, variant)


def read_headers(files: Iterable[Path]) -> dict[str, Header]:
    """What the files say of their tensors, by name; no tensor is read.

    Raises:
        ValueError: a file is torn, two hold a tensor of the same name, or one is not of a floating-point type.
    """
    headers: dict[str, Header] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                entry = file.get_slice(name)
                header = Header(tuple(entry.get_shape()), entry.get_dtype(), path, name)
                if name in headers:
                    raise ValueError(
                        f"{headers[name].file.name} and {path.name} in {path.parent} both hold {shown(name)}; only one "
                        "of them belongs to this checkpoint."
                    )
                if header.dtype not in DTYPES:
                    raise ValueError(
                        f"{path} holds {shown(name)} as {header.dtype}, expected one of {', '.join(DTYPES)}; weights "
                        "of a drafter are real numbers."
                    )
                headers[name] = header
    return headers


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be read ({shown(reason)}); it is cut short or damaged, download or copy it again."
        ) from error


def read_tensors(headers: dict[str, Header]) -> dict[str, Tensor]:
    """The tensors of `read_headers`, on the CPU.

    Raises:
        ValueError: one holds NaN or infinite values: its drafter would draft nothing, without a word.
    """
    tensors: dict[str, Tensor] = {}
    for path in dict.fromkeys(header.file for header in headers.values()):
        with _opened(path) as file:
            for name in (name for name, header in headers.items() if header.file == path):
                tensors[name] = file.get_tensor(headers[name].name)
                if not _is_finite(tensors[name]):
                    raise ValueError(
                        f"{path} holds NaN or infinite values in {shown(name)}, with which nothing can be drafted; "
                        "take an earlier checkpoint of that training, or download or copy it again."
                    )
    return tensors


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are; without a copy of the tensor."""
    for part in tensor.flatten().split(FIRST):
        if part.numel() and not all(bool(bound.isfinite()) for bound in part.aminmax()):
            return False
    return True


def headers_of(tensors: dict[str, Tensor]) -> dict[str, Header]:
    """Headers of tensors that are in memory already."""
    return {name: Header(tuple(tensor.shape), str(tensor.dtype), Path(), name) for name, tensor in tensors.items()}


def restore_dtypes(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give each parameter back the dtype that its file has it in, after all were loaded in their common one."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != tensors[name].dtype:
            parameter.data = parameter.data.to(tensors[name].dtype)


def common_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The narrowest dtype that keeps the value of every tensor."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))


def check_headers(
    headers: dict[str, Header], model: Callable[[Any], nn.Module], config: Any, source: object, fresh: str | None = None
) -> None:
    """Compare what a checkpoint holds with what its configuration calls for.

    Args:
        headers: of `read_headers`.
        model: the class of what the tensors are meant for; one is built without memory, on the meta device.
        config: the drafter's, which `validate` has passed.
        source: how to call the checkpoint in an error.
        fresh: prefix of parameters that the checkpoint need not have.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape.
    """
    head_layers = 0 if fresh else config.head_config.get("num_layers", 0)
    num_layers = config.num_hidden_layers + head_layers
    if num_layers > len(headers):  # each layer has several tensors: do not even build them without memory
        raise ValueError(
            f"{source} holds {len(headers)} tensors, but its config.json calls for {num_layers} layers; the checkpoint "
            "is incomplete or its config.json belongs to another one."
        )
    with torch.device("meta"):
        state = model(config).state_dict()
    expected = {
        name: tuple(tensor.shape) for name, tensor in state.items() if fresh is None or not name.startswith(fresh)
    }
    explain(
        source,
        missing=expected.keys() - headers.keys(),
        unexpected=headers.keys() - expected.keys(),
        mismatched=[
            (name, headers[name].shape, shape)
            for name, shape in expected.items()
            if name in headers and headers[name].shape != shape
        ],
    )


def explain(source: object, missing: Any, unexpected: Any, mismatched: Any) -> None:
    """Raise a `ValueError` that says what is wrong with a checkpoint's tensors, if anything is.

    `missing` and `unexpected` hold names; `mismatched` holds (name, shape found, shape expected).
    """
    if missing:
        raise ValueError(
            f"{source} lacks {len(missing)} of the tensors its config.json calls for, first {min(missing)!r}; "
            "the checkpoint is incomplete or its config.json belongs to another one."
        )
    if unexpected:
        raise ValueError(
            f"{source} holds {len(unexpected)} tensors its config.json does not call for, first "
            f"{shown(min(unexpected))}; dropping them would make another drafter than the one that was trained."
        )
    if mismatched:
        name, found, expected = min(mismatched, key=lambda entry: entry[0])
        raise ValueError(
            f"{source} holds {name!r} in shape {list(found)}, its config.json calls for {list(expected)}; "
            "weights and config.json belong to different drafters."
        )
