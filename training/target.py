"""The frozen target's side of training: its hidden states, computed on the spot or kept on disk."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..hub.precision import torch_dtype
from ..hub.sources import check_models, check_tokenizer_files
from .checkpoint import size_said
from .data import Batch, Example

# What Transformers raises for files that are missing, torn or of another kind, wrong settings, tensors of other sizes,
# and packages that are needed.
UNLOADABLE = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a weight


def load_target(source: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in evaluation mode on the CPU, with its tokenizer.

    Raises:
        ValueError: for an unknown dtype, or if `source` cannot be loaded.
    """
    kind = torch_dtype(dtype)
    check_models(source, [])
    try:
        check_tokenizer_files(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        return AutoModelForCausalLM.from_pretrained(source, dtype=kind).eval(), tokenizer
    except UNLOADABLE as error:
        missing = "" if Path(source).exists() else "there is no such folder, and as a repository: "
        raise ValueError(f"The target {source} could not be loaded: {missing}{' '.join(str(error).split())}") from error


@torch.no_grad()
def target_pass(target: PreTrainedModel, input_ids: Tensor, layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of `input_ids [batch, S]`: hidden states `[batch, S, layers * d]`, normed last ones `[batch, S, d]`."""
    states = target.base_model(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i + 1] for i in layer_ids], dim=-1), states[-1]


class TargetStates:
    """States of training sequences; with a folder each sequence is run once and read back (bf16) ever after.

    Args:
        target: frozen; layer_ids: the layers whose outputs are wanted.
        folder: where to keep states, `2 * (layers + 1) * d` bytes a token, or `None` to run the target every time.

    Raises:
        ValueError: if the folder holds the states of another target or of other layers.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int], folder: Path | None) -> None:
        self.target, self.layer_ids, self.folder = target, list(layer_ids), folder
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        manifest, described = folder / "manifest.json", self._describe()
        if not manifest.exists():
            manifest.write_text(json.dumps(described))
        elif not _holds(manifest, described):
            raise ValueError(f"{folder} keeps the states of another target or of other layers; choose another folder.")

    def __call__(self, examples: Sequence[Example], batch: Batch) -> tuple[Tensor, Tensor]:
        """As `target_pass`, of `batch`, collated from `examples`."""
        if self.folder is None:
            return target_pass(self.target, batch.input_ids.to(self.target.device), self.layer_ids)
        rows = [self._kept(example.input_ids) for example in examples]
        target_hidden, last = (pad_sequence(list(states), batch_first=True) for states in zip(*rows, strict=True))
        return target_hidden, last

    def plan(self, sequences: Sequence[list[int]]) -> str:
        """One sentence on what keeping the states of `sequences` (token ids) takes on disk, for before it starts.

        Raises:
            ValueError: if the disk has no room for those that are missing.
        """
        assert self.folder is not None
        width = len(self.layer_ids) * self.target.config.get_text_config().hidden_size
        a_token = 2 * (width + self.target.config.get_text_config().hidden_size)
        missing = [len(ids) for ids in sequences if not self._path(ids).exists()]
        size, free = a_token * sum(missing), shutil.disk_usage(self.folder).free
        if size > free:
            raise ValueError(
                f"The states of {len(missing)} sequences need {size_said(size)} in {self.folder}, which has "
                f"{size_said(free)} free; make room, use fewer sequences, or run the target at every step instead."
            )
        kept = len(sequences) - len(missing)
        return f"target states: {kept} of {len(sequences)} sequences kept, {size_said(size)} to come"

    def _path(self, ids: list[int]) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(repr(ids).encode()).hexdigest()[:24]}.safetensors"

    def _kept(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        device, dtype = self.target.device, self.target.dtype
        path = self._path(ids)
        if path.exists():
            try:
                states = load_file(path)
                return states["taps"].to(device, dtype), states["last"].to(device, dtype)
            except (SafetensorError, KeyError):
                pass  # torn: the target runs once more and the file is replaced
        target_hidden, last = (
            x[0] for x in target_pass(self.target, torch.tensor([ids], device=device), self.layer_ids)
        )
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({"taps": target_hidden.bfloat16().contiguous(), "last": last.bfloat16().contiguous()}, unfinished)
        os.replace(unfinished, path)
        return target_hidden.bfloat16().to(dtype), last.bfloat16().to(dtype)

    def _describe(self) -> dict[str, Any]:
        """The layers, and what tells the target from another: numbers of its LM head and a digest of all weights."""
        head, digest = self.target.get_output_embeddings().weight, hashlib.sha256()
        for weights in self.target.parameters():
            bits = weights.detach().contiguous().view(INTEGERS[weights.element_size()])
            digest.update(f"{bits.sum(dtype=torch.int64).item()}\n".encode())  # exact, so the same on every device
        return {
            "layer_ids": self.layer_ids,
            "shape": list(head.shape),
            "probe": head[-1, :8].float().tolist(),
            "weights": digest.hexdigest()[:16],
        }


def _holds(manifest: Path, described: dict[str, Any]) -> bool:
    """Whether `manifest` says the same, as far as it goes: an older one has no `weights`."""
    try:
        held = json.loads(manifest.read_text("utf-8"))
    except ValueError:
        return False
    return isinstance(held, dict) and {"weights": described["weights"]} | held == described
